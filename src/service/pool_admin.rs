//! Writes of administrators: pools, allocations and plans, one change at a time.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::task::JoinError;
use uuid::Uuid;

use super::{
    Author, Service,
    follow::{FollowError, commit, head_of, write_name},
    switch::Prepared,
};
use crate::{
    core::{
        directory::{Change, ChangeRefused, Directory, PlanInForce, PoolEntry, Write},
        document::DocumentName,
        ids::{ApiKeyId, ConnectionId, InvalidField, PoolId, PoolRevision},
        plan::{DimensionKey, PlanSpec},
        pool::{AllocationSpec, PoolSpec},
        settings::{StoreDriver, StoredSettings},
        units::Timestamp,
    },
    store::{Condition, LedgerError, SharedDirectory, StoreError},
};

/// How often a change is tried while other replicas are quicker, and how long to wait in between.
const TRIES_MAX: usize = 100;
const TRY_PAUSE_MAX_MS: u64 = 10;

/// Why an administrator's call was refused. Nothing has changed, unless a store gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdminError {
    /// The configuration does not take it.
    #[error(transparent)]
    Refused(#[from] ChangeRefused),
    /// The driver or its URL would be another one here, and replicas that are live would count apart from this one.
    #[error(
        "replicas that share these counters are live ({}): stop the others before, or give all of them another driver \
         or URL by QUOTA_STORE_DRIVER and QUOTA_STORE_REDIS_URL, over which what is stored wins until it is cleared",
        .0.join(", ")
    )]
    OthersAreLive(Vec<String>),
    /// It could not be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The counters gave no answer.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// A pool and what this replica has seen of it.
#[derive(Clone, Debug)]
pub struct PoolView {
    /// The pool.
    pub entry: Arc<PoolEntry>,
    /// When a call last matched it; `None`: never since it was created or this replica started.
    pub last_matched: Option<Timestamp>,
}

impl Service {
    /// A pool by its id.
    pub fn pool(&self, id: &PoolId) -> Result<PoolView, AdminError> {
        let entry = Arc::clone(self.directory().pool(id)?);
        let last_matched = self.last_matched(&entry);
        Ok(PoolView { entry, last_matched })
    }

    /// A new pool; one without an id gets one.
    pub async fn create_pool(
        &self,
        author: Author,
        mut spec: PoolSpec,
    ) -> Result<Arc<PoolEntry>, AdminError> {
        self.choose_id(&mut spec);
        self.put_pool(author, Change::CreatePool(spec)).await
    }

    /// A pool without an id gets one.
    pub(super) fn choose_id(&self, spec: &mut PoolSpec) {
        if spec.pool_id.is_empty() {
            let now = self.0.clock.now().unix_ms();
            let (seconds, nanos) = (now / 1_000, (now % 1_000 * 1_000_000) as u32);
            let timestamp = uuid::Timestamp::from_unix(uuid::NoContext, seconds, nanos);
            spec.pool_id = Uuid::new_v7(timestamp).to_string();
        }
    }

    /// Replaces all of a pool but its id and history.
    pub async fn update_pool(
        &self,
        author: Author,
        spec: PoolSpec,
        revision: u64,
    ) -> Result<Arc<PoolEntry>, AdminError> {
        self.put_pool(author, Change::UpdatePool { spec, revision }).await
    }

    /// Adds or replaces the allocation of one key.
    pub async fn put_allocation(
        &self,
        author: Author,
        pool: PoolId,
        allocation: AllocationSpec,
        revision: u64,
    ) -> Result<Arc<PoolEntry>, AdminError> {
        self.put_pool(author, Change::PutAllocation { pool, allocation, revision }).await
    }

    /// Removes a key from a pool; false if it was not in it.
    pub async fn delete_allocation(
        &self,
        author: Author,
        pool: PoolId,
        api_key: ApiKeyId,
        revision: u64,
    ) -> Result<(Arc<PoolEntry>, bool), AdminError> {
        let change = Change::DeleteAllocation { pool: pool.clone(), api_key, revision };
        match self.change(author, change).await? {
            Some(Write::PutPool(entry)) => Ok((entry, true)),
            _ => Ok((self.pool(&pool)?.entry, false)),
        }
    }

    /// Removes a pool, its allocations and its counters; false if there was none.
    pub async fn delete_pool(&self, author: Author, pool: PoolId, revision: u64) -> Result<bool, AdminError> {
        Ok(self.change(author, Change::DeletePool { pool, revision }).await?.is_some())
    }

    /// Stores a plan; returns it and things that are probably not meant.
    pub async fn put_plan(
        &self,
        author: Author,
        spec: PlanSpec,
        revision: u64,
    ) -> Result<(PlanInForce, Vec<String>), AdminError> {
        let Some(Write::PutPlan(entry)) = self.change(author, Change::PutPlan { spec, revision }).await?
        else {
            unreachable!("putting a plan writes it");
        };
        let connection = &entry.plan.connection;
        let directory = self.directory();
        let pool = directory.pool_of(connection).filter(|pool| pool.pool.primary() != connection);
        let warnings = pool.map(|pool| {
            let (id, primary) = (&pool.pool.id, pool.pool.primary());
            format!(
                "the plan is not in force: connection {connection} is in pool {id}, whose plan is that of its primary \
                 connection {primary}"
            )
        });
        Ok((PlanInForce::from(&*entry), warnings.into_iter().collect()))
    }

    /// Forgets a stored plan; returns the plan now in force.
    pub async fn delete_plan(
        &self,
        author: Author,
        connection: ConnectionId,
        revision: u64,
    ) -> Result<PlanInForce, AdminError> {
        let change = Change::DeletePlan { connection: connection.clone(), revision };
        let former = self.directory().plan_in_force(&connection, "").provider;
        self.change(author, change).await?;
        // A connection in no pool goes back to the plan of the provider that its stored plan named.
        Ok(self.directory().plan_in_force(&connection, &former))
    }

    /// Sets consumption to zero: of one key or of all, in one dimension or in all.
    pub async fn reset_usage(
        &self,
        author: Author,
        pool: &PoolId,
        api_key: Option<&ApiKeyId>,
        dimension: Option<DimensionKey>,
    ) -> Result<(), AdminError> {
        let entry = Arc::clone(self.directory().pool(pool)?);
        let known = entry.dimension_keys();
        if let Some(dimension) = dimension
            && !known.contains(&dimension)
        {
            let known: Vec<String> = known.iter().map(ToString::to_string).collect();
            let accepted = format!("a dimension of the pool's plan ({})", known.join(", "));
            let fault = InvalidField::new("window", dimension.to_string(), accepted);
            return Err(ChangeRefused::Invalid(vec![fault]).into());
        }
        let of_key = api_key.map_or_else(String::new, |api_key| format!(" of {api_key}"));
        let of_dimension = dimension.map_or_else(String::new, |dimension| format!(" in {dimension}"));
        let what = format!("usage{of_key}{of_dimension} in {}", DocumentName::Pool(pool.clone()));
        let (service, life, api_key) = (self.clone(), entry.history.created_revision, api_key.cloned());
        // It goes on when the caller hangs up, so that what was done is said.
        let task = self.0.runtime.spawn(async move {
            let reset = service.ledger().reset(life, api_key.as_ref(), dimension).await;
            author.has_reset(&what, service.directory().revision(), &reset);
            reset
        });
        Ok(task.await.map_err(ended)??)
    }

    async fn put_pool(&self, author: Author, change: Change) -> Result<Arc<PoolEntry>, AdminError> {
        match self.change(author, change).await? {
            Some(Write::PutPool(entry)) => Ok(entry),
            _ => unreachable!("putting a pool or an allocation writes a pool"),
        }
    }

    /// Applies a change of one document: durable first, then in force. `None` if there was nothing to do.
    pub(super) async fn change(&self, author: Author, change: Change) -> Result<Option<Write>, AdminError> {
        Ok(self.change_all(author, change).await?.pop())
    }

    /// Applies a change: durable first, then in force. Nothing is written if there was nothing to do.
    ///
    /// It goes on when the caller hangs up, so that what is stored is also in force, and said.
    pub(super) async fn change_all(&self, author: Author, change: Change) -> Result<Vec<Write>, AdminError> {
        let service = self.clone();
        let task = self.0.runtime.spawn(async move { service.change_in_turn(&author, change).await });
        task.await.map_err(ended)?
    }

    async fn change_in_turn(&self, author: &Author, change: Change) -> Result<Vec<Write>, AdminError> {
        let _turn = self.0.turn.lock().await;
        // Not held any longer: it may be replaced, and its last user closes it.
        let (shared, Condition { failing, refuses, .. }) = {
            let ledger = self.ledger();
            (ledger.directory(), ledger.condition())
        };
        let Some(shared) = shared else { return self.change_alone(author, change).await };
        if let Some(next) = self.own_settings_after(&change)? {
            return self.change_own_settings(author, &change, next).await;
        }
        if let Some(why) = failing {
            let refused = if refuses { LedgerError::NewerLayout(why) } else { LedgerError::Unreachable(why) };
            return Err(refused.into());
        }
        for _ in 0..TRIES_MAX {
            match self.catch_up(&*shared).await {
                Err(FollowError::Busy) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    if let Some(writes) = self.change_shared(&*shared, author, change.clone()).await? {
                        return Ok(writes);
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(rand::random_range(1..TRY_PAUSE_MAX_MS))).await;
        }
        Err(FollowError::Busy.into())
    }

    /// A change of a configuration that nobody shares.
    async fn change_alone(&self, author: &Author, change: Change) -> Result<Vec<Write>, AdminError> {
        let directory = self.0.directory.load_full();
        let (asked, method) = (asked_driver(&change), change.method());
        let Some(applied) = directory.apply(change, self.0.clock.now())? else { return Ok(Vec::new()) };
        let next = applied.next.written(write_name());
        let prepared = self.prepared(&next, asked).await?;
        self.store(&directory, next, &applied.writes, prepared, Some((author, method))).await?;
        Ok(applied.writes)
    }

    /// A change of the configuration that replicas share: there first, then here. `None`: another replica was quicker.
    async fn change_shared(
        &self,
        shared: &dyn SharedDirectory,
        author: &Author,
        change: Change,
    ) -> Result<Option<Vec<Write>>, AdminError> {
        let directory = self.0.directory.load_full();
        let (asked, method) = (asked_driver(&change), change.method());
        let Some(applied) = directory.apply(change, self.0.clock.now())? else { return Ok(Some(Vec::new())) };
        let next = applied.next.written(write_name());
        let (before, after) = (head_of(&directory)?, head_of(&next)?);
        let prepared = self.prepared(&next, asked).await?;
        let documents = next.documents_of(&applied.writes);
        let committed = commit(shared, Some(&before), &after, &documents).await;
        if !matches!(committed, Ok(true)) {
            if let Some(prepared) = prepared {
                prepared.withdraw().await;
            }
            if committed.is_err() {
                author.may_have_changed(method, &directory, &next, &applied.writes);
            }
            return committed.map(|_| None).map_err(AdminError::from);
        }
        self.0.newest_revision.store(after.revision, Ordering::Relaxed);
        // It is made, whatever becomes of it here.
        author.has_changed(method, &directory, &next, &applied.writes);
        self.store(&directory, next, &applied.writes, prepared, None).await?;
        Ok(Some(applied.writes))
    }

    /// The settings after `change`, if it is about nothing but what belongs to this replica alone.
    fn own_settings_after(&self, change: &Change) -> Result<Option<StoredSettings>, AdminError> {
        let Change::UpdateSettings(update) = change else { return Ok(None) };
        let directory = self.directory();
        let next = directory.settings().updated(update).map_err(ChangeRefused::Invalid)?;
        Ok(Some(next).filter(|next| next.shared() == directory.settings().shared()))
    }

    async fn change_own_settings(
        &self,
        author: &Author,
        change: &Change,
        next: StoredSettings,
    ) -> Result<Vec<Write>, AdminError> {
        let directory = self.0.directory.load_full();
        let next = directory.with_own_settings(next);
        let writes = vec![Write::PutSettings(Arc::new(next.settings_entry().clone()))];
        let prepared = self.prepared(&next, asked_driver(change)).await?;
        self.store(&directory, next, &writes, prepared, Some((author, change.method()))).await?;
        Ok(writes)
    }

    /// What `next` needs of drivers; `asked` is what the change says of the driver, if it is one of settings.
    async fn prepared(
        &self,
        next: &Directory,
        asked: Option<Option<StoreDriver>>,
    ) -> Result<Option<Prepared>, AdminError> {
        match asked {
            Some(driver) => Ok(Some(self.prepare(next, driver).await?)),
            None => Ok(None),
        }
    }

    /// Makes `next` durable here and lets it decide. Who has changed it by which method is said, if that is `unsaid`.
    async fn store(
        &self,
        directory: &Directory,
        next: Directory,
        writes: &[Write],
        prepared: Option<Prepared>,
        unsaid: Option<(&Author, &'static str)>,
    ) -> Result<(), AdminError> {
        if let Err(error) = self.0.store.commit(directory.revision(), &next, writes).await {
            if let Some(prepared) = prepared {
                prepared.withdraw().await;
            }
            return Err(error.into());
        }
        if let Some((author, method)) = unsaid {
            author.has_changed(method, directory, &next, writes);
        }
        self.0.directory.store(Arc::new(next));
        if let Some(prepared) = prepared {
            self.take_over(prepared).await;
        }
        for write in writes {
            if let Write::DeletePool(_, life) = write {
                self.forget(*life).await;
            }
        }
        Ok(())
    }

    /// Drops what is kept of a life of a pool that has ended.
    pub(super) async fn forget(&self, life: PoolRevision) {
        self.0.counts.forget(life);
        self.0.local_shares.forget(life);
        if let Err(error) = self.ledger().remove(life).await {
            // The pool is gone and nothing reads its counters any more; they go with the retention.
            tracing::warn!(error = &error as &dyn std::error::Error, "counters of a deleted pool were left");
        }
    }
}

/// What goes on without its caller has ended early.
fn ended(task: JoinError) -> StoreError {
    let (store, doing) = ("this replica", "making a change");
    StoreError::Unavailable { store, doing, source: Arc::new(task) }
}

/// What a change of settings asks of the driver.
fn asked_driver(change: &Change) -> Option<Option<StoreDriver>> {
    match change {
        Change::UpdateSettings(update) => Some(update.store_driver),
        _ => None,
    }
}
