//! Rows that nobody needs any more.

use sqlx::SqlitePool;

use super::{load::windows, rows::SLICE_MS, unavailable};
use crate::{
    core::{ids::PoolRevision, units::Timestamp},
    store::StoreError,
};

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
    // What was on its way to the tables when its pool was deleted.
    for statement in [
        "DELETE FROM accounts WHERE pool NOT IN (SELECT created_revision FROM pools)",
        "DELETE FROM account_shares WHERE pool NOT IN (SELECT created_revision FROM pools)",
    ] {
        let done = sqlx::query(statement).execute(connection).await.map_err(&failed)?;
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
    for statement in [
        "DELETE FROM reservations WHERE pool = ?1",
        "DELETE FROM burn_rates WHERE pool = ?1",
        "DELETE FROM accounts WHERE pool = ?1",
        "DELETE FROM account_shares WHERE pool = ?1",
    ] {
        sqlx::query(statement).bind(pool.0 as i64).execute(connection).await.map_err(&failed)?;
    }
    Ok(())
}
