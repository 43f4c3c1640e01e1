//! What an account may use: a plan and its dimensions.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    ids::{ConnectionId, InvalidField, parse_text},
    units::Unit,
    window::Window,
};

/// Most dimensions of one plan.
pub const DIMENSIONS_MAX: usize = 16;

/// What a dimension counts, in which window. At most one dimension of a plan has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
}

impl Plan {
    /// Checks `spec`; every mistake is named, with paths below `path`.
    pub fn check(path: &str, spec: &PlanSpec) -> Result<Plan, Vec<InvalidField>> {
        let mut faults = Vec::new();
        let connection = ConnectionId::parse(&format!("{path}.connection_id"), &spec.connection_id);
        let provider = check_provider(&format!("{path}.provider"), &spec.provider);
        let field = format!("{path}.dimensions");
        if spec.dimensions.is_empty() || spec.dimensions.len() > DIMENSIONS_MAX {
            let given = format!("{} dimensions", spec.dimensions.len());
            faults.push(InvalidField::new(&field, given, format!("1 to {DIMENSIONS_MAX} dimensions")));
        }
        let mut dimensions: Vec<Dimension> = Vec::new();
        for (index, spec) in spec.dimensions.iter().enumerate().take(DIMENSIONS_MAX) {
            let path = format!("{field}[{index}]");
            match Dimension::check(&path, spec) {
                Err(found) => faults.extend(found),
                Ok(dimension) if dimensions.iter().any(|other| other.key == dimension.key) => {
                    let given = dimension.key.to_string();
                    faults.push(InvalidField::new(path, given, "each unit and window at most once"));
                }
                Ok(dimension) => dimensions.push(dimension),
            }
        }
        faults.extend(provider.err());
        match connection {
            Ok(connection) if faults.is_empty() => {
                Ok(Plan { connection, provider: spec.provider.clone(), dimensions })
            }
            Ok(_) => Err(faults),
            Err(fault) => {
                faults.insert(0, fault);
                Err(faults)
            }
        }
    }

    /// The plan as it is written in documents.
    pub fn to_spec(&self) -> PlanSpec {
        PlanSpec {
            connection_id: self.connection.to_string(),
            provider: self.provider.clone(),
            dimensions: self.dimensions.iter().map(Dimension::to_spec).collect(),
        }
    }
}

impl Dimension {
    fn check(path: &str, spec: &DimensionSpec) -> Result<Dimension, Vec<InvalidField>> {
        let unit = check_unit(&format!("{path}.unit"), &spec.unit);
        let window = check_window(&format!("{path}.window"), &spec.window);
        let limit = match (&unit, spec.limit) {
            (Ok(unit), Some(limit)) => check_ceiling(&format!("{path}.limit"), *unit, limit).map(Some),
            _ => Ok(None),
        };
        match (unit, window, limit) {
            (Ok(unit), Ok(window), Ok(limit)) => Ok(Dimension { key: DimensionKey { unit, window }, limit }),
            (unit, window, limit) => {
                Err([unit.err(), window.err(), limit.err()].into_iter().flatten().collect())
            }
        }
    }

    fn to_spec(&self) -> DimensionSpec {
        DimensionSpec {
            unit: self.key.unit.name().to_owned(),
            window: self.key.window.to_string(),
            limit: self.limit,
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
