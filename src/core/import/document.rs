//! The whole configuration as one JSON document, in the names of the contract: what an export prints and an import takes
//! back. Each pool in it can be given to CreatePool, each plan to PutPlan.

use std::fmt::Write;

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{Import, Warnings};
use crate::core::{
    directory::Directory,
    ids::{Faults, InvalidField},
    settings::StoredSettings,
};

/// Of the document's form.
const VERSION: u64 = 1;

/// Fields that name one of a few things: in documents of the contract in capitals, here in small letters.
const ENUMS: [(&str, &[&str]); 4] = [
    ("policy", &["HARD", "SOFT", "BURST"]),
    ("unit", &["PERCENT", "REQUESTS", "TOKENS", "USD"]),
    ("enforcement", &["ENFORCE", "SHADOW"]),
    ("failure_mode", &["FAIL_OPEN", "FAIL_CLOSED", "FAIL_LOCAL"]),
];

/// Every other field of a document. One that is misspelt must not be passed over: it might be a limit.
const FIELDS: [&str; 24] = [
    "pool_id",
    "name",
    "provider",
    "connection_ids",
    "allocations",
    "saturation_threshold",
    "owner_reserve",
    "group",
    "api_key_id",
    "weight",
    "cap",
    "model_caps",
    "exempt",
    "value",
    "window",
    "model",
    "connection_id",
    "dimensions",
    "limit",
    "soft_deprioritize_factor",
    "consumption_retention_days",
    // Output only in the contract: ignored, as by CreatePool.
    "created_at",
    "updated_at",
    "revision",
];

/// All of `directory`: pools by id, plans by connection, settings without the driver and its URL, which belong to each
/// replica.
pub fn write(directory: &Directory) -> String {
    let mut text = format!("{{\n\"version\": {VERSION},\n");
    write_list(&mut text, "pools", directory.pools_after(None).map(|entry| entry.pool.to_spec()));
    write_list(&mut text, "plans", directory.plans_after(None).map(|entry| entry.plan.to_spec()));
    let settings = StoredSettings { store_driver: None, redis_url: None, ..directory.settings().clone() };
    let settings = document(&settings);
    let _ = write!(text, "\"settings\": {settings}\n}}\n");
    text
}

/// One element a line, so that two exports can be compared.
fn write_list<T: Serialize>(text: &mut String, name: &str, specs: impl Iterator<Item = T>) {
    let _ = write!(text, "\"{name}\": [");
    for (index, spec) in specs.enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(text, "{comma}\n{}", document(&spec));
    }
    text.push_str("\n],\n");
}

fn document(spec: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(spec)
        .expect("a spec has string keys and, once it was checked, finite numbers: it is JSON");
    in_capitals(&mut value);
    value
}

fn in_capitals(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if accepted(name).is_some() => text.make_ascii_uppercase(),
                    value => in_capitals(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(in_capitals),
        _ => {}
    }
}

fn accepted(field: &str) -> Option<&'static [&'static str]> {
    ENUMS.iter().find(|(name, _)| *name == field).map(|(_, accepted)| *accepted)
}

/// Reads a document that [`write()`] wrote, or the like of it.
///
/// # Errors
/// Names what is not like it, by its place below `root`.
pub fn read(root: &str, document: Map<String, Value>) -> Result<Import, Vec<InvalidField>> {
    let mut faults = Faults::default();
    let mut import = Import::default();
    for (name, value) in document {
        let path = format!("{root}.{name}");
        match (name.as_str(), value) {
            ("version", value) if value == VERSION => {}
            ("version", value) => {
                let accepted = format!("{VERSION}, or the version of quota-share that wrote it");
                faults.add(path, format_args!("{value}"), &accepted);
            }
            ("pools", value) => import.pools = read_list(&path, value, &mut faults),
            ("plans", value) => import.plans = read_list(&path, value, &mut faults),
            ("settings", value) => {
                let value = without_driver(value, &mut import.warnings);
                import.settings = read_spec(&path, value, &mut faults).unwrap_or_default();
            }
            _ => faults.add(path, name, "version, pools, plans and settings, as an export has them"),
        }
    }
    if faults.is_empty() { Ok(import) } else { Err(faults.into_vec()) }
}

fn read_list<T: DeserializeOwned>(path: &str, value: Value, faults: &mut Faults) -> Vec<T> {
    let Value::Array(values) = value else {
        faults.add(path, format_args!("{value}"), "a list");
        return Vec::new();
    };
    let specs = values.into_iter().enumerate();
    specs.filter_map(|(index, value)| read_spec(&format!("{path}[{index}]"), value, faults)).collect()
}

fn read_spec<T: DeserializeOwned>(path: &str, mut value: Value, faults: &mut Faults) -> Option<T> {
    if !value.is_object() {
        faults.add(path, format_args!("{value}"), "an object as an export has it");
        return None;
    }
    in_small_letters(path, &mut value, faults);
    let read = T::deserialize(&value);
    let fault = |error| {
        InvalidField::new(path, format_args!("{value}"), format!("fields as an export has them ({error})"))
    };
    faults.take(read.map_err(fault))
}

fn without_driver(mut value: Value, warnings: &mut Warnings) -> Value {
    for name in ["store_driver", "redis_url"] {
        if value.as_object_mut().is_some_and(|fields| fields.remove(name).is_some()) {
            warnings.add(format!("settings.{name} is not taken over: the driver belongs to each replica"));
        }
    }
    value
}

/// Brings enums to the names that specs have; every field must be known.
fn in_small_letters(path: &str, value: &mut Value, faults: &mut Faults) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = format!("{path}.{name}");
                match (accepted(name), value) {
                    (Some(accepted), Value::String(text)) if accepted.contains(&text.as_str()) => {
                        text.make_ascii_lowercase();
                    }
                    (Some(accepted), value) => {
                        faults.add(path, format_args!("{value}"), &accepted.join(", "));
                    }
                    (None, value) if FIELDS.contains(&name.as_str()) => {
                        in_small_letters(&path, value, faults);
                    }
                    (None, value) => {
                        faults.add(path, format_args!("{value}"), "no such field: is it misspelt?")
                    }
                }
            }
        }
        Value::Array(values) => {
            for (index, value) in values.iter_mut().enumerate() {
                in_small_letters(&format!("{path}[{index}]"), value, faults);
            }
        }
        _ => {}
    }
}
