//! What this process knows of its Redis: whether it answers, what its clock says, and what went wrong there.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{
    batches::{broken, failed},
    client::Failure,
    keys::LAYOUT,
    slot::Slot,
    wire::Header,
};
use crate::{
    clock::Clock,
    core::{ledger::Ended, units::Timestamp},
    store::StoreError,
};

/// How long the best estimate of Redis' clock is kept beside newer ones.
const ESTIMATE_LIFE: Duration = Duration::from_secs(5);

pub(super) fn not_reached() -> StoreError {
    broken("it has not been reached yet")
}

/// How long it is not said again that Redis does not answer.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub(super) struct Health {
    clock: Arc<dyn Clock>,
    started: Instant,
    /// Redis' clock less the time since the start, in ms: the most of two spans of time, and when the newer began. An
    /// answer has been under way for a while, so an estimate is never ahead of Redis' clock, and the largest is the best.
    estimates: Mutex<Option<(Instant, i64, i64)>>,
    failing: Mutex<Option<StoreError>>,
    answers: AtomicBool,
    /// That it does not answer was said, and when that was last.
    silence_said: AtomicBool,
    last_said: Mutex<Option<Instant>>,
    /// It refuses what is to be written, whatever it answers else.
    refuses_writes: AtomicBool,
    knows_layout: AtomicBool,
    newer_layout: AtomicU64,
    evicting: Mutex<Option<String>>,
    vanished: AtomicU64,
    clock_steps: AtomicU64,
    settled: AtomicU64,
    released: AtomicU64,
    expired: AtomicU64,
}

impl Health {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            started: Instant::now(),
            estimates: Mutex::new(None),
            failing: Mutex::new(Some(not_reached())),
            answers: AtomicBool::new(false),
            silence_said: AtomicBool::new(false),
            last_said: Mutex::new(None),
            refuses_writes: AtomicBool::new(false),
            knows_layout: AtomicBool::new(false),
            newer_layout: AtomicU64::new(0),
            evicting: Mutex::new(None),
            vanished: AtomicU64::new(0),
            clock_steps: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            released: AtomicU64::new(0),
            expired: AtomicU64::new(0),
        }
    }

    /// The present instant by the clock that decides, if it is known. Not ahead of the truth.
    pub(super) fn redis_now(&self) -> Option<Timestamp> {
        if let Some(now) = self.clock.injected() {
            return Some(now);
        }
        let (_, newer, older) = (*self.estimates.lock())?;
        let since_start = self.started.elapsed().as_millis() as i64;
        Some(Timestamp::from_unix_ms(u64::try_from(newer.max(older) + since_start).unwrap_or_default()))
    }

    /// An answer that has just come says that Redis' clock stood at `clock`.
    pub(super) fn clock_said(&self, clock: Timestamp) {
        let now = Instant::now();
        let estimate = clock.unix_ms() as i64 - now.duration_since(self.started).as_millis() as i64;
        let mut estimates = self.estimates.lock();
        *estimates = Some(match *estimates {
            Some((since, newer, older)) if now.duration_since(since) < ESTIMATE_LIFE => {
                (since, newer.max(estimate), older)
            }
            Some((_, newer, _)) => (now, estimate, newer),
            None => (now, estimate, estimate),
        });
    }

    /// Redis has answered what only reads. That it writes again is for a batch to tell.
    pub(super) fn answers_reads(&self) {
        if !self.refuses_writes.load(Ordering::Relaxed) {
            self.answers();
        }
    }

    /// Redis has answered. The change is said once.
    pub(super) fn answers(&self) {
        self.refuses_writes.store(false, Ordering::Relaxed);
        if !self.answers.swap(true, Ordering::Relaxed) {
            *self.failing.lock() = None;
            // Where one node of several fails, answers and failures take turns.
            if self.silence_said.swap(false, Ordering::Relaxed) || self.last_said.lock().is_none() {
                tracing::info!("Redis answers");
            }
        }
    }

    /// Redis has not done what it was asked. The change is said once.
    pub(super) fn fails(&self, failure: &Failure) {
        let mut last_said = self.last_said.lock();
        let of_late = last_said.is_some_and(|at| at.elapsed() < SAID_AGAIN_AFTER);
        if !of_late && !self.silence_said.swap(true, Ordering::Relaxed) {
            *last_said = Some(Instant::now());
            tracing::warn!(error = failure as &dyn std::error::Error, "Redis does not answer as it should");
        }
        *self.failing.lock() = Some(failed(failure.clone()));
        self.refuses_writes.fetch_or(failure.is_of_writes(), Ordering::Relaxed);
        self.answers.store(false, Ordering::Relaxed);
    }

    /// What came with a batch of `slot`.
    pub(super) fn heard(&self, slot: &Slot, header: &Header) {
        self.clock_said(header.clock);
        let vanished = header.vanished && !header.repeated && !slot.has_said_loss();
        if slot.has_lost(Some(header.born), header.clock) || vanished {
            self.vanished(slot);
        }
        if header.repeated {
            return;
        }
        for (total, count) in [
            (&self.settled, header.settled),
            (&self.released, header.released),
            (&self.expired, header.expired),
        ] {
            total.fetch_add(count, Ordering::Relaxed);
        }
        if header.stepped_back {
            self.clock_steps.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                pool = slot.pool.0,
                "Redis' clock went back: counters ahead of it count in the present window"
            );
        }
    }

    /// The counters of a pool are gone before their time. Pools are counted, and the first of many is said.
    pub(super) fn vanished(&self, slot: &Slot) {
        if self.vanished.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                created_revision = slot.pool.0,
                "the counters of a pool have vanished from Redis: were they evicted or flushed? What they held is not \
                 counted any more; quota_share_vanished_pools_total counts such pools"
            );
        }
    }

    /// Redis evicts keys by `policy` when its memory is full; `None`: it does not.
    pub(super) fn evicts(&self, policy: Option<String>) {
        if let Some(policy) = &policy {
            tracing::warn!(
                policy,
                "Redis may evict counters when its memory is full: set maxmemory-policy to noeviction"
            );
        }
        *self.evicting.lock() = policy;
    }

    /// Another replica lays out what it keeps in a way that this version does not know.
    pub(super) fn met_layout(&self, layout: u32) {
        if self.newer_layout.swap(layout.into(), Ordering::Relaxed) != u64::from(layout) && layout > LAYOUT {
            tracing::error!(
                layout,
                known = LAYOUT,
                "a newer version has used this Redis: upgrade this replica"
            );
        }
        self.knows_layout.store(true, Ordering::Relaxed);
    }

    /// Which layout was used is known: before it is, nothing is written.
    pub(super) fn knows_layout(&self) -> bool {
        self.knows_layout.load(Ordering::Relaxed)
    }

    /// The layout of a newer version, if one has used this Redis.
    pub(super) fn newer_layout(&self) -> Option<u64> {
        Some(self.newer_layout.load(Ordering::Relaxed)).filter(|layout| *layout > u64::from(LAYOUT))
    }

    pub(super) fn failing(&self) -> Option<StoreError> {
        self.failing.lock().clone()
    }

    pub(super) fn evicting(&self) -> Option<String> {
        self.evicting.lock().clone()
    }

    pub(super) fn vanished_pools(&self) -> u64 {
        self.vanished.load(Ordering::Relaxed)
    }

    pub(super) fn clock_steps(&self) -> u64 {
        self.clock_steps.load(Ordering::Relaxed)
    }

    pub(super) fn ended(&self) -> Ended {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Ended { settled: read(&self.settled), released: read(&self.released), expired: read(&self.expired) }
    }
}
