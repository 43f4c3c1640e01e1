//! One async function for each use case, in domain values.

mod enforce;
mod explain;
mod pool_admin;
mod record;
mod settings;
mod usage;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use arc_swap::{ArcSwap, Guard};

pub use enforce::{Decided, Decision, EnforceCall, Reserve};
pub use pool_admin::{AdminError, PoolView};
pub use record::{RecordCall, RecordOutcome};
pub use settings::{SettingsView, Status};
pub use usage::{KeyRow, ReservationsPage, UsageCall, UsageView};

use crate::{
    clock::Clock,
    core::{
        directory::{Directory, PoolEntry},
        ids::PoolRevision,
        settings::Settings,
        units::Timestamp,
    },
    store::{DirectoryStore, Ledger, LedgerError},
};

/// What a service is started with.
#[derive(Clone, Debug)]
pub struct Start {
    /// Names this replica.
    pub replica_id: String,
    /// What applies where nothing is stored.
    pub settings: Settings,
    /// How long idempotency keys and settled reservations are remembered, in ms.
    pub id_life_ms: u64,
    /// A Redis URL is configured.
    pub redis_url_configured: bool,
}

/// The use cases. A clone is the same service.
#[derive(Clone, Debug)]
pub struct Service(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The snapshot that calls are decided by, swapped whole.
    directory: ArcSwap<Directory>,
    ledger: Arc<dyn Ledger>,
    store: Arc<dyn DirectoryStore>,
    clock: Arc<dyn Clock>,
    start: Start,
    started_at: Timestamp,
    /// When a call last matched each life of a pool, in ms.
    matched: papaya::HashMap<PoolRevision, AtomicU64>,
    /// Held by the one change of the directory that is under way.
    turn: tokio::sync::Mutex<()>,
}

impl Service {
    /// A service that starts from `directory`, which `store` has loaded.
    pub fn new(
        directory: Directory,
        store: Arc<dyn DirectoryStore>,
        ledger: Arc<dyn Ledger>,
        clock: Arc<dyn Clock>,
        start: Start,
    ) -> Self {
        let directory = ArcSwap::from_pointee(directory);
        let started_at = clock.now();
        let (matched, turn) = (papaya::HashMap::new(), tokio::sync::Mutex::new(()));
        Self(Arc::new(Inner { directory, ledger, store, clock, start, started_at, matched, turn }))
    }

    /// The configuration at one revision.
    pub fn directory(&self) -> Guard<Arc<Directory>> {
        self.0.directory.load()
    }

    /// What applies where a pool has nothing of its own: what is stored, else what the service was started with.
    pub fn settings(&self) -> Settings {
        self.settings_at(&self.directory())
    }

    fn settings_at(&self, directory: &Directory) -> Settings {
        directory.settings().over(&self.0.start.settings)
    }

    /// Remembers that a call has matched `entry` now.
    fn matched(&self, entry: &PoolEntry) {
        let now = self.0.clock.now().unix_ms();
        let matched = self.0.matched.pin();
        let last = matched.get_or_insert_with(entry.history.created_revision, || AtomicU64::new(now));
        last.store(now, Ordering::Relaxed);
    }

    fn last_matched(&self, entry: &PoolEntry) -> Option<Timestamp> {
        let matched = self.0.matched.pin();
        let last = matched.get(&entry.history.created_revision)?;
        Some(Timestamp::from_unix_ms(last.load(Ordering::Relaxed)))
    }
}

/// How often a call looks again when its pool is deleted under it. Each time a newer directory says what is there now.
const LOOKS_MAX: usize = 3;

/// True if the pool was deleted between the look at the directory and the look at the counters.
fn is_gone<T>(result: &Result<T, LedgerError>) -> bool {
    matches!(result, Err(LedgerError::PoolRemoved))
}
