//! Window lengths, their names, and the sliding estimate over two buckets.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::units::{Amount, Timestamp};

const SECOND_MS: u64 = 1_000;
const MINUTE_MS: u64 = 60 * SECOND_MS;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const DAY_MS: u64 = 24 * HOUR_MS;

/// The length of a window: whole seconds, 1 s to 366 days. Two spellings of one length are one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Window {
    length_ms: u64,
}

impl Window {
    /// The longest length in milliseconds.
    pub const LONGEST_MS: u64 = 366 * DAY_MS;
    /// One hour.
    pub const HOURLY: Window = Window { length_ms: HOUR_MS };

    const NAMED: [(&'static str, u64); 4] =
        [("hourly", HOUR_MS), ("daily", DAY_MS), ("weekly", 7 * DAY_MS), ("monthly", 30 * DAY_MS)];
    const SUFFIXED: [(char, u64); 4] = [('d', DAY_MS), ('h', HOUR_MS), ('m', MINUTE_MS), ('s', SECOND_MS)];

    /// What [`parse`](Window::parse) accepts, for error messages.
    pub const ACCEPTED: &'static str =
        "hourly, daily, weekly, monthly (30 days), or a length of 1s to 366d such as 90s, 1m, 5h, 7d";

    /// The window that `text` names, or `None`.
    pub fn parse(text: &str) -> Option<Window> {
        if let Some((_, length_ms)) = Self::NAMED.into_iter().find(|(name, _)| *name == text) {
            return Some(Window { length_ms });
        }
        let suffix = text.chars().next_back()?;
        let (_, unit_ms) = Self::SUFFIXED.into_iter().find(|(c, _)| *c == suffix)?;
        let digits = &text[..text.len() - suffix.len_utf8()];
        // `parse` alone would accept "+5".
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        Self::from_ms(digits.parse::<u64>().ok()?.checked_mul(unit_ms)?)
    }

    /// The window of this length, or `None` if no window has it.
    pub fn from_ms(length_ms: u64) -> Option<Window> {
        let valid =
            length_ms.is_multiple_of(SECOND_MS) && (SECOND_MS..=Self::LONGEST_MS).contains(&length_ms);
        valid.then_some(Window { length_ms })
    }

    /// The length in milliseconds.
    pub const fn length_ms(self) -> u64 {
        self.length_ms
    }

    /// The bucket that `at` falls in: buckets are aligned to the epoch.
    pub const fn bucket(self, at: Timestamp) -> u64 {
        at.unix_ms() / self.length_ms
    }

    /// What slides into view at `at`: the part of the bucket before the one of `at` that is still inside the window,
    /// and all of the one of `at`.
    ///
    /// An estimate, as if the previous bucket had been filled evenly: it never loses or invents consumption, but two
    /// bursts around a bucket's edge can together exceed a limit within one true window.
    pub fn estimate(self, at: Timestamp, previous: f64, current: f64) -> f64 {
        let elapsed = at.unix_ms() % self.length_ms;
        let faded = previous * (self.length_ms - elapsed) as f64 / self.length_ms as f64;
        // Rounding must not make it more than it was.
        faded.min(previous) + current
    }
}

impl TryFrom<u64> for Window {
    type Error = &'static str;

    fn try_from(length_ms: u64) -> Result<Self, Self::Error> {
        Self::from_ms(length_ms).ok_or(Self::ACCEPTED)
    }
}

impl From<Window> for u64 {
    fn from(window: Window) -> u64 {
        window.length_ms
    }
}

/// The canonical name: `hourly`, `5h`, `daily`, `90s`, ...
impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((name, _)) = Self::NAMED.into_iter().find(|(_, length)| *length == self.length_ms) {
            return f.write_str(name);
        }
        let (suffix, unit_ms) = Self::SUFFIXED
            .into_iter()
            .find(|(_, unit_ms)| self.length_ms.is_multiple_of(*unit_ms))
            .unwrap_or(('s', SECOND_MS));
        write!(f, "{}{suffix}", self.length_ms / unit_ms)
    }
}

/// What one counter holds in its two live buckets, in steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlidingCounter {
    bucket: u64,
    current: u64,
    previous: u64,
}

impl SlidingCounter {
    /// What `bucket` and the one before it hold.
    pub const fn of_buckets(bucket: u64, current: u64, previous: u64) -> Self {
        Self { bucket, current, previous }
    }

    /// The estimate at `at`, which is not before the newest bucket.
    pub fn at(&self, window: Window, at: Timestamp) -> f64 {
        let (previous, current) = self.seen_from(window.bucket(at));
        window.estimate(at, previous as f64, current as f64)
    }

    /// Moves on to `bucket`, forgetting what has left the window. A bucket in the past changes nothing.
    pub fn advance(&mut self, bucket: u64) {
        if bucket > self.bucket {
            let (previous, current) = self.seen_from(bucket);
            *self = Self { bucket, current, previous };
        }
    }

    /// Adds `amount` to `bucket` as far as the ceiling of stored sums allows; returns what was added: nothing to a bucket
    /// that has left the window.
    pub fn add(&mut self, bucket: u64, amount: Amount) -> u64 {
        self.advance(bucket);
        let slot = match self.bucket - bucket {
            0 => &mut self.current,
            1 => &mut self.previous,
            _ => return 0,
        };
        let added = amount.room_on(*slot);
        *slot += added;
        added
    }

    /// Changes what `bucket` holds by `delta`, which the caller knows to fit; a bucket that has left the window is left
    /// alone, one that is ahead counts as the newest.
    pub fn adjust(&mut self, bucket: u64, delta: i64) {
        let slot = if bucket >= self.bucket {
            &mut self.current
        } else if bucket + 1 == self.bucket {
            &mut self.previous
        } else {
            return;
        };
        *slot = slot.saturating_add_signed(delta);
    }

    /// Takes out what `part`, which is one of those that add up to this, still has in view.
    pub fn take(&mut self, part: &SlidingCounter) {
        let (previous, current) = part.seen_from(self.bucket);
        self.current = self.current.saturating_sub(current);
        self.previous = self.previous.saturating_sub(previous);
    }

    /// What is held in the newest bucket and in the one before: `(bucket, amount)`.
    pub fn held(&self) -> [(u64, u64); 2] {
        [(self.bucket, self.current), (self.bucket.saturating_sub(1), self.previous)]
    }

    /// True if nothing is left in the window at `bucket`.
    pub fn is_spent(&self, bucket: u64) -> bool {
        self.seen_from(bucket) == (0, 0)
    }

    /// Accepts that the clock went back to `bucket`: what was filed ahead of it counts in it.
    pub fn rebase(&mut self, bucket: u64) {
        if bucket < self.bucket {
            let current = Amount::saturating(self.current.saturating_add(self.previous)).steps();
            *self = Self { bucket, current, previous: 0 };
        }
    }

    /// What `counters` hold together, as seen from `bucket`.
    pub fn sum(bucket: u64, counters: impl Iterator<Item = SlidingCounter>) -> SlidingCounter {
        counters.fold(SlidingCounter { bucket, ..SlidingCounter::default() }, |sum, counter| {
            let (previous, current) = counter.seen_from(bucket);
            SlidingCounter {
                bucket,
                current: sum.current + Amount::saturating(current).room_on(sum.current),
                previous: sum.previous + Amount::saturating(previous).room_on(sum.previous),
            }
        })
    }

    /// `(previous, current)` as seen from `bucket`.
    fn seen_from(&self, bucket: u64) -> (u64, u64) {
        match bucket.saturating_sub(self.bucket) {
            0 => (self.previous, self.current),
            1 => (self.current, 0),
            _ => (0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_spellings_of_one_length_are_one_window_with_one_name() {
        // given | canonical, or refused
        let cases: &[(&str, Option<&str>)] = &[
            ("hourly", Some("hourly")),
            ("60m", Some("hourly")),
            ("1h", Some("hourly")),
            ("3600s", Some("hourly")),
            ("24h", Some("daily")),
            ("7d", Some("weekly")),
            ("30d", Some("monthly")),
            ("300m", Some("5h")),
            ("90s", Some("90s")),
            ("120s", Some("2m")),
            ("366d", Some("366d")),
            ("1s", Some("1s")),
            ("0s", None),
            ("367d", None),
            ("yearly", None),
            ("", None),
            ("m", None),
            ("+5m", None),
            ("-5m", None),
            ("1.5h", None),
            ("5 h", None),
            ("5H", None),
            ("99999999999999999999d", None),
            ("18446744073709551615d", None),
            ("5é", None),
        ];
        for &(given, want) in cases {
            let got = Window::parse(given).map(|window| window.to_string());
            assert_eq!(got.as_deref(), want, "{given:?}");
        }
    }

    #[test]
    fn a_counter_slides_over_its_two_buckets_and_forgets_the_rest() {
        let hour = Window::HOURLY;
        let at = |minutes: u64| Timestamp::from_unix_ms(minutes * MINUTE_MS);
        let mut counter = SlidingCounter::default();
        counter.add(hour.bucket(at(90)), Amount::saturating(100));
        // minute | seen
        for (minute, want) in
            [(90, 100.0), (119, 100.0), (120, 100.0), (150, 50.0), (179, 100.0 / 60.0), (180, 0.0)]
        {
            assert_eq!(counter.at(hour, at(minute)), want, "at minute {minute}");
        }
        assert!(!counter.is_spent(2));
        assert!(counter.is_spent(3));
    }

    #[test]
    fn stored_sums_stop_at_the_ceiling_and_say_what_was_added() {
        let mut counter = SlidingCounter::default();
        assert_eq!(counter.add(5, Amount::saturating(u64::MAX)), Amount::MAX.steps());
        assert_eq!(counter.add(5, Amount::saturating(1)), 0);
        assert_eq!(counter.add(6, Amount::saturating(1)), 1);
        assert_eq!(counter.add(5, Amount::saturating(1)), 0);
        assert_eq!(counter.add(4, Amount::saturating(1)), 0);
        assert_eq!(counter.held(), [(6, 1), (5, Amount::MAX.steps())]);
    }

    #[test]
    fn a_clock_that_went_back_finds_what_was_ahead_in_its_own_bucket() {
        let mut counter = SlidingCounter::default();
        counter.add(8, Amount::saturating(3));
        counter.add(9, Amount::saturating(4));
        counter.rebase(2);
        assert_eq!(counter.held(), [(2, 7), (1, 0)]);
        counter.adjust(9, -4);
        assert_eq!(counter.held(), [(2, 3), (1, 0)]);
    }
}
