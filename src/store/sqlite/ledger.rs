//! The counters of all pools in memory, each pool behind its own lock, and their way to the disk.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use sqlx::SqlitePool;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{
    SqliteStore,
    disk::Disk,
    load,
    log::{Log, Pace},
    sweep, unavailable, unsigned, writer,
};
use crate::{
    clock::Clock,
    core::{
        account::{Observation, Unread},
        admission::{Counters, Reading},
        charge::{Charge, PerCheck},
        directory::Directory,
        ids::{ApiKeyId, ConnectionId, PoolRevision, ReservationId},
        ledger::{
            CLOCK_STEP_MS, Change, Consumption, Contradiction, Ended, Enforced, Hold, HoldRequest,
            PoolLedger, Recorded, ReservationState, Settlement, Size, UsageReading,
        },
        plan::DimensionKey,
        units::Timestamp,
    },
    store::{Condition, Kept, Ledger, LedgerError, ReservationPlace, StoreError},
};

/// Most open reservations of the process.
const RESERVATIONS_MAX: u64 = 1_000_000;
/// Most remembered ids of the process.
const IDS_MAX: u64 = 20_000_000;
/// Most calls that wait for the disk.
const WAITING_MAX: u64 = 100_000;

/// Counters of all pools: in memory, durable in SQLite before every answer.
///
/// A check reads what is in memory and waits for nothing. A call with an effect has it in memory at once and is answered
/// when the commit that carries it is on disk; a reader may see it before, which is only ever stricter. If the commit
/// fails, the effect is undone and the call is answered with the error.
#[derive(Debug)]
pub struct SqliteLedger {
    shared: Arc<Shared>,
    connection: SqlitePool,
    orders: mpsc::UnboundedSender<Order>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// What the ledger and its writer know in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) clock: Arc<dyn Clock>,
    pools: papaya::HashMap<PoolRevision, Arc<Slot>>,
    /// Of all pools.
    size: SharedSize,
    waiting: AtomicU64,
    /// The newest instant that any pool has seen, in ms.
    last_seen_ms: AtomicU64,
    clock_steps: AtomicU64,
    pub(super) disk: Disk,
}

/// The sizes of all ledgers together.
#[derive(Debug, Default)]
struct SharedSize {
    open_reservations: AtomicU64,
    remembered_ids: AtomicU64,
    settled: AtomicU64,
    released: AtomicU64,
    expired: AtomicU64,
}

/// What one commit did.
#[derive(Clone, Copy, Debug)]
pub struct Commit {
    /// How many calls shared it.
    pub calls: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// Whether it is durable.
    pub succeeded: bool,
}

/// What the writer is told.
#[derive(Debug)]
pub(super) enum Order {
    /// Calls of this pool wait for a commit.
    Commit(Arc<Slot>),
    /// Commit what waits, and end.
    Stop,
}

/// One life of a pool.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) pool: PoolRevision,
    pub(super) state: Mutex<SlotState>,
}

#[derive(Debug)]
pub(super) struct SlotState {
    pub(super) ledger: PoolLedger,
    /// Calls whose effects no commit carries yet, in their order.
    pub(super) waiting: Vec<Waiting>,
    /// A commit that carries effects of this pool is under way.
    pub(super) committing: bool,
    /// The writer has been told of `waiting`.
    announced: bool,
    pub(super) removed: bool,
    /// What [`Shared`] has counted of this pool.
    accounted: Size,
}

/// A call that is answered when its effects are durable.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) changes: Vec<Change>,
    pub(super) answer: oneshot::Sender<Result<(), StoreError>>,
}

impl Slot {
    fn new(pool: PoolRevision, now: Timestamp) -> Self {
        let state = SlotState {
            ledger: PoolLedger::new(pool, now),
            waiting: Vec::new(),
            committing: false,
            announced: false,
            removed: false,
            accounted: Size::default(),
        };
        Self { pool, state: Mutex::new(state) }
    }

    /// Of a pool that is new since the start.
    fn unknown(pool: PoolRevision) -> Arc<Self> {
        Arc::new(Self::new(pool, Timestamp::default()))
    }

    /// Lets the pool follow a clock that went back; returns what that changes.
    pub(super) fn step_back(&self, now: Timestamp) -> Vec<Change> {
        let mut state = self.state.lock();
        state.ledger.compact(now);
        state.ledger.take_changes()
    }

    /// What the next commit carries of this pool.
    pub(super) fn start_commit(&self) -> Vec<Waiting> {
        let mut state = self.state.lock();
        state.announced = false;
        state.committing = true;
        std::mem::take(&mut state.waiting)
    }
}

impl Shared {
    /// Counts what `state` has gained or lost since it was last counted.
    pub(super) fn account(&self, state: &mut SlotState) {
        let size = state.ledger.size();
        let before = std::mem::replace(&mut state.accounted, size);
        let (ended, ended_before) = (size.ended, before.ended);
        for (total, now, before) in [
            (&self.size.open_reservations, size.open_reservations, before.open_reservations),
            (&self.size.remembered_ids, size.remembered_ids, before.remembered_ids),
            (&self.size.settled, ended.settled, ended_before.settled),
            (&self.size.released, ended.released, ended_before.released),
            (&self.size.expired, ended.expired, ended_before.expired),
        ] {
            if now != before {
                // Wrapping, so that a loss is counted as one.
                total.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
            }
        }
    }

    /// The slots of all pools.
    pub(super) fn slots(&self) -> Vec<Arc<Slot>> {
        self.pools.pin().values().cloned().collect()
    }

    /// The present instant. A step back that the ledgers believe is said once.
    fn now(&self) -> Timestamp {
        let now = self.clock.now();
        let last = Timestamp::from_unix_ms(self.last_seen_ms.fetch_max(now.unix_ms(), Ordering::Relaxed));
        let step_ms = last.ms_since(now);
        if step_ms > CLOCK_STEP_MS {
            self.last_seen_ms.store(now.unix_ms(), Ordering::Relaxed);
            self.clock_steps.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(step_ms, "the clock went back: counters ahead of it count in the present window");
        }
        now
    }

    /// The pool's slot, made where it is not yet.
    fn slot(&self, pool: PoolRevision) -> Arc<Slot> {
        Arc::clone(self.pools.pin().get_or_insert_with(pool, || Slot::unknown(pool)))
    }
}

impl SqliteLedger {
    /// Loads what `store` kept of the pools in `directory` and starts the writer, which tells `committed` of every commit. Call within a Tokio runtime.
    pub async fn start(
        store: &SqliteStore,
        directory: &Directory,
        clock: Arc<dyn Clock>,
        committed: impl Fn(Commit) + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let connection = store.connection.clone();
        let last_seen: i64 = sqlx::query_scalar("SELECT last_seen_ms FROM service")
            .fetch_one(&connection)
            .await
            .map_err(unavailable("reading the counters"))?;
        let last_seen = Timestamp::from_unix_ms(unsigned("last_seen_ms", last_seen)?);
        let shared = Arc::new(Shared {
            clock,
            pools: papaya::HashMap::new(),
            size: SharedSize::default(),
            waiting: AtomicU64::new(0),
            last_seen_ms: last_seen.unix_ms().into(),
            clock_steps: AtomicU64::new(0),
            disk: store.disk.clone(),
        });
        for entry in directory.pools_after(None) {
            let pool = entry.history.created_revision;
            shared.pools.pin().insert(pool, Arc::new(Slot::new(pool, last_seen)));
        }
        let log = Log::recover(&connection, Pace::USUAL).await?;
        load::read(&connection, last_seen, |pool, change| {
            // Rows of a pool that is gone are left to the sweep.
            if let Some(slot) = shared.pools.pin().get(&pool) {
                slot.state.lock().ledger.restore(change);
            }
        })
        .await?;
        for slot in shared.pools.pin().values() {
            shared.account(&mut slot.state.lock());
        }
        let (orders, receiver) = mpsc::unbounded_channel();
        let writer = tokio::spawn(writer::run(
            Arc::clone(&shared),
            connection.clone(),
            log,
            receiver,
            last_seen,
            committed,
        ));
        Ok(Self { shared, connection, orders, writer: Mutex::new(Some(writer)) })
    }

    /// Reads from the pool's ledger, without any effect.
    fn read<T>(
        &self,
        pool: PoolRevision,
        read: impl FnOnce(&mut PoolLedger, Timestamp) -> T,
    ) -> Result<T, LedgerError> {
        let pools = self.shared.pools.pin();
        let mut state = pools.get_or_insert_with(pool, || Slot::unknown(pool)).state.lock();
        if state.removed {
            return Err(LedgerError::PoolRemoved);
        }
        Ok(read(&mut state.ledger, self.shared.now()))
    }

    /// Has an effect on the pool's ledger, and answers when it is durable. An answer for which `stands` is false depends
    /// on no effect and is given at once.
    async fn write<T>(
        &self,
        pool: PoolRevision,
        effect: impl FnOnce(&mut PoolLedger, Timestamp) -> Result<T, Contradiction> + Send,
        stands: impl FnOnce(&T) -> bool + Send,
    ) -> Result<T, LedgerError> {
        let slot = self.shared.slot(pool);
        let (answer, durable) = {
            let mut state = slot.state.lock();
            if state.removed {
                return Err(LedgerError::PoolRemoved);
            }
            let answer = effect(&mut state.ledger, self.shared.now())?;
            self.shared.account(&mut state);
            if !stands(&answer) {
                return Ok(answer);
            }
            (answer, self.enqueue(&slot, &mut state)?)
        };
        if let Some(durable) = durable {
            let _waiting = Counted::new(&self.shared.waiting);
            durable.await.map_err(|_| stopped())??;
        }
        Ok(answer)
    }

    /// Hands the ledger's changes to the writer; `None` if there are none and nothing before them is under way.
    fn enqueue(
        &self,
        slot: &Arc<Slot>,
        state: &mut SlotState,
    ) -> Result<Option<oneshot::Receiver<Result<(), StoreError>>>, LedgerError> {
        let changes = state.ledger.take_changes();
        if changes.is_empty() && state.waiting.is_empty() && !state.committing {
            return Ok(None);
        }
        let (answer, durable) = oneshot::channel();
        state.waiting.push(Waiting { changes, answer });
        if !state.announced {
            if self.orders.send(Order::Commit(Arc::clone(slot))).is_err() {
                let refused = state.waiting.pop();
                state.ledger.revert(refused.map(|call| call.changes).unwrap_or_default());
                self.shared.account(state);
                return Err(stopped().into());
            }
            state.announced = true;
        }
        Ok(Some(durable))
    }

    fn check_room(&self, what: &'static str, count: &AtomicU64, max: u64) -> Result<(), LedgerError> {
        if count.load(Ordering::Relaxed) >= max { Err(LedgerError::Full { what, max }) } else { Ok(()) }
    }
}

fn stopped() -> StoreError {
    let source = std::io::Error::other("the service is stopping");
    StoreError::Unavailable { store: super::STORE, doing: "writing", source: Arc::new(source) }
}

/// Counts one for as long as it lives.
struct Counted<'a>(&'a AtomicU64);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[async_trait]
impl Ledger for SqliteLedger {
    async fn check(&self, charge: &Charge) -> Result<Reading, LedgerError> {
        self.read(charge.pool, |ledger, now| ledger.check(charge, now))
    }

    async fn enforce(&self, charge: &Charge, wish: HoldRequest) -> Result<Enforced, LedgerError> {
        self.check_room("calls that wait for the disk", &self.shared.waiting, WAITING_MAX)?;
        self.check_room("open reservations", &self.shared.size.open_reservations, RESERVATIONS_MAX)?;
        self.check_room("remembered ids", &self.shared.size.remembered_ids, IDS_MAX)?;
        self.write(
            charge.pool,
            |ledger, now| ledger.enforce(charge, wish, now),
            |enforced| enforced.reserved.is_some(),
        )
        .await
    }

    async fn record(
        &self,
        pool: PoolRevision,
        consumption: &Consumption,
    ) -> Result<Kept<Recorded>, LedgerError> {
        self.check_room("calls that wait for the disk", &self.shared.waiting, WAITING_MAX)?;
        self.check_room("remembered ids", &self.shared.size.remembered_ids, IDS_MAX)?;
        self.write(pool, |ledger, now| ledger.record(consumption, now), |_| true).await.map(Kept::Done)
    }

    async fn release(
        &self,
        id: ReservationId,
        api_key: Option<&ApiKeyId>,
    ) -> Result<Kept<bool>, LedgerError> {
        if !self.shared.pools.pin().contains_key(&id.pool) {
            return Ok(Kept::Done(false));
        }
        match self.write(id.pool, |ledger, now| ledger.release(id, api_key, now), |_| true).await {
            Err(LedgerError::PoolRemoved) => Ok(Kept::Done(false)),
            released => released.map(Kept::Done),
        }
    }

    async fn reservation(
        &self,
        pool: PoolRevision,
        consumption: &Consumption,
        settles: Settlement,
    ) -> Result<ReservationState, LedgerError> {
        if !self.shared.pools.pin().contains_key(&pool) {
            return Err(LedgerError::PoolRemoved);
        }
        // What it says is acted upon, so it has to be durable.
        self.write(pool, |ledger, now| ledger.reservation(consumption, settles, now), |_| true).await
    }

    async fn report(
        &self,
        pool: PoolRevision,
        connection: &ConnectionId,
        seen: &[Observation],
    ) -> Result<Vec<Result<(), Unread>>, LedgerError> {
        self.check_room("calls that wait for the disk", &self.shared.waiting, WAITING_MAX)?;
        self.write(pool, |ledger, now| Ok(ledger.report(connection, seen, now)), |_| true).await
    }

    async fn usage(
        &self,
        pool: PoolRevision,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
        with_samples: bool,
    ) -> Result<UsageReading, LedgerError> {
        self.read(pool, |ledger, now| ledger.usage(dimensions, connections, with_samples, now))
    }

    async fn totals(
        &self,
        pool: PoolRevision,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
    ) -> Result<(Timestamp, PerCheck<Counters>), LedgerError> {
        self.read(pool, |ledger, now| ledger.totals(dimensions, connections, now))
    }

    async fn reservations(
        &self,
        pool: PoolRevision,
        after: Option<ReservationPlace>,
        api_key: Option<&ApiKeyId>,
        count: usize,
    ) -> Result<Vec<(ReservationId, Arc<Hold>)>, LedgerError> {
        self.read(pool, |ledger, now| ledger.reservations(after, api_key, count, now))
    }

    async fn reset(
        &self,
        pool: PoolRevision,
        api_key: Option<&ApiKeyId>,
        dimension: Option<DimensionKey>,
    ) -> Result<(), LedgerError> {
        let effect = |ledger: &mut PoolLedger, now| {
            ledger.reset(api_key, dimension, now);
            Ok(())
        };
        self.write(pool, effect, |()| true).await
    }

    async fn remove(&self, pool: PoolRevision) -> Result<(), LedgerError> {
        let slot = self.shared.slot(pool);
        let now = self.shared.now();
        {
            let mut state = slot.state.lock();
            state.removed = true;
            state.ledger = PoolLedger::new(pool, now);
            self.shared.account(&mut state);
        }
        Ok(sweep::remove_pool(&self.connection, pool, now).await?)
    }

    fn compact(&self) {
        let now = self.shared.now();
        for slot in self.shared.slots() {
            let mut state = slot.state.lock();
            state.ledger.compact(now);
            self.shared.account(&mut state);
        }
    }

    fn condition(&self) -> Condition {
        let size = &self.shared.size;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Condition {
            failing: self.shared.disk.why(),
            clock_steps: self.shared.clock_steps.load(Ordering::Relaxed),
            open_reservations: read(&size.open_reservations),
            remembered_ids: read(&size.remembered_ids),
            ended: Ended {
                settled: read(&size.settled),
                released: read(&size.released),
                expired: read(&size.expired),
            },
            ..Condition::default()
        }
    }

    fn now(&self) -> Result<Timestamp, LedgerError> {
        Ok(self.shared.now())
    }

    async fn close(&self) {
        // An error means that the writer has ended already.
        let _ = self.orders.send(Order::Stop);
        let writer = self.writer.lock().take();
        if let Some(writer) = writer
            && let Err(error) = writer.await
        {
            tracing::error!(error = &error as &dyn std::error::Error, "the writer ended early");
        }
    }
}
