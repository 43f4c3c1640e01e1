//! Reports of providers' figures to domain values.

use super::{
    convert::{Checked, duration_ms, seconds, unit_name},
    pb,
};
use crate::{
    core::{
        headers::FRACTION_MAX,
        ids::{ConnectionId, Faults},
        plan::{DimensionKey, check_provider},
        units::{Timestamp, Unit},
        window::Window,
    },
    service::{ResponseHeaders, SignalsCall, Utilization},
};

/// Most figures of one report: a plan has at most 16 dimensions.
const UTILIZATIONS_MAX: usize = 64;

pub(super) fn report(request: pb::ReportSignalsRequest) -> Checked<SignalsCall> {
    let pb::ReportSignalsRequest { connection_id, provider, utilizations, provider_headers, headers_age } =
        request;
    let mut faults = Faults::default();
    let connection = faults.take(ConnectionId::parse("connection_id", &connection_id));
    faults.take(check_provider("provider", &provider));
    if utilizations.len() > UTILIZATIONS_MAX {
        let accepted = format!("at most {UTILIZATIONS_MAX} figures");
        faults.add("utilizations", format!("{} figures", utilizations.len()), &accepted);
    }
    let seen = utilizations.into_iter().take(UTILIZATIONS_MAX).enumerate();
    let seen = seen.filter_map(|(index, seen)| utilization(index, seen, &mut faults)).collect();
    let headers = headers(provider_headers, headers_age, &mut faults);
    match connection {
        Some(connection) if faults.is_empty() => Ok(SignalsCall { connection, utilizations: seen, headers }),
        _ => Err(faults.into_vec()),
    }
}

/// Headers may say anything; their age may not.
pub(super) fn headers(
    headers: std::collections::HashMap<String, String>,
    age: Option<prost_types::Duration>,
    faults: &mut Faults,
) -> ResponseHeaders {
    let age_ms = age.and_then(|age| {
        let ms = duration_ms(&age);
        if ms.is_none() {
            faults.add("headers_age", seconds(&age), "a duration of 0 or more");
        }
        ms
    });
    ResponseHeaders { headers: headers.into_iter().collect(), age_ms }
}

/// `None` after at least one fault.
fn utilization(index: usize, wire: pb::Utilization, faults: &mut Faults) -> Option<Utilization> {
    let pb::Utilization { unit, window, used, resets_at, observed_at } = wire;
    let at = |field: &str| format!("utilizations[{index}].{field}");
    let name = unit_name(unit);
    let unit = Unit::from_name(&name);
    if unit.is_none() {
        faults.add(at("unit"), name, "PERCENT, REQUESTS, TOKENS or USD");
    }
    let parsed = Window::parse(&window);
    if parsed.is_none() {
        faults.add(at("window"), window, Window::ACCEPTED);
    }
    let fraction = fraction(&at, used, faults);
    let mut instant = |field: &str, wire: Option<prost_types::Timestamp>| {
        let wire = wire?;
        let instant = timestamp(&wire);
        if instant.is_none() {
            let given = format!("{} s and {} ns since 1970", wire.seconds, wire.nanos);
            faults.add(at(field), given, "an instant after 1970");
        }
        instant
    };
    let (resets_at, observed_at) = (instant("resets_at", resets_at), instant("observed_at", observed_at));
    let dimension = DimensionKey { unit: unit?, window: parsed? };
    Some(Utilization { dimension, fraction: fraction?, resets_at, observed_at })
}

fn fraction(
    at: &dyn Fn(&str) -> String,
    used: Option<pb::utilization::Used>,
    faults: &mut Faults,
) -> Option<f64> {
    use pb::utilization::Used;
    let believable = |fraction: &f64| (0.0..=FRACTION_MAX).contains(fraction);
    let (field, given, fraction, accepted) = match used {
        Some(Used::UsedPercent(percent)) => {
            ("used_percent", percent, percent / 100.0, "per cent of the limit, from 0 to 150")
        }
        Some(Used::UsedFraction(fraction)) => {
            ("used_fraction", fraction, fraction, "a fraction of the limit, from 0 to 1.5")
        }
        Some(Used::UsedOf(pb::UsedOf { used: _, limit })) if !limit.is_finite() || limit <= 0.0 => {
            faults.add(at("used_of.limit"), limit, "a finite number above 0");
            return None;
        }
        Some(Used::UsedOf(pb::UsedOf { used, limit })) => {
            ("used_of.used", used, used / limit, "from 0 to 1.5 times the limit")
        }
        None => {
            faults.add(at("used"), "nothing", "one of used_percent, used_fraction and used_of");
            return None;
        }
    };
    if !believable(&fraction) {
        faults.add(at(field), given, accepted);
    }
    believable(&fraction).then_some(fraction)
}

/// Whole ms; `None` before 1970 or if it is no instant.
fn timestamp(wire: &prost_types::Timestamp) -> Option<Timestamp> {
    let seconds = u64::try_from(wire.seconds).ok()?;
    let nanos = u64::try_from(wire.nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Timestamp::from_unix_ms(seconds.checked_mul(1_000)?.checked_add(nanos / 1_000_000)?))
}
