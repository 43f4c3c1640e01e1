//! Whether the file takes writes, as whoever writes there finds out.

use std::time::Duration;

use sqlx::{Connection, SqliteConnection, SqlitePool};
use tokio::{sync::watch, time::timeout};

use super::unavailable;
use crate::store::StoreError;

/// A disk that takes longer takes no writes.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// See the module. Clones know the same.
#[derive(Clone, Debug)]
pub(super) struct Disk(watch::Sender<Option<StoreError>>);

impl Disk {
    /// Nothing has failed yet.
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    /// Why nothing can be written now; `None` while it can.
    pub(super) fn why(&self) -> Option<StoreError> {
        self.0.borrow().clone()
    }

    pub(super) fn is_failing(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Follows [`why`](Self::why).
    pub(super) fn follow(&self) -> watch::Receiver<Option<StoreError>> {
        self.0.subscribe()
    }

    /// Something was written, or was not. Each change is said once.
    pub(super) fn tell<T>(&self, outcome: &Result<T, StoreError>) {
        let why = match outcome {
            // As after nearly every commit.
            Ok(_) if !self.is_failing() => return,
            Ok(_) => None,
            // What is there is not what it should be: that is no failure of the disk.
            Err(StoreError::Corrupt { .. }) => return,
            Err(error) => Some(error.clone()),
        };
        self.0.send_if_modified(|known| {
            let is_change = known.is_some() != why.is_some();
            match &why {
                Some(error) if is_change => {
                    let error = error as &dyn std::error::Error;
                    tracing::warn!(
                        error,
                        "the disk takes no writes: what is to be kept there is refused, decisions go on"
                    );
                }
                None if is_change => tracing::warn!("the disk takes writes again"),
                _ => {}
            }
            *known = why;
            is_change
        });
    }

    /// Writes what would be written there and changes nothing, and tells whether that can be done.
    pub(super) async fn probe(&self, connection: &SqlitePool) {
        let failed = unavailable("asking whether the disk takes writes");
        let written = timeout(PROBE_TIMEOUT, write(connection)).await;
        self.tell(&written.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map_err(failed));
    }
}

async fn write(connection: &SqlitePool) -> Result<(), sqlx::Error> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    for statement in [
        "UPDATE service SET config_revision = config_revision",
        "INSERT INTO journal (pool, call) VALUES (0, x'')",
        "DELETE FROM journal WHERE pool = 0 AND call = x''",
    ] {
        sqlx::query(statement).execute(&mut *transaction).await?;
    }
    transaction.commit().await
}

/// False if `connection` is taken for one that is in a transaction although nobody has one: where the disk is full SQLite
/// ends a transaction by itself, sqlx's own ROLLBACK fails then, and no other transaction could begin on it.
pub(super) fn is_sound(connection: &SqliteConnection) -> bool {
    !connection.is_in_transaction()
}
