//! Pools and plans as documents in SQLite.

use std::path::Path;

use async_trait::async_trait;
use sqlx::{
    Row, Sqlite, SqlitePool,
    query::Query,
    sqlite::{SqliteArguments, SqliteRow},
};

use super::{
    FILE, OpenError, STORE, SqliteStore, corrupt, disk::Disk, open_read_only, schema_version, unavailable,
    unsigned,
};
use crate::{
    core::{
        directory::{Directory, Origin, PlanEntry, PoolHistory, SettingsEntry, Stored, Write},
        document::DocumentName,
        ids::{InvalidField, PoolRevision},
        plan::{Plan, PlanSpec},
        pool::{Pool, PoolSpec},
        settings::StoredSettings,
        units::Timestamp,
    },
    store::{DirectoryStore, StoreError},
};

/// Pools and plans in the file of a [`SqliteStore`].
#[derive(Debug)]
pub struct SqliteDirectory {
    connection: SqlitePool,
    disk: Disk,
}

impl SqliteDirectory {
    /// The documents of `store`.
    pub fn new(store: &SqliteStore) -> Self {
        Self { connection: store.connection.clone(), disk: store.disk.clone() }
    }

    /// The documents of a data directory that another process may be using: they can only be read.
    pub async fn read_only(folder: &Path) -> Result<Self, OpenError> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Err(OpenError::Missing { folder: folder.to_owned() });
        }
        let connection = open_read_only(&path).await?;
        let version = sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(&connection);
        let found: Option<i64> =
            version.await.map_err(|source| OpenError::Database { path: path.clone(), source })?;
        match found {
            Some(found) if found == schema_version() => Ok(Self { connection, disk: Disk::new() }),
            Some(found) if found > schema_version() => {
                Err(OpenError::NewerVersion { path, found, expected: schema_version() })
            }
            found => {
                Err(OpenError::OlderVersion { path, found: found.unwrap_or(0), expected: schema_version() })
            }
        }
    }
}

impl SqliteDirectory {
    async fn write(&self, before: u64, next: &Directory, writes: &[Write]) -> Result<(), StoreError> {
        let failed = unavailable("writing the configuration");
        let mut transaction = self.connection.begin_with("BEGIN IMMEDIATE").await.map_err(&failed)?;
        let Origin { lineage, write } = next.origin();
        let moved = "UPDATE service SET config_revision = ?2, lineage = ?3, config_write = ?4
                     WHERE config_revision = ?1";
        let moved = sqlx::query(moved)
            .bind(before as i64)
            .bind(next.revision() as i64)
            .bind(lineage.as_deref())
            .bind(write.as_str())
            .execute(&mut *transaction)
            .await
            .map_err(&failed)?;
        if moved.rows_affected() != 1 {
            return Err(corrupt("config_revision", "another revision", before.to_string()));
        }
        for write in writes {
            statement(write).execute(&mut *transaction).await.map_err(&failed)?;
            if matches!(write, Write::PutPool(_) | Write::PutPlan(_)) {
                forget_deletion(&write.name()).execute(&mut *transaction).await.map_err(&failed)?;
            }
        }
        let deletes = |write: &&Write| matches!(write, Write::DeletePool(..) | Write::DeletePlan(_));
        for name in writes.iter().filter(deletes).map(Write::name) {
            if let Some((revision, at)) = next.deletion(&name) {
                remember_deletion(&name, revision, at).execute(&mut *transaction).await.map_err(&failed)?;
            }
        }
        transaction.commit().await.map_err(&failed)
    }
}

#[async_trait]
impl DirectoryStore for SqliteDirectory {
    async fn commit(&self, before: u64, next: &Directory, writes: &[Write]) -> Result<(), StoreError> {
        let result = self.write(before, next, writes).await;
        self.disk.tell(&result);
        result
    }

    fn failing(&self) -> Option<StoreError> {
        self.disk.why()
    }

    async fn load(&self) -> Result<Directory, StoreError> {
        let failed = unavailable("reading the configuration");
        // All at one revision, also where another process writes.
        let mut snapshot = self.connection.begin().await.map_err(&failed)?;
        let service = sqlx::query(
            "SELECT config_revision, settings, settings_revision, settings_ms, lineage, config_write FROM service",
        )
        .fetch_one(&mut *snapshot)
        .await
        .map_err(&failed)?;
        let deletions = sqlx::query("SELECT name, revision, deleted_ms FROM deletions")
            .fetch_all(&mut *snapshot)
            .await
            .map_err(&failed)?;
        let plans = sqlx::query("SELECT connection_id, revision, written_ms, document FROM plans")
            .fetch_all(&mut *snapshot)
            .await
            .map_err(&failed)?;
        let pools = sqlx::query(
            "SELECT pool_id, created_revision, revision, created_ms, updated_ms, document FROM pools",
        )
        .fetch_all(&mut *snapshot)
        .await
        .map_err(&failed)?;
        snapshot.rollback().await.map_err(&failed)?;
        let plans = plans.iter().map(read_plan).collect::<Result<_, _>>()?;
        let pools = pools.iter().map(read_pool).collect::<Result<_, _>>()?;
        let settings = SettingsEntry {
            settings: parse_settings(&text(&service, "settings")?)?,
            revision: number(&service, "settings_revision")?,
            written_at: Timestamp::from_unix_ms(number(&service, "settings_ms")?),
        };
        let lineage = service.try_get("lineage").map_err(&failed)?;
        let stored = Stored {
            revision: number(&service, "config_revision")?,
            settings,
            plans,
            pools,
            deleted: deletions.iter().map(read_deletion).collect::<Result<_, _>>()?,
            origin: Origin { lineage, write: text(&service, "config_write")? },
        };
        Directory::restore(stored).map_err(|refused| {
            corrupt("the pools", refused.to_string(), "pools that do not share a connection")
        })
    }
}

fn statement(write: &Write) -> Query<'_, Sqlite, SqliteArguments> {
    match write {
        Write::PutPool(entry) => {
            let PoolHistory { created_revision, revision, created_at, updated_at } = entry.history;
            sqlx::query(
                "INSERT OR REPLACE INTO pools (pool_id, created_revision, revision, created_ms, updated_ms, document)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )
            .bind(entry.pool.id.as_str())
            .bind(created_revision.0 as i64)
            .bind(revision as i64)
            .bind(created_at.unix_ms() as i64)
            .bind(updated_at.unix_ms() as i64)
            .bind(document(&entry.pool.to_spec()))
        }
        Write::DeletePool(id, _) => sqlx::query("DELETE FROM pools WHERE pool_id = ?1").bind(id.as_str()),
        Write::PutPlan(entry) => sqlx::query(
            "INSERT OR REPLACE INTO plans (connection_id, revision, document, written_ms) VALUES (?1, ?2, ?3, ?4)",
        )
        .bind(entry.plan.connection.as_str())
        .bind(entry.revision as i64)
        .bind(document(&entry.plan.to_spec()))
        .bind(entry.written_at.unix_ms() as i64),
        Write::DeletePlan(connection) => {
            sqlx::query("DELETE FROM plans WHERE connection_id = ?1").bind(connection.as_str())
        }
        Write::PutSettings(entry) => {
            sqlx::query("UPDATE service SET settings = ?1, settings_revision = ?2, settings_ms = ?3")
                .bind(document(&entry.settings))
                .bind(entry.revision as i64)
                .bind(entry.written_at.unix_ms() as i64)
        }
        Write::Deletion(name, Some((revision, at))) => remember_deletion(name, *revision, *at),
        Write::Deletion(name, None) => forget_deletion(name),
    }
}

fn forget_deletion(name: &DocumentName) -> Query<'static, Sqlite, SqliteArguments> {
    sqlx::query("DELETE FROM deletions WHERE name = ?1").bind(name.to_string())
}

fn remember_deletion(
    name: &DocumentName,
    revision: u64,
    at: Timestamp,
) -> Query<'static, Sqlite, SqliteArguments> {
    sqlx::query("INSERT OR REPLACE INTO deletions (name, revision, deleted_ms) VALUES (?1, ?2, ?3)")
        .bind(name.to_string())
        .bind(revision as i64)
        .bind(at.unix_ms() as i64)
}

fn read_deletion(row: &SqliteRow) -> Result<(DocumentName, u64, Timestamp), StoreError> {
    let name = text(row, "name")?;
    let name = name.parse().map_err(|fault: InvalidField| corrupt("a deletion", name, fault.accepted))?;
    Ok((name, number(row, "revision")?, Timestamp::from_unix_ms(number(row, "deleted_ms")?)))
}

fn document(spec: &impl serde::Serialize) -> String {
    serde_json::to_string(spec).expect("a spec has string keys and finite numbers, so it is JSON")
}

fn read_plan(row: &SqliteRow) -> Result<PlanEntry, StoreError> {
    let name = format!("the plan of {}", text(row, "connection_id")?);
    let spec: PlanSpec = parse(&name, &text(row, "document")?)?;
    let plan = Plan::check("plan", &spec).map_err(|faults| invalid(&name, &faults))?;
    let written_at = Timestamp::from_unix_ms(number(row, "written_ms")?);
    Ok(PlanEntry { plan, revision: number(row, "revision")?, written_at })
}

fn read_pool(row: &SqliteRow) -> Result<(Pool, PoolHistory), StoreError> {
    let name = format!("pool {}", text(row, "pool_id")?);
    let spec: PoolSpec = parse(&name, &text(row, "document")?)?;
    let pool = Pool::check("pool", &spec).map_err(|faults| invalid(&name, &faults))?;
    let history = PoolHistory {
        created_revision: PoolRevision(number(row, "created_revision")?),
        revision: number(row, "revision")?,
        created_at: Timestamp::from_unix_ms(number(row, "created_ms")?),
        updated_at: Timestamp::from_unix_ms(number(row, "updated_ms")?),
    };
    Ok((pool, history))
}

fn parse<T: serde::de::DeserializeOwned>(name: &str, document: &str) -> Result<T, StoreError> {
    serde_json::from_str(document).map_err(|error| corrupt(name, document, error.to_string()))
}

/// Nothing of the document is in the error: it may hold the password of a Redis.
fn parse_settings(document: &str) -> Result<StoredSettings, StoreError> {
    serde_json::from_str(document).map_err(|error| {
        let place = format!("a document that can be read: line {}, column {}", error.line(), error.column());
        corrupt("the settings", format_args!("***"), place)
    })
}

fn invalid(name: &str, faults: &[InvalidField]) -> StoreError {
    let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
    StoreError::Corrupt {
        store: STORE,
        what: name.to_owned(),
        found: "a document that is not valid".to_owned(),
        expected: faults.join("; "),
    }
}

fn text(row: &SqliteRow, column: &str) -> Result<String, StoreError> {
    row.try_get(column).map_err(unavailable("reading the configuration"))
}

fn number(row: &SqliteRow, column: &str) -> Result<u64, StoreError> {
    unsigned(column, row.try_get(column).map_err(unavailable("reading the configuration"))?)
}
