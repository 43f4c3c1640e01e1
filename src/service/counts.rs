//! What is counted of decisions, by pool, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Decided, Degraded, Service, Standing};
use crate::{
    core::{
        admission::{BlockReason, Mode, Used},
        charge::Bounds,
        ids::{ConnectionId, PoolId, PoolRevision},
        plan::DimensionKey,
        settings::StoreDriver,
        units::Timestamp,
    },
    store::{Condition, JournalCondition, LedgerError},
};

const DECISIONS: [&str; 3] = ["allow", "block", "would_block"];
const ALLOW: usize = 0;
const BLOCK: usize = 1;
const WOULD_BLOCK: usize = 2;
const REASONS: [&str; 9] = [
    "OK",
    "NO_PLAN",
    "EXCEEDS_LIMIT",
    "CAP_ABSOLUTE",
    "MODEL_CAP",
    "GLOBAL_SATURATED",
    "CONNECTION_SATURATED",
    "FAIR_SHARE",
    "STORE_UNAVAILABLE",
];
const MODES: [&str; 3] = ["none", "generous", "strict"];

/// What is counted of one life of a pool since this replica started.
#[derive(Debug, Default)]
pub(super) struct PoolCounts {
    /// When a call last matched it, in ms.
    last_matched_ms: AtomicU64,
    /// By decision, reason and mode.
    decisions: [[[AtomicU64; MODES.len()]; REASONS.len()]; DECISIONS.len()],
}

/// What is counted of all of the service's decisions.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pools: papaya::HashMap<PoolRevision, PoolCounts>,
    /// In no pool though the connection is in one: the key is not.
    no_pool_known: AtomicU64,
    no_pool_unknown: AtomicU64,
    signals_taken: AtomicU64,
    signals_ignored: AtomicU64,
}

/// How often a pool decided so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionCount {
    /// The pool.
    pub pool: PoolId,
    /// `allow`, `block` or, in a pool in SHADOW, `would_block`.
    pub decision: &'static str,
    /// As in the contract.
    pub reason: &'static str,
    /// `strict` if any dimension was, `none` if no limit is known.
    pub mode: &'static str,
    /// Since this replica started.
    pub count: u64,
}

/// How much of a limit is used.
#[derive(Clone, Debug, PartialEq)]
pub struct UsedFraction {
    /// The pool.
    pub pool: PoolId,
    /// The dimension.
    pub dimension: DimensionKey,
    /// May exceed 1.
    pub fraction: f64,
}

impl Counts {
    /// A call has matched `pool` at `at`; `count` counts what became of it.
    fn matched_and(&self, pool: PoolRevision, at: Timestamp, count: impl FnOnce(&PoolCounts)) {
        let pools = self.pools.pin();
        let counts = pools.get_or_insert_with(pool, PoolCounts::default);
        counts.last_matched_ms.store(at.unix_ms(), Ordering::Relaxed);
        count(counts);
    }

    /// A call has matched `pool` at `at`.
    pub(super) fn matched(&self, pool: PoolRevision, at: Timestamp) {
        self.matched_and(pool, at, |_| {});
    }

    pub(super) fn last_matched(&self, pool: PoolRevision) -> Option<Timestamp> {
        let pools = self.pools.pin();
        Some(Timestamp::from_unix_ms(pools.get(&pool)?.last_matched_ms.load(Ordering::Relaxed)))
    }

    pub(super) fn forget(&self, pool: PoolRevision) {
        self.pools.pin().remove(&pool);
    }

    pub(super) fn no_pool(&self, connection_known: bool) {
        let count = if connection_known { &self.no_pool_known } else { &self.no_pool_unknown };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// So many figures of providers were taken over, and so many headers and figures ignored.
    pub(super) fn signals(&self, taken: usize, ignored: usize) {
        self.signals_taken.fetch_add(taken as u64, Ordering::Relaxed);
        self.signals_ignored.fetch_add(ignored as u64, Ordering::Relaxed);
    }

    /// A call has matched its pool and was decided.
    pub(super) fn decided(&self, decided: &Decided) {
        let block = decided.verdict.block();
        let decision = match block {
            _ if decided.is_blocked() => BLOCK,
            Some(_) if decided.charge.shadow => WOULD_BLOCK,
            _ => ALLOW,
        };
        let reason = match block {
            _ if decision == ALLOW && decided.entry.dimensions().is_empty() => 1,
            None => 0,
            // An earlier decision for the same request stands.
            Some(_) if decision == ALLOW => 0,
            Some(BlockReason::ExceedsLimit) => 2,
            Some(BlockReason::CapAbsolute) => 3,
            Some(BlockReason::ModelCap) => 4,
            Some(BlockReason::GlobalSaturated) => 5,
            Some(BlockReason::ConnectionSaturated) => 6,
            Some(BlockReason::FairShare) => 7,
        };
        let modes = decided.verdict.findings.iter().map(|finding| match finding.mode {
            None => 0,
            Some(Mode::Generous) => 1,
            Some(Mode::Strict) => 2,
        });
        let mode = modes.max().unwrap_or(0);
        let (pool, at) = (decided.entry.history.created_revision, decided.reading.at);
        self.matched_and(pool, at, |counts| {
            counts.decisions[decision][reason][mode].fetch_add(1, Ordering::Relaxed);
        });
    }

    /// A call has matched its pool at `at` and was answered without the shared counters.
    pub(super) fn degraded(&self, degraded: &Degraded, at: Timestamp) {
        let decision = match degraded.refusal {
            _ if degraded.is_blocked() => BLOCK,
            Some(_) => WOULD_BLOCK,
            None => ALLOW,
        };
        let (pool, reason, mode) = (degraded.entry.history.created_revision, REASONS.len() - 1, 0);
        self.matched_and(pool, at, |counts| {
            counts.decisions[decision][reason][mode].fetch_add(1, Ordering::Relaxed);
        });
    }
}

impl Service {
    /// Decisions of Enforce since this replica started, by pool.
    pub fn decision_counts(&self) -> Vec<DecisionCount> {
        let directory = self.directory();
        let mut all = Vec::new();
        for (life, counts) in &self.0.counts.pools.pin() {
            let Some(entry) = directory.pool_of_life(*life) else { continue };
            for (decision, by_reason) in DECISIONS.iter().zip(&counts.decisions) {
                for (reason, by_mode) in REASONS.iter().zip(by_reason) {
                    for (mode, count) in MODES.iter().zip(by_mode) {
                        let count = count.load(Ordering::Relaxed);
                        if count > 0 {
                            let pool = entry.pool.id.clone();
                            all.push(DecisionCount { pool, decision, reason, mode, count });
                        }
                    }
                }
            }
        }
        all
    }

    /// Decisions in no pool since this replica started: of connections that are in one, and of others.
    pub fn no_pool_counts(&self) -> (u64, u64) {
        let counts = &self.0.counts;
        (counts.no_pool_known.load(Ordering::Relaxed), counts.no_pool_unknown.load(Ordering::Relaxed))
    }

    /// Figures of providers that were reported since this replica started: taken over, and ignored.
    pub fn signal_counts(&self) -> (u64, u64) {
        let counts = &self.0.counts;
        (counts.signals_taken.load(Ordering::Relaxed), counts.signals_ignored.load(Ordering::Relaxed))
    }

    /// How much of each limit is used, of all pools.
    pub async fn used_fractions(&self) -> Vec<UsedFraction> {
        let directory = self.0.directory.load_full();
        let mut all = Vec::new();
        for entry in directory.pools_after(None) {
            let dimensions = entry.dimension_keys();
            // A pool that is deleted meanwhile has no usage to show.
            let (life, connections) = (entry.history.created_revision, &entry.pool.connections);
            let (at, totals) = match self.ledger().totals(life, &dimensions, connections).await {
                Ok(totals) => totals,
                // Asking for each of the others would take as long.
                Err(LedgerError::Unreachable(_)) => return all,
                Err(_) => continue,
            };
            for (dimension, counters) in entry.dimensions().iter().zip(totals) {
                let bounds = Bounds::of_pool(&entry.pool, dimension);
                let level = counters.level(dimension.key, bounds.per_connection, at);
                let used = Used::of(dimension.key.unit, &bounds, &level);
                all.extend(used.fraction.map(|fraction| UsedFraction {
                    pool: entry.pool.id.clone(),
                    dimension: dimension.key,
                    fraction,
                }));
            }
        }
        all
    }

    /// How the store is.
    pub fn condition(&self) -> Condition {
        self.ledger_now().condition()
    }

    /// Shared counters are out of reach: decisions follow the failure mode of each pool.
    pub fn is_degraded(&self) -> bool {
        let in_use = self.ledger_now();
        let Condition { failing, refuses, .. } = in_use.condition();
        let out_of_reach = failing.is_some() && !refuses || matches!(self.standing(), Standing::Unseen(_));
        in_use.place.driver() == StoreDriver::Redis && out_of_reach
    }

    /// How many replicas share the counters, as far as is known.
    pub fn live_replicas(&self) -> u64 {
        self.ledger_now().live_replicas()
    }

    /// How much waits in the journal, and what has become of what did.
    pub fn journal(&self) -> JournalCondition {
        self.0.journal.condition()
    }

    pub(super) fn count_no_pool(&self, connection: &ConnectionId) {
        self.0.counts.no_pool(self.directory().pool_of(connection).is_some());
    }
}
