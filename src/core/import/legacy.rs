//! The pools that the OmniRoute dashboard kept in the browser, under "omniroute:quota-share:pools".

use serde_json::Value;

use super::{
    Import,
    mend::{Draft, Mender, Share},
};
use crate::core::ids::{ConnectionId, Faults, InvalidField};

/// Most entries that are named in one refusal.
const REFUSED_MAX: usize = 100;

/// Reads a JSON array of `{connectionId, provider, accountLabel, window, policy, allocations: [{apiKeyId, percent}]}`.
/// Windows are not taken over: those of a pool are its plan's.
///
/// # Errors
/// The text is no JSON array, or entries have no connection; each is named by its index below `root`.
pub fn read(root: &str, json: &str) -> Result<Import, Vec<InvalidField>> {
    let entries: Vec<Value> = serde_json::from_str(json)
        .map_err(|error| vec![InvalidField::new(root, json, format!("a JSON array of pools ({error})"))])?;
    from_entries(root, &entries)
}

/// As [`read`], from a text that has been parsed.
pub fn from_entries(root: &str, entries: &[Value]) -> Result<Import, Vec<InvalidField>> {
    let mut faults = Faults::default();
    let mut mender = Mender::default();
    let mut refused = 0;
    for (index, entry) in entries.iter().enumerate() {
        let place = format!("{root}[{index}]");
        let Some(connection) = connection(entry) else {
            let accepted = "an entry with a connectionId of 1 to 256 bytes without control characters";
            faults.add(format!("{place}.connectionId"), format_args!("{entry}"), accepted);
            refused += 1;
            if refused == REFUSED_MAX {
                break;
            }
            continue;
        };
        let shares = shares(&mut mender, &place, entry);
        mender.add(Draft {
            name: text(entry, "accountLabel"),
            provider: text(entry, "provider"),
            connections: vec![connection],
            shares,
            place,
            ..Draft::default()
        });
    }
    if faults.is_empty() { Ok(mender.import) } else { Err(faults.into_vec()) }
}

fn connection(entry: &Value) -> Option<ConnectionId> {
    let text = text(entry, "connectionId")?;
    ConnectionId::parse("connectionId", &text).ok()
}

/// A field that holds a text which is more than blanks.
fn text(object: &Value, field: &str) -> Option<String> {
    object.get(field)?.as_str().filter(|text| !text.trim().is_empty()).map(str::to_owned)
}

fn shares(mender: &mut Mender, place: &str, entry: &Value) -> Vec<Share> {
    let Some(allocations) = entry.get("allocations").and_then(Value::as_array) else {
        mender.warn(place, format_args!("has no list of allocations: the pool is for nobody yet"));
        return Vec::new();
    };
    // One that is not a text is named in the warning as it is written.
    let policy = entry.get("policy").filter(|policy| !policy.is_null());
    let policy = policy.map(|policy| policy.as_str().map_or_else(|| policy.to_string(), str::to_owned));
    let policy = mender.policy(place, policy.as_deref()).name();
    let share = |allocation: &Value| Share {
        api_key: text(allocation, "apiKeyId"),
        percent: allocation.get("percent").and_then(number),
        policy: Some(policy.to_owned()),
        ..Share::default()
    };
    allocations.iter().map(share).collect()
}

/// A number, also one that an input field left as text.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())
}
