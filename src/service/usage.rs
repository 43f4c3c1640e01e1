//! What a pool has used, from the same counters as decisions.

use std::{collections::BTreeSet, sync::Arc};

use super::{AdminError, Service};
use crate::{
    core::{
        directory::PoolEntry,
        ids::{ApiKeyId, PoolId, ReservationId},
        ledger::{Hold, UsageReading},
    },
    store::ReservationPlace,
};

/// Which part of a pool's usage is asked for.
#[derive(Clone, Debug)]
pub struct UsageCall {
    /// The pool.
    pub pool: PoolId,
    /// Only these keys; empty: all.
    pub api_keys: BTreeSet<ApiKeyId>,
    /// Only keys after this one.
    pub after: Option<String>,
    /// Most keys.
    pub count: usize,
    /// With the samples of each dimension.
    pub with_samples: bool,
}

/// A pool's usage, with one page of its keys.
#[derive(Clone, Debug)]
pub struct UsageView {
    /// The pool.
    pub entry: Arc<PoolEntry>,
    /// What its counters hold, in the order of its plan's dimensions.
    pub reading: UsageReading,
    /// The keys of this page, by name.
    pub keys: Vec<KeyRow>,
    /// There are keys after these.
    pub more: bool,
    /// The fraction from which the pool is in strict mode.
    pub threshold: f64,
    /// Revision of the configuration that was used.
    pub config_revision: u64,
}

/// A key that is in the pool, or has left it and still counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    /// The key.
    pub api_key: ApiKeyId,
    /// It is in the pool.
    pub allocated: bool,
}

/// One page of a pool's open reservations.
#[derive(Clone, Debug)]
pub struct ReservationsPage {
    /// The oldest deadline first.
    pub reservations: Vec<(ReservationId, Arc<Hold>)>,
    /// There are more after these.
    pub more: bool,
}

impl Service {
    /// Consumption by dimension and key.
    pub async fn pool_usage(&self, call: &UsageCall) -> Result<UsageView, AdminError> {
        let directory = self.0.directory.load_full();
        let entry = Arc::clone(directory.pool(&call.pool)?);
        let life = entry.history.created_revision;
        let (dimensions, connections) = (entry.dimension_keys(), &entry.pool.connections);
        let reading = self.ledger().usage(life, &dimensions, connections, call.with_samples).await?;
        let (keys, more) = page_of_keys(&entry, &reading, call);
        let settings = self.settings_at(&directory);
        let threshold = entry.pool.saturation_threshold.unwrap_or(settings.saturation_threshold);
        Ok(UsageView { entry, reading, keys, more, threshold, config_revision: directory.revision() })
    }

    /// Open reservations of a pool, of one key or of all.
    pub async fn reservations(
        &self,
        pool: &PoolId,
        api_key: Option<&ApiKeyId>,
        after: Option<ReservationPlace>,
        count: usize,
    ) -> Result<ReservationsPage, AdminError> {
        let life = self.directory().pool(pool)?.history.created_revision;
        let mut reservations = self.ledger().reservations(life, after, api_key, count + 1).await?;
        let more = reservations.len() > count;
        reservations.truncate(count);
        Ok(ReservationsPage { reservations, more })
    }
}

fn page_of_keys(entry: &PoolEntry, reading: &UsageReading, call: &UsageCall) -> (Vec<KeyRow>, bool) {
    let wanted = |key: &&ApiKeyId| {
        let after = call.after.as_deref().is_none_or(|after| key.as_str() > after);
        after && (call.api_keys.is_empty() || call.api_keys.contains(*key))
    };
    let allocated = entry.pool.allocations.iter().map(|allocation| &allocation.api_key);
    let names: BTreeSet<&ApiKeyId> = allocated.chain(reading.keys.keys()).filter(wanted).collect();
    let more = names.len() > call.count;
    let rows = names
        .into_iter()
        .take(call.count)
        .map(|key| KeyRow { api_key: key.clone(), allocated: entry.pool.allocation(key.as_str()).is_some() });
    (rows.collect(), more)
}
