//! Policy turned into data: what one request would use, counter by counter, and up to which bounds.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{
    directory::PoolEntry,
    ids::{ApiKeyId, ConnectionId, Model, PoolRevision},
    plan::{Dimension, DimensionKey},
    pool::{Allocation, Enforcement, Policy, Pool},
    units::{Amount, Cost},
};

/// Most pools have at most this many dimensions; more go to the heap.
pub const DIMENSIONS_INLINE: usize = 2;

/// A list with one entry for each check.
pub type PerCheck<T> = SmallVec<[T; DIMENSIONS_INLINE]>;

/// Names a counter of a key within its pool: a dimension of the plan or, with a model, a model cap.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CounterKey {
    /// What is counted, in which window.
    pub dimension: DimensionKey,
    /// Of a model cap.
    pub model: Option<Model>,
}

/// Checks that pass together or not at all.
///
/// Drivers whose counters are elsewhere send it there in the order of its fields.
#[derive(Clone, Debug, Serialize)]
pub struct Charge {
    /// The life of the pool whose counters are meant.
    pub pool: PoolRevision,
    /// Who asks.
    pub api_key: ApiKeyId,
    /// The pool's connections.
    pub connections: Arc<[ConnectionId]>,
    /// Which of them is to serve the request.
    pub serving: ConnectionId,
    /// What holds for every check.
    pub terms: Terms,
    /// The plan's dimensions in its order, then the model caps that apply.
    pub checks: PerCheck<Check>,
    /// Hold the estimate whatever the verdict: the request will be sent all the same.
    pub shadow: bool,
}

/// The part of the policy that holds for every check of a charge.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Terms {
    /// What happens past the fair share in strict mode.
    pub policy: Policy,
    /// Counted, never limited.
    pub exempt: bool,
    /// Fraction of the limit from which the pool is in strict mode.
    pub threshold: f64,
}

/// One counter, what would be added to it, and the bounds that it must keep to.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Which counter.
    pub counter: CounterKey,
    /// What the request is expected to use.
    pub estimate: Amount,
    /// How far the counter may go.
    pub bounds: Bounds,
}

/// Bounds in steps of the check's unit, as doubles, not rounded. `None`: no such bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Bounds {
    /// P: the plan's limit of one connection.
    pub per_connection: Option<f64>,
    /// L: what the pool may use.
    pub limit: Option<f64>,
    /// The key's absolute cap, or the model cap's value.
    pub cap: Option<f64>,
    /// F: the key's fair share of the limit.
    pub fair_share: Option<f64>,
    /// What the owner may use outside, of all connections together; not counted as external use.
    pub owner_reserve: f64,
}

impl Bounds {
    /// What holds for every key of `pool`.
    pub fn of_pool(pool: &Pool, dimension: &Dimension) -> Bounds {
        let per_connection = dimension.limit_steps();
        Bounds {
            per_connection,
            limit: per_connection.map(|per_connection| pool.limit(per_connection)),
            owner_reserve: per_connection
                .map_or(0.0, |per_connection| pool.reserved_for_owner(per_connection)),
            ..Bounds::default()
        }
    }
}

impl Charge {
    /// What a request by `allocation`'s key for `model` is held to in `entry`'s pool.
    ///
    /// `default_threshold` applies where the pool has none of its own.
    pub fn new(
        entry: &PoolEntry,
        allocation: &Allocation,
        serving: &ConnectionId,
        model: Option<&Model>,
        estimate: &Cost,
        default_threshold: f64,
    ) -> Charge {
        let pool = &entry.pool;
        let plan_checks = entry.dimensions().iter().map(|dimension| {
            let of_pool = Bounds::of_pool(pool, dimension);
            Check {
                counter: CounterKey { dimension: dimension.key, model: None },
                estimate: estimate.of(dimension.key.unit),
                bounds: Bounds {
                    cap: allocation.cap.as_ref().and_then(|cap| cap.on(dimension.key)),
                    fair_share: of_pool.limit.and_then(|limit| pool.fair_share(allocation, limit)),
                    ..of_pool
                },
            }
        });
        let model_checks = model_caps_for(allocation, model).map(|cap| {
            let unit = cap.key.dimension.unit;
            Check {
                counter: CounterKey { dimension: cap.key.dimension, model: Some(cap.key.model.clone()) },
                estimate: estimate.of(unit),
                bounds: Bounds { cap: Some(unit.to_steps(cap.value)), ..Bounds::default() },
            }
        });
        Charge {
            pool: entry.history.created_revision,
            api_key: allocation.api_key.clone(),
            connections: Arc::clone(&pool.connections),
            serving: serving.clone(),
            terms: Terms {
                policy: allocation.policy,
                exempt: allocation.exempt,
                threshold: pool.saturation_threshold.unwrap_or(default_threshold),
            },
            checks: plan_checks.chain(model_checks).collect(),
            shadow: pool.enforcement == Enforcement::Shadow,
        }
    }
}

/// Which counters a request that cost `cost` adds to, and how much: the dimensions of the pool's plan and, for a key
/// that is in the pool, its caps for `model`.
pub fn counts(
    entry: &PoolEntry,
    allocation: Option<&Allocation>,
    model: Option<&Model>,
    cost: &Cost,
) -> PerCheck<(CounterKey, Amount)> {
    let dimensions = entry.dimensions().iter().map(|dimension| (dimension.key, None));
    let caps = allocation.into_iter().flat_map(|allocation| model_caps_for(allocation, model));
    let models = caps.map(|cap| (cap.key.dimension, Some(cap.key.model.clone())));
    dimensions
        .chain(models)
        .map(|(dimension, model)| (CounterKey { dimension, model }, cost.of(dimension.unit)))
        .collect()
}

fn model_caps_for<'a>(
    allocation: &'a Allocation,
    model: Option<&'a Model>,
) -> impl Iterator<Item = &'a super::pool::ModelCap> {
    allocation.model_caps.iter().filter(move |cap| Some(&cap.key.model) == model)
}
