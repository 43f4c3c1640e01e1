//! Who has changed what: one line for each change of the configuration, under a target of its own.

use std::{fmt::Display, sync::Arc};

use crate::{
    core::directory::{Change, Directory, DocumentChange, Fields, Write},
    store::LedgerError,
};

/// Whoever wants these lines and no others, or elsewhere, names it in `RUST_LOG`.
const TARGET: &str = "quota_share::audit";
const CHANGED: &str = "changed";
const MAYBE_CHANGED: &str = "perhaps changed: there was no answer";
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
    /// Says that they have called `method`, which led from `before` to `next` by `writes`.
    pub(super) fn has_changed(
        &self,
        method: &'static str,
        before: &Directory,
        next: &Directory,
        writes: &[Write],
    ) {
        self.say_all(CHANGED, method, before, next, writes);
    }

    /// The same where the answer was lost.
    pub(super) fn may_have_changed(
        &self,
        method: &'static str,
        before: &Directory,
        next: &Directory,
        writes: &[Write],
    ) {
        self.say_all(MAYBE_CHANGED, method, before, next, writes);
    }

    /// Says what has become of their setting consumption to zero: `what`.
    pub(super) fn has_reset(&self, what: &dyn Display, revision: u64, outcome: &Result<(), LedgerError>) {
        let line = match outcome {
            Ok(()) => CHANGED,
            Err(LedgerError::Unreachable(_)) => MAYBE_CHANGED,
            Err(_) => return,
        };
        self.say(line, Line { method: "ResetUsage", what, from: "", to: "", from_revision: None, revision });
    }

    fn say_all(
        &self,
        message: &'static str,
        method: &'static str,
        before: &Directory,
        next: &Directory,
        writes: &[Write],
    ) {
        for change in before.changes(next, &writes[..writes.len().min(LINES_MAX)]) {
            let DocumentChange { name: what, from_revision, revision, from, to } = &change;
            let (from, to, from_revision, revision) = (&text(from), &text(to), *from_revision, *revision);
            self.say(message, Line { method, what, from, to, from_revision, revision });
        }
        if writes.len() > LINES_MAX {
            let what = &format!("{} more documents", writes.len() - LINES_MAX);
            let revision = next.revision();
            self.say(message, Line { method, what, from: "", to: "", from_revision: None, revision });
        }
    }

    fn say(&self, message: &'static str, line: Line<'_>) {
        let (who, role) = (&*self.name, self.role);
        let Line { method, what, from, to, from_revision, revision } = line;
        tracing::info!(target: TARGET, who, role, method, %what, from, to, from_revision, revision, "{message}");
    }
}

/// What is said of one document.
struct Line<'a> {
    method: &'static str,
    what: &'a dyn Display,
    from: &'a str,
    to: &'a str,
    from_revision: Option<u64>,
    revision: u64,
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
