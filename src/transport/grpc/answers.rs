//! Domain values to answers.

use prost::Message;

use super::{page::PAGE_BYTES_MAX, pb};
use crate::{
    core::{
        admission::{self, BlockReason, Finding, Level, Mode, Used, Verdict},
        charge::{Bounds, Charge, Check, CounterKey},
        directory::{PlanInForce, PlanSource, PoolEntry},
        ids::ReservationId,
        ledger::{AccountUsage, Hold},
        plan::{Dimension, DimensionKey},
        pool::{Allocation, Cap, Enforcement, FailureMode, ModelCap, Policy},
        settings::StoreDriver,
        units::{Cost, Timestamp, Unit},
    },
    service::{Decided, Decision, Degraded, Found, KeyRow, SettingsView, SignalsOutcome, Status, UsageView},
};

fn unit(unit: Unit) -> i32 {
    let unit = match unit {
        Unit::Percent => pb::dimension::Unit::Percent,
        Unit::Requests => pb::dimension::Unit::Requests,
        Unit::Tokens => pb::dimension::Unit::Tokens,
        Unit::Usd => pb::dimension::Unit::Usd,
    };
    unit.into()
}

pub(super) fn timestamp(at: Timestamp) -> prost_types::Timestamp {
    let ms = at.unix_ms();
    // An instant in ms, divided by a thousand, fits i64.
    prost_types::Timestamp { seconds: (ms / 1_000) as i64, nanos: (ms % 1_000 * 1_000_000) as i32 }
}

fn duration(ms: u64) -> prost_types::Duration {
    // The longest duration that the wire type allows: about 10,000 years.
    let ms = ms.min(315_576_000_000_000);
    prost_types::Duration { seconds: (ms / 1_000) as i64, nanos: (ms % 1_000 * 1_000_000) as i32 }
}

/// A revision is counted from 0, one by one: it fits i64.
fn wire_revision(revision: u64) -> i64 {
    revision as i64
}

fn text<T: ToString>(name: Option<&T>) -> String {
    name.map(ToString::to_string).unwrap_or_default()
}

pub(super) fn pool(entry: &PoolEntry) -> pb::Pool {
    let pool = &entry.pool;
    pb::Pool {
        pool_id: pool.id.to_string(),
        name: pool.name.clone(),
        provider: pool.provider.clone(),
        connection_ids: pool.connections.iter().map(ToString::to_string).collect(),
        allocations: pool.allocations.iter().map(allocation).collect(),
        saturation_threshold: pool.saturation_threshold,
        enforcement: match pool.enforcement {
            Enforcement::Enforce => pb::pool::Enforcement::Enforce,
            Enforcement::Shadow => pb::pool::Enforcement::Shadow,
        }
        .into(),
        failure_mode: match pool.failure_mode {
            FailureMode::FailOpen => pb::pool::FailureMode::FailOpen,
            FailureMode::FailClosed => pb::pool::FailureMode::FailClosed,
            FailureMode::FailLocal => pb::pool::FailureMode::FailLocal,
        }
        .into(),
        owner_reserve: pool.owner_reserve(),
        group: pool.group.clone(),
        created_at: Some(timestamp(entry.history.created_at)),
        updated_at: Some(timestamp(entry.history.updated_at)),
        revision: wire_revision(entry.history.revision),
    }
}

fn allocation(allocation: &Allocation) -> pb::Allocation {
    let cap =
        |cap: &Cap| pb::Cap { value: cap.value, unit: unit(cap.unit), window: text(cap.window.as_ref()) };
    let model_cap = |ModelCap { key, value, .. }: &ModelCap| pb::ModelCap {
        model: key.model.to_string(),
        value: *value,
        unit: unit(key.dimension.unit),
        window: key.dimension.window.to_string(),
    };
    pb::Allocation {
        api_key_id: allocation.api_key.to_string(),
        weight: allocation.weight(),
        policy: policy(allocation.policy),
        cap: allocation.cap.as_ref().map(cap),
        model_caps: allocation.model_caps.iter().map(model_cap).collect(),
        exempt: allocation.exempt,
    }
}

fn policy(policy: Policy) -> i32 {
    let policy = match policy {
        Policy::Hard => pb::allocation::Policy::Hard,
        Policy::Soft => pb::allocation::Policy::Soft,
        Policy::Burst => pb::allocation::Policy::Burst,
    };
    policy.into()
}

pub(super) fn plan(plan: &PlanInForce) -> pb::Plan {
    let dimension = |Dimension { key, limit }: &Dimension| pb::Dimension {
        unit: unit(key.unit),
        window: key.window.to_string(),
        limit: *limit,
    };
    pb::Plan {
        connection_id: text(plan.connection.as_ref()),
        provider: plan.provider.clone(),
        dimensions: plan.dimensions.iter().map(dimension).collect(),
        source: match plan.source {
            PlanSource::Manual => pb::plan::Source::Manual,
            PlanSource::Catalog => pb::plan::Source::Catalog,
            PlanSource::NoPlan => pb::plan::Source::NoPlan,
        }
        .into(),
        revision: wire_revision(plan.revision),
    }
}

pub(super) fn decision(decision: Decision) -> pb::EnforceResponse {
    let allow = pb::EnforceResponse {
        decision: pb::enforce_response::Decision::Allow.into(),
        reason: pb::dimension_status::Reason::Ok.into(),
        score_factor: 1.0,
        config_revision: wire_revision(decision.config_revision),
        ..Default::default()
    };
    let decided = match decision.found {
        Found::Decided(decided) => decided,
        Found::Degraded(without_counters) => return degraded(without_counters, allow),
        Found::NoPool => {
            return pb::EnforceResponse { reason: pb::dimension_status::Reason::NoPool.into(), ..allow };
        }
    };
    let response = pb::EnforceResponse {
        pool_id: decided.entry.pool.id.to_string(),
        reservation_id: text(decided.reserved.map(|reserved| reserved.id).as_ref()),
        reservation_expires_at: decided.reserved.map(|reserved| timestamp(reserved.deadline)),
        repeated_request: decided.is_repeated(),
        dimensions: dimensions(&decided),
        shadow: decided.charge.shadow.then(|| shadow(&decided)),
        ..allow
    };
    if decided.is_blocked() {
        return pb::EnforceResponse {
            decision: pb::enforce_response::Decision::Block.into(),
            reason: reason(&decided),
            retry_after: decided.verdict.allowed_after_ms.map(duration),
            blocked_by: decided
                .verdict
                .blocked_by
                .map(|index| reference(&decided.charge.checks[index].counter)),
            message: decided.message,
            ..response
        };
    }
    if decided.charge.shadow || decided.verdict.block().is_some() {
        return response;
    }
    let deprioritize = decided.verdict.deprioritize();
    pb::EnforceResponse {
        reason: reason(&decided),
        deprioritize,
        score_factor: if deprioritize { decision.soft_factor } else { 1.0 },
        message: decided.message,
        ..response
    }
}

/// `allow` without the numbers of any dimension, since none is known, and as the failure mode will have it.
fn degraded(of: Degraded, allow: pb::EnforceResponse) -> pb::EnforceResponse {
    let by_mode = |blocks: bool| match blocks {
        true => pb::enforce_response::Decision::Block.into(),
        false => pb::enforce_response::Decision::Allow.into(),
    };
    let reason = pb::dimension_status::Reason::StoreUnavailable.into();
    let (is_blocked, is_shadow) = (of.is_blocked(), of.is_shadow());
    let shadow = is_shadow.then(|| pb::ShadowVerdict {
        decision: by_mode(of.refusal.is_some()),
        reason,
        message: of.refusal.unwrap_or_default(),
        ..Default::default()
    });
    pb::EnforceResponse {
        decision: by_mode(is_blocked),
        reason,
        message: of.message,
        pool_id: of.entry.pool.id.to_string(),
        degraded: true,
        shadow,
        ..allow
    }
}

/// What the verdict says, whether or not it binds.
fn reason(decided: &Decided) -> i32 {
    match decided.verdict.block() {
        Some(reason) => block_reason(reason),
        None if decided.entry.dimensions().is_empty() => pb::dimension_status::Reason::NoPlan.into(),
        None => pb::dimension_status::Reason::Ok.into(),
    }
}

fn block_reason(reason: BlockReason) -> i32 {
    let reason = match reason {
        BlockReason::ExceedsLimit => pb::dimension_status::Reason::ExceedsLimit,
        BlockReason::CapAbsolute => pb::dimension_status::Reason::CapAbsolute,
        BlockReason::ModelCap => pb::dimension_status::Reason::ModelCap,
        BlockReason::GlobalSaturated => pb::dimension_status::Reason::GlobalSaturated,
        BlockReason::ConnectionSaturated => pb::dimension_status::Reason::ConnectionSaturated,
        BlockReason::FairShare => pb::dimension_status::Reason::FairShare,
    };
    reason.into()
}

fn shadow(decided: &Decided) -> pb::ShadowVerdict {
    let decision = match decided.verdict.block() {
        Some(_) => pb::enforce_response::Decision::Block,
        None => pb::enforce_response::Decision::Allow,
    };
    pb::ShadowVerdict {
        decision: decision.into(),
        reason: reason(decided),
        message: decided.message.clone(),
        retry_after: decided.verdict.allowed_after_ms.map(duration),
        deprioritize: decided.verdict.deprioritize(),
    }
}

fn reference(counter: &CounterKey) -> pb::DimensionRef {
    pb::DimensionRef {
        unit: unit(counter.dimension.unit),
        window: counter.dimension.window.to_string(),
        model: text(counter.model.as_ref()),
    }
}

fn dimensions(decided: &Decided) -> Vec<pb::DimensionStatus> {
    let Decided { charge, reading, verdict, .. } = decided;
    let Charge { checks, .. } = charge;
    let Verdict { findings, retry_after_ms, .. } = verdict;
    let mut statuses = Vec::with_capacity(checks.len());
    for (index, check) in checks.iter().enumerate() {
        let level = check.level(&reading.counters[index], reading.at);
        statuses.push(dimension_status(check, &level, &findings[index], retry_after_ms[index]));
    }
    statuses
}

fn dimension_status(
    check: &Check,
    level: &Level,
    finding: &Finding,
    retry_after_ms: Option<u64>,
) -> pb::DimensionStatus {
    let CounterKey { dimension, model } = &check.counter;
    let shown = |steps: f64| dimension.unit.from_steps(steps);
    let used = check.used(level);
    pb::DimensionStatus {
        unit: unit(dimension.unit),
        window: dimension.window.to_string(),
        model: text(model.as_ref()),
        limit: check.bounds.limit.map(shown),
        fair_share: check.bounds.fair_share.map(shown),
        cap: check.bounds.cap.map(shown),
        key_consumed: shown(level.key_consumed),
        key_reserved: shown(level.key_reserved),
        pool_consumed: shown(level.pool_consumed),
        pool_reserved: shown(level.pool_reserved),
        external: shown(used.external),
        used_fraction: used.fraction,
        signal_fraction: level.serving_fraction,
        mode: mode(finding.mode),
        borrowing: finding.borrowing,
        key_remaining: finding.remaining.map(shown),
        estimate: shown(check.estimate.as_f64()),
        reason: finding.block.map_or(pb::dimension_status::Reason::Ok.into(), block_reason),
        retry_after: retry_after_ms.map(duration),
        resets_at: level.resets_at.map(timestamp),
    }
}

fn mode(mode: Option<Mode>) -> i32 {
    let mode = match mode {
        None => pb::dimension_status::Mode::Unspecified,
        Some(Mode::Generous) => pb::dimension_status::Mode::Generous,
        Some(Mode::Strict) => pb::dimension_status::Mode::Strict,
    };
    mode.into()
}

/// `(stored, effective)`
pub(super) fn settings(view: &SettingsView) -> (pb::Settings, pb::Settings) {
    let SettingsView { stored, effective, store_driver, redis_url_configured } = view;
    let stored = pb::Settings {
        store_driver: stored.store_driver.map_or(pb::settings::StoreDriver::Unspecified.into(), driver),
        redis_url: String::new(),
        redis_url_configured: stored.redis_url.is_some(),
        saturation_threshold: stored.saturation_threshold,
        soft_deprioritize_factor: stored.soft_deprioritize_factor,
        consumption_retention_days: stored.consumption_retention_days.map(days),
    };
    let effective = pb::Settings {
        store_driver: driver(*store_driver),
        redis_url: String::new(),
        redis_url_configured: *redis_url_configured,
        saturation_threshold: Some(effective.saturation_threshold),
        soft_deprioritize_factor: Some(effective.soft_deprioritize_factor),
        consumption_retention_days: Some(days(effective.consumption_retention_days)),
    };
    (stored, effective)
}

fn driver(driver: StoreDriver) -> i32 {
    let driver = match driver {
        StoreDriver::Sqlite => pb::settings::StoreDriver::Sqlite,
        StoreDriver::Redis => pb::settings::StoreDriver::Redis,
    };
    driver.into()
}

/// At most [`RETENTION_DAYS_MAX`](crate::core::settings::RETENTION_DAYS_MAX).
fn days(days: u32) -> i32 {
    days as i32
}

pub(super) fn status(status: Status) -> pb::GetStatusResponse {
    let Status {
        version,
        replica_id,
        config_revision,
        newest_config_revision,
        replicas,
        uptime_ms,
        store_driver,
        degraded,
        journal_length,
        warnings,
    } = status;
    let replicas = replicas.into_iter().map(|note| pb::ReplicaStatus {
        replica_id: note.replica_id,
        version: note.version,
        config_revision: wire_revision(note.config_revision),
        age: Some(duration(note.age_ms)),
    });
    pb::GetStatusResponse {
        version: version.to_owned(),
        replica_id,
        active_store: driver(store_driver),
        degraded,
        config_revision: wire_revision(config_revision),
        newest_config_revision: wire_revision(newest_config_revision),
        journal_length: i64::try_from(journal_length).unwrap_or(i64::MAX),
        uptime: Some(duration(uptime_ms)),
        replicas: replicas.collect(),
        warnings,
    }
}

pub(super) fn reservation(id: ReservationId, hold: &Hold) -> pb::Reservation {
    let Cost { requests, tokens, usd, percent } = hold.cost();
    pb::Reservation {
        reservation_id: id.to_string(),
        api_key_id: hold.api_key.to_string(),
        connection_id: hold.connection.to_string(),
        model: text(hold.model.as_ref()),
        held: Some(pb::Cost {
            requests: Some(requests.steps() as i64),
            tokens: Some(tokens.steps() as i64),
            usd: Some(Unit::Usd.from_steps(usd.as_f64())),
            percent: Some(Unit::Percent.from_steps(percent.as_f64())),
        }),
        expires_at: Some(timestamp(hold.deadline)),
        request_id: hold.request_id.clone(),
    }
}

/// The usage of one page of keys, the last key that found room in it, and whether there are more.
pub(super) fn usage(view: &UsageView) -> (pb::PoolUsage, Option<String>, bool) {
    let UsageView { entry, reading, keys, more, threshold, config_revision } = view;
    let mut dimensions: Vec<pb::DimensionUsage> =
        (0..entry.dimensions().len()).map(|index| dimension_usage(view, index, *threshold)).collect();
    let mut bytes = 0;
    let mut shown = 0;
    for row in keys {
        if shown > 0 && bytes >= PAGE_BYTES_MAX {
            break;
        }
        for (index, dimension) in dimensions.iter_mut().enumerate() {
            let usage = key_usage(view, row, index);
            bytes += usage.encoded_len();
            dimension.keys.push(usage);
        }
        shown += 1;
    }
    let usage = pb::PoolUsage {
        pool_id: entry.pool.id.to_string(),
        generated_at: Some(timestamp(reading.at)),
        dimensions,
        // At most a million.
        open_reservations: reading.open_reservations as i64,
        oldest_reservation_deadline: reading.oldest_deadline.map(timestamp),
        degraded: false,
        config_revision: wire_revision(*config_revision),
    };
    let last = keys[..shown].last().map(|row| row.api_key.to_string());
    (usage, last, *more || shown < keys.len())
}

fn dimension_usage(view: &UsageView, index: usize, threshold: f64) -> pb::DimensionUsage {
    let dimension = &view.entry.dimensions()[index];
    let DimensionKey { unit: of, window } = dimension.key;
    let bounds = Bounds::of_pool(&view.entry.pool, dimension);
    let counters = &view.reading.totals[index];
    let level = counters.level(dimension.key, bounds.per_connection, view.reading.at);
    let used = Used::of(of, &bounds, &level);
    let window_ends = counters.accounts.iter().filter_map(|account| account.window_end);
    let resets_at = window_ends.filter(|end| *end > view.reading.at).min();
    let samples = view.reading.samples[index].iter().map(|sample| pb::UsageSample {
        at: Some(timestamp(sample.at)),
        cumulative: of.from_steps(sample.cumulative as f64),
    });
    pb::DimensionUsage {
        unit: unit(of),
        window: window.to_string(),
        limit: bounds.limit.map(|limit| of.from_steps(limit)),
        consumed: of.from_steps(level.pool_consumed),
        reserved: of.from_steps(level.pool_reserved),
        external: of.from_steps(used.external),
        used_fraction: used.fraction,
        mode: mode(bounds.limit.map(|_| admission::mode(used.fraction, threshold))),
        keys: Vec::new(),
        burn_rate: Some(burn_rate(view, index, bounds.limit.map(|limit| limit - used.pool), resets_at)),
        samples: samples.collect(),
        resets_at: resets_at.map(timestamp),
        signals: view.reading.accounts[index].iter().map(|account| signal(account, of, &bounds)).collect(),
    }
}

fn signal(account: &AccountUsage, of: Unit, bounds: &Bounds) -> pb::ConnectionSignal {
    let AccountUsage { connection, fraction, ends_at, observed_at, fresh, external, parts } = account;
    let external = match of {
        Unit::Percent => *external as f64,
        // By the provider's figure, beyond what was counted here in its window.
        _ => (fraction * bounds.per_connection.unwrap_or_default() - *parts as f64).max(0.0),
    };
    pb::ConnectionSignal {
        connection_id: connection.to_string(),
        used_fraction: *fraction,
        resets_at: ends_at.map(timestamp),
        observed_at: Some(timestamp(*observed_at)),
        fresh: *fresh,
        external: of.from_steps(external),
    }
}

pub(super) fn signals(outcome: SignalsOutcome) -> pb::ReportSignalsResponse {
    let SignalsOutcome { accepted, ignored } = outcome;
    let accepted = accepted.into_iter().map(|seen| pb::Utilization {
        unit: unit(seen.dimension.unit),
        window: seen.dimension.window.to_string(),
        used: Some(pb::utilization::Used::UsedFraction(seen.fraction)),
        resets_at: seen.resets_at.map(timestamp),
        observed_at: seen.observed_at.map(timestamp),
    });
    pb::ReportSignalsResponse { accepted: accepted.collect(), ignored }
}

/// `remaining`, in steps, is `None` where the limit is not known; `resets_at` where no provider's window is.
fn burn_rate(
    view: &UsageView,
    index: usize,
    remaining: Option<f64>,
    resets_at: Option<Timestamp>,
) -> pb::BurnRate {
    let DimensionKey { unit, window } = view.entry.dimensions()[index].key;
    let rate = &view.reading.rates[index];
    let to_exhaustion_ms = remaining.and_then(|remaining| match remaining <= 0.0 {
        true => Some(0.0),
        false => rate.time_to_exhaustion_ms(remaining),
    });
    // What is in a sliding window now has aged out a window's length from now.
    let until_reset_ms = resets_at.map_or(window.length_ms(), |end| end.ms_since(view.reading.at));
    pb::BurnRate {
        units_per_second: unit.from_steps(rate.steps_per_second.unwrap_or_default()),
        // A float that is too large becomes the largest duration.
        time_to_exhaustion: to_exhaustion_ms.map(|ms| duration(ms.ceil() as u64)),
        resets_first: to_exhaustion_ms.is_some_and(|ms| ms > until_reset_ms as f64),
    }
}

fn key_usage(view: &UsageView, row: &KeyRow, index: usize) -> pb::KeyUsage {
    let pool = &view.entry.pool;
    let dimension = &view.entry.dimensions()[index];
    let shown = |steps: f64| dimension.key.unit.from_steps(steps);
    let counted = view.reading.keys.get(&row.api_key);
    let (consumed, reserved) = counted.map_or((0.0, 0.0), |counted| counted[index]);
    let allocation = pool.allocation(row.api_key.as_str());
    let fair_share = allocation
        .zip(dimension.limit_steps())
        .and_then(|(allocation, per_connection)| pool.fair_share(allocation, pool.limit(per_connection)));
    let over = fair_share.map(|share| consumed + reserved - share);
    pb::KeyUsage {
        api_key_id: row.api_key.to_string(),
        weight: allocation.map_or(0.0, Allocation::weight),
        policy: allocation.map_or(pb::allocation::Policy::Unspecified.into(), |own| policy(own.policy)),
        consumed: shown(consumed),
        reserved: shown(reserved),
        fair_share: fair_share.map(shown),
        over_fair_share: over.map(shown),
        borrowing: over.is_some_and(|over| over > 0.0),
        allocated: row.allocated,
    }
}
