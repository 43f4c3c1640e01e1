//! A replica of several: the binary on a Redis, at addresses to which it comes back.

use std::{net::SocketAddr, path::Path};

use futures::future::join_all;
use nix::sys::signal::Signal;

use super::{Client, TestProcess, client::page, ports};

/// A process as [`TestProcess`], whose addresses, settings and data outlive it. Killed with the value.
#[derive(Debug)]
pub(crate) struct TestReplica {
    process: TestProcess,
    address: SocketAddr,
    http_address: SocketAddr,
    vars: Vec<(&'static str, String)>,
    /// Of the processes before this one.
    former_logs: String,
}

impl TestReplica {
    /// A replica with no pools that counts in the Redis at `url`, with `vars` in its environment besides.
    pub(crate) async fn start(url: &str, vars: &[(&'static str, &str)]) -> Self {
        let (address, http_address) = (ports::free().await, ports::free().await);
        let mut vars: Vec<_> = vars.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        vars.extend([
            ("QUOTA_LISTEN", address.to_string()),
            ("QUOTA_HTTP_LISTEN", http_address.to_string()),
            ("QUOTA_STORE_DRIVER", "redis".to_owned()),
            ("QUOTA_STORE_REDIS_URL", url.to_owned()),
        ]);
        let process = TestProcess::start_with(&borrowed(&vars)).await;
        Self { process, address, http_address, vars, former_logs: String::new() }
    }

    /// Replicas that share a configuration, each at its URL of one Redis, with what `configure` writes through the first.
    /// They start one after the other, as otherwise each might take itself for the first one there.
    pub(crate) async fn start_team(
        urls: &[String],
        timeout_ms: &str,
        configure: impl AsyncFnOnce(&Client),
    ) -> Vec<Self> {
        let vars = [("QUOTA_STORE_TIMEOUT_MS", timeout_ms)];
        let first = Self::start(&urls[0], &vars).await;
        configure(&first.client()).await;
        let others = join_all(urls[1..].iter().map(|url| Self::start(url, &vars))).await;
        let team: Vec<_> = [first].into_iter().chain(others).collect();
        for replica in &team {
            replica.client().until_it_follows(&team[0].client()).await;
            replica.client().until_counters_are_in_reach().await;
        }
        team
    }

    /// A connection of one's own, which comes back with the replica.
    pub(crate) fn client(&self) -> Client {
        Client::lazy(self.address)
    }

    pub(crate) fn data_dir(&self) -> &Path {
        self.process.data_dir()
    }

    /// SIGKILL, and waits until the process is gone.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// SIGTERM, and waits until the process has ended, which it does well.
    pub(crate) async fn stop(&mut self) {
        let (code, _) = self.process.end_with(Signal::SIGTERM).await;
        assert_eq!(code, Some(0), "{}", self.process.log());
    }

    /// Starts a process at the same addresses and on the same data.
    pub(crate) async fn restart(&mut self) {
        self.kill();
        self.former_logs += &self.process.log();
        self.process.restart_with(&borrowed(&self.vars)).await;
    }

    /// What all its processes have logged until now.
    pub(crate) fn log(&self) -> String {
        format!("{}{}", self.former_logs, self.process.log())
    }

    /// The sum of a metric over its labels; 0 where there is none of this name.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let (_, metrics) = page(self.http_address, "/metrics").await;
        let values = metrics.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let is_whole_name = rest.starts_with(['{', ' ']);
            is_whole_name.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        });
        values.sum()
    }

    /// How many records and releases wait in its journal for the shared counters.
    pub(crate) async fn journal_entries(&self) -> u64 {
        let told = self.process.status().await.journal_length.unsigned_abs();
        told.max(self.metric("quota_share_journal_entries").await as u64)
    }
}

fn borrowed<'a>(vars: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a str)> {
    vars.iter().map(|(name, value)| (*name, value.as_str())).collect()
}
