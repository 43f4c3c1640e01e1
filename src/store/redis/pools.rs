//! The pools that were asked for, and whether each is within reach.

use std::sync::Arc;

use super::{reach::Reach, slot::Slot};
use crate::core::ids::PoolRevision;

/// See the module.
#[derive(Debug)]
pub(super) struct Pools {
    slots: papaya::HashMap<PoolRevision, Arc<Slot>>,
    /// Of the one server that has all of them; of a cluster, until it is first reached.
    pub(super) reach: Arc<Reach>,
    /// Each pool is on the node that has its slot.
    is_clustered: bool,
}

impl Pools {
    /// None has been asked for, and nothing has been reached.
    pub(super) fn new(is_clustered: bool) -> Self {
        Self { slots: papaya::HashMap::new(), reach: Arc::new(Reach::new(true)), is_clustered }
    }

    /// The pool's slot, made where it is not yet.
    pub(super) fn slot(&self, pool: PoolRevision) -> Arc<Slot> {
        let new = || {
            let reach = if self.is_clustered { Arc::default() } else { Arc::clone(&self.reach) };
            Arc::new(Slot::new(pool, reach))
        };
        Arc::clone(self.slots.pin().get_or_insert_with(pool, new))
    }

    /// What has this pool is out of reach.
    pub(super) fn are_out_of_reach(&self, slot: &Slot) -> bool {
        self.reach.is_degraded() || slot.reach.is_degraded()
    }

    /// All of them, in no order.
    pub(super) fn all(&self) -> Vec<Arc<Slot>> {
        self.slots.pin().values().cloned().collect()
    }
}
