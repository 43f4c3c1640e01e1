//! One configuration on all replicas: what another one has written is taken over here, in order.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use uuid::Uuid;

use super::{AdminError, Service};
use crate::{
    core::{
        directory::{ChangeRefused, Directory, Documents, Write},
        document::Head,
        ids::PoolRevision,
    },
    store::{LedgerError, ReplicaNote, SharedDirectory, StoreError},
};

/// How often it is looked whether another replica has written.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a store has to be empty before a new configuration is started there: a replica that has one puts it back sooner.
const SETTLE_TIME: Duration = Duration::from_millis(1_200);

/// How often it is looked what has become of a write whose answer was lost, and how long to wait before each look.
const LOST_LOOKS_MAX: usize = 5;
const LOST_LOOK_PAUSE: Duration = Duration::from_millis(100);

/// How this replica's configuration stands to the one that replicas share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// There is none: the counters are this replica's own.
    #[default]
    Alone,
    /// The shared one has not been seen since the store of counters was opened.
    Unseen(
        /// Why it cannot be read, if it is there.
        Option<String>,
    ),
    /// It is the same, or follows within a second.
    Current,
    /// It is the same up to a revision, after which a part is gone or something that this version cannot take.
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
    /// Which configuration is there cannot be read.
    #[error(transparent)]
    Headless(StoreError),
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
            FollowError::Store(error) | FollowError::Headless(error) => AdminError::Store(error),
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
            // What lasts is said where it is found out.
            if let Err(error) = self.catch_up(&*shared).await {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "the shared configuration was not followed"
                );
            }
            shared
        };
        let shares = matches!(self.standing(), Standing::Current | Standing::Behind(_));
        if !shares || !self.directory().is_known() {
            // To others it is none of theirs.
            return;
        }
        let note = ReplicaNote {
            replica_id: self.0.start.replica_id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config_revision: self.directory().revision(),
            age_ms: 0,
        };
        // Others learn it the next time.
        let _ = shared.say(&note).await;
    }

    /// Takes over what others have written unless that was done since `revision`, of which a pool is gone: another replica
    /// has deleted it.
    pub(super) async fn follow_past(&self, revision: u64) {
        let _turn = self.0.turn.lock().await;
        let shared = self.ledger().directory();
        if let Some(shared) = shared.filter(|_| self.directory().revision() == revision) {
            // What is wrong is said where it is found out.
            let _ = self.catch_up(&*shared).await;
        }
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
            Err(why @ (FollowError::Refused(_) | FollowError::Store(StoreError::Corrupt { .. }))) => {
                Standing::Behind(why.to_string())
            }
            // Whose it is, is as it was.
            Err(FollowError::Headless(why)) => match self.standing() {
                Standing::Current | Standing::Behind(_) => Standing::Behind(why.to_string()),
                Standing::Unseen(_) => Standing::Unseen(Some(why.to_string())),
                Standing::Alone | Standing::Foreign { .. } => return result,
            },
            // Nothing new is known.
            Err(FollowError::Store(StoreError::Unavailable { .. }) | FollowError::Busy) => return result,
        };
        shared.admit(matches!(standing, Standing::Current | Standing::Behind(_)));
        self.stands(standing);
        result
    }

    /// How this replica stands to the shared configuration.
    pub fn standing(&self) -> Standing {
        self.0.standing.lock().clone()
    }

    /// Another store of counters is in use, of which nothing is known yet.
    pub(super) fn stands_before(&self, shared: bool) {
        self.0.newest_revision.store(0, Ordering::Relaxed);
        self.stands(if shared { Standing::Unseen(None) } else { Standing::Alone });
    }

    /// By what this replica decides while it cannot follow.
    pub(super) fn decides_meanwhile(&self) -> &'static str {
        if self.directory().is_known() { "decides by an older one" } else { "has none to decide by" }
    }

    /// Each change is said once.
    fn stands(&self, standing: Standing) {
        let decides = match standing {
            Standing::Alone | Standing::Current => true,
            Standing::Unseen(_) | Standing::Behind(_) => self.directory().is_known(),
            Standing::Foreign { .. } => false,
        };
        self.0.decides.store(decides, Ordering::Relaxed);
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
                let meanwhile = self.decides_meanwhile();
                tracing::warn!(why, "the shared configuration cannot be followed: this replica {meanwhile}");
            }
            Standing::Current => {
                let revision = self.directory().revision();
                tracing::info!(revision, "the configuration is the shared one");
            }
            Standing::Unseen(Some(why)) => {
                tracing::warn!(
                    why,
                    "the shared configuration cannot be read: the counters there are left alone"
                );
            }
            Standing::Alone | Standing::Unseen(None) => {}
        }
    }

    async fn meet(&self, shared: &dyn SharedDirectory) -> Result<(), FollowError> {
        let local = self.0.directory.load_full();
        let theirs = shared.head().await.map_err(|error| match error {
            corrupt @ StoreError::Corrupt { .. } => FollowError::Headless(corrupt),
            error => error.into(),
        })?;
        let Some(theirs) = theirs else { return self.found(shared, &local).await };
        let own = match local.head() {
            Some(own) if own.lineage == theirs.lineage => own,
            None if local.is_bare() => return self.join(shared, &local).await,
            _ => return Err(FollowError::Foreign { theirs: theirs.lineage }),
        };
        self.0.newest_revision.store(theirs.revision, Ordering::Relaxed);
        if own == theirs {
            return Ok(());
        }
        let follows = theirs.revision > own.revision
            && shared.write_at(own.revision).await?.is_some_and(|write| write == own.write);
        if !follows {
            return self.reconcile(shared, &local).await;
        }
        let (head, documents) = shared.after(own.revision).await?;
        // Another one may have been started there meanwhile.
        let head = head.filter(|head| head.lineage == own.lineage).ok_or(FollowError::Busy)?;
        let (next, writes) = local.follow(head, &documents)?;
        Ok(self.put(&local, next, &writes).await?)
    }

    /// Takes over a configuration where there is none here.
    async fn join(&self, shared: &dyn SharedDirectory, local: &Directory) -> Result<(), FollowError> {
        let (head, documents) = shared.after(0).await?;
        let (next, writes) = local.take_over(head.ok_or(FollowError::Busy)?, &documents)?;
        Ok(self.put(local, next, &writes).await?)
    }

    /// Puts the configuration here where there is none.
    async fn found(&self, shared: &dyn SharedDirectory, local: &Directory) -> Result<(), FollowError> {
        let next = if local.head().is_some() {
            local.clone()
        } else {
            tokio::time::sleep(SETTLE_TIME).await;
            local.clone().of_lineage(Uuid::now_v7().to_string()).written(write_name())
        };
        if !local.is_bare() {
            // It has its name here first: should this replica die before it is there, it knows it again.
            self.put(local, next.clone(), &[]).await?;
        }
        let head = next.head().ok_or(FollowError::Busy)?;
        let documents = next.documents();
        if !commit(shared, None, &head, &documents).await? {
            return Err(FollowError::Busy);
        }
        let (lineage, documents) = (head.lineage, documents.len());
        tracing::info!(lineage, documents, "the configuration was put where replicas share it");
        Ok(self.put(local, next, &[]).await?)
    }

    /// The two have gone different ways: of each document the newer one stays, and the shared one gets what it has not.
    async fn reconcile(&self, shared: &dyn SharedDirectory, local: &Directory) -> Result<(), FollowError> {
        let (head, documents) = shared.after(0).await?;
        let is_ours = |head: &Head| local.origin().lineage.as_ref() == Some(&head.lineage);
        let head = head.filter(is_ours).ok_or(FollowError::Busy)?;
        let reconciled = local.reconcile(&head, &documents, write_name())?;
        for (name, refused) in &reconciled.dropped {
            tracing::warn!(%name, %refused, "what this replica has of a document cannot stand beside the shared ones");
        }
        let next = reconciled.next;
        let next_head = next.head().unwrap_or_else(|| head.clone());
        if next_head != head && !commit(shared, Some(&head), &next_head, &reconciled.missing).await? {
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
        let ended = writes.iter().filter_map(|write| match write {
            Write::DeletePool(_, life) => Some(*life).filter(|life| next.pool_of_life(*life).is_none()),
            _ => None,
        });
        let ended: Vec<PoolRevision> = ended.collect();
        self.0.directory.store(Arc::new(next));
        if !ended.is_empty() {
            // Whoever has deleted them may not have come to it, and nobody waits for it.
            let service = self.clone();
            self.0.runtime.spawn(async move {
                for life in ended {
                    service.forget(life).await;
                }
            });
        }
        Ok(())
    }

    /// Forgets deletions of which every replica has heard long ago, here and where replicas share them.
    pub async fn forget_deletions(&self) -> Result<(), StoreError> {
        let _turn = self.0.turn.lock().await;
        let local = self.0.directory.load_full();
        let Some((next, forgotten)) = local.forgetting(self.0.clock.now()) else { return Ok(()) };
        if let Some(shared) = self.ledger().directory() {
            if self.standing() != Standing::Current || self.condition().failing.is_some() {
                return Ok(());
            }
            shared.forget(&forgotten).await?;
        }
        let writes: Vec<Write> = forgotten.into_iter().map(|(name, _)| Write::Deletion(name, None)).collect();
        self.put(&local, next, &writes).await
    }
}

/// Writes to the shared configuration; true if it is there then, also where only the answer was lost.
pub(super) async fn commit(
    shared: &dyn SharedDirectory,
    before: Option<&Head>,
    next: &Head,
    documents: &Documents,
) -> Result<bool, StoreError> {
    let answered = shared.commit(before, next, documents).await;
    let Err(error) = answered else { return answered };
    for _ in 0..LOST_LOOKS_MAX {
        tokio::time::sleep(LOST_LOOK_PAUSE).await;
        if let Ok(named) = shared.write_at(next.revision).await {
            return if named.as_ref() == Some(&next.write) { Ok(true) } else { Err(error) };
        }
    }
    Err(error)
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
