//! Who shares which connections, in which proportion, and what makes a pool valid.

use std::{collections::BTreeMap, sync::Arc};

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use super::{
    ids::{ApiKeyId, ConnectionId, Faults, InvalidField, Model, PoolId},
    plan::{DimensionKey, check_ceiling, check_provider, check_unit, check_window},
    units::Unit,
    window::Window,
};

/// Fields of a document that this version does not know: another one has written them, and they stay.
pub type UnknownFields = BTreeMap<String, serde_json::Value>;

/// The same where there are seldom any.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Unknown(Option<Box<UnknownFields>>);

impl Unknown {
    pub(super) fn of(fields: &UnknownFields) -> Self {
        Self((!fields.is_empty()).then(|| Box::new(fields.clone())))
    }

    pub(super) fn fields(&self) -> UnknownFields {
        self.0.as_deref().cloned().unwrap_or_default()
    }

    /// Where nothing is said, what `former` says stays.
    pub(super) fn keep_those_of(&mut self, former: &Unknown) {
        if self.0.is_none() {
            self.clone_from(former);
        }
    }
}

/// Most keys of one pool.
pub const ALLOCATIONS_MAX: usize = 10_000;
/// Most connections of one pool.
pub const CONNECTIONS_MAX: usize = 64;
/// Most model caps of one key.
pub const MODEL_CAPS_MAX: usize = 32;
/// Weights are kept in millionths of a per cent; their sum may pass 100 by what rounding thirds can add.
const WEIGHT_SUM_MAX_E6: u64 = 100_001_000;
/// Fractions and weights are kept to this step.
const E6: f64 = 1e6;

/// What happens to a key that has used up its fair share while the pool is in strict mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Policy {
    /// Block. Also what an unknown stored policy is read as.
    #[default]
    Hard,
    /// Allow, and tell the router to rank this candidate lower.
    Soft,
    /// Allow for as long as the pool has room.
    Burst,
}

impl Policy {
    /// The policy's name in documents.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::Hard => "hard",
            Policy::Soft => "soft",
            Policy::Burst => "burst",
        }
    }

    /// The policy of this name; an unknown one is [`Policy::Hard`].
    pub fn from_name(name: &str) -> Policy {
        match name {
            "soft" => Policy::Soft,
            "burst" => Policy::Burst,
            _ => Policy::Hard,
        }
    }
}

/// What an answer of the service does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Enforcement {
    /// Decisions bind.
    #[default]
    Enforce,
    /// Decisions are computed, counted and shown, and every request is allowed.
    Shadow,
}

/// What a decision is when the shared counters can't be reached in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureMode {
    /// Allow.
    #[default]
    FailOpen,
    /// Block.
    FailClosed,
    /// Decide within this replica's slice of what was left when it last heard.
    FailLocal,
}

impl FailureMode {
    /// As in the contract.
    pub const fn name(self) -> &'static str {
        match self {
            FailureMode::FailOpen => "FAIL_OPEN",
            FailureMode::FailClosed => "FAIL_CLOSED",
            FailureMode::FailLocal => "FAIL_LOCAL",
        }
    }
}

/// An absolute ceiling for one key.
#[derive(Clone, Debug, PartialEq)]
pub struct Cap {
    /// Above 0, in `unit`.
    pub value: f64,
    /// The dimensions it applies to.
    pub unit: Unit,
    /// Only the dimension with this window; `None`: all of the unit.
    pub window: Option<Window>,
    /// What its document says besides.
    unknown: Unknown,
}

impl Cap {
    /// The ceiling on `dimension` in steps, if the cap applies to it.
    pub fn on(&self, dimension: DimensionKey) -> Option<f64> {
        let applies =
            self.unit == dimension.unit && self.window.is_none_or(|window| window == dimension.window);
        applies.then(|| self.unit.to_steps(self.value))
    }
}

/// What a model cap counts: with the key, the name of its counter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelCapKey {
    /// The exact model.
    pub model: Model,
    /// What is counted, in which window.
    pub dimension: DimensionKey,
}

/// A ceiling for one key on one model, in a window of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelCap {
    /// What it counts.
    pub key: ModelCapKey,
    /// Above 0, in the unit.
    pub value: f64,
    /// What its document says besides.
    unknown: Unknown,
}

/// One key's part in a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// Whose part.
    pub api_key: ApiKeyId,
    /// Share of the pool in millionths of a per cent, up to 100,000,000.
    pub weight_e6: u32,
    /// What happens past the fair share.
    pub policy: Policy,
    /// Whatever the mode and the policy.
    pub cap: Option<Cap>,
    /// At most one for each model, unit and window.
    pub model_caps: Vec<ModelCap>,
    /// Counted, never limited.
    pub exempt: bool,
    /// What its document says besides.
    unknown: Unknown,
}

impl Allocation {
    /// The weight in per cent.
    pub fn weight(&self) -> f64 {
        f64::from(self.weight_e6) / E6
    }
}

/// Keys that share the quota of one or more connections to the same provider.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// The pool's name for machines.
    pub id: PoolId,
    /// The pool's name for people.
    pub name: String,
    /// As the catalogue names it; empty: no catalogue plan applies.
    pub provider: String,
    /// The first is the primary, whose plan is the pool's plan.
    pub connections: Arc<[ConnectionId]>,
    /// By key, in the given order.
    pub allocations: Vec<Allocation>,
    /// Where each key stands in `allocations`.
    index: HashMap<ApiKeyId, u32>,
    /// Fraction of the limit from which the pool is in strict mode; `None`: the service's setting.
    pub saturation_threshold: Option<f64>,
    /// Whether decisions bind.
    pub enforcement: Enforcement,
    /// What decides when the counters can't be reached.
    pub failure_mode: FailureMode,
    /// Millionths of every limit kept for the account's owner, below 1,000,000.
    pub owner_reserve_e6: u32,
    /// Free text to group pools by.
    pub group: String,
    /// What its document says besides.
    unknown: Unknown,
    /// Keys among which the limit is split equally, if no key that is not exempt has a weight.
    equal_split: Option<u32>,
}

impl Pool {
    /// The part of `api_key`, if it is in the pool.
    pub fn allocation(&self, api_key: &str) -> Option<&Allocation> {
        self.index.get(api_key).map(|&index| &self.allocations[index as usize])
    }

    /// The connection whose plan is the pool's plan.
    pub fn primary(&self) -> &ConnectionId {
        &self.connections[0]
    }

    /// The part of every limit kept for the owner, as a fraction.
    pub fn owner_reserve(&self) -> f64 {
        f64::from(self.owner_reserve_e6) / E6
    }

    /// What the pool may use where one connection may use `per_connection`. Products come first, so that exact shares
    /// stay exact.
    pub fn limit(&self, per_connection: f64) -> f64 {
        per_connection * self.connections.len() as f64 * (E6 - f64::from(self.owner_reserve_e6)) / E6
    }

    /// What the owner may use of all connections together where one may use `per_connection`.
    pub fn reserved_for_owner(&self, per_connection: f64) -> f64 {
        per_connection * self.connections.len() as f64 * f64::from(self.owner_reserve_e6) / E6
    }

    /// The fair share of `allocation` in a limit of the whole pool; none for an exempt key.
    pub fn fair_share(&self, allocation: &Allocation, limit: f64) -> Option<f64> {
        match self.equal_split {
            _ if allocation.exempt => None,
            Some(keys) => Some(limit / f64::from(keys)),
            None => Some(f64::from(allocation.weight_e6) * limit / (100.0 * E6)),
        }
    }

    /// Checks `spec`; every mistake is named, with paths below `path`.
    pub fn check(path: &str, spec: &PoolSpec) -> Result<Pool, Vec<InvalidField>> {
        let mut faults = Faults::default();
        let id = faults.take(PoolId::parse(&format!("{path}.pool_id"), &spec.pool_id));
        let name_chars = spec.name.chars().count();
        if !(1..=120).contains(&name_chars) || spec.name.chars().any(char::is_control) {
            faults.add(
                format!("{path}.name"),
                &spec.name,
                "1 to 120 characters, none of them a control character",
            );
        }
        faults.take(check_provider(&format!("{path}.provider"), &spec.provider));
        if spec.group.chars().count() > 120 || spec.group.chars().any(char::is_control) {
            faults.add(
                format!("{path}.group"),
                &spec.group,
                "up to 120 characters, none of them a control character",
            );
        }
        let connections = check_connections(path, &spec.connection_ids, &mut faults);
        let allocations = check_allocations(path, &spec.allocations, &mut faults);
        if let Some(threshold) = spec.saturation_threshold
            && !(0.0..=1.0).contains(&threshold)
        {
            let accepted = fraction_hint("a fraction from 0 to 1", threshold);
            faults.add(format!("{path}.saturation_threshold"), threshold, &accepted);
        }
        let owner_reserve_e6 = (spec.owner_reserve * E6).round_ties_even();
        if !(spec.owner_reserve >= 0.0 && owner_reserve_e6 < E6) {
            let accepted = fraction_hint("a fraction from 0 to below 1", spec.owner_reserve);
            faults.add(format!("{path}.owner_reserve"), spec.owner_reserve, &accepted);
        }
        let Some(id) = id.filter(|_| faults.is_empty()) else { return Err(faults.into_vec()) };
        let index =
            (0..).zip(&allocations).map(|(at, allocation)| (allocation.api_key.clone(), at)).collect();
        let limited = || allocations.iter().filter(|allocation| !allocation.exempt);
        let all_zero = limited().all(|allocation| allocation.weight_e6 == 0);
        Ok(Pool {
            id,
            name: spec.name.clone(),
            provider: spec.provider.clone(),
            connections: connections.into(),
            equal_split: all_zero.then(|| limited().count() as u32),
            index,
            allocations,
            saturation_threshold: spec.saturation_threshold,
            enforcement: spec.enforcement,
            failure_mode: spec.failure_mode,
            owner_reserve_e6: owner_reserve_e6 as u32,
            group: spec.group.clone(),
            unknown: Unknown::of(&spec.unknown),
        })
    }

    /// The pool as it is written in documents.
    pub fn to_spec(&self) -> PoolSpec {
        PoolSpec {
            pool_id: self.id.as_str().to_owned(),
            name: self.name.clone(),
            provider: self.provider.clone(),
            connection_ids: self.connections.iter().map(ToString::to_string).collect(),
            allocations: self.allocations.iter().map(Allocation::to_spec).collect(),
            saturation_threshold: self.saturation_threshold,
            enforcement: self.enforcement,
            failure_mode: self.failure_mode,
            owner_reserve: self.owner_reserve(),
            group: self.group.clone(),
            unknown: self.unknown.fields(),
        }
    }

    /// Keeps what `former` says and this version does not know: of the pool, of each key that stays, and of its caps.
    pub(super) fn keep_unknown_of(&mut self, former: &Pool) {
        self.unknown.keep_those_of(&former.unknown);
        for allocation in &mut self.allocations {
            if let Some(former) = former.allocation(allocation.api_key.as_str()) {
                allocation.keep_unknown_of(former);
            }
        }
    }

    /// Things that are allowed and probably not meant, given the dimensions of the pool's plan.
    pub fn warnings(&self, plan: &[DimensionKey]) -> Vec<String> {
        let mut warnings = Vec::new();
        if plan.is_empty() {
            let primary = self.primary();
            warnings.push(format!(
                "pool {} has no plan: nothing but model caps binds until PutPlan stores one for connection {primary}",
                self.id
            ));
        }
        for allocation in &self.allocations {
            if let Some(cap) = &allocation.cap
                && !plan.is_empty()
                && !plan.iter().any(|key| cap.on(*key).is_some())
            {
                let window = cap.window.map(|window| format!("/{window}")).unwrap_or_default();
                let key = &allocation.api_key;
                warnings.push(format!(
                    "the cap of {key} in {}{window} binds nothing: no dimension has it",
                    cap.unit
                ));
            }
        }
        self.warn_of_weights(&mut warnings);
        warnings
    }

    fn warn_of_weights(&self, warnings: &mut Vec<String>) {
        if self.equal_split.is_some() {
            return;
        }
        let limited = || self.allocations.iter().filter(|allocation| !allocation.exempt);
        for allocation in limited().filter(|allocation| allocation.weight_e6 == 0) {
            let key = &allocation.api_key;
            warnings.push(format!("{key} has no weight while others have: its fair share is 0"));
        }
        let sum: u64 = limited().map(|allocation| u64::from(allocation.weight_e6)).sum();
        if sum < 99_999_000 && limited().any(|allocation| allocation.policy == Policy::Hard) {
            let sum = sum as f64 / E6;
            warnings.push(format!(
                "weights add up to {sum}: in strict mode HARD keys leave the rest of 100 unused"
            ));
        }
    }
}

fn check_connections(path: &str, given: &[String], faults: &mut Faults) -> Vec<ConnectionId> {
    let field = format!("{path}.connection_ids");
    if !(1..=CONNECTIONS_MAX).contains(&given.len()) {
        let accepted = format!("1 to {CONNECTIONS_MAX} connections");
        faults.add(&field, format!("{} connections", given.len()), &accepted);
    }
    let mut connections: Vec<ConnectionId> = Vec::new();
    for (index, text) in given.iter().enumerate().take(CONNECTIONS_MAX) {
        let Some(connection) = faults.take(ConnectionId::parse(&format!("{field}[{index}]"), text)) else {
            continue;
        };
        if connections.contains(&connection) {
            faults.add(format!("{field}[{index}]"), text, "each connection at most once");
        } else {
            connections.push(connection);
        }
    }
    connections
}

fn check_allocations(path: &str, given: &[AllocationSpec], faults: &mut Faults) -> Vec<Allocation> {
    let field = format!("{path}.allocations");
    if given.len() > ALLOCATIONS_MAX {
        let accepted = format!("at most {ALLOCATIONS_MAX} allocations");
        faults.add(&field, format!("{} allocations", given.len()), &accepted);
        return Vec::new();
    }
    let mut seen = hashbrown::HashSet::new();
    let mut allocations = Vec::with_capacity(given.len());
    for (index, spec) in given.iter().enumerate() {
        let path = format!("{field}[{index}]");
        if !seen.insert(&spec.api_key_id) {
            faults.add(format!("{path}.api_key_id"), &spec.api_key_id, "each key at most once");
        }
        allocations.extend(faults.take_all(Allocation::check(&path, spec)));
    }
    let sum: u64 = allocations.iter().map(|allocation| u64::from(allocation.weight_e6)).sum();
    if sum > WEIGHT_SUM_MAX_E6 {
        let given = format!("weights that add up to {}", sum as f64 / E6);
        faults.add(field, given, "weights that add up to at most 100 (100.001 with rounding)");
    }
    allocations
}

impl Allocation {
    /// Checks `spec`; every mistake is named, with paths below `path`.
    pub fn check(path: &str, spec: &AllocationSpec) -> Result<Allocation, Vec<InvalidField>> {
        let mut faults = Faults::default();
        let api_key = faults.take(ApiKeyId::parse(&format!("{path}.api_key_id"), &spec.api_key_id));
        if !(0.0..=100.0).contains(&spec.weight) {
            faults.add(format!("{path}.weight"), spec.weight, "a share in per cent from 0 to 100");
        }
        let cap = spec.cap.as_ref().and_then(|cap| faults.take_all(Cap::check(&format!("{path}.cap"), cap)));
        if spec.model_caps.len() > MODEL_CAPS_MAX {
            let accepted = format!("at most {MODEL_CAPS_MAX} model caps");
            faults.add(
                format!("{path}.model_caps"),
                format!("{} model caps", spec.model_caps.len()),
                &accepted,
            );
        }
        let mut model_caps: Vec<ModelCap> = Vec::new();
        for (index, spec) in spec.model_caps.iter().enumerate().take(MODEL_CAPS_MAX) {
            let path = format!("{path}.model_caps[{index}]");
            let Some(cap) = faults.take_all(ModelCap::check(&path, spec)) else { continue };
            if model_caps.iter().any(|other| other.key == cap.key) {
                let given = format!("{} {}", spec.model, cap.key.dimension);
                faults.add(path, given, "each model, unit and window at most once");
            } else {
                model_caps.push(cap);
            }
        }
        let Some(api_key) = api_key.filter(|_| faults.is_empty()) else { return Err(faults.into_vec()) };
        Ok(Allocation {
            api_key,
            weight_e6: (spec.weight * E6).round_ties_even() as u32,
            policy: Policy::from_name(&spec.policy),
            cap,
            model_caps,
            exempt: spec.exempt,
            unknown: Unknown::of(&spec.unknown),
        })
    }

    fn keep_unknown_of(&mut self, former: &Allocation) {
        self.unknown.keep_those_of(&former.unknown);
        if let (Some(cap), Some(former)) = (&mut self.cap, &former.cap) {
            cap.unknown.keep_those_of(&former.unknown);
        }
        for cap in &mut self.model_caps {
            if let Some(former) = former.model_caps.iter().find(|former| former.key == cap.key) {
                cap.unknown.keep_those_of(&former.unknown);
            }
        }
    }

    fn to_spec(&self) -> AllocationSpec {
        AllocationSpec {
            api_key_id: self.api_key.to_string(),
            weight: self.weight(),
            policy: self.policy.name().to_owned(),
            cap: self.cap.as_ref().map(|cap| CapSpec {
                value: cap.value,
                unit: cap.unit.name().to_owned(),
                window: cap.window.map(|window| window.to_string()).unwrap_or_default(),
                unknown: cap.unknown.fields(),
            }),
            model_caps: self.model_caps.iter().map(ModelCap::to_spec).collect(),
            exempt: self.exempt,
            unknown: self.unknown.fields(),
        }
    }
}

impl Cap {
    fn check(path: &str, spec: &CapSpec) -> Result<Cap, Vec<InvalidField>> {
        let mut faults = Faults::default();
        let unit = faults.take(check_unit(&format!("{path}.unit"), &spec.unit));
        let value =
            unit.and_then(|unit| faults.take(check_ceiling(&format!("{path}.value"), unit, spec.value)));
        let window = match spec.window.as_str() {
            "" => None,
            text => faults.take(check_window(&format!("{path}.window"), text)),
        };
        match (unit, value) {
            (Some(unit), Some(value)) if faults.is_empty() => {
                Ok(Cap { value, unit, window, unknown: Unknown::of(&spec.unknown) })
            }
            _ => Err(faults.into_vec()),
        }
    }
}

impl ModelCap {
    fn check(path: &str, spec: &ModelCapSpec) -> Result<ModelCap, Vec<InvalidField>> {
        let mut faults = Faults::default();
        let model = faults.take(Model::parse(&format!("{path}.model"), &spec.model));
        let unit = faults.take(check_unit(&format!("{path}.unit"), &spec.unit));
        let value =
            unit.and_then(|unit| faults.take(check_ceiling(&format!("{path}.value"), unit, spec.value)));
        let window = match spec.window.as_str() {
            "" => Some(Window::HOURLY),
            text => faults.take(check_window(&format!("{path}.window"), text)),
        };
        match (model, unit, value, window) {
            (Some(model), Some(unit), Some(value), Some(window)) => {
                let key = ModelCapKey { model, dimension: DimensionKey { unit, window } };
                Ok(ModelCap { key, value, unknown: Unknown::of(&spec.unknown) })
            }
            _ => Err(faults.into_vec()),
        }
    }

    fn to_spec(&self) -> ModelCapSpec {
        let ModelCapKey { model, dimension } = &self.key;
        ModelCapSpec {
            model: model.to_string(),
            value: self.value,
            unit: dimension.unit.name().to_owned(),
            window: dimension.window.to_string(),
            unknown: self.unknown.fields(),
        }
    }
}

/// What a fraction must be; a value that looks like a per cent gets the question that its author needs.
pub fn fraction_hint(accepted: &str, given: f64) -> String {
    if given > 1.0 && given <= 100.0 {
        return format!("{accepted} (did you mean {}?)", given / 100.0);
    }
    accepted.to_owned()
}

/// A pool as written in requests and in stored documents, not yet checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The fields are those of `Pool`.
pub struct PoolSpec {
    pub pool_id: String,
    pub name: String,
    pub provider: String,
    pub connection_ids: Vec<String>,
    pub allocations: Vec<AllocationSpec>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saturation_threshold: Option<f64>,
    pub enforcement: Enforcement,
    pub failure_mode: FailureMode,
    pub owner_reserve: f64,
    pub group: String,
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// An allocation as written, not yet checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The fields are those of `Allocation`.
pub struct AllocationSpec {
    pub api_key_id: String,
    pub weight: f64,
    pub policy: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap: Option<CapSpec>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub model_caps: Vec<ModelCapSpec>,
    pub exempt: bool,
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// A cap as written, not yet checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The fields are those of `Cap`.
pub struct CapSpec {
    pub value: f64,
    pub unit: String,
    pub window: String,
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// A model cap as written, not yet checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The fields are those of `ModelCap`.
pub struct ModelCapSpec {
    pub model: String,
    pub value: f64,
    pub unit: String,
    pub window: String,
    #[serde(flatten)]
    pub unknown: UnknownFields,
}
