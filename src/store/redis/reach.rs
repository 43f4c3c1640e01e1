//! Whether a Redis, or the node of a cluster that has a pool, is worth asking.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// So many time-outs in a row are a Redis that hangs.
const TIMEOUTS_MAX: u32 = 3;

/// Within reach, or degraded: then it is left alone until a probe has had an answer.
#[derive(Debug, Default)]
pub(super) struct Reach {
    degraded: AtomicBool,
    silence: Mutex<Silence>,
}

#[derive(Debug, Default)]
struct Silence {
    /// In a row; those of calls that waited at the same time are one.
    timeouts: u32,
    counted_at: Option<Instant>,
    /// When the first of them began to wait.
    began_at: Option<Instant>,
    answered_at: Option<Instant>,
}

impl Reach {
    pub(super) fn new(degraded: bool) -> Self {
        Self { degraded: AtomicBool::new(degraded), silence: Mutex::default() }
    }

    pub(super) fn is_degraded(&self) -> bool {
        self.degraded.load(Ordering::Relaxed)
    }

    /// True if that is a change.
    pub(super) fn set_degraded(&self, degraded: bool) -> bool {
        self.degraded.swap(degraded, Ordering::Relaxed) != degraded
    }

    /// There was an answer.
    pub(super) fn answered(&self) {
        let answered_at = Some(Instant::now());
        *self.silence.lock() = Silence { answered_at, ..Silence::default() };
    }

    /// There was no answer within `waited`; true if that has happened too often, over no less time than `least`.
    pub(super) fn timed_out(&self, waited: Duration, least: Duration) -> bool {
        let now = Instant::now();
        let mut silence = self.silence.lock();
        let within = |at: Option<Instant>| at.is_some_and(|at| now.duration_since(at) < waited);
        if within(silence.answered_at) || within(silence.counted_at) {
            return false;
        }
        silence.timeouts += 1;
        silence.counted_at = Some(now);
        let began_at = *silence.began_at.get_or_insert(now.checked_sub(waited).unwrap_or(now));
        silence.timeouts >= TIMEOUTS_MAX && now.duration_since(began_at) >= least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const NONE: Duration = Duration::ZERO;

    #[test]
    fn time_outs_of_one_moment_count_once_and_an_answer_ends_the_silence() {
        let reach = Reach::new(false);
        let many: Vec<bool> = (0..100).map(|_| reach.timed_out(LONG, NONE)).collect();
        assert_eq!(many, [false; 100], "they all waited at the same time");
        assert!(!reach.timed_out(NONE, NONE), "the second");
        assert!(!reach.timed_out(NONE, LONG * 2), "the third, and the silence has not lasted long enough");
        assert!(reach.timed_out(NONE, NONE), "the fourth");
        reach.answered();
        assert!(!reach.timed_out(LONG, NONE), "it has answered since this one began to wait");
        assert_eq!([NONE; 3].map(|waited| reach.timed_out(waited, NONE)), [false, false, true]);
    }
}
