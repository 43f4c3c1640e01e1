//! The drivers of `Ledger`, each with a store of its own and with time in the test's hands.

use std::{any::Any, sync::Arc};

use quota_share::{
    clock::ManualClock,
    core::directory::Directory,
    store::{
        Ledger,
        sqlite::{SqliteLedger, SqliteStore},
    },
};
use tempfile::TempDir;

use crate::model::START;

/// A ledger to be tested. The store ends with it.
pub(crate) struct Driver {
    pub(crate) ledger: Arc<dyn Ledger>,
    /// Another on the same store, as another replica has it; where only one process has the store, the same.
    pub(crate) other: Arc<dyn Ledger>,
    /// By which both decide.
    pub(crate) clock: Arc<ManualClock>,
    _store: Box<dyn Any + Send>,
}

/// Counters in memory and in a database in a temporary folder.
pub(crate) async fn sqlite() -> Driver {
    let clock = Arc::new(ManualClock::new(START));
    let folder = TempDir::new().expect("a temporary folder");
    let store = SqliteStore::open(folder.path()).await.expect("a new database");
    let nothing = Directory::default();
    let ledger = SqliteLedger::start(&store, &nothing, Arc::clone(&clock) as _, |_| {}).await;
    let ledger: Arc<dyn Ledger> = Arc::new(ledger.expect("nothing to load"));
    Driver { other: Arc::clone(&ledger), ledger, clock, _store: Box::new((store, folder)) }
}
