//! When a verdict would change: the least wait after which a blocked check passes, if nothing else happens.

use super::{admission::Reading, charge::Charge, units::Timestamp};

/// Deadlines of reservations that are followed one by one; past them, everything is taken to be held to the last one.
pub const DEADLINES_FOLLOWED_MAX: usize = 64;

/// The least wait in ms, at least 1, after which check `index` of `charge` passes; `None` if no wait helps.
///
/// The rule itself is asked at instants to come. While nothing happens, consumption only slides out and reservations
/// only end, so a check that passes goes on passing: bisection finds the first instant.
pub fn of_check(charge: &Charge, reading: &Reading, index: usize) -> Option<u64> {
    let check = &charge.checks[index];
    let window = check.counter.dimension.window;
    let passes = |wait_ms: u64| {
        let at = reading.at.plus_ms(wait_ms);
        let level = reading.counters[index].level_after(window, at, ended_by(reading, index, at));
        check.judge(&charge.terms, &level).block.is_none()
    };
    let last_deadline = reading.releases.last().map_or(0, |release| release.deadline.ms_since(reading.at));
    first_true(passes, last_deadline.max(2 * window.length_ms()))
}

/// What of the reservations of check `index` has ended by `at`: `(by the key, by the pool)`.
fn ended_by(reading: &Reading, index: usize, at: Timestamp) -> (u64, u64) {
    let ended = reading.releases.iter().take_while(|release| release.deadline <= at);
    ended.fold((0, 0), |(key, pool), release| {
        let held = release.held[index];
        (key + held.0, pool + held.1)
    })
}

/// The least `n` of `1..=last` for which `holds`, which stays true once it is; `None` if it is not at `last`.
fn first_true(holds: impl Fn(u64) -> bool, last: u64) -> Option<u64> {
    if !holds(last) {
        return None;
    }
    let (mut below, mut first) = (0, last);
    while first - below > 1 {
        let middle = below + (first - below) / 2;
        if holds(middle) {
            first = middle;
        } else {
            below = middle;
        }
    }
    Some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_instant_is_found_wherever_it_is() {
        for first in [1, 2, 3, 999, 1_000] {
            assert_eq!(first_true(|n| n >= first, 1_000), Some(first));
        }
        assert_eq!(first_true(|_| false, 1_000), None);
    }
}
