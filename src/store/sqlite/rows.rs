//! The rows of ledgers' changes: merged, sorted, and written with one statement for a table.

use std::{collections::BTreeMap, sync::Arc};

use hashbrown::HashMap;
use serde::Serialize;
use sqlx::{Sqlite, query::Query, sqlite::SqliteArguments};

use crate::core::{
    account::{AccountChange, AccountKey, Head, Share, ShareChange},
    burn_rate::{BurnRate, Sample},
    charge::CounterKey,
    ids::{ApiKeyId, CallId, Fingerprint, Model, PoolRevision, ReservationId},
    ledger::{Change, Hold},
    memory::{RecordMemory, RequestMemory},
    plan::DimensionKey,
    units::{Timestamp, Unit},
    window::Window,
};

/// The span of ends that share rows of remembered calls: they are dropped together.
pub(super) const SLICE_MS: u64 = 60_000;
/// Remembered calls that share a row.
const CALLS_IN_A_ROW: usize = 1_000;
/// Of larger rows, so much is as much work as a small one.
const BYTES_OF_A_SMALL_ROW: usize = 400;

/// The name of a row of consumption, in the order of the table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConsumptionKey {
    window: Window,
    bucket: u64,
    pool: PoolRevision,
    api_key: ApiKeyId,
    unit: Unit,
    model: Option<Model>,
}

/// Rows that differ from the tables, merged over any number of commits.
#[derive(Debug, Default)]
pub(super) struct Rows {
    consumption: HashMap<ConsumptionKey, i64>,
    reservations: HashMap<ReservationId, Reservation>,
    rates: HashMap<(PoolRevision, DimensionKey), BurnRate>,
    /// `None`: nothing is known any more.
    accounts: HashMap<(PoolRevision, AccountKey), Option<Head>>,
    shares: HashMap<(PoolRevision, AccountKey, ApiKeyId), Share>,
    /// Packed calls by the slice in which they end.
    calls: BTreeMap<u64, Vec<u8>>,
}

/// What became of a reservation since the rows are gathered.
#[derive(Debug)]
enum Reservation {
    /// It was made: the table does not have it.
    Made(Arc<Hold>),
    /// The table may have it, otherwise.
    Changed(Arc<Hold>),
    /// It is closed, and the table may have it.
    Closed,
}

/// One row to write.
#[derive(Debug)]
pub(super) enum RowWrite {
    /// Changes what is consumed.
    Consumption(ConsumptionKey, i64),
    /// Puts an open reservation, or deletes one that is closed.
    Reservation(ReservationId, Option<Arc<Hold>>),
    /// Replaces a rate.
    Rate(PoolRevision, DimensionKey, BurnRate),
    /// Replaces what is known of an account, or deletes it.
    Account(PoolRevision, AccountKey, Option<Head>),
    /// Replaces a key's part of it; deletes one that is all zero.
    Share(PoolRevision, AccountKey, ApiKeyId, Share),
    /// Adds packed calls that end in a slice.
    Calls(u64, Vec<u8>),
}

impl RowWrite {
    /// How much work it is, in small rows.
    pub(super) fn weight(&self) -> usize {
        match self {
            RowWrite::Calls(_, calls) => calls.len().div_ceil(BYTES_OF_A_SMALL_ROW),
            RowWrite::Share(_, _, _, share) => share.slices(),
            _ => 1,
        }
    }
}

impl Reservation {
    fn hold(self) -> Option<Arc<Hold>> {
        match self {
            Reservation::Made(hold) | Reservation::Changed(hold) => Some(hold),
            Reservation::Closed => None,
        }
    }
}

impl Rows {
    /// Adds the rows of `changes`, which happened in `pool` after everything that was added before.
    pub(super) fn add<'a>(&mut self, pool: PoolRevision, changes: impl IntoIterator<Item = &'a Change>) {
        for change in changes {
            match change {
                Change::Consumed { api_key, counter, bucket, delta } => {
                    let CounterKey { dimension: DimensionKey { unit, window }, model } = counter.clone();
                    let (api_key, bucket) = (api_key.clone(), *bucket);
                    let key = ConsumptionKey { window, bucket, pool, api_key, unit, model };
                    let sum = self.consumption.entry(key).or_default();
                    *sum = sum.saturating_add(*delta);
                }
                Change::Held(random, hold) => self.open(ReservationId { pool, random: *random }, hold),
                Change::Freed(random, _) => self.close(ReservationId { pool, random: *random }),
                Change::Sampled { dimension, after, .. } => {
                    self.rates.insert((pool, *dimension), *after);
                }
                Change::Account(change) => self.add_account(pool, change),
                Change::Record(call, memory) => {
                    pack(self.slice(memory.ends_at), pool, *call, Remembered::Record(*memory));
                }
                Change::Request(call, memory) => {
                    pack(self.slice(memory.ends_at), pool, *call, Remembered::Request(*memory));
                }
            }
        }
    }

    fn open(&mut self, id: ReservationId, hold: &Arc<Hold>) {
        let hold = Arc::clone(hold);
        let known = self.reservations.contains_key(&id);
        let row = if known { Reservation::Changed(hold) } else { Reservation::Made(hold) };
        self.reservations.insert(id, row);
    }

    fn close(&mut self, id: ReservationId) {
        if let Some(Reservation::Made(_)) = self.reservations.get(&id) {
            self.reservations.remove(&id);
        } else {
            self.reservations.insert(id, Reservation::Closed);
        }
    }

    fn add_account(&mut self, pool: PoolRevision, change: &AccountChange) {
        let AccountChange { account, before: _, after, shares, risen: _ } = change;
        for ShareChange { key, before: _, after } in shares {
            self.shares.insert((pool, account.clone(), key.clone()), after.clone());
        }
        self.accounts.insert((pool, account.clone()), after.clone());
    }

    fn slice(&mut self, ends_at: Timestamp) -> &mut Vec<u8> {
        self.calls.entry(ends_at.unix_ms() / SLICE_MS).or_default()
    }

    /// How much there is, in small rows.
    pub(super) fn len(&self) -> usize {
        let calls: usize = self.calls.values().map(Vec::len).sum();
        self.consumption.len()
            + self.reservations.len()
            + self.rates.len()
            + self.accounts.len()
            + self.shares.len()
            + calls / BYTES_OF_A_SMALL_ROW
    }

    /// The rows in the order of the tables: the same whenever the same changes were added in the same order.
    pub(super) fn in_order(self) -> Vec<RowWrite> {
        let mut consumption: Vec<_> = self.consumption.into_iter().collect();
        consumption.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let mut reservations: Vec<_> = self.reservations.into_iter().collect();
        reservations.sort_unstable_by_key(|(id, _)| *id);
        let mut rates: Vec<_> = self.rates.into_iter().collect();
        rates.sort_unstable_by_key(|(of, _)| *of);
        let mut accounts: Vec<_> = self.accounts.into_iter().collect();
        accounts.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let mut shares: Vec<_> = self.shares.into_iter().collect();
        shares.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let calls = self.calls.iter().flat_map(|(slice, calls)| {
            let rows = calls.chunks(CALLS_IN_A_ROW * PACKED_LEN);
            rows.map(|row| RowWrite::Calls(*slice, row.to_vec()))
        });
        consumption
            .into_iter()
            .map(|(key, delta)| RowWrite::Consumption(key, delta))
            .chain(reservations.into_iter().map(|(id, row)| RowWrite::Reservation(id, row.hold())))
            .chain(rates.into_iter().map(|((pool, dimension), rate)| RowWrite::Rate(pool, dimension, rate)))
            .chain(accounts.into_iter().map(|((pool, of), head)| RowWrite::Account(pool, of, head)))
            .chain(shares.into_iter().map(|((pool, of, key), share)| RowWrite::Share(pool, of, key, share)))
            .chain(calls)
            .collect()
    }
}

/// Rows as parameters of [`write_rows`]. A table that gets none has NULL, of which `json_each` makes no row.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// How many rows these are.
    pub(super) len: usize,
    more: Option<String>,
    less: Option<String>,
    open: Option<String>,
    closed: Option<String>,
    rates: Option<String>,
    accounts: Option<String>,
    shares: Option<String>,
    calls: Option<(u64, Vec<u8>)>,
}

impl Piece {
    /// The first of `rows`: as many as weigh `weight_max`, and at most one of packed calls, the last.
    pub(super) fn first_of(rows: &[RowWrite], weight_max: usize) -> Piece {
        let (mut more, mut less, mut open, mut closed, mut rates, mut accounts, mut shares) =
            <(Vec<_>, Vec<_>, Vec<_>, Vec<_>, Vec<_>, Vec<_>, Vec<_>)>::default();
        let mut piece = Piece::default();
        let mut weight = 0;
        for row in rows {
            piece.len += 1;
            weight += row.weight();
            match row {
                RowWrite::Consumption(key, delta @ 1..) => more.push(key.row(*delta)),
                RowWrite::Consumption(key, delta @ ..0) => less.push(key.row(*delta)),
                RowWrite::Consumption(_, 0) => {}
                RowWrite::Reservation(id, Some(hold)) => open.push(reservation_row(*id, hold)),
                RowWrite::Reservation(id, None) => closed.push((id.pool.0, hex(&id.random))),
                RowWrite::Rate(pool, dimension, rate) => rates.push(rate_row(*pool, *dimension, rate)),
                RowWrite::Account(pool, of, head) => accounts.push(account_row(*pool, of, head.as_ref())),
                RowWrite::Share(pool, of, key, share) => shares.push(share_row(*pool, of, key, share)),
                RowWrite::Calls(slice, calls) => piece.calls = Some((*slice, calls.clone())),
            }
            if weight >= weight_max || piece.calls.is_some() {
                break;
            }
        }
        let (more, less, open) = (json(&more), json(&less), json(&open));
        let (closed, rates, accounts, shares) = (json(&closed), json(&rates), json(&accounts), json(&shares));
        Piece { more, less, open, closed, rates, accounts, shares, ..piece }
    }

    /// Binds the parameters $1 to $9.
    pub(super) fn bind(
        self,
        query: Query<'_, Sqlite, SqliteArguments>,
    ) -> Query<'_, Sqlite, SqliteArguments> {
        let Piece { len: _, more, less, open, closed, rates, accounts, shares, calls } = self;
        let (slice, calls) = calls.map(|(slice, calls)| (slice as i64, calls)).unzip();
        query
            .bind(more)
            .bind(less)
            .bind(open)
            .bind(closed)
            .bind(rates)
            .bind(accounts)
            .bind(shares)
            .bind(slice)
            .bind(calls)
    }
}

/// Writes a [`Piece`]: one text, so that it is one message to the thread of the database. "WHERE true" tells the parser
/// that ON CONFLICT belongs to the INSERT. Parameters are named with $, because each statement of the text uses some of
/// them: the driver binds the wrong ones where numbers after ? have gaps.
macro_rules! write_rows {
    () => {
        "INSERT INTO quota_consumption (window_ms, bucket, pool, api_key_id, unit, model, consumed)
           SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
             min(value ->> 6, 9000000000000000)
           FROM json_each($1) WHERE true
           ON CONFLICT DO UPDATE SET consumed = min(consumed + excluded.consumed, 9000000000000000);
         UPDATE quota_consumption AS held SET consumed = max(consumed + (less.value ->> 6), 0)
           FROM json_each($2) AS less
           WHERE held.window_ms = less.value ->> 0 AND held.bucket = less.value ->> 1
             AND held.pool = less.value ->> 2 AND held.api_key_id = less.value ->> 3
             AND held.unit = less.value ->> 4 AND held.model = less.value ->> 5;
         INSERT OR REPLACE INTO reservations
             (pool, random, api_key_id, connection_id, model, request_id, expires_ms, amounts)
           SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6,
             value -> 7
           FROM json_each($3);
         DELETE FROM reservations
           WHERE (pool, random) IN (SELECT value ->> 0, value ->> 1 FROM json_each($4));
         INSERT OR REPLACE INTO burn_rates (pool, unit, window_ms, steps_per_second, sampled_ms, cumulative)
           SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5
           FROM json_each($5);
         INSERT OR REPLACE INTO accounts (pool, connection_id, unit, window_ms, state)
           SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value -> 4
           FROM json_each($6) WHERE value ->> 4 IS NOT NULL;
         DELETE FROM accounts WHERE (pool, connection_id, unit, window_ms) IN
           (SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3
            FROM json_each($6) WHERE value ->> 4 IS NULL);
         INSERT OR REPLACE INTO account_shares (pool, connection_id, unit, window_ms, api_key_id, state)
           SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value -> 5
           FROM json_each($7) WHERE value ->> 5 IS NOT NULL;
         DELETE FROM account_shares WHERE (pool, connection_id, unit, window_ms, api_key_id) IN
           (SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4
            FROM json_each($7) WHERE value ->> 5 IS NULL);
         INSERT INTO remembered_calls (ends_slice, calls) SELECT $8, $9 WHERE $9 IS NOT NULL;"
    };
}
pub(super) use write_rows;

/// `None` without rows.
fn json(rows: &[impl Serialize]) -> Option<String> {
    // Numbers and texts can always be written.
    (!rows.is_empty()).then(|| serde_json::to_string(rows).unwrap_or_default())
}

fn rate_row(pool: PoolRevision, dimension: DimensionKey, rate: &BurnRate) -> impl Serialize {
    let DimensionKey { unit, window } = dimension;
    let Sample { at, cumulative } = rate.last.unwrap_or_default();
    (pool.0, unit.name(), window.length_ms(), rate.steps_per_second, at.unix_ms(), cumulative)
}

fn account_row(pool: PoolRevision, of: &AccountKey, head: Option<&Head>) -> impl Serialize {
    let AccountKey { connection, dimension: DimensionKey { unit, window } } = of;
    (pool.0, connection.clone(), unit.name(), window.length_ms(), head.cloned())
}

fn share_row(pool: PoolRevision, of: &AccountKey, key: &ApiKeyId, share: &Share) -> impl Serialize {
    let AccountKey { connection, dimension: DimensionKey { unit, window } } = of;
    let kept = Some(share.clone()).filter(|share| *share != Share::default());
    (pool.0, connection.clone(), unit.name(), window.length_ms(), key.clone(), kept)
}

impl ConsumptionKey {
    fn row(&self, delta: i64) -> impl Serialize {
        let ConsumptionKey { window, bucket, pool, api_key, unit, model } = self;
        (window.length_ms(), bucket, pool.0, api_key.as_str(), unit.name(), name(model), delta)
    }
}

fn reservation_row(id: ReservationId, hold: &Hold) -> impl Serialize {
    let amounts = hold.amounts.iter().map(|(counter, steps)| {
        let CounterKey { dimension: DimensionKey { unit, window }, model } = counter;
        (unit.name(), window.length_ms(), name(model), *steps)
    });
    let amounts: Vec<_> = amounts.collect();
    let (key, connection) = (hold.api_key.as_str(), hold.connection.as_str());
    let (model, request, deadline_ms) = (name(&hold.model), &hold.request_id, hold.deadline.unix_ms());
    (id.pool.0, hex(&id.random), key, connection, model, request, deadline_ms, amounts)
}

fn name(model: &Option<Model>) -> &str {
    model.as_ref().map_or("", Model::as_str)
}

fn hex(random: &[u8; 12]) -> String {
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A remembered call and what is kept of it.
enum Remembered {
    Record(RecordMemory),
    Request(RequestMemory),
}

/// Bytes of a packed call: kind, pool, call, fingerprint (key, call), end, then `late` or the reservation's random part.
pub(super) const PACKED_LEN: usize = 1 + 8 + 16 + 4 + 8 + 8 + 12;

fn pack(into: &mut Vec<u8>, pool: PoolRevision, call: CallId, remembered: Remembered) {
    let (kind, fingerprint, ends_at, rest) = match remembered {
        Remembered::Record(memory) => {
            let mut rest = [0; 12];
            rest[0] = u8::from(memory.late);
            (0u8, memory.fingerprint, memory.ends_at, rest)
        }
        Remembered::Request(memory) => (1, memory.fingerprint, memory.ends_at, memory.reservation.random),
    };
    into.push(kind);
    into.extend(pool.0.to_le_bytes());
    into.extend(call.0);
    into.extend(fingerprint.key.to_le_bytes());
    into.extend(fingerprint.call.to_le_bytes());
    into.extend(ends_at.unix_ms().to_le_bytes());
    into.extend(rest);
}

pub(super) fn unpack(packed: &[u8; PACKED_LEN]) -> Option<(PoolRevision, Change)> {
    let mut rest = &packed[..];
    let [kind] = take(&mut rest)?;
    let pool = PoolRevision(u64::from_le_bytes(take(&mut rest)?));
    let call = CallId(take(&mut rest)?);
    let fingerprint =
        Fingerprint { key: u32::from_le_bytes(take(&mut rest)?), call: u64::from_le_bytes(take(&mut rest)?) };
    let ends_at = Timestamp::from_unix_ms(u64::from_le_bytes(take(&mut rest)?));
    let last: [u8; 12] = take(&mut rest)?;
    let change = match kind {
        0 => Change::Record(call, RecordMemory { fingerprint, ends_at, late: last[0] != 0 }),
        1 => {
            let reservation = ReservationId { pool, random: last };
            Change::Request(call, RequestMemory { fingerprint, ends_at, reservation })
        }
        _ => return None,
    };
    Some((pool, change))
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}
