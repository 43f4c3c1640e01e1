//! Drafts of other programs become pools of this one: what does not fit is mended, with a warning each time.

use hashbrown::{HashMap, HashSet};

use super::{Import, Warnings};
use crate::core::{
    ids::{ApiKeyId, ConnectionId, Model, PoolId, shown},
    plan::{DimensionKey, check_ceiling, check_provider},
    pool::{
        ALLOCATIONS_MAX, AllocationSpec, CONNECTIONS_MAX, CapSpec, MODEL_CAPS_MAX, ModelCapSpec, Policy,
        PoolSpec,
    },
    units::Unit,
    window::Window,
};

/// Most characters of a pool's name and group.
const NAME_CHARS_MAX: usize = 120;
/// How much of a connection's id names a pool that has no other name.
const CONNECTION_CHARS_SHOWN: usize = 12;
/// 100 per cent, in the steps that weights are kept to.
const WHOLE_E6: u64 = 100_000_000;

/// A pool as another program knew it.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// What warnings call it.
    pub(super) place: String,
    /// Its own id, if it had one.
    pub(super) pool_id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) provider: Option<String>,
    /// At least one; the first is the primary.
    pub(super) connections: Vec<ConnectionId>,
    pub(super) group: Option<String>,
    pub(super) shares: Vec<Share>,
}

/// A key's part as another program knew it.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) api_key: Option<String>,
    pub(super) percent: Option<f64>,
    pub(super) policy: Option<String>,
    /// An amount, and the name of its unit.
    pub(super) cap: Option<(f64, String)>,
    /// For each model an amount in an hour, and the name of its unit.
    pub(super) model_caps: Vec<(String, f64, String)>,
}

/// Turns drafts into pools, one after the other: of those that share a connection the first has it.
#[derive(Debug, Default)]
pub(super) struct Mender {
    pub(super) import: Import,
    /// Which draft has each connection.
    taken: HashMap<ConnectionId, String>,
    ids: HashSet<String>,
    /// Connections that have a plan.
    pub(super) planned: HashSet<String>,
}

impl Mender {
    pub(super) fn warn(&mut self, place: &str, warning: std::fmt::Arguments<'_>) {
        self.warnings().add(format!("{place}: {warning}"));
    }

    pub(super) fn warnings(&mut self) -> &mut Warnings {
        &mut self.import.warnings
    }

    /// Takes `draft` over, unless earlier pools have all of its connections.
    pub(super) fn add(&mut self, draft: Draft) {
        let Draft { place, pool_id, name, provider, connections, group, shares } = draft;
        let connections = self.connections_of(&place, connections);
        let Some(primary) = connections.first().cloned() else { return };
        let provider = self.provider(&place, provider);
        let pool = PoolSpec {
            pool_id: self.pool_id(&place, pool_id),
            name: self.name(&place, name, &provider, &primary),
            group: group.map(|group| self.text(&place, "group", &group)).unwrap_or_default(),
            allocations: self.allocations(&place, shares),
            connection_ids: connections.iter().map(ToString::to_string).collect(),
            provider,
            ..PoolSpec::default()
        };
        self.import.pools.push(pool);
    }

    /// Those that no earlier draft has.
    fn connections_of(&mut self, place: &str, given: Vec<ConnectionId>) -> Vec<ConnectionId> {
        let mut own = Vec::new();
        let mut others = Vec::new();
        for connection in given {
            match self.taken.get(&connection) {
                Some(other) if other != place => others.push((connection, other.clone())),
                Some(_) => {}
                None if own.len() == CONNECTIONS_MAX => {
                    self.warn(
                        place,
                        format_args!(
                            "connection {connection} is left out: a pool has at most {CONNECTIONS_MAX}"
                        ),
                    );
                }
                None => {
                    self.taken.insert(connection.clone(), place.to_owned());
                    own.push(connection);
                }
            }
        }
        for (connection, other) in others {
            if own.is_empty() {
                self.warn(place, format_args!("becomes one with {other}, which has connection {connection} too: the allocations are those of {other}"));
            } else {
                self.warn(place, format_args!("connection {connection} stays with {other}, which has it too: a connection is in at most one pool"));
            }
        }
        own
    }

    /// The id that it had, if it is one here; else none, so that one is chosen.
    fn pool_id(&mut self, place: &str, given: Option<String>) -> String {
        let Some(given) = given else { return String::new() };
        if PoolId::parse("pool_id", &given).is_ok() && self.ids.insert(given.clone()) {
            return given;
        }
        self.warn(
            place,
            format_args!(
                "gets another id: {} is not free or not 1 to 128 characters of a-z, 0-9, '.', '_' and '-'",
                shown(&given)
            ),
        );
        String::new()
    }

    fn provider(&mut self, place: &str, given: Option<String>) -> String {
        let given = given.unwrap_or_default();
        if check_provider("provider", &given).is_ok() {
            return given;
        }
        self.warn(
            place,
            format_args!(
                "the provider {} is left out: it is not up to 64 bytes without control characters",
                shown(&given)
            ),
        );
        String::new()
    }

    /// The account's label, else the provider, else the beginning of the connection's id.
    fn name(&mut self, place: &str, given: Option<String>, provider: &str, primary: &ConnectionId) -> String {
        if let Some(given) = given {
            let name = self.text(place, "name", &given);
            if !name.is_empty() {
                return name;
            }
        }
        let connection: String = primary.as_str().chars().take(CONNECTION_CHARS_SHOWN).collect();
        let name = [provider.trim(), connection.trim()].into_iter().find(|name| !name.is_empty());
        let name = name.unwrap_or("Migrated pool").to_owned();
        self.warn(place, format_args!("has no name of its own and is called {}", shown(&name)));
        name
    }

    /// `given` without control characters, and no longer than a name may be.
    fn text(&mut self, place: &str, what: &str, given: &str) -> String {
        let plain: String = given.chars().filter(|c| !c.is_control()).collect();
        let text: String = plain.trim().chars().take(NAME_CHARS_MAX).collect();
        if text != given.trim() {
            self.warn(place, format_args!("the {what} {} becomes {}: up to {NAME_CHARS_MAX} characters, none of them a control character", shown(given), shown(&text)));
        }
        text
    }

    fn allocations(&mut self, place: &str, shares: Vec<Share>) -> Vec<AllocationSpec> {
        let mut allocations: Vec<(u64, AllocationSpec)> = Vec::new();
        let mut seen = HashSet::new();
        for (index, share) in shares.into_iter().enumerate() {
            let place = format!("{place}.allocations[{index}]");
            let Some(api_key) = self.api_key(&place, share.api_key.as_deref()) else { continue };
            if allocations.len() == ALLOCATIONS_MAX {
                self.warn(
                    &place,
                    format_args!("is left out, with all after it: a pool has at most {ALLOCATIONS_MAX} keys"),
                );
                break;
            }
            if !seen.insert(api_key.clone()) {
                self.warn(&place, format_args!("is left out: key {api_key} is in the pool already"));
                continue;
            }
            let weight_e6 = self.weight_e6(&place, share.percent);
            let policy = self.policy(&place, share.policy.as_deref());
            allocations.push((
                weight_e6,
                AllocationSpec {
                    api_key_id: api_key.to_string(),
                    policy: policy.name().to_owned(),
                    cap: share.cap.and_then(|cap| self.cap(&place, cap)),
                    model_caps: self.model_caps(&place, share.model_caps),
                    ..AllocationSpec::default()
                },
            ));
        }
        self.scaled(place, allocations)
    }

    fn api_key(&mut self, place: &str, given: Option<&str>) -> Option<ApiKeyId> {
        let Some(given) = given.filter(|given| !given.trim().is_empty()) else {
            self.warn(place, format_args!("is left out: it names no key"));
            return None;
        };
        let parsed = ApiKeyId::parse("api_key_id", given);
        parsed.map_err(|fault| self.warn(place, format_args!("is left out: {fault}"))).ok()
    }

    fn weight_e6(&mut self, place: &str, given: Option<f64>) -> u64 {
        // NaN is as good as nothing.
        let Some(given) = given.filter(|given| !given.is_nan()) else {
            self.warn(place, format_args!("has no percentage: it gets 0"));
            return 0;
        };
        let clamped = given.clamp(0.0, 100.0);
        if clamped != given {
            self.warn(place, format_args!("{given} per cent become {clamped}"));
        }
        (clamped * 1e6).round_ties_even() as u64
    }

    /// Soft and burst as they are, anything else hard.
    pub(super) fn policy(&mut self, place: &str, given: Option<&str>) -> Policy {
        let policy = Policy::from_name(given.unwrap_or_default());
        match given {
            None => self.warn(place, format_args!("has no policy: it is HARD")),
            Some(given) if given != policy.name() => {
                self.warn(place, format_args!("the policy {} is HARD here", shown(given)));
            }
            Some(_) => {}
        }
        policy
    }

    fn cap(&mut self, place: &str, (value, unit): (f64, String)) -> Option<CapSpec> {
        let unit = self.unit_of_cap(place, value, &unit)?;
        Some(CapSpec { value, unit: unit.name().to_owned(), window: String::new(), ..Default::default() })
    }

    fn unit_of_cap(&mut self, place: &str, value: f64, unit: &str) -> Option<Unit> {
        let Some(known) = Unit::from_name(unit) else {
            self.warn(
                place,
                format_args!(
                    "a cap is left out: its unit is {}, not percent, requests, tokens or usd",
                    shown(unit)
                ),
            );
            return None;
        };
        let checked = check_ceiling("value", known, value);
        checked.map_err(|fault| self.warn(place, format_args!("a cap is left out: {fault}"))).ok()?;
        Some(known)
    }

    fn model_caps(&mut self, place: &str, given: Vec<(String, f64, String)>) -> Vec<ModelCapSpec> {
        let mut caps: Vec<ModelCapSpec> = Vec::new();
        for (model, value, unit) in given {
            let Some(unit) = self.unit_of_cap(place, value, &unit) else { continue };
            let key = DimensionKey { unit, window: Window::HOURLY };
            let again = caps.iter().any(|other| other.model == model && other.unit == unit.name());
            if again || caps.len() == MODEL_CAPS_MAX || Model::parse("model", &model).is_err() {
                self.warn(place, format_args!("the cap on model {} in {key} is left out: a key has one for each model and unit, at most {MODEL_CAPS_MAX}, and a model is 1 to 256 bytes without control characters", shown(&model)));
                continue;
            }
            let (unit, window) = (unit.name().to_owned(), key.window.to_string());
            caps.push(ModelCapSpec { model, value, unit, window, ..Default::default() });
        }
        caps
    }

    /// Weights that add up to more than 100 are made smaller in proportion, rounded down.
    fn scaled(&mut self, place: &str, given: Vec<(u64, AllocationSpec)>) -> Vec<AllocationSpec> {
        let sum: u64 = given.iter().map(|(weight_e6, _)| weight_e6).sum();
        if sum > WHOLE_E6 {
            let sum = sum as f64 / 1e6;
            self.warn(place, format_args!("percentages add up to {sum}: they are scaled to 100"));
        }
        let scaled = |weight_e6: u64| if sum > WHOLE_E6 { weight_e6 * WHOLE_E6 / sum } else { weight_e6 };
        let weighed = given
            .into_iter()
            .map(|(weight_e6, spec)| AllocationSpec { weight: scaled(weight_e6) as f64 / 1e6, ..spec });
        weighed.collect()
    }
}
