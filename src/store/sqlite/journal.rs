//! The journal in the SQLite file: calls that wait until shared counters are back.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use serde_json::json;
use sqlx::{
    Row, Sqlite, SqliteConnection, SqlitePool,
    query::Query,
    sqlite::{SqliteArguments, SqliteRow},
};
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc, oneshot};

use super::{SqliteStore, corrupt, disk::Disk, unavailable, unsigned};
use crate::{
    core::ids::PoolRevision,
    store::{BatchName, Deferred, Entry, EntryId, Journal, JournalCounts, StoreError},
};

/// The encoding of calls, their first byte.
const VERSION: u8 = 1;
/// Most orders that share a commit.
const ORDERS_PER_COMMIT_MAX: usize = 1_024;
/// Most entries: some gigabytes.
const ENTRIES_MAX: u64 = 20_000_000;

/// What the writer is to do, and whom to tell.
#[derive(Debug)]
struct Order {
    what: What,
    done: oneshot::Sender<Result<EntryId, StoreError>>,
}

#[derive(Debug)]
enum What {
    Add { pool: PoolRevision, batch: Option<BatchName>, call: Vec<u8> },
    Assign(Vec<(EntryId, Option<BatchName>)>),
    Remove(Vec<EntryId>),
}

/// The journal in the file of a [`SqliteStore`]. What arrives while a commit is under way shares the next one.
#[derive(Debug)]
pub struct SqliteJournal {
    connection: SqlitePool,
    orders: mpsc::UnboundedSender<Order>,
    entries: Arc<AtomicU64>,
    counts: JournalCounts,
    turn: Arc<Mutex<()>>,
}

impl SqliteJournal {
    /// The journal of `store`. Call within the Tokio runtime that lasts as long.
    pub async fn open(store: &SqliteStore) -> Result<Self, StoreError> {
        let connection = store.connection.clone();
        let count = sqlx::query_scalar("SELECT count(*) FROM journal").fetch_one(&connection).await;
        let count: i64 = count.map_err(unavailable("reading the journal"))?;
        let entries = Arc::new(AtomicU64::new(unsigned("the number of entries", count)?));
        let (orders, receiver) = mpsc::unbounded_channel();
        tokio::spawn(write(connection.clone(), store.disk.clone(), receiver, Arc::clone(&entries)));
        Ok(Self { connection, orders, entries, counts: JournalCounts::default(), turn: Arc::default() })
    }

    async fn order(&self, what: What) -> Result<EntryId, StoreError> {
        let (done, outcome) = oneshot::channel();
        // The writer ends with this, or with the runtime.
        let _ = self.orders.send(Order { what, done });
        outcome.await.unwrap_or_else(|_| Err(stopped()))
    }

    async fn read(&self, query: Query<'_, Sqlite, SqliteArguments>) -> Result<Vec<Entry>, StoreError> {
        let rows = query.fetch_all(&self.connection).await.map_err(unavailable("reading the journal"))?;
        rows.iter().map(entry_of).collect()
    }
}

#[async_trait]
impl Journal for SqliteJournal {
    async fn add(
        &self,
        pool: PoolRevision,
        batch: Option<BatchName>,
        call: &Deferred,
    ) -> Result<EntryId, StoreError> {
        if self.len() >= ENTRIES_MAX {
            return Err(full());
        }
        self.order(What::Add { pool, batch, call: encode(call)? }).await
    }

    async fn assign(&self, entries: Vec<(EntryId, Option<BatchName>)>) -> Result<(), StoreError> {
        self.order(What::Assign(entries)).await.map(drop)
    }

    async fn remove(&self, entries: Vec<EntryId>) -> Result<(), StoreError> {
        self.order(What::Remove(entries)).await.map(drop)
    }

    async fn unsent(
        &self,
        count: usize,
        left_out: &BTreeSet<PoolRevision>,
    ) -> Result<Vec<Entry>, StoreError> {
        let left_out: Vec<u64> = left_out.iter().map(|pool| pool.0).collect();
        let query = sqlx::query(
            "SELECT entry, pool, sender, sequence, call FROM journal
             WHERE sender IS NULL AND pool NOT IN (SELECT value FROM json_each(?2)) ORDER BY entry LIMIT ?1",
        );
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.read(query.bind(count).bind(json!(left_out).to_string())).await
    }

    async fn sent_by_others(&self, sender: [u8; 16]) -> Result<Vec<Entry>, StoreError> {
        let query = sqlx::query(
            "SELECT entry, pool, sender, sequence, call FROM journal
             WHERE sender IS NOT NULL AND sender <> ?1 ORDER BY sender, pool, sequence, entry",
        );
        self.read(query.bind(sender.to_vec())).await
    }

    fn len(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }

    fn counts(&self) -> &JournalCounts {
        &self.counts
    }

    async fn turn(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.turn).lock_owned().await
    }
}

/// Carries out orders until nobody can give one.
async fn write(
    connection: SqlitePool,
    disk: Disk,
    mut orders: mpsc::UnboundedReceiver<Order>,
    entries: Arc<AtomicU64>,
) {
    let mut batch = Vec::new();
    while orders.recv_many(&mut batch, ORDERS_PER_COMMIT_MAX).await > 0 {
        let result = commit(&connection, &batch).await.map_err(unavailable("writing the journal"));
        disk.tell(&result);
        match result {
            Ok((ids, added)) => {
                // Never below 0: what is removed was added before.
                entries.fetch_add(added as u64, Ordering::Relaxed);
                for (order, id) in batch.drain(..).zip(ids) {
                    // Whoever has hung up has it done all the same.
                    let _ = order.done.send(Ok(id));
                }
            }
            Err(error) => batch.drain(..).for_each(|order| {
                // The same.
                let _ = order.done.send(Err(error.clone()));
            }),
        }
    }
}

/// Does all of `orders` or none; returns the entry that each has made, if any, and by how many there are more.
async fn commit(connection: &SqlitePool, orders: &[Order]) -> Result<(Vec<EntryId>, i64), sqlx::Error> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let (mut ids, mut more) = (Vec::with_capacity(orders.len()), 0);
    for order in orders {
        let (id, change) = carry_out(&mut transaction, &order.what).await?;
        ids.push(id);
        more += change;
    }
    transaction.commit().await?;
    Ok((ids, more))
}

async fn carry_out(connection: &mut SqliteConnection, what: &What) -> Result<(EntryId, i64), sqlx::Error> {
    match what {
        What::Add { pool, batch, call } => {
            let insert =
                sqlx::query("INSERT INTO journal (pool, sender, sequence, call) VALUES (?1, ?2, ?3, ?4)");
            let insert = insert.bind(pool.0 as i64).bind(batch.map(|batch| batch.sender.to_vec()));
            let insert = insert.bind(batch.map(|batch| batch.sequence as i64)).bind(call);
            let done = insert.execute(connection).await?;
            Ok((EntryId(done.last_insert_rowid()), 1))
        }
        What::Assign(entries) => {
            for (id, batch) in entries {
                let update = sqlx::query("UPDATE journal SET sender = ?2, sequence = ?3 WHERE entry = ?1");
                let update = update.bind(id.0).bind(batch.map(|batch| batch.sender.to_vec()));
                update.bind(batch.map(|batch| batch.sequence as i64)).execute(&mut *connection).await?;
            }
            Ok((EntryId::default(), 0))
        }
        What::Remove(entries) => {
            let mut removed = 0;
            for id in entries {
                let delete = sqlx::query("DELETE FROM journal WHERE entry = ?1").bind(id.0);
                removed += delete.execute(&mut *connection).await?.rows_affected() as i64;
            }
            Ok((EntryId::default(), -removed))
        }
    }
}

fn encode(call: &Deferred) -> Result<Vec<u8>, StoreError> {
    let mut bytes = vec![VERSION];
    let named = rmp_serde::encode::write_named(&mut bytes, call);
    named.map_err(|error| corrupt("a call", error.to_string(), "one that can be written"))?;
    Ok(bytes)
}

fn entry_of(row: &SqliteRow) -> Result<Entry, StoreError> {
    let failed = unavailable("reading the journal");
    let (id, pool): (i64, i64) = (row.try_get(0).map_err(&failed)?, row.try_get(1).map_err(&failed)?);
    let sender: Option<Vec<u8>> = row.try_get(2).map_err(&failed)?;
    let sequence: Option<i64> = row.try_get(3).map_err(&failed)?;
    let call: Vec<u8> = row.try_get(4).map_err(&failed)?;
    let what = || format!("journal entry {id}");
    let batch = match (sender, sequence) {
        (Some(sender), Some(sequence)) => Some(BatchName {
            sender: sender.try_into().map_err(|sender| corrupt(what(), sender, "a sender of 16 bytes"))?,
            sequence: unsigned("a batch's number", sequence)?,
        }),
        _ => None,
    };
    let call = match call.split_first() {
        Some((&VERSION, call)) => rmp_serde::from_slice(call)
            .map_err(|error| corrupt(what(), error.to_string(), "a call that was kept"))?,
        version => {
            let version = version.map(|(version, _)| version);
            return Err(corrupt(
                what(),
                version,
                format!("version {VERSION}: start the version that wrote it"),
            ));
        }
    };
    Ok(Entry { id: EntryId(id), pool: PoolRevision(unsigned("a pool's life", pool)?), batch, call })
}

fn full() -> StoreError {
    let said = format!("it keeps at most {ENTRIES_MAX} calls");
    StoreError::Unavailable {
        store: "the journal",
        doing: "keeping a call",
        source: Arc::new(std::io::Error::other(said)),
    }
}

fn stopped() -> StoreError {
    let source = Arc::new(std::io::Error::other("the service is stopping"));
    StoreError::Unavailable { store: "the journal", doing: "keeping a call", source }
}
