//! The one change of many documents: what is brought from elsewhere into a directory without pools.

use super::{ChangeRefused, Directory, Write};
use crate::core::{
    ids::Faults,
    import::Import,
    plan::Plan,
    settings::{SettingsUpdate, StoredSettings},
    units::Timestamp,
};

impl Directory {
    /// All of `import`, or nothing; `None` where there are pools already or nothing is brought. What is stored already
    /// stays as it is.
    ///
    /// Each document takes a revision of its own, since the revision that creates a pool names the pool's life.
    pub(super) fn import(
        &mut self,
        import: &Import,
        at: Timestamp,
    ) -> Result<Option<Vec<Write>>, ChangeRefused> {
        if !self.pools.is_empty() {
            return Ok(None);
        }
        let first = self.revision;
        let mut writes = Vec::new();
        let mut faults = Faults::default();
        let before = self.plans.clone();
        for (index, spec) in import.plans.iter().enumerate() {
            let path = format!("plans[{index}]");
            let Some(plan) = faults.take_all(Plan::check(&path, spec)) else { continue };
            if before.contains_key(&plan.connection) {
                continue;
            }
            if self.plans.contains_key(&plan.connection) {
                let field = format!("{path}.connection_id");
                faults.add(field, &plan.connection, "each connection at most once");
            }
            self.revision = first + writes.len() as u64;
            writes.push(self.store_plan(plan, at));
        }
        for (index, spec) in import.pools.iter().enumerate() {
            self.revision = first + writes.len() as u64;
            let created = self.create_pool(&format!("pools[{index}]"), spec, at);
            writes.extend(unless_invalid(created, &mut faults)?);
        }
        if *self.settings() == StoredSettings::default() && import.settings != StoredSettings::default() {
            self.revision = first + writes.len() as u64;
            let stored = self.update_settings(&SettingsUpdate::from(&import.settings), at);
            writes.extend(unless_invalid(stored, &mut faults)?);
        }
        if !faults.is_empty() {
            return Err(ChangeRefused::Invalid(faults.into_vec()));
        }
        Ok(Some(writes).filter(|writes| !writes.is_empty()))
    }
}

/// What was written; mistakes are collected, so that all documents are looked at.
fn unless_invalid(
    result: Result<Write, ChangeRefused>,
    faults: &mut Faults,
) -> Result<Option<Write>, ChangeRefused> {
    match result {
        Err(ChangeRefused::Invalid(more)) => Ok(faults.take_all(Err(more))),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        directory::Change,
        plan::{DimensionSpec, PlanSpec},
        pool::PoolSpec,
    };

    const AT: Timestamp = Timestamp::from_unix_ms(0);

    fn pool(id: &str, connection: &str) -> PoolSpec {
        PoolSpec {
            pool_id: id.to_owned(),
            name: id.to_owned(),
            connection_ids: vec![connection.to_owned()],
            ..PoolSpec::default()
        }
    }

    fn plan(connection: &str, limit: f64) -> PlanSpec {
        let dimension = DimensionSpec {
            unit: "tokens".to_owned(),
            window: "daily".to_owned(),
            limit: Some(limit),
            ..Default::default()
        };
        PlanSpec { connection_id: connection.to_owned(), dimensions: vec![dimension], ..PlanSpec::default() }
    }

    fn change(directory: &Directory, change: Change) -> Directory {
        directory.apply(change, AT).unwrap().expect("something to do").next
    }

    #[test]
    fn every_document_of_an_import_has_a_revision_of_its_own_and_nothing_stored_is_replaced() {
        let stored = change(&Directory::default(), Change::PutPlan { spec: plan("c1", 5.0), revision: 0 });
        let import = Import {
            pools: vec![pool("a", "c1"), pool("b", "c2")],
            plans: vec![plan("c1", 6.0), plan("c2", 7.0)],
            settings: StoredSettings { saturation_threshold: Some(0.4), ..StoredSettings::default() },
            ..Import::default()
        };
        let next = change(&stored, Change::Import(import.clone()));
        let revisions: Vec<u64> =
            next.pools_after(None).map(|entry| entry.history.created_revision.0).collect();
        assert_eq!((revisions, next.revision()), (vec![3, 4], 5));
        let limits: Vec<Option<f64>> =
            next.pools_after(None).map(|entry| entry.dimensions()[0].limit).collect();
        assert_eq!(limits, [Some(5.0), Some(7.0)]);
        assert_eq!(next.settings().saturation_threshold, Some(0.4));
        assert!(next.apply(Change::Import(import), AT).unwrap().is_none(), "there are pools");
        assert!(stored.apply(Change::Import(Import::default()), AT).unwrap().is_none(), "nothing is brought");
    }

    #[test]
    fn an_import_with_mistakes_names_all_of_them_by_their_place() {
        let import = Import {
            pools: vec![pool("a", "c1"), pool("B", "c2")],
            plans: vec![plan("c1", 6.0), plan("c1", 7.0), plan("", 7.0)],
            settings: StoredSettings { saturation_threshold: Some(40.0), ..StoredSettings::default() },
            ..Import::default()
        };
        let Err(ChangeRefused::Invalid(faults)) = Directory::default().apply(Change::Import(import), AT)
        else {
            panic!("it was taken");
        };
        let fields: Vec<&str> = faults.iter().map(|fault| fault.field.as_str()).collect();
        let want = [
            "plans[1].connection_id",
            "plans[2].connection_id",
            "pools[1].pool_id",
            "settings.saturation_threshold",
        ];
        assert_eq!(fields, want);
        let import = Import { pools: vec![pool("a", "c1"), pool("b", "c1")], ..Import::default() };
        let refused = Directory::default().apply(Change::Import(import), AT).unwrap_err();
        assert!(matches!(refused, ChangeRefused::ConnectionTaken { .. }), "{refused}");
    }
}
