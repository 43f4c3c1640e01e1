//! Settings that administrators store: they win over what the process was started with.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    ids::{Faults, InvalidField},
    pool::{UnknownFields, fraction_hint},
};

/// Most days that rows of consumption can be kept.
pub const RETENTION_DAYS_MAX: u32 = 3_660;

/// Where counters live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreDriver {
    /// In this process, durable in its SQLite file.
    Sqlite,
    /// In a Redis that replicas share.
    Redis,
}

impl StoreDriver {
    /// As it is set and shown.
    pub fn name(self) -> &'static str {
        match self {
            StoreDriver::Sqlite => "sqlite",
            StoreDriver::Redis => "redis",
        }
    }
}

/// A text that is never shown.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(String);

impl Secret {
    /// The text, for whoever it is meant for.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What applies where a pool has nothing of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Fraction of its limit from which a pool is in strict mode, 0 to 1.
    pub saturation_threshold: f64,
    /// What the score of a deprioritised candidate is multiplied by, 0 to 1.
    pub soft_deprioritize_factor: f64,
    /// How long rows of consumption are kept for whoever reads the database, 1 to [`RETENTION_DAYS_MAX`].
    pub consumption_retention_days: u32,
}

/// What is stored, and nothing of what is not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoredSettings {
    /// Where this replica's counters live.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_driver: Option<StoreDriver>,
    /// The Redis for the driver redis. Told to nobody: this replica alone reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redis_url: Option<Secret>,
    /// As [`Settings::saturation_threshold`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saturation_threshold: Option<f64>,
    /// As [`Settings::soft_deprioritize_factor`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_deprioritize_factor: Option<f64>,
    /// As [`Settings::consumption_retention_days`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumption_retention_days: Option<u32>,
    /// What this version does not know.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Settings to store and settings to forget, not yet checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SettingsUpdate {
    /// Where this replica's counters are to live.
    pub store_driver: Option<StoreDriver>,
    /// The Redis for the driver redis; what is a URL of one is not for this module to say.
    pub redis_url: Option<Secret>,
    /// As [`Settings::saturation_threshold`].
    pub saturation_threshold: Option<f64>,
    /// As [`Settings::soft_deprioritize_factor`].
    pub soft_deprioritize_factor: Option<f64>,
    /// As [`Settings::consumption_retention_days`].
    pub consumption_retention_days: Option<i64>,
    /// Names of fields to forget.
    pub clear: Vec<String>,
}

impl From<&StoredSettings> for SettingsUpdate {
    /// Stores what is stored elsewhere, but for the URL, which is told to nobody.
    fn from(stored: &StoredSettings) -> Self {
        let StoredSettings {
            store_driver,
            redis_url: _,
            saturation_threshold,
            soft_deprioritize_factor,
            consumption_retention_days,
            unknown: _,
        } = stored;
        SettingsUpdate {
            store_driver: *store_driver,
            redis_url: None,
            saturation_threshold: *saturation_threshold,
            soft_deprioritize_factor: *soft_deprioritize_factor,
            consumption_retention_days: consumption_retention_days.map(i64::from),
            clear: Vec::new(),
        }
    }
}

impl StoredSettings {
    /// Without what belongs to this replica alone.
    pub fn shared(&self) -> StoredSettings {
        StoredSettings { store_driver: None, redis_url: None, ..self.clone() }
    }

    /// What belongs to this replica alone, with `shared` for everything else.
    pub fn with_shared(&self, shared: StoredSettings) -> StoredSettings {
        StoredSettings { store_driver: self.store_driver, redis_url: self.redis_url.clone(), ..shared }
    }

    /// What is in force: stored, else `otherwise`.
    pub fn over(&self, otherwise: &Settings) -> Settings {
        Settings {
            saturation_threshold: self.saturation_threshold.unwrap_or(otherwise.saturation_threshold),
            soft_deprioritize_factor: self
                .soft_deprioritize_factor
                .unwrap_or(otherwise.soft_deprioritize_factor),
            consumption_retention_days: self
                .consumption_retention_days
                .unwrap_or(otherwise.consumption_retention_days),
        }
    }

    /// What is stored after `update`; every mistake in it is named.
    pub fn updated(&self, update: &SettingsUpdate) -> Result<StoredSettings, Vec<InvalidField>> {
        let mut faults = Faults::default();
        let mut next = self.clone();
        for (index, name) in update.clear.iter().enumerate() {
            next.clear(index, name, update, &mut faults);
        }
        next.store_driver = update.store_driver.or(next.store_driver);
        next.redis_url = update.redis_url.clone().or(next.redis_url);
        let mut fraction = |name: &str, given: Option<f64>| {
            if let Some(given) = given.filter(|given| !(0.0..=1.0).contains(given)) {
                faults.add(
                    format!("settings.{name}"),
                    given,
                    &fraction_hint("a fraction from 0 to 1", given),
                );
            }
            given
        };
        let threshold = fraction("saturation_threshold", update.saturation_threshold);
        next.saturation_threshold = threshold.or(next.saturation_threshold);
        let factor = fraction("soft_deprioritize_factor", update.soft_deprioritize_factor);
        next.soft_deprioritize_factor = factor.or(next.soft_deprioritize_factor);
        if let Some(given) = update.consumption_retention_days {
            match u32::try_from(given) {
                Ok(days @ 1..=RETENTION_DAYS_MAX) => next.consumption_retention_days = Some(days),
                _ => {
                    let accepted = format!("a whole number from 1 to {RETENTION_DAYS_MAX}");
                    faults.add("settings.consumption_retention_days", given, &accepted);
                }
            }
        }
        if faults.is_empty() { Ok(next) } else { Err(faults.into_vec()) }
    }

    fn clear(&mut self, index: usize, name: &str, update: &SettingsUpdate, faults: &mut Faults) {
        let is_set = match name {
            "store_driver" => {
                self.store_driver = None;
                update.store_driver.is_some()
            }
            "redis_url" => {
                self.redis_url = None;
                update.redis_url.is_some()
            }
            "saturation_threshold" => {
                self.saturation_threshold = None;
                update.saturation_threshold.is_some()
            }
            "soft_deprioritize_factor" => {
                self.soft_deprioritize_factor = None;
                update.soft_deprioritize_factor.is_some()
            }
            "consumption_retention_days" => {
                self.consumption_retention_days = None;
                update.consumption_retention_days.is_some()
            }
            _ => {
                let accepted = "store_driver, redis_url, saturation_threshold, soft_deprioritize_factor or \
                                consumption_retention_days";
                faults.add(format!("clear[{index}]"), name, accepted);
                return;
            }
        };
        if is_set {
            faults.add(format!("clear[{index}]"), name, "a field that the same call does not set");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_stored_and_cleared_and_never_shown() {
        let url = Secret::from("redis://user:hidden@host".to_owned());
        let update = SettingsUpdate { redis_url: Some(url), ..Default::default() };
        let stored = StoredSettings::default().updated(&update).unwrap();
        assert_eq!(stored.redis_url, update.redis_url);
        assert!(!format!("{stored:?} {update:?}").contains("hidden"));
        assert_eq!(SettingsUpdate::from(&stored), SettingsUpdate::default());

        let clear = SettingsUpdate { clear: vec!["redis_url".to_owned()], ..Default::default() };
        assert_eq!(stored.updated(&clear).unwrap(), StoredSettings::default());
        let both = SettingsUpdate { clear: clear.clear, ..update };
        let faults = stored.updated(&both).unwrap_err();
        assert_eq!(faults[0].field, "clear[0]");
        assert!(!faults[0].to_string().contains("hidden"));
    }

    #[test]
    fn an_update_is_taken_whole_or_refused_with_every_mistake_named() {
        let stored = StoredSettings { saturation_threshold: Some(0.4), ..Default::default() };
        let update = SettingsUpdate {
            soft_deprioritize_factor: Some(0.5),
            clear: vec!["saturation_threshold".to_owned()],
            ..Default::default()
        };
        let next = stored.updated(&update).unwrap();
        assert_eq!(next, StoredSettings { soft_deprioritize_factor: Some(0.5), ..Default::default() });

        let update = SettingsUpdate {
            saturation_threshold: Some(50.0),
            soft_deprioritize_factor: Some(f64::NAN),
            consumption_retention_days: Some(0),
            clear: vec!["threshold".to_owned(), "saturation_threshold".to_owned()],
            ..Default::default()
        };
        let faults = stored.updated(&update).unwrap_err();
        let fields: Vec<&str> = faults.iter().map(|fault| fault.field.as_str()).collect();
        assert_eq!(
            fields,
            [
                "clear[0]",
                "clear[1]",
                "settings.saturation_threshold",
                "settings.soft_deprioritize_factor",
                "settings.consumption_retention_days"
            ]
        );
        assert!(faults[2].accepted.contains("did you mean 0.5?"), "{}", faults[2]);
    }
}
