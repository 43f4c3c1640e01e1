//! Settings that are stored, and how this replica is.

use super::{AdminError, Service};
use crate::core::{
    directory::{Change, PoolEntry},
    settings::{Settings, SettingsUpdate, StoreDriver, StoredSettings},
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
    /// A Redis URL is configured.
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
    /// Since it started.
    pub uptime_ms: u64,
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
            store_driver: StoreDriver::Sqlite,
            redis_url_configured: self.0.start.redis_url_configured,
        }
    }

    /// Stores and forgets settings; they are in force at once.
    pub async fn update_settings(&self, update: SettingsUpdate) -> Result<SettingsView, AdminError> {
        self.change(Change::UpdateSettings(update)).await?;
        Ok(self.settings_view())
    }

    /// How this replica is.
    pub fn status(&self) -> Status {
        let directory = self.directory();
        let condition = self.condition();
        let mut warnings = Vec::new();
        if let Some(error) = condition.failing {
            warnings.push(format!("records and changes are refused, decisions go on: {error}"));
        }
        if condition.clock_steps > 0 {
            let steps = condition.clock_steps;
            warnings.push(format!("the clock went back by more than an hour, {steps} times since the start"));
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
            uptime_ms: self.0.clock.now().ms_since(self.0.started_at),
            warnings,
        }
    }
}
