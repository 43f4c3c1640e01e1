//! Pools, plans and settings as the documents that replicas share.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{
    ids::{ConnectionId, InvalidField, PoolId},
    plan::PlanSpec,
    pool::PoolSpec,
    settings::StoredSettings,
    units::Timestamp,
};

/// How long it is remembered that a document was deleted, in ms: 90 days.
pub const DELETION_LIFE_MS: u64 = 90 * 86_400_000;

/// Which document.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DocumentName {
    /// A pool.
    Pool(PoolId),
    /// The plan stored for a connection.
    Plan(ConnectionId),
    /// What applies where a pool has nothing of its own.
    Settings,
}

impl fmt::Display for DocumentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DocumentName::Pool(id) => write!(f, "pool:{id}"),
            DocumentName::Plan(connection) => write!(f, "plan:{connection}"),
            DocumentName::Settings => f.write_str("settings"),
        }
    }
}

impl FromStr for DocumentName {
    type Err = InvalidField;

    fn from_str(text: &str) -> Result<Self, InvalidField> {
        match text.split_once(':') {
            Some(("pool", id)) => Ok(DocumentName::Pool(PoolId::parse("document", id)?)),
            Some(("plan", id)) => Ok(DocumentName::Plan(ConnectionId::parse("document", id)?)),
            None if text == "settings" => Ok(DocumentName::Settings),
            _ => Err(InvalidField::new("document", text, "pool:ID, plan:CONNECTION or settings")),
        }
    }
}

/// One document as of its last write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Of the configuration, when it was written.
    pub revision: u64,
    /// When that was.
    pub written_at: Timestamp,
    /// What is in it; `None`: it was deleted.
    pub content: Option<Content>,
}

/// What is in a document. Fields that this version does not know stay in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// A pool.
    Pool {
        /// Names its life.
        created_revision: u64,
        /// When that began.
        created_at: Timestamp,
        /// The pool.
        spec: Box<PoolSpec>,
    },
    /// A plan.
    Plan(PlanSpec),
    /// Settings, without what belongs to one replica.
    Settings(StoredSettings),
}

/// How far a configuration has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Which configuration: its name since it was started, the same on all replicas that share it.
    pub lineage: String,
    /// How many writes have been made.
    pub revision: u64,
    /// Names the last write, so that another one of the same revision is told from it.
    pub write: String,
}
