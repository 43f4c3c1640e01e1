//! Keys that share one account: what the service is told of them, and how each request is asked and settled.

use std::time::Duration;

use rand::{
    SeedableRng,
    distr::{Distribution, weighted::WeightedIndex},
    rngs::StdRng,
};

use super::{
    pb::{self, allocation::Policy, dimension::Unit},
    trace::Request,
};

/// How long a reservation may last; every request is answered within it.
const RESERVE_SECONDS: i64 = 300;

/// Who sends the requests of a trace, which does not say it.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Demand {
    /// The keys in turn.
    RoundRobin,
    /// Any key, by chance.
    Uniform,
    /// By chance, the second key half as often as the first, the third a third as often, and so on.
    Zipf,
}

impl Demand {
    /// For each request the index of its key, the same for the same seed.
    pub(crate) fn assign(self, requests: usize, keys: usize, seed: u64) -> Vec<usize> {
        let chances: Vec<f64> = match self {
            Self::RoundRobin => return (0..requests).map(|request| request % keys).collect(),
            Self::Uniform => vec![1.0; keys],
            Self::Zipf => (1..=keys).map(|rank| 1.0 / rank as f64).collect(),
        };
        let chances = WeightedIndex::new(chances).expect("there are keys, and each has a chance");
        chances.sample_iter(StdRng::seed_from_u64(seed)).take(requests).collect()
    }
}

/// One key and its part of the pool.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    pub(crate) name: String,
    /// In per cent.
    pub(crate) weight: f64,
    pub(crate) policy: Policy,
}

/// A pool of keys on one connection, with a limit of tokens in a window.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// Of the pool and of its connection.
    pub(crate) id: String,
    pub(crate) keys: Vec<Key>,
    pub(crate) limit: u64,
    pub(crate) window: Duration,
}

/// How many windows a replay of this length has. A sliding window that is empty admits its whole limit at once, so the first
/// counts in full however short the replay is; it must begin at the edge of a bucket.
pub(crate) fn windows(length: Duration, window: Duration) -> f64 {
    length.div_duration_f64(window).max(1.0)
}

impl Setting {
    pub(crate) fn plan(&self) -> pb::PutPlanRequest {
        let dimension = pb::Dimension {
            unit: Unit::Tokens.into(),
            window: format!("{}s", self.window.as_secs()),
            limit: Some(self.limit as f64),
        };
        let plan =
            pb::Plan { connection_id: self.id.clone(), dimensions: vec![dimension], ..Default::default() };
        pb::PutPlanRequest { plan: Some(plan) }
    }

    pub(crate) fn pool(&self) -> pb::CreatePoolRequest {
        let allocation = |key: &Key| pb::Allocation {
            api_key_id: key.name.clone(),
            weight: key.weight,
            policy: key.policy.into(),
            ..Default::default()
        };
        let pool = pb::Pool {
            pool_id: self.id.clone(),
            name: "A replay".to_owned(),
            connection_ids: vec![self.id.clone()],
            allocations: self.keys.iter().map(allocation).collect(),
            ..Default::default()
        };
        pb::CreatePoolRequest { pool: Some(pool) }
    }

    pub(crate) fn ask(&self, key: usize, request: &Request) -> pb::EnforceRequest {
        pb::EnforceRequest {
            api_key_id: self.keys[key].name.clone(),
            connection_id: self.id.clone(),
            estimated_cost: Some(tokens(request.estimate())),
            reserve_for: Some(prost_types::Duration { seconds: RESERVE_SECONDS, nanos: 0 }),
            ..Default::default()
        }
    }

    pub(crate) fn settle(
        &self,
        key: usize,
        request: &Request,
        reservation_id: String,
    ) -> pb::RecordConsumptionRequest {
        pb::RecordConsumptionRequest {
            api_key_id: self.keys[key].name.clone(),
            connection_id: self.id.clone(),
            cost: Some(tokens(request.cost())),
            reservation_id,
            ..Default::default()
        }
    }
}

fn tokens(tokens: u64) -> pb::Cost {
    let tokens = i64::try_from(tokens).expect("a request has fewer tokens");
    pb::Cost { tokens: Some(tokens), ..Default::default() }
}
