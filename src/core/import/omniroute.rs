//! The pools and plans of an OmniRoute installation, as its database keeps them.

use hashbrown::HashMap;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Import,
    mend::{Draft, Mender, Share},
};
use crate::core::{
    catalog,
    ids::{ConnectionId, Faults, InvalidField, shown},
    plan::{DIMENSIONS_MAX, Dimension, DimensionSpec, Plan, PlanSpec, check_ceiling, check_provider},
    units::Unit,
    window::Window,
};

/// All rows that are read, in the order in which they were written. Nothing else of the database is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Installation {
    /// `quota_pools`
    pub pools: Vec<PoolRow>,
    /// `quota_allocations`
    pub allocations: Vec<AllocationRow>,
    /// `quota_pool_connections`: pool, connection.
    pub members: Vec<(String, String)>,
    /// `quota_groups`: id, name.
    pub groups: Vec<(String, String)>,
    /// `quota_allocation_model_caps`
    pub model_caps: Vec<ModelCapRow>,
    /// `provider_plans`
    pub plans: Vec<PlanRow>,
    /// `provider_connections`: id, provider.
    pub providers: Vec<(String, String)>,
}

/// A row of `quota_pools`.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // The fields are the columns.
pub struct PoolRow {
    pub id: Option<String>,
    pub connection_id: Option<String>,
    pub name: Option<String>,
    pub group_id: Option<String>,
}

/// A row of `quota_allocations`.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // The fields are the columns.
pub struct AllocationRow {
    pub pool_id: Option<String>,
    pub api_key_id: Option<String>,
    pub weight: Option<f64>,
    pub cap_value: Option<f64>,
    pub cap_unit: Option<String>,
    pub policy: Option<String>,
}

/// A row of `quota_allocation_model_caps`.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // The fields are the columns.
pub struct ModelCapRow {
    pub pool_id: String,
    pub api_key_id: String,
    pub model: String,
    pub cap_value: Option<f64>,
    pub cap_unit: Option<String>,
}

/// A row of `provider_plans`.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // The fields are the columns.
pub struct PlanRow {
    pub connection_id: Option<String>,
    pub provider: Option<String>,
    pub dimensions_json: Option<String>,
    pub source: Option<String>,
}

/// What `installation` becomes here.
///
/// # Errors
/// Pools have no connection; each is named by its index and its content.
pub fn read(installation: &Installation) -> Result<Import, Vec<InvalidField>> {
    let mut faults = Faults::default();
    let mut mender = Mender::default();
    let lookup = Lookup::of(installation);
    for (index, row) in installation.pools.iter().enumerate() {
        let place = format!("quota_pools[{index}]");
        let connections = lookup.connections(&mut mender, &place, row);
        let Some(primary) = connections.first() else {
            let PoolRow { id, connection_id, name, group_id } = row;
            let content =
                json!({"id": id, "connection_id": connection_id, "name": name, "group_id": group_id});
            let accepted = "a pool with a connection of 1 to 256 bytes without control characters";
            faults.add(format!("{place}.connection_id"), format_args!("{content}"), accepted);
            continue;
        };
        mender.add(Draft {
            pool_id: row.id.clone(),
            name: row.name.clone(),
            provider: lookup.providers.get(primary.as_str()).map(|provider| (*provider).to_owned()),
            group: row.group_id.as_deref().map(|id| (*lookup.groups.get(id).unwrap_or(&id)).to_owned()),
            shares: lookup.shares(row.id.as_deref().unwrap_or_default()),
            connections,
            place,
        });
    }
    for (index, row) in installation.plans.iter().enumerate() {
        read_plan(&mut mender, &format!("provider_plans[{index}]"), row);
    }
    if faults.is_empty() { Ok(mender.import) } else { Err(faults.into_vec()) }
}

/// Rows by what they belong to.
struct Lookup<'a> {
    allocations: HashMap<&'a str, Vec<&'a AllocationRow>>,
    members: HashMap<&'a str, Vec<&'a str>>,
    groups: HashMap<&'a str, &'a str>,
    /// By pool and key.
    model_caps: HashMap<(&'a str, &'a str), Vec<&'a ModelCapRow>>,
    /// By connection: as the connection says, else as its plan says.
    providers: HashMap<&'a str, &'a str>,
}

impl<'a> Lookup<'a> {
    fn of(installation: &'a Installation) -> Self {
        let pairs = |rows: &'a [(String, String)]| rows.iter().map(|(a, b)| (a.as_str(), b.as_str()));
        let plans = installation
            .plans
            .iter()
            .filter_map(|row| Some((row.connection_id.as_deref()?, row.provider.as_deref()?)));
        let mut lookup = Self {
            allocations: HashMap::new(),
            members: HashMap::new(),
            groups: pairs(&installation.groups).filter(|(_, name)| !name.trim().is_empty()).collect(),
            model_caps: HashMap::new(),
            providers: plans.chain(pairs(&installation.providers)).collect(),
        };
        for row in &installation.allocations {
            lookup.allocations.entry(row.pool_id.as_deref().unwrap_or_default()).or_default().push(row);
        }
        for (pool, connection) in pairs(&installation.members) {
            lookup.members.entry(pool).or_default().push(connection);
        }
        for row in &installation.model_caps {
            lookup.model_caps.entry((&row.pool_id, &row.api_key_id)).or_default().push(row);
        }
        lookup
    }

    /// The pool's own connection first, as its primary.
    fn connections(&self, mender: &mut Mender, place: &str, row: &PoolRow) -> Vec<ConnectionId> {
        let members = row.id.as_deref().and_then(|id| self.members.get(id));
        let given = row.connection_id.as_deref().into_iter().chain(members.into_iter().flatten().copied());
        let mut connections = Vec::new();
        for text in given.filter(|text| !text.trim().is_empty()) {
            match ConnectionId::parse("connection_id", text) {
                Ok(connection) if connections.contains(&connection) => {}
                Ok(connection) => connections.push(connection),
                Err(fault) => mender.warn(place, format_args!("a connection is left out: {fault}")),
            }
        }
        connections
    }

    fn shares(&self, pool: &str) -> Vec<Share> {
        let rows = self.allocations.get(pool).into_iter().flatten();
        rows.map(|row| {
            let model_caps = self.model_caps.get(&(pool, row.api_key_id.as_deref().unwrap_or_default()));
            let model_caps = model_caps.into_iter().flatten().filter_map(|cap| {
                Some((cap.model.clone(), cap.cap_value?, cap.cap_unit.clone().unwrap_or_default()))
            });
            Share {
                api_key: row.api_key_id.clone(),
                percent: row.weight,
                policy: row.policy.clone(),
                cap: row.cap_value.map(|value| (value, row.cap_unit.clone().unwrap_or_default())),
                model_caps: model_caps.collect(),
            }
        })
        .collect()
    }
}

/// A dimension as the database keeps it.
#[derive(Debug, Deserialize)]
struct StoredDimension {
    unit: String,
    window: String,
    #[serde(default)]
    limit: Option<f64>,
}

/// A plan that says no more than the catalogue, and that nobody stored by hand, is left to the catalogue.
fn read_plan(mender: &mut Mender, place: &str, row: &PlanRow) {
    let connection_id = row.connection_id.clone().unwrap_or_default();
    let mut provider = row.provider.clone().unwrap_or_default();
    if let Err(fault) = check_provider("provider", &provider) {
        mender.warn(place, format_args!("the provider is left out: {fault}"));
        provider.clear();
    }
    let text = row.dimensions_json.as_deref().unwrap_or_default();
    let dimensions = match serde_json::from_str::<Vec<Value>>(text) {
        Ok(given) => dimensions(mender, place, &given),
        Err(error) => {
            mender.warn(place, format_args!("is left out: its dimensions are no JSON array ({error})"));
            return;
        }
    };
    if !mender.planned.insert(connection_id.clone()) {
        mender.warn(
            place,
            format_args!("is left out: connection {} has a plan already", shown(&connection_id)),
        );
        return;
    }
    let plan = PlanSpec { connection_id, provider, dimensions, ..PlanSpec::default() };
    match Plan::check(place, &plan) {
        Ok(checked) if row.source.as_deref() != Some("manual") && is_of_catalog(&checked) => {}
        Ok(_) => mender.import.plans.push(plan),
        Err(faults) => {
            let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
            mender.warn(place, format_args!("is left out: {}", faults.join("; ")));
        }
    }
}

fn is_of_catalog(plan: &Plan) -> bool {
    catalog::dimensions_of(&plan.provider).is_some_and(|known: Vec<Dimension>| known == plan.dimensions)
}

fn dimensions(mender: &mut Mender, place: &str, given: &[Value]) -> Vec<DimensionSpec> {
    let mut dimensions: Vec<(Window, DimensionSpec)> = Vec::new();
    for (index, value) in given.iter().enumerate() {
        let place = format!("{place}.dimensions[{index}]");
        let Ok(StoredDimension { unit, window, limit }) = StoredDimension::deserialize(value) else {
            mender.warn(
                &place,
                format_args!("is left out: {} is no unit, window and limit", shown(format_args!("{value}"))),
            );
            continue;
        };
        let (Some(known), Some(length)) = (Unit::from_name(&unit), Window::parse(&window)) else {
            mender.warn(
                &place,
                format_args!("is left out: {} is not known here", shown(format!("{unit}/{window}"))),
            );
            continue;
        };
        let again = dimensions.iter().any(|(other, spec)| *other == length && spec.unit == unit);
        if again || dimensions.len() == DIMENSIONS_MAX {
            mender.warn(
                &place,
                format_args!("is left out: a plan has each unit and window once, at most {DIMENSIONS_MAX}"),
            );
            continue;
        }
        let limit = limit_of(mender, &place, known, limit);
        dimensions.push((length, DimensionSpec { unit, window, limit, ..Default::default() }));
    }
    dimensions.into_iter().map(|(_, spec)| spec).collect()
}

/// A limit of 0, or of the least number that is more than 0 beside 1, stands for one that is not known.
fn limit_of(mender: &mut Mender, place: &str, unit: Unit, given: Option<f64>) -> Option<f64> {
    let given = given.filter(|limit| !(0.0..=f64::EPSILON).contains(limit))?;
    let checked = check_ceiling("limit", unit, given);
    checked.map_err(|fault| mender.warn(place, format_args!("the limit is taken as not known: {fault}"))).ok()
}
