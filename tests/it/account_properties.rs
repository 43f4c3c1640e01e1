//! Whatever is recorded, reported and waited for: figures are split whole, effects can be undone and restored, and waits are
//! honest although figures and windows end.

use std::cell::Cell;

use proptest::{prelude::*, test_runner::TestCaseError};
use quota_share::core::{
    account::Observation,
    admission::Verdict,
    headers::Reset,
    ledger::{Change, PoolLedger},
    plan::DimensionKey,
    units::{Amount, Cost, Timestamp, Unit},
};

use crate::{
    cases::for_all,
    model::{Call, Rig, START, allocation, connection, dimension, dimension_spec, pool},
};

const HOUR_MS: u64 = 3_600_000;
const KEYS: [&str; 2] = ["a", "b"];

#[derive(Clone, Debug)]
enum Step {
    Record { key: usize, connection: usize, requests: u64, tokens: u64, percent: u64, figure: Option<Figure> },
    Report { connection: usize, figure: Figure },
    Hold { key: usize, connection: usize, requests: u64, percent: u64, for_ms: u64 },
    Wait(u64),
    Reset { key: Option<usize>, percent: Option<bool> },
}

/// What a provider says of an account's dimension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    /// Of which of the two.
    percent: bool,
    hundredths: u32,
    age_ms: u64,
    /// From the observation on; `None`: not said.
    ends_in_ms: Option<u64>,
    anchors: bool,
    age_known: bool,
}

impl Figure {
    /// The figure as it is read at `now`, of `dimension`.
    pub(crate) fn observed(
        self,
        dimension: DimensionKey,
        now: Timestamp,
        alone: bool,
        believed: bool,
    ) -> Observation {
        let observed_at = Timestamp::from_unix_ms(now.unix_ms() - self.age_ms);
        let fits = |ms: &u64| *ms <= dimension.window.length_ms() * 21 / 20;
        let reset = match self.ends_in_ms {
            Some(ms) if self.anchors && fits(&ms) => Reset::WindowEnd(observed_at.plus_ms(ms)),
            Some(ms) => Reset::Refill(observed_at.plus_ms(ms)),
            None => Reset::Unknown,
        };
        Observation {
            dimension,
            fraction: f64::from(self.hundredths) / 100.0,
            observed_at,
            reset,
            life_ms: 30_000,
            believed,
            age_known: self.age_known,
            alone,
        }
    }
}

fn percent() -> DimensionKey {
    dimension(Unit::Percent, "5h")
}

fn hourly() -> DimensionKey {
    dimension(Unit::Requests, "hourly")
}

/// Mostly ends of the same few windows, a little off.
pub(crate) fn any_figure() -> impl Strategy<Value = Figure> {
    let ends_in_ms = prop_oneof![
        2 => Just(None),
        4 => (1..4u64, 0..5_000u64).prop_map(|(quarters, off)| Some(quarters * 900_000 + off)),
        1 => (1..5 * HOUR_MS).prop_map(Some),
    ];
    (
        any::<bool>(),
        0..=120u32,
        prop_oneof![3 => Just(0), 1 => 0..600_000u64],
        ends_in_ms,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(percent, hundredths, age_ms, ends_in_ms, anchors, age_known)| Figure {
            percent,
            hundredths,
            age_ms,
            ends_in_ms,
            anchors,
            age_known,
        })
}

fn any_step() -> impl Strategy<Value = Step> {
    let per_cents = || prop_oneof![3 => Just(0), 1 => 0..20_000_000u64];
    prop_oneof![
        5 => (0..2usize, 0..2usize, 0..40u64, 0..1_000u64, per_cents(), prop::option::of(any_figure())).prop_map(
            |(key, connection, requests, tokens, percent, figure)| Step::Record {
                key, connection, requests, tokens, percent, figure,
            }
        ),
        4 => (0..2usize, any_figure()).prop_map(|(connection, figure)| Step::Report { connection, figure }),
        2 => (0..2usize, 0..2usize, 0..30u64, per_cents(), 1..HOUR_MS).prop_map(
            |(key, connection, requests, percent, for_ms)| Step::Hold { key, connection, requests, percent, for_ms }
        ),
        3 => prop_oneof![0..60_000u64, 0..HOUR_MS, 0..6 * HOUR_MS].prop_map(Step::Wait),
        1 => (prop::option::of(0..2usize), prop::option::of(any::<bool>()))
            .prop_map(|(key, percent)| Step::Reset { key, percent }),
    ]
}

/// One or two connections, and what happens.
fn any_history() -> impl Strategy<Value = (usize, Vec<Step>)> {
    (1..=2usize, prop::collection::vec(any_step(), 1..40))
}

struct World {
    rig: Rig,
    connections: usize,
}

impl World {
    fn new(connections: usize) -> Self {
        let keys = KEYS.map(|key| allocation(key, 50.0, "hard"));
        let mut spec = pool(keys.into());
        spec.connection_ids = (0..connections).map(|index| format!("c{index}")).collect();
        let plan = vec![
            dimension_spec(Unit::Percent, "5h", Some(100.0)),
            dimension_spec(Unit::Requests, "hourly", Some(100.0)),
        ];
        Self { rig: Rig::new(spec, plan, START), connections }
    }

    fn serve_by(&mut self, index: usize) {
        self.rig.serving = connection(&format!("c{}", index % self.connections));
    }

    fn observation(&self, figure: Figure, believed: bool) -> Observation {
        let of = if figure.percent { percent() } else { hourly() };
        figure.observed(of, self.rig.now, self.connections == 1, believed)
    }

    fn call(&self, key: usize, requests: u64, tokens: u64, percent: u64) -> Call {
        let amount = Amount::saturating;
        let cost = Cost {
            requests: amount(requests),
            tokens: amount(tokens),
            percent: amount(percent),
            ..Cost::default()
        };
        Call::new(KEYS[key], cost)
    }

    fn play(&mut self, step: &Step) {
        match *step {
            Step::Record { key, connection, requests, tokens, percent, figure } => {
                self.serve_by(connection);
                self.rig.observations =
                    figure.map(|figure| self.observation(figure, false)).into_iter().collect();
                let call = self.call(key, requests, tokens, percent);
                self.rig.record(&call, "", "").expect("nothing to contradict");
            }
            Step::Report { connection, figure } => {
                self.serve_by(connection);
                let seen = [self.observation(figure, true)];
                // Whether it is taken or not, what has to hold holds.
                let _ = self.rig.report(&seen);
            }
            Step::Hold { key, connection, requests, percent, for_ms } => {
                self.serve_by(connection);
                let call = self.call(key, requests, 0, percent);
                self.rig.hold(&call, for_ms, "").expect("nothing to contradict");
            }
            Step::Wait(ms) => self.rig.wait(ms),
            Step::Reset { key, percent: of_percent } => {
                let of = of_percent.map(|of_percent| if of_percent { percent() } else { hourly() });
                let key = key.map(|key| crate::model::key(KEYS[key]));
                self.rig.ledger.reset(key.as_ref(), of, self.rig.now);
            }
        }
    }

    /// All that can be seen: usage, and the answer to each key on each connection.
    fn seen(&mut self) -> (String, Vec<Verdict>) {
        let mut verdicts = Vec::new();
        for connection in 0..self.connections {
            self.serve_by(connection);
            for key in 0..KEYS.len() {
                verdicts.push(self.rig.ask(&self.call(key, 1, 0, 1_000_000)));
            }
        }
        let usage = self.rig.usage();
        let totals = self.rig.totals();
        (format!("{totals:?} {:?} {:?}", usage.keys, usage.accounts), verdicts)
    }

    fn figures_are_split_whole(&mut self) -> Result<(), TestCaseError> {
        for account in &self.rig.usage().accounts[0] {
            let figure = (account.fraction * 1e8).round_ties_even() as u64;
            prop_assert_eq!(account.external + account.parts, figure, "{:?}", account);
        }
        for (index, of) in [percent(), hourly()].into_iter().enumerate() {
            let keys: f64 = KEYS.iter().map(|key| self.rig.of_key(key, of).0).sum();
            let total = self.rig.totals()[index].0;
            prop_assert!((keys - total).abs() <= 1e-9 * total, "{of}: keys {keys}, pool {total}");
        }
        Ok(())
    }
}

#[test]
fn parts_and_external_are_the_figure_and_keys_sum_to_the_pool() {
    for_all(500, any_history(), |(connections, steps)| {
        let mut world = World::new(connections);
        for step in &steps {
            world.play(step);
            world.figures_are_split_whole()?;
        }
        Ok(())
    });
}

#[test]
fn what_a_step_did_to_accounts_can_be_undone() {
    for_all(500, (any_history(), any_step()), |((connections, steps), last)| {
        if matches!(last, Step::Wait(_)) {
            return Ok(());
        }
        let mut world = World::new(connections);
        steps.iter().for_each(|step| world.play(step));
        let before = world.seen();
        world.rig.ledger.take_changes();
        world.play(&last);
        let changes = world.rig.ledger.take_changes();
        world.rig.ledger.revert(changes);
        prop_assert_eq!(world.seen(), before);
        Ok(())
    });
}

#[test]
fn accounts_are_restored_from_their_changes() {
    for_all(500, any_history(), |(connections, steps)| {
        let mut world = World::new(connections);
        let mut kept: Vec<Change> = Vec::new();
        for step in &steps {
            world.play(step);
            kept.extend(world.rig.ledger.take_changes());
        }
        let before = world.seen();
        kept.extend(world.rig.ledger.take_changes());
        let revision = world.rig.entry().history.created_revision;
        let mut restored = PoolLedger::new(revision, world.rig.now);
        // Of counters a store keeps the sums.
        let (consumed, others): (Vec<Change>, Vec<Change>) =
            kept.into_iter().partition(|change| matches!(change, Change::Consumed { .. }));
        for change in summed(consumed).into_iter().chain(others) {
            restored.restore(change);
        }
        world.rig.ledger = restored;
        prop_assert_eq!(world.seen(), before);
        Ok(())
    });
}

/// The oldest bucket first.
fn summed(changes: Vec<Change>) -> Vec<Change> {
    let mut sums = std::collections::BTreeMap::new();
    for change in changes {
        if let Change::Consumed { api_key, counter, bucket, delta } = change {
            *sums.entry((bucket, api_key, counter)).or_insert(0) += delta;
        }
    }
    let sums = sums.into_iter();
    sums.map(|((bucket, api_key, counter), delta)| Change::Consumed { api_key, counter, bucket, delta })
        .collect()
}

#[test]
fn waits_are_honest_though_figures_and_windows_end() {
    let (blocked, with_a_wait) = (Cell::new(0), Cell::new(0));
    for_all(500, (any_history(), 0..2usize, 0..40u64), |((connections, steps), key, requests)| {
        let mut world = World::new(connections);
        steps.iter().for_each(|step| world.play(step));
        let call = world.call(key, requests, 0, 2_000_000);
        let verdict = world.rig.ask(&call);
        if verdict.block().is_none() {
            return Ok(());
        }
        // What has no end stays, as far as waits are concerned, and is forgotten in truth.
        let usage = world.rig.usage();
        let mut accounts = usage.accounts.iter().flatten();
        if accounts.any(|account| account.ends_at.is_none() && account.fresh) {
            return Ok(());
        }
        blocked.set(blocked.get() + 1);
        let at = |ms: u64| world.rig.ask_after(&call, ms).block().is_none();
        match verdict.allowed_after_ms {
            None => {
                let later =
                    [1, 60_000, 900_000, HOUR_MS, 2 * HOUR_MS, 5 * HOUR_MS, 10 * HOUR_MS, 20 * HOUR_MS];
                prop_assert!(!later.into_iter().any(at), "a wait helps");
            }
            Some(wait) => {
                with_a_wait.set(with_a_wait.get() + 1);
                prop_assert!(at(wait), "not allowed after {wait}");
                prop_assert!(!at(wait - 1), "allowed before {wait}");
                for part in 1..64 {
                    prop_assert!(!at(wait * part / 64), "allowed at {part} of 64 of {wait}");
                }
            }
        }
        Ok(())
    });
    let (blocked, with_a_wait) = (blocked.get(), with_a_wait.get());
    assert!(blocked > 50 && with_a_wait > 30, "{blocked} blocked, {with_a_wait} with a wait");
}
