//! The rule: is a request allowed, given what the counters hold? The one definition in Rust; Enforce, PreviewDecision,
//! usage and shadow mode all come here.

use super::{
    charge::{Bounds, Charge, Check, PerCheck, Terms},
    ids::ReservationId,
    pool::Policy,
    retry_after,
    units::{Timestamp, Unit},
    window::{SlidingCounter, Window},
};

/// Why a check does not pass: the first that holds, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockReason {
    /// The estimate is larger than the limit or the cap itself.
    ExceedsLimit,
    /// The key's absolute cap.
    CapAbsolute,
    /// The key's cap for this model.
    ModelCap,
    /// The pool's own limit.
    GlobalSaturated,
    /// The key has used its fair share and the pool is in strict mode.
    FairShare,
}

/// Whether idle shares may be borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Below the threshold: they may.
    Generous,
    /// At or above it: every key is held to its share.
    Strict,
}

/// A counter and what is held on it, in steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// What was recorded.
    pub consumed: SlidingCounter,
    /// What requests in flight hold.
    pub reserved: u64,
}

/// What the counters of one check hold: the key's own and, for a dimension of the plan, the pool's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The key's.
    pub key: Counter,
    /// The pool's total; nothing for a model cap.
    pub pool: Counter,
}

/// Holds that end together: how much less is reserved from `deadline` on, for each check `(by the key, by the pool)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// From when on.
    pub deadline: Timestamp,
    /// One for each check.
    pub held: PerCheck<(u64, u64)>,
}

/// All that a decision needs of a pool's state at one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The instant of the decision, by the ledger's clock.
    pub at: Timestamp,
    /// One for each check.
    pub counters: PerCheck<Counters>,
    /// What open reservations give back, by deadline; filled only where the charge is blocked.
    pub releases: Vec<Release>,
}

/// What one check sees, in steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Level {
    /// Recorded for the key in the window.
    pub key_consumed: f64,
    /// Held by the key.
    pub key_reserved: f64,
    /// Recorded for the pool in the window.
    pub pool_consumed: f64,
    /// Held by the pool.
    pub pool_reserved: f64,
}

/// What the rule compares with the bounds, in steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Used {
    /// uk: by this key.
    pub key: f64,
    /// ut: by the pool.
    pub pool: f64,
    /// s: the used fraction of the limit; `None` where the limit is not known, or nothing is known of a PERCENT dimension.
    pub fraction: Option<f64>,
}

/// What the rule says of one check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finding {
    /// Why it does not pass; `None`: it does.
    pub block: Option<BlockReason>,
    /// `None` where the limit is not known.
    pub mode: Option<Mode>,
    /// Allowed past the fair share in strict mode under [`Policy::Soft`].
    pub deprioritize: bool,
    /// The key is above its fair share.
    pub borrowing: bool,
    /// The largest estimate, in steps, that would be allowed now; `None`: nothing known bounds it.
    pub remaining: Option<f64>,
}

impl Counter {
    fn consumed_at(&self, window: Window, at: Timestamp) -> f64 {
        self.consumed.at(window, at)
    }
}

impl Counters {
    /// What is seen at `at` while nothing that is held has ended.
    pub fn level(&self, window: Window, at: Timestamp) -> Level {
        self.level_after(window, at, (0, 0))
    }

    /// What is seen at `at` after `(by the key, by the pool)` of what is held has ended.
    pub(super) fn level_after(&self, window: Window, at: Timestamp, ended: (u64, u64)) -> Level {
        Level {
            key_consumed: self.key.consumed_at(window, at),
            key_reserved: self.key.reserved.saturating_sub(ended.0) as f64,
            pool_consumed: self.pool.consumed_at(window, at),
            pool_reserved: self.pool.reserved.saturating_sub(ended.1) as f64,
        }
    }
}

impl Used {
    /// What `level` means to `check`.
    pub fn of(check: &Check, level: &Level) -> Used {
        let pool = level.pool_consumed + level.pool_reserved;
        let fraction = used_fraction(check.counter.dimension.unit, check.bounds.limit, pool);
        Used { key: level.key_consumed + level.key_reserved, pool, fraction }
    }
}

/// s: the used fraction of `limit`; `None` where it is not known, or nothing is known of a PERCENT dimension.
pub fn used_fraction(unit: Unit, limit: Option<f64>, used: f64) -> Option<f64> {
    let unknown = unit == Unit::Percent && used == 0.0;
    limit.filter(|_| !unknown).map(|limit| used / limit)
}

/// The mode of a dimension whose limit is known.
pub fn mode(fraction: Option<f64>, threshold: f64) -> Mode {
    if fraction.is_some_and(|fraction| fraction >= threshold) { Mode::Strict } else { Mode::Generous }
}

/// Judges one check. `estimate` and `bounds` are in steps.
///
/// An exempt key passes always; what is shown of it has no share and no remainder.
pub fn judge(bounds: &Bounds, model_cap: bool, estimate: f64, terms: &Terms, used: &Used) -> Finding {
    let mode = bounds.limit.map(|_| mode(used.fraction, terms.threshold));
    let strict = mode == Some(Mode::Strict);
    if terms.exempt {
        return Finding { block: None, mode, deprioritize: false, borrowing: false, remaining: None };
    }
    let past_share = strict && bounds.fair_share.is_some_and(|share| reaches(used.key, estimate, share));
    let block = if exceeds(estimate, bounds.per_connection)
        || exceeds(estimate, bounds.limit)
        || exceeds(estimate, bounds.cap)
    {
        Some(BlockReason::ExceedsLimit)
    } else if bounds.cap.is_some_and(|cap| reaches(used.key, estimate, cap)) {
        Some(if model_cap { BlockReason::ModelCap } else { BlockReason::CapAbsolute })
    } else if bounds.limit.is_some_and(|limit| reaches(used.pool, estimate, limit)) {
        Some(BlockReason::GlobalSaturated)
    } else if past_share && terms.policy == Policy::Hard {
        Some(BlockReason::FairShare)
    } else {
        None
    };
    Finding {
        block,
        mode,
        deprioritize: block.is_none() && past_share && terms.policy == Policy::Soft,
        borrowing: bounds.fair_share.is_some_and(|share| used.key > share),
        remaining: remaining(bounds, used, strict && terms.policy == Policy::Hard),
    }
}

fn exceeds(estimate: f64, bound: Option<f64>) -> bool {
    bound.is_some_and(|bound| estimate > bound)
}

/// Nothing is left below `bound`, or not enough for `estimate`.
fn reaches(used: f64, estimate: f64, bound: f64) -> bool {
    used >= bound || used + estimate > bound
}

fn remaining(bounds: &Bounds, used: &Used, held_to_share: bool) -> Option<f64> {
    let share = bounds.fair_share.filter(|_| held_to_share);
    let candidates = [
        bounds.per_connection,
        bounds.cap.map(|cap| cap - used.key),
        bounds.limit.map(|limit| limit - used.pool),
        share.map(|share| share - used.key),
    ];
    candidates.into_iter().flatten().reduce(f64::min).map(|least| least.max(0.0))
}

impl Charge {
    /// What each check sees, and what the rule says of it, at the instant of `reading`.
    pub fn findings(&self, reading: &Reading) -> PerCheck<Finding> {
        self.checks
            .iter()
            .zip(&reading.counters)
            .map(|(check, counters)| {
                check.judge(&self.terms, &counters.level(check.counter.dimension.window, reading.at))
            })
            .collect()
    }
}

impl Check {
    /// Judges this check at `level`.
    pub fn judge(&self, terms: &Terms, level: &Level) -> Finding {
        let used = Used::of(self, level);
        judge(&self.bounds, self.counter.model.is_some(), self.estimate.as_f64(), terms, &used)
    }
}

/// The answer for a whole charge.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// One for each check.
    pub findings: PerCheck<Finding>,
    /// For each check that blocks: the least wait in ms after which it passes, if nothing else happens; `None`: no
    /// wait helps.
    pub retry_after_ms: PerCheck<Option<u64>>,
    /// The check that blocks longest: none is longest, [`BlockReason::ExceedsLimit`] first of all, ties in order.
    pub blocked_by: Option<usize>,
}

impl Verdict {
    /// Judges `charge` against `reading`.
    pub fn of(charge: &Charge, reading: &Reading) -> Verdict {
        let findings = charge.findings(reading);
        let retry_after_ms: PerCheck<Option<u64>> = findings
            .iter()
            .enumerate()
            .map(|(index, finding)| finding.block.and_then(|_| retry_after::of_check(charge, reading, index)))
            .collect();
        // An estimate past the limit ranks above any other wait without end.
        let rank = |index: usize| match (findings[index].block, retry_after_ms[index]) {
            (Some(BlockReason::ExceedsLimit), _) => (2, 0),
            (_, None) => (1, 0),
            (_, Some(wait)) => (0, wait),
        };
        let blocked = (0..findings.len()).filter(|&index| findings[index].block.is_some());
        // `max_by_key` takes the last of equals, so the order is reversed to take the first.
        let blocked_by = blocked.rev().max_by_key(|&index| rank(index));
        Verdict { findings, retry_after_ms, blocked_by }
    }

    /// Why the request is blocked; `None`: it is allowed.
    pub fn block(&self) -> Option<BlockReason> {
        self.blocked_by.and_then(|index| self.findings[index].block)
    }

    /// The least wait in ms after which the whole verdict is to allow. Each check, once it passes, passes on, so it is
    /// the longest of the waits; `None` if one has no end.
    pub fn retry_after_ms(&self) -> Option<u64> {
        self.blocked_by.and_then(|index| self.retry_after_ms[index])
    }

    /// Allowed, but over the fair share under [`Policy::Soft`].
    pub fn deprioritize(&self) -> bool {
        self.blocked_by.is_none() && self.findings.iter().any(|finding| finding.deprioritize)
    }
}

/// A reservation that a decision made or found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Its name.
    pub id: ReservationId,
    /// When it stops counting.
    pub deadline: Timestamp,
    /// An earlier call with the same request id made it.
    pub repeated: bool,
}
