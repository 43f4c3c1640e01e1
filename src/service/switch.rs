//! The ledger in use, and how another one takes its place.

use std::{
    ops::Deref,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use arc_swap::Guard;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{AdminError, Service, Standing};
use crate::{
    core::{
        directory::{ChangeRefused, Directory},
        ids::InvalidField,
        settings::StoreDriver,
    },
    store::{Choice, Journal, Ledger, OpenLedger, Place},
};

/// How long a former ledger waits for calls that began on it. Those of a slower store are left to its close.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);

/// The counters that a service starts with, and where it gets others.
#[derive(Debug)]
pub struct Counters {
    /// Where they live.
    pub place: Place,
    /// The ledger there.
    pub ledger: Arc<dyn Ledger>,
    /// Opens the ledgers of other places.
    pub drivers: Arc<dyn OpenLedger>,
    /// Has what they could not take.
    pub journal: Arc<dyn Journal>,
}

/// The ledger in use. A call keeps to the one that it began with, by keeping this.
#[derive(Debug)]
pub(super) struct InUse {
    pub(super) place: Place,
    ledger: Arc<dyn Ledger>,
    /// Cancelled when the last call lets go of this.
    unused: CancellationToken,
    _last: DropGuard,
}

impl InUse {
    pub(super) fn new(place: Place, ledger: Arc<dyn Ledger>) -> Self {
        let unused = CancellationToken::new();
        Self { place, ledger, _last: unused.clone().drop_guard(), unused }
    }
}

/// A choice that is about to be stored.
#[derive(Debug)]
pub(super) struct Prepared {
    fallback: Option<String>,
    opened: Option<InUse>,
}

impl Prepared {
    /// It was not stored after all.
    pub(super) async fn withdraw(self) {
        if let Some(opened) = self.opened {
            opened.close().await;
        }
    }
}

impl Deref for InUse {
    type Target = dyn Ledger;

    fn deref(&self) -> &Self::Target {
        &*self.ledger
    }
}

impl Service {
    /// The ledger in use, for a call that waits for nothing.
    pub(super) fn ledger_now(&self) -> Guard<Arc<InUse>> {
        self.0.in_use.load()
    }

    /// The ledger in use, for a call that may wait for a store.
    pub(super) fn ledger(&self) -> Arc<InUse> {
        self.0.in_use.load_full()
    }

    /// The driver in use.
    pub fn driver(&self) -> StoreDriver {
        self.ledger_now().place.driver()
    }

    /// Nothing is decided here until somebody acts.
    pub fn refuses(&self) -> bool {
        !self.decides() || self.ledger_now().condition().refuses
    }

    /// There is a configuration to decide by.
    pub(super) fn decides(&self) -> bool {
        self.0.decides.load(Ordering::Relaxed)
    }

    /// Why the driver in use is not the one that is asked for.
    pub(super) fn fallback(&self) -> Option<String> {
        self.0.fallback.lock().clone()
    }

    /// Drops from memory what has ended.
    pub fn compact(&self) {
        self.ledger().compact();
    }

    /// Waits until everything that was asked for is done; what is asked for later fails.
    pub async fn close(&self) {
        let ledger = self.ledger();
        self.leave(&**ledger).await;
        ledger.close().await;
    }

    /// Those who share counters with this replica need not wait until they miss it.
    async fn leave(&self, ledger: &dyn Ledger) {
        let is_ours = !matches!(self.standing(), Standing::Foreign { .. });
        if let Some(shared) = ledger.directory().filter(|_| is_ours && ledger.condition().failing.is_none()) {
            // Else they will miss it.
            let _ = shared.leave(&self.0.start.replica_id).await;
        }
    }

    /// What `next` chooses, opened if it is another ledger than the one in use. `asked` is the driver that this change
    /// asks for: it must not come to another one.
    pub(super) async fn prepare(
        &self,
        next: &Directory,
        asked: Option<StoreDriver>,
    ) -> Result<Prepared, AdminError> {
        let Choice { place, fallback } = self.0.start.store.choose(next.settings());
        if asked == Some(StoreDriver::Redis) && fallback.is_some() {
            let accepted =
                "the URL of a Redis together with store_driver REDIS: none is stored or configured";
            let fault = InvalidField::new("settings.redis_url", "", accepted);
            return Err(ChangeRefused::Invalid(vec![fault]).into());
        }
        if place == self.ledger_now().place {
            return Ok(Prepared { fallback, opened: None });
        }
        let others = self.others().await?;
        if !others.is_empty() {
            return Err(AdminError::OthersAreLive(
                others.into_iter().map(|other| other.replica_id).collect(),
            ));
        }
        let ledger = self.0.drivers.open(&place, next).await?;
        Ok(Prepared { fallback, opened: Some(InUse::new(place, ledger)) })
    }

    /// Lets new calls go to what was prepared, and closes the former ledger when those that began on it have finished.
    pub(super) async fn take_over(&self, prepared: Prepared) {
        let Prepared { fallback, opened } = prepared;
        let known = std::mem::replace(&mut *self.0.fallback.lock(), fallback.clone());
        if let Some(fallback) = fallback.filter(|fallback| Some(fallback) != known.as_ref()) {
            tracing::warn!("{fallback}");
        }
        let Some(next) = opened else { return };
        let driver = next.place.driver().name();
        let shared = next.directory();
        self.stands_before(shared.is_some());
        if let Some(shared) = shared.filter(|_| next.condition().failing.is_none()) {
            // Before anybody calls it. What is wrong is said where it is found out.
            let _ = self.catch_up(&*shared).await;
        }
        let former = self.0.in_use.swap(Arc::new(next));
        tracing::info!(driver, "counters are kept by another driver or elsewhere from now on");
        let (ledger, unused) = (Arc::clone(&former.ledger), former.unused.clone());
        drop(former);
        if timeout(FINISH_TIMEOUT, unused.cancelled()).await.is_err() {
            tracing::warn!(
                ?FINISH_TIMEOUT,
                "calls are still under way on the former driver, which is closed"
            );
        }
        self.leave(&*ledger).await;
        ledger.close().await;
    }
}
