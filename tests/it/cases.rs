//! Random pools with a history, steered to where it is interesting: small limits that a few calls fill up, and time
//! that mostly moves by less than a window.

use proptest::{
    prelude::*,
    sample::{Index, select},
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};
use quota_share::core::{
    admission::{Level, Reading, Release, Verdict},
    charge::Charge,
    ids::ReservationId,
    ledger::{Contradiction, Recorded, UsageReading},
    plan::DimensionSpec,
    pool::{AllocationSpec, CapSpec, ModelCapSpec, PoolSpec},
    units::{Amount, Cost, Timestamp, Unit},
};

use crate::model::{Call, Decided, Rig, START, allocation, dimension_spec, key, pool};

/// Short enough for a clock that steps by the millisecond.
pub(crate) const SHORT: &[&str] = &["1s", "1s", "2s", "3s"];
/// Some that outlast every step of the clock, and some that do not.
pub(crate) const MIXED: &[&str] = &["1s", "10s", "hourly", "5h", "weekly"];

/// The only model that has caps.
pub(crate) const CAPPED_MODEL: &str = "m";
/// Records, but has no allocation.
const LEFT: &str = "left";
const KEYS: [&str; 4] = ["a", "b", "c", "d"];
/// Of one history: fewer reservations than are followed one by one.
const STEPS_MAX: usize = 30;

/// A pool, what happened in it, and a question.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) pool: PoolSpec,
    pub(crate) plan: Vec<DimensionSpec>,
    pub(crate) start: Timestamp,
    pub(crate) history: Vec<Step>,
    pub(crate) question: Call,
}

/// A wait, and what is done then.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) wait_ms: u64,
    pub(crate) call: Call,
    pub(crate) act: Act,
    /// The call's request id or idempotency key; empty: none. Few, so that they repeat.
    pub(crate) id: String,
}

#[derive(Clone, Debug)]
pub(crate) enum Act {
    Record,
    /// For so many ms.
    Hold(u64),
    /// Of the reservations made so far, with the call's cost and the reservation's key.
    Settle(Index),
    Release(Index),
    /// Of the call's key, in all dimensions.
    Reset,
}

/// How a step was answered.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    Held(Box<Result<Decided, Contradiction>>),
    Recorded(Result<Recorded, Contradiction>),
    Released(bool),
    Reset,
}

/// A reservation that was made.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) id: ReservationId,
    pub(crate) call: Call,
}

/// A rig and the reservations that its history made.
#[derive(Clone, Debug)]
pub(crate) struct Player {
    pub(crate) rig: Rig,
    pub(crate) made: Vec<Made>,
}

/// All that can be seen of a ledger at one instant.
#[derive(Debug, PartialEq)]
pub(crate) struct Snapshot {
    usage: UsageReading,
    totals: Vec<(f64, f64)>,
    seen: Vec<Seen>,
    open: Vec<ReservationId>,
}

/// What one charge sees, and the answer to it.
#[derive(Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) levels: Vec<Level>,
    releases: Vec<Release>,
    pub(crate) verdict: Verdict,
}

impl Seen {
    /// What `reading` means to `charge`.
    pub(crate) fn of(charge: &Charge, reading: Reading) -> Seen {
        let verdict = Verdict::of(charge, &reading);
        let levels = charge.checks.iter().zip(&reading.counters);
        let levels = levels.map(|(check, counters)| check.level(counters, reading.at));
        Seen { levels: levels.collect(), releases: reading.releases, verdict }
    }
}

impl Case {
    /// The pool before its history.
    pub(crate) fn player(&self) -> Player {
        Player { rig: Rig::new(self.pool.clone(), self.plan.clone(), self.start), made: Vec::new() }
    }

    /// The pool after its history.
    pub(crate) fn played(&self) -> Player {
        let mut player = self.player();
        player.play(&self.history);
        player
    }
}

impl Player {
    pub(crate) fn play(&mut self, steps: &[Step]) -> Vec<Outcome> {
        steps.iter().map(|step| self.act(step)).collect()
    }

    pub(crate) fn act(&mut self, step: &Step) -> Outcome {
        self.rig.wait(step.wait_ms);
        let call = self.call_of(step);
        match step.act {
            Act::Hold(reserve_for_ms) => {
                let held = self.rig.hold(&call, reserve_for_ms, &step.id);
                if let Ok((_, Some(reserved))) = &held
                    && !reserved.repeated
                {
                    self.made.push(Made { id: reserved.id, call });
                }
                Outcome::Held(Box::new(held))
            }
            Act::Settle(index) if !self.made.is_empty() => {
                let id = index.get(&self.made).id.to_string();
                Outcome::Recorded(self.rig.record(&call, "", &id))
            }
            Act::Record | Act::Settle(_) => Outcome::Recorded(self.rig.record(&call, &step.id, "")),
            Act::Release(index) if !self.made.is_empty() => {
                let id = index.get(&self.made).id;
                Outcome::Released(self.rig.ledger.release(id, None, self.rig.now).expect("no key to check"))
            }
            Act::Release(_) => Outcome::Released(false),
            Act::Reset => {
                self.rig.ledger.reset(Some(&key(&call.key)), None, self.rig.now);
                Outcome::Reset
            }
        }
    }

    /// The call that a step makes: by the key of the reservation that it settles, and by a key of the pool where a
    /// decision is asked for.
    pub(crate) fn call_of(&self, step: &Step) -> Call {
        let mut call = step.call.clone();
        match step.act {
            Act::Settle(index) if !self.made.is_empty() => {
                call.key.clone_from(&index.get(&self.made).call.key)
            }
            Act::Hold(_) => call.key = self.member(&call.key),
            _ => {}
        }
        call
    }

    pub(crate) fn question(&self, case: &Case) -> Call {
        self.by_member(&case.question)
    }

    /// The call, by a key of the pool.
    pub(crate) fn by_member(&self, call: &Call) -> Call {
        Call { key: self.member(&call.key), ..call.clone() }
    }

    fn member(&self, key: &str) -> String {
        let entry = self.rig.entry();
        let listed = entry.pool.allocation(key).unwrap_or(&entry.pool.allocations[0]);
        listed.api_key.to_string()
    }

    /// Everything that can be seen now.
    pub(crate) fn snapshot(&mut self) -> Snapshot {
        let keys: Vec<String> =
            self.rig.entry().pool.allocations.iter().map(|own| own.api_key.to_string()).collect();
        let calls = keys.iter().flat_map(|key| {
            let plain = Call::new(key, Cost::default());
            [plain.clone(), plain.model(CAPPED_MODEL)]
        });
        let seen = calls.map(|call| self.see(&call)).collect();
        let open = self.rig.ledger.reservations(None, None, usize::MAX, self.rig.now);
        // Of counters, what they mean: two that hold the same may differ in how they have come to it.
        let usage = UsageReading { totals: Default::default(), ..self.rig.usage() };
        let totals = self.rig.totals();
        Snapshot { usage, totals, seen, open: open.into_iter().map(|(id, _)| id).collect() }
    }

    /// A snapshot without rates of consumption: of these a restart keeps the last sample only.
    pub(crate) fn counted(&mut self) -> Snapshot {
        let mut snapshot = self.snapshot();
        snapshot.usage.rates.clear();
        snapshot
    }

    fn see(&mut self, call: &Call) -> Seen {
        let charge = self.rig.charge(call);
        let reading = self.rig.reading(call);
        Seen::of(&charge, reading)
    }
}

/// Runs `check` on `cases` random values, the same ones each time.
pub(crate) fn for_all<S: Strategy>(
    cases: u32,
    strategy: S,
    check: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    if let Err(failure) = TestRunner::new_with_rng(config, rng).run(&strategy, check) {
        panic!("{failure}");
    }
}

pub(crate) fn any_case(windows: &'static [&'static str]) -> impl Strategy<Value = Case> {
    let start_ms = prop_oneof![1 => Just(0), 4 => 0..20_000u64];
    (any_pool(windows), any_plan(windows), start_ms, any_history(), any_call()).prop_map(
        |(pool, plan, start_ms, history, question)| Case {
            pool,
            plan,
            start: START.plus_ms(start_ms),
            history,
            question,
        },
    )
}

pub(crate) fn any_history() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any_step(), 0..STEPS_MAX)
}

/// What is recorded or asked for; the key may have no allocation.
pub(crate) fn any_call() -> impl Strategy<Value = Call> {
    let key = prop_oneof![9 => select(&KEYS[..]), 1 => Just(LEFT)];
    let model = prop_oneof![3 => Just(None), 2 => Just(Some(CAPPED_MODEL)), 1 => Just(Some("other"))];
    (key, model, any_cost()).prop_map(|(key, model, cost)| Call {
        key: key.to_owned(),
        model: model.map(str::to_owned),
        cost,
    })
}

fn any_step() -> impl Strategy<Value = Step> {
    let wait_ms = prop_oneof![4 => Just(0), 6 => 0..300u64, 1 => 0..3_000u64];
    let act = prop_oneof![
        9 => Just(Act::Record),
        6 => prop_oneof![3 => 1..1_500u64, 1 => 1..5_000u64].prop_map(Act::Hold),
        2 => any::<Index>().prop_map(Act::Settle),
        2 => any::<Index>().prop_map(Act::Release),
        1 => Just(Act::Reset),
    ];
    let id = prop_oneof![3 => Just(""), 1 => select(vec!["i", "j"])];
    (wait_ms, any_call(), act, id).prop_map(|(wait_ms, call, act, id)| Step {
        wait_ms,
        call,
        act,
        id: id.to_owned(),
    })
}

pub(crate) fn any_cost() -> impl Strategy<Value = Cost> {
    let small = || prop_oneof![4 => 0..20u64, 3 => 0..80u64, 1 => 0..500u64].prop_map(Amount::saturating);
    let requests = prop_oneof![6 => Just(1), 2 => 0..5u64, 1 => 0..40u64].prop_map(Amount::saturating);
    let percent = small().prop_map(|amount| Amount::saturating(amount.steps() * 300_001));
    (requests, small(), small(), percent).prop_map(|(requests, tokens, usd, percent)| Cost {
        requests,
        tokens,
        usd,
        percent,
    })
}

fn any_unit() -> impl Strategy<Value = Unit> {
    select(vec![Unit::Percent, Unit::Requests, Unit::Tokens, Unit::Tokens, Unit::Usd])
}

/// A limit that all keys together, or a cap that one of them, may well fill; in the unit.
fn any_ceiling(unit: Unit, keys: u32) -> BoxedStrategy<f64> {
    let most = match unit {
        Unit::Percent => 25,
        Unit::Requests => 10,
        Unit::Tokens | Unit::Usd => 100,
    };
    let one = if unit == Unit::Usd { 1e9 } else { 1.0 };
    (most * keys / 10..=most * keys).prop_map(move |steps| f64::from(steps) / one).boxed()
}

pub(crate) fn any_plan(windows: &'static [&'static str]) -> impl Strategy<Value = Vec<DimensionSpec>> {
    let dimension = (any_unit(), select(windows)).prop_flat_map(|(unit, window)| {
        prop::option::weighted(0.85, any_ceiling(unit, 4))
            .prop_map(move |limit| dimension_spec(unit, window, limit))
    });
    prop::collection::vec(dimension, 0..=3).prop_map(|mut dimensions| {
        let mut seen = Vec::new();
        dimensions.retain(|spec| {
            let name = (spec.unit.clone(), spec.window.clone());
            let new = !seen.contains(&name);
            seen.push(name);
            new
        });
        dimensions
    })
}

pub(crate) fn any_pool(windows: &'static [&'static str]) -> impl Strategy<Value = PoolSpec> {
    let threshold = prop_oneof![4 => Just(None), 4 => select(vec![0.0, 0.1, 0.3, 0.8, 1.0]).prop_map(Some)];
    let owner_reserve = select(vec![0.0, 0.0, 0.1, 0.25, 1.0 / 3.0]);
    (any_allocations(windows), 1..=3usize, threshold, owner_reserve).prop_map(
        |(allocations, connections, saturation_threshold, owner_reserve)| PoolSpec {
            connection_ids: (0..connections).map(|index| format!("c{index}")).collect(),
            saturation_threshold,
            owner_reserve,
            ..pool(allocations)
        },
    )
}

fn any_allocations(windows: &'static [&'static str]) -> impl Strategy<Value = Vec<AllocationSpec>> {
    (1..=KEYS.len()).prop_flat_map(move |count| {
        let rest = prop::collection::vec(any_allocation(windows), count);
        (rest, any_weights(count)).prop_map(|(mut allocations, weights)| {
            for ((allocation, key), weight) in allocations.iter_mut().zip(KEYS).zip(weights) {
                allocation.api_key_id = key.to_owned();
                allocation.weight = weight;
            }
            allocations
        })
    })
}

/// Shares that add up to at most 100: some of them 0, sometimes all.
pub(crate) fn any_weights(count: usize) -> impl Strategy<Value = Vec<f64>> {
    let parts = prop::collection::vec(prop_oneof![1 => Just(0.0), 4 => 1.0..100.0f64], count);
    (parts, prop::bool::weighted(0.2)).prop_map(|(parts, none)| {
        let sum: f64 = parts.iter().sum::<f64>().max(1.0);
        let share = |part: f64| if none { 0.0 } else { (part / sum * 99.0 * 1e6).floor() / 1e6 };
        parts.into_iter().map(share).collect()
    })
}

fn any_allocation(windows: &'static [&'static str]) -> impl Strategy<Value = AllocationSpec> {
    let policy = select(vec!["hard", "hard", "soft", "burst", "platinum"]);
    let cap = prop::option::weighted(0.5, any_cap(windows, 0.5));
    // Of a model cap, no window means an hour: too long for a clock that steps by the millisecond.
    let model_caps = prop::option::weighted(0.5, any_cap(windows, 0.0));
    (policy, cap, model_caps, prop::bool::weighted(0.08)).prop_map(|(policy, cap, model_cap, exempt)| {
        AllocationSpec {
            cap,
            model_caps: model_cap
                .map(|CapSpec { value, unit, window, .. }| ModelCapSpec {
                    model: CAPPED_MODEL.to_owned(),
                    value,
                    unit,
                    window,
                    ..Default::default()
                })
                .into_iter()
                .collect(),
            exempt,
            ..allocation("", 0.0, policy)
        }
    })
}

fn any_cap(windows: &'static [&'static str], without_window: f64) -> impl Strategy<Value = CapSpec> {
    (any_unit(), select(windows), prop::bool::weighted(without_window)).prop_flat_map(
        |(unit, window, any_window)| {
            any_ceiling(unit, 1).prop_map(move |value| CapSpec {
                value,
                unit: unit.name().to_owned(),
                window: if any_window { String::new() } else { window.to_owned() },
                ..Default::default()
            })
        },
    )
}
