//! What the service knows, and what it is asked: pools of a hundred keys, each with a connection and a plan of two
//! dimensions that never bind.

use tokio::runtime;

use crate::{
    Failure,
    pb::{
        self, dimension::Unit, plan_admin_client::PlanAdminClient, pool_admin_client::PoolAdminClient,
        quota_share_client::QuotaShareClient,
    },
    target::Target,
};

const KEYS_PER_POOL: usize = 100;
const LIMIT: f64 = 1e15;
const DIMENSIONS: [(Unit, &str); 2] = [(Unit::Requests, "hourly"), (Unit::Tokens, "5h")];

pub(crate) fn pools(keys: usize) -> usize {
    keys.div_ceil(KEYS_PER_POOL)
}

fn connection(pool: usize) -> String {
    format!("connection-{pool:04}")
}

fn key(key: usize) -> String {
    format!("key-{key:06}")
}

/// Makes all pools, and has every key record something.
pub(crate) fn fill(service: &Target, keys: usize) -> Result<(), Failure> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let address = format!("http://{}", service.address());
        let channel = tonic::transport::Endpoint::from_shared(address)?.connect().await?;
        for index in 0..pools(keys) {
            PlanAdminClient::new(channel.clone()).put_plan(plan(index)).await?;
            PoolAdminClient::new(channel.clone()).create_pool(pool(index)).await?;
        }
        let mut records = tokio::task::JoinSet::new();
        for key in 0..keys {
            let mut client = QuotaShareClient::new(channel.clone());
            records.spawn(async move { client.record_consumption(record(key, String::new())).await });
            if records.len() >= 256 {
                records.join_next().await.transpose()?.transpose()?;
            }
        }
        while let Some(recorded) = records.join_next().await {
            recorded??;
        }
        Ok(())
    })
}

fn plan(pool: usize) -> pb::PutPlanRequest {
    let dimensions = DIMENSIONS.map(|(unit, window)| pb::Dimension {
        unit: unit.into(),
        window: window.to_owned(),
        limit: Some(LIMIT),
    });
    let plan =
        pb::Plan { connection_id: connection(pool), dimensions: dimensions.into(), ..pb::Plan::default() };
    pb::PutPlanRequest { plan: Some(plan) }
}

fn pool(index: usize) -> pb::CreatePoolRequest {
    let keys = index * KEYS_PER_POOL..(index + 1) * KEYS_PER_POOL;
    let allocations = keys.map(|number| pb::Allocation {
        api_key_id: key(number),
        weight: 1.0,
        ..pb::Allocation::default()
    });
    let pool = pb::Pool {
        pool_id: format!("pool-{index:04}"),
        name: format!("Pool {index}"),
        connection_ids: vec![connection(index)],
        allocations: allocations.collect(),
        ..pb::Pool::default()
    };
    pb::CreatePoolRequest { pool: Some(pool) }
}

fn cost() -> Option<pb::Cost> {
    Some(pb::Cost { tokens: Some(1_234), ..pb::Cost::default() })
}

pub(crate) fn check(number: usize) -> pb::EnforceRequest {
    pb::EnforceRequest {
        api_key_id: key(number),
        connection_id: connection(number / KEYS_PER_POOL),
        model: "model-large".to_owned(),
        estimated_cost: cost(),
        ..pb::EnforceRequest::default()
    }
}

pub(crate) fn reserve(number: usize, request_id: String) -> pb::EnforceRequest {
    let reserve_for = Some(prost_types::Duration { seconds: 60, nanos: 0 });
    pb::EnforceRequest { reserve_for, request_id, ..check(number) }
}

pub(crate) fn record(number: usize, idempotency_key: String) -> pb::RecordConsumptionRequest {
    pb::RecordConsumptionRequest {
        api_key_id: key(number),
        connection_id: connection(number / KEYS_PER_POOL),
        model: "model-large".to_owned(),
        cost: cost(),
        idempotency_key,
        ..pb::RecordConsumptionRequest::default()
    }
}

/// What a check is answered, by the service as by an echo.
pub(crate) fn answer() -> pb::EnforceResponse {
    let dimensions = DIMENSIONS.map(|(unit, window)| pb::DimensionStatus {
        unit: unit.into(),
        window: window.to_owned(),
        limit: Some(LIMIT),
        fair_share: Some(LIMIT / 100.0),
        key_consumed: 1_234.5,
        pool_consumed: 123_450.5,
        used_fraction: Some(1.234e-10),
        mode: pb::dimension_status::Mode::Generous.into(),
        key_remaining: Some(LIMIT - 123_450.5),
        estimate: 1_234.0,
        reason: pb::dimension_status::Reason::Ok.into(),
        ..pb::DimensionStatus::default()
    });
    pb::EnforceResponse {
        decision: pb::enforce_response::Decision::Allow.into(),
        reason: pb::dimension_status::Reason::Ok.into(),
        score_factor: 1.0,
        pool_id: "pool-0001".to_owned(),
        dimensions: dimensions.into(),
        config_revision: 2_000,
        ..pb::EnforceResponse::default()
    }
}
