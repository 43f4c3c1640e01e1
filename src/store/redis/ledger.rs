//! The counters of all pools in Redis, as the service asks for them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{
    RedisOptions, STORE,
    batches::{Answer, Sender, broken, stopped},
    client::Client,
    directory::RedisDirectory,
    drain::Drain,
    health::{Health, not_reached},
    keys,
    pools::Pools,
    probe,
    reads::Reader,
    slot::Slot,
    stored::{Stored, decode},
    ticket::{Stage, Ticket},
    watch,
    wire::{Call, EnforceAnswer, Refused},
};
use crate::{
    core::{
        account::{Observation, Unread},
        admission::{Counters, Reading, Reserved},
        charge::{Charge, PerCheck},
        ids::{ApiKeyId, CallId, ConnectionId, PoolRevision, ReservationId, digest},
        ledger::{
            CLOCK_STEP_MS, Consumption, Enforced, Hold, HoldRequest, PoolLedger, Recorded, ReservationState,
            Settlement, UsageReading,
        },
        plan::DimensionKey,
        units::Timestamp,
    },
    store::{
        BatchName, Condition, Deferred, EntryId, Journal, Kept, Ledger, LedgerError, ReservationPlace,
        SharedDirectory, StoreError,
    },
};

/// How long people wait for what they look at, at least.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a closing ledger waits for what was asked of it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const CLOSE_PAUSE: Duration = Duration::from_millis(5);
/// How long a start waits for the first answer, so that nothing is degraded where Redis is there.
const START_TIMEOUT: Duration = Duration::from_secs(1);
const START_PAUSE: Duration = Duration::from_millis(2);

/// Counters of all pools in Redis.
///
/// A check reads what Redis holds and decides here, by the same code that decides in memory; whatever has an effect, or
/// needs more than its key and its pool, is done by the script.
#[derive(Debug)]
pub struct RedisLedger {
    options: RedisOptions,
    client: Client,
    health: Arc<Health>,
    sender: Sender,
    reader: Reader,
    pools: Arc<Pools>,
    live_replicas: Arc<AtomicU64>,
    directory: RedisDirectory,
    /// The configuration there is known to be the right one.
    admits: Arc<AtomicBool>,
    /// Ends what goes on by itself.
    stop: CancellationToken,
    /// Has turns of the journal, and gives its last one back when it ends, which is waited for.
    drain: Mutex<Option<JoinHandle<Option<OwnedMutexGuard<()>>>>>,
}

impl RedisLedger {
    /// Starts to connect, and waits a moment for Redis; calls are answered with [`LedgerError::Unreachable`] until it is
    /// reached. Call within the Tokio runtime that lasts as long.
    ///
    /// # Errors
    /// The URL is none that can be used.
    pub async fn start(options: RedisOptions) -> Result<Self, StoreError> {
        let unusable =
            |error| StoreError::Unavailable { store: STORE, doing: "connecting", source: Arc::new(error) };
        let client = Client::start(&options.url).map_err(unusable)?;
        let clock = Arc::clone(&options.clock);
        let health = Arc::new(Health::new(Arc::clone(&clock), options.timeout));
        let pools = Arc::new(Pools::new(client.is_clustered()));
        let journal = Arc::clone(&options.journal);
        let name = name_of(&options.replica_id);
        let (link, watched) = (client.clone(), Arc::clone(&health));
        let sender = Sender::start(link, watched, Arc::clone(&journal), name, Arc::clone(&clock));
        let reader = Reader::start(client.clone(), Arc::clone(&health), clock, options.timeout);
        let live_replicas = Arc::new(AtomicU64::new(1));
        let admits = Arc::new(AtomicBool::new(options.admits));
        let (known, reach) = (Arc::clone(&health), Arc::clone(&pools.reach));
        let directory = RedisDirectory::new(client.clone(), known, reach, Arc::clone(&admits));
        let drain = Drain {
            journal,
            sender: sender.clone(),
            health: Arc::clone(&health),
            pools: Arc::clone(&pools),
            admits: Arc::clone(&admits),
        };
        let stop = CancellationToken::new();
        let drain = Mutex::new(Some(tokio::spawn(drain.run(stop.clone()))));
        let ledger = Self {
            options,
            client,
            health,
            sender,
            reader,
            pools,
            live_replicas,
            directory,
            admits,
            stop,
            drain,
        };
        ledger.look_after();
        let reached = async {
            while ledger.health.failing().is_some() {
                tokio::time::sleep(START_PAUSE).await;
            }
        };
        // Without an answer it starts degraded.
        let _ = timeout(START_TIMEOUT, reached).await;
        Ok(ledger)
    }

    /// Starts what goes on by itself.
    fn look_after(&self) {
        let (client, health, pools) = (&self.client, &self.health, &self.pools);
        let (sender, known) = (self.sender.clone(), Arc::clone(pools));
        let looked = move || {
            for slot in known.all().into_iter().filter(|slot| slot.may_have_lost()) {
                // Where too much waits already, the next batch finds out.
                let _ = sender.submit_unheard(&slot, Call::nothing());
            }
        };
        let (reach, stop) = (Arc::clone(&pools.reach), self.stop.clone());
        let (failing, hearing) = (Arc::clone(health), self.stop.clone());
        tokio::spawn(watch::hear(client, failing, Arc::clone(&pools.reach), hearing));
        tokio::spawn(watch::run(client.clone(), Arc::clone(health), reach, stop, looked));
        let (known, reach, stop) = (Arc::clone(pools), Arc::clone(&pools.reach), self.stop.clone());
        tokio::spawn(probe::probe(client.clone(), Arc::clone(health), reach, move || known.all(), stop));
        let place = (Arc::clone(&pools.reach), Arc::clone(&self.admits));
        let (live, stop) = (Arc::clone(&self.live_replicas), self.stop.clone());
        tokio::spawn(probe::beat(client.clone(), Arc::clone(health), place, self.sender.name(), live, stop));
    }

    /// The pool's slot, where it can be asked now.
    fn slot(&self, pool: PoolRevision) -> Result<Arc<Slot>, LedgerError> {
        self.health.check_layout()?;
        let slot = self.pools.slot(pool);
        match self.why_out_of_reach(&slot) {
            Some(why) => Err(LedgerError::Unreachable(why)),
            None if slot.is_removed() => Err(LedgerError::PoolRemoved),
            None => Ok(slot),
        }
    }

    /// Why nothing can be asked about the pool now.
    fn why_out_of_reach(&self, slot: &Slot) -> Option<StoreError> {
        if !self.health.knows_layout() {
            return Some(not_reached());
        }
        let out_of_reach = self.pools.are_out_of_reach(slot);
        if out_of_reach {
            return Some(self.health.failing().unwrap_or_else(not_reached));
        }
        (!self.admits.load(Ordering::Relaxed)).then(not_admitted)
    }

    /// The longest that a cost waits: for the batch that is under way, and for its own.
    fn record_timeout(&self) -> Duration {
        2 * self.options.timeout
    }

    /// The longest that people wait for what they look at.
    fn look_timeout(&self) -> Duration {
        LOOK_TIMEOUT.max(self.options.timeout)
    }

    /// Has the script do `call`, and waits for its answer for as long as `budget`.
    async fn call<T: DeserializeOwned>(
        &self,
        slot: &Arc<Slot>,
        call: Call,
        makes: Option<[u8; 12]>,
        budget: Duration,
    ) -> Result<T, LedgerError> {
        let _waiting = self.sender.caller();
        let answer = self.sender.submit(slot, call, makes, None)?;
        let answer = timeout(budget, answer).await.map_err(|_| self.timed_out(slot, budget))?;
        answered(answer.unwrap_or_else(|_| Err(stopping())), budget)
    }

    /// A call on `slot` has waited for as long as `budget`.
    fn timed_out(&self, slot: &Slot, budget: Duration) -> LedgerError {
        self.health.timed_out(&slot.reach, budget);
        late(budget)
    }

    /// Has the script do what can wait, or the journal keep it where the script cannot be reached.
    async fn deferrable<T: DeserializeOwned>(
        &self,
        slot: Arc<Slot>,
        call: Call,
        deferred: impl FnOnce() -> Deferred,
    ) -> Result<Kept<T>, LedgerError> {
        let budget = self.record_timeout();
        let _waiting = self.sender.caller();
        self.health.check_layout()?;
        if self.why_out_of_reach(&slot).is_some() {
            return self.deferral(slot, deferred()).keep(None).await.map(|_| Kept::Journaled);
        }
        let ticket = Arc::new(Ticket::new(None));
        let mut answer = self.sender.submit(&slot, call, None, Some(Arc::clone(&ticket)))?;
        match timeout(budget, &mut answer).await {
            Ok(Ok(Err(LedgerError::Unreachable(_)))) => {
                self.deferral(slot, deferred()).keep(None).await.map(|_| Kept::Journaled)
            }
            Ok(Ok(answer)) => answered(answer, budget).map(Kept::Done),
            Ok(Err(_)) | Err(_) => {
                self.health.timed_out(&slot.reach, budget);
                // It goes on when the caller hangs up: what the journal has must be followed to its end.
                let (deferral, waiting) = (self.deferral(slot, deferred()), self.sender.caller());
                let settling = tokio::spawn(async move {
                    let _waiting = waiting;
                    deferral.settle(&ticket, answer).await
                });
                match settling.await.unwrap_or_else(|_| Err(stopping()))? {
                    Kept::Done(bytes) => answered(Ok(bytes), budget).map(Kept::Done),
                    Kept::Journaled => Ok(Kept::Journaled),
                }
            }
        }
    }

    fn deferral(&self, slot: Arc<Slot>, call: Deferred) -> Deferral {
        let call = match call {
            Deferred::Record(consumption) if consumption.recorded_at.is_none() => {
                let recorded_at = Some(self.health.now());
                Deferred::Record(Arc::new(Consumption { recorded_at, ..(*consumption).clone() }))
            }
            call => call,
        };
        Deferral { journal: Arc::clone(&self.options.journal), sender: self.sender.clone(), slot, call }
    }

    /// The part of the pool that `api_key` and the accounts of `connections` in `dimensions` are; `None` if Redis has to look
    /// itself: nothing is there, or something has come to its end.
    async fn part(
        &self,
        slot: &Arc<Slot>,
        api_key: Option<&ApiKeyId>,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
    ) -> Result<Option<(PoolLedger, Timestamp, u64)>, LedgerError> {
        loop {
            let with_accounts = slot.has_accounts.load(Ordering::Relaxed);
            let mut fields = vec![Bytes::from_static(keys::STATE)];
            fields.extend(api_key.map(|key| Bytes::copy_from_slice(key.as_str().as_bytes())));
            if with_accounts {
                let accounts = dimensions.iter().flat_map(|dimension| {
                    connections.iter().map(|connection| keys::account(*dimension, connection).into())
                });
                fields.extend(accounts);
            }
            let names = fields.clone();
            let read = self.reader.read(slot, fields).await?;
            let found = names.into_iter().zip(read.values).filter_map(|(name, value)| Some((name, value?)));
            let stored = Stored::read(found)?;
            let Some(state) = &stored.state else { return Ok(None) };
            if slot.has_lost(Some(state.born), read.at) {
                self.health.vanished(slot);
            }
            if state.has_accounts() && !with_accounts {
                slot.has_accounts.store(true, Ordering::Relaxed);
                continue;
            }
            let deadline = Some(state.next_deadline).filter(|deadline| *deadline > Timestamp::default());
            let ended = deadline.is_some_and(|deadline| deadline <= read.at.max(state.now));
            if ended || state.now.ms_since(read.at) > CLOCK_STEP_MS {
                return Ok(None);
            }
            let open = state.open_reservations;
            return Ok(Some((stored.into_ledger(slot.pool), read.at, open)));
        }
    }

    /// All of the pool.
    async fn whole(&self, slot: &Slot) -> Result<(PoolLedger, Timestamp), LedgerError> {
        let Some((at, fields)) = self.reader.read_all(slot, self.look_timeout()).await? else {
            slot.remove();
            return Err(LedgerError::PoolRemoved);
        };
        let stored = Stored::read(fields)?;
        let born = stored.state.as_ref().map(|state| state.born);
        if slot.has_lost(born, at) {
            self.health.vanished(slot);
        }
        Ok((stored.into_ledger(slot.pool), at))
    }

    async fn check_within(&self, slot: &Arc<Slot>, charge: &Charge) -> Result<Option<Reading>, LedgerError> {
        let plan = charge.checks.iter().filter(|check| check.counter.model.is_none());
        let dimensions: PerCheck<DimensionKey> = plan.map(|check| check.counter.dimension).collect();
        let part = self.part(slot, Some(&charge.api_key), &dimensions, &charge.connections).await?;
        let Some((mut ledger, at, open_reservations)) = part else { return Ok(None) };
        let reading = ledger.check(charge, at);
        let blocked =
            open_reservations > 0 && charge.findings(&reading).iter().any(|finding| finding.block.is_some());
        // The script says what reservations give back, and when.
        Ok(if blocked { None } else { Some(reading) })
    }
}

/// Names this start of a replica: nobody else has it, whatever its data directory was copied from.
fn name_of(replica_id: &str) -> [u8; 16] {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&digest(&["replica", replica_id])[..8]);
    name[8..].copy_from_slice(&rand::random::<[u8; 8]>());
    name
}

fn late(budget: Duration) -> LedgerError {
    LedgerError::Unreachable(broken(&format!("no answer within {} ms", budget.as_millis())))
}

/// What the script says to a call that had to be done within `budget`.
fn answered<T: DeserializeOwned>(answer: Answer, budget: Duration) -> Result<T, LedgerError> {
    match decode::<Result<T, Refused>>("an answer", &answer?)? {
        Ok(value) => Ok(value),
        Err(refused) => Err(refused.contradiction().map_or_else(|| late(budget), LedgerError::from)),
    }
}

/// A call on its way to the journal.
#[derive(Debug)]
struct Deferral {
    journal: Arc<dyn Journal>,
    sender: Sender,
    slot: Arc<Slot>,
    call: Deferred,
}

impl Deferral {
    /// Keeps the call; the batch `sequence` may have carried it.
    async fn keep(&self, sequence: Option<u64>) -> Result<EntryId, LedgerError> {
        let batch = sequence.map(|sequence| BatchName { sender: self.sender.name(), sequence });
        let entry = self.journal.add(self.slot.pool, batch, &self.call).await?;
        self.journal.counts().kept();
        Ok(entry)
    }

    /// Keeps a call that was sent, or was about to be; what it was answered, if it was meanwhile.
    async fn settle(
        self,
        ticket: &Ticket,
        mut answer: oneshot::Receiver<Answer>,
    ) -> Result<Kept<Bytes>, LedgerError> {
        let sequence = match ticket.withdraw() {
            Stage::UnderWay(sequence) => Some(sequence),
            Stage::Done => return answer.await.unwrap_or_else(|_| Err(stopping())).map(Kept::Done),
            Stage::Waiting | Stage::Withdrawn | Stage::NotDone => None,
        };
        let entry = match (self.keep(sequence).await, sequence) {
            // Whether the batch has its effect is not known.
            (Err(LedgerError::Store(error)), Some(_)) => return Err(LedgerError::Unreachable(error)),
            (entry, Some(_)) => entry?,
            (entry, None) => return entry.map(|_| Kept::Journaled),
        };
        match ticket.keep(entry) {
            Stage::Done => {
                self.sender.remove_entries(vec![entry]);
                (&mut answer).await.unwrap_or_else(|_| Err(stopping())).map(Kept::Done)
            }
            Stage::NotDone => match self.journal.assign(vec![(entry, None)]).await {
                Ok(()) => Ok(Kept::Journaled),
                Err(error) => {
                    // Whoever has called is told that it is not kept.
                    self.sender.remove_entries(vec![entry]);
                    Err(error.into())
                }
            },
            Stage::Waiting | Stage::Withdrawn | Stage::UnderWay(_) => Ok(Kept::Journaled),
        }
    }
}

fn stopping() -> LedgerError {
    LedgerError::Unreachable(stopped())
}

fn not_admitted() -> StoreError {
    broken("it is not known yet whether the configuration there is this one")
}

/// Gives back the reservation of a call that nobody has got an answer of.
struct Unanswered<'a> {
    ledger: &'a RedisLedger,
    slot: &'a Arc<Slot>,
    random: [u8; 12],
    request: Option<CallId>,
    answered: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.answered || self.slot.withdraw(self.random) {
            return;
        }
        // Where too much waits already, the deadline will do.
        let _ = self.ledger.sender.submit_unheard(self.slot, Call::take_back(self.random, self.request));
    }
}

#[async_trait]
impl Ledger for RedisLedger {
    async fn check(&self, charge: &Charge) -> Result<Reading, LedgerError> {
        let slot = self.slot(charge.pool)?;
        let budget = self.options.timeout;
        let deciding = async {
            match self.check_within(&slot, charge).await? {
                Some(reading) => Ok(reading),
                None => self.call(&slot, Call::check(charge), None, budget).await,
            }
        };
        timeout(budget, deciding).await.unwrap_or_else(|_| Err(self.timed_out(&slot, budget)))
    }

    async fn enforce(&self, charge: &Charge, wish: HoldRequest) -> Result<Enforced, LedgerError> {
        let slot = self.slot(charge.pool)?;
        let budget = self.options.timeout;
        let not_after = self.health.redis_now().map(|now| now.plus_ms(budget.as_millis() as u64));
        let mut guard = Unanswered {
            ledger: self,
            slot: &slot,
            random: wish.random,
            request: Call::request_of(&wish),
            answered: false,
        };
        let call = Call::enforce(charge, &wish, not_after);
        let answer = self.call::<EnforceAnswer>(&slot, call, Some(wish.random), budget).await;
        // Too much that waits for Redis is Redis out of reach: the pool's failure mode decides.
        let answer = answer.map_err(|error| match error {
            LedgerError::Full { .. } => LedgerError::Unreachable(broken("too many calls wait for it")),
            error => error,
        });
        guard.answered = !matches!(answer, Err(LedgerError::Unreachable(_)));
        let (reading, reserved) = answer?;
        let reserved = reserved.map(|(random, deadline, repeated)| {
            let id = ReservationId { pool: charge.pool, random: random.into_array() };
            Reserved { id, deadline, repeated }
        });
        Ok(Enforced { reading, reserved })
    }

    async fn record(
        &self,
        pool: PoolRevision,
        consumption: &Consumption,
    ) -> Result<Kept<Recorded>, LedgerError> {
        let slot = self.pools.slot(pool);
        if slot.is_removed() {
            return Err(LedgerError::PoolRemoved);
        }
        let call = Call::record(pool, consumption);
        self.deferrable(slot, call, || Deferred::Record(Arc::new(consumption.clone()))).await
    }

    async fn release(
        &self,
        id: ReservationId,
        api_key: Option<&ApiKeyId>,
    ) -> Result<Kept<bool>, LedgerError> {
        let slot = self.pools.slot(id.pool);
        if slot.is_removed() {
            return Ok(Kept::Done(false));
        }
        let call = Call::release(id.random, api_key);
        let deferred = || Deferred::Release { random: id.random, api_key: api_key.cloned() };
        match self.deferrable(slot, call, deferred).await {
            Err(LedgerError::PoolRemoved) => Ok(Kept::Done(false)),
            released => released,
        }
    }

    async fn reservation(
        &self,
        pool: PoolRevision,
        consumption: &Consumption,
        settles: Settlement,
    ) -> Result<ReservationState, LedgerError> {
        let slot = self.slot(pool)?;
        let call = Call::reservation(pool, consumption, settles);
        self.call(&slot, call, None, self.record_timeout()).await
    }

    async fn report(
        &self,
        pool: PoolRevision,
        connection: &ConnectionId,
        seen: &[Observation],
    ) -> Result<Vec<Result<(), Unread>>, LedgerError> {
        let slot = self.slot(pool)?;
        self.call(&slot, Call::report(connection, seen), None, self.record_timeout()).await
    }

    async fn usage(
        &self,
        pool: PoolRevision,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
        with_samples: bool,
    ) -> Result<UsageReading, LedgerError> {
        let (mut ledger, at) = self.whole(&*self.slot(pool)?).await?;
        Ok(ledger.usage(dimensions, connections, with_samples, at))
    }

    async fn totals(
        &self,
        pool: PoolRevision,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
    ) -> Result<(Timestamp, PerCheck<Counters>), LedgerError> {
        let slot = self.slot(pool)?;
        let budget = self.look_timeout();
        let part = timeout(budget, self.part(&slot, None, dimensions, connections)).await;
        let (mut ledger, at) = match part.unwrap_or_else(|_| Err(late(budget)))? {
            Some((ledger, at, _)) => (ledger, at),
            None => self.whole(&slot).await?,
        };
        Ok(ledger.totals(dimensions, connections, at))
    }

    async fn reservations(
        &self,
        pool: PoolRevision,
        after: Option<ReservationPlace>,
        api_key: Option<&ApiKeyId>,
        count: usize,
    ) -> Result<Vec<(ReservationId, Arc<Hold>)>, LedgerError> {
        let (mut ledger, at) = self.whole(&*self.slot(pool)?).await?;
        Ok(ledger.reservations(after, api_key, count, at))
    }

    async fn reset(
        &self,
        pool: PoolRevision,
        api_key: Option<&ApiKeyId>,
        dimension: Option<DimensionKey>,
    ) -> Result<(), LedgerError> {
        let slot = self.slot(pool)?;
        self.call(&slot, Call::reset(api_key, dimension), None, self.look_timeout()).await
    }

    async fn remove(&self, pool: PoolRevision) -> Result<(), LedgerError> {
        let slot = match self.slot(pool) {
            Err(LedgerError::PoolRemoved) => return Ok(()),
            slot => slot?,
        };
        let answer = self.call::<()>(&slot, Call::remove(), None, self.look_timeout()).await;
        if matches!(answer, Err(LedgerError::Unreachable(_))) {
            // The other replicas are to hear of it when Redis is back.
            self.sender.submit_unheard(&slot, Call::remove())?;
        }
        // Whether Redis has heard it or not: this replica has no such pool.
        slot.remove();
        match answer {
            Err(LedgerError::PoolRemoved) => Ok(()),
            answer => answer,
        }
    }

    fn compact(&self) {
        // While nothing is heard, what was heard last is the last that may be lost.
        if self.health.failing().is_none() {
            self.pools.all().iter().for_each(|slot| slot.compact());
        }
    }

    fn condition(&self) -> Condition {
        let (mut open_reservations, mut remembered_ids) = (0, 0);
        for slot in self.pools.all() {
            let known = slot.known();
            open_reservations += known.open_reservations;
            remembered_ids += known.remembered_ids;
        }
        Condition {
            refuses: self.health.newer_layout().is_some(),
            failing: self.health.newer_layout().or_else(|| self.health.failing()),
            clock_steps: self.health.clock_steps(),
            open_reservations,
            remembered_ids,
            ended: self.health.ended(),
            vanished_pools: self.health.vanished_pools(),
            eviction_policy: self.health.evicting(),
            degraded_for: self.health.degraded_for(),
            losses: self.health.losses(),
        }
    }

    fn now(&self) -> Result<Timestamp, LedgerError> {
        let unknown = || self.health.failing().unwrap_or_else(|| broken("its clock is not known yet"));
        self.health.redis_now().ok_or_else(|| LedgerError::Unreachable(unknown()))
    }

    fn live_replicas(&self) -> u64 {
        self.live_replicas.load(Ordering::Relaxed)
    }

    fn directory(&self) -> Option<Arc<dyn SharedDirectory>> {
        Some(Arc::new(self.directory.clone()))
    }

    fn all_counted(&self) -> bool {
        self.options.journal.is_empty()
    }

    async fn close(&self) {
        self.stop.cancel();
        let drain = self.drain.lock().take();
        let drained = async {
            // What nobody waits for is worth a wait only where there will be an end of it.
            while self.sender.has_callers() || (self.sender.is_busy() && self.health.failing().is_none()) {
                tokio::time::sleep(CLOSE_PAUSE).await;
            }
        };
        if timeout(CLOSE_TIMEOUT, drained).await.is_err() {
            tracing::warn!(
                "Redis did not answer while the service closed it: it is not known what it has done of the last calls"
            );
        }
        self.sender.stop();
        // What was without an answer until now goes to the journal, before somebody else brings that elsewhere.
        let kept = async {
            while self.sender.has_callers() {
                tokio::time::sleep(CLOSE_PAUSE).await;
            }
        };
        if timeout(CLOSE_TIMEOUT, kept).await.is_err() {
            tracing::warn!("the journal did not take the last calls while the service closed it");
        }
        if let Some(drain) = drain {
            // Its turn ends here, unless it has panicked.
            let _ = drain.await;
        }
        self.client.quit().await;
    }
}
