//! Who has sent a call, for changes to be said with it.

use tonic::Request;

use crate::{service::Author, transport::auth::Caller};

/// Whoever has sent `request`.
pub(super) fn author<T>(request: &Request<T>) -> Author {
    match request.extensions().get::<Caller>() {
        Some(Caller { name, role }) => Author { name: name.clone(), role: Some(role.name()) },
        None => Author { name: "nobody was asked".into(), role: None },
    }
}
