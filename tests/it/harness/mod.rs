//! The real service in a test's hands: servers of its own, terse calls, and answers that are checked as they are read.
//!
//! | file         | what a test finds there                                                          |
//! |--------------|----------------------------------------------------------------------------------|
//! | `server`     | [`TestServer`]: the service in this process, with a clock that the test moves    |
//! | `process`    | [`TestProcess`]: the binary with the machine's clock, to be killed and restarted |
//! | `redis`      | [`TestRedis`], [`TestCluster`]: Redis servers, to be paused, killed, restarted   |
//! | `replica`    | [`TestReplica`]: the binary on a Redis, at addresses that it comes back to       |
//! | `pairs`      | [`TestPairs`]: Redis servers that take over from each other                      |
//! | `proxy`      | [`Proxy`]: a connection that is slow, cut, hung, or loses answers, at will       |
//! | `ports`      | ports for what has to come back on the same one                                  |
//! | `client`     | [`Client`]: one connection; a call is one line, a refusal is a panic             |
//! | `frames`     | [`Frames`]: HTTP/2 by hand                                                       |
//! | `raw`        | [`call_raw`]: any method, with any bytes and token                               |
//! | `requests`   | pools, plans, costs and calls, as terse as a table's row                         |
//! | `tokens`     | [`Token`], [`TokensFile`]: who may call                                          |
//! | `certificates` | [`TestCa`]: issuers of certificates, and connections with them                 |
//! | `answers`    | [`Verdict`], [`Refusal`] and look-ups in usage                                   |

mod answers;
mod certificates;
mod client;
mod frames;
mod pairs;
mod ports;
mod process;
mod proxy;
mod raw;
mod redis;
mod replica;
mod requests;
mod server;
mod tokens;

pub(crate) use answers::{Refusal, Verdict, blocked, millis, refusal, unix_ms};
pub(crate) use certificates::{Issued, PemFiles, TestCa, connect_tls, text};
pub(crate) use client::{Client, UNREACHABLE, told};
pub(crate) use frames::Frames;
pub(crate) use pairs::TestPairs;
pub(crate) use process::{Ended, PATIENCE, TestProcess, end_of, failed_start, run};
pub(crate) use proxy::Proxy;
pub(crate) use raw::{call_raw, hang_raw, paths_of};
pub(crate) use redis::{TestCluster, TestRedis, redis_is_missing};
pub(crate) use replica::TestReplica;
pub(crate) use requests::{
    ask, burst, codex, cost, dimension, exempt, hard, percent, pool, requests, said, soft, spent, tokens,
    unlimited, usd,
};
pub(crate) use server::{T0, TestServer};
pub(crate) use tokens::{Token, TokensFile};

/// The contract as a client sees it: generated again, since the library keeps its wire types to itself.
#[allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    missing_debug_implementations,
    clippy::all,
    clippy::unwrap_used
)]
pub(crate) mod pb {
    include!(concat!(env!("OUT_DIR"), "/quotashare.v1.rs"));
}
