//! The rows of a ledger's changes: merged within a batch, one statement for a table and batch.

use std::{collections::BTreeMap, sync::Arc};

use hashbrown::HashMap;
use serde_json::{Value, json};
use sqlx::{Row, SqliteConnection, SqlitePool, sqlite::SqliteRow};

use super::{corrupt, unavailable, unsigned};
use crate::{
    core::{
        burn_rate::{BurnRate, Sample},
        charge::CounterKey,
        ids::{ApiKeyId, CallId, ConnectionId, Fingerprint, Model, PoolRevision, ReservationId},
        ledger::{Change, Hold},
        memory::{RecordMemory, RequestMemory},
        plan::DimensionKey,
        units::{Timestamp, Unit},
        window::Window,
    },
    store::StoreError,
};

/// The span of ends that share rows of remembered calls: they are dropped together.
const SLICE_MS: u64 = 60_000;

/// The name of a row of consumption.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ConsumptionKey {
    pool: PoolRevision,
    api_key: ApiKeyId,
    counter: CounterKey,
    bucket: u64,
}

/// What one commit writes.
#[derive(Debug, Default)]
pub(super) struct Rows {
    consumption: HashMap<ConsumptionKey, i64>,
    /// `None`: the reservation is closed.
    reservations: HashMap<ReservationId, Option<Arc<Hold>>>,
    rates: HashMap<(PoolRevision, DimensionKey), BurnRate>,
    /// Packed calls by the slice in which they end.
    calls: BTreeMap<u64, Vec<u8>>,
}

impl Rows {
    /// Adds the rows of `changes`, which happened in `pool` after everything that was added before.
    pub(super) fn add(&mut self, pool: PoolRevision, changes: &[Change]) {
        for change in changes {
            match change {
                Change::Consumed { api_key, counter, bucket, delta } => {
                    let (api_key, counter) = (api_key.clone(), counter.clone());
                    let key = ConsumptionKey { pool, api_key, counter, bucket: *bucket };
                    *self.consumption.entry(key).or_default() += delta;
                }
                Change::Held(random, hold) => {
                    self.reservations.insert(ReservationId { pool, random: *random }, Some(Arc::clone(hold)));
                }
                Change::Freed(random, _) => {
                    self.reservations.insert(ReservationId { pool, random: *random }, None);
                }
                Change::Sampled { dimension, after, .. } => {
                    self.rates.insert((pool, *dimension), *after);
                }
                Change::Record(call, memory) => {
                    pack(self.slice(memory.ends_at), pool, *call, Remembered::Record(*memory));
                }
                Change::Request(call, memory) => {
                    pack(self.slice(memory.ends_at), pool, *call, Remembered::Request(*memory));
                }
            }
        }
    }

    fn slice(&mut self, ends_at: Timestamp) -> &mut Vec<u8> {
        self.calls.entry(ends_at.unix_ms() / SLICE_MS).or_default()
    }

    /// Writes everything within the transaction of `connection`.
    pub(super) async fn write(&self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        self.write_consumption(connection).await?;
        self.write_reservations(connection).await?;
        self.write_rates(connection).await?;
        for (slice, calls) in &self.calls {
            sqlx::query("INSERT INTO remembered_calls (ends_slice, calls) VALUES (?1, ?2)")
                .bind(*slice as i64)
                .bind(calls)
                .execute(&mut *connection)
                .await?;
        }
        Ok(())
    }

    async fn write_consumption(&self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        let rows = |wanted: fn(i64) -> bool| {
            let rows = self.consumption.iter().filter(|(_, delta)| wanted(**delta));
            rows.map(|(key, delta)| consumption_row(key, *delta)).collect::<Vec<Value>>()
        };
        let (more, less) = (rows(|delta| delta > 0), rows(|delta| delta < 0));
        if !more.is_empty() {
            // "WHERE true" tells the parser that ON CONFLICT belongs to the INSERT.
            let upsert = "INSERT INTO quota_consumption (window_ms, bucket, pool, api_key_id, unit, model, consumed)
                 SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6
                 FROM json_each(?1) WHERE true
                 ON CONFLICT DO UPDATE SET consumed = min(consumed + excluded.consumed, 9000000000000000)";
            sqlx::query(upsert).bind(Value::Array(more).to_string()).execute(&mut *connection).await?;
        }
        if !less.is_empty() {
            let lower =
                "UPDATE quota_consumption AS held SET consumed = max(consumed + (less.value ->> 6), 0)
                 FROM json_each(?1) AS less
                 WHERE held.window_ms = less.value ->> 0 AND held.bucket = less.value ->> 1
                   AND held.pool = less.value ->> 2 AND held.api_key_id = less.value ->> 3
                   AND held.unit = less.value ->> 4 AND held.model = less.value ->> 5";
            sqlx::query(lower).bind(Value::Array(less).to_string()).execute(&mut *connection).await?;
        }
        Ok(())
    }

    async fn write_rates(&self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        let rows = self.rates.iter().map(|((pool, dimension), rate)| rate_row(*pool, *dimension, rate));
        let rows: Vec<Value> = rows.collect();
        if !rows.is_empty() {
            let replace = "INSERT OR REPLACE INTO burn_rates
                   (pool, unit, window_ms, steps_per_second, sampled_ms, cumulative)
                 SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5
                 FROM json_each(?1)";
            sqlx::query(replace).bind(Value::Array(rows).to_string()).execute(&mut *connection).await?;
        }
        Ok(())
    }

    async fn write_reservations(&self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        let mut open = Vec::new();
        let mut closed = Vec::new();
        for (id, hold) in &self.reservations {
            match hold {
                Some(hold) => open.push(reservation_row(*id, hold)),
                None => closed.push(json!([id.pool.0, hex(&id.random)])),
            }
        }
        if !open.is_empty() {
            let insert = "INSERT OR REPLACE INTO reservations
                   (pool, random, api_key_id, connection_id, model, request_id, expires_ms, amounts)
                 SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6,
                   value -> 7
                 FROM json_each(?1)";
            sqlx::query(insert).bind(Value::Array(open).to_string()).execute(&mut *connection).await?;
        }
        if !closed.is_empty() {
            let delete = "DELETE FROM reservations
                 WHERE (pool, random) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))";
            sqlx::query(delete).bind(Value::Array(closed).to_string()).execute(&mut *connection).await?;
        }
        Ok(())
    }
}

fn rate_row(pool: PoolRevision, dimension: DimensionKey, rate: &BurnRate) -> Value {
    let DimensionKey { unit, window } = dimension;
    let Sample { at, cumulative } = rate.last.unwrap_or_default();
    json!([pool.0, unit.name(), window.length_ms(), rate.steps_per_second, at.unix_ms(), cumulative])
}

fn consumption_row(key: &ConsumptionKey, delta: i64) -> Value {
    let CounterKey { dimension: DimensionKey { unit, window }, model } = &key.counter;
    let model = model.as_ref().map_or("", Model::as_str);
    json!([window.length_ms(), key.bucket, key.pool.0, key.api_key.as_str(), unit.name(), model, delta])
}

fn reservation_row(id: ReservationId, hold: &Hold) -> Value {
    let amounts = hold.amounts.iter().map(|(counter, steps)| {
        let CounterKey { dimension: DimensionKey { unit, window }, model } = counter;
        json!([unit.name(), window.length_ms(), model.as_ref().map_or("", Model::as_str), steps])
    });
    json!([
        id.pool.0,
        hex(&id.random),
        hold.api_key.as_str(),
        hold.connection.as_str(),
        hold.model.as_ref().map_or("", Model::as_str),
        hold.request_id,
        hold.deadline.unix_ms(),
        amounts.collect::<Vec<Value>>(),
    ])
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
const PACKED_LEN: usize = 1 + 8 + 16 + 4 + 8 + 8 + 12;

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

fn unpack(packed: &[u8; PACKED_LEN]) -> Option<(PoolRevision, Change)> {
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

/// Reads all that counts at `now`, the oldest buckets first, and hands it to `restore`.
pub(super) async fn read(
    connection: &SqlitePool,
    now: Timestamp,
    mut restore: impl FnMut(PoolRevision, Change),
) -> Result<(), StoreError> {
    let failed = unavailable("reading the counters");
    for window in windows(connection).await? {
        let oldest = window.bucket(now).saturating_sub(1);
        let rows = sqlx::query(
            "SELECT bucket, pool, api_key_id, unit, model, consumed FROM quota_consumption
             WHERE window_ms = ?1 AND bucket >= ?2 AND consumed > 0 ORDER BY bucket",
        )
        .bind(window.length_ms() as i64)
        .bind(oldest as i64)
        .fetch_all(connection)
        .await
        .map_err(&failed)?;
        for row in &rows {
            let (pool, change) = read_consumption(row, window)?;
            restore(pool, change);
        }
    }
    let rows = sqlx::query("SELECT * FROM burn_rates").fetch_all(connection).await.map_err(&failed)?;
    for row in &rows {
        let (pool, change) = read_rate(row)?;
        restore(pool, change);
    }
    let rows = sqlx::query("SELECT * FROM reservations WHERE expires_ms > ?1")
        .bind(now.unix_ms() as i64)
        .fetch_all(connection)
        .await
        .map_err(&failed)?;
    for row in &rows {
        let (pool, change) = read_reservation(row)?;
        restore(pool, change);
    }
    let rows = sqlx::query_scalar::<_, Vec<u8>>("SELECT calls FROM remembered_calls WHERE ends_slice >= ?1")
        .bind((now.unix_ms() / SLICE_MS) as i64)
        .fetch_all(connection)
        .await
        .map_err(&failed)?;
    for calls in &rows {
        let (packed, rest) = calls.as_chunks();
        for call in packed {
            let known = unpack(call).ok_or_else(|| corrupt("remembered_calls", call, "a kind of 0 or 1"))?;
            restore(known.0, known.1);
        }
        if !rest.is_empty() {
            return Err(corrupt("remembered_calls", rest, format!("records of {PACKED_LEN} bytes")));
        }
    }
    Ok(())
}

/// The lengths of the windows that have rows: a few, found without reading the rows.
async fn windows(connection: &SqlitePool) -> Result<Vec<Window>, StoreError> {
    let lengths: Vec<i64> = sqlx::query_scalar(
        "WITH RECURSIVE lengths (window_ms) AS (
           SELECT min(window_ms) FROM quota_consumption
           UNION ALL
           SELECT (SELECT min(window_ms) FROM quota_consumption AS next WHERE next.window_ms > lengths.window_ms)
           FROM lengths WHERE lengths.window_ms IS NOT NULL
         )
         SELECT window_ms FROM lengths WHERE window_ms IS NOT NULL",
    )
    .fetch_all(connection)
    .await
    .map_err(unavailable("reading the counters"))?;
    lengths.into_iter().map(read_window).collect()
}

fn read_window(stored: i64) -> Result<Window, StoreError> {
    let length_ms = unsigned("window_ms", stored)?;
    Window::from_ms(length_ms).ok_or_else(|| corrupt("window_ms", stored, Window::ACCEPTED))
}

fn read_consumption(row: &SqliteRow, window: Window) -> Result<(PoolRevision, Change), StoreError> {
    let counter = CounterKey {
        dimension: DimensionKey { unit: read_unit(column(row, "unit")?)?, window },
        model: read_model(column(row, "model")?)?,
    };
    let api_key = ApiKeyId::parse("api_key_id", column(row, "api_key_id")?).map_err(not_an_id)?;
    let bucket = unsigned("bucket", column(row, "bucket")?)?;
    let delta = column(row, "consumed")?;
    let pool = PoolRevision(unsigned("pool", column(row, "pool")?)?);
    Ok((pool, Change::Consumed { api_key, counter, bucket, delta }))
}

fn read_rate(row: &SqliteRow) -> Result<(PoolRevision, Change), StoreError> {
    let pool = PoolRevision(unsigned("pool", column(row, "pool")?)?);
    let dimension = DimensionKey {
        unit: read_unit(column(row, "unit")?)?,
        window: read_window(column(row, "window_ms")?)?,
    };
    let at = Timestamp::from_unix_ms(unsigned("sampled_ms", column(row, "sampled_ms")?)?);
    let cumulative = unsigned("cumulative", column(row, "cumulative")?)?;
    let steps_per_second = column(row, "steps_per_second")?;
    let after = BurnRate { steps_per_second, last: Some(Sample { at, cumulative }) };
    Ok((pool, Change::Sampled { dimension, before: BurnRate::default(), after }))
}

fn read_reservation(row: &SqliteRow) -> Result<(PoolRevision, Change), StoreError> {
    let pool = PoolRevision(unsigned("pool", column(row, "pool")?)?);
    let random: &str = column(row, "random")?;
    let id = ReservationId::parse(&format!("r{}-{random}", pool.0))
        .ok_or_else(|| corrupt("reservations.random", random, "24 hexadecimal digits"))?;
    let amounts: &str = column(row, "amounts")?;
    let amounts: Vec<(String, u64, String, u64)> = serde_json::from_str(amounts)
        .map_err(|error| corrupt("reservations.amounts", amounts, error.to_string()))?;
    let amounts = amounts.into_iter().map(|(unit, window_ms, model, steps)| {
        let window = read_window(i64::try_from(window_ms).unwrap_or(i64::MAX))?;
        let dimension = DimensionKey { unit: read_unit(&unit)?, window };
        Ok((CounterKey { dimension, model: read_model(&model)? }, steps))
    });
    let hold = Hold {
        api_key: ApiKeyId::parse("api_key_id", column(row, "api_key_id")?).map_err(not_an_id)?,
        connection: ConnectionId::parse("connection_id", column(row, "connection_id")?).map_err(not_an_id)?,
        model: read_model(column(row, "model")?)?,
        request_id: column::<String>(row, "request_id")?,
        deadline: Timestamp::from_unix_ms(unsigned("expires_ms", column(row, "expires_ms")?)?),
        amounts: amounts.collect::<Result<_, StoreError>>()?,
    };
    Ok((pool, Change::Held(id.random, Arc::new(hold))))
}

fn read_unit(stored: &str) -> Result<Unit, StoreError> {
    Unit::from_name(stored).ok_or_else(|| corrupt("unit", stored, "percent, requests, tokens or usd"))
}

fn read_model(stored: &str) -> Result<Option<Model>, StoreError> {
    match stored {
        "" => Ok(None),
        text => Model::parse("model", text).map(Some).map_err(not_an_id),
    }
}

fn not_an_id(fault: crate::core::ids::InvalidField) -> StoreError {
    corrupt(fault.field, fault.given, fault.accepted)
}

fn column<'r, T>(row: &'r SqliteRow, name: &str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
{
    row.try_get(name).map_err(unavailable("reading the counters"))
}

/// Deletes what nobody needs at `now`: buckets past the retention, reservations and remembered calls that have ended.
pub(super) async fn sweep(
    connection: &SqlitePool,
    now: Timestamp,
    retention_ms: u64,
) -> Result<u64, StoreError> {
    let failed = unavailable("sweeping old rows");
    let mut deleted = 0;
    for window in windows(connection).await? {
        let kept_ms = retention_ms.max(2 * window.length_ms());
        let oldest_kept = window.bucket(Timestamp::from_unix_ms(now.unix_ms().saturating_sub(kept_ms)));
        let done = sqlx::query("DELETE FROM quota_consumption WHERE window_ms = ?1 AND bucket < ?2")
            .bind(window.length_ms() as i64)
            .bind(oldest_kept as i64)
            .execute(connection)
            .await
            .map_err(&failed)?;
        deleted += done.rows_affected();
    }
    for (statement, before) in [
        ("DELETE FROM reservations WHERE expires_ms <= ?1", now.unix_ms()),
        ("DELETE FROM burn_rates WHERE sampled_ms < ?1", now.unix_ms().saturating_sub(retention_ms)),
        ("DELETE FROM remembered_calls WHERE ends_slice < ?1", now.unix_ms() / SLICE_MS),
    ] {
        let done = sqlx::query(statement).bind(before as i64).execute(connection).await.map_err(&failed)?;
        deleted += done.rows_affected();
    }
    Ok(deleted)
}

/// Deletes what counts of `pool` at `now`; older buckets, which nothing reads, go with the retention.
pub(super) async fn remove_pool(
    connection: &SqlitePool,
    pool: PoolRevision,
    now: Timestamp,
) -> Result<(), StoreError> {
    let failed = unavailable("removing a pool's counters");
    for window in windows(connection).await? {
        let newest = window.bucket(now);
        sqlx::query(
            "DELETE FROM quota_consumption WHERE window_ms = ?1 AND bucket IN (?2, ?3) AND pool = ?4",
        )
        .bind(window.length_ms() as i64)
        .bind(newest as i64)
        .bind(newest.saturating_sub(1) as i64)
        .bind(pool.0 as i64)
        .execute(connection)
        .await
        .map_err(&failed)?;
    }
    for statement in ["DELETE FROM reservations WHERE pool = ?1", "DELETE FROM burn_rates WHERE pool = ?1"] {
        sqlx::query(statement).bind(pool.0 as i64).execute(connection).await.map_err(&failed)?;
    }
    Ok(())
}
