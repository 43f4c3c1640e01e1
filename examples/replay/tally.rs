//! What came of a replay, key by key, and how fair and how full that was.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Display, Formatter},
    ops::AddAssign,
};

use super::{
    pb::{self, dimension_status::Reason, enforce_response::Decision},
    setting::{Key, Setting},
};

/// Requests, and the tokens that they cost or would have cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.tokens += other.tokens;
    }
}

/// What one key asked, and what was answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answers {
    pub(crate) asked: Count,
    pub(crate) admitted: Count,
    /// Of those admitted: with a lower rank.
    pub(crate) deprioritized: u64,
    pub(crate) blocked: BTreeMap<Reason, u64>,
}

impl Answers {
    fn add(&mut self, other: &Self) {
        self.asked += other.asked;
        self.admitted += other.admitted;
        self.deprioritized += other.deprioritized;
        for (reason, requests) in &other.blocked {
            *self.blocked.entry(*reason).or_default() += requests;
        }
    }
}

/// The answers to every key of a setting.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    pub(crate) keys: Vec<Answers>,
    setting: Setting,
    windows: f64,
}

impl Tally {
    /// Of nothing yet, in a replay of that many windows.
    pub(crate) fn new(setting: &Setting, windows: f64) -> Self {
        Self { keys: vec![Answers::default(); setting.keys.len()], setting: setting.clone(), windows }
    }

    /// Counts the answer to a request that costs `tokens`.
    pub(crate) fn count(&mut self, key: usize, tokens: u64, answer: &pb::EnforceResponse) {
        let one = Count { requests: 1, tokens };
        let answers = &mut self.keys[key];
        answers.asked += one;
        if answer.decision() == Decision::Block {
            *answers.blocked.entry(answer.reason()).or_default() += 1;
            return;
        }
        answers.admitted += one;
        answers.deprioritized += u64::from(answer.deprioritize);
    }

    pub(crate) fn total(&self) -> Answers {
        let mut total = Answers::default();
        self.keys.iter().for_each(|answers| total.add(answers));
        total
    }

    /// The tokens that were admitted, of those that the limit allows in so many windows.
    pub(crate) fn utilisation(&self) -> f64 {
        self.total().admitted.tokens as f64 / (self.setting.limit as f64 * self.windows)
    }

    /// Of each key, the tokens that were admitted, as a fraction of its fair share of that many windows.
    pub(crate) fn of_fair_share(&self) -> Vec<f64> {
        let share = |key: &Key| key.weight / 100.0 * self.setting.limit as f64 * self.windows;
        let keys = self.setting.keys.iter().zip(&self.keys);
        keys.map(|(key, answers)| answers.admitted.tokens as f64 / share(key)).collect()
    }

    /// Jain's index of what each key was admitted of its fair share: 1 if all got the same, 1/n if one got everything.
    pub(crate) fn jain(&self) -> f64 {
        let parts = self.of_fair_share();
        let squares: f64 = parts.iter().map(|part| part * part).sum();
        if squares == 0.0 { 1.0 } else { parts.iter().sum::<f64>().powi(2) / (parts.len() as f64 * squares) }
    }
}

/// A table by key, and below it the whole.
impl Display for Tally {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let total = self.total();
        let columns = Columns {
            deprioritized: total.deprioritized > 0,
            reasons: total.blocked.keys().copied().collect(),
        };
        columns.write_head(f)?;
        let keys = self.setting.keys.iter().zip(&self.keys).zip(self.of_fair_share());
        for ((key, answers), part) in keys {
            write!(f, "{:<7}{:>6.2} {:<6}", key.name, key.weight, key.policy.as_str_name())?;
            columns.write_answers(f, answers, part)?;
        }
        let weight: f64 = self.setting.keys.iter().map(|key| key.weight).sum();
        write!(f, "{:<7}{weight:>6.2} {:<6}", "all", "")?;
        columns.write_answers(f, &total, self.utilisation() / (weight / 100.0))?;
        let (limit, window) = (thousands(self.setting.limit), self.setting.window.as_secs());
        write!(f, "\nlimit {limit} tokens in {window} s, for {:.2} windows: ", self.windows)?;
        write!(f, "utilisation {:.1} %, ", self.utilisation() * 100.0)?;
        write!(f, "Jain's index of admitted / fair share {:.4}", self.jain())
    }
}

/// The columns that not every table has.
struct Columns {
    deprioritized: bool,
    reasons: BTreeSet<Reason>,
}

impl Columns {
    fn write_head(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:<7}{:>6} {:<6}{:>6}{:>10}", "key", "weight", "policy", "asked", "admitted")?;
        if self.deprioritized {
            write!(f, "{:>15}", "deprioritized")?;
        }
        self.reasons.iter().try_for_each(|reason| write!(f, "{:>18}", reason.as_str_name()))?;
        writeln!(f, "{:>14}{:>17}{:>15}", "tokens asked", "tokens admitted", "of fair share")
    }

    fn write_answers(&self, f: &mut Formatter<'_>, answers: &Answers, part: f64) -> fmt::Result {
        let Answers { asked, admitted, deprioritized, blocked } = answers;
        write!(f, "{:>6}{:>10}", asked.requests, admitted.requests)?;
        if self.deprioritized {
            write!(f, "{deprioritized:>15}")?;
        }
        let by = |reason| blocked.get(reason).copied().unwrap_or_default();
        self.reasons.iter().try_for_each(|reason| write!(f, "{:>18}", by(reason)))?;
        let (asked, admitted) = (thousands(asked.tokens), thousands(admitted.tokens));
        writeln!(f, "{asked:>14}{admitted:>17}{:>13.1} %", part * 100.0)
    }
}

fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
