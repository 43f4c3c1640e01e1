//! Calls that were answered while their store was out of reach, until they have reached it.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedMutexGuard;

use super::{Kept, Ledger, LedgerError, StoreError};
use crate::core::{
    ids::{ApiKeyId, CallId, PoolRevision, ReservationId},
    ledger::Consumption,
    units::Timestamp,
};

/// How long until what could not be brought is tried again.
const BRING_PAUSE: Duration = Duration::from_secs(1);
/// Most entries that are read together.
const ENTRIES_AT_ONCE_MAX: usize = 1_024;

/// A call that can wait for its store.
///
/// Journals keep it as it is serialized, with the names of its fields: what is added needs a default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Deferred {
    /// A cost to count.
    Record(Arc<Consumption>),
    /// A reservation to give back.
    Release {
        /// Its name in its pool.
        random: [u8; 12],
        /// Whose it must be.
        api_key: Option<ApiKeyId>,
    },
}

/// Names a batch of calls of one pool among all batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchName {
    /// One start of a replica.
    pub sender: [u8; 16],
    /// Its batches of a pool count from 1.
    pub sequence: u64,
}

/// Names an entry: a later one is larger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub i64);

/// One call that is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its place.
    pub id: EntryId,
    /// Which pool it is about.
    pub pool: PoolRevision,
    /// The batch that it was sent with, if it is not known whether that has reached the store.
    pub batch: Option<BatchName>,
    /// The call.
    pub call: Deferred,
}

/// Keeps calls for a store that is out of reach.
///
/// What has returned is durable: it is there after a crash of the process, too.
#[async_trait]
pub trait Journal: std::fmt::Debug + Send + Sync + 'static {
    /// Keeps `call`; `batch` may have carried it to the store.
    async fn add(
        &self,
        pool: PoolRevision,
        batch: Option<BatchName>,
        call: &Deferred,
    ) -> Result<EntryId, StoreError>;

    /// Says of entries that these batches may have carried them to the store, or that none has.
    async fn assign(&self, entries: Vec<(EntryId, Option<BatchName>)>) -> Result<(), StoreError>;

    /// Drops entries that have reached the store.
    async fn remove(&self, entries: Vec<EntryId>) -> Result<(), StoreError>;

    /// The first entries that no batch has carried, at most `count`, of other pools than `left_out`.
    async fn unsent(&self, count: usize, left_out: &BTreeSet<PoolRevision>)
    -> Result<Vec<Entry>, StoreError>;

    /// The entries that batches of other senders than `sender` may have carried, batch by batch in the order in which they
    /// were sent.
    async fn sent_by_others(&self, sender: [u8; 16]) -> Result<Vec<Entry>, StoreError>;

    /// How many entries there are.
    fn len(&self) -> u64;

    /// There are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it has kept, and what has become of that.
    fn counts(&self) -> &JournalCounts;

    /// The same at this moment.
    fn condition(&self) -> JournalCondition {
        self.counts().condition(self.len())
    }

    /// Waits to be the one that brings entries to their store, for as long as the answer is kept.
    async fn turn(&self) -> OwnedMutexGuard<()>;
}

/// What has become of a call that was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// It was counted, or the reservation given back.
    Counted,
    /// An earlier call with the same id was counted.
    Duplicate,
    /// An earlier call with the same id said something else, or the reservation is another key's.
    Refused,
    /// The pool has been deleted meanwhile.
    PoolRemoved,
}

/// How many calls a journal has kept, and what has become of them, since the start.
#[derive(Debug, Default)]
pub struct JournalCounts {
    kept: AtomicU64,
    counted: AtomicU64,
    duplicates: AtomicU64,
    refused: AtomicU64,
    removed: AtomicU64,
    unprotected: AtomicU64,
    first_refusal_said: AtomicBool,
}

/// The same at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalCondition {
    /// How many entries there are now.
    pub entries: u64,
    /// How many calls were kept.
    pub kept: u64,
    /// Of those that have reached their store, how many had their effect.
    pub counted: u64,
    /// How many an earlier call with the same id had been counted for.
    pub duplicates: u64,
    /// How many contradicted an earlier call with the same id, and had no effect.
    pub refused: u64,
    /// How many were about pools that had been deleted.
    pub removed: u64,
    /// How many came when their ids would not have been remembered any more: had another replica counted them, they were
    /// counted twice.
    pub unprotected: u64,
}

impl JournalCounts {
    /// A call was kept.
    pub fn kept(&self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
    }

    /// `call` has reached its store at `now`.
    pub fn drained(&self, drained: Drained, call: &Deferred, now: Timestamp) {
        let count = match drained {
            Drained::Counted => &self.counted,
            Drained::Duplicate => &self.duplicates,
            Drained::Refused => &self.refused,
            Drained::PoolRemoved => &self.removed,
        };
        count.fetch_add(1, Ordering::Relaxed);
        if drained == Drained::Refused && !self.first_refusal_said.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a record of the journal contradicts what was counted under its id and is dropped; \
                 quota_share_journal_drained_total counts such records"
            );
        }
        if let Deferred::Record(consumption) = call
            && drained == Drained::Counted
            && consumption.recorded_at.is_some_and(|at| now.ms_since(at) > consumption.id_life_ms)
        {
            self.unprotected.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn condition(&self, entries: u64) -> JournalCondition {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        JournalCondition {
            entries,
            kept: read(&self.kept),
            counted: read(&self.counted),
            duplicates: read(&self.duplicates),
            refused: read(&self.refused),
            removed: read(&self.removed),
            unprotected: read(&self.unprotected),
        }
    }
}

/// Brings all that `journal` has to a store that it was not kept for: this has had nothing of it, whatever the other has.
/// Goes on until it is done or the ledger is gone.
pub async fn bring(journal: Arc<dyn Journal>, ledger: Weak<dyn Ledger>) {
    let _turn = journal.turn().await;
    while !journal.is_empty() {
        let Some(ledger) = ledger.upgrade() else { return };
        match bring_some(&*journal, &*ledger).await {
            Ok(brought) => {
                tracing::info!(brought, left = journal.len(), "the journal was brought to another store")
            }
            Err(error) => {
                tracing::warn!(%error, "the journal waits: it could not be brought to another store");
                drop(ledger);
                tokio::time::sleep(BRING_PAUSE).await;
            }
        }
    }
}

async fn bring_some(journal: &dyn Journal, ledger: &dyn Ledger) -> Result<usize, LedgerError> {
    let mut entries = journal.sent_by_others([0; 16]).await?;
    entries.extend(journal.unsent(ENTRIES_AT_ONCE_MAX, &BTreeSet::new()).await?);
    for entry in &entries {
        let drained = match bring_one(ledger, entry).await {
            Ok(drained) => drained,
            Err(LedgerError::PoolRemoved) => Drained::PoolRemoved,
            Err(LedgerError::Contradiction(_)) => Drained::Refused,
            Err(error) => return Err(error),
        };
        journal.remove(vec![entry.id]).await?;
        journal.counts().drained(drained, &entry.call, ledger.now()?);
    }
    Ok(entries.len())
}

async fn bring_one(ledger: &dyn Ledger, entry: &Entry) -> Result<Drained, LedgerError> {
    let done = match &entry.call {
        Deferred::Record(consumption) => {
            // Should the process die before the entry is gone, it is known by a name all the same.
            let idempotency = match (consumption.idempotency, consumption.reservation) {
                (None, None) => Some(CallId::of_journal_entry(entry.id.0)),
                (named, _) => named,
            };
            let consumption = Consumption { idempotency, ..(**consumption).clone() };
            ledger.record(entry.pool, &consumption).await?.map(|recorded| recorded.duplicate)
        }
        Deferred::Release { random, api_key } => {
            let id = ReservationId { pool: entry.pool, random: *random };
            ledger.release(id, api_key.as_ref()).await?.map(|_| false)
        }
    };
    Ok(if done == Kept::Done(true) { Drained::Duplicate } else { Drained::Counted })
}
