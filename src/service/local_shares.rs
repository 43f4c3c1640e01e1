//! What this replica admits by itself, of pools with the failure mode FAIL_LOCAL.

use parking_lot::Mutex;

use crate::{
    core::{
        admission::{Reading, Reserved},
        charge::{Charge, CounterKey},
        directory::PoolEntry,
        ids::{ApiKeyId, PoolRevision},
        local_share::LocalShare,
        pool::FailureMode,
        units::Amount,
    },
    store::Ledger,
};

/// By life of the pool; nothing is kept of pools with other failure modes.
#[derive(Debug, Default)]
pub(super) struct LocalShares(papaya::HashMap<PoolRevision, Mutex<LocalShare>>);

/// What a pool's slice here says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Local {
    /// It is within what is left of it.
    Admits,
    /// It is not.
    UsedUp,
    /// The shared counters have not answered since this replica started.
    Unknown,
}

/// Whether a decision is to have effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effects {
    /// The request will be sent if it is allowed.
    Wanted,
    /// Somebody only wants to know.
    None,
}

impl LocalShares {
    /// The shared counters have answered, and hold what was asked for if `reserved` says so.
    pub(super) fn heard(
        &self,
        entry: &PoolEntry,
        charge: &Charge,
        reading: &Reading,
        reserved: Option<Reserved>,
        ledger: &dyn Ledger,
    ) {
        if entry.pool.failure_mode == FailureMode::FailLocal {
            let pools = self.0.pin();
            let share = pools.get_or_insert_with(charge.pool, Mutex::default);
            let holds = reserved.is_some_and(|reserved| !reserved.repeated);
            share.lock().heard(charge, reading, holds, ledger.all_counted());
        }
    }

    /// Decides without the shared counters.
    pub(super) fn decide(&self, charge: &Charge, ledger: &dyn Ledger, effects: Effects) -> Local {
        // Nothing is shared where nothing is counted.
        if charge.checks.is_empty() {
            return Local::Admits;
        }
        let pools = self.0.pin();
        let Some(share) = pools.get(&charge.pool) else { return Local::Unknown };
        let Ok(now) = ledger.now() else { return Local::Unknown };
        let (mut share, replicas) = (share.lock(), ledger.live_replicas());
        let admits = match effects {
            Effects::Wanted => share.admit(charge, now, replicas),
            Effects::None => share.admits(charge, now, replicas),
        };
        match admits {
            Some(true) => Local::Admits,
            Some(false) => Local::UsedUp,
            None => Local::Unknown,
        }
    }

    /// A cost was taken that the shared counters have not heard of yet.
    pub(super) fn recorded(
        &self,
        pool: PoolRevision,
        api_key: &ApiKeyId,
        counts: &[(CounterKey, Amount)],
        ledger: &dyn Ledger,
    ) {
        if let (Some(share), Ok(now)) = (self.0.pin().get(&pool), ledger.now()) {
            share.lock().recorded(api_key, counts, now);
        }
    }

    pub(super) fn forget(&self, pool: PoolRevision) {
        self.0.pin().remove(&pool);
    }
}
