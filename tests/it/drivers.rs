//! The drivers of `Ledger`, each with a store of its own and with time in the test's hands.

use std::{any::Any, sync::Arc, time::Duration};

use quota_share::{
    clock::ManualClock,
    core::directory::Directory,
    store::{
        Kept, Ledger,
        redis::{RedisLedger, RedisOptions, RedisUrl},
        sqlite::{SqliteLedger, SqliteStore},
    },
};
use tempfile::TempDir;

use crate::{
    harness::{PATIENCE, TestCluster, TestRedis, redis_is_missing},
    memory_journal::MemoryJournal,
    model::START,
};

/// What a call did that must not have gone to the journal.
pub(crate) fn done<T>(kept: Kept<T>) -> T {
    match kept {
        Kept::Done(answer) => answer,
        Kept::Journaled => panic!("it is in the journal"),
    }
}

/// A ledger to be tested. A store of its own ends with it.
pub(crate) struct Driver {
    pub(crate) ledger: Arc<dyn Ledger>,
    /// Another on the same store, as another replica has it; where only one process has the store, the same.
    pub(crate) other: Arc<dyn Ledger>,
    /// By which both decide.
    pub(crate) clock: Arc<ManualClock>,
    _store: Box<dyn Any + Send>,
}

/// Counters in memory and in a database in a temporary folder.
pub(crate) async fn sqlite() -> Option<Driver> {
    let clock = Arc::new(ManualClock::new(START));
    let folder = TempDir::new().expect("a temporary folder");
    let store = SqliteStore::open(folder.path()).await.expect("a new database");
    let nothing = Directory::default();
    let ledger = SqliteLedger::start(&store, &nothing, Arc::clone(&clock) as _, |_| {}).await;
    let ledger: Arc<dyn Ledger> = Arc::new(ledger.expect("nothing to load"));
    Some(Driver { other: Arc::clone(&ledger), ledger, clock, _store: Box::new((store, folder)) })
}

/// Counters in the Redis that tests share.
pub(crate) async fn redis() -> Option<Driver> {
    if redis_is_missing() { None } else { Some(replicas(&TestRedis::shared().await.url()).await) }
}

/// Counters in the cluster that tests share.
pub(crate) async fn cluster() -> Option<Driver> {
    if redis_is_missing() { None } else { Some(replicas(&TestCluster::shared().await.url()).await) }
}

/// Two replicas of one Redis.
async fn replicas(url: &str) -> Driver {
    let clock = Arc::new(ManualClock::new(START));
    let (ledger, other) = (replica(url, "one", &clock).await, replica(url, "two", &clock).await);
    Driver { ledger, other, clock, _store: Box::new(()) }
}

/// A ledger that has reached its Redis.
async fn replica(url: &str, name: &str, clock: &Arc<ManualClock>) -> Arc<dyn Ledger> {
    let options = RedisOptions {
        url: RedisUrl::parse(url).expect("a URL"),
        replica_id: name.to_owned(),
        // What a busy machine needs is no concern of these tests.
        timeout: PATIENCE,
        clock: Arc::clone(clock) as _,
        journal: Arc::new(MemoryJournal::default()),
        admits: true,
    };
    let ledger = RedisLedger::start(options).await.expect("a URL that can be used");
    while ledger.condition().failing.is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Arc::new(ledger)
}
