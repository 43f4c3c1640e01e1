//! The pools that callers use, and what each promises.

use crate::harness::{Client, burst, dimension, pb, pb::pool::FailureMode, pool};

/// A window so long that nothing ages out during a run, as long as its bucket does not end: it does every 366 days.
pub(crate) const TOKENS: &str = "tokens/366d";
pub(crate) const REQUESTS: &str = "requests/366d";
pub(crate) const USD: &str = "usd/366d";

/// What a connection has of everything, where it has enough.
const PLENTY: f64 = 9e15;
const PLENTY_USD: f64 = 9e6;

/// What is tried with a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It has room for everything.
    Roomy,
    /// It has room for so many tokens: its callers wait for each other.
    Tight(u32),
}

/// A pool as callers know it.
#[derive(Clone, Debug)]
pub(crate) struct SharedPool {
    pub(crate) id: String,
    pub(crate) connections: Vec<String>,
    pub(crate) kind: Kind,
    pub(crate) failure_mode: FailureMode,
}

impl SharedPool {
    pub(crate) fn new(id: &str, kind: Kind, failure_mode: FailureMode) -> Self {
        let connections = (1..=2).map(|n| format!("{id}-{n}")).collect();
        Self { id: id.to_owned(), connections, kind, failure_mode }
    }

    /// One with room for each way to fail.
    pub(crate) fn roomy() -> Vec<Self> {
        use FailureMode::{FailClosed, FailLocal, FailOpen};
        [("open", FailOpen), ("closed", FailClosed), ("local", FailLocal)]
            .map(|(id, mode)| Self::new(id, Kind::Roomy, mode))
            .into()
    }

    /// Some without, to be used one after the other: each is full of what was recorded after a while.
    pub(crate) fn tight(count: u64) -> Vec<Self> {
        let pool = |n| Self::new(&format!("tight-{n:03}"), Kind::Tight(1_000), FailureMode::FailClosed);
        (0..count).map(pool).collect()
    }

    /// The dimensions in which it is counted.
    pub(crate) fn dimensions(&self) -> &'static [&'static str] {
        match self.kind {
            Kind::Roomy => &[TOKENS, REQUESTS, USD],
            Kind::Tight(_) => &[TOKENS],
        }
    }

    /// Creates it for so many callers, each of whom has a key.
    pub(crate) async fn create(&self, client: &Client, callers: usize) {
        let plan = match self.kind {
            Kind::Roomy => {
                vec![dimension(TOKENS, PLENTY), dimension(REQUESTS, PLENTY), dimension(USD, PLENTY_USD)]
            }
            // The plan is for each connection.
            Kind::Tight(limit) => {
                vec![dimension(TOKENS, f64::from(limit) / self.connections.len() as f64)]
            }
        };
        client.put_plan(&self.connections[0], plan).await;
        let weight = 100.0 / callers as f64;
        let allocations: Vec<_> = (0..callers).map(|caller| burst(&key_of(caller), weight)).collect();
        let connection_ids = self.connections.clone();
        let pool = pb::Pool { connection_ids, ..pool(&self.id, [], allocations) };
        client.create(pool.failing(self.failure_mode)).await;
    }
}

/// The key of one caller: what is wrong with its sums is due to its calls.
pub(crate) fn key_of(caller: usize) -> String {
    format!("key-{caller:03}")
}
