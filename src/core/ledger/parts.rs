//! A ledger put together from what a store has kept of it.

use std::sync::Arc;

use super::{Hold, KeyCounters, PoolDimension, PoolLedger};
use crate::core::{
    account::{AccountKey, Head, Share},
    admission::Counter,
    burn_rate::Sampler,
    ids::{ApiKeyId, PoolRevision},
    plan::DimensionKey,
    pool::ModelCapKey,
    units::Timestamp,
};

/// All of a ledger, or as much of it as a question needs. Remembered ids are no part of it.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    /// The instant that it has last seen.
    pub now: Timestamp,
    /// Every dimension that it counts.
    pub dimensions: Vec<DimensionPart>,
    /// Keys with something on any counter or account.
    pub keys: Vec<KeyPart>,
    /// What is known of accounts.
    pub accounts: Vec<AccountPart>,
    /// Open reservations by name. What they hold is in the counters already.
    pub holds: Vec<([u8; 12], Hold)>,
}

/// A dimension of the pool.
#[derive(Clone, Debug)]
pub struct DimensionPart {
    /// What is counted.
    pub key: DimensionKey,
    /// Of the whole pool.
    pub total: Counter,
    /// How fast it is consumed.
    pub sampler: Sampler,
}

/// A key's counters.
#[derive(Clone, Debug)]
pub struct KeyPart {
    /// Whose.
    pub key: ApiKeyId,
    /// In the order of the dimensions; may be shorter.
    pub dimensions: Vec<Counter>,
    /// Of model caps.
    pub models: Vec<(ModelCapKey, Counter)>,
}

/// What is known of an account.
#[derive(Clone, Debug)]
pub struct AccountPart {
    /// Which.
    pub account: AccountKey,
    /// As a whole.
    pub head: Head,
    /// Of keys.
    pub shares: Vec<(ApiKeyId, Share)>,
}

impl PoolLedger {
    /// The ledger of `pool` that `parts` make.
    pub fn of_parts(pool: PoolRevision, parts: Parts) -> Self {
        let mut ledger = Self::new(pool, parts.now);
        let dimensions = parts.dimensions.into_iter();
        ledger.dimensions = dimensions
            .map(|DimensionPart { key, total, sampler }| PoolDimension { key, total, sampler })
            .collect();
        let keys = parts.keys.into_iter();
        ledger.keys = keys
            .map(|KeyPart { key, dimensions, models }| (key, KeyCounters { dimensions, models }))
            .collect();
        for AccountPart { account, head, shares } in parts.accounts {
            let accounts = ledger.accounts.entry(account.dimension).or_default();
            accounts.entry(account.connection).or_default().put(Some(head), shares);
        }
        ledger.find_next_window_end();
        for (random, hold) in parts.holds {
            let hold = Arc::new(hold);
            ledger.by_deadline.insert((hold.deadline, random), Arc::clone(&hold));
            ledger.holds.insert(random, hold);
        }
        ledger
    }
}
