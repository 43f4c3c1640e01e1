//! What is known of one key on an account, and how a rise is split over keys.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::core::{
    units::{Amount, Cost, Timestamp},
    window::SlidingCounter,
};

/// What a key records within this time is weighed as one.
const SLICE_MS: u64 = 2_000;
/// Most of them for a key. Past that, neighbours become one, the older the longer, so that they reach back as far as
/// streams last.
const SLICES_MAX: usize = 16;
/// What is known of one key on an account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Its part, in steps.
    pub part: u64,
    /// What it has recorded since the last end of a window.
    pub slid: SlidingCounter,
    /// PERCENT: what it has recorded and no rise has been split by, in the order of time.
    pub(super) since: Slices,
}

pub(super) type Slices = SmallVec<[Slice; 1]>;

/// What was recorded within [`SLICE_MS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Slice {
    first: Timestamp,
    last: Timestamp,
    weight: Weight,
}

/// Recorded on an account, in steps of each unit. What was recorded with its per cents counts as those alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Weight {
    requests: u64,
    tokens: u64,
    usd: u64,
    pub(super) percent: u64,
    /// Something was recorded without a price.
    unpriced: bool,
}

impl Weight {
    fn add(&mut self, cost: &Cost) {
        let sum = |sum: &mut u64, amount: Amount| *sum += amount.room_on(*sum);
        if cost.percent > Amount::ZERO {
            return sum(&mut self.percent, cost.percent);
        }
        sum(&mut self.requests, cost.requests);
        sum(&mut self.tokens, cost.tokens);
        sum(&mut self.usd, cost.usd);
        self.unpriced |= cost.usd == Amount::ZERO && *cost != Cost::default();
    }

    fn and(self, other: Weight) -> Weight {
        Weight {
            requests: self.requests.saturating_add(other.requests),
            tokens: self.tokens.saturating_add(other.tokens),
            usd: self.usd.saturating_add(other.usd),
            percent: self.percent.saturating_add(other.percent),
            unpriced: self.unpriced || other.unpriced,
        }
    }
}

impl Share {
    /// A part, with nothing recorded since.
    pub fn of(part: u64) -> Share {
        Share { part, ..Share::default() }
    }

    /// `cost` was recorded at `at`, or with what was recorded last if that was later.
    pub(super) fn weigh(&mut self, cost: &Cost, at: Timestamp) {
        let at = self.since.last().map_or(at, |slice| slice.last.max(at));
        let fits = |slice: &&mut Slice| at.ms_since(slice.first) < SLICE_MS;
        if let Some(slice) = self.since.last_mut().filter(fits) {
            slice.weight.add(cost);
            slice.last = at;
        } else {
            let mut slice = Slice { first: at, last: at, weight: Weight::default() };
            slice.weight.add(cost);
            self.since.push(slice);
        }
        if self.since.len() > SLICES_MAX {
            self.join_neighbours(at);
        }
    }

    /// Joins the two neighbours that span the smallest part of the time until `now`.
    fn join_neighbours(&mut self, now: Timestamp) {
        let part = |pair: &[Slice]| {
            let (span, age) = (pair[1].last.ms_since(pair[0].first), now.ms_since(pair[1].last));
            span as f64 / (age + SLICE_MS) as f64
        };
        let pairs = self.since.windows(2).enumerate();
        let least = pairs.min_by(|(_, a), (_, b)| part(a).total_cmp(&part(b))).map(|(index, _)| index);
        if let Some(index) = least {
            let older = self.since.remove(index);
            let newer = &mut self.since[index];
            (newer.first, newer.weight) = (older.first, older.weight.and(newer.weight));
        }
    }

    /// How much it takes to keep it.
    pub fn slices(&self) -> usize {
        self.since.len().max(1)
    }

    /// What was recorded by `until`.
    pub(super) fn weight(&self, until: Timestamp) -> Weight {
        let slices = self.since.iter().filter(|slice| slice.last <= until);
        slices.fold(Weight::default(), |sum, slice| sum.and(slice.weight))
    }

    /// Without what was recorded by `until`.
    pub(super) fn after(mut self, until: Timestamp) -> Share {
        self.since.retain(|slice| slice.last > until);
        self
    }
}

/// What each key of a list counts for.
pub(super) struct Split {
    pub(super) weights: Vec<u64>,
    pub(super) sum: u64,
}

impl Split {
    pub(super) fn new(weights: &[Weight], of: impl Fn(&Weight) -> u64) -> Self {
        let weights: Vec<u64> = weights.iter().map(of).collect();
        let sum = weights.iter().fold(0, |sum: u64, weight| sum.saturating_add(*weight));
        Self { weights, sum }
    }

    /// By price if everything has one, else by tokens if there are any, else by requests.
    pub(super) fn by_weight(weights: &[Weight]) -> Self {
        let priced = weights.iter().all(|weight| !weight.unpriced);
        let by: [fn(&Weight) -> u64; 3] =
            [|weight| weight.usd, |weight| weight.tokens, |weight| weight.requests];
        let mut splits = by.into_iter().skip(usize::from(!priced)).map(|of| Self::new(weights, of));
        splits.find(|split| split.sum > 0).unwrap_or(Self { weights: Vec::new(), sum: 0 })
    }
}

/// `amount * numerator / denominator` in doubles, rounded down.
pub(super) fn scaled(amount: u64, numerator: u64, denominator: u64) -> u64 {
    (amount as f64 * numerator as f64 / denominator as f64) as u64
}
