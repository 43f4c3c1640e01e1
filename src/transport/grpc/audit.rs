//! Who has changed what: one line for each change of the configuration, under a target of its own.

use std::fmt::Display;

use tonic::Request;

use crate::transport::auth::Caller;

/// Whoever wants these lines and no others, or elsewhere, names it in `RUST_LOG`.
const TARGET: &str = "quota_share::audit";

/// A call that is about to change something.
pub(super) struct Audit {
    caller: Option<Caller>,
    method: &'static str,
}

impl Audit {
    /// `method` is called by `request`.
    pub(super) fn of<T>(request: &Request<T>, method: &'static str) -> Self {
        Self { caller: request.extensions().get().cloned(), method }
    }

    /// It has changed `what`: from the revision that the caller has named, if not 0, to that of the new configuration.
    /// `what` has names, and never a value that may be a secret.
    pub(super) fn changed(self, what: impl Display, from_revision: u64, revision: u64) {
        let who = self.caller.as_ref().map_or("nobody was asked", |caller| &*caller.name);
        let role = self.caller.as_ref().map(|caller| caller.role.name());
        let from_revision = (from_revision > 0).then_some(from_revision);
        let method = self.method;
        tracing::info!(target: TARGET, who, role, method, %what, from_revision, revision, "changed");
    }
}
