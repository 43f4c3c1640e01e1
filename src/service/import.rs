//! Taking over what was configured elsewhere: all or nothing, and only into a store without pools.

use std::sync::Arc;

use super::{AdminError, Author, Service};
use crate::core::{
    directory::{Change, PoolEntry, Write},
    import::Import,
    settings::StoredSettings,
};

/// What an import has done.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The new pools.
    pub pools: Vec<Arc<PoolEntry>>,
    /// How many plans were stored.
    pub plans: usize,
    /// Settings were stored.
    pub settings: bool,
    /// There were pools already, and nothing was done.
    pub skipped: bool,
    /// What was changed to make it fit, and what is probably not meant.
    pub warnings: Vec<String>,
}

impl Service {
    /// Takes `import` over, in one change, if there are no pools yet. What is stored already stays as it is.
    pub async fn import(&self, author: Author, mut import: Import) -> Result<Imported, AdminError> {
        let mut warnings = std::mem::take(&mut import.warnings);
        import.pools.iter_mut().for_each(|spec| self.choose_id(spec));
        let plans_given: Vec<String> = import.plans.iter().map(|plan| plan.connection_id.clone()).collect();
        let settings_given = import.settings != StoredSettings::default();
        let brings_pools = !import.pools.is_empty();
        let writes = self.change_all(author, Change::Import(import)).await?;

        let (mut pools, mut plans, mut settings) = (Vec::new(), Vec::new(), false);
        for write in writes {
            match write {
                Write::PutPool(entry) => pools.push(entry),
                Write::PutPlan(entry) => plans.push(entry.plan.connection.to_string()),
                Write::PutSettings(_) => settings = true,
                Write::DeletePool(..) | Write::DeletePlan(_) | Write::Deletion(..) => {}
            }
        }
        let skipped = pools.is_empty() && (brings_pools || self.directory().pool_count() > 0);
        if skipped {
            return Ok(Imported { pools, plans: 0, settings, skipped, warnings: Vec::new() });
        }
        let mut stored = plans.iter().peekable();
        for connection in plans_given {
            // Plans are written in the order in which they are given.
            if stored.next_if(|stored| **stored == connection).is_none() {
                warnings.add(format!("connection {connection} has a stored plan already: it stays as it is"));
            }
        }
        if settings_given && !settings {
            warnings.add("settings are stored already: they stay as they are");
        }
        for entry in &pools {
            let more = entry.warnings().into_iter();
            more.for_each(|warning| warnings.add(format!("pool {:?}: {warning}", entry.pool.name)));
        }
        Ok(Imported { pools, plans: plans.len(), settings, skipped, warnings: warnings.into_vec() })
    }
}
