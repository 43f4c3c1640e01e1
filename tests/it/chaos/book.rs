//! What callers know: sums that must be there, holds that must fit, and promises that were broken.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use hdrhistogram::Histogram;

use super::pools::{REQUESTS, TOKENS, USD};
use crate::harness::pb;

/// Instants with a degraded answer are counted in steps of this length.
const STEP_MS: u64 = 100;
/// Records that are sent again at the end, of each caller.
const SAMPLES_MAX: usize = 8;

/// An amount in each unit, in the steps that are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) requests: i64,
    pub(crate) tokens: i64,
    pub(crate) usd_nanos: i64,
}

impl Sum {
    pub(super) fn of(cost: &pb::Cost) -> Self {
        Self {
            requests: cost.requests.unwrap_or(1),
            tokens: cost.tokens.unwrap_or(0),
            usd_nanos: (cost.usd.unwrap_or(0.0) * 1e9).round() as i64,
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.tokens += other.tokens;
        self.usd_nanos += other.usd_nanos;
    }

    /// As usage shows it in one dimension.
    pub(super) fn shown_in(self, dimension: &str) -> f64 {
        match dimension {
            REQUESTS => self.requests as f64,
            TOKENS => self.tokens as f64,
            USD => self.usd_nanos as f64 / 1e9,
            other => panic!("no pool has {other}"),
        }
    }
}

/// Tokens of a pool without room that were surely held, or surely counted under a hold, for a span of time: in us since
/// the run began, without the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Certain {
    pub(super) tokens: i64,
    pub(super) from_us: u64,
    pub(super) until_us: u64,
}

/// The most tokens that were certain at one instant, and that instant in us.
///
/// In a pool in which everything is held before it is recorded, and costs no more than was held, consumed and reserved
/// together never exceed the limit: only an admission raises them, and it looks at the limit. What is recorded when its
/// hold has ended (by its deadline) is the exception: it raises what is consumed, and no admission looked. Let `late` be
/// the sum of such costs until now; then
///
/// ```text
///     consumed - late + reserved <= limit        at any instant
/// ```
///
/// since an admission demands even more, and a late cost changes neither side. A caller does not see `consumed` and
/// `reserved` of an instant, but knows a lower bound of the left side:
///
/// - A hold that was answered without `degraded`, and that no earlier attempt can have made, is there from its answer
///   until its settling or release is first sent, or until its life has passed since it was *asked for*, as it began no
///   earlier. Redis restarts with all it has answered: it is told to write before it answers.
/// - A cost is in `consumed - late` from its answer on, for good, if that says that the hold was there
///   (neither `reservation_expired` nor `duplicate`, of which that is not known), and that it is counted already (not
///   `journaled`).
///
/// What is between the two, or known to one of them alone, is left out.
pub(super) fn most_certain(spans: &[Certain]) -> (i64, u64) {
    let edges = spans.iter().filter(|span| span.from_us < span.until_us);
    let edges = edges.flat_map(|span| [(span.from_us, span.tokens), (span.until_us, -span.tokens)]);
    let mut edges: Vec<_> = edges.collect();
    // At one instant, ends come first.
    edges.sort_unstable();
    let (mut now, mut most) = (0, (0, 0));
    for (at, change) in edges {
        now += change;
        most = most.max((now, at));
    }
    most
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Book {
    /// What was acknowledged, by pool and key.
    pub(crate) consumed: BTreeMap<(String, String), Sum>,
    /// Tokens that may have been counted while nothing was held for them, by pool.
    pub(super) perhaps_late: BTreeMap<String, i64>,
    pub(super) certain: BTreeMap<String, Vec<Certain>>,
    /// Records that were acknowledged, to be sent again.
    pub(super) samples: Vec<pb::RecordConsumptionRequest>,
    pub(crate) acknowledged: u64,
    pub(crate) journaled: u64,
    pub(super) held: u64,
    pub(super) settled: u64,
    pub(super) released: u64,
    pub(super) blocked: u64,
    pub(super) repeated: u64,
    pub(crate) degraded: BTreeMap<usize, u64>,
    /// In which steps each replica has answered so.
    degraded_steps: BTreeMap<usize, BTreeSet<u64>>,
    /// Calls that were sent again, by why.
    pub(super) retries: BTreeMap<String, u64>,
    /// Until an answer, in us.
    pub(super) decisions_us: Histogram<u64>,
    pub(super) records_us: Histogram<u64>,
    /// Promises that were broken, in words.
    pub(crate) broken: Vec<String>,
    /// Every call, to see why.
    pub(super) calls: Vec<(Duration, String)>,
}

impl Default for Book {
    fn default() -> Self {
        // Up to a minute.
        let histogram = || Histogram::new_with_max(60_000_000, 3).expect("three digits are possible");
        Self {
            consumed: BTreeMap::new(),
            perhaps_late: BTreeMap::new(),
            certain: BTreeMap::new(),
            samples: Vec::new(),
            acknowledged: 0,
            journaled: 0,
            held: 0,
            settled: 0,
            released: 0,
            blocked: 0,
            repeated: 0,
            degraded: BTreeMap::new(),
            degraded_steps: BTreeMap::new(),
            retries: BTreeMap::new(),
            decisions_us: histogram(),
            records_us: histogram(),
            broken: Vec::new(),
            calls: Vec::new(),
        }
    }
}

impl Book {
    /// `record` was acknowledged in `pool`.
    pub(super) fn counted(&mut self, pool: &str, record: &pb::RecordConsumptionRequest, journaled: bool) {
        let cost = Sum::of(record.cost.as_ref().unwrap_or(&pb::Cost::default()));
        self.consumed.entry((pool.to_owned(), record.api_key_id.clone())).or_default().add(cost);
        self.acknowledged += 1;
        self.journaled += u64::from(journaled);
        // The first ones, and then ever fewer, so that they are of the whole run.
        if self.acknowledged.is_power_of_two() {
            if self.samples.len() == SAMPLES_MAX {
                self.samples.remove(0);
            }
            self.samples.push(record.clone());
        }
    }

    pub(super) fn degraded(&mut self, replica: usize, at: Duration) {
        *self.degraded.entry(replica).or_default() += 1;
        self.degraded_steps.entry(replica).or_default().insert(at.as_millis() as u64 / STEP_MS);
    }

    /// For how many seconds a replica has given degraded answers, to a tenth.
    pub(crate) fn degraded_seconds(&self, replica: usize) -> f64 {
        let steps = self.degraded_steps.get(&replica).map_or(0, BTreeSet::len);
        steps as f64 * STEP_MS as f64 / 1e3
    }

    pub(crate) fn merge(&mut self, other: Book) {
        for (whose, sum) in other.consumed {
            self.consumed.entry(whose).or_default().add(sum);
        }
        for (pool, tokens) in other.perhaps_late {
            *self.perhaps_late.entry(pool).or_default() += tokens;
        }
        for (pool, spans) in other.certain {
            self.certain.entry(pool).or_default().extend(spans);
        }
        for (replica, answers) in other.degraded {
            *self.degraded.entry(replica).or_default() += answers;
        }
        for (replica, steps) in other.degraded_steps {
            self.degraded_steps.entry(replica).or_default().extend(steps);
        }
        for (why, times) in other.retries {
            *self.retries.entry(why).or_default() += times;
        }
        self.samples.extend(other.samples);
        self.acknowledged += other.acknowledged;
        self.journaled += other.journaled;
        self.held += other.held;
        self.settled += other.settled;
        self.released += other.released;
        self.blocked += other.blocked;
        self.repeated += other.repeated;
        self.decisions_us.add(other.decisions_us).expect("both take any value");
        self.records_us.add(other.records_us).expect("both take any value");
        self.broken.extend(other.broken);
        self.calls.extend(other.calls);
    }

    /// The sum of a pool over its keys.
    pub(super) fn total(&self, pool: &str) -> Sum {
        let mut total = Sum::default();
        let sums = self.consumed.iter().filter(|((of, _), _)| of == pool);
        sums.for_each(|(_, sum)| total.add(*sum));
        total
    }
}

#[test]
fn the_most_that_is_certain_is_what_overlaps() {
    let span = |tokens, from_us, until_us| Certain { tokens, from_us, until_us };
    // spans | the most, and since when
    let cases: [(&[Certain], (i64, u64)); 5] = [
        (&[], (0, 0)),
        (&[span(5, 10, 20), span(7, 20, 30)], (7, 20)), // one ends as the other begins
        (&[span(5, 10, 21), span(7, 20, 30)], (12, 20)),
        (&[span(5, 10, u64::MAX), span(7, 20, 30), span(1, 30, 40)], (12, 20)),
        (&[span(5, 10, 10), span(7, 20, 15)], (0, 0)), // they ended before they were known
    ];
    for (spans, want) in cases {
        assert_eq!(most_certain(spans), want, "{spans:?}");
    }
}
