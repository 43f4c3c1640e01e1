//! When a verdict would change: the least wait after which a blocked check passes, if nothing else happens.

use super::{
    admission::{AccountReading, Reading},
    charge::Charge,
    units::Timestamp,
};

/// Deadlines of reservations that are followed one by one; past them, everything is taken to be held to the last one.
pub const DEADLINES_FOLLOWED_MAX: usize = 64;

/// The least wait in ms, at least 1, after which check `index` of `charge` passes; `None` if no wait helps.
pub fn of_check(charge: &Charge, reading: &Reading, index: usize) -> Option<u64> {
    let ends = ends_of(reading, index).collect();
    least_wait(charge, reading, ends, &|at| passes(charge, reading, index, at))
}

/// The least wait in ms, at least 1, after which all of `charge` passes; `None` if no wait helps.
pub fn of_charge(charge: &Charge, reading: &Reading) -> Option<u64> {
    let checks = 0..charge.checks.len();
    let ends = checks.clone().flat_map(|index| ends_of(reading, index)).collect();
    least_wait(charge, reading, ends, &|at| checks.clone().all(|index| passes(charge, reading, index, at)))
}

/// When figures and windows of providers end that check `index` has read.
fn ends_of(reading: &Reading, index: usize) -> impl Iterator<Item = Timestamp> {
    let ends = reading.counters[index].accounts.iter().flat_map(AccountReading::ends);
    ends.filter(|end| *end > reading.at)
}

fn passes(charge: &Charge, reading: &Reading, index: usize, at: Timestamp) -> bool {
    let check = &charge.checks[index];
    let (dimension, per_connection) = (check.counter.dimension, check.bounds.per_connection);
    let ended = ended_by(reading, index, at);
    let level = reading.counters[index].level_after(dimension, per_connection, at, ended);
    check.judge(&charge.terms, &level).block.is_none()
}

/// The rule itself is asked at instants to come. While nothing happens, consumption only slides out and reservations
/// only end, so what passes goes on passing until a figure or a window of a provider ends: from each of `ends` to the
/// next, bisection finds the first instant.
fn least_wait(
    charge: &Charge,
    reading: &Reading,
    mut ends: Vec<Timestamp>,
    passes: &dyn Fn(Timestamp) -> bool,
) -> Option<u64> {
    ends.sort_unstable();
    ends.dedup();
    let last_deadline = reading.releases.last().map_or(0, |release| release.deadline.ms_since(reading.at));
    let last_end = ends.last().map_or(0, |end| end.ms_since(reading.at));
    let longest = charge.checks.iter().map(|check| check.counter.dimension.window.length_ms()).max();
    let last = last_deadline.max(last_end + 2 * longest.unwrap_or_default());
    let before_ends = ends.iter().map(|end| end.ms_since(reading.at) - 1);
    let mut after = 0;
    for until in before_ends.chain([last]) {
        if until > after
            && let Some(wait_ms) = first_true(|wait_ms| passes(reading.at.plus_ms(wait_ms)), after, until)
        {
            return Some(wait_ms);
        }
        after = until.max(after);
    }
    None
}

/// What of the reservations of check `index` has ended by `at`: `(by the key, by the pool)`.
fn ended_by(reading: &Reading, index: usize, at: Timestamp) -> (u64, u64) {
    let ended = reading.releases.iter().take_while(|release| release.deadline <= at);
    ended.fold((0, 0), |(key, pool), release| {
        let held = release.held[index];
        (key + held.0, pool + held.1)
    })
}

/// The least `n` above `below` and up to `last` for which `holds`, which stays true once it is; `None` if it is not at
/// `last`.
fn first_true(holds: impl Fn(u64) -> bool, mut below: u64, last: u64) -> Option<u64> {
    if !holds(last) {
        return None;
    }
    let mut first = last;
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
            assert_eq!(first_true(|n| n >= first, 0, 1_000), Some(first));
        }
        assert_eq!(first_true(|_| false, 0, 1_000), None);
    }
}
