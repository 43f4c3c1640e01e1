//! A directory as documents that replicas share, and what becomes of two that have gone different ways.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{ChangeRefused, Directory, Origin, PlanEntry, PoolHistory, SettingsEntry, Write};
use crate::core::{
    document::{Content, DELETION_LIFE_MS, Document, DocumentName, Head},
    ids::PoolRevision,
    plan::Plan,
    pool::Pool,
    settings::StoredSettings,
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
        let deletion = |name: DocumentName| {
            let (revision, written_at) = *self.deleted.get(&name)?;
            Some((name, Document { revision, written_at, content: None }))
        };
        let documents = writes.iter().filter_map(|write| match write {
            Write::PutPool(entry) => {
                let name = DocumentName::Pool(entry.pool.id.clone());
                Some((name, pool_document(&entry.pool, entry.history)))
            }
            Write::PutPlan(entry) => {
                Some((DocumentName::Plan(entry.plan.connection.clone()), plan_document(entry)))
            }
            Write::DeletePool(id, _) => deletion(DocumentName::Pool(id.clone())),
            Write::DeletePlan(connection) => deletion(DocumentName::Plan(connection.clone())),
            Write::PutSettings(entry) => Some((DocumentName::Settings, settings_document(entry))),
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
        next.revision = head.revision;
        next.origin = Arc::new(Origin { lineage: Some(head.lineage), write: head.write });
        let mut writes = Vec::new();
        // What leaves goes first: what comes may have its connections.
        for (name, document) in documents {
            writes.extend(next.take_away(name, document));
        }
        for (name, document) in documents {
            writes.extend(next.put(name, document)?);
        }
        Ok((next, writes))
    }

    /// Removes what `document` replaces; the write that it takes if nothing comes in its place.
    fn take_away(&mut self, name: &DocumentName, document: &Document) -> Option<Write> {
        let is_deleted = document.content.is_none();
        if is_deleted {
            self.deleted.insert(name.clone(), (document.revision, document.written_at));
        }
        match name {
            DocumentName::Pool(id) => {
                let entry = self.pools.get(id).cloned()?;
                self.remove(&entry);
                let life = entry.history.created_revision;
                // A pool of another life leaves nothing of the former.
                let goes_on = matches!(document.content, Some(Content::Pool { created_revision, .. })
                    if created_revision == life.0);
                (!goes_on).then(|| Write::DeletePool(id.clone(), life))
            }
            DocumentName::Plan(connection) if is_deleted => {
                self.plans.remove(connection)?;
                self.replan(connection);
                Some(Write::DeletePlan(connection.clone()))
            }
            DocumentName::Plan(_) | DocumentName::Settings => None,
        }
    }

    fn put(&mut self, name: &DocumentName, document: &Document) -> Result<Option<Write>, ChangeRefused> {
        let Document { revision, written_at, content: Some(content) } = document else { return Ok(None) };
        let (revision, written_at) = (*revision, *written_at);
        Ok(Some(match content {
            Content::Pool { created_revision, created_at, spec } => {
                let pool = Pool::check(&name.to_string(), spec).map_err(ChangeRefused::Invalid)?;
                let history = PoolHistory {
                    created_revision: PoolRevision(*created_revision),
                    revision,
                    created_at: *created_at,
                    updated_at: written_at,
                };
                self.check_connections(&pool)?;
                Write::PutPool(self.insert(pool, history))
            }
            Content::Plan(spec) => {
                let plan = Plan::check(&name.to_string(), spec).map_err(ChangeRefused::Invalid)?;
                let connection = plan.connection.clone();
                let entry = Arc::new(PlanEntry { plan, revision, written_at });
                self.deleted.remove(name);
                self.plans.insert(connection.clone(), Arc::clone(&entry));
                self.replan(&connection);
                Write::PutPlan(entry)
            }
            Content::Settings(shared) => {
                let settings = self.settings().with_shared(shared.clone());
                self.settings = Arc::new(SettingsEntry { settings, revision, written_at });
                Write::PutSettings(Arc::clone(&self.settings))
            }
        }))
    }

    /// This directory and `other`, which is at `head`, together: of each document the newer one, of equal revisions that
    /// of the other.
    pub fn reconcile(
        &self,
        head: &Head,
        other: &Documents,
        write: String,
    ) -> Result<Reconciled, ChangeRefused> {
        let own = self.documents();
        let is_newer = |(name, document): &(&DocumentName, &Document)| match other.get(*name) {
            Some(theirs) => theirs.revision < document.revision,
            // That something is gone is no news to who does not have it.
            None => document.content.is_some(),
        };
        // What is here alone goes, and comes again after all that the other has.
        let mine = own.iter().filter(is_newer);
        let mine: Documents = mine.map(|(name, document)| (name.clone(), document.clone())).collect();
        let changed: Documents = other
            .iter()
            .filter(|(name, document)| !mine.contains_key(*name) && own.get(*name) != Some(*document))
            .map(|(name, document)| (name.clone(), document.clone()))
            .collect();
        let mut bare = self.clone();
        for (name, document) in &mine {
            bare.take_away(name, &Document { content: None, ..document.clone() });
        }
        let (mut next, mut writes) = bare.follow(head.clone(), &changed)?;
        let mut lives: BTreeSet<PoolRevision> = next.by_life.keys().copied().collect();
        let (mut missing, mut dropped) = (Documents::new(), Vec::new());
        let mut revision = head.revision.max(self.revision);
        for (name, document) in mine {
            let mut document = Document { revision: revision + 1, ..document };
            if let Some(Content::Pool { created_revision, .. }) = &mut document.content
                && !lives.insert(PoolRevision(*created_revision))
            {
                // Another pool has a life of that name.
                *created_revision = document.revision;
            }
            if document.content.is_none() {
                next.deleted.insert(name.clone(), (document.revision, document.written_at));
            }
            match next.put(&name, &document) {
                Ok(written) => {
                    writes.extend(written.or_else(|| self.deletion(&name)));
                    missing.insert(name, document);
                    revision += 1;
                }
                Err(refused) => {
                    writes.extend(self.deletion(&name));
                    next.deleted.insert(name.clone(), (revision, document.written_at));
                    dropped.push((name, refused));
                }
            }
        }
        if !missing.is_empty() {
            next.revision = revision;
            next = next.written(write);
        }
        Ok(Reconciled { next, writes, missing, dropped })
    }

    /// The write by which a document of this directory goes.
    fn deletion(&self, name: &DocumentName) -> Option<Write> {
        match name {
            DocumentName::Pool(id) => {
                let entry = self.pools.get(id)?;
                Some(Write::DeletePool(id.clone(), entry.history.created_revision))
            }
            DocumentName::Plan(connection) => {
                self.plans.get(connection).map(|_| Write::DeletePlan(connection.clone()))
            }
            DocumentName::Settings => None,
        }
    }

    /// Forgets what was deleted so long before `now` that every replica has heard of it.
    pub fn forget_deletions(&mut self, now: Timestamp) {
        let kept = self.deleted.iter().filter(|(_, (_, at))| now.ms_since(*at) < DELETION_LIFE_MS);
        self.deleted = kept.map(|(name, of)| (name.clone(), *of)).collect();
    }
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
