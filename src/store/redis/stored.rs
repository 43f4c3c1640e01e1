//! What Redis keeps of a pool, as the ledger that it makes.

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::{
    STORE, keys,
    wire::{Key, Samples, State, StoredAccount},
};
use crate::{
    core::{
        account::AccountKey,
        ids::{ApiKeyId, ConnectionId, PoolRevision},
        ledger::{AccountPart, Hold, Parts, PoolLedger},
        plan::DimensionKey,
        units::Unit,
        window::Window,
    },
    store::StoreError,
};

/// Fields of a pool's hash, told apart.
#[derive(Debug, Default)]
pub(super) struct Stored {
    pub(super) state: Option<State>,
    keys: Vec<(ApiKeyId, Key)>,
    accounts: Vec<(AccountKey, StoredAccount)>,
    holds: Vec<([u8; 12], Hold)>,
    samples: Vec<(DimensionKey, Samples)>,
}

impl Stored {
    /// Reads fields by their names.
    pub(super) fn read(fields: impl IntoIterator<Item = (Bytes, Bytes)>) -> Result<Self, StoreError> {
        let mut stored = Stored::default();
        for (name, value) in fields {
            match name.first() {
                None => stored.state = Some(decode("the state of a pool", &value)?),
                Some(&keys::SAMPLES) => {
                    stored.samples.push((dimension_of(&name[1..])?.0, decode("samples", &value)?));
                }
                Some(&keys::HOLD) => {
                    let random = name[1..].try_into().map_err(|_| corrupt("a reservation's name", &name))?;
                    stored.holds.push((random, decode("a reservation", &value)?));
                }
                Some(&keys::BATCH) => {}
                Some(&keys::ACCOUNT) => {
                    let (dimension, connection) = dimension_of(&name[1..])?;
                    let connection = ConnectionId::parse("connection_id", connection)
                        .map_err(|_| corrupt("an account's name", &name))?;
                    let account = AccountKey { connection, dimension };
                    stored.accounts.push((account, decode("an account", &value)?));
                }
                Some(_) => {
                    let text = std::str::from_utf8(&name).ok();
                    let key = text.and_then(|text| ApiKeyId::parse("api_key_id", text).ok());
                    let key = key.ok_or_else(|| corrupt("a key's name", &name))?;
                    stored.keys.push((key, decode("a key's counters", &value)?));
                }
            }
        }
        Ok(stored)
    }

    /// The ledger that these are of: an empty one if there is no state.
    pub(super) fn into_ledger(self, pool: PoolRevision) -> PoolLedger {
        let Stored { state, keys, accounts, holds, samples } = self;
        let Some(state) = state else { return PoolLedger::of_parts(pool, Parts::default()) };
        let samples_of = |dimension| {
            let found = samples.iter().find(|(of, _)| *of == dimension);
            found.map(|(_, samples)| samples.clone()).unwrap_or_default()
        };
        let accounts = accounts.into_iter().map(|(account, (number, head))| {
            let shares = keys.iter().filter_map(|(key, of)| Some((key.clone(), of.share(number)?)));
            AccountPart { account, head, shares: shares.collect() }
        });
        let parts = Parts {
            now: state.now,
            dimensions: state.dimensions(samples_of).collect(),
            accounts: accounts.collect(),
            keys: keys.into_iter().map(|(key, of)| of.into_part(key)).collect(),
            holds,
        };
        PoolLedger::of_parts(pool, parts)
    }
}

/// Reads what Redis keeps or answers.
pub(super) fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, StoreError> {
    rmp_serde::from_slice(bytes).map_err(|error| StoreError::Corrupt {
        store: STORE,
        what: what.to_owned(),
        found: format!("{} bytes", bytes.len()),
        expected: error.to_string(),
    })
}

/// The dimension that a field's name begins with, as in `Tokens:3600000`, and what follows it.
fn dimension_of(name: &[u8]) -> Result<(DimensionKey, &str), StoreError> {
    let parsed = || {
        let mut parts = std::str::from_utf8(name).ok()?.splitn(3, ':');
        let unit = parts.next()?;
        let unit = Unit::ALL.into_iter().find(|known| format!("{known:?}") == unit)?;
        let window = Window::from_ms(parts.next()?.parse().ok()?)?;
        Some((DimensionKey { unit, window }, parts.next().unwrap_or_default()))
    };
    parsed().ok_or_else(|| corrupt("a dimension's name", name))
}

fn corrupt(what: &str, found: &[u8]) -> StoreError {
    StoreError::Corrupt {
        store: STORE,
        what: what.to_owned(),
        found: String::from_utf8_lossy(found).into_owned(),
        expected: "another version has written it, or somebody else".to_owned(),
    }
}
