//! Pools of many keys, for benches that need no server: each pool has a connection and a plan of two dimensions that
//! never binds.

use quota_share::core::{
    charge::{Charge, counts},
    directory::{Change, Directory},
    ids::{ApiKeyId, CallId, ConnectionId, Fingerprint, PoolRevision},
    ledger::Consumption,
    plan::{DimensionSpec, PlanSpec},
    pool::{AllocationSpec, PoolSpec},
    units::{Amount, Cost, Timestamp},
};

/// When everything was made.
pub(crate) const NOW: Timestamp = Timestamp::from_unix_ms(1_782_864_000_000);
/// Of each pool's plan.
pub(crate) const DIMENSIONS: [(&str, &str); 2] = [("requests", "hourly"), ("tokens", "5h")];

/// How much there is.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) pools: usize,
    /// In each pool.
    pub(crate) keys: usize,
}

/// Who may ask.
pub(crate) type Asker = (ApiKeyId, ConnectionId);

/// Pools and those who may ask them.
pub(crate) struct World {
    pub(crate) directory: Directory,
    pub(crate) askers: Vec<Asker>,
    estimate: Cost,
}

impl World {
    pub(crate) fn new(size: Size) -> Self {
        let mut directory = Directory::default();
        let mut askers = Vec::new();
        for pool in 0..size.pools {
            let (plan, spec) = specs(pool, size.keys);
            for change in [Change::PutPlan { spec: plan, revision: 0 }, Change::CreatePool(spec)] {
                let applied = directory.apply(change, NOW).expect("the change is valid");
                directory = applied.expect("something changes").next;
            }
            askers.extend((0..size.keys).map(|key| asker(pool, key)));
        }
        let (requests, tokens) = (Amount::saturating(1), Amount::saturating(1_234));
        Self { directory, askers, estimate: Cost { requests, tokens, ..Cost::default() } }
    }

    /// The `n`th who asks: every key comes by, neighbours far apart.
    pub(crate) fn nth(&self, n: usize) -> &Asker {
        &self.askers[n.wrapping_mul(48_271) % self.askers.len()]
    }

    pub(crate) fn charge(&self, (api_key, connection): &Asker) -> Charge {
        let (entry, allocation) = self.directory.find(api_key, connection).expect("the key is in the pool");
        Charge::new(entry, allocation, connection, None, &self.estimate, 0.5)
    }

    /// What `asker` is to be counted, once if it is named.
    pub(crate) fn consumption(
        &self,
        (api_key, connection): &Asker,
        idempotency_key: Option<&str>,
    ) -> (PoolRevision, Consumption) {
        let (entry, allocation) = self.directory.find(api_key, connection).expect("the key is in the pool");
        let consumption = Consumption {
            api_key: api_key.clone(),
            connection: Some(connection.clone()),
            cost: self.estimate,
            observations: Vec::new(),
            counts: counts(entry, Some(allocation), None, &self.estimate),
            reservation: None,
            idempotency: idempotency_key.map(|key| CallId::of_idempotency_key(connection, key)),
            fingerprint: self.fingerprint(api_key),
            id_life_ms: 600_000,
            recorded_at: None,
        };
        (entry.history.created_revision, consumption)
    }

    pub(crate) fn fingerprint(&self, api_key: &ApiKeyId) -> Fingerprint {
        Fingerprint::of(api_key, "", &self.estimate)
    }
}

fn asker(pool: usize, key: usize) -> Asker {
    let api_key = ApiKeyId::parse("key", &key_name(pool, key)).expect("a valid key");
    (api_key, ConnectionId::parse("connection", &connection_name(pool)).expect("a valid connection"))
}

fn key_name(pool: usize, key: usize) -> String {
    format!("key-{pool:04}-{key:05}")
}

fn connection_name(pool: usize) -> String {
    format!("connection-{pool:04}")
}

fn specs(pool: usize, keys: usize) -> (PlanSpec, PoolSpec) {
    let dimensions = DIMENSIONS.map(|(unit, window)| DimensionSpec {
        unit: unit.to_owned(),
        window: window.to_owned(),
        limit: Some(1e15),
        ..DimensionSpec::default()
    });
    let plan = PlanSpec {
        unknown: Default::default(),
        connection_id: connection_name(pool),
        provider: String::new(),
        dimensions: dimensions.into(),
    };
    let allocations = (0..keys).map(|key| AllocationSpec {
        api_key_id: key_name(pool, key),
        weight: 100.0 / keys as f64,
        ..AllocationSpec::default()
    });
    let pool = PoolSpec {
        pool_id: format!("pool-{pool:04}"),
        name: format!("Pool {pool}"),
        connection_ids: vec![connection_name(pool)],
        allocations: allocations.collect(),
        ..PoolSpec::default()
    };
    (plan, pool)
}
