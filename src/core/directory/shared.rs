//! A directory as documents that replicas share, and what becomes of two that have gone different ways.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    ALLOCATIONS_MAX, ChangeRefused, Directory, Origin, POOLS_MAX, PlanEntry, PoolEntry, PoolHistory,
    SettingsEntry, Write,
};
use crate::core::{
    document::{Content, DELETION_LIFE_MS, Document, DocumentName, Head},
    ids::{InvalidField, PoolRevision},
    plan::Plan,
    pool::Pool,
    settings::{SettingsUpdate, StoredSettings},
    units::Timestamp,
};

/// Documents by name.
pub type Documents = BTreeMap<DocumentName, Document>;

/// What two configurations of one lineage come to, of which neither has all that the other has.
#[derive(Debug)]
pub struct Reconciled {
    /// Both together.
    pub next: Directory,
    /// What differs from the one here.
    pub writes: Vec<Write>,
    /// What the other does not have, with the revisions under which it is to get them.
    pub missing: Documents,
    /// Documents of the one here that cannot stand beside those of the other.
    pub dropped: Vec<(DocumentName, ChangeRefused)>,
}

impl Directory {
    /// All documents, and what was deleted.
    pub fn documents(&self) -> Documents {
        let pools = self.pools.values().map(|entry| {
            let (name, history) = (DocumentName::Pool(entry.pool.id.clone()), entry.history);
            (name, pool_document(&entry.pool, history))
        });
        let plans = self.plans.values().map(|entry| {
            let name = DocumentName::Plan(entry.plan.connection.clone());
            (name, plan_document(entry))
        });
        let settings = Some(&self.settings).filter(|entry| entry.revision > 0);
        let settings = settings.map(|entry| (DocumentName::Settings, settings_document(entry)));
        let deleted = self.deleted.iter().map(|(name, (revision, written_at))| {
            let document = Document { revision: *revision, written_at: *written_at, content: None };
            (name.clone(), document)
        });
        pools.chain(plans).chain(settings).chain(deleted).collect()
    }

    /// What `writes`, which led here, mean to other replicas.
    pub fn documents_of(&self, writes: &[Write]) -> Documents {
        let documents = writes.iter().filter_map(|write| {
            let name = write.name();
            let document = match write {
                Write::PutPool(entry) => pool_document(&entry.pool, entry.history),
                Write::PutPlan(entry) => plan_document(entry),
                Write::PutSettings(entry) => settings_document(entry),
                Write::DeletePool(..) | Write::DeletePlan(_) | Write::Deletion(..) => {
                    let (revision, written_at) = *self.deleted.get(&name)?;
                    Document { revision, written_at, content: None }
                }
            };
            Some((name, document))
        });
        documents.collect()
    }

    /// The directory at `head`, which differs from this one by `documents`.
    ///
    /// # Errors
    /// Names a document that this version cannot take; a newer one may have written it.
    pub fn follow(
        &self,
        head: Head,
        documents: &Documents,
    ) -> Result<(Directory, Vec<Write>), ChangeRefused> {
        let mut next = self.clone();
        // What leaves goes first: what comes may have its connections.
        documents.keys().for_each(|name| next.lift(name));
        for (name, document) in documents {
            check_place(name, document, &head)?;
            next.bring(name, document)?;
        }
        next.revision = head.revision;
        next.origin = Arc::new(Origin { lineage: Some(head.lineage), write: head.write });
        let writes = documents.keys().flat_map(|name| self.writes_to(&next, name)).collect();
        Ok((next, writes))
    }

    /// The directory at `head` that consists of `documents`: of this one, only settings that belong to the replica stay.
    ///
    /// # Errors
    /// As [`follow`](Directory::follow).
    pub fn take_over(
        &self,
        head: Head,
        documents: &Documents,
    ) -> Result<(Directory, Vec<Write>), ChangeRefused> {
        let own = self.settings().with_shared(StoredSettings::default());
        let (next, _) = Directory::default().with_own_settings(own).follow(head, documents)?;
        let former = self.documents();
        let names: BTreeSet<&DocumentName> = former.keys().chain(documents.keys()).collect();
        let writes = names.into_iter().flat_map(|name| self.writes_to(&next, name)).collect();
        Ok((next, writes))
    }

    /// Takes out whatever there is under this name.
    fn lift(&mut self, name: &DocumentName) {
        self.deleted.remove(name);
        match name {
            DocumentName::Pool(id) => {
                if let Some(entry) = self.pools.get(id).cloned() {
                    self.remove(&entry);
                }
            }
            DocumentName::Plan(connection) => {
                if self.plans.remove(connection).is_some() {
                    self.replan(connection);
                }
            }
            // There are always some.
            DocumentName::Settings => {}
        }
    }

    /// Puts a document where there is none; where it is refused nothing has changed.
    fn bring(&mut self, name: &DocumentName, document: &Document) -> Result<(), ChangeRefused> {
        let Document { revision, written_at, content } = document;
        let (revision, written_at) = (*revision, *written_at);
        match (name, content) {
            (DocumentName::Pool(_) | DocumentName::Plan(_), None) => {
                self.deleted.insert(name.clone(), (revision, written_at));
            }
            (DocumentName::Pool(id), Some(Content::Pool { created_revision, created_at, spec })) => {
                let pool = Pool::check(&name.to_string(), spec).map_err(ChangeRefused::Invalid)?;
                let created_revision = PoolRevision(*created_revision);
                check_same(name, "pool_id", id.as_str(), pool.id.as_str())?;
                self.check_connections(&pool)?;
                self.check_room(&pool)?;
                if self.by_life.contains_key(&created_revision) {
                    let accepted = "a revision at which no other pool was created";
                    return Err(refused(name, "created_revision", created_revision.0, accepted));
                }
                let created_at = *created_at;
                self.insert(
                    pool,
                    PoolHistory { created_revision, revision, created_at, updated_at: written_at },
                );
            }
            (DocumentName::Plan(connection), Some(Content::Plan(spec))) => {
                let plan = Plan::check(&name.to_string(), spec).map_err(ChangeRefused::Invalid)?;
                check_same(name, "connection_id", connection.as_str(), plan.connection.as_str())?;
                self.plans.insert(connection.clone(), Arc::new(PlanEntry { plan, revision, written_at }));
                self.replan(connection);
            }
            (DocumentName::Settings, Some(Content::Settings(shared))) => {
                let checked = StoredSettings::default().updated(&SettingsUpdate::from(shared));
                checked.map_err(ChangeRefused::Invalid)?;
                let settings = self.settings().with_shared(shared.clone());
                self.settings = Arc::new(SettingsEntry { settings, revision, written_at });
            }
            (DocumentName::Settings, None) | (_, Some(_)) => {
                return Err(refused(name, "content", "another kind", "what the name says"));
            }
        }
        Ok(())
    }

    fn check_room(&self, pool: &Pool) -> Result<(), ChangeRefused> {
        if self.pools.len() >= POOLS_MAX {
            return Err(ChangeRefused::Full { what: "pools", max: POOLS_MAX });
        }
        if self.allocations + pool.allocations.len() > ALLOCATIONS_MAX {
            return Err(ChangeRefused::Full { what: "allocations in all pools", max: ALLOCATIONS_MAX });
        }
        Ok(())
    }

    /// What a store that has this directory has to write to have of `name` what `next` has.
    fn writes_to(&self, next: &Directory, name: &DocumentName) -> Vec<Write> {
        let mut writes = Vec::new();
        match name {
            DocumentName::Pool(id) => {
                let (before, after) = (self.pools.get(id), next.pools.get(id));
                let life = |entry: &Arc<PoolEntry>| entry.history.created_revision;
                // A pool of another life leaves nothing of the former.
                let ended = before.map(life).filter(|ended| after.map(life) != Some(*ended));
                writes.extend(ended.map(|ended| Write::DeletePool(id.clone(), ended)));
                writes.extend(after.cloned().map(Write::PutPool));
            }
            DocumentName::Plan(connection) => {
                let (before, after) = (self.plans.get(connection), next.plans.get(connection));
                let ended = before.filter(|_| after.is_none());
                writes.extend(ended.map(|_| Write::DeletePlan(connection.clone())));
                writes.extend(after.cloned().map(Write::PutPlan));
            }
            DocumentName::Settings => writes.push(Write::PutSettings(Arc::clone(&next.settings))),
        }
        let deletion = next.deleted.get(name).copied();
        if writes.is_empty() && deletion != self.deleted.get(name).copied() {
            writes.push(Write::Deletion(name.clone(), deletion));
        }
        writes
    }

    /// This directory and `other`, which is at `head`, together: of each document the newer one, of equal revisions that
    /// of the other. What was deleted is a document as well.
    ///
    /// # Errors
    /// Names a document of the other that this version cannot take.
    pub fn reconcile(
        &self,
        head: &Head,
        other: &Documents,
        write: String,
    ) -> Result<Reconciled, ChangeRefused> {
        let own = self.documents();
        let is_newer = |(name, document): &(&DocumentName, &Document)| {
            other.get(*name).is_none_or(|theirs| theirs.revision < document.revision)
        };
        let mine: Documents =
            own.iter().filter(is_newer).map(|(name, of)| (name.clone(), of.clone())).collect();
        let differs = |(name, theirs): &(&DocumentName, &Document)| {
            !mine.contains_key(*name) && own.get(*name) != Some(*theirs)
        };
        let changed: Documents =
            other.iter().filter(differs).map(|(name, of)| (name.clone(), of.clone())).collect();
        // What is newer here comes again after all that the other has.
        let mut others = self.clone();
        mine.keys().for_each(|name| others.lift(name));
        let (mut next, mut writes) = others.follow(head.clone(), &changed)?;
        let names: Vec<DocumentName> = mine.keys().cloned().collect();
        let mut mine: Vec<(DocumentName, Document)> = mine.into_iter().collect();
        // In the order in which they were written, in which each found the connections that it has.
        mine.sort_by_key(|(_, document)| document.revision);
        let (mut missing, mut dropped) = (Documents::new(), Vec::new());
        let mut revision = head.revision.max(self.revision);
        for (name, mut document) in mine {
            document.revision = revision + 1;
            if let Some(Content::Pool { created_revision, .. }) = &mut document.content
                && next.by_life.contains_key(&PoolRevision(*created_revision))
            {
                // Another pool has a life of that name.
                *created_revision = document.revision;
            }
            if let Err(refused) = next.bring(&name, &document) {
                dropped.push((name.clone(), refused));
                // That of the other may have its place still.
                if other.get(&name).is_some_and(|theirs| next.bring(&name, theirs).is_ok()) {
                    continue;
                }
                document.content = None;
                next.bring(&name, &document)?;
            }
            revision += 1;
            missing.insert(name, document);
        }
        if !missing.is_empty() || revision > head.revision {
            next.revision = revision;
            next = next.written(write);
        }
        writes.extend(names.iter().flat_map(|name| self.writes_to(&next, name)));
        Ok(Reconciled { next, writes, missing, dropped })
    }

    /// The same without what was deleted so long before `now` that every replica has heard of it, and what that was;
    /// `None` if there is nothing of the kind.
    pub fn forgetting(&self, now: Timestamp) -> Option<(Directory, Vec<(DocumentName, u64)>)> {
        let is_old = |at: Timestamp| now.ms_since(at) >= DELETION_LIFE_MS;
        let old = self.deleted.iter().filter(|(_, (_, at))| is_old(*at));
        let old: Vec<(DocumentName, u64)> =
            old.map(|(name, (revision, _))| (name.clone(), *revision)).collect();
        let mut next = self.clone();
        for (name, _) in &old {
            next.deleted.remove(name);
        }
        (!old.is_empty()).then_some((next, old))
    }
}

/// No instant of a document is after the year 9999.
const WRITTEN_MS_MAX: u64 = 253_402_300_799_999;

/// A document is as old as its configuration, or older.
fn check_place(name: &DocumentName, document: &Document, head: &Head) -> Result<(), ChangeRefused> {
    let Document { revision, written_at, content } = document;
    if !(1..=head.revision).contains(revision) {
        let accepted = format!("a revision from 1 to that of the configuration, {}", head.revision);
        return Err(refused(name, "revision", revision, &accepted));
    }
    let (life, created_at) = match content {
        Some(Content::Pool { created_revision, created_at, .. }) => (*created_revision, *created_at),
        _ => (*revision, *written_at),
    };
    if !(1..=*revision).contains(&life) {
        return Err(refused(name, "created_revision", life, "a revision from 1 to the pool's last one"));
    }
    let latest_ms = written_at.unix_ms().max(created_at.unix_ms());
    if latest_ms > WRITTEN_MS_MAX {
        return Err(refused(name, "written_at", latest_ms, "an instant before the year 10000"));
    }
    Ok(())
}

fn check_same(name: &DocumentName, field: &str, wanted: &str, given: &str) -> Result<(), ChangeRefused> {
    if wanted == given {
        return Ok(());
    }
    Err(refused(name, field, given, "what the document is filed under"))
}

fn refused(name: &DocumentName, field: &str, given: impl std::fmt::Debug, accepted: &str) -> ChangeRefused {
    ChangeRefused::Invalid(vec![InvalidField::new(format!("{name}.{field}"), given, accepted)])
}

fn pool_document(pool: &Pool, history: PoolHistory) -> Document {
    let PoolHistory { created_revision, revision, created_at, updated_at } = history;
    let spec = Box::new(pool.to_spec());
    let content = Content::Pool { created_revision: created_revision.0, created_at, spec };
    Document { revision, written_at: updated_at, content: Some(content) }
}

fn plan_document(entry: &PlanEntry) -> Document {
    let content = Some(Content::Plan(entry.plan.to_spec()));
    Document { revision: entry.revision, written_at: entry.written_at, content }
}

fn settings_document(entry: &SettingsEntry) -> Document {
    let shared: StoredSettings = entry.settings.shared();
    let content = Some(Content::Settings(shared));
    Document { revision: entry.revision, written_at: entry.written_at, content }
}
