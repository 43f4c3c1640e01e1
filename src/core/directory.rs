//! All pools and plans at one revision, and what becomes of them by one change.

mod changes;
mod import;
mod shared;

use std::sync::Arc;

use imbl::{HashMap, OrdMap};

pub use self::{
    changes::{DocumentChange, Fields},
    shared::{Documents, Reconciled},
};

use super::{
    catalog,
    document::{DocumentName, Head},
    ids::{ApiKeyId, ConnectionId, InvalidField, PoolId, PoolRevision},
    import::Import,
    plan::{Dimension, DimensionKey, Plan, PlanSpec},
    pool::{Allocation, AllocationSpec, Pool, PoolSpec},
    settings::{SettingsUpdate, StoredSettings},
    units::Timestamp,
};

/// Most pools of one directory.
pub const POOLS_MAX: usize = 100_000;
/// Most allocations of all pools together.
pub const ALLOCATIONS_MAX: usize = 1_000_000;

/// Where the plan in force comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanSource {
    /// Stored for the connection.
    Manual,
    /// The built-in catalogue, by provider.
    Catalog,
    /// Neither: nothing is enforced.
    NoPlan,
}

/// The plan that applies to a connection, wherever it comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanInForce {
    /// Where it comes from.
    pub source: PlanSource,
    /// The connection it is stored for; `None` for an entry of the catalogue.
    pub connection: Option<ConnectionId>,
    /// The provider it speaks of; may be empty.
    pub provider: String,
    /// The limits; empty without a plan.
    pub dimensions: Vec<Dimension>,
    /// Of the stored plan; 0 for any other.
    pub revision: u64,
}

/// A stored plan and its place in history.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanEntry {
    /// The plan.
    pub plan: Plan,
    /// The revision of its last write.
    pub revision: u64,
    /// When that was.
    pub written_at: Timestamp,
}

/// When a pool came to be and when it last changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolHistory {
    /// Names this life of the pool.
    pub created_revision: PoolRevision,
    /// The revision of its last write.
    pub revision: u64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was last written.
    pub updated_at: Timestamp,
}

/// A pool, its place in history and the plan that applies to it.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolEntry {
    /// The pool.
    pub pool: Pool,
    /// Its place in history.
    pub history: PoolHistory,
    /// That of its primary connection.
    pub plan: PlanInForce,
}

impl PoolEntry {
    /// The dimensions of the pool's plan, in its order.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.plan.dimensions
    }

    /// The names of the dimensions of the pool's plan.
    pub fn dimension_keys(&self) -> Vec<DimensionKey> {
        self.plan.dimensions.iter().map(|dimension| dimension.key).collect()
    }

    /// Things about this pool that are allowed and probably not meant.
    pub fn warnings(&self) -> Vec<String> {
        self.pool.warnings(&self.dimension_keys())
    }
}

/// All pools and plans at one revision. A clone shares everything that does not change.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    revision: u64,
    pools: OrdMap<PoolId, Arc<PoolEntry>>,
    by_connection: HashMap<ConnectionId, Arc<PoolEntry>>,
    by_life: OrdMap<PoolRevision, Arc<PoolEntry>>,
    plans: OrdMap<ConnectionId, Arc<PlanEntry>>,
    settings: Arc<SettingsEntry>,
    allocations: usize,
    /// What was deleted: at which revision, and when.
    deleted: OrdMap<DocumentName, (u64, Timestamp)>,
    origin: Arc<Origin>,
}

/// Which configuration this is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// As [`Head::lineage`]; `None`: no other replica has ever had it.
    pub lineage: Option<String>,
    /// As [`Head::write`].
    pub write: String,
}

/// Stored settings and their place in history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SettingsEntry {
    /// The settings.
    pub settings: StoredSettings,
    /// The revision of the last write of what replicas share of them; 0: there was none.
    pub revision: u64,
    /// When that was.
    pub written_at: Timestamp,
}

/// What a store kept of a directory.
#[derive(Debug, Default)]
pub struct Stored {
    /// How many writes have been made.
    pub revision: u64,
    /// Settings.
    pub settings: SettingsEntry,
    /// Plans.
    pub plans: Vec<PlanEntry>,
    /// Pools.
    pub pools: Vec<(Pool, PoolHistory)>,
    /// What was deleted.
    pub deleted: Vec<(DocumentName, u64, Timestamp)>,
    /// Which configuration it is.
    pub origin: Origin,
}

/// One write of an administrator. A `revision` of 0 is not checked.
#[derive(Clone, Debug)]
pub enum Change {
    /// A new pool; its id has been chosen.
    CreatePool(PoolSpec),
    /// Replaces all of a pool but its id and history.
    UpdatePool {
        /// The new content.
        spec: PoolSpec,
        /// Of the pool.
        revision: u64,
    },
    /// Removes a pool; one that is not there is no error.
    DeletePool {
        /// Which.
        pool: PoolId,
        /// Of the pool.
        revision: u64,
    },
    /// Adds or replaces the allocation of one key.
    PutAllocation {
        /// Where.
        pool: PoolId,
        /// The new content.
        allocation: AllocationSpec,
        /// Of the pool.
        revision: u64,
    },
    /// Removes a key from a pool; one that is not there is no error.
    DeleteAllocation {
        /// Where.
        pool: PoolId,
        /// Whose.
        api_key: ApiKeyId,
        /// Of the pool.
        revision: u64,
    },
    /// Stores a plan for a connection.
    PutPlan {
        /// The plan.
        spec: PlanSpec,
        /// Of the stored plan.
        revision: u64,
    },
    /// Forgets the stored plan of a connection; one that is not there is no error.
    DeletePlan {
        /// Whose.
        connection: ConnectionId,
        /// Of the stored plan.
        revision: u64,
    },
    /// Stores and forgets settings.
    UpdateSettings(SettingsUpdate),
    /// Takes over pools, whose ids have been chosen, with plans and settings. There is nothing to do where there are
    /// pools already; plans and settings that are stored already stay.
    Import(Import),
}

/// What a store has to write for a change.
#[derive(Clone, Debug)]
pub enum Write {
    /// A pool's new document.
    PutPool(Arc<PoolEntry>),
    /// A pool that is gone, and the life that has ended.
    DeletePool(PoolId, PoolRevision),
    /// A plan's new document.
    PutPlan(Arc<PlanEntry>),
    /// A stored plan that is gone.
    DeletePlan(ConnectionId),
    /// The settings' new document.
    PutSettings(Arc<SettingsEntry>),
    /// What is remembered of a deletion, its revision and instant, where nothing else changes; `None`: nothing any more.
    Deletion(DocumentName, Option<(u64, Timestamp)>),
}

impl Write {
    /// Which document it is about.
    pub fn name(&self) -> DocumentName {
        match self {
            Write::PutPool(entry) => DocumentName::Pool(entry.pool.id.clone()),
            Write::DeletePool(id, _) => DocumentName::Pool(id.clone()),
            Write::PutPlan(entry) => DocumentName::Plan(entry.plan.connection.clone()),
            Write::DeletePlan(connection) => DocumentName::Plan(connection.clone()),
            Write::PutSettings(_) => DocumentName::Settings,
            Write::Deletion(name, _) => name.clone(),
        }
    }
}

/// The directory after a change, and the documents that differ.
#[derive(Clone, Debug)]
pub struct Applied {
    /// At a later revision than the one that was changed: of each document by one.
    pub next: Directory,
    /// What differs: one document, but for an import.
    pub writes: Vec<Write>,
}

/// Why a change was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ChangeRefused {
    /// There is no such pool.
    #[error("there is no pool {0}")]
    NoSuchPool(PoolId),
    /// The pool id is taken.
    #[error("pool {0} exists already: choose another pool_id, or leave it empty to have one chosen")]
    PoolExists(PoolId),
    /// The writer knew another revision than the stored one.
    #[error("{what} is at revision {current}, not {given}: read it again and repeat the change")]
    RevisionDiffers {
        /// What was to be written.
        what: String,
        /// The revision that the writer knew.
        given: u64,
        /// The stored one; 0 if nothing is stored.
        current: u64,
    },
    /// A connection is in at most one pool.
    #[error("connection {connection} is in pool {pool} already: a connection is in at most one pool")]
    ConnectionTaken {
        /// The connection.
        connection: ConnectionId,
        /// Where it is.
        pool: PoolId,
    },
    /// The content is not valid.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<InvalidField>),
    /// A bound of the whole directory.
    #[error("there is no room: at most {max} {what}")]
    Full {
        /// Of what.
        what: &'static str,
        /// How many.
        max: usize,
    },
}

impl Directory {
    /// The directory that a store kept.
    ///
    /// # Errors
    /// Names the mistakes of a document that this version cannot take.
    pub fn restore(stored: Stored) -> Result<Directory, ChangeRefused> {
        let Stored { revision, settings, plans, pools, deleted, origin } = stored;
        let (settings, origin) = (Arc::new(settings), Arc::new(origin));
        let deleted = deleted.into_iter().map(|(name, revision, at)| (name, (revision, at))).collect();
        let mut directory = Directory { revision, settings, deleted, origin, ..Directory::default() };
        for entry in plans {
            directory.plans.insert(entry.plan.connection.clone(), Arc::new(entry));
        }
        for (pool, history) in pools {
            directory.check_connections(&pool)?;
            directory.insert(pool, history);
        }
        Ok(directory)
    }

    /// How many writes have been made.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The settings that are stored.
    pub fn settings(&self) -> &StoredSettings {
        &self.settings.settings
    }

    /// It has nothing that other replicas could miss.
    pub fn is_bare(&self) -> bool {
        let no_settings = self.settings().shared() == StoredSettings::default();
        self.pools.is_empty() && self.plans.is_empty() && no_settings
    }

    /// There is something to decide by: be it that replicas which share it have no pools now.
    pub fn is_known(&self) -> bool {
        self.origin.lineage.is_some() || !self.is_bare()
    }

    /// The same with settings that belong to this replica alone.
    #[must_use]
    pub fn with_own_settings(&self, settings: StoredSettings) -> Directory {
        let settings = SettingsEntry { settings, ..(*self.settings).clone() };
        Directory { settings: Arc::new(settings), ..self.clone() }
    }

    /// How far it has come, if other replicas have it as well.
    pub fn head(&self) -> Option<Head> {
        let Origin { lineage, write } = &*self.origin;
        Some(Head { lineage: lineage.clone()?, revision: self.revision, write: write.clone() })
    }

    /// Which configuration this is.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The settings that are stored, and when.
    pub fn settings_entry(&self) -> &SettingsEntry {
        &self.settings
    }

    /// At which revision something was deleted, and when, as long as that is remembered.
    pub fn deletion(&self, name: &DocumentName) -> Option<(u64, Timestamp)> {
        self.deleted.get(name).copied()
    }

    /// The same after a write that is named `write`.
    #[must_use]
    pub fn written(mut self, write: String) -> Directory {
        self.origin = Arc::new(Origin { write, ..(*self.origin).clone() });
        self
    }

    /// The same as it is shared under this name.
    #[must_use]
    pub fn of_lineage(mut self, lineage: String) -> Directory {
        self.origin = Arc::new(Origin { lineage: Some(lineage), ..(*self.origin).clone() });
        self
    }

    /// How many pools there are.
    pub fn pool_count(&self) -> usize {
        self.pools.len()
    }

    /// The pool of this id.
    pub fn pool(&self, id: &PoolId) -> Result<&Arc<PoolEntry>, ChangeRefused> {
        self.pools.get(id).ok_or_else(|| ChangeRefused::NoSuchPool(id.clone()))
    }

    /// The pools after `id` (all without one), by id.
    pub fn pools_after(&self, id: Option<&str>) -> impl Iterator<Item = &Arc<PoolEntry>> {
        use std::ops::Bound::{Excluded, Unbounded};
        let start = id.map_or(Unbounded, Excluded);
        self.pools.range::<_, str>((start, Unbounded)).map(|(_, entry)| entry)
    }

    /// The pool whose life this names, if it still lasts.
    pub fn pool_of_life(&self, life: PoolRevision) -> Option<&Arc<PoolEntry>> {
        self.by_life.get(&life)
    }

    /// The pool that `connection` is in.
    pub fn pool_of(&self, connection: &ConnectionId) -> Option<&Arc<PoolEntry>> {
        self.by_connection.get(connection)
    }

    /// The pool that lists both, and the key's part in it.
    pub fn find(
        &self,
        api_key: &ApiKeyId,
        connection: &ConnectionId,
    ) -> Option<(&Arc<PoolEntry>, &Allocation)> {
        let entry = self.by_connection.get(connection)?;
        entry.pool.allocation(api_key.as_str()).map(|allocation| (entry, allocation))
    }

    /// The stored plans after `connection` (all without one), by connection.
    pub fn plans_after(&self, connection: Option<&str>) -> impl Iterator<Item = &Arc<PlanEntry>> {
        use std::ops::Bound::{Excluded, Unbounded};
        let start = connection.map_or(Unbounded, Excluded);
        self.plans.range::<_, str>((start, Unbounded)).map(|(_, entry)| entry)
    }

    /// The plan that applies to `connection`: of a pool's member, the pool's plan. `provider` counts only for a connection
    /// that is in no pool.
    pub fn plan_in_force(&self, connection: &ConnectionId, provider: &str) -> PlanInForce {
        match self.by_connection.get(connection) {
            Some(entry) => entry.plan.clone(),
            None => self.resolve_plan(connection, provider),
        }
    }

    /// The next directory after `change`, made at `at`; `None` if there was nothing to do.
    pub fn apply(&self, change: Change, at: Timestamp) -> Result<Option<Applied>, ChangeRefused> {
        let mut next = Directory { revision: self.revision + 1, ..self.clone() };
        let write = match change {
            Change::Import(import) => {
                let writes = next.import(&import, at)?;
                return Ok(writes.map(|writes| Applied { next, writes }));
            }
            Change::CreatePool(spec) => Some(next.create_pool("pool", &spec, at)?),
            Change::UpdatePool { spec, revision } => Some(next.update_pool(&spec, revision, at)?),
            Change::DeletePool { pool, revision } => next.delete_pool(&pool, revision, at)?,
            Change::PutAllocation { pool, allocation, revision } => {
                Some(next.put_allocation(&pool, allocation, revision, at)?)
            }
            Change::DeleteAllocation { pool, api_key, revision } => {
                next.delete_allocation(&pool, &api_key, revision, at)?
            }
            Change::PutPlan { spec, revision } => Some(next.put_plan(&spec, revision, at)?),
            Change::DeletePlan { connection, revision } => next.delete_plan(&connection, revision, at)?,
            Change::UpdateSettings(update) => Some(next.update_settings(&update, at)?),
        };
        Ok(write.map(|write| Applied { next, writes: vec![write] }))
    }

    /// `path` is the pool's place in the request.
    fn create_pool(&mut self, path: &str, spec: &PoolSpec, at: Timestamp) -> Result<Write, ChangeRefused> {
        let pool = Pool::check(path, spec).map_err(ChangeRefused::Invalid)?;
        if self.pools.contains_key(&pool.id) {
            return Err(ChangeRefused::PoolExists(pool.id));
        }
        if self.pools.len() >= POOLS_MAX {
            return Err(ChangeRefused::Full { what: "pools", max: POOLS_MAX });
        }
        let created_revision = PoolRevision(self.revision);
        let history =
            PoolHistory { created_revision, revision: self.revision, created_at: at, updated_at: at };
        self.replace(pool, history)
    }

    fn update_pool(&mut self, spec: &PoolSpec, revision: u64, at: Timestamp) -> Result<Write, ChangeRefused> {
        let mut pool = Pool::check("pool", spec).map_err(ChangeRefused::Invalid)?;
        let former = Arc::clone(self.pool(&pool.id)?);
        let history = former.history;
        check_revision(format_args!("pool {}", pool.id), revision, history.revision)?;
        pool.keep_unknown_of(&former.pool);
        self.replace(pool, PoolHistory { revision: self.revision, updated_at: at, ..history })
    }

    fn delete_pool(
        &mut self,
        id: &PoolId,
        revision: u64,
        at: Timestamp,
    ) -> Result<Option<Write>, ChangeRefused> {
        let Some(entry) = self.pools.get(id).cloned() else { return Ok(None) };
        check_revision(format_args!("pool {id}"), revision, entry.history.revision)?;
        self.remove(&entry);
        self.deleted.insert(DocumentName::Pool(id.clone()), (self.revision, at));
        Ok(Some(Write::DeletePool(id.clone(), entry.history.created_revision)))
    }

    fn put_allocation(
        &mut self,
        id: &PoolId,
        allocation: AllocationSpec,
        revision: u64,
        at: Timestamp,
    ) -> Result<Write, ChangeRefused> {
        // Checked by itself first, so that its mistakes are named by their place in this request.
        Allocation::check("allocation", &allocation).map_err(ChangeRefused::Invalid)?;
        let mut spec = self.pool(id)?.pool.to_spec();
        match spec.allocations.iter_mut().find(|other| other.api_key_id == allocation.api_key_id) {
            Some(other) => *other = allocation,
            None => spec.allocations.push(allocation),
        }
        self.update_pool(&spec, revision, at).map_err(|refused| match refused {
            // What is left to be wrong is the sum of the weights or the number of keys.
            ChangeRefused::Invalid(faults) => ChangeRefused::Invalid(
                faults
                    .into_iter()
                    .map(|fault| InvalidField { field: "allocation".to_owned(), ..fault })
                    .collect(),
            ),
            other => other,
        })
    }

    fn delete_allocation(
        &mut self,
        id: &PoolId,
        api_key: &ApiKeyId,
        revision: u64,
        at: Timestamp,
    ) -> Result<Option<Write>, ChangeRefused> {
        let entry = self.pool(id)?;
        if entry.pool.allocation(api_key.as_str()).is_none() {
            return Ok(None);
        }
        let mut spec = entry.pool.to_spec();
        spec.allocations.retain(|other| other.api_key_id != api_key.as_str());
        self.update_pool(&spec, revision, at).map(Some)
    }

    fn put_plan(&mut self, spec: &PlanSpec, revision: u64, at: Timestamp) -> Result<Write, ChangeRefused> {
        let mut plan = Plan::check("plan", spec).map_err(ChangeRefused::Invalid)?;
        let connection = plan.connection.clone();
        let former = self.plans.get(&connection);
        let stored = former.map_or(0, |entry| entry.revision);
        check_revision(format_args!("the plan of {connection}"), revision, stored)?;
        if let Some(former) = former {
            plan.keep_unknown_of(&former.plan);
        }
        Ok(self.store_plan(plan, at))
    }

    fn store_plan(&mut self, plan: Plan, at: Timestamp) -> Write {
        let connection = plan.connection.clone();
        self.deleted.remove(&DocumentName::Plan(connection.clone()));
        let entry = Arc::new(PlanEntry { plan, revision: self.revision, written_at: at });
        self.plans.insert(connection.clone(), Arc::clone(&entry));
        self.replan(&connection);
        Write::PutPlan(entry)
    }

    fn delete_plan(
        &mut self,
        connection: &ConnectionId,
        revision: u64,
        at: Timestamp,
    ) -> Result<Option<Write>, ChangeRefused> {
        let Some(entry) = self.plans.get(connection) else { return Ok(None) };
        check_revision(format_args!("the plan of {connection}"), revision, entry.revision)?;
        self.plans.remove(connection);
        self.deleted.insert(DocumentName::Plan(connection.clone()), (self.revision, at));
        self.replan(connection);
        Ok(Some(Write::DeletePlan(connection.clone())))
    }

    fn update_settings(&mut self, update: &SettingsUpdate, at: Timestamp) -> Result<Write, ChangeRefused> {
        let settings = self.settings().updated(update).map_err(ChangeRefused::Invalid)?;
        let is_shared = settings.shared() != self.settings().shared();
        let (revision, written_at) =
            if is_shared { (self.revision, at) } else { (self.settings.revision, self.settings.written_at) };
        self.settings = Arc::new(SettingsEntry { settings, revision, written_at });
        Ok(Write::PutSettings(Arc::clone(&self.settings)))
    }

    /// Puts `pool` in the place of its former self, if it has one.
    fn replace(&mut self, pool: Pool, history: PoolHistory) -> Result<Write, ChangeRefused> {
        self.check_connections(&pool)?;
        if let Some(former) = self.pools.get(&pool.id).cloned() {
            self.remove(&former);
        }
        if self.allocations + pool.allocations.len() > ALLOCATIONS_MAX {
            return Err(ChangeRefused::Full { what: "allocations in all pools", max: ALLOCATIONS_MAX });
        }
        Ok(Write::PutPool(self.insert(pool, history)))
    }

    fn check_connections(&self, pool: &Pool) -> Result<(), ChangeRefused> {
        for connection in pool.connections.iter() {
            if let Some(other) = self.by_connection.get(connection)
                && other.pool.id != pool.id
            {
                let (connection, pool) = (connection.clone(), other.pool.id.clone());
                return Err(ChangeRefused::ConnectionTaken { connection, pool });
            }
        }
        Ok(())
    }

    fn insert(&mut self, pool: Pool, history: PoolHistory) -> Arc<PoolEntry> {
        let plan = self.resolve_plan(pool.primary(), &pool.provider);
        let entry = Arc::new(PoolEntry { pool, history, plan });
        self.allocations += entry.pool.allocations.len();
        for connection in entry.pool.connections.iter() {
            self.by_connection.insert(connection.clone(), Arc::clone(&entry));
        }
        self.by_life.insert(history.created_revision, Arc::clone(&entry));
        self.deleted.remove(&DocumentName::Pool(entry.pool.id.clone()));
        self.pools.insert(entry.pool.id.clone(), Arc::clone(&entry));
        entry
    }

    fn remove(&mut self, entry: &PoolEntry) {
        self.allocations -= entry.pool.allocations.len();
        for connection in entry.pool.connections.iter() {
            self.by_connection.remove(connection);
        }
        self.by_life.remove(&entry.history.created_revision);
        self.pools.remove(&entry.pool.id);
    }

    /// The plan of `connection` has changed: so has that of the pool whose primary it is.
    fn replan(&mut self, connection: &ConnectionId) {
        if let Some(entry) = self.by_connection.get(connection).cloned()
            && entry.pool.primary() == connection
        {
            self.remove(&entry);
            self.insert(entry.pool.clone(), entry.history);
        }
    }

    fn resolve_plan(&self, connection: &ConnectionId, provider: &str) -> PlanInForce {
        if let Some(entry) = self.plans.get(connection) {
            return PlanInForce::from(&**entry);
        }
        match catalog::dimensions_of(provider) {
            Some(dimensions) => PlanInForce::of_catalog(provider, dimensions),
            None => PlanInForce {
                source: PlanSource::NoPlan,
                connection: Some(connection.clone()),
                provider: provider.to_owned(),
                dimensions: Vec::new(),
                revision: 0,
            },
        }
    }
}

impl PlanInForce {
    /// An entry of the catalogue.
    pub fn of_catalog(provider: &str, dimensions: Vec<Dimension>) -> Self {
        let provider = provider.to_owned();
        Self { source: PlanSource::Catalog, connection: None, provider, dimensions, revision: 0 }
    }
}

impl From<&PlanEntry> for PlanInForce {
    fn from(entry: &PlanEntry) -> Self {
        Self {
            source: PlanSource::Manual,
            connection: Some(entry.plan.connection.clone()),
            provider: entry.plan.provider.clone(),
            dimensions: entry.plan.dimensions.clone(),
            revision: entry.revision,
        }
    }
}

fn check_revision(what: std::fmt::Arguments<'_>, given: u64, current: u64) -> Result<(), ChangeRefused> {
    if given == 0 || given == current {
        return Ok(());
    }
    Err(ChangeRefused::RevisionDiffers { what: what.to_string(), given, current })
}
