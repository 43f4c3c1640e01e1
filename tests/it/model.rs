//! One pool with its plan and its ledger, called the way the service calls them, with time in the test's hands.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use quota_share::core::{
    account::{Observation, Unread},
    admission::{Reading, Reserved, Verdict},
    charge::{self, Charge},
    directory::{Change, Directory, PoolEntry},
    ids::{ApiKeyId, CallId, ConnectionId, Fingerprint, Model, PoolId, PoolRevision, ReservationId},
    ledger::{Consumption, Contradiction, HoldRequest, PoolLedger, Recorded, Settlement, UsageReading},
    plan::{DimensionKey, DimensionSpec, PlanSpec},
    pool::{AllocationSpec, PoolSpec},
    units::{Amount, Cost, Timestamp, Unit},
    window::Window,
};

/// Where the threshold is not the pool's own.
pub(crate) const THRESHOLD: f64 = 0.5;
/// The edge of a bucket of every window that the tests use.
pub(crate) const START: Timestamp = Timestamp::from_unix_ms(1_814_400_000_000);
/// How long ids are remembered.
pub(crate) const ID_LIFE_MS: u64 = 600_000;

/// The pool's first connection, which serves requests.
pub(crate) const CONNECTION: &str = "c0";
const POOL: &str = "team";

/// A life of a pool that no other test has.
pub(crate) fn new_life() -> PoolRevision {
    static LIVES: AtomicU64 = AtomicU64::new(1);
    PoolRevision(LIVES.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn cost(unit: Unit, steps: u64) -> Cost {
    let mut cost = Cost::default();
    let amount = Amount::saturating(steps);
    match unit {
        Unit::Percent => cost.percent = amount,
        Unit::Requests => cost.requests = amount,
        Unit::Tokens => cost.tokens = amount,
        Unit::Usd => cost.usd = amount,
    }
    cost
}

pub(crate) fn tokens(steps: u64) -> Cost {
    cost(Unit::Tokens, steps)
}

pub(crate) fn dimension(unit: Unit, window: &str) -> DimensionKey {
    DimensionKey { unit, window: Window::parse(window).expect("a window") }
}

pub(crate) fn dimension_spec(unit: Unit, window: &str, limit: Option<f64>) -> DimensionSpec {
    DimensionSpec { unit: unit.name().to_owned(), window: window.to_owned(), limit, ..Default::default() }
}

pub(crate) fn key(text: &str) -> ApiKeyId {
    ApiKeyId::parse("api_key_id", text).expect("a key")
}

pub(crate) fn allocation(key: &str, weight: f64, policy: &str) -> AllocationSpec {
    AllocationSpec {
        api_key_id: key.to_owned(),
        weight,
        policy: policy.to_owned(),
        ..AllocationSpec::default()
    }
}

/// A pool of one connection.
pub(crate) fn pool(allocations: Vec<AllocationSpec>) -> PoolSpec {
    PoolSpec {
        pool_id: POOL.to_owned(),
        name: POOL.to_owned(),
        connection_ids: vec![CONNECTION.to_owned()],
        allocations,
        ..PoolSpec::default()
    }
}

/// Who asks for what.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) key: String,
    pub(crate) model: Option<String>,
    pub(crate) cost: Cost,
}

impl Call {
    pub(crate) fn new(key: &str, cost: Cost) -> Call {
        Call { key: key.to_owned(), model: None, cost }
    }

    pub(crate) fn model(self, model: &str) -> Call {
        Call { model: Some(model.to_owned()), ..self }
    }

    fn model_id(&self) -> Option<Model> {
        self.model.as_deref().map(|text| Model::parse("model", text).expect("a model"))
    }

    fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&key(&self.key), self.model.as_deref().unwrap_or(""), &self.cost)
    }
}

/// What was decided, and what was held.
pub(crate) type Decided = (Verdict, Option<Reserved>);

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Rig {
    pub(crate) ledger: PoolLedger,
    pub(crate) now: Timestamp,
    /// The connection that serves requests.
    pub(crate) serving: ConnectionId,
    /// What comes with the next record.
    pub(crate) observations: Vec<Observation>,
    /// Names the life of the pool.
    pub(crate) life: PoolRevision,
    directory: Directory,
    drawn: u64,
}

impl Rig {
    pub(crate) fn new(pool: PoolSpec, plan: Vec<DimensionSpec>, now: Timestamp) -> Rig {
        let mut directory = Directory::default();
        apply(&mut directory, Change::CreatePool(pool));
        let life = entry(&directory).history.created_revision;
        let ledger = PoolLedger::new(life, now);
        let (serving, observations) = (connection(CONNECTION), Vec::new());
        let mut rig = Rig { ledger, now, serving, observations, life, directory, drawn: 0 };
        rig.put_plan(plan);
        rig
    }

    /// The same in another life of the pool, so that one store serves many.
    pub(crate) fn in_life(self, life: PoolRevision) -> Rig {
        Rig { ledger: PoolLedger::new(life, self.now), life, ..self }
    }

    pub(crate) fn wait(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
    }

    /// Puts another plan in force; an empty one is none.
    pub(crate) fn put_plan(&mut self, dimensions: Vec<DimensionSpec>) {
        if !dimensions.is_empty() {
            let spec = PlanSpec { connection_id: CONNECTION.to_owned(), dimensions, ..PlanSpec::default() };
            apply(&mut self.directory, Change::PutPlan { spec, revision: 0 });
        }
    }

    /// Puts other content into the pool.
    pub(crate) fn update_pool(&mut self, spec: PoolSpec) {
        apply(&mut self.directory, Change::UpdatePool { spec, revision: 0 });
    }

    pub(crate) fn entry(&self) -> Arc<PoolEntry> {
        entry(&self.directory)
    }

    pub(crate) fn charge(&self, call: &Call) -> Charge {
        let entry = self.entry();
        let allocation = entry.pool.allocation(&call.key).expect("a key of the pool");
        let model = call.model_id();
        let charge = Charge::new(&entry, allocation, &self.serving, model.as_ref(), &call.cost, THRESHOLD);
        Charge { pool: self.life, ..charge }
    }

    pub(crate) fn reading(&mut self, call: &Call) -> Reading {
        let charge = self.charge(call);
        self.ledger.check(&charge, self.now)
    }

    /// What would be answered now, without any effect.
    pub(crate) fn ask(&mut self, call: &Call) -> Verdict {
        let charge = self.charge(call);
        Verdict::of(&charge, &self.ledger.check(&charge, self.now))
    }

    /// What would be answered after a wait in which nothing happens.
    pub(crate) fn ask_after(&self, call: &Call, ms: u64) -> Verdict {
        let mut later = self.clone();
        later.wait(ms);
        later.ask(call)
    }

    pub(crate) fn hold(
        &mut self,
        call: &Call,
        reserve_for_ms: u64,
        request_id: &str,
    ) -> Result<Decided, Contradiction> {
        let charge = self.charge(call);
        let wish = self.wish(call, reserve_for_ms, request_id);
        let enforced = self.ledger.enforce(&charge, wish, self.now)?;
        Ok((Verdict::of(&charge, &enforced.reading), enforced.reserved))
    }

    /// The wish to hold what the call is expected to cost, under the next name.
    pub(crate) fn wish(&mut self, call: &Call, reserve_for_ms: u64, request_id: &str) -> HoldRequest {
        HoldRequest {
            random: self.draw(),
            connection: self.serving.clone(),
            model: call.model_id(),
            reserve_for_ms,
            request_id: request_id.to_owned(),
            fingerprint: call.fingerprint(),
        }
    }

    /// A hold that is sure to be made.
    pub(crate) fn must_hold(&mut self, call: &Call, reserve_for_ms: u64) -> ReservationId {
        let (verdict, reserved) = self.hold(call, reserve_for_ms, "").expect("no request id to contradict");
        reserved.unwrap_or_else(|| panic!("blocked: {verdict:?}")).id
    }

    /// What the call cost, with an idempotency key and the text of a reservation id, both of which may be empty.
    pub(crate) fn record(
        &mut self,
        call: &Call,
        idempotency_key: &str,
        reservation: &str,
    ) -> Result<Recorded, Contradiction> {
        let consumption = self.consumption(call, idempotency_key, reservation);
        self.ledger.record(&consumption, self.now)
    }

    /// What is recorded of the call, together with the observations that wait for it.
    pub(crate) fn consumption(
        &mut self,
        call: &Call,
        idempotency_key: &str,
        reservation: &str,
    ) -> Consumption {
        let entry = self.entry();
        let allocation = entry.pool.allocation(&call.key);
        Consumption {
            api_key: key(&call.key),
            connection: Some(self.serving.clone()),
            cost: call.cost,
            observations: std::mem::take(&mut self.observations),
            counts: charge::counts(&entry, allocation, call.model_id().as_ref(), &call.cost),
            reservation: Some(reservation).filter(|text| !text.is_empty()).map(|text| Settlement {
                call: CallId::of_reservation_id(text),
                id: ReservationId::parse(text),
                held_elsewhere: false,
            }),
            idempotency: Some(idempotency_key)
                .filter(|text| !text.is_empty())
                .map(|text| CallId::of_idempotency_key(&self.serving, text)),
            fingerprint: call.fingerprint(),
            id_life_ms: ID_LIFE_MS,
            recorded_at: None,
        }
    }

    /// Usage of all dimensions of the plan.
    pub(crate) fn usage(&mut self) -> UsageReading {
        let entry = self.entry();
        self.ledger.usage(&entry.dimension_keys(), &entry.pool.connections, false, self.now)
    }

    /// `(consumed, reserved)` of the pool in each dimension of the plan.
    pub(crate) fn totals(&mut self) -> Vec<(f64, f64)> {
        let dimensions = self.entry().dimension_keys();
        dimensions.into_iter().map(|dimension| self.total(dimension)).collect()
    }

    /// `(consumed, reserved)` of the pool in one dimension.
    pub(crate) fn total(&mut self, dimension: DimensionKey) -> (f64, f64) {
        let entry = self.entry();
        let (at, counters) = self.ledger.totals(&[dimension], &entry.pool.connections, self.now);
        let level = counters[0].level(dimension, None, at);
        (level.pool_consumed, level.pool_reserved)
    }

    /// What a provider says of the serving connection: for each figure, why it was not taken.
    pub(crate) fn report(&mut self, seen: &[Observation]) -> Vec<Result<(), Unread>> {
        self.ledger.report(&self.serving, seen, self.now)
    }

    /// `(consumed, reserved)` of a key in one dimension.
    pub(crate) fn of_key(&mut self, text: &str, dimension: DimensionKey) -> (f64, f64) {
        let connections = Arc::clone(&self.entry().pool.connections);
        let usage = self.ledger.usage(&[dimension], &connections, false, self.now);
        usage.keys.get(&key(text)).map_or((0.0, 0.0), |seen| seen[0])
    }

    /// Leaves out so many names of reservations, which somebody else may have drawn.
    pub(crate) fn skip_names(&mut self, count: u64) {
        self.drawn += count;
    }

    /// Names the next reservation as `other` will.
    pub(crate) fn skip_names_of(&mut self, other: &Rig) {
        self.drawn = other.drawn;
    }

    fn draw(&mut self) -> [u8; 12] {
        self.drawn += 1;
        let mut random = [0; 12];
        random[4..].copy_from_slice(&self.drawn.to_be_bytes());
        random
    }
}

pub(crate) fn connection(text: &str) -> ConnectionId {
    ConnectionId::parse("connection_id", text).expect("a connection")
}

fn entry(directory: &Directory) -> Arc<PoolEntry> {
    let id = PoolId::parse("pool_id", POOL).expect("a pool id");
    Arc::clone(directory.pool(&id).expect("the pool"))
}

fn apply(directory: &mut Directory, change: Change) {
    // What is there already changes nothing.
    if let Some(applied) = directory.apply(change, START).expect("a valid change") {
        *directory = applied.next;
    }
}
