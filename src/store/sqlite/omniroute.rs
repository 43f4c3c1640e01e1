//! The database of an OmniRoute installation, read and never written.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use sqlx::{AssertSqlSafe, Row, SqliteConnection, sqlite::SqliteRow};

use super::{OpenError, open_read_only};
use crate::core::import::omniroute::{AllocationRow, Installation, ModelCapRow, PlanRow, PoolRow};

/// What every SQLite database begins with.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// Most rows of one table that are taken.
const ROWS_MAX: usize = 1_000_000;

/// Why a foreign database was not read.
#[derive(Debug, thiserror::Error)]
pub enum ForeignError {
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It is not what it should be.
    #[error(
        "{path} is not the storage.sqlite of an OmniRoute installation: it has no table {table}. Of quota-share itself, \
         import what `quota-share export` prints"
    )]
    NoTable {
        /// The file.
        path: PathBuf,
        /// What is missing.
        table: &'static str,
    },
    /// A table has more than is taken.
    #[error("{path} has more than {ROWS_MAX} rows in {table}: import a smaller one")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Which.
        table: &'static str,
    },
    /// A table cannot be read.
    #[error("{table} in {path} cannot be read: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Which.
        table: &'static str,
        /// What SQLite said.
        source: sqlx::Error,
    },
}

/// True if the file is an SQLite database, whatever is in it.
pub fn is_database(path: &Path) -> io::Result<bool> {
    let mut start = Vec::new();
    File::open(path)?.take(MAGIC.len() as u64).read_to_end(&mut start)?;
    Ok(start == MAGIC)
}

/// Reads the pools and plans of an OmniRoute installation, as they are at one moment: it may be running. Of
/// `provider_connections`, which holds secrets, nothing but the id and the provider is read.
pub async fn read_omniroute(path: &Path) -> Result<Installation, ForeignError> {
    let pool = open_read_only(path).await?;
    let failed = |source| ForeignError::Unreadable { path: path.to_owned(), table: "the database", source };
    let mut snapshot = pool.begin().await.map_err(failed)?;
    let installation = Reader { path, connection: &mut snapshot }.read().await?;
    snapshot.rollback().await.map_err(failed)?;
    pool.close().await;
    Ok(installation)
}

struct Reader<'a> {
    path: &'a Path,
    connection: &'a mut SqliteConnection,
}

impl Reader<'_> {
    async fn read(mut self) -> Result<Installation, ForeignError> {
        Ok(Installation {
            pools: self.required("quota_pools", &["id", "connection_id", "name", "group_id"], pool).await?,
            allocations: self
                .required(
                    "quota_allocations",
                    &["pool_id", "api_key_id", "weight", "cap_value", "cap_unit", "policy"],
                    allocation,
                )
                .await?,
            members: self.optional("quota_pool_connections", &["pool_id", "connection_id"], pair).await?,
            groups: self.optional("quota_groups", &["id", "name"], pair).await?,
            model_caps: self
                .optional(
                    "quota_allocation_model_caps",
                    &["pool_id", "api_key_id", "model", "cap_value", "cap_unit"],
                    model_cap,
                )
                .await?,
            plans: self
                .optional("provider_plans", &["connection_id", "provider", "dimensions_json", "source"], plan)
                .await?,
            providers: self.optional("provider_connections", &["id", "provider"], pair).await?,
        })
    }

    async fn required<T>(
        &mut self,
        table: &'static str,
        columns: &[&str],
        read: fn(&SqliteRow) -> sqlx::Result<T>,
    ) -> Result<Vec<T>, ForeignError> {
        if !self.has(table).await? {
            return Err(ForeignError::NoTable { path: self.path.to_owned(), table });
        }
        self.rows(table, columns, read).await
    }

    /// A table that older installations do not have.
    async fn optional<T>(
        &mut self,
        table: &'static str,
        columns: &[&str],
        read: fn(&SqliteRow) -> sqlx::Result<T>,
    ) -> Result<Vec<T>, ForeignError> {
        if self.has(table).await? { self.rows(table, columns, read).await } else { Ok(Vec::new()) }
    }

    async fn has(&mut self, table: &'static str) -> Result<bool, ForeignError> {
        let found =
            sqlx::query_scalar("SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?1");
        let found: i64 = found
            .bind(table)
            .fetch_one(&mut *self.connection)
            .await
            .map_err(|source| ForeignError::Unreadable { path: self.path.to_owned(), table, source })?;
        Ok(found > 0)
    }

    async fn rows<T>(
        &mut self,
        table: &'static str,
        columns: &[&str],
        read: fn(&SqliteRow) -> sqlx::Result<T>,
    ) -> Result<Vec<T>, ForeignError> {
        let failed = |source| ForeignError::Unreadable { path: self.path.to_owned(), table, source };
        // SQLite columns hold whatever was put into them: each is asked for in the type that is read.
        let columns = columns.iter().map(|name| match *name {
            "weight" | "cap_value" => {
                format!(
                    "CASE WHEN typeof({name}) IN ('integer', 'real') THEN CAST({name} AS REAL) END AS {name}"
                )
            }
            _ => format!("CAST({name} AS TEXT) AS {name}"),
        });
        let columns = columns.collect::<Vec<_>>().join(", ");
        // Names from the constants above, nothing that was given.
        let query = format!("SELECT {columns} FROM {table} ORDER BY rowid LIMIT {}", ROWS_MAX + 1);
        let rows =
            sqlx::query(AssertSqlSafe(query)).fetch_all(&mut *self.connection).await.map_err(failed)?;
        if rows.len() > ROWS_MAX {
            return Err(ForeignError::TooLarge { path: self.path.to_owned(), table });
        }
        rows.iter().map(read).collect::<Result<_, _>>().map_err(failed)
    }
}

fn pool(row: &SqliteRow) -> sqlx::Result<PoolRow> {
    Ok(PoolRow {
        id: row.try_get("id")?,
        connection_id: row.try_get("connection_id")?,
        name: row.try_get("name")?,
        group_id: row.try_get("group_id")?,
    })
}

fn allocation(row: &SqliteRow) -> sqlx::Result<AllocationRow> {
    Ok(AllocationRow {
        pool_id: row.try_get("pool_id")?,
        api_key_id: row.try_get("api_key_id")?,
        weight: row.try_get("weight")?,
        cap_value: row.try_get("cap_value")?,
        cap_unit: row.try_get("cap_unit")?,
        policy: row.try_get("policy")?,
    })
}

fn model_cap(row: &SqliteRow) -> sqlx::Result<ModelCapRow> {
    Ok(ModelCapRow {
        pool_id: text(row, 0)?,
        api_key_id: text(row, 1)?,
        model: text(row, 2)?,
        cap_value: row.try_get("cap_value")?,
        cap_unit: row.try_get("cap_unit")?,
    })
}

fn plan(row: &SqliteRow) -> sqlx::Result<PlanRow> {
    Ok(PlanRow {
        connection_id: row.try_get("connection_id")?,
        provider: row.try_get("provider")?,
        dimensions_json: row.try_get("dimensions_json")?,
        source: row.try_get("source")?,
    })
}

fn pair(row: &SqliteRow) -> sqlx::Result<(String, String)> {
    Ok((text(row, 0)?, text(row, 1)?))
}

/// What is not there is as good as empty.
fn text(row: &SqliteRow, column: usize) -> sqlx::Result<String> {
    Ok(row.try_get::<Option<String>, _>(column)?.unwrap_or_default())
}
