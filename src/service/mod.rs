//! One async function for each use case, in domain values.

mod audit;
mod counts;
mod enforce;
mod explain;
mod follow;
mod import;
mod local_shares;
mod pool_admin;
mod record;
mod settings;
mod signals;
mod switch;
mod usage;

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64},
};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

pub use audit::Author;
pub use counts::{DecisionCount, UsedFraction};
pub use enforce::{Decided, Decision, Degraded, EnforceCall, Found, Reserve};
pub use follow::Standing;
pub use import::Imported;
pub use pool_admin::{AdminError, PoolView};
pub use record::{RecordCall, RecordOutcome};
pub use settings::{SettingsView, Status};
pub use signals::{ResponseHeaders, SignalsCall, SignalsOutcome, Utilization};
pub use switch::Counters;
pub use usage::{KeyRow, ReservationsPage, UsageCall, UsageView};

use self::{counts::Counts, local_shares::LocalShares, switch::InUse};
use crate::{
    clock::Clock,
    core::{
        directory::{Directory, PoolEntry},
        settings::Settings,
        units::Timestamp,
    },
    store::{Configured, DirectoryStore, Journal, LedgerError, OpenLedger},
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
    /// How long a provider's figure without an end is believed, in ms.
    pub signal_ttl_ms: u64,
    /// Where counters live, unless something else is stored.
    pub store: Configured,
}

/// The use cases. A clone is the same service.
#[derive(Clone, Debug)]
pub struct Service(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The snapshot that calls are decided by, swapped whole.
    directory: ArcSwap<Directory>,
    /// Swapped whole as well, when the driver is changed.
    in_use: ArcSwap<InUse>,
    drivers: Arc<dyn OpenLedger>,
    journal: Arc<dyn Journal>,
    store: Arc<dyn DirectoryStore>,
    clock: Arc<dyn Clock>,
    start: Start,
    started_at: Timestamp,
    counts: Counts,
    local_shares: LocalShares,
    standing: Mutex<Standing>,
    /// There is a configuration to decide by.
    decides: AtomicBool,
    /// Of the shared configuration, as last seen.
    newest_revision: AtomicU64,
    /// Where changes of the directory run: not where they were asked for, which may end before they do.
    runtime: tokio::runtime::Handle,
    /// Held by the one change of the directory that is under way.
    turn: tokio::sync::Mutex<()>,
    /// Why the driver in use is not the one that is asked for.
    fallback: Mutex<Option<String>>,
}

impl Service {
    /// A service that starts from `directory`, which `store` has loaded. Call within the Tokio runtime that lasts as long.
    pub fn new(
        directory: Directory,
        store: Arc<dyn DirectoryStore>,
        counters: Counters,
        clock: Arc<dyn Clock>,
        start: Start,
    ) -> Self {
        let Counters { place, ledger, drivers, journal } = counters;
        let in_use = ArcSwap::from_pointee(InUse::new(place, ledger));
        let fallback = Mutex::new(start.store.choose(directory.settings()).fallback);
        let directory = ArcSwap::from_pointee(directory);
        let started_at = clock.now();
        let (counts, turn) = (Counts::default(), tokio::sync::Mutex::new(()));
        let runtime = tokio::runtime::Handle::current();
        let service = Self(Arc::new(Inner {
            directory,
            in_use,
            drivers,
            journal,
            store,
            clock,
            start,
            started_at,
            counts,
            local_shares: LocalShares::default(),
            standing: Mutex::default(),
            decides: AtomicBool::new(true),
            newest_revision: AtomicU64::new(0),
            runtime,
            turn,
            fallback,
        }));
        service.stands_before(service.ledger_now().directory().is_some());
        service
    }

    /// Waits until the change of the directory that is under way is done.
    pub async fn finish_changes(&self) {
        drop(self.0.turn.lock().await);
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
        self.0.counts.matched(entry.history.created_revision, self.0.clock.now());
    }

    fn last_matched(&self, entry: &PoolEntry) -> Option<Timestamp> {
        self.0.counts.last_matched(entry.history.created_revision)
    }
}

/// How often a call looks again when its pool is deleted under it. Each time a newer directory says what is there now.
const LOOKS_MAX: usize = 3;

/// True if the pool was deleted between the look at the directory and the look at the counters.
fn is_gone<T>(result: &Result<T, LedgerError>) -> bool {
    matches!(result, Err(LedgerError::PoolRemoved))
}
