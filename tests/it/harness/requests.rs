//! Pools, plans, costs and calls, as terse as a table's row.

use std::time::Duration;

use super::pb::{
    self,
    allocation::Policy,
    dimension::Unit,
    pool::{Enforcement, FailureMode},
};

/// A pool that is named after its id and has no provider, so that its plan is the one that is put.
pub(crate) fn pool(
    id: &str,
    connections: impl IntoIterator<Item = &'static str>,
    allocations: impl Into<Vec<pb::Allocation>>,
) -> pb::Pool {
    pb::Pool {
        pool_id: id.to_owned(),
        name: id.to_owned(),
        connection_ids: connections.into_iter().map(str::to_owned).collect(),
        allocations: allocations.into(),
        enforcement: Enforcement::Enforce.into(),
        failure_mode: FailureMode::FailOpen.into(),
        ..Default::default()
    }
}

impl pb::Pool {
    /// With the plan that the catalogue has for `provider`.
    pub(crate) fn with_provider(self, provider: &str) -> Self {
        Self { provider: provider.to_owned(), ..self }
    }

    /// Decides, counts and shows, and allows everything.
    pub(crate) fn in_shadow(self) -> Self {
        Self { enforcement: Enforcement::Shadow.into(), ..self }
    }

    pub(crate) fn with_connections(self, connections: impl IntoIterator<Item = &'static str>) -> Self {
        Self { connection_ids: connections.into_iter().map(str::to_owned).collect(), ..self }
    }
}

pub(crate) fn hard(key: &str, weight: f64) -> pb::Allocation {
    allocation(key, weight, Policy::Hard)
}

pub(crate) fn soft(key: &str, weight: f64) -> pb::Allocation {
    allocation(key, weight, Policy::Soft)
}

pub(crate) fn burst(key: &str, weight: f64) -> pb::Allocation {
    allocation(key, weight, Policy::Burst)
}

/// A key that is counted and never limited.
pub(crate) fn exempt(key: &str) -> pb::Allocation {
    pb::Allocation { exempt: true, ..hard(key, 0.0) }
}

fn allocation(key: &str, weight: f64, policy: Policy) -> pb::Allocation {
    pb::Allocation { api_key_id: key.to_owned(), weight, policy: policy.into(), ..Default::default() }
}

impl pb::Allocation {
    /// Capped in every dimension of `unit`.
    pub(crate) fn capped(self, value: f64, unit: Unit) -> Self {
        Self { cap: Some(pb::Cap { value, unit: unit.into(), window: String::new() }), ..self }
    }

    /// Capped for one model, in a dimension such as `tokens/hourly`.
    pub(crate) fn capped_for(mut self, model: &str, name: &str, value: f64) -> Self {
        let pb::Dimension { unit, window, .. } = unlimited(name);
        self.model_caps.push(pb::ModelCap { model: model.to_owned(), value, unit, window });
        self
    }
}

/// A dimension by its name, such as `tokens/daily`, with its limit for each connection.
pub(crate) fn dimension(name: &str, limit: f64) -> pb::Dimension {
    pb::Dimension { limit: Some(limit), ..unlimited(name) }
}

/// A dimension whose limit is not known.
pub(crate) fn unlimited(name: &str) -> pb::Dimension {
    let (unit, window) = name.split_once('/').expect("a unit and a window");
    let unit = Unit::from_str_name(&unit.to_uppercase()).expect("a unit");
    pb::Dimension { unit: unit.into(), window: window.to_owned(), limit: None }
}

impl pb::PutPlanRequest {
    pub(crate) fn of(connection: &str, dimensions: impl Into<Vec<pb::Dimension>>) -> Self {
        let plan = pb::Plan {
            connection_id: connection.to_owned(),
            dimensions: dimensions.into(),
            ..Default::default()
        };
        Self { plan: Some(plan) }
    }
}

/// A cost in requests alone.
pub(crate) fn requests(requests: i64) -> pb::Cost {
    pb::Cost { requests: Some(requests), ..Default::default() }
}

/// A cost in tokens, of one request.
pub(crate) fn tokens(tokens: i64) -> pb::Cost {
    pb::Cost { tokens: Some(tokens), ..Default::default() }
}

/// A cost in dollars, of one request.
pub(crate) fn usd(usd: f64) -> pb::Cost {
    pb::Cost { usd: Some(usd), ..Default::default() }
}

/// A cost in per cent of the provider's plan, of one request.
pub(crate) fn percent(percent: f64) -> pb::Cost {
    pb::Cost { percent: Some(percent), ..Default::default() }
}

pub(crate) fn cost(requests: i64, tokens: i64) -> pb::Cost {
    pb::Cost { requests: Some(requests), tokens: Some(tokens), ..Default::default() }
}

/// May `key` use `connection`? For a cost of `estimate`, or for one request.
pub(crate) fn ask(key: &str, connection: &str, estimate: impl Into<Option<pb::Cost>>) -> pb::EnforceRequest {
    pb::EnforceRequest {
        api_key_id: key.to_owned(),
        connection_id: connection.to_owned(),
        estimated_cost: estimate.into(),
        ..Default::default()
    }
}

impl pb::EnforceRequest {
    /// And if so, the estimate is held for `life`.
    pub(crate) fn holding(self, life: Duration) -> Self {
        Self { reserve_for: Some(life.try_into().expect("a short life")), ..self }
    }

    /// As the attempt of this name, which holds once however often it is sent.
    pub(crate) fn named(self, request_id: &str) -> Self {
        Self { request_id: request_id.to_owned(), ..self }
    }

    pub(crate) fn with_model(self, model: &str) -> Self {
        Self { model: model.to_owned(), ..self }
    }
}

/// `key` used `connection`, and it cost `cost`.
pub(crate) fn spent(
    key: &str,
    connection: &str,
    cost: impl Into<Option<pb::Cost>>,
) -> pb::RecordConsumptionRequest {
    pb::RecordConsumptionRequest {
        api_key_id: key.to_owned(),
        connection_id: connection.to_owned(),
        cost: cost.into(),
        ..Default::default()
    }
}

impl pb::RecordConsumptionRequest {
    /// What was held for it is given back.
    pub(crate) fn settling(self, reservation: &str) -> Self {
        Self { reservation_id: reservation.to_owned(), ..self }
    }

    /// Counted once however often it is sent under this key.
    pub(crate) fn once(self, idempotency_key: &str) -> Self {
        Self { idempotency_key: idempotency_key.to_owned(), ..self }
    }

    pub(crate) fn with_model(self, model: &str) -> Self {
        Self { model: model.to_owned(), ..self }
    }
}
