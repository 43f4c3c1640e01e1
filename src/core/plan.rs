//! What an account may use: a plan and its dimensions.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use super::{
    ids::{ConnectionId, Faults, InvalidField, parse_text},
    pool::{Unknown, UnknownFields},
    units::Unit,
    window::Window,
};

/// Most dimensions of one plan.
pub const DIMENSIONS_MAX: usize = 16;

/// What a dimension counts, in which window. At most one dimension of a plan has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DimensionKey {
    /// What is counted.
    pub unit: Unit,
    /// In which window.
    pub window: Window,
}

impl fmt::Display for DimensionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.unit, self.window)
    }
}

/// One limit of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dimension {
    /// What it counts.
    pub key: DimensionKey,
    /// Ceiling for each connection, in the unit; above 0. `None`: not known, so that only caps bind.
    pub limit: Option<f64>,
}

/// The limits of one connection's account, stored for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Whose plan it is.
    pub connection: ConnectionId,
    /// The provider, as the administrator named it; may be empty.
    pub provider: String,
    /// At least one, each key once.
    pub dimensions: Vec<Dimension>,
    /// What its document says besides.
    unknown: Unknown,
    /// What it says besides of each dimension.
    unknown_of: BTreeMap<DimensionKey, Unknown>,
}

/// A plan as written in requests and in stored documents, not yet checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlanSpec {
    /// Whose plan it is.
    pub connection_id: String,
    /// May be empty.
    pub provider: String,
    /// The limits.
    pub dimensions: Vec<DimensionSpec>,
    /// What this version does not know.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// A dimension as written, not yet checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DimensionSpec {
    /// A unit's name; anything else is refused.
    pub unit: String,
    /// A window's name or length.
    pub window: String,
    /// `None`: not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// What this version does not know.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl Plan {
    /// Checks `spec`; every mistake is named, with paths below `path`.
    pub fn check(path: &str, spec: &PlanSpec) -> Result<Plan, Vec<InvalidField>> {
        let mut faults = Faults::default();
        let connection =
            faults.take(ConnectionId::parse(&format!("{path}.connection_id"), &spec.connection_id));
        faults.take(check_provider(&format!("{path}.provider"), &spec.provider));
        let field = format!("{path}.dimensions");
        if spec.dimensions.is_empty() || spec.dimensions.len() > DIMENSIONS_MAX {
            let accepted = format!("1 to {DIMENSIONS_MAX} dimensions");
            faults.add(&field, format!("{} dimensions", spec.dimensions.len()), &accepted);
        }
        let mut dimensions: Vec<Dimension> = Vec::new();
        let mut unknown_of = BTreeMap::new();
        for (index, spec) in spec.dimensions.iter().enumerate().take(DIMENSIONS_MAX) {
            let path = format!("{field}[{index}]");
            let Some(dimension) = faults.take_all(Dimension::check(&path, spec)) else { continue };
            if dimensions.iter().any(|other| other.key == dimension.key) {
                faults.add(path, dimension.key.to_string(), "each unit and window at most once");
            } else {
                dimensions.push(dimension);
                unknown_of.insert(dimension.key, Unknown::of(&spec.unknown));
            }
        }
        let Some(connection) = connection.filter(|_| faults.is_empty()) else {
            return Err(faults.into_vec());
        };
        let (provider, unknown) = (spec.provider.clone(), Unknown::of(&spec.unknown));
        Ok(Plan { connection, provider, dimensions, unknown, unknown_of })
    }

    /// Keeps what `former` says and this version does not know: of the plan, and of each dimension that stays.
    pub(super) fn keep_unknown_of(&mut self, former: &Plan) {
        self.unknown.keep_those_of(&former.unknown);
        for (key, unknown) in &mut self.unknown_of {
            if let Some(former) = former.unknown_of.get(key) {
                unknown.keep_those_of(former);
            }
        }
    }

    /// The plan as it is written in documents.
    pub fn to_spec(&self) -> PlanSpec {
        PlanSpec {
            connection_id: self.connection.to_string(),
            provider: self.provider.clone(),
            dimensions: self.dimensions.iter().map(|dimension| self.dimension_spec(*dimension)).collect(),
            unknown: self.unknown.fields(),
        }
    }

    fn dimension_spec(&self, Dimension { key, limit }: Dimension) -> DimensionSpec {
        let unknown = self.unknown_of.get(&key).map(Unknown::fields).unwrap_or_default();
        DimensionSpec { unit: key.unit.name().to_owned(), window: key.window.to_string(), limit, unknown }
    }
}

impl Dimension {
    fn check(path: &str, spec: &DimensionSpec) -> Result<Dimension, Vec<InvalidField>> {
        let mut faults = Faults::default();
        let unit = faults.take(check_unit(&format!("{path}.unit"), &spec.unit));
        let window = faults.take(check_window(&format!("{path}.window"), &spec.window));
        if let (Some(unit), Some(limit)) = (unit, spec.limit) {
            faults.take(check_ceiling(&format!("{path}.limit"), unit, limit));
        }
        match (unit, window) {
            (Some(unit), Some(window)) if faults.is_empty() => {
                Ok(Dimension { key: DimensionKey { unit, window }, limit: spec.limit })
            }
            _ => Err(faults.into_vec()),
        }
    }

    /// The ceiling for each connection, in steps; not rounded.
    pub fn limit_steps(&self) -> Option<f64> {
        self.limit.map(|limit| self.key.unit.to_steps(limit))
    }
}

/// A provider's name: up to 64 bytes, may be empty.
pub fn check_provider(field: &str, given: &str) -> Result<(), InvalidField> {
    parse_text(field, given, 0..=64)
}

/// A unit by its name.
pub(super) fn check_unit(field: &str, given: &str) -> Result<Unit, InvalidField> {
    Unit::from_name(given).ok_or_else(|| InvalidField::new(field, given, "PERCENT, REQUESTS, TOKENS or USD"))
}

/// A window by its name or length.
pub(super) fn check_window(field: &str, given: &str) -> Result<Window, InvalidField> {
    Window::parse(given).ok_or_else(|| InvalidField::new(field, given, Window::ACCEPTED))
}

/// A limit or cap: above 0, at most what inputs of the unit may be.
pub(super) fn check_ceiling(field: &str, unit: Unit, given: f64) -> Result<f64, InvalidField> {
    // NaN fails both comparisons.
    if given > 0.0 && given <= unit.max_input() {
        return Ok(given);
    }
    let accepted = format!("a number above 0 and at most {} {unit}", unit.max_input());
    Err(InvalidField::new(field, given, accepted))
}
