//! Counters in a Redis that replicas share: one script decides, holds and counts, by Redis' clock.
//!
//! What was acknowledged is as durable as that Redis is configured to be. `lua/` is the script, the twin of
//! [`PoolLedger`](crate::core::ledger::PoolLedger); everything else brings calls to it, once each, and answers back.

mod batches;
mod client;
mod directory;
mod drain;
mod health;
mod keys;
mod ledger;
mod pools;
mod probe;
mod reach;
mod reads;
mod slot;
mod stored;
mod ticket;
mod watch;
mod wire;

use std::{fmt, sync::Arc, time::Duration};

use fred::types::config::Config;

pub use ledger::RedisLedger;

use crate::{clock::Clock, store::Journal};

const STORE: &str = "Redis";
const SCHEMES: [&str; 14] = [
    "redis",
    "redis-cluster",
    "redis-sentinel",
    "redis+unix",
    "rediss",
    "rediss-cluster",
    "rediss-sentinel",
    "valkey",
    "valkey-cluster",
    "valkey-sentinel",
    "valkey+unix",
    "valkeys",
    "valkeys-cluster",
    "valkeys-sentinel",
];
/// It is stored, and can name some hundred nodes.
const URL_BYTES_MAX: usize = 16_384;

/// Where a Redis is, and how to enter: a URL as fred reads it. It may carry a password and is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl(String);

impl RedisUrl {
    /// What [`parse`](RedisUrl::parse) accepts.
    pub const ACCEPTED: &str = "redis://[[user]:password@]host[:port][/database], redis-cluster://, redis-sentinel:// or \
                                redis+unix:///path, or with TLS rediss://, rediss-cluster:// or rediss-sentinel://";

    /// The URL in `text`.
    ///
    /// # Errors
    /// Says what is accepted; nothing of `text` is in it.
    pub fn parse(text: &str) -> Result<Self, InvalidRedisUrl> {
        // Whoever reads it takes any scheme for that of one server.
        let known = text.split_once(':').is_some_and(|(scheme, _)| SCHEMES.contains(&scheme));
        if !known || text.len() > URL_BYTES_MAX {
            return Err(InvalidRedisUrl);
        }
        let url = Self(text.to_owned());
        url.config().map_err(|_| InvalidRedisUrl)?;
        Ok(url)
    }

    fn config(&self) -> Result<Config, fred::error::Error> {
        Config::from_url(&self.0)
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A text that is no URL of a Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not the URL of a Redis: use {}", RedisUrl::ACCEPTED)]
pub struct InvalidRedisUrl;

/// What the driver is started with.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    /// Which Redis.
    pub url: RedisUrl,
    /// Names this replica; kept in its data directory.
    pub replica_id: String,
    /// The longest that an enforcement waits for an answer.
    pub timeout: Duration,
    /// Where an injected time comes from; else Redis' own decides.
    pub clock: Arc<dyn Clock>,
    /// What is answered while Redis is out of reach waits there.
    pub journal: Arc<dyn Journal>,
    /// Calls come in from the start; else when the configuration there is known to be the right one.
    pub admits: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_url_of_a_redis_is_one_and_none_is_repeated() {
        for good in [
            "redis://host",
            "redis://:hidden@127.0.0.1:6379/3",
            "valkey://user:hidden@[::1]:6379",
            "redis-cluster://host:30001?node=other:30002",
            "redis-sentinel://host:26379?sentinelServiceName=main",
            "redis+unix:///run/redis.sock",
        ] {
            let url = RedisUrl::parse(good).unwrap_or_else(|error| panic!("{good}: {error}"));
            assert_eq!(format!("{url:?}"), "***");
        }
        let long = format!("redis://host/{}", " ".repeat(URL_BYTES_MAX));
        for bad in [
            "",
            "hidden",
            "host:6379",
            "http://user:hidden@host",
            "redis://user:hidden@",
            "redis://user:hidden@host:99999",
            "redis://user:hidden@host/db",
            "redis-sentinel://user:hidden@host",
            &long,
        ] {
            let error = RedisUrl::parse(bad).expect_err(bad).to_string();
            assert!(!error.contains("hidden"), "{error}");
        }
    }
}
