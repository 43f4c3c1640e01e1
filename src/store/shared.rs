//! Where replicas share their configuration.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::StoreError;
use crate::core::{
    directory::Documents,
    document::{DocumentName, Head},
};

/// What a replica tells the others about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaNote {
    /// Its name.
    pub replica_id: String,
    /// The version of its program.
    pub version: String,
    /// The configuration that it decides by.
    pub config_revision: u64,
    /// How long ago that was, in ms.
    #[serde(skip)]
    pub age_ms: u64,
}

/// The configuration that replicas share, as documents at a head. Writes are ordered: one at a time, each on top of the one
/// that it knows.
#[async_trait]
pub trait SharedDirectory: std::fmt::Debug + Send + Sync + 'static {
    /// How far it has come; `None`: there is none.
    async fn head(&self) -> Result<Option<Head>, StoreError>;

    /// The name of the write that led to `revision`, as long as that is remembered: some hundred writes.
    async fn write_at(&self, revision: u64) -> Result<Option<String>, StoreError>;

    /// The head, and all documents that were written after `revision`; of a later head if there is one meanwhile. No head if
    /// another configuration was put there while this one was read.
    async fn after(&self, revision: u64) -> Result<(Option<Head>, Documents), StoreError>;

    /// Writes `documents`, which lead from `before` (`None`: from nothing) to `next`; false if something else is there.
    async fn commit(
        &self,
        before: Option<&Head>,
        next: &Head,
        documents: &Documents,
    ) -> Result<bool, StoreError>;

    /// Forgets that these documents were deleted, at these revisions. What is there again stays.
    async fn forget(&self, deleted: &[(DocumentName, u64)]) -> Result<(), StoreError>;

    /// Tells the other replicas about this one.
    async fn say(&self, note: &ReplicaNote) -> Result<(), StoreError>;

    /// Tells the other replicas that this one is gone.
    async fn leave(&self, replica_id: &str) -> Result<(), StoreError>;

    /// What replicas have said within the last ten seconds.
    async fn replicas(&self) -> Result<Vec<ReplicaNote>, StoreError>;

    /// Lets calls in, or keeps them away from a store that is not known to be the right one.
    fn admit(&self, is_right: bool);
}
