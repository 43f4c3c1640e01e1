//! What the tables hold, as changes to ledgers that were empty before.

use std::sync::Arc;

use sqlx::{Row, SqlitePool, sqlite::SqliteRow};

use super::{
    corrupt,
    rows::{PACKED_LEN, SLICE_MS, unpack},
    unavailable, unsigned,
};
use crate::{
    core::{
        account::{AccountChange, AccountKey, Share, ShareChange},
        burn_rate::{BurnRate, Sample},
        charge::CounterKey,
        ids::{ApiKeyId, ConnectionId, Model, PoolRevision, ReservationId},
        ledger::{Change, Hold},
        plan::DimensionKey,
        units::{Timestamp, Unit},
        window::Window,
    },
    store::StoreError,
};

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
    for statement in ["SELECT *, '' AS api_key_id FROM accounts", "SELECT * FROM account_shares"] {
        let rows = sqlx::query(statement).fetch_all(connection).await.map_err(&failed)?;
        for row in &rows {
            let (pool, change) = read_account(row)?;
            restore(pool, change);
        }
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
pub(super) async fn windows(connection: &SqlitePool) -> Result<Vec<Window>, StoreError> {
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

/// What is known of an account as a whole or, with a key, that key's part.
fn read_account(row: &SqliteRow) -> Result<(PoolRevision, Change), StoreError> {
    let pool = PoolRevision(unsigned("pool", column(row, "pool")?)?);
    let dimension = DimensionKey {
        unit: read_unit(column(row, "unit")?)?,
        window: read_window(column(row, "window_ms")?)?,
    };
    let connection =
        ConnectionId::parse("connection_id", column(row, "connection_id")?).map_err(not_an_id)?;
    let state: &str = column(row, "state")?;
    let unreadable = |error: serde_json::Error| corrupt("accounts.state", state, error.to_string());
    let account = AccountKey { connection, dimension };
    let mut change = AccountChange { account, before: None, after: None, shares: Vec::new(), risen: 0 };
    match column(row, "api_key_id")? {
        "" => change.after = Some(serde_json::from_str(state).map_err(unreadable)?),
        key => {
            let key = ApiKeyId::parse("api_key_id", key).map_err(not_an_id)?;
            let share = serde_json::from_str(state).map_err(unreadable)?;
            change.shares.push(ShareChange { key, before: Share::default(), after: share });
        }
    }
    Ok((pool, Change::Account(Box::new(change))))
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
