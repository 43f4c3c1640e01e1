//! Taking over the configuration that replicas share in place of the one in the data directory, which is set aside.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{Base, StartError, base};
use crate::{
    clock::Clock,
    config::Config,
    core::{
        directory::{ChangeRefused, Directory, Documents, Write},
        document::Head,
        settings::StoredSettings,
        units::Timestamp,
    },
    store::{
        DirectoryStore, OpenLedger, Place, StoreError,
        sqlite::{SqliteDirectory, SqliteStore},
    },
};

/// Where the new database is made, below the data directory.
const WORKSHOP: &str = "adopting";

/// What has become of a data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The configuration that it has now.
    pub lineage: String,
    /// How far that has come.
    pub revision: u64,
    /// How many pools there are.
    pub pools: usize,
    /// Where the former database is; `None`: the configuration was that one already, and nothing was done.
    pub set_aside: Option<PathBuf>,
}

/// Why nothing was taken over. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A store gave no answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The counters are this replica's own.
    #[error(
        "this replica counts in SQLite and shares its configuration with nobody: set QUOTA_STORE_DRIVER=redis and \
         QUOTA_STORE_REDIS_URL to the Redis whose configuration is to be taken over"
    )]
    Alone,
    /// Records would be counted nowhere.
    #[error(
        "{entries} records and releases wait in the journal for the Redis that the configuration here belongs to: start \
         the service with its URL until journalLength is 0 in GetStatus, or leave them to the file that is set aside with \
         --set-journal-aside: they are counted nowhere then"
    )]
    Journal {
        /// How many.
        entries: u64,
    },
    /// There is no configuration.
    #[error("that Redis has no configuration: start the service, and it puts the one here there")]
    Nothing,
    /// It has something that this version cannot take.
    #[error("the configuration there has something that this version cannot take: {0}")]
    Unreadable(#[from] ChangeRefused),
    /// A file could not be made or moved.
    #[error("{path} cannot be set aside: {source}")]
    File {
        /// The database.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Makes the configuration of the Redis that is configured the one of the data directory, which no other process may use
/// meanwhile. The replica keeps its id, and its own choice of driver and URL.
///
/// # Errors
/// Nothing has changed then.
pub async fn adopt(
    config: &Config,
    clock: Arc<dyn Clock>,
    set_journal_aside: bool,
) -> Result<Adopted, AdoptError> {
    let base = base(config, Arc::clone(&clock)).await?;
    let adopted = take_over(&base, config, clock.now(), set_journal_aside).await;
    base.store.close().await;
    adopted
}

async fn take_over(
    base: &Base,
    config: &Config,
    now: Timestamp,
    set_journal_aside: bool,
) -> Result<Adopted, AdoptError> {
    let (head, documents) = shared(base, config).await?;
    let adopted = |pools, set_aside| {
        let (lineage, revision) = (head.lineage.clone(), head.revision);
        Adopted { lineage, revision, pools, set_aside }
    };
    if base.directory.origin().lineage.as_ref() == Some(&head.lineage) {
        return Ok(adopted(base.directory.pool_count(), None));
    }
    let entries = base.journal.len();
    if entries > 0 && !set_journal_aside {
        return Err(AdoptError::Journal { entries });
    }
    let own = base.directory.settings().with_shared(StoredSettings::default());
    let bare = Directory::default().with_own_settings(own);
    let (next, mut writes) = bare.follow(head.clone(), &documents)?;
    writes.push(Write::PutSettings(Arc::new(next.settings_entry().clone())));
    let workshop = config.data_dir.join(WORKSHOP);
    let made = make(&workshop, &base.replica_id, &next, &writes).await?;
    base.store.fold().await;
    let failed = |source| AdoptError::File { path: base.store.path().to_owned(), source };
    let set_aside = exchange(base.store.path(), &made, now).map_err(failed)?;
    // What is left of it is in nobody's way.
    let _ = fs::remove_dir_all(&workshop);
    Ok(adopted(next.pool_count(), Some(set_aside)))
}

/// The configuration of the Redis that is configured.
async fn shared(base: &Base, config: &Config) -> Result<(Head, Documents), AdoptError> {
    let place = config.store().choose(base.directory.settings()).place;
    if place == Place::Sqlite {
        return Err(AdoptError::Alone);
    }
    let ledger = base.drivers.open(&place, &base.directory).await?;
    let found = match (ledger.condition().failing, ledger.directory()) {
        (Some(why), _) => Err(why),
        (None, Some(shared)) => shared.after(0).await,
        (None, None) => return Err(AdoptError::Alone),
    };
    ledger.close().await;
    let (head, documents) = found?;
    Ok((head.ok_or(AdoptError::Nothing)?, documents))
}

/// A database with `next` in it, closed.
async fn make(
    workshop: &Path,
    replica_id: &str,
    next: &Directory,
    writes: &[Write],
) -> Result<PathBuf, AdoptError> {
    if workshop.exists() {
        // Of a try that was broken off.
        let path = workshop.to_owned();
        fs::remove_dir_all(workshop).map_err(|source| AdoptError::File { path, source })?;
    }
    let made = SqliteStore::open(workshop).await.map_err(StartError::from)?;
    made.replica_id(|| replica_id.to_owned()).await?;
    SqliteDirectory::new(&made).commit(0, next, writes).await?;
    made.close().await;
    Ok(made.path().to_owned())
}

/// Puts `made` in the place of `path`, which is kept under another name: at no instant there is none.
fn exchange(path: &Path, made: &Path, now: Timestamp) -> io::Result<PathBuf> {
    let log = PathBuf::from(format!("{}-wal", path.display()));
    if log.exists() {
        return Err(io::Error::other("another process reads it: end that first"));
    }
    let at = jiff::Timestamp::from_millisecond(now.unix_ms() as i64).map_err(io::Error::other)?;
    let set_aside = PathBuf::from(format!("{}.{}", path.display(), at.strftime("%Y%m%dT%H%M%SZ")));
    fs::hard_link(path, &set_aside)?;
    fs::rename(made, path)?;
    if let Some(folder) = path.parent() {
        File::open(folder)?.sync_all()?;
    }
    Ok(set_aside)
}
