//! One pool in a Redis, called the way the service calls it, beside the same pool as the specification has it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use quota_share::{
    clock::{Clock, ManualClock},
    core::{
        account::Observation,
        admission::{Reserved, Verdict},
        charge::Charge,
        headers::Reset,
        ids::ReservationId,
        ledger::{Consumption, HoldRequest, Recorded, UsageReading},
        plan::DimensionSpec,
        pool::{AllocationSpec, ModelCapSpec, PoolSpec},
        units::Unit,
    },
    store::{
        Kept, Ledger, LedgerError,
        redis::{RedisLedger, RedisOptions, RedisUrl},
    },
};

use crate::{
    harness::PATIENCE,
    memory_journal::MemoryJournal,
    model::{Call, Rig, START, allocation, dimension, dimension_spec, new_life, pool, tokens},
};

pub(crate) const COUNTED: Kept<Recorded> =
    Kept::Done(Recorded { duplicate: false, reservation_expired: false, unread: 0 });
pub(crate) const MINUTE_MS: u64 = 60_000;
pub(crate) const HOUR_MS: u64 = 60 * MINUTE_MS;
pub(crate) const DAY_MS: u64 = 24 * HOUR_MS;

/// A clock that stands at the start.
pub(crate) fn standing() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START))
}

/// A ledger that has only begun to look for its Redis.
pub(crate) async fn begun(
    url: &str,
    replica_id: &str,
    clock: Arc<dyn Clock>,
    timeout: Duration,
) -> Arc<RedisLedger> {
    begun_with(url, replica_id, clock, timeout, Arc::default()).await
}

/// The same with a journal of the test's.
pub(crate) async fn begun_with(
    url: &str,
    replica_id: &str,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    journal: Arc<MemoryJournal>,
) -> Arc<RedisLedger> {
    let url = RedisUrl::parse(url).expect("a URL");
    let options =
        RedisOptions { url, replica_id: replica_id.to_owned(), timeout, clock, journal, admits: true };
    Arc::new(RedisLedger::start(options).await.expect("a URL that can be used"))
}

/// A ledger that has reached its Redis, and has time.
pub(crate) async fn reached(url: &str, clock: Arc<dyn Clock>) -> Arc<RedisLedger> {
    hurried(url, clock, PATIENCE).await
}

/// A ledger that has reached its Redis, and so much time for each call.
pub(crate) async fn hurried(url: &str, clock: Arc<dyn Clock>, timeout: Duration) -> Arc<RedisLedger> {
    let ledger = begun(url, "one", clock, timeout).await;
    until("it is reached", async || ledger.condition().failing.is_none()).await;
    ledger
}

/// Polls until it is so.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let asked = Instant::now();
    while !is_so().await {
        assert!(asked.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Why a ledger's store fails; empty if it does not.
pub(crate) fn failing(ledger: &RedisLedger) -> String {
    ledger.condition().failing.map(|error| error.to_string()).unwrap_or_default()
}

pub(crate) fn is_unreachable<T>(answer: &Result<T, LedgerError>) -> bool {
    matches!(answer, Err(LedgerError::Unreachable(_)))
}

pub(crate) fn a(steps: u64) -> Call {
    Call::new("a", tokens(steps))
}

pub(crate) fn b(steps: u64) -> Call {
    Call::new("b", tokens(steps))
}

/// What a provider says at the start of the tokens of the pool's first connection.
pub(crate) fn said(fraction: f64) -> Observation {
    Observation {
        dimension: dimension(Unit::Tokens, "hourly"),
        fraction,
        observed_at: START,
        reset: Reset::Unknown,
        life_ms: 30_000,
        believed: true,
        age_known: true,
        alone: true,
    }
}

/// Something that a ledger is asked.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    Enforce(Box<Charge>, HoldRequest),
    Record(Consumption),
    Release(ReservationId),
    Report(Vec<Observation>),
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Team {
    pub(crate) ledger: Arc<RedisLedger>,
    pub(crate) rig: Rig,
}

impl Team {
    pub(crate) fn new(ledger: &Arc<RedisLedger>, spec: PoolSpec, plan: Vec<DimensionSpec>) -> Self {
        Self { ledger: Arc::clone(ledger), rig: Rig::new(spec, plan, START).in_life(new_life()) }
    }

    /// Two keys that share so many tokens an hour.
    pub(crate) fn usual(ledger: &Arc<RedisLedger>, limit: f64) -> Self {
        let keys = vec![allocation("a", 50.0, "burst"), allocation("b", 50.0, "burst")];
        Self::new(ledger, pool(keys), vec![dimension_spec(Unit::Tokens, "hourly", Some(limit))])
    }

    /// The same pool in another ledger.
    pub(crate) fn through(&self, ledger: &Arc<RedisLedger>) -> Self {
        let mut rig = self.rig.clone();
        rig.skip_names(10_000);
        Self { ledger: Arc::clone(ledger), rig }
    }

    /// The name of its hash in Redis.
    pub(crate) fn hash(&self) -> String {
        format!("quota-share:1:{{{}}}", self.rig.life.0)
    }

    pub(crate) async fn hold(
        &mut self,
        call: &Call,
        for_ms: u64,
        request_id: &str,
    ) -> Result<(Verdict, Option<Reserved>), LedgerError> {
        let charge = self.rig.charge(call);
        let wish = self.rig.wish(call, for_ms, request_id);
        let enforced = self.ledger.enforce(&charge, wish).await?;
        Ok((Verdict::of(&charge, &enforced.reading), enforced.reserved))
    }

    pub(crate) async fn must_hold(&mut self, call: &Call, for_ms: u64) -> ReservationId {
        let (verdict, reserved) = self.hold(call, for_ms, "").await.expect("an answer");
        reserved.unwrap_or_else(|| panic!("blocked: {verdict:?}")).id
    }

    pub(crate) async fn check(&self, call: &Call) -> Result<Verdict, LedgerError> {
        let charge = self.rig.charge(call);
        Ok(Verdict::of(&charge, &self.ledger.check(&charge).await?))
    }

    pub(crate) async fn record(
        &mut self,
        call: &Call,
        idempotency_key: &str,
        reservation: &str,
    ) -> Result<Kept<Recorded>, LedgerError> {
        let consumption = self.rig.consumption(call, idempotency_key, reservation);
        self.ledger.record(self.rig.life, &consumption).await
    }

    pub(crate) async fn must_record(&mut self, call: &Call) {
        assert_eq!(self.record(call, "", "").await.expect("an answer"), COUNTED, "{call:?}");
    }

    pub(crate) async fn try_usage(&self) -> Result<UsageReading, LedgerError> {
        let entry = self.rig.entry();
        self.ledger.usage(self.rig.life, &entry.dimension_keys(), &entry.pool.connections, false).await
    }

    /// Asks again where a connection was lost.
    pub(crate) async fn usage(&self) -> UsageReading {
        answered(async || self.try_usage().await).await
    }

    /// `(consumed, reserved)` of the pool in its first dimension. Asks again where a connection was lost.
    pub(crate) async fn total(&self) -> (f64, f64) {
        let entry = self.rig.entry();
        let dimension = entry.dimension_keys()[0];
        let read = async || self.ledger.totals(self.rig.life, &[dimension], &entry.pool.connections).await;
        let (at, counters) = answered(read).await;
        let level = counters[0].level(dimension, None, at);
        (level.pool_consumed, level.pool_reserved)
    }

    /// What Redis answers, as text.
    pub(crate) async fn ask(&self, asked: &Asked) -> String {
        let (ledger, life) = (&self.ledger, self.rig.life);
        match asked {
            Asked::Enforce(charge, wish) => shown(ledger.enforce(charge, wish.clone()).await),
            Asked::Record(consumption) => shown(ledger.record(life, consumption).await),
            Asked::Release(id) => shown(ledger.release(*id, None).await),
            Asked::Report(seen) => shown(ledger.report(life, &self.rig.serving, seen).await),
        }
    }

    /// What the specification answers, as text.
    pub(crate) fn tell(&mut self, asked: &Asked) -> String {
        let rig = &mut self.rig;
        let now = rig.now;
        match asked.clone() {
            Asked::Enforce(charge, wish) => {
                shown(rig.ledger.enforce(&charge, wish, now).map_err(LedgerError::from))
            }
            Asked::Record(consumption) => {
                shown(rig.ledger.record(&consumption, now).map(Kept::Done).map_err(LedgerError::from))
            }
            Asked::Release(id) => {
                shown(rig.ledger.release(id, None, now).map(Kept::Done).map_err(LedgerError::from))
            }
            Asked::Report(seen) => shown(Ok(rig.report(&seen))),
        }
    }

    /// A wish to hold `call`.
    pub(crate) fn enforce(&mut self, call: &Call, for_ms: u64, request_id: &str) -> Asked {
        Asked::Enforce(Box::new(self.rig.charge(call)), self.rig.wish(call, for_ms, request_id))
    }

    /// A cost to count.
    pub(crate) fn cost(&mut self, call: &Call, idempotency_key: &str, reservation: &str) -> Asked {
        Asked::Record(self.rig.consumption(call, idempotency_key, reservation))
    }
}

/// Reads again for as long as nothing is heard.
async fn answered<T>(read: impl AsyncFn() -> Result<T, LedgerError>) -> T {
    let asked = Instant::now();
    loop {
        match read().await {
            Err(LedgerError::Unreachable(_)) if asked.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            answer => return answer.expect("an answer"),
        }
    }
}

fn shown<T: std::fmt::Debug>(answer: Result<T, LedgerError>) -> String {
    match answer {
        Ok(answer) => format!("{answer:?}"),
        Err(error) => error.to_string(),
    }
}

/// A pool on which everything was asked for that there is, of two dimensions and one connection, for four days.
pub(crate) async fn everything(ledger: &Arc<RedisLedger>, clock: &ManualClock) -> Team {
    let cap = ModelCapSpec {
        model: "m".to_owned(),
        value: 1e9,
        unit: Unit::Tokens.name().to_owned(),
        window: "hourly".to_owned(),
        ..Default::default()
    };
    let keys = vec![
        AllocationSpec { model_caps: vec![cap], ..allocation("a", 50.0, "hard") },
        allocation("b", 50.0, "burst"),
    ];
    let plan = vec![
        dimension_spec(Unit::Tokens, "hourly", Some(100.0)),
        dimension_spec(Unit::Percent, "5h", Some(100.0)),
    ];
    let mut team = Team::new(ledger, pool(keys), plan);
    for turn in 0..96_u64 {
        clock.advance(Duration::from_millis(HOUR_MS));
        team.rig.now = clock.now();
        let id = team.must_hold(&a(1).model("m"), MINUTE_MS).await.to_string();
        let (_, reserved) = team.hold(&b(2), MINUTE_MS, &format!("r{turn}")).await.expect("an answer");
        team.hold(&b(1), MINUTE_MS, "").await.expect("an answer");
        team.record(&a(3).model("m"), &format!("k{turn}"), &id).await.expect("an answer");
        team.record(&b(3), "", "").await.expect("an answer");
        team.check(&a(200)).await.expect("an answer");
        if let Some(reserved) = reserved {
            team.ledger.release(reserved.id, None).await.expect("an answer");
        }
        let dimension = dimension(Unit::Percent, "5h");
        let risen = Observation { dimension, observed_at: clock.now(), ..said(0.01 * (turn % 40) as f64) };
        team.ledger.report(team.rig.life, &team.rig.serving, &[risen]).await.expect("an answer");
        team.usage().await;
    }
    team
}
