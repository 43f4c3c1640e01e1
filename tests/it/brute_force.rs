//! The rule and the waits that it names, against a second telling of them: one that keeps every event and steps the
//! clock by the millisecond.
//!
//! It shares nothing with the core but names: windows, limits, shares and caps are worked out here from what an
//! administrator writes, and nothing is taken to be monotone.

use std::{cell::RefCell, collections::BTreeMap};

use proptest::{prelude::*, test_runner::TestCaseError};
use quota_share::core::{
    admission::{BlockReason, Mode, Verdict},
    ledger::Contradiction,
    pool::{AllocationSpec, PoolSpec},
    units::{Amount, Cost, Timestamp},
};

use crate::{
    cases::{Act, Case, Outcome, Player, SHORT, Step, any_call, any_case, for_all},
    model::Call,
};

const UNITS: [&str; 4] = ["percent", "requests", "tokens", "usd"];
const STEPS_PER_ONE: [f64; 4] = [1e6, 1.0, 1.0, 1e9];

/// A cost that was recorded, or is held until a deadline.
#[derive(Clone, Debug)]
struct Event {
    call: Call,
    at_ms: u64,
}

/// A pool that remembers everything.
#[derive(Debug)]
struct Model<'a> {
    case: &'a Case,
    recorded: Vec<Event>,
    /// In the order in which they were made; `None`: settled or released.
    held: Vec<Option<Event>>,
}

/// What one dimension or model cap holds a key to.
#[derive(Debug)]
struct Rule {
    unit: usize,
    window_ms: u64,
    per_connection: Option<f64>,
    limit: Option<f64>,
    cap: Option<f64>,
    share: Option<f64>,
    model_cap: bool,
}

/// What bears on one rule.
#[derive(Debug)]
struct Load {
    rule: Rule,
    estimate: f64,
    /// `(instant, steps, by the key that asks)`.
    recorded: Vec<(u64, u64, bool)>,
    /// The instant is the deadline.
    held: Vec<(u64, u64, bool)>,
}

/// What stays as it is until an instant at which a bucket or a reservation ends.
#[derive(Clone, Copy, Debug)]
struct Amounts {
    until_ms: u64,
    by_key: Sums,
    by_all: Sums,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    previous: u64,
    current: u64,
    held: u64,
}

/// What the rule says of one dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Opinion {
    block: Option<BlockReason>,
    mode: Option<Mode>,
    deprioritize: bool,
}

/// What the whole answer should be.
#[derive(Debug)]
struct Answer {
    opinions: Vec<Opinion>,
    /// For each dimension that blocks: the first millisecond at which it passes.
    waits: Vec<Option<u64>>,
    blocked_by: Option<usize>,
    /// The first millisecond at which every dimension passes.
    retry_after_ms: Option<u64>,
}

impl<'a> Model<'a> {
    fn new(case: &'a Case) -> Self {
        Self { case, recorded: Vec::new(), held: Vec::new() }
    }

    fn allocation(&self, key: &str) -> &'a AllocationSpec {
        let found = self.case.pool.allocations.iter().find(|own| own.api_key_id == key);
        found.expect("a key of the pool")
    }

    /// A model cap counts what its key uses of its model, and only while the key has it: from the start.
    fn loads(&self, call: &Call, now_ms: u64) -> Vec<Load> {
        let rules = rules(self.case, self.allocation(&call.key), call.model.as_deref());
        rules.into_iter().map(|rule| self.load(rule, call, now_ms)).collect()
    }

    fn load(&self, rule: Rule, call: &Call, now_ms: u64) -> Load {
        let unit = rule.unit;
        let relevant = |event: &&Event| {
            !rule.model_cap || (event.call.key == call.key && event.call.model == call.model)
        };
        let seen =
            |event: &Event| (event.at_ms, steps_of(&event.call.cost, unit), event.call.key == call.key);
        Load {
            estimate: steps_of(&call.cost, unit) as f64,
            recorded: self.recorded.iter().filter(relevant).map(seen).collect(),
            held: self
                .held
                .iter()
                .flatten()
                .filter(relevant)
                .filter(|event| event.at_ms > now_ms)
                .map(seen)
                .collect(),
            rule,
        }
    }

    fn answer(&self, call: &Call, now_ms: u64) -> Answer {
        let terms = Terms::of(&self.case.pool, self.allocation(&call.key));
        let loads = self.loads(call, now_ms);
        let opinions = self.answer_now(call, now_ms);
        let mut waits: Vec<Option<u64>> = vec![None; loads.len()];
        let mut retry_after_ms = None;
        if opinions.iter().any(|opinion| opinion.block.is_some()) {
            let mut amounts: Vec<Amounts> = loads.iter().map(|load| load.amounts(now_ms)).collect();
            // Past this nothing is left that could change.
            for wait_ms in 1..=settled_after(&loads, now_ms) {
                let at_ms = now_ms + wait_ms;
                let mut all_pass = true;
                for (index, load) in loads.iter().enumerate() {
                    if at_ms >= amounts[index].until_ms {
                        amounts[index] = load.amounts(at_ms);
                    }
                    let passes = load.judge(&terms, &amounts[index], at_ms).block.is_none();
                    all_pass &= passes;
                    if passes && opinions[index].block.is_some() && waits[index].is_none() {
                        waits[index] = Some(wait_ms);
                    }
                }
                if all_pass {
                    retry_after_ms = Some(wait_ms);
                    break;
                }
            }
        }
        Answer { blocked_by: longest(&opinions, &waits), opinions, waits, retry_after_ms }
    }

    /// Follows a step that the core has answered.
    fn follow(&mut self, step: &Step, call: Call, now_ms: u64) {
        match step.act {
            Act::Hold(reserve_for_ms) => {
                if self.answer_now(&call, now_ms).iter().all(|opinion| opinion.block.is_none()) {
                    self.held.push(Some(Event { call, at_ms: now_ms + reserve_for_ms }));
                }
            }
            Act::Settle(index) if !self.held.is_empty() => {
                // Each is settled at most once here: a second settlement counts nothing.
                *index.get_mut(&mut self.held) = None;
                self.recorded.push(Event { call, at_ms: now_ms });
            }
            Act::Record | Act::Settle(_) => self.recorded.push(Event { call, at_ms: now_ms }),
            Act::Release(index) if !self.held.is_empty() => *index.get_mut(&mut self.held) = None,
            Act::Release(_) => {}
            Act::Reset => self.recorded.retain(|event| event.call.key != call.key),
        }
    }

    fn answer_now(&self, call: &Call, now_ms: u64) -> Vec<Opinion> {
        let terms = Terms::of(&self.case.pool, self.allocation(&call.key));
        self.loads(call, now_ms)
            .iter()
            .map(|load| load.judge(&terms, &load.amounts(now_ms), now_ms))
            .collect()
    }
}

#[derive(Debug)]
struct Terms {
    threshold: f64,
    exempt: bool,
    hard: bool,
    soft: bool,
}

impl Terms {
    fn of(pool: &PoolSpec, own: &AllocationSpec) -> Terms {
        Terms {
            threshold: pool.saturation_threshold.unwrap_or(0.5),
            exempt: own.exempt,
            hard: !["soft", "burst"].contains(&own.policy.as_str()),
            soft: own.policy == "soft",
        }
    }
}

impl Load {
    fn judge(&self, terms: &Terms, amounts: &Amounts, at_ms: u64) -> Opinion {
        let rule = &self.rule;
        let estimate = self.estimate;
        let by_key = amounts.by_key.used(rule.window_ms, at_ms);
        let by_pool = amounts.by_all.used(rule.window_ms, at_ms);
        // Of per cents nothing is known until something was reported.
        let known = rule.unit != 0 || by_pool > 0.0;
        let strict = rule.limit.is_some_and(|limit| known && by_pool / limit >= terms.threshold);
        let mode = rule.limit.map(|_| if strict { Mode::Strict } else { Mode::Generous });
        let past = |used: f64, bound: Option<f64>| {
            bound.is_some_and(|bound| used >= bound || used + estimate > bound)
        };
        let past_share = strict && past(by_key, rule.share);
        let too_large =
            [rule.per_connection, rule.limit, rule.cap].into_iter().flatten().any(|bound| estimate > bound);
        let block = if terms.exempt {
            None
        } else if too_large {
            Some(BlockReason::ExceedsLimit)
        } else if past(by_key, rule.cap) && rule.model_cap {
            Some(BlockReason::ModelCap)
        } else if past(by_key, rule.cap) {
            Some(BlockReason::CapAbsolute)
        } else if past(by_pool, rule.limit) {
            Some(BlockReason::GlobalSaturated)
        } else if past_share && terms.hard {
            Some(BlockReason::FairShare)
        } else {
            None
        };
        let deprioritize = block.is_none() && past_share && terms.soft && !terms.exempt;
        Opinion { block, mode, deprioritize }
    }

    /// What there is in the buckets of `at_ms`, and is held then.
    fn amounts(&self, at_ms: u64) -> Amounts {
        let window = self.rule.window_ms;
        let bucket = at_ms / window;
        let until_ms = (bucket + 1) * window;
        let mut amounts = Amounts { until_ms, by_key: Sums::default(), by_all: Sums::default() };
        for &(event_ms, steps, by_key) in &self.recorded {
            amounts.add(by_key, |sums| match bucket - event_ms / window {
                0 => sums.current += steps,
                1 => sums.previous += steps,
                _ => {}
            });
        }
        for &(deadline_ms, steps, by_key) in self.held.iter().filter(|(deadline_ms, ..)| *deadline_ms > at_ms)
        {
            amounts.until_ms = amounts.until_ms.min(deadline_ms);
            amounts.add(by_key, |sums| sums.held += steps);
        }
        amounts
    }
}

impl Amounts {
    fn add(&mut self, by_key: bool, to: impl Fn(&mut Sums)) {
        to(&mut self.by_all);
        if by_key {
            to(&mut self.by_key);
        }
    }
}

impl Sums {
    /// Consumed in the window and held.
    fn used(&self, window_ms: u64, at_ms: u64) -> f64 {
        let elapsed = at_ms % window_ms;
        let faded = self.previous as f64 * (window_ms - elapsed) as f64 / window_ms as f64;
        faded + self.current as f64 + self.held as f64
    }
}

/// The rules that hold `own` for a request for `model`: the plan in its order, then the model caps.
fn rules(case: &Case, own: &AllocationSpec, model: Option<&str>) -> Vec<Rule> {
    let plan = case.plan.iter().map(|dimension| {
        let unit = unit_of(&dimension.unit);
        let window_ms = window_of(&dimension.window);
        let per_connection = dimension.limit.map(|limit| limit * STEPS_PER_ONE[unit]);
        let limit = per_connection.map(|limit| pool_limit(&case.pool, limit));
        let cap = own.cap.as_ref().filter(|cap| {
            unit_of(&cap.unit) == unit && (cap.window.is_empty() || window_of(&cap.window) == window_ms)
        });
        Rule {
            unit,
            window_ms,
            per_connection,
            limit,
            cap: cap.map(|cap| cap.value * STEPS_PER_ONE[unit]),
            share: limit.map(|limit| share(&case.pool, own, limit)),
            model_cap: false,
        }
    });
    let caps = own.model_caps.iter().filter(|cap| Some(cap.model.as_str()) == model).map(|cap| {
        let unit = unit_of(&cap.unit);
        Rule {
            unit,
            window_ms: window_of(&cap.window),
            per_connection: None,
            limit: None,
            cap: Some(cap.value * STEPS_PER_ONE[unit]),
            share: None,
            model_cap: true,
        }
    });
    plan.chain(caps).collect()
}

fn pool_limit(pool: &PoolSpec, per_connection: f64) -> f64 {
    let reserve_e6 = (pool.owner_reserve * 1e6).round_ties_even();
    per_connection * pool.connection_ids.len() as f64 * (1e6 - reserve_e6) / 1e6
}

fn share(pool: &PoolSpec, own: &AllocationSpec, limit: f64) -> f64 {
    let limited: Vec<&AllocationSpec> = pool.allocations.iter().filter(|other| !other.exempt).collect();
    if limited.iter().all(|other| other.weight == 0.0) {
        return limit / limited.len() as f64;
    }
    (own.weight * 1e6).round_ties_even() * limit / 1e8
}

/// The dimension that blocks longest: EXCEEDS_LIMIT before all, then those that no wait helps, ties in plan order.
fn longest(opinions: &[Opinion], waits: &[Option<u64>]) -> Option<usize> {
    let blocked: Vec<usize> = (0..opinions.len()).filter(|&index| opinions[index].block.is_some()).collect();
    let first = |holds: &dyn Fn(usize) -> bool| blocked.iter().copied().find(|&index| holds(index));
    let most = blocked.iter().filter_map(|&index| waits[index]).max();
    first(&|index| opinions[index].block == Some(BlockReason::ExceedsLimit))
        .or_else(|| first(&|index| waits[index].is_none()))
        .or_else(|| first(&|index| waits[index] == most))
}

fn settled_after(loads: &[Load], now_ms: u64) -> u64 {
    let ends = loads.iter().flat_map(|load| {
        let window = load.rule.window_ms;
        let aged = load.recorded.iter().map(move |(at_ms, ..)| (at_ms / window + 2) * window);
        aged.chain(load.held.iter().map(|(deadline_ms, ..)| *deadline_ms))
    });
    ends.max().map_or(1, |end_ms| end_ms.saturating_sub(now_ms) + 1)
}

fn unit_of(name: &str) -> usize {
    UNITS.iter().position(|unit| *unit == name).expect("a unit")
}

fn window_of(text: &str) -> u64 {
    text.strip_suffix('s').and_then(|seconds| seconds.parse::<u64>().ok()).expect("a window in seconds")
        * 1_000
}

fn steps_of(cost: &Cost, unit: usize) -> u64 {
    [cost.percent, cost.requests, cost.tokens, cost.usd][unit].steps()
}

/// How often something was met.
#[derive(Debug, Default)]
struct Met(RefCell<BTreeMap<String, u32>>);

impl Met {
    fn count(&self, what: String) {
        *self.0.borrow_mut().entry(what).or_default() += 1;
    }

    fn assert_each(&self, names: &[&str], at_least: u32) {
        let met = self.0.borrow();
        for name in names {
            let times = met.get(*name).copied().unwrap_or(0);
            assert!(times >= at_least, "{name} was met {times} times: steer the generator, {met:?}");
        }
    }
}

/// The core's answer is the model's.
fn same_answer(got: &Verdict, want: &Answer) -> Result<(), TestCaseError> {
    let opinions: Vec<Opinion> = got
        .findings
        .iter()
        .map(|found| Opinion { block: found.block, mode: found.mode, deprioritize: found.deprioritize })
        .collect();
    prop_assert_eq!(&opinions, &want.opinions);
    let deprioritize = want.blocked_by.is_none() && want.opinions.iter().any(|one| one.deprioritize);
    prop_assert_eq!(got.deprioritize(), deprioritize);
    prop_assert_eq!(got.blocked_by, want.blocked_by, "{:?}", want);
    prop_assert_eq!(got.block(), want.blocked_by.and_then(|index| want.opinions[index].block));
    prop_assert_eq!(got.allowed_after_ms, want.retry_after_ms, "{:?}", want);
    prop_assert_eq!(got.retry_after_ms.as_slice(), &want.waits[..]);
    Ok(())
}

/// Plays the history on both, comparing every decision on the way.
fn play<'a>(case: &'a Case, player: &mut Player, met: &Met) -> Result<Model<'a>, TestCaseError> {
    let mut model = Model::new(case);
    let mut settled = Vec::new();
    for step in &case.history {
        let mut step = Step { id: String::new(), ..step.clone() };
        if let Act::Settle(index) = step.act
            && !player.made.is_empty()
        {
            let which = index.index(player.made.len());
            if settled.contains(&which) {
                step.act = Act::Record;
            }
            settled.push(which);
        }
        let call = player.call_of(&step);
        let outcome = player.act(&step);
        let now_ms = player.rig.now.unix_ms();
        if let Outcome::Held(decided) = outcome {
            let (verdict, reserved) = decided.map_err(|error: Contradiction| fail(error.to_string()))?;
            let want = model.answer_now(&call, now_ms);
            let got: Vec<_> = verdict.findings.iter().map(|found| found.block).collect();
            let blocks: Vec<_> = want.iter().map(|opinion| opinion.block).collect();
            prop_assert_eq!(&got, &blocks, "{:?}", call);
            prop_assert_eq!(reserved.is_some(), blocks.iter().all(Option::is_none));
            met.count(if reserved.is_some() { "held" } else { "not held" }.to_owned());
        }
        model.follow(&step, call, now_ms);
    }
    Ok(model)
}

fn fail(reason: String) -> TestCaseError {
    TestCaseError::fail(reason)
}

#[test]
fn every_answer_is_the_one_that_is_found_by_stepping_the_clock() {
    let met = Met::default();
    let strategy = (any_case(SHORT), prop::collection::vec(any_call(), 2));
    for_all(2_000, strategy, |(case, others)| {
        let mut player = case.player();
        let model = play(&case, &mut player, &met)?;
        for call in std::iter::once(&case.question).chain(&others) {
            let call = player.by_member(call);
            let want = model.answer(&call, player.rig.now.unix_ms());
            same_answer(&player.rig.ask(&call), &want)?;
            count(&met, &case, &call, &want);
        }
        Ok(())
    });
    let reasons = ["ExceedsLimit", "CapAbsolute", "ModelCap", "GlobalSaturated", "FairShare", "none"];
    met.assert_each(&reasons, 50);
    met.assert_each(&["Strict", "Generous", "unknown limit", "deprioritize", "equal split", "exempt"], 50);
    met.assert_each(&["hard, Strict", "soft, Strict", "burst, Strict", "platinum, Strict"], 50);
    met.assert_each(&["hard, Generous", "soft, Generous", "burst, Generous", "platinum, Generous"], 50);
    met.assert_each(&["held", "not held", "two block", "a wait", "no wait helps", "held by others"], 50);
}

fn count(met: &Met, case: &Case, call: &Call, want: &Answer) {
    let own = case.pool.allocations.iter().find(|own| own.api_key_id == call.key).expect("a key");
    let reason = want.blocked_by.and_then(|index| want.opinions[index].block);
    met.count(reason.map_or("none".to_owned(), |reason| format!("{reason:?}")));
    for opinion in &want.opinions {
        match opinion.mode {
            None => met.count("unknown limit".to_owned()),
            Some(mode) => {
                met.count(format!("{mode:?}"));
                met.count(format!("{}, {mode:?}", own.policy));
            }
        }
    }
    let limited = case.pool.allocations.iter().filter(|other| !other.exempt);
    let blocking = want.opinions.iter().filter(|opinion| opinion.block.is_some()).count();
    let facts = [
        ("deprioritize", want.opinions.iter().any(|opinion| opinion.deprioritize)),
        ("equal split", limited.clone().count() > 1 && limited.clone().all(|other| other.weight == 0.0)),
        ("exempt", own.exempt),
        ("two block", blocking > 1),
        ("a wait", want.retry_after_ms.is_some()),
        ("no wait helps", blocking > 0 && want.retry_after_ms.is_none()),
        ("held by others", blocking > 0 && case.history.iter().any(|step| matches!(step.act, Act::Hold(_)))),
    ];
    for (name, _) in facts.iter().filter(|(_, holds)| *holds) {
        met.count((*name).to_owned());
    }
}

/// A pool that an exempt key has filled with reservations, more of them than are followed one by one.
fn any_crowd() -> impl Strategy<Value = Case> {
    let hold = (1..4_000u64, 1..4u64).prop_map(|(reserve_for_ms, steps)| {
        let amount = Amount::saturating(steps);
        let cost = Cost { requests: amount, tokens: amount, usd: amount, percent: amount };
        Step { wait_ms: 0, call: Call::new("a", cost), act: Act::Hold(reserve_for_ms), id: String::new() }
    });
    let shared = any_case(SHORT).prop_filter("one key", |case| case.pool.allocations.len() > 1);
    (shared, prop::collection::vec(hold, 65..150)).prop_map(|(mut case, crowd)| {
        for own in &mut case.pool.allocations {
            own.exempt = own.api_key_id == "a";
        }
        case.question.key = "b".to_owned();
        case.history.extend(crowd);
        case
    })
}

#[test]
fn of_many_reservations_the_last_deadline_may_be_named_but_never_one_too_early() {
    let met = Met::default();
    for_all(400, any_crowd(), |case| {
        let mut player = case.player();
        let model = play(&case, &mut player, &met)?;
        let call = player.question(&case);
        let now = player.rig.now;
        let want = model.answer(&call, now.unix_ms());
        let got = player.rig.ask(&call);
        prop_assert_eq!(got.block().is_some(), want.blocked_by.is_some());
        prop_assert_eq!(got.allowed_after_ms.is_some(), want.retry_after_ms.is_some());
        let (Some(wait_ms), Some(least_ms)) = (got.allowed_after_ms, want.retry_after_ms) else {
            return Ok(());
        };
        prop_assert!(wait_ms >= least_ms, "{wait_ms} before {least_ms}");
        let later = Timestamp::from_unix_ms(now.unix_ms() + wait_ms);
        let opinions = model.answer_now(&call, later.unix_ms());
        prop_assert!(opinions.iter().all(|opinion| opinion.block.is_none()), "blocked at {wait_ms}");
        prop_assert_eq!(player.rig.ask_after(&call, wait_ms).block(), None);
        if player.rig.usage().open_reservations > 64 {
            met.count(if wait_ms > least_ms { "later" } else { "least" }.to_owned());
        }
        Ok(())
    });
    met.assert_each(&["later", "least"], 20);
}
