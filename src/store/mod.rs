//! Where counters and the configuration live: the promises that every driver keeps.

mod choice;
mod journal;
pub mod redis;
mod shared;
pub mod sqlite;

use std::{error::Error, fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
pub use choice::{Choice, Configured, Place};
pub use journal::{
    BatchName, Deferred, Drained, Entry, EntryId, Journal, JournalCondition, JournalCounts, bring,
};
pub use shared::{ReplicaNote, SharedDirectory};

use crate::core::{
    account::{Observation, Unread},
    admission::{Counters, Reading},
    charge::{Charge, PerCheck},
    directory::{Directory, Write},
    ids::{ApiKeyId, ConnectionId, PoolRevision, ReservationId},
    ledger::{
        Consumption, Contradiction, Ended, Enforced, Hold, HoldRequest, Recorded, ReservationState,
        Settlement, UsageReading,
    },
    plan::DimensionKey,
    units::Timestamp,
};

/// A place in a listing of reservations: the deadline and the random part of the id of the last one shown.
pub type ReservationPlace = (Timestamp, [u8; 12]);

/// Counters, reservations and remembered ids of pools, each named by one life of the pool.
///
/// Every driver keeps these promises:
///
/// 1. **Same answer.** For equal histories a driver gives the answers of
///    [`PoolLedger`](crate::core::ledger::PoolLedger).
/// 2. **All or nothing.** A call has all of its effects or none, and no other call sees a part of them.
/// 3. **One clock.** All calls of a pool are decided by one clock, which never goes back.
/// 4. **Durable before the answer.** What is answered with `Ok` survives what the driver's documentation says it
///    survives. A call that is answered with an error had no effect, unless the error says otherwise.
/// 5. **Gone is gone.** After [`remove`](Ledger::remove) every call on that life of the pool is
///    [`LedgerError::PoolRemoved`].
///
/// A caller that drops a call's future may or may not have its effect.
#[async_trait]
pub trait Ledger: fmt::Debug + Send + Sync + 'static {
    /// Reads what `charge` needs for a decision, without any effect.
    async fn check(&self, charge: &Charge) -> Result<Reading, LedgerError>;

    /// Decides on `charge` and holds its estimates if it passes.
    async fn enforce(&self, charge: &Charge, wish: HoldRequest) -> Result<Enforced, LedgerError>;

    /// Counts a cost once, and gives back the reservation that it settles.
    async fn record(
        &self,
        pool: PoolRevision,
        consumption: &Consumption,
    ) -> Result<Kept<Recorded>, LedgerError>;

    /// Gives a reservation back without any cost; false if it is not open. `api_key`, if given, must be its key.
    async fn release(&self, id: ReservationId, api_key: Option<&ApiKeyId>)
    -> Result<Kept<bool>, LedgerError>;

    /// What `pool` knows of a reservation that `consumption`, which counts elsewhere, settles.
    async fn reservation(
        &self,
        pool: PoolRevision,
        consumption: &Consumption,
        settles: Settlement,
    ) -> Result<ReservationState, LedgerError>;

    /// Reads figures of `connection`, each by itself: for each, why it was not taken.
    async fn report(
        &self,
        pool: PoolRevision,
        connection: &ConnectionId,
        seen: &[Observation],
    ) -> Result<Vec<Result<(), Unread>>, LedgerError>;

    /// What usage shows of `dimensions` and of the accounts of `connections`, on demand with their samples.
    async fn usage(
        &self,
        pool: PoolRevision,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
        with_samples: bool,
    ) -> Result<UsageReading, LedgerError>;

    /// Of the whole pool, in each of `dimensions`, what the counters hold now and what is known of the accounts of
    /// `connections`.
    async fn totals(
        &self,
        pool: PoolRevision,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
    ) -> Result<(Timestamp, PerCheck<Counters>), LedgerError>;

    /// Open reservations after `after`, the oldest deadline first, of one key or of all; at most `count`.
    async fn reservations(
        &self,
        pool: PoolRevision,
        after: Option<ReservationPlace>,
        api_key: Option<&ApiKeyId>,
        count: usize,
    ) -> Result<Vec<(ReservationId, Arc<Hold>)>, LedgerError>;

    /// Sets what is recorded to zero: of one key or of all, in one dimension or, model caps included, in all.
    async fn reset(
        &self,
        pool: PoolRevision,
        api_key: Option<&ApiKeyId>,
        dimension: Option<DimensionKey>,
    ) -> Result<(), LedgerError>;

    /// Removes all that is kept of a life of a pool.
    async fn remove(&self, pool: PoolRevision) -> Result<(), LedgerError>;

    /// Drops from memory what has ended, where the driver does not do so by itself.
    fn compact(&self) {}

    /// How the store is.
    fn condition(&self) -> Condition;

    /// The present instant by the clock that decides, if it has been heard of.
    fn now(&self) -> Result<Timestamp, LedgerError>;

    /// How many replicas there are, this one included, as far as is known.
    fn live_replicas(&self) -> u64 {
        1
    }

    /// The configuration that replicas share through this store, if they do.
    fn directory(&self) -> Option<Arc<dyn SharedDirectory>> {
        None
    }

    /// Nothing waits in a journal.
    fn all_counted(&self) -> bool {
        true
    }

    /// Waits until everything that was asked for is done, as far as that can be; what is asked for later fails.
    async fn close(&self);
}

/// A call that had its effect, or will have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept<T> {
    /// It is done.
    Done(T),
    /// The store is out of reach: a journal has it, durable, until the store is back.
    Journaled,
}

impl<T> Kept<T> {
    /// With what is made of the answer.
    pub fn map<U>(self, make: impl FnOnce(T) -> U) -> Kept<U> {
        match self {
            Kept::Done(answer) => Kept::Done(make(answer)),
            Kept::Journaled => Kept::Journaled,
        }
    }
}

/// What fail-overs of a store have lost, as far as is known, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Batches of calls that were sent again.
    pub resent_batches: u64,
    /// Batches that were too old to be sent again.
    pub missing_batches: u64,
    /// Reservations that were lost and not made again.
    pub reservations: u64,
}

/// How a store is.
#[derive(Clone, Debug, Default)]
pub struct Condition {
    /// Why nothing can be written now.
    pub failing: Option<StoreError>,
    /// How often the clock went back so far that it was believed, since the start.
    pub clock_steps: u64,
    /// Reservations that hold something.
    pub open_reservations: u64,
    /// Ids that are remembered.
    pub remembered_ids: u64,
    /// Reservations that have ended since the start.
    pub ended: Ended,
    /// Nothing is decided here until somebody acts: another replica is to be asked.
    pub refuses: bool,
    /// Pools whose counters were gone before their time, since the start.
    pub vanished_pools: u64,
    /// By which policy the store may drop counters when it is full; `None`: it never does.
    pub eviction_policy: Option<String>,
    /// How long it was out of reach since the start, all in all.
    pub degraded_for: Duration,
    /// What it has lost.
    pub losses: Losses,
}

/// Opens ledgers: which drivers there are is known to whoever implements this.
#[async_trait]
pub trait OpenLedger: fmt::Debug + Send + Sync + 'static {
    /// The ledger of `place`, with what it has kept of the pools in `directory`. A former ledger of the same place has
    /// been closed.
    async fn open(&self, place: &Place, directory: &Directory) -> Result<Arc<dyn Ledger>, StoreError>;
}

/// Where pools and plans are kept.
#[async_trait]
pub trait DirectoryStore: fmt::Debug + Send + Sync + 'static {
    /// Makes all of `writes` durable, which lead to `next`, in one transaction, if the stored revision is `before`.
    async fn commit(&self, before: u64, next: &Directory, writes: &[Write]) -> Result<(), StoreError>;

    /// All that is stored.
    async fn load(&self) -> Result<Directory, StoreError>;

    /// Why nothing can be written now; `None` while it can.
    fn failing(&self) -> Option<StoreError>;
}

/// No answer was given.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LedgerError {
    /// The call contradicts an earlier one.
    #[error(transparent)]
    Contradiction(#[from] Contradiction),
    /// This replica has no configuration: it has not met the one that replicas share, or that is another one.
    #[error("this replica has not got the configuration that replicas share")]
    NoConfiguration,
    /// Another replica lays the shared counters out in a way that this version does not know.
    #[error("{0}")]
    NewerLayout(StoreError),
    /// This life of the pool is over.
    #[error("the pool was deleted meanwhile")]
    PoolRemoved,
    /// A bound of the process is reached.
    #[error("this replica is full: it keeps at most {max} {what}")]
    Full {
        /// Of what.
        what: &'static str,
        /// How many.
        max: u64,
    },
    /// Shared counters could not be reached in time. Whether the call has its effect is not known: an enforcement without
    /// an answer holds nothing for long, a cost may be counted.
    #[error("the shared counters did not answer in time: {0}")]
    Unreachable(StoreError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The store gave no usable answer.
///
/// Cheap to clone: one failure can be the answer to every call in a batch.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The same call may work in a moment.
    #[error("{store} failed while {doing}: {source}")]
    Unavailable {
        /// Which store.
        store: &'static str,
        /// What it was asked to do.
        doing: &'static str,
        /// What it said.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The store holds something that this version did not write. Somebody has to look.
    #[error("{store} holds {found} as {what}: {expected}")]
    Corrupt {
        /// Which store.
        store: &'static str,
        /// What was read.
        what: String,
        /// The value, shortened if it is long.
        found: String,
        /// What would be right.
        expected: String,
    },
}
