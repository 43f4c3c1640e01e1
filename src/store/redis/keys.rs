//! The names of everything in Redis. All of a pool is in one hash slot; a number says which layout it is in.

use bytes::Bytes;

use crate::core::{
    ids::{ConnectionId, PoolRevision},
    plan::DimensionKey,
};

/// How this version lays out what it keeps. Another layout has other names.
pub(super) const LAYOUT: u32 = 1;
/// Where the newest layout that any replica has used is written.
pub(super) const LAYOUT_KEY: &str = "quota-share:layout";

/// Written to find out whether anything can be.
pub(super) const PROBE_KEY: &str = "quota-share:probe";
/// Which senders are there, by when they last said so.
pub(super) const REPLICAS_KEY: &str = "quota-share:replicas";

/// The parts of a pool's keys after its hash tag, in the order in which the script takes them.
const SUFFIXES: [&str; 7] = ["", ":deadlines", ":recorders", ":ids0", ":ids1", ":ids2", ":mark"];

/// Where the state of a pool is in its hash.
pub(super) const STATE: &[u8] = b"";

/// What is written where a pool was that is removed.
pub(super) const REMOVED: &[u8] = b"removed";

/// First bytes of fields that are no keys' names.
pub(super) const SAMPLES: u8 = 1;
pub(super) const HOLD: u8 = 2;
pub(super) const BATCH: u8 = 3;
pub(super) const ACCOUNT: u8 = 4;

/// All keys of a pool; the first is its hash.
pub(super) fn of_pool(pool: PoolRevision) -> [Bytes; 7] {
    SUFFIXES.map(|suffix| format!("quota-share:{LAYOUT}:{{{}}}{suffix}", pool.0).into())
}

/// Written to find out whether anything can be, on the node that has the pool.
pub(super) fn probe_of(pool: PoolRevision) -> Bytes {
    format!("quota-share:{LAYOUT}:{{{}}}:probe", pool.0).into()
}

/// The field of what is known of an account.
pub(super) fn account(dimension: DimensionKey, connection: &ConnectionId) -> Vec<u8> {
    let mut field = vec![ACCOUNT];
    field.extend(format!("{:?}:{}:{connection}", dimension.unit, dimension.window.length_ms()).bytes());
    field
}
