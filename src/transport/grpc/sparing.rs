//! Log lines that callers can provoke, and must not fill disks with.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The least time between two lines.
const PAUSE: Duration = Duration::from_secs(10);

/// Lets a line out now and then, with how many were left out before it.
#[derive(Debug, Default)]
pub(super) struct Sparing(Mutex<(Option<Instant>, u64)>);

impl Sparing {
    /// Calls `say` with how many were left out since the last line; or counts this one.
    pub(super) fn say(&self, say: impl FnOnce(u64)) {
        self.say_at(Instant::now(), say);
    }

    fn say_at(&self, now: Instant, say: impl FnOnce(u64)) {
        let mut state = self.0.lock();
        let (last, left_out) = &mut *state;
        if last.is_some_and(|last| now.duration_since(last) < PAUSE) {
            *left_out += 1;
            return;
        }
        *last = Some(now);
        let more = std::mem::take(left_out);
        drop(state);
        say(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_counted() {
        let (sparing, start) = (Sparing::default(), Instant::now());
        let mut said = Vec::new();
        for seconds in [0, 1, 9, 10, 15, 30] {
            sparing.say_at(start + Duration::from_secs(seconds), |more| said.push((seconds, more)));
        }
        assert_eq!(said, [(0, 0), (10, 2), (30, 1)]);
    }
}
