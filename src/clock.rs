//! Where the time comes from.

use std::{
    fmt::Debug,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use crate::core::units::Timestamp;

/// A source of wall-clock time.
pub trait Clock: Debug + Send + Sync + 'static {
    /// The present instant.
    fn now(&self) -> Timestamp;

    /// The instant by which a store with a clock of its own decides; `None`: that is the store's. Only tests have one.
    fn injected(&self) -> Option<Timestamp> {
        None
    }
}

/// The machine's own clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        // A clock before 1970 is a machine without a clock: it starts at the epoch.
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_unix_ms(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX))
    }
}

/// A clock that moves only when it is told to: for tests.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that stands at `at`.
    pub fn new(at: Timestamp) -> Self {
        Self(AtomicU64::new(at.unix_ms()))
    }

    /// Moves on by `by`.
    pub fn advance(&self, by: Duration) {
        let ms = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
        self.0.fetch_add(ms, Ordering::SeqCst);
    }

    /// Moves to `at`, forward or back.
    pub fn set(&self, at: Timestamp) {
        self.0.store(at.unix_ms(), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_unix_ms(self.0.load(Ordering::SeqCst))
    }

    fn injected(&self) -> Option<Timestamp> {
        Some(self.now())
    }
}
