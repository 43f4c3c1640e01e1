//! Pools, plans, costs and calls, as terse as a table's row.

use std::{collections::HashMap, time::Duration};

use super::{
    T0,
    pb::{
        self,
        allocation::Policy,
        dimension::Unit,
        pool::{Enforcement, FailureMode},
    },
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

    /// Answers so where the shared counters cannot be reached.
    pub(crate) fn failing(self, mode: FailureMode) -> Self {
        Self { failure_mode: mode.into(), ..self }
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

/// What a provider says of a dimension such as `percent/5h`: so many per cent of its limit are used.
pub(crate) fn said(name: &str, used_percent: f64) -> pb::Utilization {
    let pb::Dimension { unit, window, .. } = dimension(name, 0.0);
    let used = Some(pb::utilization::Used::UsedPercent(used_percent));
    pb::Utilization { unit, window, used, ..Default::default() }
}

impl pb::Utilization {
    /// The window ends `ms` milliseconds after [`T0`].
    pub(crate) fn until(self, ms: u64) -> Self {
        Self { resets_at: Some(after_t0(ms)), ..self }
    }

    /// It was true `ms` milliseconds after [`T0`].
    pub(crate) fn observed(self, ms: u64) -> Self {
        Self { observed_at: Some(after_t0(ms)), ..self }
    }
}

fn after_t0(ms: u64) -> prost_types::Timestamp {
    let ms = T0.plus_ms(ms).unix_ms();
    prost_types::Timestamp { seconds: (ms / 1_000) as i64, nanos: (ms % 1_000 * 1_000_000) as i32 }
}

/// The headers of a Codex response: per cent used of a window of 300 or 10080 minutes, and the seconds until it ends.
pub(crate) fn codex(minutes: u32, used_percent: f64, ends_in_s: u64) -> HashMap<String, String> {
    let header = |part: &str, value: String| (format!("x-codex-primary-{part}"), value);
    HashMap::from([
        header("used-percent", used_percent.to_string()),
        header("window-minutes", minutes.to_string()),
        header("reset-after-seconds", ends_in_s.to_string()),
    ])
}

impl pb::RecordConsumptionRequest {
    /// It came with these headers, so many seconds ago.
    pub(crate) fn with_headers(self, provider_headers: HashMap<String, String>, age_s: i64) -> Self {
        let headers_age = Some(prost_types::Duration { seconds: age_s, nanos: 0 });
        Self { provider_headers, headers_age, ..self }
    }

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
