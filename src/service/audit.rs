//! Who has changed what: one line for each change of the configuration, under a target of its own.

use std::{fmt::Display, sync::Arc};

use crate::core::directory::{Change, Directory, Fields, Write};

/// Whoever wants these lines and no others, or elsewhere, names it in `RUST_LOG`.
const TARGET: &str = "quota_share::audit";
/// Most documents of one change that have a line of their own.
const LINES_MAX: usize = 100;

/// Who makes a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Author {
    /// As the file of callers or a certificate names them.
    pub name: Arc<str>,
    /// What they may do, if that is known.
    pub role: Option<&'static str>,
}

impl Author {
    /// Says that `self` has made `change`, which led from `before` to `next` by `writes`.
    pub(super) fn has_changed(
        &self,
        method: &'static str,
        before: &Directory,
        next: &Directory,
        writes: &[Write],
    ) {
        for change in before.changes(next, &writes[..writes.len().min(LINES_MAX)]) {
            let (from, to) = (text(&change.from), text(&change.to));
            self.say(method, &change.name, &from, &to, change.from_revision, change.revision);
        }
        if writes.len() > LINES_MAX {
            let more = format!("{} more documents", writes.len() - LINES_MAX);
            self.say(method, &more, "", "", None, next.revision());
        }
    }

    /// Says that `self` has set consumption to zero: `what`.
    pub(super) fn has_reset(&self, what: impl Display, revision: u64) {
        self.say("ResetUsage", &what, "", "", None, revision);
    }

    fn say(
        &self,
        method: &'static str,
        what: &dyn Display,
        from: &str,
        to: &str,
        from_revision: Option<u64>,
        revision: u64,
    ) {
        let (who, role) = (&*self.name, self.role);
        tracing::info!(target: TARGET, who, role, method, %what, from, to, from_revision, revision, "changed");
    }
}

fn text(fields: &Fields) -> String {
    // Names and plain values can always be written.
    serde_json::to_string(fields).unwrap_or_default()
}

impl Change {
    /// The method that asks for it.
    pub(super) fn method(&self) -> &'static str {
        match self {
            Change::CreatePool(_) => "CreatePool",
            Change::UpdatePool { .. } => "UpdatePool",
            Change::DeletePool { .. } => "DeletePool",
            Change::PutAllocation { .. } => "PutAllocation",
            Change::DeleteAllocation { .. } => "DeleteAllocation",
            Change::PutPlan { .. } => "PutPlan",
            Change::DeletePlan { .. } => "DeletePlan",
            Change::UpdateSettings(_) => "UpdateSettings",
            Change::Import(_) => "ImportPools",
        }
    }
}
