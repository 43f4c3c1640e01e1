//! One pool's counters, reservations and remembered ids: a pure state machine, and the specification that every
//! driver of shared counters is held to.
//!
//! Every effect is a [`Change`]: a driver makes it durable, or takes it back with [`PoolLedger::revert`].

mod accounts;
mod calls;
mod parts;
mod reading;

use std::{collections::BTreeMap, sync::Arc};

use hashbrown::HashMap;

pub use self::calls::{
    AccountUsage, CLOCK_STEP_MS, Change, Consumption, Contradiction, Ended, Enforced, Hold, HoldRequest,
    ID_LIFE_MS_MAX, RESERVE_MS_MAX, Recorded, ReservationState, Settlement, Size, UsageReading,
};
pub use self::parts::{AccountPart, DimensionPart, KeyPart, Parts};
use super::{
    account::Account,
    admission::{Counter, Reserved},
    burn_rate::Sampler,
    charge::{Charge, CounterKey},
    ids::{ApiKeyId, CallId, ConnectionId, PoolRevision, ReservationId},
    memory::{Memories, RecordMemory, RequestMemory},
    plan::DimensionKey,
    pool::ModelCapKey,
    units::{Amount, Timestamp},
    window::SlidingCounter,
};

/// A dimension of the pool: its total, and how fast that grows.
#[derive(Clone, Debug)]
struct PoolDimension {
    key: DimensionKey,
    total: Counter,
    sampler: Sampler,
}

/// A key's counters: its part of each of the pool's dimensions, and its model caps.
#[derive(Clone, Debug, Default)]
struct KeyCounters {
    /// By position in [`PoolLedger::dimensions`]; may be shorter.
    dimensions: Vec<Counter>,
    models: Vec<(ModelCapKey, Counter)>,
}

/// One pool's counters, reservations and remembered ids.
#[derive(Clone, Debug)]
pub struct PoolLedger {
    pool: PoolRevision,
    now: Timestamp,
    /// How far the clock was behind `now` when it was last looked at.
    lag_ms: u64,
    /// Every dimension that was ever counted here and has not aged out.
    dimensions: Vec<PoolDimension>,
    keys: HashMap<ApiKeyId, KeyCounters>,
    accounts: BTreeMap<DimensionKey, BTreeMap<ConnectionId, Account>>,
    /// The first end of a provider's window, or earlier.
    next_window_end: Option<Timestamp>,
    holds: HashMap<[u8; 12], Arc<Hold>>,
    by_deadline: BTreeMap<(Timestamp, [u8; 12]), Arc<Hold>>,
    records: Memories<RecordMemory>,
    requests: Memories<RequestMemory>,
    ended: Ended,
    changes: Vec<Change>,
}

impl PoolLedger {
    /// An empty ledger that has last seen the clock at `now`.
    pub fn new(pool: PoolRevision, now: Timestamp) -> Self {
        Self {
            pool,
            now,
            lag_ms: 0,
            dimensions: Vec::new(),
            keys: HashMap::new(),
            accounts: BTreeMap::new(),
            next_window_end: None,
            holds: HashMap::new(),
            by_deadline: BTreeMap::new(),
            records: Memories::default(),
            requests: Memories::default(),
            ended: Ended::default(),
            changes: Vec::new(),
        }
    }

    /// Takes over a change that was made durable in an earlier life. Consumption must come by bucket, the oldest first.
    pub fn restore(&mut self, change: Change) {
        match change {
            // What lies ahead is left over from a clock that went back: what counted of it has been moved, and the
            // rest must not push out what is there.
            Change::Consumed { api_key, counter, bucket, delta } => {
                if let Ok(steps @ 1..) = u64::try_from(delta)
                    && bucket <= counter.dimension.window.bucket(self.now)
                {
                    self.add(&api_key, &counter, bucket, Amount::saturating(steps));
                }
            }
            Change::Held(random, hold) => self.hold(random, &hold),
            Change::Freed(random, _) => drop(self.free(&random)),
            Change::Sampled { dimension, after, .. } => self.dimension_mut(dimension).sampler.restore(after),
            Change::Account(change) => self.put_account(*change),
            Change::Record(call, memory) => {
                let latest = self.now.plus_ms(RESERVE_MS_MAX + ID_LIFE_MS_MAX);
                self.records.insert(call, RecordMemory { ends_at: memory.ends_at.min(latest), ..memory });
            }
            Change::Request(call, memory) => {
                let latest = self.now.plus_ms(RESERVE_MS_MAX);
                self.requests.insert(call, RequestMemory { ends_at: memory.ends_at.min(latest), ..memory });
            }
        }
    }

    /// The effects since this was last called, in their order. A driver that answers a call from this ledger takes
    /// them before it lets anybody else in.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Undoes effects that could not be made durable.
    pub fn revert(&mut self, changes: Vec<Change>) {
        for change in changes.into_iter().rev() {
            match change {
                Change::Consumed { api_key, counter, bucket, delta } => {
                    self.adjust(&api_key, &counter, bucket, -delta);
                    if counter.model.is_none() && delta > 0 {
                        self.dimension_mut(counter.dimension).sampler.take_back(delta.unsigned_abs());
                    }
                }
                Change::Sampled { dimension, before, .. } => {
                    self.dimension_mut(dimension).sampler.unsample(before);
                }
                Change::Account(change) => self.revert_account(*change),
                Change::Held(random, _) => drop(self.free(&random)),
                Change::Freed(random, hold) => self.hold(random, &hold),
                Change::Record(call, _) => self.records.remove(&call),
                Change::Request(call, _) => self.requests.remove(&call),
            }
        }
    }

    /// How much is kept, and what has ended.
    pub fn size(&self) -> Size {
        Size {
            open_reservations: self.holds.len() as u64,
            remembered_ids: (self.records.len() + self.requests.len()) as u64,
            ended: self.ended,
        }
    }

    /// Decides on `charge` and, if it passes (or is for show only), holds its estimates.
    pub fn enforce(
        &mut self,
        charge: &Charge,
        wish: HoldRequest,
        clock: Timestamp,
    ) -> Result<Enforced, Contradiction> {
        self.advance(clock);
        let reading = self.read(charge);
        let request = Some(wish.request_id.as_str()).filter(|id| !id.is_empty());
        let request = request.map(|id| CallId::of_request_id(&wish.connection, id));
        if let Some(memory) = request.and_then(|call| self.requests.get(&call, self.now)) {
            if memory.fingerprint != wish.fingerprint {
                return Err(Contradiction::RequestId);
            }
            let reserved = Reserved { id: memory.reservation, deadline: memory.ends_at, repeated: true };
            return Ok(Enforced { reading, reserved: Some(reserved) });
        }
        let blocked = charge.findings(&reading).iter().any(|finding| finding.block.is_some());
        if blocked && !charge.shadow {
            return Ok(Enforced { reading, reserved: None });
        }
        let id = ReservationId { pool: self.pool, random: wish.random };
        let deadline = self.now.plus_ms(wish.reserve_for_ms);
        if let Some(call) = request {
            let memory = RequestMemory { fingerprint: wish.fingerprint, ends_at: deadline, reservation: id };
            self.requests.insert(call, memory);
            self.changes.push(Change::Request(call, memory));
        }
        let hold = Arc::new(self.hold_for(charge, wish, deadline));
        self.hold(id.random, &hold);
        self.changes.push(Change::Held(id.random, hold));
        Ok(Enforced { reading, reserved: Some(Reserved { id, deadline, repeated: false }) })
    }

    /// Counts a cost once, and gives back the reservation that it settles.
    pub fn record(&mut self, consumption: &Consumption, clock: Timestamp) -> Result<Recorded, Contradiction> {
        self.advance(clock);
        let settled =
            consumption.reservation.and_then(|settles| self.records.get(&settles.call, self.now)).copied();
        let counted = consumption.idempotency.and_then(|call| self.records.get(&call, self.now)).copied();
        let open = consumption.reservation.and_then(|settles| self.open(settles.id)).cloned();
        self.agree(consumption, open.as_deref(), settled, counted)?;

        let duplicate = settled.is_some() || counted.is_some();
        let late = match consumption.reservation {
            Some(settles) => settled.map_or(open.is_none() && !settles.held_elsewhere, |memory| memory.late),
            None => false,
        };
        if let (Some(hold), Some(Settlement { id: Some(id), .. })) = (&open, consumption.reservation) {
            self.give_back(id.random, hold);
            self.ended.settled += 1;
        }
        if !duplicate {
            let at = consumption.recorded_at.map_or(self.now, |at| at.min(self.now));
            for (counter, amount) in &consumption.counts {
                self.consume(&consumption.api_key, counter, *amount, at);
            }
            self.record_on_accounts(consumption, at);
        }
        let mut unread = 0;
        for seen in &consumption.observations {
            let Some(connection) = &consumption.connection else { break };
            unread += usize::from(self.observe(connection, seen).is_err());
        }
        if !duplicate {
            let dimensions = consumption.counts.iter().filter(|(counter, _)| counter.model.is_none());
            dimensions.for_each(|(counter, _)| self.sample(counter.dimension));
        }
        let remembered_until = self.now.plus_ms(consumption.id_life_ms);
        let memory = |ends_at| RecordMemory { fingerprint: consumption.fingerprint, ends_at, late };
        if let (Some(settles), None) = (consumption.reservation, settled) {
            let from = open.map_or(self.now, |hold| hold.deadline.max(self.now));
            self.remember(settles.call, memory(from.plus_ms(consumption.id_life_ms)));
        }
        if let (Some(call), None) = (consumption.idempotency, counted) {
            self.remember(call, memory(remembered_until));
        }
        Ok(Recorded { duplicate, reservation_expired: late, unread })
    }

    /// Gives a reservation back without any cost; false if it is not open. `api_key`, if given, must be its key.
    pub fn release(
        &mut self,
        id: ReservationId,
        api_key: Option<&ApiKeyId>,
        clock: Timestamp,
    ) -> Result<bool, Contradiction> {
        self.advance(clock);
        let Some(hold) = self.open(Some(id)).cloned() else { return Ok(false) };
        if api_key.is_some_and(|key| *key != hold.api_key) {
            return Err(Contradiction::ForeignKey);
        }
        self.give_back(id.random, &hold);
        self.ended.released += 1;
        Ok(true)
    }

    /// What is known of a reservation that `consumption`, which counts in another pool, settles.
    pub fn reservation(
        &mut self,
        consumption: &Consumption,
        settles: Settlement,
        clock: Timestamp,
    ) -> Result<ReservationState, Contradiction> {
        self.advance(clock);
        let settled = self.records.get(&settles.call, self.now).copied();
        let open = self.open(settles.id);
        self.agree(consumption, open.map(|hold| &**hold), settled, None)?;
        Ok(match (open, settled) {
            (_, Some(_)) => ReservationState::Settled,
            (Some(_), None) => ReservationState::Open,
            (None, None) => ReservationState::Unknown,
        })
    }

    /// Sets what is recorded to zero: of one key or of all, in one dimension or, model caps included, in all.
    pub fn reset(&mut self, api_key: Option<&ApiKeyId>, dimension: Option<DimensionKey>, clock: Timestamp) {
        self.advance(clock);
        let meant = |key: &ApiKeyId| api_key.is_none_or(|only| only == key);
        self.remove_consumed(&meant, dimension);
        self.forget_accounts(api_key, dimension, self.now);
    }

    /// Takes what is recorded out of the counters of keys that are meant: of one dimension or, model caps included, of all.
    fn remove_consumed(&mut self, meant: &dyn Fn(&ApiKeyId) -> bool, dimension: Option<DimensionKey>) {
        let mut removed = Vec::new();
        for (key, counters) in self.keys.iter().filter(|(key, _)| meant(key)) {
            let plan = self.dimensions.iter().zip(&counters.dimensions);
            let plan = plan.map(|(dimension, counter)| (CounterKey::from(dimension.key), counter));
            let plan = plan.filter(|(key, _)| dimension.is_none_or(|only| only == key.dimension));
            let models = counters.models.iter().filter(|_| dimension.is_none());
            let models = models.map(|(cap, counter)| (CounterKey::from(cap), counter));
            for (counter_key, counter) in plan.chain(models) {
                let held = counter.consumed.held().into_iter().filter(|(_, amount)| *amount > 0);
                removed
                    .extend(held.map(|(bucket, amount)| (key.clone(), counter_key.clone(), bucket, amount)));
            }
        }
        for (key, counter, bucket, amount) in removed {
            self.change_consumed(key, counter, bucket, -(amount as i64));
        }
    }

    /// Drops keys and dimensions whose counters have aged out.
    pub fn compact(&mut self, clock: Timestamp) {
        self.advance(clock);
        self.forget_idle_accounts();
        let now = self.now;
        let idle = |counter: &Counter, dimension: &DimensionKey| {
            counter.reserved == 0 && counter.consumed.is_spent(dimension.window.bucket(now))
        };
        let kept: Vec<bool> =
            self.dimensions.iter().map(|of| !idle(&of.total, &of.key) || of.sampler.is_live(now)).collect();
        for counters in self.keys.values_mut() {
            let mut position = 0;
            counters.dimensions.retain(|_| {
                position += 1;
                kept[position - 1]
            });
            counters.models.retain(|(cap, counter)| !idle(counter, &cap.dimension));
        }
        let mut kept = kept.into_iter();
        // `kept` has one entry for each dimension.
        self.dimensions.retain(|_| kept.next().unwrap_or(true));
        let dimensions = &self.dimensions;
        self.keys.retain(|_, counters| {
            let plan =
                counters.dimensions.iter().zip(dimensions).any(|(counter, of)| !idle(counter, &of.key));
            plan || !counters.models.is_empty()
        });
    }

    /// Moves to `clock`: reservations past their deadline stop counting. The clock never goes back, unless it steps
    /// back so far that waiting for it would freeze the pool.
    fn advance(&mut self, clock: Timestamp) {
        if self.now.ms_since(clock) > CLOCK_STEP_MS {
            self.step_back_to(clock);
        }
        self.now = self.now.max(clock);
        self.lag_ms = self.now.ms_since(clock);
        while let Some((&(deadline, random), hold)) = self.by_deadline.first_key_value()
            && deadline <= self.now
        {
            let hold = Arc::clone(hold);
            self.give_back(random, &hold);
            self.ended.expired += 1;
        }
        if self.next_window_end.is_some_and(|end| end <= self.now) {
            self.end_windows();
        }
        self.records.expire(self.now);
        self.requests.expire(self.now);
    }

    /// What was filed ahead of `clock` and was still in view counts in its bucket; nothing lives longer from there than it
    /// could have.
    fn step_back_to(&mut self, clock: Timestamp) {
        let until = std::mem::replace(&mut self.now, clock);
        let mut moved = Vec::new();
        for (key, counters) in &mut self.keys {
            let plan = self.dimensions.iter().zip(&mut counters.dimensions);
            let plan = plan.map(|(dimension, counter)| (CounterKey::from(dimension.key), counter));
            let models = counters.models.iter_mut().map(|(cap, counter)| (CounterKey::from(&*cap), counter));
            for (counter_key, counter) in plan.chain(models) {
                let bucket = counter_key.dimension.window.bucket(clock);
                // What had aged out does not come back, whether it was dropped meanwhile or not.
                let newest = counter_key.dimension.window.bucket(until);
                let aged_out = counter
                    .consumed
                    .held()
                    .into_iter()
                    .filter(|(from, amount)| *from + 1 < newest && *amount > 0);
                moved.extend(
                    aged_out.map(|(from, amount)| (key.clone(), counter_key.clone(), from, -(amount as i64))),
                );
                counter.consumed.advance(newest);
                let ahead = counter
                    .consumed
                    .held()
                    .into_iter()
                    .filter(|(from, amount)| *from > bucket && *amount > 0);
                for (from, amount) in ahead {
                    moved.push((key.clone(), counter_key.clone(), from, -(amount as i64)));
                    moved.push((key.clone(), counter_key.clone(), bucket, amount as i64));
                }
                counter.consumed.rebase(bucket);
            }
        }
        // The total may have forgotten buckets that a key which moved on later still has.
        for (position, dimension) in self.dimensions.iter_mut().enumerate() {
            let of_keys = self.keys.values().filter_map(|counters| counters.dimensions.get(position));
            let bucket = dimension.key.window.bucket(clock);
            dimension.total.consumed = SlidingCounter::sum(bucket, of_keys.map(|counter| counter.consumed));
        }
        let moves = moved.into_iter();
        self.changes.extend(moves.map(|(api_key, counter, bucket, delta)| Change::Consumed {
            api_key,
            counter,
            bucket,
            delta,
        }));
        let latest_deadline = clock.plus_ms(RESERVE_MS_MAX);
        for ((_, random), hold) in self.by_deadline.split_off(&(latest_deadline, [0xff; 12])) {
            self.give_back(random, &hold);
            let hold = Arc::new(Hold { deadline: latest_deadline, ..(*hold).clone() });
            self.hold(random, &hold);
            self.changes.push(Change::Held(random, hold));
        }
        self.forget_accounts(None, None, Timestamp::default());
        self.requests.cut(until, latest_deadline);
        self.records.cut(until, latest_deadline.plus_ms(ID_LIFE_MS_MAX));
    }

    fn hold_for(&self, charge: &Charge, wish: HoldRequest, deadline: Timestamp) -> Hold {
        let key = self.keys.get(&charge.api_key);
        let amounts = charge.checks.iter().filter_map(|check| {
            let (own, total) = self.counters(key, &check.counter);
            let steps = check.estimate.room_on(total.reserved.max(own.reserved));
            (steps > 0).then(|| (check.counter.clone(), steps))
        });
        Hold {
            api_key: charge.api_key.clone(),
            connection: wish.connection,
            model: wish.model,
            request_id: wish.request_id,
            deadline,
            amounts: amounts.collect(),
        }
    }

    fn open(&self, id: Option<ReservationId>) -> Option<&Arc<Hold>> {
        self.holds.get(&id.filter(|id| id.pool == self.pool)?.random)
    }

    /// Refuses a record that says something else than what is known.
    fn agree(
        &self,
        consumption: &Consumption,
        open: Option<&Hold>,
        settled: Option<RecordMemory>,
        counted: Option<RecordMemory>,
    ) -> Result<(), Contradiction> {
        let fingerprint = consumption.fingerprint;
        if open.is_some_and(|hold| hold.api_key != consumption.api_key)
            || settled.is_some_and(|memory| memory.fingerprint.key != fingerprint.key)
        {
            return Err(Contradiction::ForeignKey);
        }
        if settled.is_some_and(|memory| memory.fingerprint != fingerprint) {
            return Err(Contradiction::Settled);
        }
        if counted.is_some_and(|memory| memory.fingerprint != fingerprint) {
            return Err(Contradiction::IdempotencyKey);
        }
        Ok(())
    }

    fn remember(&mut self, call: CallId, memory: RecordMemory) {
        self.records.insert(call, memory);
        self.changes.push(Change::Record(call, memory));
    }

    /// Counts `amount` at `at`, as far as the ceiling of stored sums allows and that is still in the window.
    fn consume(&mut self, api_key: &ApiKeyId, counter: &CounterKey, amount: Amount, at: Timestamp) {
        let window = counter.dimension.window;
        let bucket = window.bucket(at);
        if amount == Amount::ZERO || bucket + 1 < window.bucket(self.now) {
            return;
        }
        let added = self.add(api_key, counter, bucket, amount);
        if counter.model.is_none() {
            self.dimension_mut(counter.dimension).sampler.add(added);
        }
        let (api_key, counter, delta) = (api_key.clone(), counter.clone(), added as i64);
        self.changes.push(Change::Consumed { api_key, counter, bucket, delta });
    }

    fn add(&mut self, api_key: &ApiKeyId, counter: &CounterKey, bucket: u64, amount: Amount) -> u64 {
        let (own, total) = self.counters_mut(api_key, counter);
        match total {
            // The total is the larger: what fits there fits the key's own.
            Some(total) => {
                let added = total.consumed.add(bucket, amount);
                own.consumed.add(bucket, Amount::saturating(added))
            }
            None => own.consumed.add(bucket, amount),
        }
    }

    fn adjust(&mut self, api_key: &ApiKeyId, counter: &CounterKey, bucket: u64, delta: i64) {
        let (own, total) = self.counters_mut(api_key, counter);
        own.consumed.adjust(bucket, delta);
        if let Some(total) = total {
            total.consumed.adjust(bucket, delta);
        }
    }

    fn change_consumed(&mut self, api_key: ApiKeyId, counter: CounterKey, bucket: u64, delta: i64) {
        self.adjust(&api_key, &counter, bucket, delta);
        self.changes.push(Change::Consumed { api_key, counter, bucket, delta });
    }

    fn hold(&mut self, random: [u8; 12], hold: &Arc<Hold>) {
        for (counter, steps) in &hold.amounts {
            let (own, total) = self.counters_mut(&hold.api_key, counter);
            own.reserved += steps;
            if let Some(total) = total {
                total.reserved += steps;
            }
        }
        self.holds.insert(random, Arc::clone(hold));
        self.by_deadline.insert((hold.deadline, random), Arc::clone(hold));
    }

    fn give_back(&mut self, random: [u8; 12], hold: &Arc<Hold>) {
        self.free(&random);
        self.changes.push(Change::Freed(random, Arc::clone(hold)));
    }

    fn free(&mut self, random: &[u8; 12]) -> Option<Arc<Hold>> {
        let hold = self.holds.remove(random)?;
        self.by_deadline.remove(&(hold.deadline, *random));
        for (counter, steps) in &hold.amounts {
            let (own, total) = self.counters_mut(&hold.api_key, counter);
            own.reserved = own.reserved.saturating_sub(*steps);
            if let Some(total) = total {
                total.reserved = total.reserved.saturating_sub(*steps);
            }
        }
        Some(hold)
    }

    /// The key's own counter and, for a dimension, the pool's total; made where they are not yet.
    fn counters_mut(
        &mut self,
        api_key: &ApiKeyId,
        counter: &CounterKey,
    ) -> (&mut Counter, Option<&mut Counter>) {
        let own = self.keys.entry_ref(api_key).or_default();
        if let Some(model) = &counter.model {
            let cap = ModelCapKey { model: model.clone(), dimension: counter.dimension };
            return (own.model_mut(cap), None);
        }
        let position = position_mut(&mut self.dimensions, counter.dimension);
        if own.dimensions.len() <= position {
            own.dimensions.resize(position + 1, Counter::default());
        }
        (&mut own.dimensions[position], Some(&mut self.dimensions[position].total))
    }

    /// A call was recorded that counts in `dimension`, if only with 0.
    fn sample(&mut self, dimension: DimensionKey) {
        let now = self.now;
        let sampler = &mut self.dimension_mut(dimension).sampler;
        let before = sampler.rate();
        if let Some(after) = sampler.sample(now) {
            self.changes.push(Change::Sampled { dimension, before, after });
        }
    }

    fn dimension_mut(&mut self, dimension: DimensionKey) -> &mut PoolDimension {
        let position = position_mut(&mut self.dimensions, dimension);
        &mut self.dimensions[position]
    }

    fn position(&self, dimension: DimensionKey) -> Option<usize> {
        self.dimensions.iter().position(|of| of.key == dimension)
    }
}

/// Where `dimension` stands, made where it is not yet.
fn position_mut(dimensions: &mut Vec<PoolDimension>, dimension: DimensionKey) -> usize {
    dimensions.iter().position(|of| of.key == dimension).unwrap_or_else(|| {
        let (total, sampler) = (Counter::default(), Sampler::default());
        dimensions.push(PoolDimension { key: dimension, total, sampler });
        dimensions.len() - 1
    })
}

impl From<DimensionKey> for CounterKey {
    fn from(dimension: DimensionKey) -> Self {
        Self { dimension, model: None }
    }
}

impl KeyCounters {
    fn model_mut(&mut self, cap: ModelCapKey) -> &mut Counter {
        let position = self.models.iter().position(|(key, _)| *key == cap).unwrap_or_else(|| {
            self.models.push((cap, Counter::default()));
            self.models.len() - 1
        });
        &mut self.models[position].1
    }
}

impl From<&ModelCapKey> for CounterKey {
    fn from(cap: &ModelCapKey) -> Self {
        Self { dimension: cap.dimension, model: Some(cap.model.clone()) }
    }
}
