//! What a change has changed, field by field, for those who ask later.

use std::{collections::BTreeMap, sync::Arc};

use serde::Serialize;
use serde_json::Value;

use super::{Directory, PlanEntry, Write};
use crate::core::{
    document::DocumentName,
    pool::Pool,
    settings::{Secret, StoredSettings},
};

/// Most fields of a document that are told on either side.
const FIELDS_MAX: usize = 40;
/// Longest text of a value that is told, in bytes.
const VALUE_BYTES_MAX: usize = 200;

/// A document before and after a change, as far as the two differ.
#[derive(Clone, Debug, PartialEq)]
pub struct DocumentChange {
    /// Which.
    pub name: DocumentName,
    /// Its revision before; `None`: there was none.
    pub from_revision: Option<u64>,
    /// That of the configuration since.
    pub revision: u64,
    /// What has changed, as it was.
    pub from: Fields,
    /// What has changed, as it is.
    pub to: Fields,
}

/// Fields by their paths, such as `allocations.alice.weight`; what is empty is left out, and so is what is too much.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Fields(BTreeMap<String, Value>);

impl Fields {
    /// Says that there are more.
    const MORE: &str = "...";

    /// What is in a document.
    fn of(content: &impl Serialize) -> Fields {
        let mut fields = Fields::default();
        // What cannot be told is left out: contents are plain fields, lists and numbers, which always can.
        fields.gather("", serde_json::to_value(content).unwrap_or_default());
        fields
    }

    /// What is in `value`, below `path`.
    fn gather(&mut self, path: &str, value: Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    self.gather(&below(path, &name), value);
                }
            }
            Value::Array(items)
                if !items.is_empty() && items.iter().all(|item| item_name(item).is_some()) =>
            {
                for item in items {
                    let path = item_name(&item).map_or_else(|| path.to_owned(), |name| below(path, &name));
                    self.gather(&path, item);
                }
            }
            Value::Null => {}
            Value::String(text) if text.is_empty() => {}
            Value::Array(items) if items.is_empty() => {}
            value => {
                self.0.insert(path.to_owned(), value);
            }
        }
    }

    /// Leaves what `other` has not, as much as is told.
    fn unlike(&self, other: &Fields) -> Fields {
        let mut differ = self.0.iter().filter(|(path, value)| other.0.get(*path) != Some(*value));
        let told = |(path, value): (&String, &Value)| (path.clone(), shortened(value));
        let mut fields = Fields(differ.by_ref().take(FIELDS_MAX).map(told).collect());
        let more = differ.count();
        if more > 0 {
            fields.0.insert(Self::MORE.to_owned(), format!("and {more} more").into());
        }
        fields
    }
}

impl Directory {
    /// What `writes`, which lead from here to `next`, have changed.
    pub fn changes(&self, next: &Directory, writes: &[Write]) -> Vec<DocumentChange> {
        writes.iter().filter_map(|write| self.change_of(next, write)).collect()
    }

    fn change_of(&self, next: &Directory, write: &Write) -> Option<DocumentChange> {
        let (from_revision, before, after) = match write.name() {
            _ if matches!(write, Write::Deletion(..)) => return None,
            DocumentName::Pool(id) => {
                let (former, new) = (self.pools.get(&id), next.pools.get(&id));
                let (before, after) = (former.map(|entry| &entry.pool), new.map(|entry| &entry.pool));
                let revision = former.map(|former| former.history.revision);
                (revision, pool_fields(before, after), pool_fields(after, before))
            }
            DocumentName::Plan(connection) => {
                let (former, new) = (self.plans.get(&connection), next.plans.get(&connection));
                (former.map(|former| former.revision), plan_fields(former), plan_fields(new))
            }
            DocumentName::Settings => {
                let (former, new) = (&self.settings, &next.settings);
                let revision = Some(former.revision).filter(|revision| *revision > 0);
                let (before, after) = settings_fields(&former.settings, &new.settings);
                (revision, before, after)
            }
        };
        let (from, to) = (before.unlike(&after), after.unlike(&before));
        Some(DocumentChange { name: write.name(), from_revision, revision: next.revision, from, to })
    }
}

/// What is in a pool, without the allocations that `other` has just so.
fn pool_fields(pool: Option<&Pool>, other: Option<&Pool>) -> Fields {
    let Some(pool) = pool else { return Fields::default() };
    let mut spec = pool.to_spec();
    spec.allocations.retain(|allocation| {
        let key = &allocation.api_key_id;
        other.is_none_or(|other| other.allocation(key) != pool.allocation(key))
    });
    Fields::of(&spec)
}

fn plan_fields(entry: Option<&Arc<PlanEntry>>) -> Fields {
    entry.map_or_else(Fields::default, |entry| Fields::of(&entry.plan.to_spec()))
}

/// What is in settings before and after a change. Of a URL only whether there is one, and whether it is another one.
fn settings_fields(before: &StoredSettings, after: &StoredSettings) -> (Fields, Fields) {
    let masked = |settings: &StoredSettings, mask: &str| {
        let redis_url = settings.redis_url.as_ref().map(|_| Secret::from(mask.to_owned()));
        Fields::of(&StoredSettings { redis_url, ..settings.clone() })
    };
    let is_another = before.redis_url.is_some() && before.redis_url != after.redis_url;
    (masked(before, "***"), masked(after, if is_another { "*** (another)" } else { "***" }))
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// What tells an item of a list from the others: the key of an allocation, model, unit and window of a limit.
fn item_name(item: &Value) -> Option<String> {
    let text = |field| item.get(field).and_then(Value::as_str);
    if let Some(key) = text("api_key_id") {
        return Some(key.to_owned());
    }
    let limit = format!("{}/{}", text("unit")?, text("window")?);
    Some(text("model").map_or(limit.clone(), |model| format!("{model} {limit}")))
}

/// As much of a value as is told.
fn shortened(value: &Value) -> Value {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    if text.len() <= VALUE_BYTES_MAX {
        return value.clone();
    }
    let end = text.floor_char_boundary(VALUE_BYTES_MAX);
    format!("{}...", &text[..end]).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        directory::Change,
        pool::{AllocationSpec, PoolSpec},
        settings::SettingsUpdate,
        units::Timestamp,
    };

    fn team(weights: &[(&str, f64)]) -> PoolSpec {
        let allocation = |(key, weight): &(&str, f64)| AllocationSpec {
            api_key_id: (*key).to_owned(),
            weight: *weight,
            policy: "hard".to_owned(),
            ..Default::default()
        };
        PoolSpec {
            pool_id: "team".to_owned(),
            name: "Team".to_owned(),
            connection_ids: vec!["c1".to_owned()],
            allocations: weights.iter().map(allocation).collect(),
            ..Default::default()
        }
    }

    /// The directory after `change`, and what is told of that: name, from and to.
    fn told(directory: &Directory, change: Change) -> (Directory, [String; 3]) {
        let applied = directory.apply(change, Timestamp::from_unix_ms(0)).unwrap().unwrap();
        let [change] = directory.changes(&applied.next, &applied.writes).try_into().unwrap();
        let text = |fields| serde_json::to_string(fields).unwrap();
        (applied.next, [change.name.to_string(), text(&change.from), text(&change.to)])
    }

    #[test]
    fn only_what_has_changed_is_told_as_it_was_and_as_it_is() {
        let (first, _) =
            told(&Directory::default(), Change::CreatePool(team(&[("A", 10.0), ("B", 20.0), ("C", 5.0)])));
        let spec = PoolSpec { group: "g".to_owned(), ..team(&[("A", 30.0), ("B", 20.0)]) };
        let (second, update) = told(&first, Change::UpdatePool { spec, revision: 0 });
        let gone = r#"{"allocations.A.weight":10.0,"allocations.C.api_key_id":"C","allocations.C.exempt":false,"allocations.C.policy":"hard","allocations.C.weight":5.0}"#;
        assert_eq!(update, ["pool:team", gone, r#"{"allocations.A.weight":30.0,"group":"g"}"#]);
        let id = crate::core::ids::PoolId::parse("pool_id", "team").unwrap();
        let (_, deletion) = told(&second, Change::DeletePool { pool: id, revision: 0 });
        assert!(deletion[1].contains(r#""allocations.B.weight":20.0"#), "{deletion:?}");
        assert_eq!(deletion[2], "{}");
    }

    #[test]
    fn a_line_is_bounded_however_much_has_changed() {
        let keys: Vec<String> = (0..1_000).map(|key| format!("{key:03}")).collect();
        let weights: Vec<(&str, f64)> = keys.iter().map(|key| (key.as_str(), 0.01)).collect();
        let spec = PoolSpec { group: "\u{e9}".repeat(120), ..team(&weights) };
        let (_, [_, from, to]) = told(&Directory::default(), Change::CreatePool(spec));
        assert_eq!(from, "{}");
        assert!(to.contains(r#""...":"and "#) && to.len() < FIELDS_MAX * (VALUE_BYTES_MAX + 64), "{to}");
    }

    #[test]
    fn of_a_url_it_is_told_that_it_is_another_one_and_nothing_of_it() {
        let update = |url: &str| {
            let redis_url = Some(Secret::from(format!("redis://user:{url}@host")));
            Change::UpdateSettings(SettingsUpdate { redis_url, ..Default::default() })
        };
        let (first, stored) = told(&Directory::default(), update("hidden"));
        assert_eq!(stored, ["settings", "{}", r#"{"redis_url":"***"}"#]);
        let (_, replaced) = told(&first, update("secret"));
        assert_eq!(replaced, ["settings", r#"{"redis_url":"***"}"#, r#"{"redis_url":"*** (another)"}"#]);
    }
}
