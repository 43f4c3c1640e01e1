//! The command line.

use std::{fs, path::PathBuf, time::Duration};

use clap::{Parser, ValueEnum};

use crate::{
    pb::allocation::Policy,
    setting::{Demand, Key, Setting, windows},
    trace::{self, Request},
};

/// Replays a trace of requests to a language model against a running quota-share.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// CSV file of arrival time, prompt tokens and generated tokens.
    trace: PathBuf,

    /// Where the service listens.
    #[arg(long, default_value = "http://127.0.0.1:50051")]
    pub(crate) server: String,

    /// How many times as fast as it happened: at 60 an hour takes a minute.
    #[arg(long, default_value_t = 60.0, value_parser = above_zero)]
    pub(crate) speed: f64,

    /// Window of the limit, in the time of the replay, such as 10s, 1m, 1h.
    #[arg(long, default_value = "1m", value_parser = window)]
    window: Duration,

    /// How many keys send the requests.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    keys: u16,

    /// Weight of each key in per cent, comma-separated; equal if absent.
    #[arg(long, value_delimiter = ',', value_parser = above_zero)]
    weights: Vec<f64>,

    /// Policy of all keys, or of each key, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "hard")]
    policy: Vec<PolicyName>,

    /// Who sends the requests, which the trace does not say.
    #[arg(long, default_value = "round-robin")]
    pub(crate) demand: Demand,

    /// Of the chance in `uniform` and `zipf`.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Limit of tokens in a window, as a fraction of what is asked in one on average.
    #[arg(long, default_value_t = 0.5, value_parser = above_zero)]
    limit_fraction: f64,

    /// Limit of tokens in a window.
    #[arg(long, conflicts_with = "limit_fraction", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,

    /// Replay only the first so many requests.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    limit_requests: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PolicyName {
    Hard,
    Soft,
    Burst,
}

impl From<PolicyName> for Policy {
    fn from(name: PolicyName) -> Self {
        match name {
            PolicyName::Hard => Self::Hard,
            PolicyName::Soft => Self::Soft,
            PolicyName::Burst => Self::Burst,
        }
    }
}

impl Args {
    pub(crate) fn requests(&self) -> Result<Vec<Request>, String> {
        let path = self.trace.display();
        let text = fs::read_to_string(&self.trace).map_err(|error| format!("{path}: {error}"))?;
        let mut requests = trace::parse(&text).map_err(|mistake| format!("{path}: {mistake}"))?;
        requests.truncate(self.limit_requests.map_or(usize::MAX, |limit| limit as usize));
        Ok(requests)
    }

    /// What the service is told, under names that nobody else uses, and how many windows the replay has.
    pub(crate) fn setting(&self, requests: &[Request]) -> Result<(Setting, f64), String> {
        let length = requests.last().map_or(Duration::ZERO, |last| last.at.div_f64(self.speed));
        let windows = windows(length, self.window);
        let demand: u64 = requests.iter().map(Request::cost).sum();
        let fraction = || (demand as f64 / windows * self.limit_fraction).ceil() as u64;
        let setting = Setting {
            id: format!("replay-{:08x}", rand::random::<u32>()),
            keys: self.pool_keys()?,
            limit: self.limit.unwrap_or_else(fraction),
            window: self.window,
        };
        Ok((setting, windows))
    }

    fn pool_keys(&self) -> Result<Vec<Key>, String> {
        let keys = usize::from(self.keys);
        // Rounded down to what a weight is kept to, so that all together are not above 100.
        let equal = (100e6 / keys as f64).floor() / 1e6;
        let weights = for_each_key("--weights", &self.weights, keys, equal)?;
        let policies = for_each_key("--policy", &self.policy, keys, PolicyName::Hard)?;
        let key = |(n, (weight, policy)): (usize, (f64, PolicyName))| Key {
            name: format!("key-{:02}", n + 1),
            weight,
            policy: policy.into(),
        };
        Ok(weights.into_iter().zip(policies).enumerate().map(key).collect())
    }
}

/// One value for all keys or one for each.
fn for_each_key<T: Copy>(option: &str, values: &[T], keys: usize, default: T) -> Result<Vec<T>, String> {
    match values {
        [] => Ok(vec![default; keys]),
        [all] => Ok(vec![*all; keys]),
        each if each.len() == keys => Ok(each.to_vec()),
        some => Err(format!("{option} has {} values for {keys} keys: give one, or one for each", some.len())),
    }
}

fn above_zero(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0).ok_or("use a number above 0")
}

fn window(text: &str) -> Result<Duration, &'static str> {
    let mistake = "use a whole number of seconds, minutes or hours, such as 10s, 1m, 1h";
    let unit = text.chars().next_back().ok_or(mistake)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        _ => return Err(mistake),
    };
    let number: u32 = text[..text.len() - 1].parse().map_err(|_| mistake)?;
    if number == 0 { Err(mistake) } else { Ok(Duration::from_secs(u64::from(number) * seconds)) }
}
