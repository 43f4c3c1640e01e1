//! Requests to domain values. Messages are taken apart by name, so that a field added to the contract fails to compile
//! here.

use std::borrow::Cow;

use super::{convert_signals, pb};
use crate::{
    core::{
        ids::{ApiKeyId, ConnectionId, Faults, InvalidField, Model, parse_text},
        ledger::RESERVE_MS_MAX,
        plan::{DimensionKey, DimensionSpec, PlanSpec, check_provider},
        pool::{AllocationSpec, CapSpec, Enforcement, FailureMode, ModelCapSpec, Policy, Pool, PoolSpec},
        settings::{Secret, SettingsUpdate, StoreDriver},
        units::{Amount, Cost, Unit},
        window::Window,
    },
    service::{EnforceCall, RecordCall, Reserve},
};

pub(super) type Checked<T> = Result<T, Vec<InvalidField>>;

// Of the decision plane.

/// `path` is the request's place in another one, with its dot.
pub(super) fn enforce(path: &str, request: pb::EnforceRequest) -> Checked<EnforceCall> {
    let pb::EnforceRequest {
        api_key_id,
        connection_id,
        provider,
        model,
        estimated_cost,
        reserve_for,
        request_id,
    } = request;
    let mut faults = Faults::default();
    let at = |field: &'static str| match path {
        "" => Cow::Borrowed(field),
        path => Cow::Owned(format!("{path}{field}")),
    };
    let api_key = faults.take(ApiKeyId::parse(&at("api_key_id"), &api_key_id));
    let connection = faults.take(ConnectionId::parse(&at("connection_id"), &connection_id));
    faults.take(check_provider(&at("provider"), &provider));
    let model = optional_model(&at("model"), &model, &mut faults);
    let estimate = cost(&at("estimated_cost"), estimated_cost, &mut faults);
    faults.take(parse_text(&at("request_id"), &request_id, 0..=128));
    let for_ms = reserve_for.and_then(|wire| faults.take(reserve_ms(&at("reserve_for"), &wire)));
    let reserve = for_ms.map(|for_ms| Reserve { for_ms, request_id });
    match (api_key, connection) {
        (Some(api_key), Some(connection)) if faults.is_empty() => {
            Ok(EnforceCall { api_key, connection, model, estimate, reserve })
        }
        _ => Err(faults.into_vec()),
    }
}

pub(super) fn record(request: pb::RecordConsumptionRequest) -> Checked<RecordCall> {
    let pb::RecordConsumptionRequest {
        api_key_id,
        connection_id,
        provider,
        model,
        cost: wire_cost,
        reservation_id,
        idempotency_key,
        provider_headers,
        headers_age,
    } = request;
    let mut faults = Faults::default();
    let api_key = faults.take(ApiKeyId::parse("api_key_id", &api_key_id));
    let connection = faults.take(ConnectionId::parse("connection_id", &connection_id));
    faults.take(check_provider("provider", &provider));
    let model = optional_model("model", &model, &mut faults);
    let cost = cost("cost", wire_cost, &mut faults);
    faults.take(parse_text("reservation_id", &reservation_id, 0..=256));
    faults.take(parse_text("idempotency_key", &idempotency_key, 0..=128));
    let headers = convert_signals::headers(provider_headers, headers_age, &mut faults);
    match (api_key, connection) {
        (Some(api_key), Some(connection)) if faults.is_empty() => {
            Ok(RecordCall { api_key, connection, model, cost, reservation_id, idempotency_key, headers })
        }
        _ => Err(faults.into_vec()),
    }
}

pub(super) fn release(request: pb::ReleaseReservationRequest) -> Checked<(String, Option<ApiKeyId>)> {
    let pb::ReleaseReservationRequest { reservation_id, api_key_id } = request;
    let mut faults = Faults::default();
    faults.take(parse_text("reservation_id", &reservation_id, 1..=256));
    let api_key = optional_key(&api_key_id, &mut faults);
    if faults.is_empty() { Ok((reservation_id, api_key)) } else { Err(faults.into_vec()) }
}

pub(super) fn optional_key(given: &str, faults: &mut Faults) -> Option<ApiKeyId> {
    let given = Some(given).filter(|text| !text.is_empty())?;
    faults.take(ApiKeyId::parse("api_key_id", given))
}

fn optional_model(field: &str, given: &str, faults: &mut Faults) -> Option<Model> {
    let given = Some(given).filter(|text| !text.is_empty())?;
    faults.take(Model::parse(field, given))
}

/// Both or neither.
pub(super) fn optional_dimension(unit: i32, window: &str, faults: &mut Faults) -> Option<DimensionKey> {
    if unit == 0 && window.is_empty() {
        return None;
    }
    let name = unit_name(unit);
    let unit = Unit::from_name(&name);
    if unit.is_none() {
        faults.add("unit", name, "PERCENT, REQUESTS, TOKENS or USD, together with window, or neither");
    }
    let parsed = Window::parse(window);
    if parsed.is_none() {
        faults.add("window", window, &format!("{}, together with unit, or neither", Window::ACCEPTED));
    }
    Some(DimensionKey { unit: unit?, window: parsed? })
}

fn cost(path: &str, wire: Option<pb::Cost>, faults: &mut Faults) -> Cost {
    let pb::Cost { requests, tokens, usd, percent } = wire.unwrap_or_default();
    let mut whole = |field: &str, given: i64| match u64::try_from(given) {
        Ok(steps) if steps <= Amount::MAX.steps() => Amount::saturating(steps),
        _ => {
            faults.add(format!("{path}.{field}"), given, "a whole number from 0 to 9e15");
            Amount::ZERO
        }
    };
    let requests = whole("requests", requests.unwrap_or(1));
    let tokens = whole("tokens", tokens.unwrap_or(0));
    let mut real = |unit: Unit, given: f64| {
        unit.amount(given).unwrap_or_else(|| {
            let accepted = format!("a number from 0 to {}", unit.max_input());
            faults.add(format!("{path}.{unit}"), given, &accepted);
            Amount::ZERO
        })
    };
    let usd = real(Unit::Usd, usd.unwrap_or(0.0));
    let percent = real(Unit::Percent, percent.unwrap_or(0.0));
    Cost { requests, tokens, usd, percent }
}

fn reserve_ms(field: &str, wire: &prost_types::Duration) -> Result<u64, InvalidField> {
    let ms = duration_ms(wire).filter(|ms| (1..=RESERVE_MS_MAX).contains(ms));
    ms.ok_or_else(|| InvalidField::new(field, seconds(wire), "a duration from 0.001s to 3600s"))
}

/// Whole ms, rounded up; `None` if it is negative or not a duration.
pub(super) fn duration_ms(wire: &prost_types::Duration) -> Option<u64> {
    let seconds = u64::try_from(wire.seconds).ok()?;
    let nanos = u64::try_from(wire.nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    seconds.checked_mul(1_000)?.checked_add(nanos.div_ceil(1_000_000))
}

pub(super) fn seconds(wire: &prost_types::Duration) -> String {
    format!("{} s and {} ns", wire.seconds, wire.nanos)
}

// Of administrators.

/// A revision that the caller knows; 0: not checked.
pub(super) fn revision(field: &str, given: i64) -> Result<u64, InvalidField> {
    u64::try_from(given)
        .map_err(|_| InvalidField::new(field, given, "the stored revision, or 0 for no check"))
}

pub(super) fn pool_spec(wire: Option<pb::Pool>) -> Checked<(PoolSpec, u64)> {
    let Some(wire) = wire else { return Err(vec![missing("pool")]) };
    let pb::Pool {
        pool_id,
        name,
        provider,
        connection_ids,
        allocations,
        saturation_threshold,
        enforcement,
        failure_mode,
        owner_reserve,
        group,
        created_at: _,
        updated_at: _,
        revision: given,
    } = wire;
    let mut faults = Faults::default();
    let allocations = allocations.into_iter().enumerate().map(|(index, allocation)| {
        allocation_from(&format!("pool.allocations[{index}]"), allocation, &mut faults)
    });
    let allocations = allocations.collect();
    let revision = faults.take(revision("pool.revision", given));
    let spec = PoolSpec {
        pool_id,
        name,
        provider,
        connection_ids,
        allocations,
        saturation_threshold,
        enforcement: enforcement_from(enforcement, &mut faults),
        failure_mode: failure_mode_from(failure_mode, &mut faults),
        owner_reserve,
        group,
        ..PoolSpec::default()
    };
    let Some(revision) = revision.filter(|_| faults.is_empty()) else {
        // What is wrong with the content is said in the same answer. A pool without an id would be given one.
        let pool_id = if spec.pool_id.is_empty() { "new".to_owned() } else { spec.pool_id.clone() };
        faults.take_all(Pool::check("pool", &PoolSpec { pool_id, ..spec }));
        return Err(faults.into_vec());
    };
    Ok((spec, revision))
}

pub(super) fn allocation_spec(wire: Option<pb::Allocation>) -> Checked<AllocationSpec> {
    let Some(wire) = wire else { return Err(vec![missing("allocation")]) };
    let mut faults = Faults::default();
    let spec = allocation_from("allocation", wire, &mut faults);
    if faults.is_empty() { Ok(spec) } else { Err(faults.into_vec()) }
}

pub(super) fn plan_spec(wire: Option<pb::Plan>) -> Checked<(PlanSpec, u64)> {
    let Some(wire) = wire else { return Err(vec![missing("plan")]) };
    let pb::Plan { connection_id, provider, dimensions, source: _, revision: given } = wire;
    let dimensions = dimensions.into_iter().map(|pb::Dimension { unit, window, limit }| DimensionSpec {
        unit: unit_name(unit),
        window,
        limit,
        ..DimensionSpec::default()
    });
    let spec = PlanSpec { connection_id, provider, dimensions: dimensions.collect(), ..PlanSpec::default() };
    let revision = revision("plan.revision", given).map_err(|fault| vec![fault])?;
    Ok((spec, revision))
}

/// Whether a URL is one is for the service to say.
pub(super) fn settings_update(request: pb::UpdateSettingsRequest) -> Checked<SettingsUpdate> {
    let pb::UpdateSettingsRequest { settings, clear } = request;
    let pb::Settings {
        store_driver,
        redis_url,
        redis_url_configured: _,
        saturation_threshold,
        soft_deprioritize_factor,
        consumption_retention_days,
    } = settings.unwrap_or_default();
    let store_driver = match pb::settings::StoreDriver::try_from(store_driver) {
        Ok(pb::settings::StoreDriver::Unspecified) => None,
        Ok(pb::settings::StoreDriver::Sqlite) => Some(StoreDriver::Sqlite),
        Ok(pb::settings::StoreDriver::Redis) => Some(StoreDriver::Redis),
        Err(_) => {
            return Err(vec![InvalidField::new("settings.store_driver", store_driver, "SQLITE or REDIS")]);
        }
    };
    Ok(SettingsUpdate {
        store_driver,
        redis_url: (!redis_url.is_empty()).then(|| Secret::from(redis_url)),
        saturation_threshold,
        soft_deprioritize_factor,
        consumption_retention_days: consumption_retention_days.map(i64::from),
        clear,
    })
}

fn missing(field: &str) -> InvalidField {
    InvalidField::new(field, "nothing", "a message")
}

fn allocation_from(path: &str, wire: pb::Allocation, faults: &mut Faults) -> AllocationSpec {
    let pb::Allocation { api_key_id, weight, policy, cap, model_caps, exempt } = wire;
    let policy = match pb::allocation::Policy::try_from(policy) {
        Ok(pb::allocation::Policy::Unspecified | pb::allocation::Policy::Hard) => Policy::Hard,
        Ok(pb::allocation::Policy::Soft) => Policy::Soft,
        Ok(pb::allocation::Policy::Burst) => Policy::Burst,
        Err(_) => {
            faults.add(format!("{path}.policy"), policy, "HARD, SOFT or BURST");
            Policy::Hard
        }
    };
    let model_caps = model_caps.into_iter().map(|pb::ModelCap { model, value, unit, window }| ModelCapSpec {
        model,
        value,
        unit: unit_name(unit),
        window,
        ..ModelCapSpec::default()
    });
    AllocationSpec {
        api_key_id,
        weight,
        policy: policy.name().to_owned(),
        cap: cap.map(|pb::Cap { value, unit, window }| CapSpec {
            value,
            unit: unit_name(unit),
            window,
            ..CapSpec::default()
        }),
        model_caps: model_caps.collect(),
        exempt,
        ..AllocationSpec::default()
    }
}

fn enforcement_from(wire: i32, faults: &mut Faults) -> Enforcement {
    match pb::pool::Enforcement::try_from(wire) {
        Ok(pb::pool::Enforcement::Unspecified | pb::pool::Enforcement::Enforce) => Enforcement::Enforce,
        Ok(pb::pool::Enforcement::Shadow) => Enforcement::Shadow,
        Err(_) => {
            faults.add("pool.enforcement", wire, "ENFORCE or SHADOW");
            Enforcement::Enforce
        }
    }
}

fn failure_mode_from(wire: i32, faults: &mut Faults) -> FailureMode {
    match pb::pool::FailureMode::try_from(wire) {
        Ok(pb::pool::FailureMode::Unspecified | pb::pool::FailureMode::FailOpen) => FailureMode::FailOpen,
        Ok(pb::pool::FailureMode::FailClosed) => FailureMode::FailClosed,
        Ok(pb::pool::FailureMode::FailLocal) => FailureMode::FailLocal,
        Err(_) => {
            faults.add("pool.failure_mode", wire, "FAIL_OPEN, FAIL_CLOSED or FAIL_LOCAL");
            FailureMode::FailOpen
        }
    }
}

/// The name that the core knows a unit by; of no unit, a text that it refuses and that says what was given.
pub(super) fn unit_name(wire: i32) -> String {
    match pb::dimension::Unit::try_from(wire) {
        Ok(pb::dimension::Unit::Percent) => Unit::Percent.name().to_owned(),
        Ok(pb::dimension::Unit::Requests) => Unit::Requests.name().to_owned(),
        Ok(pb::dimension::Unit::Tokens) => Unit::Tokens.name().to_owned(),
        Ok(pb::dimension::Unit::Usd) => Unit::Usd.name().to_owned(),
        Ok(pb::dimension::Unit::Unspecified) => "UNIT_UNSPECIFIED".to_owned(),
        Err(_) => wire.to_string(),
    }
}
