//! What this process knows of its Redis: whether it is within reach, what its clock says, and what went wrong there.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    STORE,
    batches::{broken, failed},
    client::Failure,
    keys::{LAYOUT, LAYOUT_KEY},
    reach::Reach,
    slot::Slot,
    wire::Header,
};
use crate::{
    clock::Clock,
    core::{ledger::Ended, units::Timestamp},
    store::{LedgerError, Losses, StoreError},
};

/// How long the best estimate of Redis' clock is kept beside newer ones.
const ESTIMATE_LIFE: Duration = Duration::from_secs(5);

/// A Redis that is silent for as long hangs, however long a call may wait for it.
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// How long it is not said again that something is lost.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(10);

pub(super) fn not_reached() -> StoreError {
    broken("it has not been reached yet")
}

/// See the module.
#[derive(Debug)]
pub(super) struct Health {
    clock: Arc<dyn Clock>,
    /// How long a Redis is silent before it is taken for one that hangs, at the least: as long as a call may wait.
    patience: Duration,
    started: Instant,
    /// Redis' clock less the time since the start, in ms: the most of two spans of time, and when the newer began. An
    /// answer has been under way for a while, so an estimate is never ahead of Redis' clock, and the largest is the best.
    estimates: Mutex<Option<(Instant, i64, i64)>>,
    outage: Mutex<Outage>,
    /// Something is within reach again.
    pub(super) back: Notify,
    knows_layout: AtomicBool,
    newer_layout: AtomicU64,
    evicting: Mutex<Option<String>>,
    vanished: AtomicU64,
    clock_steps: AtomicU64,
    settled: AtomicU64,
    released: AtomicU64,
    expired: AtomicU64,
    last_loss_said: Mutex<Option<Instant>>,
    missing_batches: AtomicU64,
    lost_holds: AtomicU64,
    resent: AtomicU64,
}

/// What is out of reach now, and what was.
#[derive(Debug)]
struct Outage {
    /// How many are degraded.
    degraded: usize,
    /// Since when any is.
    since: Instant,
    why: Option<StoreError>,
    said: bool,
    /// That it is there and refuses was said.
    refusal_said: bool,
    /// Of those that are over.
    total: Duration,
}

impl Health {
    /// Nothing has been reached yet. An enforcement waits for no longer than `budget`.
    pub(super) fn new(clock: Arc<dyn Clock>, budget: Duration) -> Self {
        let why = Some(not_reached());
        let since = Instant::now();
        Self {
            clock,
            patience: budget.min(SILENCE_MAX),
            started: Instant::now(),
            estimates: Mutex::new(None),
            outage: Mutex::new(Outage {
                degraded: 1,
                since,
                why,
                said: false,
                refusal_said: false,
                total: Duration::ZERO,
            }),
            back: Notify::new(),
            knows_layout: AtomicBool::new(false),
            newer_layout: AtomicU64::new(0),
            evicting: Mutex::new(None),
            vanished: AtomicU64::new(0),
            clock_steps: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            released: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            last_loss_said: Mutex::new(None),
            missing_batches: AtomicU64::new(0),
            lost_holds: AtomicU64::new(0),
            resent: AtomicU64::new(0),
        }
    }

    /// The present instant by the clock that decides, as it is known: before Redis was ever heard, by this machine's.
    pub(super) fn now(&self) -> Timestamp {
        self.redis_now().unwrap_or_else(|| self.clock.now())
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

    /// Something was written there. The change is said once.
    pub(super) fn writes(&self, reach: &Reach) {
        reach.answered();
        if !reach.is_degraded() {
            return;
        }
        // Locked before the reach changes: both go together.
        let mut outage = self.outage.lock();
        if !reach.set_degraded(false) {
            return;
        }
        outage.degraded -= 1;
        if outage.degraded == 0 {
            let lasted = outage.since.elapsed();
            outage.total += lasted;
            outage.why = None;
            outage.refusal_said = false;
            if std::mem::replace(&mut outage.said, false) {
                tracing::warn!(seconds = lasted.as_secs_f64(), "Redis answers again: it decides from now on");
            } else {
                tracing::info!("Redis answers");
            }
        }
        drop(outage);
        self.back.notify_waiters();
    }

    /// It has not done what it was asked. The change is said once.
    pub(super) fn fails(&self, reach: &Reach, failure: &Failure) {
        if failure.is_out_of_reach() {
            self.degrade(reach, failed(failure.clone()), failure.is_final());
        }
    }

    /// What was asked with a time-out of `waited` has not been done.
    pub(super) fn unanswered(&self, reach: &Reach, failure: &Failure, waited: Duration) {
        if failure.is_timeout() {
            self.timed_out(reach, waited);
        } else {
            self.fails(reach, failure);
        }
    }

    /// There was no answer within `waited`.
    pub(super) fn timed_out(&self, reach: &Reach, waited: Duration) {
        if reach.timed_out(waited, self.patience) {
            self.degrade(reach, broken("it does not answer in time"), false);
        }
    }

    /// `is_refusal`: it is there and will not do what it is asked. Where it was gone before, that is another change to be
    /// said, since it does not pass by itself.
    fn degrade(&self, reach: &Reach, why: StoreError, is_refusal: bool) {
        let mut outage = self.outage.lock();
        let is_change = reach.set_degraded(true);
        if is_change {
            outage.degraded += 1;
            if outage.degraded == 1 {
                outage.since = Instant::now();
            }
        }
        let is_news = is_refusal && !outage.refusal_said;
        if is_news || !outage.said {
            (outage.said, outage.refusal_said) = (true, is_refusal);
            let error = &why as &dyn std::error::Error;
            tracing::warn!(
                error,
                "Redis is out of reach: pools decide by their failure mode, records go to the journal"
            );
        }
        if is_news || outage.why.is_none() {
            outage.why = Some(why);
        }
    }

    /// How long something has been out of reach, all in all.
    pub(super) fn degraded_for(&self) -> Duration {
        let outage = self.outage.lock();
        let now = if outage.degraded > 0 { outage.since.elapsed() } else { Duration::ZERO };
        outage.total + now
    }

    /// A fail-over has lost batches of `slot`: so many are sent again, and what is not.
    pub(super) fn lost(&self, slot: &Slot, resent: u64, missing_batches: u64, holds: u64) {
        self.resent.fetch_add(resent, Ordering::Relaxed);
        self.missing_batches.fetch_add(missing_batches, Ordering::Relaxed);
        self.lost_holds.fetch_add(holds, Ordering::Relaxed);
        let mut last_said = self.last_loss_said.lock();
        if last_said.is_none_or(|at| at.elapsed() >= SAID_AGAIN_AFTER) {
            *last_said = Some(Instant::now());
            tracing::warn!(
                created_revision = slot.pool.0,
                resent,
                missing_batches,
                lost_reservations = holds,
                "Redis has lost what it had acknowledged of a pool: records and releases of the last seconds are sent \
                 again; metrics count all pools"
            );
        }
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

    /// Redis evicts keys by `policy` when its memory is full; `None`: it does not. Each change is said once.
    pub(super) fn evicts(&self, policy: Option<String>) {
        let mut known = self.evicting.lock();
        match &policy {
            Some(policy) if known.as_ref() != Some(policy) => tracing::warn!(
                policy,
                "Redis may evict counters when its memory is full: set maxmemory-policy to noeviction"
            ),
            None if known.is_some() => tracing::info!("Redis evicts no counters any more"),
            _ => {}
        }
        *known = policy;
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

    /// What this version writes is understood there.
    pub(super) fn may_write(&self) -> bool {
        self.knows_layout() && self.newer_layout().is_none()
    }

    /// What is wrong where a newer version has laid out the counters.
    pub(super) fn newer_layout(&self) -> Option<StoreError> {
        let layout = self.newer_layout.load(Ordering::Relaxed);
        (layout > u64::from(LAYOUT)).then(|| StoreError::Corrupt {
            store: STORE,
            what: LAYOUT_KEY.to_owned(),
            found: layout.to_string(),
            expected: format!("this version knows layouts up to {LAYOUT}: upgrade this replica"),
        })
    }

    /// Nothing is decided and nothing written there.
    pub(super) fn check_layout(&self) -> Result<(), LedgerError> {
        self.newer_layout().map_or(Ok(()), |error| Err(LedgerError::NewerLayout(error)))
    }

    pub(super) fn failing(&self) -> Option<StoreError> {
        self.outage.lock().why.clone()
    }

    pub(super) fn evicting(&self) -> Option<String> {
        self.evicting.lock().clone()
    }

    pub(super) fn vanished_pools(&self) -> u64 {
        self.vanished.load(Ordering::Relaxed)
    }

    /// What fail-overs have lost, and what was sent again.
    pub(super) fn losses(&self) -> Losses {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Losses {
            resent_batches: read(&self.resent),
            missing_batches: read(&self.missing_batches),
            reservations: read(&self.lost_holds),
        }
    }

    pub(super) fn clock_steps(&self) -> u64 {
        self.clock_steps.load(Ordering::Relaxed)
    }

    pub(super) fn ended(&self) -> Ended {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Ended { settled: read(&self.settled), released: read(&self.released), expired: read(&self.expired) }
    }
}
