//! The drivers that there are, and how each is opened.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    clock::Clock,
    core::directory::Directory,
    store::{
        Journal, Ledger, OpenLedger, Place, StoreError, bring,
        redis::{RedisLedger, RedisOptions},
        sqlite::{Commit, SqliteLedger, SqliteStore},
    },
};

/// Opens ledgers of either driver.
pub(super) struct Drivers {
    /// Of the data directory, which is kept open whichever driver is in use.
    pub(super) store: Arc<SqliteStore>,
    /// Is told of every commit of the embedded driver.
    pub(super) committed: Arc<dyn Fn(Commit) + Send + Sync>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) replica_id: String,
    /// Has what Redis could not take.
    pub(super) journal: Arc<dyn Journal>,
    /// The longest that an enforcement waits for Redis.
    pub(super) timeout: Duration,
}

impl fmt::Debug for Drivers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drivers").field("replica_id", &self.replica_id).finish_non_exhaustive()
    }
}

#[async_trait]
impl OpenLedger for Drivers {
    async fn open(&self, place: &Place, directory: &Directory) -> Result<Arc<dyn Ledger>, StoreError> {
        let clock = Arc::clone(&self.clock);
        Ok(match place {
            Place::Sqlite => {
                let committed = Arc::clone(&self.committed);
                let committed = move |commit| committed(commit);
                let ledger = SqliteLedger::start(&self.store, directory, clock, committed).await?;
                let ledger: Arc<dyn Ledger> = Arc::new(ledger);
                tokio::spawn(bring(Arc::clone(&self.journal), Arc::downgrade(&ledger)));
                ledger
            }
            Place::Redis(url) => {
                let (url, replica_id) = (url.clone(), self.replica_id.clone());
                let journal = Arc::clone(&self.journal);
                let timeout = self.timeout;
                let options = RedisOptions { url, replica_id, timeout, clock, journal, admits: false };
                Arc::new(RedisLedger::start(options).await?)
            }
        })
    }
}
