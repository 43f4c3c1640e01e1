//! How fast a dimension is consumed, and when it will be exhausted at that rate.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::units::{Amount, Timestamp};

/// Weight of the newest rate in the average: an exponential moving average over rates between samples.
const ALPHA: f64 = 0.3;
/// A Record adds a sample if the last one is at least this old.
const SAMPLE_INTERVAL_MS: u64 = 10_000;
/// Most samples that are kept to be shown: an hour of them.
const HISTORY_MAX: usize = 360;

/// What had been consumed at an instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// When.
    pub at: Timestamp,
    /// In steps, since the first record; never decreasing.
    pub cumulative: u64,
}

/// The average rate after the last sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BurnRate {
    /// Steps a second; `None` until two samples at different instants.
    pub steps_per_second: Option<f64>,
    /// `None` before the first sample.
    pub last: Option<Sample>,
}

impl BurnRate {
    /// The average with one more sample.
    #[must_use]
    pub fn after(self, sample: Sample) -> BurnRate {
        let elapsed_ms = self.last.map_or(0, |last| sample.at.ms_since(last.at));
        let steps_per_second = match self.last {
            Some(last) if elapsed_ms > 0 => {
                let consumed = sample.cumulative.saturating_sub(last.cumulative);
                let rate = consumed as f64 / (elapsed_ms as f64 / 1_000.0);
                Some(self.steps_per_second.map_or(rate, |average| ALPHA * rate + (1.0 - ALPHA) * average))
            }
            _ => self.steps_per_second,
        };
        BurnRate { steps_per_second, last: Some(sample) }
    }

    /// How long `remaining` steps last at this rate, in ms, not rounded; `None` if the rate is 0 or not known yet.
    pub fn time_to_exhaustion_ms(&self, remaining: f64) -> Option<f64> {
        let rate = self.steps_per_second.filter(|rate| *rate > 0.0)?;
        Some(remaining.max(0.0) / rate * 1_000.0)
    }

    fn is_due(&self, at: Timestamp) -> bool {
        self.last.is_none_or(|last| at.ms_since(last.at) >= SAMPLE_INTERVAL_MS)
    }
}

/// Follows the consumption of one dimension.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampler {
    rate: BurnRate,
    cumulative: u64,
    /// The oldest first.
    history: VecDeque<Sample>,
}

impl Sampler {
    /// Takes over what an earlier life of the process had.
    pub fn restore(&mut self, rate: BurnRate) {
        self.cumulative = rate.last.map_or(0, |last| last.cumulative);
        self.rate = rate;
    }

    /// As a store kept it: the rate, what was consumed in all, and the samples, the oldest first.
    pub fn of(rate: BurnRate, cumulative: u64, history: Vec<Sample>) -> Self {
        Self { rate, cumulative, history: history.into() }
    }

    /// Something was consumed.
    pub fn add(&mut self, steps: u64) {
        // Stored sums have a ceiling; a rate past it is none.
        self.cumulative += Amount::saturating(steps).room_on(self.cumulative);
    }

    /// Something turned out not to have been consumed.
    pub fn take_back(&mut self, steps: u64) {
        self.cumulative = self.cumulative.saturating_sub(steps);
    }

    /// A call was recorded at `at`: the rate after it, if that was worth a sample.
    pub fn sample(&mut self, at: Timestamp) -> Option<BurnRate> {
        if !self.rate.is_due(at) {
            return None;
        }
        let sample = Sample { at, cumulative: self.cumulative };
        self.rate = self.rate.after(sample);
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(sample);
        Some(self.rate)
    }

    /// The last sample turned out not to have been: the rate is `rate` again.
    pub fn unsample(&mut self, rate: BurnRate) {
        self.rate = rate;
        self.history.pop_back();
    }

    /// The stored rate.
    pub fn rate(&self) -> BurnRate {
        self.rate
    }

    /// The rate as seen at `at`: where a sample is due, with one that is not stored, so that an idle pool's rate falls.
    pub fn rate_at(&self, at: Timestamp) -> BurnRate {
        match self.rate.last {
            Some(_) if self.rate.is_due(at) => self.rate.after(Sample { at, cumulative: self.cumulative }),
            _ => self.rate,
        }
    }

    /// There is something to show: a sample within the last hour.
    pub fn is_live(&self, at: Timestamp) -> bool {
        self.rate.last.is_some_and(|last| at.ms_since(last.at) < HISTORY_MAX as u64 * SAMPLE_INTERVAL_MS)
    }

    /// The samples since the process started, the oldest first, at most an hour of them.
    pub fn history(&self) -> impl Iterator<Item = &Sample> {
        self.history.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_unix_ms(seconds * 1_000)
    }

    #[test]
    fn the_rate_follows_the_samples_and_falls_while_nobody_calls() {
        let mut sampler = Sampler::default();
        assert_eq!(sampler.rate_at(at(100)), BurnRate::default());
        for (second, consumed, rate) in
            [(0, 0, None), (10, 1_000, Some(100.0)), (20, 2_000, Some(130.0)), (30, 0, Some(91.0))]
        {
            sampler.add(consumed);
            let after = sampler.sample(at(second)).unwrap();
            assert_eq!(after.steps_per_second, rate, "at {second} s");
        }
        assert_eq!(sampler.rate().time_to_exhaustion_ms(997_000.0).unwrap().ceil(), 10_956_044.0);
        assert_eq!(sampler.sample(at(39)), None, "the last sample is 9 s old");
        assert_eq!(sampler.rate_at(at(39)).steps_per_second, Some(91.0));
        assert_eq!(sampler.rate_at(at(40)).steps_per_second, Some(91.0 * 0.7));
        assert_eq!(sampler.rate().steps_per_second, Some(91.0), "a look is not stored");
    }

    #[test]
    fn at_most_an_hour_of_samples_is_kept() {
        let mut sampler = Sampler::default();
        for n in 0..500 {
            sampler.sample(at(n * 10));
        }
        assert_eq!(sampler.history().count(), HISTORY_MAX);
        assert_eq!(sampler.history().next().unwrap().at, at(1_400));
    }
}
