//! A verdict in one sentence, for people who were refused: whose limit it was, with numbers.

use super::local_shares::Local;
use crate::core::{
    admission::{BlockReason, Level, Reading, Verdict},
    charge::{Charge, Check},
    pool::{FailureMode, Pool},
    units::Unit,
};

/// One sentence about `verdict`; empty if the request is allowed at its usual rank.
pub(super) fn message(pool: &Pool, charge: &Charge, reading: &Reading, verdict: &Verdict) -> String {
    let blocked = verdict.blocked_by.and_then(|index| Some((index, verdict.findings[index].block?)));
    if let Some((index, reason)) = blocked {
        let sentence = Sentence::new(pool, charge, reading, index);
        return format!("{}{}.", sentence.refusal(reason), wait(verdict.retry_after_ms[index]));
    }
    let Some(index) = verdict.findings.iter().position(|finding| finding.deprioritize) else {
        return String::new();
    };
    let sentence = Sentence::new(pool, charge, reading, index);
    format!("{}: allowed under the policy SOFT, at a lower rank.", sentence.refusal(BlockReason::FairShare))
}

/// Why a request is blocked although its pool's counters could not be reached; `None` if it is allowed.
pub(super) fn refusal_by_failure_mode(
    pool: &Pool,
    charge: &Charge,
    local: impl FnOnce() -> Local,
) -> Option<String> {
    let unread = unread(pool);
    match pool.failure_mode {
        // Whatever the counters hold.
        _ if charge.terms.exempt => None,
        FailureMode::FailOpen => None,
        FailureMode::FailClosed => {
            Some(format!("{unread}, and its failure mode FAIL_CLOSED blocks until they can."))
        }
        FailureMode::FailLocal => {
            let why = match local() {
                Local::Admits => return None,
                Local::UsedUp => "this replica's part of what was left is used up",
                Local::Unknown => "this replica has not heard of them since it started",
            };
            Some(format!("{unread}, and by its failure mode FAIL_LOCAL it blocks until they can: {why}."))
        }
    }
}

/// Why a request is allowed although its pool's counters could not be reached.
pub(super) fn allowed_unread(pool: &Pool, charge: &Charge) -> String {
    let unread = unread(pool);
    if charge.shadow {
        format!("{unread}: allowed, since the pool is in SHADOW.")
    } else if charge.terms.exempt {
        format!("{unread}: allowed, since key {} is exempt.", charge.api_key)
    } else {
        let mode = pool.failure_mode.name();
        format!("{unread}: allowed by its failure mode {mode}.")
    }
}

fn unread(pool: &Pool) -> String {
    format!("the shared counters of pool {:?} could not be reached", pool.name)
}

struct Sentence<'a> {
    pool: &'a Pool,
    charge: &'a Charge,
    check: &'a Check,
    level: Level,
}

impl<'a> Sentence<'a> {
    fn new(pool: &'a Pool, charge: &'a Charge, reading: &Reading, index: usize) -> Self {
        let check = &charge.checks[index];
        let level = check.level(&reading.counters[index], reading.at);
        Self { pool, charge, check, level }
    }

    fn refusal(&self, reason: BlockReason) -> String {
        let (pool, key) = (&self.pool.name, &self.charge.api_key);
        let bounds = &self.check.bounds;
        let dimension = self.check.counter.dimension;
        let used = self.check.used(&self.level);
        match reason {
            BlockReason::ExceedsLimit => {
                let least = [bounds.per_connection, bounds.limit, bounds.cap].into_iter().flatten();
                let least = least.fold(f64::INFINITY, f64::min);
                let whose = if bounds.cap == Some(least) { "the cap of key" } else { "the limit for key" };
                format!(
                    "this request is expected to use {} {}, more than {whose} {key} in pool {pool:?} can ever be: {}",
                    self.amount(self.check.estimate.as_f64()),
                    dimension,
                    self.amount(least),
                )
            }
            BlockReason::CapAbsolute => {
                format!(
                    "key {key} has {} in pool {pool:?}{}",
                    self.used_of(used.key, bounds.cap, "cap"),
                    self.asks()
                )
            }
            BlockReason::ModelCap => {
                let model = self.check.counter.model.as_ref().map_or("", |model| model.as_str());
                let used = self.used_of(used.key, bounds.cap, "cap");
                format!("key {key} has {used} for model {model} in pool {pool:?}{}", self.asks())
            }
            BlockReason::GlobalSaturated => {
                let outside = match used.external {
                    0.0 => String::new(),
                    external => format!(", {} of it outside of this service", self.amount(external)),
                };
                let used = self.used_of(used.pool, bounds.limit, "limit");
                format!("pool {pool:?} has {used}{outside}{}", self.asks())
            }
            BlockReason::ConnectionSaturated => format!(
                "the provider says that connection {} of pool {pool:?} has used all of its {dimension}",
                self.charge.serving,
            ),
            BlockReason::FairShare => format!(
                "key {key} has {} in pool {pool:?}, which holds keys to their shares with {} of {} used{}",
                self.used_of(used.key, bounds.fair_share, "fair share"),
                self.amount(used.pool),
                self.amount(bounds.limit.unwrap_or_default()),
                self.asks(),
            ),
        }
    }

    fn used_of(&self, used: f64, bound: Option<f64>, what: &str) -> String {
        let bound = self.amount(bound.unwrap_or_default());
        format!("used {} of its {what} of {bound} {}", self.amount(used), self.check.counter.dimension)
    }

    fn asks(&self) -> String {
        match self.check.estimate.as_f64() {
            0.0 => String::new(),
            estimate => format!(" and this request is expected to use {}", self.amount(estimate)),
        }
    }

    /// Steps in the unit, without the noise of the last binary digits.
    fn amount(&self, steps: f64) -> String {
        let unit: Unit = self.check.counter.dimension.unit;
        let value = (unit.from_steps(steps) * 1e6).round() / 1e6;
        value.to_string()
    }
}

fn wait(retry_after_ms: Option<u64>) -> String {
    match retry_after_ms {
        None => "; no wait will help".to_owned(),
        Some(ms) => {
            let seconds = ms.div_ceil(1_000);
            let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
            let parts = [(hours, "h"), (minutes, "min"), (seconds, "s")];
            let parts = parts.into_iter().filter(|(n, _)| *n > 0).map(|(n, unit)| format!("{n} {unit}"));
            format!("; try again in {}", parts.collect::<Vec<_>>().join(" "))
        }
    }
}
