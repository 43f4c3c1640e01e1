//! A journal in memory, whose disk can be full.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use parking_lot::Mutex;
use quota_share::{
    core::ids::PoolRevision,
    store::{BatchName, Deferred, Entry, EntryId, Journal, JournalCounts, StoreError},
};
use tokio::sync::OwnedMutexGuard;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct MemoryJournal {
    entries: Mutex<BTreeMap<EntryId, Entry>>,
    is_full: AtomicBool,
    refused: AtomicU64,
    counts: JournalCounts,
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl MemoryJournal {
    /// From now on nothing can be written, or can again.
    pub(crate) fn set_full(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::Relaxed);
    }

    /// How many writes have failed.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// All that it has, in order.
    pub(crate) fn all(&self) -> Vec<Entry> {
        self.entries.lock().values().cloned().collect()
    }

    fn write<T>(&self, change: impl FnOnce(&mut BTreeMap<EntryId, Entry>) -> T) -> Result<T, StoreError> {
        if self.is_full.load(Ordering::Relaxed) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            let source = Arc::new(std::io::Error::from(std::io::ErrorKind::StorageFull));
            return Err(StoreError::Unavailable { store: "the journal", doing: "writing", source });
        }
        Ok(change(&mut self.entries.lock()))
    }
}

#[async_trait]
impl Journal for MemoryJournal {
    async fn add(
        &self,
        pool: PoolRevision,
        batch: Option<BatchName>,
        call: &Deferred,
    ) -> Result<EntryId, StoreError> {
        self.write(|entries| {
            let id = EntryId(entries.last_key_value().map_or(0, |(id, _)| id.0) + 1);
            entries.insert(id, Entry { id, pool, batch, call: call.clone() });
            id
        })
    }

    async fn assign(&self, assigned: Vec<(EntryId, Option<BatchName>)>) -> Result<(), StoreError> {
        self.write(|entries| {
            for (id, batch) in assigned {
                if let Some(entry) = entries.get_mut(&id) {
                    entry.batch = batch;
                }
            }
        })
    }

    async fn remove(&self, removed: Vec<EntryId>) -> Result<(), StoreError> {
        self.write(|entries| entries.retain(|id, _| !removed.contains(id)))
    }

    async fn unsent(
        &self,
        count: usize,
        left_out: &BTreeSet<PoolRevision>,
    ) -> Result<Vec<Entry>, StoreError> {
        let all = self.all().into_iter();
        Ok(all.filter(|of| of.batch.is_none() && !left_out.contains(&of.pool)).take(count).collect())
    }

    async fn sent_by_others(&self, sender: [u8; 16]) -> Result<Vec<Entry>, StoreError> {
        let mut sent: Vec<_> = self
            .all()
            .into_iter()
            .filter(|of| of.batch.is_some_and(|batch| batch.sender != sender))
            .collect();
        sent.sort_by_key(|of| (of.batch.map(|batch| batch.sender), of.pool, of.batch, of.id));
        Ok(sent)
    }

    fn len(&self) -> u64 {
        self.entries.lock().len() as u64
    }

    fn counts(&self) -> &JournalCounts {
        &self.counts
    }

    async fn turn(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.turn).lock_owned().await
    }
}
