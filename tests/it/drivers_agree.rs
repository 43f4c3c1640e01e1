//! Two texts of one thing are asked the same random questions: whatever happens to a pool, a driver answers what the pure
//! ledger answers.
//!
//! A driver may drop what has aged out, as `PoolLedger::compact` does, and that can be seen: rates begin anew, no rise is
//! split by old records, and a clock that goes back finds less ahead of it. So there are as many specifications as there
//! are moments at which that makes a difference, and the driver has to go on being one of them. Of what nobody sees before
//! the clock goes back, the moment just before is the only one that is followed.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Debug},
    sync::{Arc, OnceLock},
};

use proptest::{
    prelude::*,
    sample::{Index, select},
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};
use quota_share::{
    clock::{Clock, ManualClock},
    core::{
        account::{Observation, Unread},
        admission::{Counters, Level, Mode, Reading, Reserved},
        burn_rate::{BurnRate, Sample},
        charge::{Charge, PerCheck},
        ids::{ApiKeyId, PoolRevision, ReservationId},
        ledger::{
            AccountUsage, Consumption, Contradiction, Enforced, Hold, PoolLedger, Recorded, Settlement,
            UsageReading,
        },
        plan::{DimensionKey, DimensionSpec},
        pool::{Enforcement, PoolSpec},
        units::{Amount, Cost, Timestamp},
    },
    store::{Ledger, LedgerError},
};

use crate::{
    account_properties::{Figure, any_figure},
    cases::{CAPPED_MODEL, Made, Seen, any_call, any_plan, any_pool},
    drivers::{self, Driver, done},
    harness::redis_is_missing,
    model::{Call, ID_LIFE_MS, Rig, key, new_life},
};

/// How many histories, where nothing else is said.
const CASES: u32 = 1_000;
/// Of them at once, each on a store of its own.
const WORKERS: u32 = 8;
/// What has to happen at least so often in all of them together.
const HIT_MIN: u64 = 100;
/// What has to happen that often.
const HIT: &[&str] = &[
    "blocked ExceedsLimit",
    "blocked CapAbsolute",
    "blocked ModelCap",
    "blocked GlobalSaturated",
    "blocked ConnectionSaturated",
    "blocked FairShare",
    "allowed after a wait",
    "no wait helps",
    "allowed Generous",
    "allowed Strict",
    "allowed of an unknown limit",
    "deprioritized",
    "borrowing",
    "exempt",
    "held",
    "held although blocked",
    "held again",
    "contradiction RequestId",
    "contradiction IdempotencyKey",
    "contradiction Settled",
    "contradiction ForeignKey",
    "counted",
    "counted late",
    "counted of before",
    "duplicate",
    "duplicate of a late one",
    "figure with a record not taken",
    "reservation Open",
    "reservation Settled",
    "reservation Unknown",
    "released",
    "released in vain",
    "figure taken",
    "figure TooOld",
    "figure Ended",
    "figure Older",
    "figure Lower",
    "external use",
    "in a window of the provider",
    "reset of a key in a dimension",
    "reset of a key",
    "reset of a dimension",
    "reset",
    "other plan",
    "other pool",
    "clock back a little",
    "clock back by more than is waited for",
    "at the ceiling",
    "a rate",
    "samples",
];

const HOUR_MS: u64 = 3_600_000;
/// From one edge of a bucket of every window to the next.
const EDGES_MS: u64 = 35 * 24 * HOUR_MS;
/// Some that outlast most waits, and some that do not.
const WINDOWS: &[&str] = &["1s", "10s", "hourly", "hourly", "5h", "weekly"];
/// Of one history: fewer reservations than are followed one by one.
const STEPS_MAX: usize = 50;
/// More moments than that are not followed.
const SPECIFICATIONS_MAX: usize = 64;

/// A pool and what happens to it.
#[derive(Clone)]
pub(crate) struct History {
    pool: PoolSpec,
    plan: Vec<DimensionSpec>,
    /// After an edge of every bucket.
    start_ms: u64,
    /// Few, so that they are repeated.
    calls: Vec<Call>,
    steps: Vec<Step>,
}

/// A wait, and what is done then.
#[derive(Clone, Debug)]
struct Step {
    wait: Wait,
    /// Of those of the history.
    call: Index,
    /// Of those of the pool.
    connection: Index,
    act: Act,
}

#[derive(Clone, Copy, Debug)]
enum Wait {
    Ms(u64),
    /// Until shortly before, at or shortly after the end of something.
    UntilEnd(Index, u64),
    Back(u64),
}

#[derive(Clone, Debug)]
enum Act {
    Check,
    Hold {
        for_ms: u64,
        request_id: &'static str,
    },
    Record {
        idempotency_key: &'static str,
        served: bool,
        figure: Option<Said>,
        /// How long ago it was recorded, in ms, if it was not now.
        ago_ms: Option<u64>,
    },
    Settle {
        which: Which,
        by: By,
        idempotency_key: &'static str,
        figure: Option<Said>,
        ago_ms: Option<u64>,
    },
    Reservation {
        which: Which,
        by: By,
    },
    Release {
        which: Which,
        by: Option<By>,
    },
    Report {
        figures: Vec<Said>,
        believed: bool,
    },
    Reset {
        of_key: bool,
        dimension: Option<Index>,
    },
    Plan(Vec<DimensionSpec>),
    /// All limits times this.
    Limits(f64),
    Pool(PoolSpec),
    Look,
    /// What was done last that can be repeated, with the same call or another; of a settlement it may be asked only.
    Again {
        same_call: bool,
        asks: bool,
    },
}

/// A figure of one of the plan's dimensions.
#[derive(Clone, Copy, Debug)]
struct Said {
    dimension: Index,
    figure: Figure,
}

/// A reservation id.
#[derive(Clone, Copy, Debug)]
enum Which {
    /// Of those that were made here.
    Made(Index),
    /// One that another pool has made and still holds.
    HeldElsewhere(u8),
    Unknown(u8),
    NotOurs(u8),
}

/// Whose call it is.
#[derive(Clone, Copy, Debug)]
enum By {
    Holder,
    Caller,
}

/// How often what has happened.
type Tally = BTreeMap<String, u64>;

/// A line for each step, however it is asked for.
impl Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let History { pool, plan, start_ms, calls, steps } = self;
        writeln!(f, "{pool:?}\n{plan:?}\nfrom {start_ms} ms")?;
        calls.iter().try_for_each(|call| writeln!(f, "  {call:?}"))?;
        steps.iter().try_for_each(|step| writeln!(f, "  {step:?}"))
    }
}

pub(crate) fn any_history() -> impl Strategy<Value = History> {
    let pool = (any_pool(WINDOWS), prop::bool::weighted(0.15)).prop_map(|(pool, shadow)| PoolSpec {
        enforcement: if shadow { Enforcement::Shadow } else { Enforcement::Enforce },
        ..pool
    });
    let start_ms = prop_oneof![1 => Just(0), 4 => 0..20_000u64, 2 => 0..EDGES_MS];
    let calls = prop::collection::vec(any_call_or_extreme(), 2..6);
    let steps = prop::collection::vec(any_step(), 1..STEPS_MAX);
    (pool, any_plan(WINDOWS), start_ms, calls, steps)
        .prop_map(|(pool, plan, start_ms, calls, steps)| History { pool, plan, start_ms, calls, steps })
}

fn any_call_or_extreme() -> impl Strategy<Value = Call> {
    let extreme = (0..3u64, 0..4usize).prop_map(|(below, unit)| {
        let most = Amount::saturating(Amount::MAX.steps() - below);
        let mut amounts = [Amount::ZERO; 4];
        amounts[unit] = most;
        let [requests, tokens, usd, percent] = amounts;
        Cost { requests, tokens, usd, percent }
    });
    (any_call(), prop::option::weighted(0.08, extreme))
        .prop_map(|(call, extreme)| Call { cost: extreme.unwrap_or(call.cost), ..call })
}

fn any_step() -> impl Strategy<Value = Step> {
    let weeks_ms = 3 * 7 * 24 * HOUR_MS;
    let wait = prop_oneof![
        20 => Just(Wait::Ms(0)),
        8 => (0..3_000u64).prop_map(Wait::Ms),
        4 => (0..900_000u64).prop_map(Wait::Ms),
        1 => (0..6 * HOUR_MS).prop_map(Wait::Ms),
        1 => (0..weeks_ms).prop_map(Wait::Ms),
        6 => (any::<Index>(), 0..3u64).prop_map(|(end, off)| Wait::UntilEnd(end, off)),
        1 => (1..=HOUR_MS).prop_map(Wait::Back),
        1 => prop_oneof![Just(HOUR_MS + 1), HOUR_MS + 1..12 * HOUR_MS, HOUR_MS + 1..weeks_ms]
            .prop_map(Wait::Back),
    ];
    (wait, any::<Index>(), any::<Index>(), any_act()).prop_map(|(wait, call, connection, act)| Step {
        wait,
        call,
        connection,
        act,
    })
}

fn any_act() -> impl Strategy<Value = Act> {
    let id = || prop_oneof![3 => Just(""), 2 => select(vec!["i", "j"])];
    let said = || (any::<Index>(), any_figure()).prop_map(|(dimension, figure)| Said { dimension, figure });
    let figure = || prop::option::weighted(0.4, said());
    let by = || prop_oneof![6 => Just(By::Holder), 1 => Just(By::Caller)];
    let ago = prop_oneof![3 => 0..5_000u64, 2 => 0..2 * HOUR_MS, 1 => 0..21 * 24 * HOUR_MS];
    let ago = prop::option::weighted(0.25, ago);
    let record = (id(), prop::bool::weighted(0.9), figure(), ago.clone());
    let settle = (any_which(), by(), id(), figure(), ago);
    let reset = (any::<bool>(), prop::option::of(any::<Index>()));
    prop_oneof![
        6 => Just(Act::Check),
        10 => (prop_oneof![3 => 1..5_000u64, 2 => 1..=HOUR_MS], select(vec!["", "i", "j"]))
            .prop_map(|(for_ms, request_id)| Act::Hold { for_ms, request_id }),
        10 => record.prop_map(|(idempotency_key, served, figure, ago_ms)| {
            Act::Record { idempotency_key, served, figure, ago_ms }
        }),
        7 => settle.prop_map(|(which, by, idempotency_key, figure, ago_ms)| {
            Act::Settle { which, by, idempotency_key, figure, ago_ms }
        }),
        4 => (any_which(), by()).prop_map(|(which, by)| Act::Reservation { which, by }),
        3 => (any_which(), prop::option::of(by())).prop_map(|(which, by)| Act::Release { which, by }),
        8 => (prop::collection::vec(said(), 1..3), prop::bool::weighted(0.4))
            .prop_map(|(figures, believed)| Act::Report { figures, believed }),
        2 => reset.prop_map(|(of_key, dimension)| Act::Reset { of_key, dimension }),
        1 => any_plan(WINDOWS).prop_map(Act::Plan),
        1 => select(vec![0.25, 0.5, 2.0, 4.0]).prop_map(Act::Limits),
        1 => any_pool(WINDOWS).prop_map(Act::Pool),
        1 => Just(Act::Look),
        7 => (prop::bool::weighted(0.7), prop::bool::weighted(0.3))
            .prop_map(|(same_call, asks)| Act::Again { same_call, asks }),
    ]
}

fn any_which() -> impl Strategy<Value = Which> {
    prop_oneof![
        12 => any::<Index>().prop_map(Which::Made),
        1 => (0..3u8).prop_map(Which::HeldElsewhere),
        1 => (0..3u8).prop_map(Which::Unknown),
        1 => (0..3u8).prop_map(Which::NotOurs),
    ]
}

/// What a decision was made from and what became of it.
#[derive(Debug, PartialEq)]
struct Decided {
    at: Timestamp,
    seen: Seen,
    /// What will be seen if nothing happens, by instant and by check.
    ahead: Vec<Vec<Level>>,
    reserved: Option<Reserved>,
}

impl Decided {
    fn of(charge: &Charge, reading: Reading, reserved: Option<Reserved>) -> Decided {
        let windows = charge.checks.iter().map(|check| check.counter.dimension.window.length_ms());
        let waits = windows.flat_map(|length_ms| [1, length_ms / 2, length_ms, 2 * length_ms - 1]);
        let levels = |wait_ms: u64| {
            let checks = charge.checks.iter().zip(&reading.counters);
            checks.map(|(check, counters)| check.level(counters, reading.at.plus_ms(wait_ms))).collect()
        };
        let ahead = waits.map(levels).collect();
        Decided { at: reading.at, ahead, seen: Seen::of(charge, reading), reserved }
    }

    fn tally(&self, charge: &Charge, tally: &mut Tally) {
        let verdict = &self.seen.verdict;
        let blocked = verdict.block();
        if let Some(reason) = blocked {
            hit(tally, format!("blocked {reason:?}"));
            let wait = verdict.allowed_after_ms;
            hit(tally, if wait.is_some() { "allowed after a wait" } else { "no wait helps" });
        }
        for finding in verdict.findings.iter().filter(|finding| finding.block.is_none()) {
            hit(
                tally,
                match finding.mode {
                    Some(Mode::Generous) => "allowed Generous",
                    Some(Mode::Strict) => "allowed Strict",
                    None => "allowed of an unknown limit",
                },
            );
        }
        for (what, is_so) in [
            ("deprioritized", verdict.deprioritize()),
            ("borrowing", verdict.findings.iter().any(|finding| finding.borrowing)),
            ("exempt", charge.terms.exempt),
            ("held although blocked", blocked.is_some() && self.reserved.is_some_and(|it| !it.repeated)),
            ("held", self.reserved.is_some_and(|reserved| !reserved.repeated)),
            ("held again", self.reserved.is_some_and(|reserved| reserved.repeated)),
            ("in a window of the provider", self.seen.levels.iter().any(|level| level.resets_at.is_some())),
            ("at the ceiling", self.seen.levels.iter().any(|level| level.pool_consumed >= 9e15)),
        ] {
            if is_so {
                hit(tally, what);
            }
        }
    }
}

/// What usage means.
#[derive(Debug, PartialEq)]
struct Usage {
    at: Timestamp,
    totals: Vec<Level>,
    accounts: PerCheck<Vec<AccountUsage>>,
    rates: PerCheck<BurnRate>,
    keys: BTreeMap<ApiKeyId, PerCheck<(f64, f64)>>,
    open_reservations: usize,
    oldest_deadline: Option<Timestamp>,
}

impl Usage {
    fn of(dimensions: &[DimensionKey], usage: UsageReading) -> (Usage, PerCheck<Vec<Sample>>) {
        let UsageReading { at, totals, accounts, rates, samples, keys, open_reservations, oldest_deadline } =
            usage;
        let totals = dimensions.iter().zip(&totals);
        let totals = totals.map(|(dimension, counters)| counters.level(*dimension, Some(1.0), at)).collect();
        (Usage { at, totals, accounts, rates, keys, open_reservations, oldest_deadline }, samples)
    }
}

/// A driver shows the newest samples, at least those of the last hour.
fn are_the_newest(got: &[Sample], of: &[Sample], at: Timestamp) -> bool {
    let recent = of.iter().filter(|sample| at.ms_since(sample.at) < HOUR_MS).count();
    of.ends_with(got) && got.len() >= recent
}

fn hit(tally: &mut Tally, what: impl Into<String>) {
    *tally.entry(what.into()).or_default() += 1;
}

/// What was answered: a contradiction is an answer, a failure is none.
fn answered<T>(result: Result<T, LedgerError>) -> Result<Result<T, Contradiction>, TestCaseError> {
    match result {
        Ok(answer) => Ok(Ok(answer)),
        Err(LedgerError::Contradiction(contradiction)) => Ok(Err(contradiction)),
        Err(failure) => Err(TestCaseError::fail(format!("no answer: {failure}"))),
    }
}

/// A driver and the specification, and what they are asked.
struct Twins<'a> {
    ledger: &'a dyn Ledger,
    clock: &'a ManualClock,
    /// Makes the calls. Its own ledger is not asked.
    rig: Rig,
    /// See the module.
    specifications: Vec<PoolLedger>,
    plan: Vec<DimensionSpec>,
    /// Of every plan that there was.
    dimensions: Vec<DimensionKey>,
    made: Vec<Made>,
    /// What can be repeated.
    last: Option<Step>,
    /// When something ends.
    ends: Vec<Timestamp>,
    tally: Tally,
}

/// Lets `history` happen to a new pool of `ledger` and to the specification: every answer has to be the same, and what can
/// be seen now and then. `clock` is the one by which `ledger` decides.
pub(crate) async fn agree(
    ledger: &dyn Ledger,
    clock: &ManualClock,
    history: &History,
) -> Result<Tally, TestCaseError> {
    let mut twins = Twins::new(ledger, clock, history);
    twins.look().await?;
    for step in &history.steps {
        twins.step(history, step).await?;
    }
    twins.look().await?;
    let life = twins.rig.life;
    ledger.remove(life).await.map_err(|error| TestCaseError::fail(error.to_string()))?;
    let gone = ledger.totals(life, &[], &[]).await;
    prop_assert!(matches!(gone, Err(LedgerError::PoolRemoved)), "{gone:?}");
    Ok(twins.tally)
}

impl<'a> Twins<'a> {
    fn new(ledger: &'a dyn Ledger, clock: &'a ManualClock, history: &History) -> Self {
        let edge = (clock.now().unix_ms() / EDGES_MS + 1) * EDGES_MS;
        let now = Timestamp::from_unix_ms(edge + history.start_ms);
        clock.set(now);
        let life = new_life();
        let rig = Rig::new(history.pool.clone(), history.plan.clone(), now).in_life(life);
        let specifications = vec![PoolLedger::new(life, now)];
        let dimensions = rig.entry().dimension_keys();
        let (made, last, ends, tally) = Default::default();
        let plan = history.plan.clone();
        Self { ledger, clock, rig, specifications, plan, dimensions, made, last, ends, tally }
    }

    async fn step(&mut self, history: &History, step: &Step) -> Result<(), TestCaseError> {
        let goes_back = matches!(step.wait, Wait::Back(_));
        if goes_back {
            self.show_time().await?;
        }
        self.pass(step.wait);
        if goes_back {
            self.show_time().await?;
        }
        self.may_compact(false);
        let done = self.resolved(step);
        let connections = self.rig.entry().pool.connections.clone();
        self.rig.serving = done.connection.get(&connections).clone();
        let call = done.call.get(&history.calls).clone();
        self.act(call, &done.act).await.map_err(|failure| match failure {
            TestCaseError::Fail(why) => TestCaseError::fail(format!("{done:?}\n{why}")),
            other => other,
        })?;
        self.may_compact(false);
        Ok(())
    }

    /// What is done: what was done last, if that is repeated.
    fn resolved(&mut self, step: &Step) -> Step {
        let (Act::Again { same_call, asks }, Some(last)) = (&step.act, &self.last) else {
            if matches!(step.act, Act::Hold { .. } | Act::Record { .. } | Act::Settle { .. }) {
                self.last = Some(step.clone());
            }
            return step.clone();
        };
        let call = if *same_call { last.call } else { step.call };
        let act = match last.act {
            Act::Settle { which, by, .. } if *asks => Act::Reservation { which, by },
            _ => last.act.clone(),
        };
        Step { call, act, ..last.clone() }
    }

    fn pass(&mut self, wait: Wait) {
        let now = self.rig.now;
        self.rig.now = match wait {
            Wait::Ms(ms) => now.plus_ms(ms),
            Wait::UntilEnd(which, off) => {
                let dimensions = self.rig.entry().dimension_keys();
                let windows = dimensions.iter().map(|dimension| dimension.window);
                let edges = windows
                    .map(|window| Timestamp::from_unix_ms((window.bucket(now) + 1) * window.length_ms()));
                let mut ahead: Vec<_> = self.ends.iter().copied().chain(edges).collect();
                ahead.retain(|end| *end > now);
                ahead.sort_unstable();
                ahead.dedup();
                ahead.truncate(4);
                let end = if ahead.is_empty() { now.plus_ms(1) } else { *which.get(&ahead) };
                Timestamp::from_unix_ms(end.unix_ms() - 1 + off)
            }
            Wait::Back(ms) => {
                let believed = ms > HOUR_MS;
                if believed {
                    self.may_compact(true);
                }
                let how = if believed { "by more than is waited for" } else { "a little" };
                hit(&mut self.tally, format!("clock back {how}"));
                Timestamp::from_unix_ms(now.unix_ms() - ms)
            }
        };
        self.clock.set(self.rig.now);
    }

    /// The driver may compact now: where that makes a difference there is one more specification. What is `unseen` makes
    /// none before the clock goes back: then what has aged out lies ahead, and counts once more where it is still kept.
    fn may_compact(&mut self, unseen: bool) {
        let now = self.rig.now;
        let mut compacted = Vec::new();
        for kept in &mut self.specifications {
            let rates = |ledger: &mut PoolLedger| ledger.usage(&self.dimensions, &[], false, now).rates;
            let before = rates(kept);
            kept.take_changes();
            let mut ledger = kept.clone();
            ledger.compact(now);
            let changes = ledger.take_changes();
            if unseen || !changes.is_empty() || rates(&mut ledger) != before {
                compacted.push(ledger);
            }
        }
        if compacted.is_empty() {
            return;
        }
        let text = |ledger: &PoolLedger| format!("{ledger:?}");
        let mut known: BTreeSet<String> = self.specifications.iter().map(text).collect();
        for ledger in compacted {
            if known.len() < SPECIFICATIONS_MAX && known.insert(text(&ledger)) {
                self.specifications.push(ledger);
            }
        }
    }

    /// The driver has answered `got`. Specifications that answer something else are not what it is.
    fn same<T: Debug + PartialEq>(
        &mut self,
        got: &T,
        ask: impl Fn(&mut PoolLedger, Timestamp) -> T,
    ) -> Result<(), TestCaseError> {
        self.same_by(got, ask, T::eq)
    }

    fn same_by<T: Debug>(
        &mut self,
        got: &T,
        ask: impl Fn(&mut PoolLedger, Timestamp) -> T,
        is_same: impl Fn(&T, &T) -> bool,
    ) -> Result<(), TestCaseError> {
        let now = self.rig.now;
        let before = self.specifications.clone();
        let mut other = None;
        let mut answers_alike = |specification: &mut PoolLedger| {
            let want = ask(specification, now);
            specification.take_changes();
            let same = is_same(&want, got);
            other = other.take().or((!same).then_some(want));
            same
        };
        self.specifications.retain_mut(&mut answers_alike);
        if self.specifications.is_empty() {
            // It may have compacted since the last call.
            self.specifications = before;
            self.specifications.iter_mut().for_each(|specification| specification.compact(now));
            self.specifications.retain_mut(answers_alike);
        }
        match other {
            Some(want) if self.specifications.is_empty() => {
                Err(TestCaseError::fail(format!("the driver says\n{got:#?}\nand is to say\n{want:#?}")))
            }
            _ => Ok(()),
        }
    }

    async fn act(&mut self, call: Call, act: &Act) -> Result<(), TestCaseError> {
        match act {
            Act::Check => self.check(&self.by_member(call)).await,
            Act::Hold { for_ms, request_id } => self.hold(self.by_member(call), *for_ms, request_id).await,
            Act::Record { idempotency_key, served, figure, ago_ms } => {
                self.rig.observations = self.observations(figure.as_slice(), false);
                let mut consumption = self.rig.consumption(&call, idempotency_key, "");
                consumption.connection = consumption.connection.filter(|_| *served);
                self.record(consumption, *ago_ms).await
            }
            Act::Settle { which, by, idempotency_key, figure, ago_ms } => {
                self.rig.observations = self.observations(figure.as_slice(), false);
                let consumption = self.settling(call, *which, *by, idempotency_key);
                self.record(consumption, *ago_ms).await
            }
            Act::Reservation { which, by } => {
                let consumption = self.settling(call, *which, *by, "");
                self.reservation(consumption).await
            }
            Act::Release { which, by } => self.release(&call, *which, *by).await,
            Act::Report { figures, believed } => self.report(figures, *believed).await,
            Act::Reset { of_key, dimension } => self.reset(&call, *of_key, *dimension).await,
            Act::Plan(plan) => self.put_plan(plan.clone()).await,
            Act::Limits(factor) => {
                let mut plan = self.plan.clone();
                plan.iter_mut().for_each(|spec| spec.limit = spec.limit.map(|limit| limit * factor));
                self.put_plan(plan).await
            }
            Act::Pool(spec) => {
                hit(&mut self.tally, "other pool");
                self.rig.update_pool(spec.clone());
                self.look().await
            }
            Act::Look | Act::Again { .. } => self.look().await,
        }
    }

    /// The call, by a key of the pool.
    fn by_member(&self, call: Call) -> Call {
        let entry = self.rig.entry();
        let listed = entry.pool.allocation(&call.key).unwrap_or(&entry.pool.allocations[0]);
        Call { key: listed.api_key.to_string(), ..call }
    }

    async fn check(&mut self, call: &Call) -> Result<(), TestCaseError> {
        let charge = self.rig.charge(call);
        let decided = |reading| Decided::of(&charge, reading, None);
        let got = answered(self.ledger.check(&charge).await)?.map(decided);
        self.same(&got, |ledger, now| Ok(decided(ledger.check(&charge, now))))?;
        if let Ok(got) = got {
            got.tally(&charge, &mut self.tally);
        }
        Ok(())
    }

    async fn hold(&mut self, call: Call, for_ms: u64, request_id: &str) -> Result<(), TestCaseError> {
        let charge = self.rig.charge(&call);
        let wish = self.rig.wish(&call, for_ms, request_id);
        let decided = |enforced: Enforced| Decided::of(&charge, enforced.reading, enforced.reserved);
        let got = answered(self.ledger.enforce(&charge, wish.clone()).await)?.map(decided);
        self.same(&got, |ledger, now| ledger.enforce(&charge, wish.clone(), now).map(decided))?;
        self.tally_contradiction(&got);
        let Ok(got) = got else { return Ok(()) };
        got.tally(&charge, &mut self.tally);
        if let Some(reserved) = got.reserved.filter(|reserved| !reserved.repeated) {
            self.ends.push(reserved.deadline);
            self.made.push(Made { id: reserved.id, call });
        }
        Ok(())
    }

    async fn record(&mut self, consumption: Consumption, ago_ms: Option<u64>) -> Result<(), TestCaseError> {
        let now_ms = self.rig.now.unix_ms();
        let recorded_at = ago_ms.map(|ago_ms| Timestamp::from_unix_ms(now_ms.saturating_sub(ago_ms)));
        let consumption = Consumption { recorded_at, ..consumption };
        let got = answered(self.ledger.record(self.rig.life, &consumption).await.map(done))?;
        self.same(&got, |ledger, now| ledger.record(&consumption, now))?;
        self.tally_contradiction(&got);
        let Ok(Recorded { duplicate, reservation_expired, unread }) = got else { return Ok(()) };
        self.ends.push(self.rig.now.plus_ms(ID_LIFE_MS));
        hit(
            &mut self.tally,
            match (duplicate, reservation_expired) {
                (false, false) => "counted",
                (false, true) => "counted late",
                (true, false) => "duplicate",
                (true, true) => "duplicate of a late one",
            },
        );
        if unread > 0 {
            hit(&mut self.tally, "figure with a record not taken");
        }
        if recorded_at.is_some() && !duplicate {
            hit(&mut self.tally, "counted of before");
        }
        Ok(())
    }

    /// What settles a reservation; without one that was made here it is one that nobody knows.
    fn settling(&mut self, call: Call, which: Which, by: By, idempotency_key: &str) -> Consumption {
        let (text, holder) = self.named(which);
        let key = holder.filter(|_| matches!(by, By::Holder)).unwrap_or_else(|| call.key.clone());
        let mut consumption = self.rig.consumption(&Call { key, ..call }, idempotency_key, &text);
        let held_elsewhere = matches!(which, Which::HeldElsewhere(_));
        consumption.reservation =
            consumption.reservation.map(|settles| Settlement { held_elsewhere, ..settles });
        consumption
    }

    /// A reservation id and whose it is.
    fn named(&self, which: Which) -> (String, Option<String>) {
        let id = |life: u64, last: u8| {
            let mut random = [0xee; 12];
            random[11] = last;
            ReservationId { pool: PoolRevision(life), random }.to_string()
        };
        match which {
            Which::Made(index) if !self.made.is_empty() => {
                // The newest are the most likely to be open.
                let newest = &self.made[self.made.len().saturating_sub(4)..];
                let made = index.get(newest);
                (made.id.to_string(), Some(made.call.key.clone()))
            }
            Which::Made(_) => (id(self.rig.life.0, 0), None),
            Which::Unknown(last) => (id(self.rig.life.0, last), None),
            Which::HeldElsewhere(last) => (id(self.rig.life.0 + 1, last), None),
            Which::NotOurs(last) => (format!("made up {last}"), None),
        }
    }

    async fn reservation(&mut self, consumption: Consumption) -> Result<(), TestCaseError> {
        let Some(settles) = consumption.reservation else { return Ok(()) };
        let got = answered(self.ledger.reservation(self.rig.life, &consumption, settles).await)?;
        self.same(&got, |ledger, now| ledger.reservation(&consumption, settles, now))?;
        self.tally_contradiction(&got);
        if let Ok(state) = got {
            hit(&mut self.tally, format!("reservation {state:?}"));
        }
        Ok(())
    }

    async fn release(&mut self, call: &Call, which: Which, by: Option<By>) -> Result<(), TestCaseError> {
        let (text, holder) = self.named(which);
        let Some(id) = ReservationId::parse(&text).filter(|id| id.pool == self.rig.life) else {
            // Nobody is asked about those, and everybody has to see the time pass.
            return self.look_at_usage().await;
        };
        let by = by.map(|by| match (by, holder) {
            (By::Holder, Some(holder)) => key(&holder),
            _ => key(&call.key),
        });
        let got = answered(self.ledger.release(id, by.as_ref()).await.map(done))?;
        self.same(&got, |ledger, now| ledger.release(id, by.as_ref(), now))?;
        self.tally_contradiction(&got);
        if let Ok(released) = got {
            hit(&mut self.tally, if released { "released" } else { "released in vain" });
        }
        Ok(())
    }

    /// Has the driver do something now: a read may leave the pool's clock alone, which is seen only if time goes back.
    async fn show_time(&mut self) -> Result<(), TestCaseError> {
        let id = ReservationId { pool: self.rig.life, random: [0xff; 12] };
        let got = answered(self.ledger.release(id, None).await.map(done))?;
        self.same(&got, |ledger, now| ledger.release(id, None, now))
    }

    /// `said` of the plan's dimensions, if it has any.
    fn observations(&mut self, said: &[Said], believed: bool) -> Vec<Observation> {
        let entry = self.rig.entry();
        let dimensions = entry.dimension_keys();
        let said = said.iter().filter(|_| !dimensions.is_empty());
        let alone = entry.pool.connections.len() == 1;
        let seen: Vec<Observation> = said
            .map(|said| said.figure.observed(*said.dimension.get(&dimensions), self.rig.now, alone, believed))
            .collect();
        self.ends.extend(seen.iter().filter_map(|seen| seen.reset.end()));
        seen
    }

    async fn report(&mut self, figures: &[Said], believed: bool) -> Result<(), TestCaseError> {
        let seen = self.observations(figures, believed);
        let connection = self.rig.serving.clone();
        let got = answered(self.ledger.report(self.rig.life, &connection, &seen).await)?;
        self.same(&got, |ledger, now| Ok(ledger.report(&connection, &seen, now)))?;
        for taken in got.into_iter().flatten() {
            let what = taken.map_or_else(|why: Unread| format!("{why:?}"), |()| "taken".to_owned());
            hit(&mut self.tally, format!("figure {what}"));
        }
        Ok(())
    }

    async fn reset(
        &mut self,
        call: &Call,
        of_key: bool,
        dimension: Option<Index>,
    ) -> Result<(), TestCaseError> {
        let dimensions = self.rig.entry().dimension_keys();
        let dimension =
            dimension.filter(|_| !dimensions.is_empty()).map(|dimension| *dimension.get(&dimensions));
        let api_key = of_key.then(|| key(&call.key));
        hit(
            &mut self.tally,
            match (of_key, dimension) {
                (true, Some(_)) => "reset of a key in a dimension",
                (true, None) => "reset of a key",
                (false, Some(_)) => "reset of a dimension",
                (false, None) => "reset",
            },
        );
        let got = answered(self.ledger.reset(self.rig.life, api_key.as_ref(), dimension).await)?;
        self.same(&got, |ledger, now| {
            ledger.reset(api_key.as_ref(), dimension, now);
            Ok(())
        })?;
        self.look().await
    }

    async fn put_plan(&mut self, plan: Vec<DimensionSpec>) -> Result<(), TestCaseError> {
        hit(&mut self.tally, "other plan");
        if !plan.is_empty() {
            self.rig.put_plan(plan.clone());
            self.plan = plan;
        }
        self.dimensions.extend(self.rig.entry().dimension_keys());
        self.look().await
    }

    /// All that can be seen is the same.
    async fn look(&mut self) -> Result<(), TestCaseError> {
        self.look_at_usage().await?;
        self.look_at_reservations().await?;
        let entry = self.rig.entry();
        for connection in entry.pool.connections.iter() {
            self.rig.serving = connection.clone();
            for own in &entry.pool.allocations {
                let cost = Cost { requests: Amount::saturating(1), ..Cost::default() };
                self.check(&Call::new(own.api_key.as_str(), cost).model(CAPPED_MODEL)).await?;
            }
        }
        Ok(())
    }

    async fn look_at_usage(&mut self) -> Result<(), TestCaseError> {
        let (life, entry) = (self.rig.life, self.rig.entry());
        let (dimensions, connections) = (entry.dimension_keys(), &entry.pool.connections);
        let got = answered(self.ledger.usage(life, &dimensions, connections, true).await)?
            .map(|usage| Usage::of(&dimensions, usage));
        let ask = |ledger: &mut PoolLedger, now| {
            Ok(Usage::of(&dimensions, ledger.usage(&dimensions, connections, true, now)))
        };
        self.same_by(&got, ask, |want, got| match (want, got) {
            (Ok((want, of)), Ok((got, samples))) => {
                let pairs = samples.iter().zip(of);
                want == got
                    && samples.len() == of.len()
                    && pairs.into_iter().all(|(got, of)| are_the_newest(got, of, want.at))
            }
            _ => false,
        })?;
        if let Ok((usage, samples)) = got {
            for (what, is_so) in [
                ("a rate", usage.rates.iter().any(|rate| rate.steps_per_second.is_some())),
                ("samples", samples.iter().any(|samples| samples.len() > 1)),
                ("external use", usage.accounts.iter().flatten().any(|account| account.external > 0)),
            ] {
                if is_so {
                    hit(&mut self.tally, what);
                }
            }
        }
        let totals = |(at, counters): (Timestamp, PerCheck<Counters>)| {
            let pairs = dimensions.iter().zip(counters);
            let levels = pairs.map(|(dimension, counters)| counters.level(*dimension, Some(1.0), at));
            (at, levels.collect::<Vec<Level>>())
        };
        let got = answered(self.ledger.totals(life, &dimensions, connections).await)?.map(totals);
        self.same(&got, |ledger, now| Ok(totals(ledger.totals(&dimensions, connections, now))))
    }

    async fn look_at_reservations(&mut self) -> Result<(), TestCaseError> {
        let life = self.rig.life;
        let all = answered(self.ledger.reservations(life, None, None, usize::MAX).await)?;
        self.same(&all, |ledger, now| Ok(ledger.reservations(None, None, usize::MAX, now)))?;
        let Ok(all) = all else { return Ok(()) };
        let place = |(id, hold): &(ReservationId, Arc<Hold>)| (hold.deadline, id.random);
        let after = all.get(all.len() / 2).map(place);
        let of = all.last().map(|(_, hold)| hold.api_key.clone());
        for (after, count) in [(after, 2), (None, 1)] {
            let got = answered(self.ledger.reservations(life, after, of.as_ref(), count).await)?;
            self.same(&got, |ledger, now| Ok(ledger.reservations(after, of.as_ref(), count, now)))?;
        }
        Ok(())
    }

    fn tally_contradiction<T>(&mut self, got: &Result<T, Contradiction>) {
        if let Err(contradiction) = got {
            hit(&mut self.tally, format!("contradiction {contradiction:?}"));
        }
    }
}

/// As many histories as `QUOTA_DIFFERENTIAL_CASES` says.
fn cases() -> u32 {
    let cases = std::env::var("QUOTA_DIFFERENTIAL_CASES");
    cases.map_or(CASES, |cases| cases.parse().expect("QUOTA_DIFFERENTIAL_CASES: a number of histories"))
}

/// One share of the histories on a store of its own, the same ones each time; how often what has happened.
///
/// `failed` is the first worker that finds a difference. It alone looks for a short history; the others stop.
fn work<F: Future<Output = Option<Driver>>>(
    worker: usize,
    start: fn() -> F,
    cases: u32,
    failed: &OnceLock<usize>,
) -> Result<Tally, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let driver = runtime.block_on(start()).expect("it was looked for");
    let config = Config { cases: cases.div_ceil(WORKERS), failure_persistence: None, ..Config::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[worker as u8; 32]);
    let tally = RefCell::new(Tally::new());
    let ran = TestRunner::new_with_rng(config, rng).run(&any_history(), |history| {
        if failed.get().is_some_and(|first| *first != worker) {
            return Ok(());
        }
        match runtime.block_on(agree(&*driver.ledger, &driver.clock, &history)) {
            Ok(of_history) => {
                add(&mut tally.borrow_mut(), of_history);
                Ok(())
            }
            Err(_) if *failed.get_or_init(|| worker) != worker => Ok(()),
            difference => difference.map(|_| ()),
        }
    });
    runtime.block_on(driver.ledger.close());
    ran.map(|()| tally.into_inner()).map_err(|failure| failure.to_string())
}

fn add(tally: &mut Tally, more: Tally) {
    more.into_iter().for_each(|(what, count)| *tally.entry(what).or_default() += count);
}

/// Puts so many histories to the driver that `start` starts.
fn agrees<F: Future<Output = Option<Driver>>>(start: fn() -> F, cases: u32) {
    let failed = OnceLock::new();
    let tallies: Vec<Result<Tally, String>> = std::thread::scope(|scope| {
        let work = |worker| work(worker, start, cases, &failed);
        let workers: Vec<_> = (0..WORKERS as usize).map(|worker| scope.spawn(move || work(worker))).collect();
        workers.into_iter().map(|worker| worker.join().expect("it does not panic")).collect()
    });
    let mut tally = Tally::new();
    for of_worker in tallies {
        add(&mut tally, of_worker.unwrap_or_else(|difference| panic!("{difference}")));
    }
    let of = |what: &&&str| tally.get(**what).copied().unwrap_or_default();
    let rare: Vec<_> = HIT.iter().filter(|what| of(what) < HIT_MIN).collect();
    assert!(rare.is_empty() || cases < CASES, "hardly ever: {rare:?} of {tally:#?}");
}

#[test]
fn sqlite_agrees_with_the_specification() {
    agrees(drivers::sqlite, cases());
}

#[test]
fn redis_agrees_with_the_specification() {
    if !redis_is_missing() {
        agrees(drivers::redis, cases());
    }
}

/// By the same script: what differs is where it is sent, for which fewer histories do.
#[test]
fn a_redis_cluster_agrees_with_the_specification() {
    if !redis_is_missing() {
        agrees(drivers::cluster, cases().div_ceil(4));
    }
}
