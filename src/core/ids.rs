//! The names that callers give to keys, connections, pools and calls, and what the service remembers of them.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A value that is not accepted: which field, what was given, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {given} is not valid: use {accepted}")]
pub struct InvalidField {
    /// Path of the field in the request, for example `pool.allocations[2].weight`.
    pub field: String,
    /// The given value, shortened if it is long.
    pub given: String,
    /// What is accepted.
    pub accepted: String,
}

impl InvalidField {
    /// A refusal of `given` for `field`.
    pub fn new(field: impl Into<String>, given: impl fmt::Debug, accepted: impl Into<String>) -> Self {
        Self { field: field.into(), given: shown(given), accepted: accepted.into() }
    }
}

/// `value` for a message: shortened if it is long.
pub fn shown(value: impl fmt::Debug) -> String {
    /// Long enough to recognise a value, short enough for a log line.
    const SHOWN_CHARS_MAX: usize = 80;
    let mut shown = format!("{value:?}");
    if let Some((end, _)) = shown.char_indices().nth(SHOWN_CHARS_MAX) {
        shown.truncate(end);
        shown.push('…');
    }
    shown
}

/// The mistakes found so far, so that all of them can be named at once.
#[derive(Debug, Default)]
pub struct Faults(Vec<InvalidField>);

impl Faults {
    /// Adds a refusal of `given` for `field`.
    pub fn add(&mut self, field: impl Into<String>, given: impl fmt::Debug, accepted: &str) {
        self.0.push(InvalidField::new(field, given, accepted));
    }

    /// The value, or `None` and one more mistake.
    pub fn take<T>(&mut self, parsed: Result<T, InvalidField>) -> Option<T> {
        parsed.map_err(|fault| self.0.push(fault)).ok()
    }

    /// The value, or `None` and more mistakes.
    pub fn take_all<T>(&mut self, parsed: Result<T, Vec<InvalidField>>) -> Option<T> {
        parsed.map_err(|faults| self.0.extend(faults)).ok()
    }

    /// True if there was none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, in the order in which they were found.
    pub fn into_vec(self) -> Vec<InvalidField> {
        self.0
    }
}

/// Checks free text: `bytes` long, without control characters.
pub fn parse_text(
    field: &str,
    given: &str,
    bytes: std::ops::RangeInclusive<usize>,
) -> Result<(), InvalidField> {
    if bytes.contains(&given.len()) && !given.chars().any(char::is_control) {
        return Ok(());
    }
    let accepted = format!("{} to {} bytes without control characters", bytes.start(), bytes.end());
    Err(InvalidField::new(field, given, accepted))
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $bytes:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses `given`, naming `field` in the error.
            pub fn parse(field: &str, given: &str) -> Result<Self, InvalidField> {
                parse_text(field, given, $bytes)?;
                Ok(Self(given.into()))
            }

            /// The name as it was given.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

text_id! {
    /// Names an API key: 1 to 256 bytes without control characters.
    ApiKeyId, 1..=256
}
text_id! {
    /// Names an upstream account: 1 to 256 bytes without control characters.
    ConnectionId, 1..=256
}
text_id! {
    /// The exact name of a model: 1 to 256 bytes without control characters.
    Model, 1..=256
}

/// Names a pool: 1 to 128 characters of `a-z`, `0-9`, `.`, `_` and `-`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(Arc<str>);

impl PoolId {
    /// Parses `given`, naming `field` in the error.
    pub fn parse(field: &str, given: &str) -> Result<Self, InvalidField> {
        let plain = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-');
        if (1..=128).contains(&given.len()) && given.chars().all(plain) {
            return Ok(Self(given.into()));
        }
        Err(InvalidField::new(field, given, "1 to 128 characters of a-z, 0-9, '.', '_' and '-'"))
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::borrow::Borrow<str> for PoolId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// The configuration revision at which a pool was created. It never repeats, so it names one life of a pool: counters
/// and reservations are filed under it, and a late call can't reach a new pool of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PoolRevision(pub u64);

/// Names a reservation: the pool's creation revision and 96 random bits. Opaque to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReservationId {
    /// The life of the pool in which it was made.
    pub pool: PoolRevision,
    /// Drawn by the caller of the core.
    pub random: [u8; 12],
}

impl ReservationId {
    /// Reads an id that [`Display`](fmt::Display) wrote; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let (revision, random) = text.strip_prefix('r')?.split_once('-')?;
        let digits = random.as_bytes();
        if digits.len() != 24 {
            return None;
        }
        let mut bytes = [0; 12];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        let id = Self { pool: PoolRevision(revision.parse().ok()?), random: bytes };
        // One spelling for each id, so that the text can be remembered by its hash.
        (id.to_string() == text).then_some(id)
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}-", self.pool.0)?;
        self.random.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What is kept of an idempotency key, request id or reservation id: 128 bits of a SHA-256 over its scope and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CallId(pub [u8; 16]);

impl CallId {
    /// Of a call that waits in the journal of this replica as the entry of this number.
    pub fn of_journal_entry(entry: i64) -> Self {
        Self(digest(&["journal entry", &entry.to_string()]))
    }

    /// Of an idempotency key, which holds within its connection (and the pool in whose ledger it is kept).
    pub fn of_idempotency_key(connection: &ConnectionId, key: &str) -> Self {
        Self(digest(&["idempotency_key", connection.as_str(), key]))
    }

    /// Of a request id, with the same scope.
    pub fn of_request_id(connection: &ConnectionId, request: &str) -> Self {
        Self(digest(&["request_id", connection.as_str(), request]))
    }

    /// Of a reservation id as the caller wrote it.
    pub fn of_reservation_id(text: &str) -> Self {
        Self(digest(&["reservation_id", text]))
    }
}

/// What a repeated call must agree with: who called, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Of the key alone, to tell another key's call from another cost.
    pub key: u32,
    /// Of the key, the model and the cost.
    pub call: u64,
}

impl Fingerprint {
    /// Of a call by `key` for `model` (empty if none) that costs `cost`.
    pub fn of(key: &ApiKeyId, model: &str, cost: &super::units::Cost) -> Self {
        let amounts = [cost.requests, cost.tokens, cost.usd, cost.percent].map(|a| a.steps().to_string());
        let [requests, tokens, usd, percent] = &amounts;
        let call = digest(&["call", key.as_str(), model, requests, tokens, usd, percent]);
        Self {
            key: u32::from_le_bytes(first(&digest(&["key", key.as_str()]))),
            call: u64::from_le_bytes(first(&call)),
        }
    }
}

/// Parts are framed by their length, so that no two lists of parts are one text.
pub(crate) fn digest(parts: &[&str]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let bytes: [u8; 32] = hash.finalize().into();
    first(&bytes)
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| bytes[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_id_reads_back_and_nothing_else_reads_as_one() {
        let id = ReservationId { pool: PoolRevision(17), random: [0xab; 12] };
        let text = id.to_string();
        assert_eq!(text, "r17-abababababababababababab");
        assert_eq!(ReservationId::parse(&text), Some(id));
        for other in ["", "r", "r17", "r17-", "17-abababababababababababab", "r017-abababababababababababab"]
        {
            assert_eq!(ReservationId::parse(other), None, "{other}");
        }
        let spellings =
            ["r17-ABABABABABABABABABABABAB", "r17-ababababababababababababab", "r17-ababababababababababäb"];
        for other in spellings {
            assert_eq!(ReservationId::parse(other), None, "{other}");
        }
    }

    #[test]
    fn ids_of_different_scope_differ_though_their_texts_join_alike() {
        let connection = |text| ConnectionId::parse("connection_id", text).unwrap();
        assert_ne!(
            CallId::of_idempotency_key(&connection("ab"), "c"),
            CallId::of_idempotency_key(&connection("a"), "bc")
        );
        assert_ne!(
            CallId::of_idempotency_key(&connection("a"), "b"),
            CallId::of_request_id(&connection("a"), "b")
        );
    }

    #[test]
    fn a_refusal_names_the_field_the_value_and_what_is_accepted() {
        let error = PoolId::parse("pool.pool_id", "Team A").unwrap_err();
        assert_eq!(
            error.to_string(),
            "pool.pool_id: \"Team A\" is not valid: use 1 to 128 characters of a-z, 0-9, '.', '_' and '-'"
        );
        let error = ApiKeyId::parse("api_key_id", &"x".repeat(257)).unwrap_err();
        assert!(error.given.chars().count() <= 81, "{}", error.given);
        assert!(ApiKeyId::parse("api_key_id", "tab\there").is_err());
    }
}
