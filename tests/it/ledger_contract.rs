//! What every driver of [`Ledger`] promises: a promise is a function, a driver is a line at the end.

use std::sync::Arc;

use futures::future::join_all;
use quota_share::{
    clock::ManualClock,
    core::{
        account::{Observation, Unread},
        admission::{BlockReason, Mode, Reserved, Verdict},
        headers::Reset,
        ids::{CallId, PoolRevision, ReservationId},
        ledger::{Consumption, Contradiction, Recorded, ReservationState, Settlement, UsageReading},
        plan::{DimensionKey, DimensionSpec},
        pool::{AllocationSpec, Enforcement, ModelCapSpec, PoolSpec},
        units::{Amount, Cost, Timestamp, Unit},
    },
    store::{Ledger, LedgerError},
};

use crate::{
    drivers::{self, Driver, done},
    model::{
        CONNECTION, Call, ID_LIFE_MS, Rig, START, allocation, connection, cost, dimension, dimension_spec,
        key, new_life, pool, tokens,
    },
};

const COUNTED: Recorded = Recorded { duplicate: false, reservation_expired: false, unread: 0 };
const DUPLICATE: Recorded = Recorded { duplicate: true, reservation_expired: false, unread: 0 };
const LATE: Recorded = Recorded { duplicate: false, reservation_expired: true, unread: 0 };
const LATE_DUPLICATE: Recorded = Recorded { duplicate: true, reservation_expired: true, unread: 0 };

const SECOND_MS: u64 = 1_000;
const MINUTE_MS: u64 = 60 * SECOND_MS;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const MAX: u64 = Amount::MAX.steps();

fn hourly() -> DimensionKey {
    dimension(Unit::Tokens, "hourly")
}

fn percent() -> DimensionKey {
    dimension(Unit::Percent, "5h")
}

fn a(steps: u64) -> Call {
    Call::new("a", tokens(steps))
}

fn b(steps: u64) -> Call {
    Call::new("b", tokens(steps))
}

/// Two keys that may borrow everything from each other.
fn keys() -> Vec<AllocationSpec> {
    vec![allocation("a", 50.0, "burst"), allocation("b", 50.0, "burst")]
}

/// `a` with a cap of 10 tokens of model `m` an hour, and `b`.
fn keys_with_a_model_cap() -> Vec<AllocationSpec> {
    let cap = ModelCapSpec {
        model: "m".to_owned(),
        value: 10.0,
        unit: Unit::Tokens.name().to_owned(),
        window: "hourly".to_owned(),
        ..Default::default()
    };
    let [a, b] = keys().try_into().expect("two keys");
    vec![AllocationSpec { model_caps: vec![cap], ..a }, b]
}

fn tokens_hourly(limit: Option<f64>) -> Vec<DimensionSpec> {
    vec![dimension_spec(Unit::Tokens, "hourly", limit)]
}

fn tokens_and_requests() -> Vec<DimensionSpec> {
    [tokens_hourly(Some(100.0)), vec![dimension_spec(Unit::Requests, "daily", Some(3.0))]].concat()
}

fn percent_5h() -> Vec<DimensionSpec> {
    vec![dimension_spec(Unit::Percent, "5h", Some(100.0))]
}

/// What a provider says now of the only connection's account, on purpose.
fn said(dimension: DimensionKey, fraction: f64, at: Timestamp) -> Observation {
    Observation {
        dimension,
        fraction,
        observed_at: at,
        reset: Reset::Unknown,
        life_ms: 30 * SECOND_MS,
        believed: true,
        age_known: true,
        alone: true,
    }
}

fn ends(seen: Observation, at_ms: u64) -> Observation {
    Observation { reset: Reset::WindowEnd(START.plus_ms(at_ms)), ..seen }
}

/// One pool of a ledger, called the way the service calls it.
struct Tenant {
    ledger: Arc<dyn Ledger>,
    clock: Arc<ManualClock>,
    rig: Rig,
}

impl Tenant {
    fn new(driver: &Driver, spec: PoolSpec, plan: Vec<DimensionSpec>) -> Tenant {
        let (ledger, clock) = (Arc::clone(&driver.ledger), Arc::clone(&driver.clock));
        Tenant { ledger, clock, rig: Rig::new(spec, plan, START).in_life(new_life()) }
    }

    /// Two keys that share 100 tokens an hour.
    fn usual(driver: &Driver) -> Tenant {
        Tenant::new(driver, pool(keys()), tokens_hourly(Some(100.0)))
    }

    /// The same pool in another ledger.
    fn through(&self, ledger: &Arc<dyn Ledger>) -> Tenant {
        let mut rig = self.rig.clone();
        rig.skip_names(1_000);
        Tenant { ledger: Arc::clone(ledger), clock: Arc::clone(&self.clock), rig }
    }

    fn life(&self) -> PoolRevision {
        self.rig.life
    }

    /// It is so many ms after the start.
    fn at(&mut self, ms: u64) {
        self.rig.now = START.plus_ms(ms);
        self.clock.set(self.rig.now);
    }

    async fn ask(&self, call: &Call) -> Verdict {
        let charge = self.rig.charge(call);
        Verdict::of(&charge, &self.ledger.check(&charge).await.expect("an answer"))
    }

    async fn hold(
        &mut self,
        call: &Call,
        for_ms: u64,
        request_id: &str,
    ) -> Result<(Verdict, Option<Reserved>), Contradiction> {
        let charge = self.rig.charge(call);
        let wish = self.rig.wish(call, for_ms, request_id);
        let enforced = answered(self.ledger.enforce(&charge, wish).await)?;
        Ok((Verdict::of(&charge, &enforced.reading), enforced.reserved))
    }

    /// What is decided where there is nothing to contradict.
    async fn decide(&mut self, call: &Call, for_ms: u64, request_id: &str) -> (Verdict, Option<Reserved>) {
        self.hold(call, for_ms, request_id).await.expect("nothing to contradict")
    }

    async fn must_hold(&mut self, call: &Call, for_ms: u64) -> ReservationId {
        let (verdict, reserved) = self.decide(call, for_ms, "").await;
        reserved.unwrap_or_else(|| panic!("blocked: {verdict:?}")).id
    }

    /// The text of a reservation id.
    async fn must_hold_as_text(&mut self, call: &Call, for_ms: u64) -> String {
        self.must_hold(call, for_ms).await.to_string()
    }

    async fn record(
        &mut self,
        call: &Call,
        idempotency_key: &str,
        reservation: &str,
    ) -> Result<Recorded, Contradiction> {
        let consumption = self.rig.consumption(call, idempotency_key, reservation);
        answered(self.ledger.record(self.life(), &consumption).await.map(done))
    }

    /// Tells now what was recorded so many ms after the start.
    async fn record_at(
        &mut self,
        call: &Call,
        ms: u64,
        idempotency_key: &str,
    ) -> Result<Recorded, Contradiction> {
        let consumption = self.rig.consumption(call, idempotency_key, "");
        let consumption = Consumption { recorded_at: Some(START.plus_ms(ms)), ..consumption };
        answered(self.ledger.record(self.life(), &consumption).await.map(done))
    }

    async fn must_record(&mut self, call: &Call) {
        assert_eq!(self.record(call, "", "").await, Ok(COUNTED), "{call:?}");
    }

    async fn release(&self, id: ReservationId, by: Option<&str>) -> Result<bool, Contradiction> {
        answered(self.ledger.release(id, by.map(key).as_ref()).await.map(done))
    }

    async fn report(&self, seen: &[Observation]) -> Vec<Result<(), Unread>> {
        self.ledger.report(self.life(), &self.rig.serving, seen).await.expect("an answer")
    }

    /// A figure that is sure to be taken.
    async fn must_report(&self, seen: Observation) {
        assert_eq!(self.report(&[seen]).await, [Ok(())], "{seen:?}");
    }

    async fn reset(&self, key_text: Option<&str>, dimension: Option<DimensionKey>) {
        self.ledger.reset(self.life(), key_text.map(key).as_ref(), dimension).await.expect("it is reset");
    }

    async fn usage(&self) -> UsageReading {
        let entry = self.rig.entry();
        let (dimensions, connections) = (entry.dimension_keys(), &entry.pool.connections);
        self.ledger.usage(self.life(), &dimensions, connections, true).await.expect("an answer")
    }

    /// `(consumed, reserved)` of the pool in `dimension`.
    async fn total(&self, dimension: DimensionKey) -> (f64, f64) {
        let connections = Arc::clone(&self.rig.entry().pool.connections);
        let read = self.ledger.totals(self.life(), &[dimension], &connections).await;
        let (at, counters) = read.expect("an answer");
        let level = counters[0].level(dimension, None, at);
        (level.pool_consumed, level.pool_reserved)
    }

    /// `(consumed, reserved)` of a key in `dimension`.
    async fn of_key(&self, text: &str, dimension: DimensionKey) -> (f64, f64) {
        let connections = Arc::clone(&self.rig.entry().pool.connections);
        let usage = self.ledger.usage(self.life(), &[dimension], &connections, false).await;
        usage.expect("an answer").keys.get(&key(text)).map_or((0.0, 0.0), |seen| seen[0])
    }

    /// Names and deadlines of open reservations.
    async fn open(&self) -> Vec<(ReservationId, Timestamp)> {
        let open = self.ledger.reservations(self.life(), None, None, usize::MAX).await.expect("an answer");
        open.into_iter().map(|(id, hold)| (id, hold.deadline)).collect()
    }

    async fn remove(&self) {
        self.ledger.remove(self.life()).await.expect("it is removed");
    }
}

/// A contradiction is an answer, a failure is none.
fn answered<T>(result: Result<T, LedgerError>) -> Result<T, Contradiction> {
    result.map_err(|error| match error {
        LedgerError::Contradiction(contradiction) => contradiction,
        failure => panic!("no answer: {failure}"),
    })
}

async fn what_is_recorded_reads_back_in_both_buckets_of_the_window(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    pool.must_record(&a(30)).await;
    pool.must_record(&b(20)).await;
    pool.must_record(&a(4)).await;
    // minute | recorded by a, by b: the first bucket fades within the second
    for (minute, by_a, by_b) in [(0, 34.0, 20.0), (59, 34.0, 20.0), (60, 34.0, 20.0), (90, 17.0, 10.0)] {
        pool.at(minute * MINUTE_MS);
        assert_eq!(pool.of_key("a", hourly()).await, (by_a, 0.0), "at minute {minute}");
        assert_eq!(pool.of_key("b", hourly()).await, (by_b, 0.0), "at minute {minute}");
        assert_eq!(pool.total(hourly()).await, (by_a + by_b, 0.0), "at minute {minute}");
        assert_eq!(pool.ask(&a(0)).await.findings[0].remaining, Some(100.0 - by_a - by_b));
    }
    pool.must_record(&a(5)).await;
    assert_eq!(pool.total(hourly()).await, (32.0, 0.0), "half of the first, all of the second");
    for (minute, want) in [(120, 5.0), (150, 2.5), (180, 0.0)] {
        pool.at(minute * MINUTE_MS);
        assert_eq!(pool.total(hourly()).await, (want, 0.0), "at minute {minute}");
    }
}

async fn what_is_told_late_counts_in_the_bucket_of_its_time(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    pool.at(2 * HOUR_MS + 15 * MINUTE_MS);
    pool.must_record(&a(1)).await;
    // recorded at minute | of which key | what it counts for at 02:15
    for (minute, key, counts) in [(119, "a", 6.0), (60, "b", 6.0), (59, "a", 0.0), (134, "b", 8.0)] {
        let before = pool.total(hourly()).await.0;
        let told = pool.record_at(&Call::new(key, tokens(8)), minute * MINUTE_MS, "").await;
        assert_eq!(told, Ok(COUNTED), "recorded at minute {minute}");
        assert_eq!(pool.total(hourly()).await.0 - before, counts, "recorded at minute {minute}");
    }
    assert_eq!(pool.of_key("a", hourly()).await, (7.0, 0.0));
    assert_eq!(pool.of_key("b", hourly()).await, (14.0, 0.0));
    // What has aged out counts nowhere and is one call all the same.
    assert_eq!(pool.record_at(&a(9), MINUTE_MS, "late").await, Ok(COUNTED));
    assert_eq!(pool.record(&a(9), "late", "").await, Ok(DUPLICATE));
    pool.at(3 * HOUR_MS);
    assert_eq!(pool.total(hourly()).await.0, 9.0, "what was recorded after 02:00");
    // It is not told before it happens.
    pool.record_at(&a(5), 5 * HOUR_MS, "").await.expect("it counts now");
    assert_eq!(pool.total(hourly()).await.0, 14.0);
}

async fn what_is_told_late_is_no_part_of_a_window_that_began_after_it(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    pool.at(2 * HOUR_MS);
    pool.must_report(ends(said(hourly(), 0.1, pool.rig.now), 2 * HOUR_MS + 30 * MINUTE_MS)).await;
    // The window is that from 01:30 on, or from 01:27: ends wander.
    for (minute, counted) in [(86, 0.0), (90, 7.0), (119, 14.0)] {
        pool.record_at(&a(7), minute * MINUTE_MS, "").await.expect("it is taken");
        assert_eq!(pool.total(hourly()).await.0, counted, "recorded at minute {minute}");
    }
    // After its end it is no part of the next.
    pool.at(2 * HOUR_MS + 31 * MINUTE_MS);
    pool.record_at(&a(7), 149 * MINUTE_MS, "").await.expect("it is taken");
    assert_eq!(pool.total(hourly()).await.0, 0.0);
    pool.record_at(&a(7), 150 * MINUTE_MS, "").await.expect("it is taken");
    assert_eq!(pool.total(hourly()).await.0, 7.0);
}

async fn a_blocked_enforcement_holds_nothing_and_an_allowed_one_all_of_it(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys_with_a_model_cap()), tokens_and_requests());
    let requests = dimension(Unit::Requests, "daily");
    let call =
        |tokens_: u64| Call::new("a", Cost { requests: Amount::saturating(1), ..tokens(tokens_) }).model("m");
    pool.must_hold(&call(6), MINUTE_MS).await;
    let (verdict, reserved) = pool.decide(&call(5), MINUTE_MS, "").await;
    assert_eq!((verdict.block(), reserved), (Some(BlockReason::ModelCap), None), "6 of 10 are held");
    for (what, want) in [(hourly(), (0.0, 6.0)), (requests, (0.0, 1.0))] {
        assert_eq!(pool.total(what).await, want, "{what}");
        assert_eq!(pool.of_key("a", what).await, want, "{what}");
    }
    pool.must_hold(&call(4), MINUTE_MS).await;
    pool.must_hold(&Call { model: None, ..call(0) }, MINUTE_MS).await;
    let (verdict, reserved) = pool.decide(&Call { key: "b".to_owned(), ..call(1) }, MINUTE_MS, "").await;
    assert_eq!((verdict.block(), reserved), (Some(BlockReason::GlobalSaturated), None));
    assert_eq!(verdict.allowed_after_ms, Some(MINUTE_MS), "what is held ends then");
    assert_eq!((pool.total(hourly()).await, pool.total(requests).await), ((0.0, 10.0), (0.0, 3.0)));
}

async fn of_concurrent_enforcements_exactly_those_that_fit_are_admitted(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let charge = pool.rig.charge(&a(7));
    let calls = (0..64).map(|turn| {
        let (charge, wish) = (charge.clone(), pool.rig.wish(&a(7), MINUTE_MS, ""));
        let ledger = Arc::clone(if turn % 2 == 0 { &driver.ledger } else { &driver.other });
        tokio::spawn(async move { ledger.enforce(&charge, wish).await.expect("an answer").reserved })
    });
    let reserved = join_all(calls.collect::<Vec<_>>()).await;
    let admitted: Vec<_> = reserved.into_iter().filter_map(|it| it.expect("it does not panic")).collect();
    assert_eq!(admitted.len(), 14, "98 of 100");
    assert_eq!(pool.total(hourly()).await, (0.0, 98.0));

    // Of the same settlement once more at once, one counts.
    let text = admitted[0].id.to_string();
    let consumption = pool.rig.consumption(&a(7), "", &text);
    let life = pool.life();
    let calls = (0..16).map(|turn| {
        let consumption = consumption.clone();
        let ledger = Arc::clone(if turn % 2 == 0 { &driver.ledger } else { &driver.other });
        tokio::spawn(async move { ledger.record(life, &consumption).await.map(done).expect("an answer") })
    });
    let recorded = join_all(calls.collect::<Vec<_>>()).await;
    let counted = recorded.into_iter().filter(|it| *it.as_ref().expect("it does not panic") == COUNTED);
    assert_eq!(counted.count(), 1);
    assert_eq!(pool.total(hourly()).await, (7.0, 91.0));
}

async fn a_deadline_ends_a_hold_without_traffic(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys_with_a_model_cap()), tokens_hourly(Some(100.0)));
    let id = pool.must_hold(&a(8).model("m"), MINUTE_MS).await;
    assert_eq!(pool.ask(&a(3).model("m")).await.allowed_after_ms, Some(MINUTE_MS));
    pool.at(MINUTE_MS - 1);
    assert_eq!(pool.total(hourly()).await, (0.0, 8.0));
    assert_eq!(pool.open().await, [(id, START.plus_ms(MINUTE_MS))]);
    pool.at(MINUTE_MS);
    assert_eq!(pool.ask(&a(3).model("m")).await.block(), None, "the cap of the model is free too");
    assert_eq!(pool.total(hourly()).await, (0.0, 0.0));
    assert_eq!(pool.open().await, []);
    assert_eq!(pool.release(id, None).await, Ok(false), "it is over");
}

async fn a_settlement_counts_its_cost_once_and_gives_back_what_was_held(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let id = pool.must_hold_as_text(&a(30), MINUTE_MS).await;
    pool.must_hold(&b(5), MINUTE_MS).await;
    assert_eq!(pool.record(&b(30), "", &id).await, Err(Contradiction::ForeignKey));
    assert_eq!(pool.total(hourly()).await, (0.0, 35.0), "a contradiction changes nothing");
    assert_eq!(pool.record(&a(120), "", &id).await, Ok(COUNTED));
    assert_eq!(pool.total(hourly()).await, (120.0, 5.0), "a cost may be above the estimate and the limit");
    let again = [
        (Ok(DUPLICATE), a(120)),                          // the same
        (Err(Contradiction::Settled), a(119)),            // another cost
        (Err(Contradiction::Settled), a(120).model("m")), // another model
        (Err(Contradiction::ForeignKey), b(120)),         // another key
    ];
    for (want, call) in again {
        assert_eq!(pool.record(&call, "", &id).await, want, "{call:?}");
    }
    assert_eq!(pool.total(hourly()).await, (120.0, 5.0));
    // Remembered past the deadline.
    pool.at(MINUTE_MS + ID_LIFE_MS - 1);
    assert_eq!(pool.record(&a(120), "", &id).await, Ok(DUPLICATE));
    pool.at(MINUTE_MS + ID_LIFE_MS);
    assert_eq!(pool.record(&a(120), "", &id).await, Ok(LATE), "forgotten");
}

async fn a_late_settlement_counts_once_and_says_so(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let id = pool.must_hold_as_text(&a(30), MINUTE_MS).await;
    pool.at(MINUTE_MS);
    assert_eq!(pool.record(&a(7), "", &id).await, Ok(LATE));
    assert_eq!(pool.record(&a(7), "", &id).await, Ok(LATE_DUPLICATE));
    assert_eq!(pool.record(&a(8), "", &id).await, Err(Contradiction::Settled));
    assert_eq!(pool.total(hourly()).await, (7.0, 0.0));
}

async fn a_release_gives_back_once_and_by_its_own_key_only(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let first = pool.must_hold(&a(30), MINUTE_MS).await;
    let second = pool.must_hold(&b(20), MINUTE_MS).await;
    assert_eq!(pool.release(first, Some("b")).await, Err(Contradiction::ForeignKey));
    assert_eq!(pool.total(hourly()).await, (0.0, 50.0));
    assert_eq!(pool.release(first, Some("a")).await, Ok(true));
    assert_eq!(pool.release(first, Some("a")).await, Ok(false), "once is enough");
    assert_eq!(pool.release(first, Some("b")).await, Ok(false), "what is not open is nobody's");
    assert_eq!(pool.total(hourly()).await, (0.0, 20.0));
    assert_eq!(pool.release(second, None).await, Ok(true), "whoever it is");
    assert_eq!(pool.total(hourly()).await, (0.0, 0.0));
}

async fn an_idempotency_key_counts_once_for_exactly_its_life(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    assert_eq!(pool.record(&a(7), "i", "").await, Ok(COUNTED));
    pool.at(ID_LIFE_MS - 1);
    assert_eq!(pool.record(&a(7), "i", "").await, Ok(DUPLICATE), "a duplicate does not prolong it");
    for call in [a(8), b(7), a(7).model("m")] {
        assert_eq!(pool.record(&call, "i", "").await, Err(Contradiction::IdempotencyKey), "{call:?}");
    }
    assert_eq!(pool.record(&a(7), "j", "").await, Ok(COUNTED), "another key");
    assert_eq!(pool.total(hourly()).await, (14.0, 0.0));
    pool.at(ID_LIFE_MS);
    assert_eq!(pool.record(&b(8), "i", "").await, Ok(COUNTED), "forgotten");
    assert_eq!(pool.total(hourly()).await, (22.0, 0.0));
}

async fn of_a_reservation_id_and_an_idempotency_key_either_makes_a_duplicate(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let first = pool.must_hold_as_text(&a(20), MINUTE_MS).await;
    let second = pool.must_hold_as_text(&a(20), MINUTE_MS).await;
    assert_eq!(pool.record(&a(7), "i", &first).await, Ok(COUNTED));
    assert_eq!(pool.record(&a(7), "i", "").await, Ok(DUPLICATE));
    assert_eq!(pool.record(&a(7), "j", &first).await, Ok(DUPLICATE));
    assert_eq!(pool.record(&a(8), "i", &second).await, Err(Contradiction::IdempotencyKey));
    assert_eq!(pool.total(hourly()).await, (7.0, 20.0));
    assert_eq!(pool.record(&a(7), "i", &second).await, Ok(DUPLICATE), "its hold is given back all the same");
    assert_eq!(pool.total(hourly()).await, (7.0, 0.0));
    // Both names of each of those calls are known from then on.
    assert_eq!(pool.record(&a(7), "j", "").await, Ok(DUPLICATE));
    assert_eq!(pool.record(&a(7), "", &second).await, Ok(DUPLICATE));
}

async fn a_request_id_gets_its_reservation_until_the_deadline(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let (_, first) = pool.decide(&a(60), MINUTE_MS, "r").await;
    let first = first.expect("a reservation");
    assert_eq!((first.deadline, first.repeated), (START.plus_ms(MINUTE_MS), false));
    for call in [a(61), b(60), a(60).model("m")] {
        let again = pool.hold(&call, MINUTE_MS, "r").await;
        assert_eq!(again, Err(Contradiction::RequestId), "{call:?}");
    }
    let (verdict, again) = pool.decide(&a(60), 7, "r").await;
    assert_eq!(again, Some(Reserved { repeated: true, ..first }), "that 60 more do not fit does not matter");
    assert_eq!(verdict.findings[0].remaining, Some(40.0));
    assert_eq!(pool.total(hourly()).await, (0.0, 60.0));
    // Whatever became of it.
    assert_eq!(pool.release(first.id, None).await, Ok(true));
    pool.at(MINUTE_MS - 1);
    let (_, again) = pool.decide(&a(60), MINUTE_MS, "r").await;
    assert_eq!(again.map(|again| (again.id, again.repeated)), Some((first.id, true)));
    assert_eq!(pool.total(hourly()).await, (0.0, 0.0));
    pool.at(MINUTE_MS);
    let (_, afresh) = pool.decide(&a(61), MINUTE_MS, "r").await;
    let afresh = afresh.expect("a reservation");
    assert_eq!((afresh.deadline, afresh.repeated), (START.plus_ms(2 * MINUTE_MS), false));
    assert_ne!(afresh.id, first.id);
}

async fn a_block_is_not_remembered(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let crowd = pool.must_hold(&b(95), MINUTE_MS).await;
    let (verdict, reserved) = pool.decide(&a(10), MINUTE_MS, "r").await;
    assert_eq!((verdict.block(), reserved), (Some(BlockReason::GlobalSaturated), None));
    assert_eq!(pool.release(crowd, None).await, Ok(true));
    let (_, reserved) = pool.decide(&a(20), MINUTE_MS, "r").await;
    assert!(!reserved.expect("a reservation").repeated);
}

async fn a_pool_for_show_holds_what_it_blocks(driver: Driver) {
    let spec = PoolSpec { enforcement: Enforcement::Shadow, ..pool(keys()) };
    let mut pool = Tenant::new(&driver, spec, tokens_hourly(Some(100.0)));
    pool.must_hold(&a(90), MINUTE_MS).await;
    let (verdict, reserved) = pool.decide(&b(20), MINUTE_MS, "").await;
    assert_eq!(verdict.block(), Some(BlockReason::GlobalSaturated));
    assert!(reserved.is_some_and(|reserved| !reserved.repeated));
    assert_eq!(pool.total(hourly()).await, (0.0, 110.0));
}

async fn a_key_that_is_exempt_is_counted_and_never_blocked(driver: Driver) {
    let exempt = AllocationSpec { exempt: true, ..allocation("a", 0.0, "hard") };
    let keys = vec![exempt, allocation("b", 100.0, "hard")];
    let mut pool = Tenant::new(&driver, pool(keys), tokens_hourly(Some(100.0)));
    let id = pool.must_hold_as_text(&a(150), MINUTE_MS).await;
    assert_eq!(pool.ask(&b(1)).await.block(), Some(BlockReason::GlobalSaturated));
    assert_eq!(pool.record(&a(140), "", &id).await, Ok(COUNTED));
    assert_eq!(pool.of_key("a", hourly()).await, (140.0, 0.0));
    pool.must_hold(&a(1), MINUTE_MS).await;
}

async fn the_share_of_a_key_binds_from_the_threshold_on(driver: Driver) {
    let keys =
        vec![allocation("a", 25.0, "hard"), allocation("b", 25.0, "soft"), allocation("c", 50.0, "burst")];
    let mut pool = Tenant::new(&driver, pool(keys), tokens_hourly(Some(100.0)));
    pool.must_record(&a(30)).await;
    assert_eq!(pool.ask(&a(1)).await.findings[0].mode, Some(Mode::Generous));
    pool.must_record(&b(26)).await;
    for (name, block, deprioritize) in
        [("a", Some(BlockReason::FairShare), false), ("b", None, true), ("c", None, false)]
    {
        let verdict = pool.ask(&Call::new(name, tokens(1))).await;
        assert_eq!((verdict.block(), verdict.deprioritize()), (block, deprioritize), "{name}");
        assert_eq!(verdict.findings[0].mode, Some(Mode::Strict), "{name}");
    }
    // 30 of the first bucket have to fade below 25, and with them the pool below its threshold.
    let wait_ms = pool.ask(&a(1)).await.allowed_after_ms.expect("a wait helps");
    pool.at(wait_ms - 1);
    assert_eq!(pool.ask(&a(1)).await.block(), Some(BlockReason::FairShare));
    pool.at(wait_ms);
    assert_eq!(pool.ask(&a(1)).await.block(), None);
}

async fn the_cost_of_an_id_that_nobody_knows_is_counted_once(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let released = pool.must_hold(&a(30), MINUTE_MS).await;
    assert_eq!(pool.release(released, None).await, Ok(true));
    let of_another_life = ReservationId { pool: new_life(), ..released };
    let never_made = ReservationId { random: [7; 12], ..released };
    let ids = [released, of_another_life, never_made].map(|id| id.to_string());
    for id in ids.into_iter().chain(["made up by somebody".to_owned()]) {
        let before = pool.total(hourly()).await.0;
        assert_eq!(pool.record(&a(7), "", &id).await, Ok(LATE), "{id}");
        assert_eq!(pool.record(&a(7), "", &id).await, Ok(LATE_DUPLICATE), "{id}");
        assert_eq!(pool.record(&a(8), "", &id).await, Err(Contradiction::Settled), "{id}");
        assert_eq!(pool.total(hourly()).await, (before + 7.0, 0.0), "{id}");
    }
    for id in [never_made, of_another_life] {
        assert_eq!(pool.release(id, None).await, Ok(false), "{id}");
    }
}

async fn a_cost_that_counts_in_another_pool_gives_back_where_it_was_held(driver: Driver) {
    let (mut holder, mut target) = (Tenant::usual(&driver), Tenant::usual(&driver));
    let id = holder.must_hold_as_text(&a(30), MINUTE_MS).await;
    let consumption = target.rig.consumption(&a(20), "", &id);
    let settles = consumption.reservation.expect("it was named");
    let known = async |consumption: &Consumption| {
        answered(driver.ledger.reservation(holder.rig.life, consumption, settles).await)
    };
    let by_another = target.rig.consumption(&b(20), "", &id);
    let of_another_cost = target.rig.consumption(&a(21), "", &id);
    assert_eq!(known(&by_another).await, Err(Contradiction::ForeignKey));
    assert_eq!(known(&consumption).await, Ok(ReservationState::Open));
    assert_eq!(known(&of_another_cost).await, Ok(ReservationState::Open), "nothing to contradict yet");

    let reservation = Some(Settlement { held_elsewhere: true, ..settles });
    let there = Consumption { reservation, ..consumption.clone() };
    assert_eq!(
        answered(driver.ledger.record(target.life(), &there).await.map(done)),
        Ok(COUNTED),
        "it is not late"
    );
    assert_eq!(answered(driver.ledger.record(target.life(), &there).await.map(done)), Ok(DUPLICATE));
    assert_eq!(known(&consumption).await, Ok(ReservationState::Open), "until it is given back");
    let nothing = Consumption { counts: Default::default(), connection: None, ..consumption.clone() };
    assert_eq!(answered(driver.ledger.record(holder.life(), &nothing).await.map(done)), Ok(COUNTED));
    assert_eq!((holder.total(hourly()).await, target.total(hourly()).await), ((0.0, 0.0), (20.0, 0.0)));
    assert_eq!(known(&consumption).await, Ok(ReservationState::Settled));
    assert_eq!(known(&of_another_cost).await, Err(Contradiction::Settled));
    assert_eq!(known(&by_another).await, Err(Contradiction::ForeignKey));

    let unknown = Settlement { call: CallId::of_reservation_id("x"), id: None, held_elsewhere: false };
    let state = driver.ledger.reservation(holder.life(), &consumption, unknown).await;
    assert_eq!(answered(state), Ok(ReservationState::Unknown));
}

async fn a_reset_takes_what_is_meant_and_keeps_ids_and_holds(driver: Driver) {
    let daily = dimension(Unit::Tokens, "daily");
    let plan =
        [tokens_hourly(Some(100.0)), vec![dimension_spec(Unit::Tokens, "daily", Some(1_000.0))]].concat();
    let mut pool = Tenant::new(&driver, pool(keys_with_a_model_cap()), plan);
    let of_model = a(4).model("m");
    pool.must_record(&of_model).await;
    pool.must_record(&b(6)).await;
    let id = pool.must_hold_as_text(&a(20), 2 * HOUR_MS).await;
    // Into the next bucket, so that both are in use.
    pool.at(HOUR_MS);
    pool.must_record(&of_model).await;
    assert_eq!(pool.record(&b(6), "i", "").await, Ok(COUNTED));
    // reset | hourly: a, b, the pool | daily: the pool | left of the cap
    let steps = [
        ((Some("a"), Some(hourly())), (0.0, 12.0, 12.0), 20.0, 2.0),
        ((Some("a"), None), (0.0, 12.0, 12.0), 12.0, 10.0),
        ((None, Some(daily)), (0.0, 12.0, 12.0), 0.0, 10.0),
        ((None, None), (0.0, 0.0, 0.0), 0.0, 10.0),
    ];
    for ((of, what), (by_a, by_b, by_all), in_a_day, left) in steps {
        pool.reset(of, what).await;
        assert_eq!(pool.of_key("a", hourly()).await, (by_a, 20.0), "{of:?} {what:?}");
        assert_eq!(pool.of_key("b", hourly()).await, (by_b, 0.0), "{of:?} {what:?}");
        assert_eq!(pool.total(hourly()).await, (by_all, 20.0), "{of:?} {what:?}");
        assert_eq!(pool.total(daily).await, (in_a_day, 20.0), "{of:?} {what:?}");
        assert_eq!(pool.ask(&of_model).await.findings[2].remaining, Some(left), "{of:?} {what:?}");
    }
    pool.must_record(&of_model).await;
    pool.reset(None, None).await;
    assert_eq!(pool.ask(&of_model).await.findings[2].remaining, Some(10.0), "of all keys too");
    assert_eq!(pool.record(&b(6), "i", "").await, Ok(DUPLICATE), "a retry does not count again");
    assert_eq!(pool.record(&a(5), "", &id).await, Ok(COUNTED));
    assert_eq!(pool.total(hourly()).await, (5.0, 0.0));
}

async fn after_a_removal_there_is_nothing_and_nothing_begins(driver: Driver) {
    let (mut gone, mut other) = (Tenant::usual(&driver), Tenant::usual(&driver));
    gone.must_record(&a(7)).await;
    let id = gone.must_hold(&a(30), MINUTE_MS).await;
    other.must_record(&a(1)).await;
    gone.remove().await;
    let (life, rig) = (gone.life(), &mut gone.rig);
    let (charge, wish) = (rig.charge(&a(1)), rig.wish(&a(1), MINUTE_MS, "r"));
    let consumption = rig.consumption(&a(30), "", &id.to_string());
    let settles = consumption.reservation.expect("it was named");
    let ledger = &driver.ledger;
    let c0 = connection(CONNECTION);
    let refused = [
        ("check", ledger.check(&charge).await.err()),
        ("enforce", ledger.enforce(&charge, wish).await.err()),
        ("record", ledger.record(life, &consumption).await.err()),
        ("reservation", ledger.reservation(life, &consumption, settles).await.err()),
        ("report", ledger.report(life, &c0, &[said(hourly(), 0.5, START)]).await.err()),
        ("usage", ledger.usage(life, &[hourly()], &[], true).await.err()),
        ("totals", ledger.totals(life, &[hourly()], &[]).await.err()),
        ("reservations", ledger.reservations(life, None, None, 10).await.err()),
        ("reset", ledger.reset(life, None, None).await.err()),
    ];
    for (what, error) in refused {
        assert!(matches!(error, Some(LedgerError::PoolRemoved)), "{what}: {error:?}");
    }
    assert_eq!(gone.release(id, None).await, Ok(false));
    gone.remove().await;
    assert_eq!(other.total(hourly()).await, (1.0, 0.0));
}

async fn usage_lists_keys_with_something_and_what_is_open(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys_with_a_model_cap()), tokens_and_requests());
    let nothing = pool.usage().await;
    assert_eq!((nothing.at, nothing.keys.len(), nothing.open_reservations), (START, 0, 0));
    assert_eq!((nothing.totals.len(), nothing.rates.len(), nothing.oldest_deadline), (2, 2, None));
    pool.must_record(&a(0)).await;
    assert!(pool.usage().await.keys.is_empty(), "nothing was used");
    pool.must_record(&Call::new("left", tokens(3))).await;
    pool.must_hold(&b(4), 2 * MINUTE_MS).await;
    pool.must_hold(&b(0), MINUTE_MS).await;
    pool.at(5);
    let usage = pool.usage().await;
    let seen: Vec<_> = usage.keys.iter().map(|(key, seen)| (key.as_str(), seen.to_vec())).collect();
    let nothing = (0.0, 0.0);
    assert_eq!(seen, [("b", vec![(0.0, 4.0), nothing]), ("left", vec![(3.0, 0.0), nothing])]);
    assert_eq!((usage.at, usage.open_reservations), (START.plus_ms(5), 2));
    assert_eq!(usage.oldest_deadline, Some(START.plus_ms(MINUTE_MS)));
    assert_eq!((pool.total(hourly()).await, usage.accounts.iter().flatten().count()), ((3.0, 4.0), 0));
    // Whoever has nothing left is not listed.
    pool.reset(Some("left"), None).await;
    pool.at(2 * MINUTE_MS);
    assert!(pool.usage().await.keys.is_empty());
}

async fn open_reservations_are_listed_by_deadline_from_a_place_on(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let late = pool.must_hold(&a(1).model("m"), 3 * MINUTE_MS).await;
    let soon = pool.must_hold(&b(2), MINUTE_MS).await;
    let first = pool.must_hold(&a(3), 2 * MINUTE_MS).await;
    let second = pool.must_hold(&a(4), 2 * MINUTE_MS).await;
    let in_order = [(soon, 1), (first, 2), (second, 2), (late, 3)];
    let want = in_order.map(|(id, minutes)| (id, START.plus_ms(minutes * MINUTE_MS)));
    assert_eq!(pool.open().await, want);

    let list = async |after: Option<usize>, by: Option<&str>, count: usize| {
        let after = after.map(|index| (want[index].1, want[index].0.random));
        let by = by.map(key);
        let listed = driver.ledger.reservations(pool.life(), after, by.as_ref(), count).await;
        listed.expect("an answer").into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    assert_eq!(list(None, None, 2).await, [soon, first]);
    assert_eq!(list(Some(1), None, 2).await, [second, late]);
    assert_eq!(list(Some(3), None, 2).await, []);
    assert_eq!(list(None, Some("a"), 2).await, [first, second], "others do not count");
    assert_eq!(list(Some(0), Some("b"), 2).await, []);
    assert_eq!(list(None, None, 0).await, []);

    let listed = driver.ledger.reservations(pool.life(), None, None, 10).await.expect("an answer");
    let (_, hold) = &listed[3];
    assert_eq!((hold.api_key.as_str(), hold.model.as_ref().map(|model| model.as_str())), ("a", Some("m")));
    assert_eq!((hold.connection.as_str(), hold.cost()), (CONNECTION, tokens(1)));
    // A place stays one though what stood there is gone.
    assert_eq!(pool.release(first, None).await, Ok(true));
    assert_eq!(list(Some(1), None, 9).await, [second, late]);
}

async fn the_burn_rate_follows_its_samples(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys()), tokens_hourly(None));
    // second | recorded | rate
    let steps = [
        (0, 0, None),
        (10, 1_000, Some(100.0)),
        (20, 2_000, Some(130.0)),
        (25, 0, Some(130.0)), // the last sample is too young
    ];
    for (second, recorded, rate) in steps {
        pool.at(second * SECOND_MS);
        pool.must_record(&a(recorded)).await;
        assert_eq!(pool.usage().await.rates[0].steps_per_second, rate, "at {second} s");
    }
    pool.at(30 * SECOND_MS);
    assert_eq!(pool.usage().await.rates[0].steps_per_second, Some(130.0 * 0.7), "it falls by itself");
    let samples = pool.usage().await.samples;
    let samples: Vec<_> = samples[0].iter().map(|sample| (sample.at, sample.cumulative)).collect();
    let at = |second: u64| START.plus_ms(second * SECOND_MS);
    assert_eq!(samples, [(at(0), 0), (at(10), 1_000), (at(20), 3_000)], "a look is not stored");
}

async fn time_stands_still_while_the_clock_is_a_little_behind(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    pool.must_record(&a(40)).await;
    pool.at(90 * MINUTE_MS);
    pool.must_record(&a(1)).await;
    for behind_ms in [1, MINUTE_MS, HOUR_MS] {
        pool.at(90 * MINUTE_MS - behind_ms);
        assert_eq!(pool.usage().await.at, START.plus_ms(90 * MINUTE_MS), "{behind_ms} behind");
        assert_eq!(pool.total(hourly()).await, (21.0, 0.0), "{behind_ms} behind");
        pool.must_report(said(hourly(), 0.1, pool.rig.now)).await;
    }
    pool.must_record(&b(5)).await;
    let (_, reserved) = pool.decide(&b(1), MINUTE_MS, "").await;
    assert_eq!(reserved.map(|it| it.deadline), Some(START.plus_ms(91 * MINUTE_MS)), "from where it stands");
    pool.at(120 * MINUTE_MS);
    assert_eq!(pool.total(hourly()).await, (6.0, 0.0), "all of it is in the bucket where it stood");
}

async fn a_clock_that_goes_back_far_is_believed(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    pool.must_record(&a(30)).await;
    pool.at(90 * MINUTE_MS);
    assert_eq!(pool.record(&a(30), "i", "").await, Ok(COUNTED));
    let short = pool.must_hold(&a(1), MINUTE_MS).await;
    let (_, long) = pool.decide(&a(2), HOUR_MS, "r").await;
    let long = long.expect("a reservation").id;
    pool.at(30 * MINUTE_MS - 1);
    let cut = START.plus_ms(90 * MINUTE_MS - 1);
    assert_eq!(pool.usage().await.at, pool.rig.now);
    assert_eq!(pool.total(hourly()).await, (60.0, 3.0), "what lies ahead counts now");
    assert_eq!(pool.open().await, [(short, cut), (long, cut)], "nothing is held for longer than an hour");
    assert_eq!(pool.record(&a(30), "i", "").await, Ok(DUPLICATE));
    let (_, again) = pool.decide(&a(2), MINUTE_MS, "r").await;
    assert_eq!(again, Some(Reserved { id: long, deadline: cut, repeated: true }));
    pool.at(90 * MINUTE_MS - 1);
    assert_eq!(pool.total(hourly()).await.1, 0.0);
}

async fn sums_stop_at_the_ceiling(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys()), tokens_hourly(None));
    pool.must_record(&a(MAX - 5)).await;
    pool.must_record(&b(7)).await;
    pool.must_record(&a(7)).await;
    assert_eq!(pool.total(hourly()).await.0, MAX as f64);
    // What did not fit is nobody's, so that keys sum to the pool and a reset leaves nothing.
    assert_eq!(pool.of_key("a", hourly()).await.0, (MAX - 5) as f64);
    assert_eq!(pool.of_key("b", hourly()).await.0, 5.0);
    pool.reset(Some("a"), None).await;
    assert_eq!(pool.total(hourly()).await.0, 5.0);
    pool.reset(None, None).await;

    let first = pool.must_hold(&a(MAX - 5), MINUTE_MS).await;
    let second = pool.must_hold(&b(7), MINUTE_MS).await;
    let third = pool.must_hold(&b(7), MINUTE_MS).await;
    assert_eq!(pool.total(hourly()).await.1, MAX as f64);
    for (id, left) in [(first, 5.0), (third, 5.0), (second, 0.0)] {
        assert_eq!(pool.release(id, None).await, Ok(true));
        assert_eq!(pool.total(hourly()).await.1, left, "each gives back what it holds");
    }
}

async fn amounts_are_exact_to_the_step(driver: Driver) {
    let usd = dimension(Unit::Usd, "weekly");
    let plan = vec![dimension_spec(Unit::Usd, "weekly", Some(9e6))];
    let mut pool = Tenant::new(&driver, pool(keys()), plan);
    let spend = |dollars: f64| {
        let amount = Unit::Usd.amount(dollars).expect("it is in range");
        Call::new("a", cost(Unit::Usd, amount.steps()))
    };
    for _ in 0..10 {
        pool.must_record(&spend(0.1)).await;
    }
    pool.must_record(&spend(1e-9)).await;
    assert_eq!(pool.total(usd).await.0, 1_000_000_001.0);
    let most = Call::new("a", cost(Unit::Usd, MAX - 1_000_000_002));
    pool.must_record(&most).await;
    assert_eq!(pool.total(usd).await.0, (MAX - 1) as f64);
    assert_eq!(pool.ask(&spend(1e-9)).await.block(), None, "one step is left");
    assert_eq!(pool.ask(&spend(2e-9)).await.block(), Some(BlockReason::GlobalSaturated));
    pool.must_hold(&spend(1e-9), MINUTE_MS).await;
    assert_eq!(pool.ask(&spend(0.0)).await.block(), Some(BlockReason::GlobalSaturated));
}

async fn a_figure_is_taken_or_it_is_said_why_not(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys()), percent_5h());
    pool.at(6 * HOUR_MS);
    let now = pool.rig.now;
    let earlier = |ms: u64| Timestamp::from_unix_ms(now.unix_ms() - ms);
    let header = |fraction: f64| Observation { believed: false, ..said(percent(), fraction, now) };
    let seen = [
        said(percent(), 0.1, earlier(5 * HOUR_MS + 1)),
        ends(said(percent(), 0.1, now), 6 * HOUR_MS),
        ends(said(percent(), 0.5, earlier(1_000)), 8 * HOUR_MS),
        said(percent(), 0.9, earlier(1_001)),
        ends(header(0.4), 8 * HOUR_MS),
        ends(header(0.6), 7 * HOUR_MS),
        header(0.5),
        said(percent(), 0.4, now),
    ];
    let want = [
        Err(Unread::TooOld),
        Err(Unread::Ended),
        Ok(()),
        Err(Unread::Older),
        Err(Unread::Lower),
        Err(Unread::Ended), // of an earlier window
        Ok(()),
        Ok(()), // on purpose
    ];
    assert_eq!(pool.report(&seen).await, want);
    let usage = pool.usage().await;
    let account = &usage.accounts[0][0];
    assert_eq!((account.fraction, account.observed_at, account.fresh), (0.4, now, true));
    assert_eq!((account.ends_at, account.external, account.parts), (None, 40_000_000, 0));

    pool.rig.observations = vec![header(0.3), header(0.7)];
    let recorded = pool.record(&a(5), "i", "").await;
    assert_eq!(recorded, Ok(Recorded { unread: 1, ..COUNTED }));
    pool.rig.observations = vec![header(0.8)];
    assert_eq!(pool.record(&a(5), "i", "").await, Ok(DUPLICATE), "its figure is news all the same");
    assert_eq!(pool.usage().await.accounts[0][0].fraction, 0.8);
}

async fn a_figure_without_an_end_is_believed_for_its_life(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys()), percent_5h());
    assert_eq!(pool.ask(&a(0)).await.findings[0].mode, Some(Mode::Generous));
    pool.must_report(said(percent(), 1.0, START)).await;
    assert_eq!(pool.ask(&a(0)).await.block(), Some(BlockReason::GlobalSaturated));
    pool.at(30 * SECOND_MS - 1);
    let verdict = pool.ask(&a(0)).await;
    assert_eq!(verdict.block(), Some(BlockReason::GlobalSaturated));
    assert_eq!(verdict.allowed_after_ms, None, "the next figure may say the same");
    pool.at(30 * SECOND_MS);
    assert_eq!(pool.ask(&a(0)).await.block(), None);
    let usage = pool.usage().await;
    assert_eq!((usage.accounts[0][0].fraction, usage.accounts[0][0].fresh), (1.0, false));
}

async fn in_a_window_of_the_provider_everything_counts_until_its_end(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    pool.must_record(&a(30)).await;
    pool.at(90 * MINUTE_MS);
    let seen = ends(said(hourly(), 0.2, pool.rig.now), 130 * MINUTE_MS);
    pool.must_report(seen).await;
    assert_eq!(pool.of_key("a", hourly()).await, (15.0, 0.0), "what was in view comes along");
    pool.must_record(&b(70)).await;
    pool.at(110 * MINUTE_MS);
    assert_eq!(pool.total(hourly()).await, (85.0, 0.0), "it does not slide");
    let verdict = pool.ask(&a(20)).await;
    assert_eq!(verdict.block(), Some(BlockReason::GlobalSaturated));
    assert_eq!(verdict.allowed_after_ms, Some(20 * MINUTE_MS), "when the window ends");
    pool.at(130 * MINUTE_MS);
    assert_eq!(pool.total(hourly()).await, (0.0, 0.0), "everything starts at 0");
    assert!(pool.usage().await.keys.is_empty());
    pool.must_record(&a(4)).await;
    assert_eq!(pool.total(hourly()).await, (4.0, 0.0));
    let left = pool.ask(&a(0)).await.findings[0].remaining;
    assert_eq!(left, Some(96.0), "what the provider has forgotten is not seen");
    pool.at(130 * MINUTE_MS + HOUR_MS);
    assert_eq!(pool.total(hourly()).await.0, 4.0 * 50.0 / 60.0, "and slides again");
}

async fn a_rise_of_a_percent_figure_is_split_over_who_recorded(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys()), percent_5h());
    let one_percent = 1_000_000;
    pool.must_report(ends(said(percent(), 0.1, START), HOUR_MS)).await;
    pool.must_record(&a(50)).await;
    pool.must_record(&b(20)).await;
    pool.at(1_000);
    pool.must_report(ends(said(percent(), 0.8, pool.rig.now), HOUR_MS)).await;
    let parts = async |pool: &Tenant| {
        let (by_a, by_b) = (pool.of_key("a", percent()).await.0, pool.of_key("b", percent()).await.0);
        (by_a, by_b, pool.usage().await.accounts[0][0].external)
    };
    assert_eq!(parts(&pool).await, (5e7, 2e7, 10 * one_percent), "by tokens");
    // A cost that is stated goes to its key, and a fall lowers everybody alike.
    pool.must_record(&Call::new("b", cost(Unit::Percent, 4 * one_percent))).await;
    pool.at(2_000);
    pool.must_report(ends(said(percent(), 0.84, pool.rig.now), HOUR_MS)).await;
    assert_eq!(parts(&pool).await, (5e7, 2.4e7, 10 * one_percent));
    pool.must_report(ends(said(percent(), 0.42, pool.rig.now), HOUR_MS)).await;
    assert_eq!(parts(&pool).await, (2.5e7, 1.2e7, 5 * one_percent));
    // What was a key's is nobody's after its reset, and with the window everything ends.
    pool.reset(Some("a"), None).await;
    assert_eq!(parts(&pool).await, (0.0, 1.2e7, 30 * one_percent));
    pool.at(HOUR_MS);
    assert_eq!(pool.total(percent()).await, (0.0, 0.0));
    assert!(pool.usage().await.accounts[0].is_empty(), "nothing was said of this window");
}

async fn a_window_that_is_reset_early_starts_over(driver: Driver) {
    let mut pool = Tenant::new(&driver, pool(keys()), percent_5h());
    pool.must_report(ends(said(percent(), 0.0, START), HOUR_MS)).await;
    pool.must_record(&a(50)).await;
    pool.at(1_000);
    pool.must_report(ends(said(percent(), 0.6, pool.rig.now), HOUR_MS)).await;
    assert_eq!(pool.of_key("a", percent()).await, (6e7, 0.0));
    pool.at(10 * MINUTE_MS);
    let header = Observation { believed: false, ..said(percent(), 0.1, pool.rig.now) };
    pool.must_report(ends(header, 2 * HOUR_MS)).await;
    let usage = pool.usage().await;
    let account = &usage.accounts[0][0];
    assert_eq!((account.parts, account.external), (0, 10_000_000));
    assert_eq!(account.ends_at, Some(START.plus_ms(2 * HOUR_MS)));
    // An old response of the window before says nothing any more.
    let old = Observation { believed: false, ..said(percent(), 0.7, pool.rig.now) };
    assert_eq!(pool.report(&[ends(old, HOUR_MS)]).await, [Err(Unread::Ended)]);
}

async fn what_each_connections_account_has_used_counts(driver: Driver) {
    let spec = PoolSpec { connection_ids: vec!["c0".to_owned(), "c1".to_owned()], ..pool(keys()) };
    let mut pool = Tenant::new(&driver, spec, tokens_hourly(Some(100.0)));
    let of_two = |fraction: f64| {
        let seen = Observation { alone: false, ..said(hourly(), fraction, START) };
        Observation { reset: Reset::Refill(START.plus_ms(10 * MINUTE_MS)), ..seen }
    };
    pool.must_record(&a(10)).await;
    pool.must_report(of_two(1.0)).await;
    let verdict = pool.ask(&a(1)).await;
    assert_eq!(verdict.block(), Some(BlockReason::ConnectionSaturated));
    assert_eq!(verdict.allowed_after_ms, Some(10 * MINUTE_MS));
    pool.rig.serving = connection("c1");
    // Of 200 in all, 100 are used by that figure, whoever it was.
    assert_eq!(pool.ask(&a(1)).await.findings[0].remaining, Some(100.0));
    pool.must_report(of_two(0.6)).await;
    assert_eq!(pool.ask(&a(40)).await.block(), None);
    assert_eq!(pool.ask(&a(41)).await.block(), Some(BlockReason::GlobalSaturated));
    let usage = pool.usage().await;
    let seen: Vec<_> = usage.accounts[0].iter().map(|it| (it.connection.as_str(), it.fraction)).collect();
    assert_eq!(seen, [("c0", 1.0), ("c1", 0.6)]);
    pool.at(10 * MINUTE_MS);
    assert_eq!(pool.ask(&a(90)).await.block(), None, "both figures have ended");
}

async fn two_pools_do_not_touch_each_other(driver: Driver) {
    let (mut one, mut two) = (Tenant::usual(&driver), Tenant::usual(&driver));
    assert_eq!(one.record(&a(7), "i", "").await, Ok(COUNTED));
    assert_eq!(two.record(&b(9), "i", "").await, Ok(COUNTED), "the same id of another pool");
    one.decide(&a(20), MINUTE_MS, "r").await;
    let (_, reserved) = two.decide(&b(30), MINUTE_MS, "r").await;
    assert!(!reserved.expect("a reservation").repeated);
    one.must_report(said(hourly(), 1.0, START)).await;
    assert_eq!(two.ask(&a(1)).await.block(), None);
    assert_eq!((one.total(hourly()).await, two.total(hourly()).await), ((7.0, 20.0), (9.0, 30.0)));
    // Reservations of one name are two, of one in each.
    let [(in_one, _)] = one.open().await.try_into().expect("one reservation");
    let [(in_two, _)] = two.open().await.try_into().expect("one reservation");
    assert_eq!((in_one.random, in_one.pool == in_two.pool), (in_two.random, false));
    assert_eq!(one.release(in_one, None).await, Ok(true));
    one.reset(None, None).await;
    assert_eq!((one.total(hourly()).await, two.total(hourly()).await), ((0.0, 0.0), (9.0, 30.0)));
}

async fn two_ledgers_of_one_store_see_each_others_effects_at_once(driver: Driver) {
    let mut here = Tenant::usual(&driver);
    let mut there = here.through(&driver.other);
    assert_eq!(here.record(&a(7), "i", "").await, Ok(COUNTED));
    assert_eq!(there.total(hourly()).await, (7.0, 0.0));
    assert_eq!(there.record(&a(7), "i", "").await, Ok(DUPLICATE));
    let (_, first) = there.decide(&a(60), MINUTE_MS, "r").await;
    let first = first.expect("a reservation");
    assert_eq!(here.ask(&b(40)).await.block(), Some(BlockReason::GlobalSaturated));
    let (_, again) = here.decide(&a(60), MINUTE_MS, "r").await;
    assert_eq!(again, Some(Reserved { repeated: true, ..first }));
    assert_eq!(here.open().await, there.open().await);
    assert_eq!(here.record(&a(50), "", &first.id.to_string()).await, Ok(COUNTED));
    assert_eq!(there.record(&a(50), "", &first.id.to_string()).await, Ok(DUPLICATE));
    assert_eq!(there.total(hourly()).await, (57.0, 0.0));
    let second = here.must_hold(&b(1), MINUTE_MS).await;
    assert_eq!(there.release(second, None).await, Ok(true));
    assert_eq!(here.release(second, None).await, Ok(false));
    here.must_report(ends(said(hourly(), 0.9, START), HOUR_MS)).await;
    assert_eq!(there.ask(&b(20)).await.block(), Some(BlockReason::GlobalSaturated), "90 of 100 are used");
    assert_eq!(there.usage().await, here.usage().await);
    there.reset(None, None).await;
    assert_eq!(here.total(hourly()).await, (0.0, 0.0));
    there.remove().await;
    let charge = here.rig.charge(&a(1));
    assert!(matches!(driver.ledger.check(&charge).await, Err(LedgerError::PoolRemoved)));
}

async fn its_condition_counts_what_is_open_and_what_has_ended(driver: Driver) {
    let mut pool = Tenant::usual(&driver);
    let settled = pool.must_hold_as_text(&a(1), MINUTE_MS).await;
    let released = pool.must_hold(&a(1), MINUTE_MS).await;
    pool.must_hold(&a(1), MINUTE_MS).await;
    assert_eq!(driver.ledger.condition().open_reservations, 3);
    assert_eq!(pool.record(&a(1), "", &settled).await, Ok(COUNTED));
    assert_eq!(pool.release(released, None).await, Ok(true));
    pool.at(MINUTE_MS);
    pool.must_record(&a(1)).await;
    let condition = driver.ledger.condition();
    let ended = condition.ended;
    assert_eq!((ended.settled, ended.released, ended.expired), (1, 1, 1));
    assert_eq!((condition.open_reservations, condition.clock_steps), (0, 0));
    assert!(condition.failing.is_none());
}

/// Makes a test of each promise for a driver.
macro_rules! promises {
    ($driver:expr => $($promise:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $promise() {
            if let Some(driver) = $driver.await {
                super::$promise(driver).await;
            }
        }
    )*};
}

/// Holds each driver, an expression that starts one, to every promise.
macro_rules! under_contract {
    ($($name:ident => $driver:expr;)*) => {$(
        mod $name {
            use super::*;

            promises! {
                $driver =>
                what_is_told_late_counts_in_the_bucket_of_its_time
            what_is_told_late_is_no_part_of_a_window_that_began_after_it
            what_is_recorded_reads_back_in_both_buckets_of_the_window
                a_blocked_enforcement_holds_nothing_and_an_allowed_one_all_of_it
                of_concurrent_enforcements_exactly_those_that_fit_are_admitted
                a_deadline_ends_a_hold_without_traffic
                a_settlement_counts_its_cost_once_and_gives_back_what_was_held
                a_late_settlement_counts_once_and_says_so
                a_release_gives_back_once_and_by_its_own_key_only
                an_idempotency_key_counts_once_for_exactly_its_life
                of_a_reservation_id_and_an_idempotency_key_either_makes_a_duplicate
                a_request_id_gets_its_reservation_until_the_deadline
                a_block_is_not_remembered
                a_pool_for_show_holds_what_it_blocks
                a_key_that_is_exempt_is_counted_and_never_blocked
                the_share_of_a_key_binds_from_the_threshold_on
                the_cost_of_an_id_that_nobody_knows_is_counted_once
                a_cost_that_counts_in_another_pool_gives_back_where_it_was_held
                a_reset_takes_what_is_meant_and_keeps_ids_and_holds
                after_a_removal_there_is_nothing_and_nothing_begins
                usage_lists_keys_with_something_and_what_is_open
                open_reservations_are_listed_by_deadline_from_a_place_on
                the_burn_rate_follows_its_samples
                time_stands_still_while_the_clock_is_a_little_behind
                a_clock_that_goes_back_far_is_believed
                sums_stop_at_the_ceiling
                amounts_are_exact_to_the_step
                a_figure_is_taken_or_it_is_said_why_not
                a_figure_without_an_end_is_believed_for_its_life
                in_a_window_of_the_provider_everything_counts_until_its_end
                a_rise_of_a_percent_figure_is_split_over_who_recorded
                a_window_that_is_reset_early_starts_over
                what_each_connections_account_has_used_counts
                two_pools_do_not_touch_each_other
                two_ledgers_of_one_store_see_each_others_effects_at_once
                its_condition_counts_what_is_open_and_what_has_ended
            }
        }
    )*};
}

under_contract! {
    sqlite => drivers::sqlite();
    redis => drivers::redis();
    redis_cluster => drivers::cluster();
}
