//! The embedded driver: counters in memory, every write in one SQLite file before its answer.
//!
//! The file is written in WAL mode with `synchronous=FULL`: what was acknowledged survives `kill -9` and, as far as the
//! disk keeps its word, a power cut.

mod directory;
mod disk;
mod journal;
mod ledger;
mod load;
mod log;
mod omniroute;
mod rows;
mod sweep;
mod writer;

use std::{
    fs::{File, OpenOptions, TryLockError},
    future::ready,
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sqlx::{
    ConnectOptions, SqlitePool,
    migrate::{MigrateError, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::watch;

pub use directory::SqliteDirectory;
pub use journal::SqliteJournal;
pub use ledger::{Commit, SqliteLedger};
pub use omniroute::{ForeignError, is_database, read_omniroute};

use self::disk::{Disk, is_sound};
use super::StoreError;
use crate::core::units::Timestamp;

const STORE: &str = "the SQLite file";
const FILE: &str = "storage.sqlite";
const LOCK_FILE: &str = "quota-share.lock";
/// How long a statement waits for another process, such as a backup, to let go of the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// Of the newest migration.
fn schema_version() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// The data directory, held by this process alone.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    /// The one connection: SQLite has one writer at a time, and readers only at start.
    connection: SqlitePool,
    disk: Disk,
    /// Unlocked when the store is closed or dropped.
    lock: File,
}

/// Why the data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it.
    #[error("{folder} is in use by the process {pid}: stop it, or set DATA_DIR to another folder")]
    InUse {
        /// The data directory.
        folder: PathBuf,
        /// The other process.
        pid: String,
    },
    /// It cannot be made, read or written.
    #[error("{path} cannot be used: {source}")]
    Folder {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not a database of this version.
    #[error("{path} cannot be opened: {source}")]
    Database {
        /// The file.
        path: PathBuf,
        /// What SQLite said.
        source: sqlx::Error,
    },
    /// A migration failed.
    #[error("{path} cannot be brought to this version: {source}")]
    Migration {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: MigrateError,
    },
    /// There is nothing to read.
    #[error("there is no {FILE} in {folder}: set DATA_DIR to the folder of a service's data")]
    Missing {
        /// The data directory.
        folder: PathBuf,
    },
    /// A newer version has written it.
    #[error(
        "{path} has the schema {found}, and this version knows schemas up to {expected}: use the newer version that \
         wrote it, or a backup from before"
    )]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: i64,
        /// The newest that this version knows.
        expected: i64,
    },
    /// The file is only to be read, and was written by an older version.
    #[error(
        "{path} has the schema {found} and this version {expected}: use the version that wrote it, or start this one \
         on it once with `quota-share serve`"
    )]
    OlderVersion {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: i64,
        /// That of this version.
        expected: i64,
    },
}

impl SqliteStore {
    /// Takes `folder`, which is made if it is missing, and brings its database to this version.
    pub async fn open(folder: &Path) -> Result<Self, OpenError> {
        std::fs::create_dir_all(folder)
            .map_err(|source| OpenError::Folder { path: folder.to_owned(), source })?;
        let lock = lock(folder)?;
        let path = folder.join(FILE);
        let options = SqliteConnectOptions::new()
            .filename(&path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            .disable_statement_logging();
        // A connection to a file of this process does not go away: it need not be asked before each use.
        let pool = SqlitePoolOptions::new().max_connections(1).test_before_acquire(false);
        let pool = pool.before_acquire(|connection, _| Box::pin(ready(Ok(is_sound(connection)))));
        let connection = pool
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options)
            .await
            .map_err(|source| OpenError::Database { path: path.clone(), source })?;
        MIGRATIONS.run(&connection).await.map_err(|source| match source {
            MigrateError::VersionMissing(found) => {
                OpenError::NewerVersion { path: path.clone(), found, expected: schema_version() }
            }
            source => OpenError::Migration { path: path.clone(), source },
        })?;
        Ok(Self { path, connection, disk: Disk::new(), lock })
    }

    /// Names this data directory among replicas: chosen by `choose` at the first start, and kept.
    pub async fn replica_id(&self, choose: impl FnOnce() -> String) -> Result<String, StoreError> {
        let failed = unavailable("reading the replica's id");
        let update = "UPDATE service SET replica_id = ?1 WHERE replica_id = ''";
        sqlx::query(update).bind(choose()).execute(&self.connection).await.map_err(&failed)?;
        let read = sqlx::query_scalar("SELECT replica_id FROM service");
        read.fetch_one(&self.connection).await.map_err(&failed)
    }

    /// Follows whether anything can be written: `None` while it can.
    pub fn failing(&self) -> watch::Receiver<Option<StoreError>> {
        self.disk.follow()
    }

    /// Finds out whether anything can be written.
    pub async fn probe(&self) {
        self.disk.probe(&self.connection).await;
    }

    /// Deletes what nobody needs at `now`, whichever driver is in use: reservations and ids that have ended, and
    /// consumption older than `retention_days` (or two windows, whichever is longer). Returns how many rows that were.
    pub async fn sweep(&self, now: Timestamp, retention_days: u32) -> Result<u64, StoreError> {
        let retention_ms = u64::from(retention_days) * 86_400_000;
        sweep::sweep(&self.connection, now, retention_ms).await
    }

    /// The database file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the write-ahead log back into the file and lets go of both; the folder stays this process' own.
    pub async fn fold(&self) {
        self.connection.close().await;
    }

    /// Writes the write-ahead log back into the file and lets go of both, and of the folder.
    pub async fn close(&self) {
        self.fold().await;
        if let Err(error) = self.lock.unlock() {
            // It is let go of when the process ends.
            tracing::warn!(error = &error as &dyn std::error::Error, "the data directory stays locked");
        }
    }
}

/// Opens a database that is somebody else's to write. Beside a writer it sees what was committed last; beside nobody it
/// leaves no file, which might then be another user's than the database.
async fn open_read_only(path: &Path) -> Result<SqlitePool, OpenError> {
    let has_log = is_logged(path).map_err(|source| OpenError::Folder { path: path.to_owned(), source })?;
    let log = PathBuf::from(format!("{}-wal", path.display()));
    let options = SqliteConnectOptions::new()
        .filename(path)
        .read_only(true)
        // Whoever writes has a log.
        .immutable(has_log && !log.exists())
        .busy_timeout(BUSY_TIMEOUT)
        .disable_statement_logging();
    let pool = SqlitePoolOptions::new().max_connections(1);
    pool.connect_with(options).await.map_err(|source| OpenError::Database { path: path.to_owned(), source })
}

/// True if whoever writes the database uses a write-ahead log; its header says so.
fn is_logged(path: &Path) -> io::Result<bool> {
    const WRITE_VERSION_AT: usize = 18;
    const WAL: u8 = 2;
    let mut header = Vec::new();
    File::open(path)?.take(WRITE_VERSION_AT as u64 + 1).read_to_end(&mut header)?;
    Ok(header.get(WRITE_VERSION_AT) == Some(&WAL))
}

/// Takes the folder for this process; the lock file names it to whoever comes later.
fn lock(folder: &Path) -> Result<File, OpenError> {
    let path = folder.join(LOCK_FILE);
    let failed = |source| OpenError::Folder { path: path.clone(), source };
    let mut options = OpenOptions::new();
    let mut file = options.read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            file.read_to_string(&mut pid).map_err(failed)?;
            return Err(OpenError::InUse { folder: folder.to_owned(), pid: pid.trim().to_owned() });
        }
        Err(TryLockError::Error(source)) => return Err(failed(source)),
    }
    file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
    writeln!(file, "{}", std::process::id()).map_err(failed)?;
    Ok(file)
}

/// A failure of SQLite as every caller sees it.
fn unavailable(doing: &'static str) -> impl Fn(sqlx::Error) -> StoreError {
    move |source| StoreError::Unavailable { store: STORE, doing, source: Arc::new(source) }
}

fn corrupt(what: impl Into<String>, found: impl std::fmt::Debug, expected: impl Into<String>) -> StoreError {
    let fault = crate::core::ids::InvalidField::new(what, found, expected);
    StoreError::Corrupt { store: STORE, what: fault.field, found: fault.given, expected: fault.accepted }
}

/// A stored number that is never negative.
fn unsigned(what: &str, stored: i64) -> Result<u64, StoreError> {
    u64::try_from(stored).map_err(|_| corrupt(what, stored, "0 or more"))
}
