//! Settings that are stored, and how this replica is.

use std::sync::atomic::Ordering;

use super::{AdminError, Author, Service, Standing};
use crate::{
    core::{
        directory::{Change, ChangeRefused, PoolEntry},
        ids::InvalidField,
        settings::{Secret, Settings, SettingsUpdate, StoreDriver, StoredSettings},
    },
    store::{Losses, ReplicaNote, StoreError, redis::RedisUrl},
};

/// Most pools that one report names.
const UNMATCHED_NAMED_MAX: usize = 20;

/// Settings, stored and in force.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsView {
    /// Only what is stored.
    pub stored: StoredSettings,
    /// What is in force: stored, else environment, else default.
    pub effective: Settings,
    /// Where counters live now.
    pub store_driver: StoreDriver,
    /// There is a Redis URL, stored or configured.
    pub redis_url_configured: bool,
}

/// How this replica is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The program's version.
    pub version: &'static str,
    /// Names the replica; kept in its data directory.
    pub replica_id: String,
    /// The configuration it decides by.
    pub config_revision: u64,
    /// The newest one that it knows of.
    pub newest_config_revision: u64,
    /// Those that have said within some seconds that they are there, this one included.
    pub replicas: Vec<ReplicaNote>,
    /// Since it started.
    pub uptime_ms: u64,
    /// Where counters live now.
    pub store_driver: StoreDriver,
    /// Shared counters are out of reach: decisions follow the failure mode of each pool.
    pub degraded: bool,
    /// Records and releases that wait in the journal for the shared counters.
    pub journal_length: u64,
    /// Things that an operator should look at.
    pub warnings: Vec<String>,
}

impl Service {
    /// Settings, stored and in force.
    pub fn settings_view(&self) -> SettingsView {
        let directory = self.directory();
        SettingsView {
            stored: directory.settings().clone(),
            effective: self.settings_at(&directory),
            store_driver: self.driver(),
            redis_url_configured: directory.settings().redis_url.is_some()
                || self.0.start.store.redis_url.is_some(),
        }
    }

    /// Stores and forgets settings; they are in force at once. Also returns what is wrong where counters and configuration are.
    pub async fn update_settings(
        &self,
        author: Author,
        update: SettingsUpdate,
    ) -> Result<(SettingsView, Vec<String>), AdminError> {
        if let Some(fault) = update.redis_url.as_ref().and_then(unreadable) {
            let others = self.directory().settings().updated(&update).err();
            let faults = [fault].into_iter().chain(others.unwrap_or_default());
            return Err(ChangeRefused::Invalid(faults.collect()).into());
        }
        self.change(author, Change::UpdateSettings(update)).await?;
        Ok((self.settings_view(), self.store_warnings()))
    }

    /// How this replica is, and which others there are.
    pub async fn status(&self) -> Status {
        let replicas = self.replicas().await;
        let directory = self.directory();
        let condition = self.condition();
        let mut warnings = self.store_warnings();
        let losses = condition.losses;
        if losses != Losses::default() {
            let Losses { resent_batches, missing_batches, reservations } = losses;
            warnings.push(format!(
                "Redis has lost what it had acknowledged, since the start: {resent_batches} batches were sent again, \
                 {missing_batches} were too old for that, {reservations} reservations are gone"
            ));
        }
        if condition.clock_steps > 0 {
            let steps = condition.clock_steps;
            warnings.push(format!("the clock went back by more than an hour, {steps} times since the start"));
        }
        if condition.vanished_pools > 0 {
            let pools = condition.vanished_pools;
            warnings.push(format!(
                "the counters of {pools} pools have vanished from Redis before their time since the start: were they \
                 evicted or flushed?"
            ));
        }
        if let Some(policy) = condition.eviction_policy {
            warnings.push(format!(
                "Redis may evict counters when its memory is full (maxmemory-policy {policy}): set it to noeviction"
            ));
        }
        let unmatched: Vec<&PoolEntry> = directory
            .pools_after(None)
            .map(|entry| &**entry)
            .filter(|entry| self.last_matched(entry).is_none())
            .collect();
        for entry in unmatched.iter().take(UNMATCHED_NAMED_MAX) {
            let pool = &entry.pool;
            warnings.push(format!(
                "no call has matched pool {} since it was created or this replica started: are its keys and \
                 connections spelt as the routers spell them?",
                pool.id
            ));
        }
        if unmatched.len() > UNMATCHED_NAMED_MAX {
            let more = unmatched.len() - UNMATCHED_NAMED_MAX;
            warnings.push(format!("no call has matched {more} more pools"));
        }
        Status {
            version: env!("CARGO_PKG_VERSION"),
            replica_id: self.0.start.replica_id.clone(),
            config_revision: directory.revision(),
            newest_config_revision: self.0.newest_revision.load(Ordering::Relaxed).max(directory.revision()),
            replicas,
            uptime_ms: self.0.clock.now().ms_since(self.0.started_at),
            store_driver: self.driver(),
            degraded: self.is_degraded(),
            journal_length: self.journal().entries,
            warnings,
        }
    }
}

impl Service {
    /// What is wrong with where counters and the configuration are.
    fn store_warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = self.fallback().into_iter().collect();
        let driver = self.driver();
        let condition = self.condition();
        if let Some(error) = condition.failing.filter(|_| driver == StoreDriver::Redis) {
            let what_is_done = if condition.refuses {
                "nothing is decided here, and records are refused"
            } else {
                "records go to the journal, decisions follow the failure mode of each pool"
            };
            warnings.push(format!("{what_is_done}: {error}"));
        }
        if let Some(error) = self.sick_disk() {
            warnings.push(match driver {
                StoreDriver::Sqlite => format!("records and changes are refused, decisions go on: {error}"),
                StoreDriver::Redis => format!(
                    "the disk takes no writes: changes of the configuration are neither made nor followed here, and \
                     records are refused while Redis is out of reach: {error}"
                ),
            });
        }
        match self.standing() {
            Standing::Foreign { ours, theirs } => {
                let ours = ours.map_or_else(|| "of its own".to_owned(), |ours| format!("{ours:?}"));
                warnings.push(format!(
                    "Redis has the configuration {theirs:?}, and this replica one {ours}: nothing is decided here. Is its \
                     URL right? `quota-share adopt` takes it over and sets the one here aside"
                ));
            }
            Standing::Behind(why) => warnings.push(format!(
                "the shared configuration cannot be followed, and this replica {}: {why}",
                self.decides_meanwhile()
            )),
            Standing::Unseen(why) => {
                let why = why.map_or_else(String::new, |why| format!(": {why}"));
                warnings.push(format!(
                    "the configuration that replicas share has not been seen since this replica started{why}"
                ));
            }
            Standing::Alone | Standing::Current => {}
        }
        warnings
    }

    /// Why the disk takes no writes; `None` while it does.
    pub fn sick_disk(&self) -> Option<StoreError> {
        self.0.store.failing()
    }

    /// Those that share the configuration and have said so lately, this one among them.
    async fn replicas(&self) -> Vec<ReplicaNote> {
        let own = ReplicaNote {
            replica_id: self.0.start.replica_id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config_revision: self.directory().revision(),
            age_ms: 0,
        };
        let mut all = self.others().await.unwrap_or_default();
        all.push(own);
        all.sort_by(|a, b| a.replica_id.cmp(&b.replica_id));
        all
    }

    /// As [`replicas`](Self::replicas), without this one. Who is out of reach of others, or none of theirs, knows of none.
    pub(super) async fn others(&self) -> Result<Vec<ReplicaNote>, StoreError> {
        let shared = {
            let ledger = self.ledger();
            ledger.directory().filter(|_| ledger.condition().failing.is_none())
        };
        let Some(shared) = shared.filter(|_| !matches!(self.standing(), Standing::Foreign { .. })) else {
            return Ok(Vec::new());
        };
        let said = shared.replicas().await?.into_iter();
        Ok(said.filter(|note| note.replica_id != self.0.start.replica_id).collect())
    }
}

/// What is wrong with a URL that is to be stored; nothing of it is told.
fn unreadable(url: &Secret) -> Option<InvalidField> {
    RedisUrl::parse(url.reveal()).err().map(|_| {
        let accepted = RedisUrl::ACCEPTED.to_owned();
        InvalidField { field: "settings.redis_url".to_owned(), given: "what was given".to_owned(), accepted }
    })
}
