//! One configuration on all replicas: what another one has written is taken over here, in order.

use std::{sync::Arc, time::Duration};

use uuid::Uuid;

use super::{AdminError, Service};
use crate::{
    core::{
        directory::{ChangeRefused, Directory, Write},
        document::Head,
    },
    store::{LedgerError, ReplicaNote, SharedDirectory, StoreError},
};

/// How often it is looked whether another replica has written.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a store has to be empty before a new configuration is started there: a replica that has one puts it back sooner.
const SETTLE_TIME: Duration = Duration::from_millis(1_200);

/// How this replica's configuration stands to the one that replicas share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// There is none: the counters are this replica's own.
    #[default]
    Alone,
    /// The shared one has not been seen since the store of counters was opened.
    Unseen,
    /// It is the same, or follows within a second.
    Current,
    /// It is the same up to a revision, after which there is something that this version cannot take.
    Behind(String),
    /// The store has another one, and nothing is decided here.
    Foreign {
        /// The name of the one here; `None`: nobody has ever shared it.
        ours: Option<String>,
        /// The name of the other.
        theirs: String,
    },
}

/// Why the shared configuration was not taken over.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    /// A store gave no answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A document is none for this version.
    #[error("the shared configuration has something that this version cannot take: {0}")]
    Refused(#[from] ChangeRefused),
    /// It is another one.
    #[error("the store has the configuration {theirs}, and this replica another one")]
    Foreign {
        /// The name of the other.
        theirs: String,
    },
    /// Somebody else has written at the same time.
    #[error("other replicas write the configuration all the time")]
    Busy,
}

impl From<FollowError> for AdminError {
    fn from(error: FollowError) -> Self {
        match error {
            FollowError::Store(error) => AdminError::Store(error),
            error => {
                let (store, doing) = ("this replica", "following the shared configuration");
                StoreError::Unavailable { store, doing, source: Arc::new(error) }.into()
            }
        }
    }
}

impl Service {
    /// Follows the shared configuration, wherever it is, for as long as it is polled.
    pub async fn follow(self) {
        loop {
            self.follow_once().await;
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Takes over what others have written, and tells them how far this replica is.
    pub async fn follow_once(&self) {
        let shared = {
            let _turn = self.0.turn.lock().await;
            let (shared, failing) = {
                let ledger = self.ledger();
                (ledger.directory(), ledger.condition().failing)
            };
            let Some(shared) = shared.filter(|_| failing.is_none()) else { return };
            // What is wrong is said where it is found out.
            let _ = self.catch_up(&*shared).await;
            shared
        };
        let note = ReplicaNote {
            replica_id: self.0.start.replica_id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config_revision: self.directory().revision(),
            age_ms: 0,
        };
        // Others learn it the next time.
        let _ = shared.say(&note).await;
    }

    /// Makes the configuration here the shared one, or the shared one that of here where there is none. In a turn of changes.
    pub(super) async fn catch_up(&self, shared: &dyn SharedDirectory) -> Result<(), FollowError> {
        let result = self.meet(shared).await;
        let standing = match &result {
            Ok(()) => Standing::Current,
            Err(FollowError::Foreign { theirs }) => {
                let ours = self.directory().origin().lineage.clone();
                Standing::Foreign { ours, theirs: theirs.clone() }
            }
            Err(FollowError::Refused(refused)) => Standing::Behind(refused.to_string()),
            // Nothing new is known.
            Err(FollowError::Store(_) | FollowError::Busy) => return result,
        };
        shared.admit(!matches!(standing, Standing::Foreign { .. }));
        self.stands(standing);
        result
    }

    /// How this replica stands to the shared configuration.
    pub fn standing(&self) -> Standing {
        self.0.standing.lock().clone()
    }

    /// Another store of counters is in use, of which nothing is known yet.
    pub(super) fn stands_before(&self, shared: bool) {
        self.stands(if shared { Standing::Unseen } else { Standing::Alone });
    }

    /// Each change is said once.
    fn stands(&self, standing: Standing) {
        let nothing_here = self.directory().is_bare();
        let decides = match standing {
            Standing::Alone | Standing::Current | Standing::Behind(_) => true,
            Standing::Unseen => !nothing_here,
            Standing::Foreign { .. } => false,
        };
        self.0.decides.store(decides, std::sync::atomic::Ordering::Relaxed);
        let before = std::mem::replace(&mut *self.0.standing.lock(), standing.clone());
        if before == standing {
            return;
        }
        match standing {
            Standing::Foreign { ours, theirs } => {
                let ours = ours.unwrap_or_else(|| "one that nobody shares".to_owned());
                tracing::error!(
                    ours,
                    theirs,
                    "the store has another configuration: nothing is decided here and nothing written there. Is its URL \
                     right? `quota-share adopt` takes it over and sets the one here aside"
                );
            }
            Standing::Behind(why) => {
                tracing::warn!(
                    why,
                    "the shared configuration cannot be followed: this replica decides by an older one"
                );
            }
            Standing::Current => {
                let revision = self.directory().revision();
                tracing::info!(revision, "the configuration is the shared one");
            }
            Standing::Alone | Standing::Unseen => {}
        }
    }

    async fn meet(&self, shared: &dyn SharedDirectory) -> Result<(), FollowError> {
        let local = self.0.directory.load_full();
        let own = local.head();
        let Some(theirs) = shared.head().await? else { return self.found(shared, &local).await };
        self.0.newest_revision.store(theirs.revision, std::sync::atomic::Ordering::Relaxed);
        match own {
            Some(own) if own == theirs => Ok(()),
            Some(own) if own.lineage == theirs.lineage => {
                let follows = theirs.revision > own.revision
                    && shared.write_at(own.revision).await?.is_some_and(|write| write == own.write);
                if follows {
                    self.take_over_after(shared, &local).await
                } else {
                    self.reconcile(shared, &local).await
                }
            }
            None if local.is_bare() => self.take_over_after(shared, &local).await,
            _ => Err(FollowError::Foreign { theirs: theirs.lineage }),
        }
    }

    /// Puts the configuration here where there is none.
    async fn found(&self, shared: &dyn SharedDirectory, local: &Directory) -> Result<(), FollowError> {
        let next = if local.head().is_some() {
            local.clone()
        } else {
            tokio::time::sleep(SETTLE_TIME).await;
            if shared.head().await?.is_some() {
                return Err(FollowError::Busy);
            }
            // It has its name here first: should this replica die before it is there, it knows it again.
            let next = local.clone().of_lineage(Uuid::now_v7().to_string()).written(write_name());
            self.put(local, next.clone(), &[]).await?;
            next
        };
        let Some(head) = next.head() else { return Err(FollowError::Busy) };
        let documents = next.documents();
        if !shared.commit(None, &head, &documents).await? {
            return Err(FollowError::Busy);
        }
        tracing::info!(
            lineage = head.lineage,
            documents = documents.len(),
            "the configuration was put where replicas share it"
        );
        Ok(())
    }

    /// Takes over what was written after the revision that is here.
    async fn take_over_after(
        &self,
        shared: &dyn SharedDirectory,
        local: &Directory,
    ) -> Result<(), FollowError> {
        let from = if local.head().is_some() { local.revision() } else { 0 };
        let (head, documents) = shared.after(from).await?;
        let Some(head) = head else { return Err(FollowError::Busy) };
        let (next, writes) = local.follow(head, &documents)?;
        Ok(self.put(local, next, &writes).await?)
    }

    /// The two have gone different ways: of each document the newer one stays, and the shared one gets what it has not.
    async fn reconcile(&self, shared: &dyn SharedDirectory, local: &Directory) -> Result<(), FollowError> {
        let (head, documents) = shared.after(0).await?;
        let Some(head) = head else { return Err(FollowError::Busy) };
        let reconciled = local.reconcile(&head, &documents, write_name())?;
        for (name, refused) in &reconciled.dropped {
            tracing::warn!(%name, %refused, "a document of this replica cannot stand beside the shared ones and is dropped");
        }
        let next = reconciled.next;
        let next_head = next.head().unwrap_or_else(|| head.clone());
        if !reconciled.missing.is_empty()
            && !shared.commit(Some(&head), &next_head, &reconciled.missing).await?
        {
            return Err(FollowError::Busy);
        }
        tracing::warn!(
            revision = next_head.revision,
            given_back = reconciled.missing.len(),
            taken_over = reconciled.writes.len(),
            "the shared configuration had gone another way: of each document the newer one stays"
        );
        Ok(self.put(local, next, &reconciled.writes).await?)
    }

    /// Makes `next` durable here, and then the one that decides.
    async fn put(&self, local: &Directory, next: Directory, writes: &[Write]) -> Result<(), StoreError> {
        self.0.store.commit(local.revision(), &next, writes).await?;
        self.0.directory.store(Arc::new(next));
        for write in writes {
            if let Write::DeletePool(_, life) = write {
                self.0.counts.forget(*life);
                self.0.local_shares.forget(*life);
            }
        }
        Ok(())
    }
}

/// Names a write, so that another one of the same revision is told from it.
pub(super) fn write_name() -> String {
    Uuid::now_v7().to_string()
}

/// The head of a directory that is shared.
pub(super) fn head_of(directory: &Directory) -> Result<Head, AdminError> {
    let unnamed = || LedgerError::NoConfiguration;
    Ok(directory.head().ok_or_else(unnamed)?)
}
