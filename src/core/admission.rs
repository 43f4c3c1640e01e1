//! The rule: is a request allowed, given what the counters hold? The one definition in Rust; Enforce, PreviewDecision,
//! usage and shadow mode all come here.

use serde::Deserialize;

use super::{
    charge::{Bounds, Charge, Check, PerCheck, Terms},
    ids::ReservationId,
    plan::DimensionKey,
    pool::Policy,
    retry_after,
    units::{Timestamp, Unit},
    window::SlidingCounter,
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
    /// The provider says that the connection that is to serve the request has nothing left.
    ConnectionSaturated,
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "(u64, u64, u64, u64)")]
pub struct Counter {
    /// What was recorded.
    pub consumed: SlidingCounter,
    /// What requests in flight hold.
    pub reserved: u64,
}

/// What the counters of one check hold: the key's own and, for a dimension of the plan, the pool's.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Counters {
    /// The key's.
    pub key: Counter,
    /// The pool's total; nothing for a model cap.
    pub pool: Counter,
    /// What is known of the connections' accounts in this dimension.
    pub accounts: Vec<AccountReading>,
}

/// What is known of one connection's account.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct AccountReading {
    /// It is to serve the request.
    pub serving: bool,
    /// The used fraction of its limit, by the provider.
    pub fraction: f64,
    /// The same in steps of per cent.
    pub figure: f64,
    /// Until when that is believed; `None`: it is not now.
    pub fresh_until: Option<Timestamp>,
    /// `fresh_until` is an end that the provider has named. What has none stays as it is as far as waits are concerned.
    pub has_end: bool,
    /// When the provider's window ends.
    pub window_end: Option<Timestamp>,
    /// The pool has no other connection: its counters are in the provider's window.
    pub alone: bool,
    /// Recorded by the key and by the pool since the provider's window has last ended, where the pool has no other
    /// connection and its own counters have more in view.
    pub slid: Option<(SlidingCounter, SlidingCounter)>,
    /// The key's part, in steps.
    pub key_part: f64,
    /// All keys' parts.
    pub parts: f64,
}

/// Holds that end together: how much less is reserved from `deadline` on, for each check `(by the key, by the pool)`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Release {
    /// From when on.
    pub deadline: Timestamp,
    /// One for each check.
    pub held: PerCheck<(u64, u64)>,
}

/// All that a decision needs of a pool's state at one instant.
#[derive(Clone, Debug, PartialEq, Deserialize)]
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
    /// U: used of the pool's connections by the provider's figures; `None` where none is believed.
    pub signalled: Option<f64>,
    /// The figure of the serving connection, as a fraction of its limit, if it is believed.
    pub serving_fraction: Option<f64>,
    /// The serving connection has nothing left, by that figure.
    pub serving_is_full: bool,
    /// When the serving connection's window ends.
    pub resets_at: Option<Timestamp>,
}

/// What the rule compares with the bounds, in steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Used {
    /// uk: by this key.
    pub key: f64,
    /// ut: by the pool, and outside of it.
    pub pool: f64,
    /// Of that, outside.
    pub external: f64,
    /// The serving connection has nothing left.
    pub connection_saturated: bool,
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

impl From<(u64, u64, u64, u64)> for Counter {
    /// Of `(bucket, current, previous, reserved)`.
    fn from((bucket, current, previous, reserved): (u64, u64, u64, u64)) -> Self {
        Self { consumed: SlidingCounter::of_buckets(bucket, current, previous), reserved }
    }
}

impl AccountReading {
    /// The figure is believed at `at`, of which nothing more is known than at the reading.
    fn is_fresh(&self, at: Timestamp) -> bool {
        let in_window = self.window_end.is_none_or(|end| at < end);
        in_window && self.fresh_until.is_some_and(|until| at < until || !self.has_end)
    }

    /// When something about it ends.
    pub(super) fn ends(&self) -> impl Iterator<Item = Timestamp> {
        self.fresh_until.filter(|_| self.has_end).into_iter().chain(self.window_end)
    }
}

impl Counters {
    /// What `dimension`, of whose limit each connection has `per_connection`, looks like at `at` while nothing that is held
    /// has ended.
    pub fn level(&self, dimension: DimensionKey, per_connection: Option<f64>, at: Timestamp) -> Level {
        self.level_after(dimension, per_connection, at, (0, 0))
    }

    /// The same after `(by the key, by the pool)` of what is held has ended.
    pub(super) fn level_after(
        &self,
        dimension: DimensionKey,
        per_connection: Option<f64>,
        at: Timestamp,
        ended: (u64, u64),
    ) -> Level {
        let (key_consumed, pool_consumed) = self.consumed(dimension, at);
        let level = Level {
            key_consumed,
            key_reserved: self.key.reserved.saturating_sub(ended.0) as f64,
            pool_consumed,
            pool_reserved: self.pool.reserved.saturating_sub(ended.1) as f64,
            ..Level::default()
        };
        if self.accounts.is_empty() {
            return level;
        }
        let fresh = || self.accounts.iter().filter(|account| account.is_fresh(at));
        let used = |account: &AccountReading| match dimension.unit {
            Unit::Percent => account.figure,
            _ => account.fraction * per_connection.unwrap_or_default(),
        };
        let is_full = |account: &AccountReading| match (dimension.unit, per_connection) {
            (Unit::Percent, Some(limit)) => account.figure >= limit,
            _ => account.fraction >= 1.0,
        };
        let serving = self.accounts.iter().find(|account| account.serving);
        Level {
            signalled: fresh().next().map(|_| fresh().map(used).sum()),
            serving_fraction: fresh().find(|account| account.serving).map(|account| account.fraction),
            serving_is_full: fresh().find(|account| account.serving).is_some_and(is_full),
            resets_at: serving.and_then(|account| account.window_end).filter(|end| at < *end),
            ..level
        }
    }

    /// `(by the key, by the pool)`. Per cents are those of the figures as long as there are any; counters of the provider's
    /// window count in full until it ends, when everything starts at 0.
    fn consumed(&self, dimension: DimensionKey, at: Timestamp) -> (f64, f64) {
        if dimension.unit == Unit::Percent && self.accounts.iter().any(|account| account.is_fresh(at)) {
            let fresh = self.accounts.iter().filter(|account| account.is_fresh(at));
            return fresh
                .fold((0.0, 0.0), |(key, pool), account| (key + account.key_part, pool + account.parts));
        }
        let alone = self.accounts.iter().find(|account| account.alone);
        if let Some(AccountReading { window_end: Some(end), key_part, parts, .. }) = alone {
            if *end <= at {
                return (0.0, 0.0);
            }
            if dimension.unit != Unit::Percent {
                return (*key_part, *parts);
            }
        }
        let slid = alone.and_then(|account| account.slid);
        let (key, pool) = slid.unwrap_or((self.key.consumed, self.pool.consumed));
        (key.at(dimension.window, at), pool.at(dimension.window, at))
    }
}

impl Used {
    /// What `level` means in `unit` to `bounds`.
    pub fn of(unit: Unit, bounds: &Bounds, level: &Level) -> Used {
        let outside = |signalled: f64| (signalled - level.pool_consumed - bounds.owner_reserve).max(0.0);
        let external = level.signalled.map_or(0.0, outside);
        let pool = level.pool_consumed + level.pool_reserved + external;
        let unknown = unit == Unit::Percent && level.signalled.is_none() && pool == 0.0;
        let limit = bounds.limit.filter(|_| !unknown);
        Used {
            key: level.key_consumed + level.key_reserved,
            pool,
            external,
            connection_saturated: level.serving_is_full,
            fraction: limit.map(|limit| pool / limit),
        }
    }
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
    } else if bounds.limit.is_some() && used.connection_saturated {
        Some(BlockReason::ConnectionSaturated)
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
        bounds.limit.filter(|_| used.connection_saturated).map(|_| 0.0),
    ];
    candidates.into_iter().flatten().reduce(f64::min).map(|least| least.max(0.0))
}

impl Charge {
    /// What each check sees, and what the rule says of it, at the instant of `reading`.
    pub fn findings(&self, reading: &Reading) -> PerCheck<Finding> {
        self.checks
            .iter()
            .zip(&reading.counters)
            .map(|(check, counters)| check.judge(&self.terms, &check.level(counters, reading.at)))
            .collect()
    }
}

impl Check {
    /// What this check sees at `at` while nothing that is held has ended.
    pub fn level(&self, counters: &Counters, at: Timestamp) -> Level {
        counters.level(self.counter.dimension, self.bounds.per_connection, at)
    }

    /// What `level` means to this check.
    pub fn used(&self, level: &Level) -> Used {
        Used::of(self.counter.dimension.unit, &self.bounds, level)
    }

    /// Judges this check at `level`.
    pub fn judge(&self, terms: &Terms, level: &Level) -> Finding {
        let used = self.used(level);
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
    /// The least wait in ms after which the whole verdict is to allow, if nothing else happens; `None`: no wait helps.
    pub allowed_after_ms: Option<u64>,
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
        let allowed_after_ms = match blocked_by {
            // Without figures of a provider a check that passes passes on, and it is the longest of the waits. Once a figure or a window of a provider ends, what passed before may not pass any more.
            Some(_) if reading.counters.iter().any(|counters| !counters.accounts.is_empty()) => {
                retry_after::of_charge(charge, reading)
            }
            _ => blocked_by.and_then(|index| retry_after_ms[index]),
        };
        Verdict { findings, retry_after_ms, blocked_by, allowed_after_ms }
    }

    /// Why the request is blocked; `None`: it is allowed.
    pub fn block(&self) -> Option<BlockReason> {
        self.blocked_by.and_then(|index| self.findings[index].block)
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
