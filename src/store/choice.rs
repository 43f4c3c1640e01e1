//! Which driver keeps the counters: what is stored, else what the process was started with, else sqlite.

use super::redis::{InvalidRedisUrl, RedisUrl};
use crate::core::settings::{Secret, StoreDriver, StoredSettings};

/// Where counters live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this process, durable in its SQLite file.
    Sqlite,
    /// In this Redis.
    Redis(RedisUrl),
}

impl Place {
    /// Its driver.
    pub fn driver(&self) -> StoreDriver {
        match self {
            Place::Sqlite => StoreDriver::Sqlite,
            Place::Redis(_) => StoreDriver::Redis,
        }
    }
}

/// What the process was started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configured {
    /// Where counters live, unless another driver is stored.
    pub driver: StoreDriver,
    /// Which Redis, unless another one is stored.
    pub redis_url: Option<RedisUrl>,
    /// One was given that cannot be read, which is as good as none.
    pub redis_url_unreadable: bool,
}

/// What a choice comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Where counters live.
    pub place: Place,
    /// Why that is not where they should.
    pub fallback: Option<String>,
}

impl Configured {
    /// Where counters live while `stored` is stored.
    pub fn choose(&self, stored: &StoredSettings) -> Choice {
        match stored.store_driver.unwrap_or(self.driver) {
            StoreDriver::Sqlite => Choice { place: Place::Sqlite, fallback: None },
            StoreDriver::Redis => self.choose_redis(stored.redis_url.as_ref()),
        }
    }

    fn choose_redis(&self, stored: Option<&Secret>) -> Choice {
        let own = stored.map(|url| RedisUrl::parse(url.reveal()));
        let unreadable = matches!(own, Some(Err(_)));
        if let Some(url) = own.and_then(Result::ok).or_else(|| self.redis_url.clone()) {
            return Choice { place: Place::Redis(url), fallback: None };
        }
        let why = match (unreadable, self.redis_url_unreadable) {
            (true, _) => "a URL that can be read, and the stored settings.redis_url cannot",
            (false, true) => "a URL that can be read, and QUOTA_STORE_REDIS_URL cannot",
            (false, false) => "QUOTA_STORE_REDIS_URL, which is not set",
        };
        Choice { place: Place::Sqlite, fallback: Some(format!("the driver redis needs {why}: using sqlite")) }
    }

    /// What an operator is to be told of `choice` at start.
    pub fn warning(&self, choice: &Choice) -> Option<String> {
        choice.fallback.clone().or_else(|| {
            let unused =
                || format!("QUOTA_STORE_REDIS_URL cannot be read and is not used: {InvalidRedisUrl}");
            self.redis_url_unreadable.then(unused)
        })
    }
}

#[cfg(test)]
mod tests {
    use StoreDriver::{Redis, Sqlite};

    use super::*;

    const GOOD: &str = "redis://:hidden@configured";
    const STORED: &str = "redis://:hidden@stored";
    const BAD: &str = "mongo://:hidden@host";

    #[test]
    fn a_stored_driver_and_url_win_and_a_missing_url_is_told_once() {
        // configured: driver, URL | stored: driver, URL | the URL that is used | what the one warning says
        type Row = (
            (StoreDriver, &'static str),
            (Option<StoreDriver>, &'static str),
            Option<&'static str>,
            &'static str,
        );
        let rows: [Row; 15] = [
            ((Sqlite, ""), (None, ""), None, ""),
            ((Sqlite, GOOD), (None, ""), None, ""),
            ((Redis, GOOD), (None, ""), Some(GOOD), ""),
            ((Redis, GOOD), (None, STORED), Some(STORED), ""),
            ((Redis, ""), (None, STORED), Some(STORED), ""),
            ((Sqlite, ""), (Some(Redis), STORED), Some(STORED), ""),
            ((Sqlite, GOOD), (Some(Redis), ""), Some(GOOD), ""),
            ((Redis, GOOD), (Some(Sqlite), STORED), None, ""),
            ((Redis, ""), (None, ""), None, "needs QUOTA_STORE_REDIS_URL, which is not set: using sqlite"),
            ((Sqlite, ""), (Some(Redis), ""), None, "QUOTA_STORE_REDIS_URL, which is not set: using sqlite"),
            ((Redis, BAD), (None, ""), None, "QUOTA_STORE_REDIS_URL cannot: using sqlite"),
            ((Sqlite, BAD), (None, ""), None, "QUOTA_STORE_REDIS_URL cannot be read and is not used"),
            ((Redis, BAD), (None, STORED), Some(STORED), "QUOTA_STORE_REDIS_URL cannot be read"),
            ((Redis, GOOD), (None, BAD), Some(GOOD), ""),
            ((Redis, ""), (None, BAD), None, "the stored settings.redis_url cannot: using sqlite"),
        ];
        for row @ ((driver, url), (stored_driver, stored_url), used, says) in rows {
            let redis_url = RedisUrl::parse(url).ok();
            let redis_url_unreadable = !url.is_empty() && redis_url.is_none();
            let configured = Configured { driver, redis_url, redis_url_unreadable };
            let stored_url = Some(stored_url).filter(|url| !url.is_empty());
            let stored = StoredSettings {
                store_driver: stored_driver,
                redis_url: stored_url.map(|url| Secret::from(url.to_owned())),
                ..StoredSettings::default()
            };
            let choice = configured.choose(&stored);
            let want = used.map_or(Place::Sqlite, |url| Place::Redis(RedisUrl::parse(url).unwrap()));
            assert_eq!(choice.place, want, "{row:?}");
            let warning = configured.warning(&choice).unwrap_or_default();
            assert_eq!(warning.is_empty(), says.is_empty(), "{row:?}: {warning}");
            assert!(warning.contains(says) && !warning.contains("hidden"), "{row:?}: {warning}");
        }
    }
}
