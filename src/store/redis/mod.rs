//! Counters in a Redis that replicas share: one script decides, holds and counts, by Redis' clock.
//!
//! What was acknowledged is as durable as that Redis is configured to be. `lua/` is the script, the twin of
//! [`PoolLedger`](crate::core::ledger::PoolLedger); everything else brings calls to it, once each, and answers back.

mod batches;
mod client;
mod health;
mod keys;
mod ledger;
mod reads;
mod stored;
mod watch;
mod wire;

use std::{fmt, sync::Arc, time::Duration};

use fred::types::config::Config;

pub use ledger::RedisLedger;

use crate::clock::Clock;

const STORE: &str = "Redis";

/// Where a Redis is, and how to enter: a URL as fred reads it. It may carry a password and is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl(String);

impl RedisUrl {
    /// The URL in `text`.
    ///
    /// # Errors
    /// Says what is accepted; nothing of `text` is in it.
    pub fn parse(text: &str) -> Result<Self, InvalidRedisUrl> {
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
#[error(
    "use redis://[[user]:password@]host[:port][/database], redis-cluster://, redis-sentinel:// or redis+unix:///path, or with \
     TLS rediss://, rediss-cluster:// or rediss-sentinel://"
)]
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
}
