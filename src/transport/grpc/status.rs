//! The one place where a failure becomes a status.

use std::{collections::HashMap, time::Duration};

use tonic::{Code, Status, body::Body, codegen::http::Response};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt};

use super::{edge::Late, methods::Method};
use crate::{
    core::{directory::ChangeRefused, ids::InvalidField, ledger::Contradiction},
    service::AdminError,
    store::{LedgerError, StoreError},
    transport::auth::{Access, Refused},
};

/// The domain of the `reason` in a google.rpc.ErrorInfo.
const DOMAIN: &str = "quotashare.v1";
/// Most violations told of one request: a status travels in headers, which clients bound.
const VIOLATIONS_MAX: usize = 12;
/// Most of them in the message, which repeats what the details say.
const VIOLATIONS_IN_MESSAGE_MAX: usize = 3;
const UNREACHABLE: &str = "the shared counters could not be reached in time";
/// When a call that met a full or failing replica may be worth another try.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// INVALID_ARGUMENT with a google.rpc.BadRequest that names each field.
pub(super) fn invalid(faults: Vec<InvalidField>) -> Status {
    let told = faults.iter().take(VIOLATIONS_IN_MESSAGE_MAX).map(ToString::to_string);
    let mut message = told.collect::<Vec<_>>().join("; ");
    if faults.len() > VIOLATIONS_IN_MESSAGE_MAX {
        message.push_str(&format!("; and {} more", faults.len() - VIOLATIONS_IN_MESSAGE_MAX));
    }
    let violations: Vec<FieldViolation> = faults
        .into_iter()
        .take(VIOLATIONS_MAX)
        .map(|InvalidField { field, given, accepted }| {
            FieldViolation::new(field, format!("{given} is not valid: use {accepted}"))
        })
        .collect();
    Status::with_error_details(Code::InvalidArgument, message, ErrorDetails::with_bad_request(violations))
}

/// A message that cannot be read is its sender's mistake, which the library answers with INTERNAL.
pub(super) fn blame_the_caller(response: Response<Body>) -> Response<Body> {
    const UNREADABLE: &str = "failed to decode Protobuf message";
    let unreadable =
        |status: &Status| status.code() == Code::Internal && status.message().starts_with(UNREADABLE);
    match Status::from_header_map(response.headers()).filter(unreadable) {
        None => response,
        Some(status) => {
            let accepted = "the message of the contract, as protobuf encodes it";
            invalid(vec![InvalidField::new("message", status.message(), accepted)]).into_http()
        }
    }
}

/// The code's name in the contract's language.
pub(super) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

fn with_info(code: Code, message: String, reason: &str, metadata: &[(&str, String)]) -> Status {
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    Status::with_error_details(code, message, ErrorDetails::with_error_info(reason, DOMAIN, metadata))
}

/// UNAVAILABLE: nothing has changed, unless the message says otherwise, and the same call may work soon.
fn unavailable(message: String, reason: &str) -> Status {
    let mut details = ErrorDetails::with_retry_info(Some(RETRY_DELAY));
    details.set_error_info(reason, DOMAIN, HashMap::new());
    Status::with_error_details(Code::Unavailable, message, details)
}

/// UNAVAILABLE: the server is stopping; another replica, or this one in a moment, can go on.
pub(super) fn draining() -> Status {
    unavailable("this replica is stopping: call again".to_owned(), "DRAINING")
}

/// UNAVAILABLE: so many calls of its kind are in flight that this one was not looked at.
pub(super) fn overloaded(of_decisions: bool, calls_max: usize) -> Status {
    let set_by = if of_decisions { " (QUOTA_MAX_CALLS_IN_FLIGHT)" } else { "" };
    let message =
        format!("{calls_max} such calls are in flight already{set_by}: nothing was done, call again");
    unavailable(message, "OVERLOADED")
}

/// DEADLINE_EXCEEDED: nobody waits for the answer any more, or nobody should.
pub(super) fn late(late: Late) -> Status {
    let message = match late {
        Late::Before => "the caller's deadline had passed before the call was begun: nothing was done",
        Late::Meanwhile => {
            "the deadline passed before there was an answer, and whether the call had an effect is not known: \
             sent again with the same request_id, idempotency_key or reservation_id it has it once"
        }
    };
    with_info(Code::DeadlineExceeded, message.to_owned(), "DEADLINE_PASSED", &[])
}

/// UNAUTHENTICATED or PERMISSION_DENIED, with what `method` needs. What the caller has shown is told by nothing.
pub(super) fn not_admitted(method: &Method, refused: Refused) -> Status {
    let name = method.name;
    let needs = match method.access {
        Access::Needs(role) => format!("the role {}", role.name()),
        Access::Open | Access::AnyRole => "any role".to_owned(),
    };
    const TOKEN: &str = "send the metadata \"authorization: Bearer TOKEN\"";
    let (code, reason, why) = match &refused {
        Refused::Anonymous => (Code::Unauthenticated, "CREDENTIALS_MISSING", TOKEN.to_owned()),
        Refused::Malformed => (Code::Unauthenticated, "CREDENTIALS_MALFORMED", TOKEN.to_owned()),
        Refused::UnknownToken => {
            (Code::Unauthenticated, "TOKEN_UNKNOWN", "the token is not known".to_owned())
        }
        Refused::UnknownCertificate => {
            let why = "no name in the certificate has a role, and there is no token";
            (Code::PermissionDenied, "CERTIFICATE_WITHOUT_ROLE", why.to_owned())
        }
        Refused::Role(caller) => {
            let why = format!("{} has the role {}", caller.name, caller.role.name());
            (Code::PermissionDenied, "ROLE_NOT_ENOUGH", why)
        }
    };
    let mut metadata = vec![("method", name.to_owned()), ("needs", needs.clone())];
    if let Refused::Role(caller) = refused {
        metadata.extend([("caller", caller.name.to_string()), ("role", caller.role.name().to_owned())]);
    }
    with_info(code, format!("{name} needs {needs}: {why}"), reason, &metadata)
}

pub(super) fn of_change(refused: ChangeRefused) -> Status {
    let message = refused.to_string();
    match refused {
        ChangeRefused::Invalid(faults) => invalid(faults),
        ChangeRefused::NoSuchPool(pool) => {
            with_info(Code::NotFound, message, "POOL_NOT_FOUND", &[("pool_id", pool.to_string())])
        }
        ChangeRefused::PoolExists(pool) => {
            with_info(Code::AlreadyExists, message, "POOL_EXISTS", &[("pool_id", pool.to_string())])
        }
        ChangeRefused::RevisionDiffers { given, current, .. } => {
            let metadata = [("given_revision", given.to_string()), ("current_revision", current.to_string())];
            with_info(Code::Aborted, message, "REVISION_DIFFERS", &metadata)
        }
        ChangeRefused::ConnectionTaken { connection, pool } => {
            let metadata = [("connection_id", connection.to_string()), ("pool_id", pool.to_string())];
            with_info(Code::FailedPrecondition, message, "CONNECTION_TAKEN", &metadata)
        }
        ChangeRefused::Full { max, .. } => {
            with_info(Code::ResourceExhausted, message, "DIRECTORY_FULL", &[("max", max.to_string())])
        }
    }
}

/// Of a cost that may have been counted although nothing came back.
pub(super) fn of_record(error: LedgerError) -> Status {
    match error {
        LedgerError::Unreachable(_) => {
            let message = format!(
                "{UNREACHABLE}, and whether the cost was counted is not known: send the call again with the same \
                 reservation_id or idempotency_key, by which it counts once"
            );
            unavailable(message, "STORE_UNAVAILABLE")
        }
        error => of_ledger(error),
    }
}

pub(super) fn of_ledger(error: LedgerError) -> Status {
    let message = error.to_string();
    match error {
        LedgerError::Contradiction(Contradiction::ForeignKey) => {
            let accepted = "a reservation of this api_key_id";
            invalid(vec![InvalidField::new("reservation_id", "another key's reservation", accepted)])
        }
        LedgerError::Contradiction(contradiction) => {
            let field = match contradiction {
                Contradiction::RequestId => "request_id",
                Contradiction::IdempotencyKey => "idempotency_key",
                Contradiction::Settled | Contradiction::ForeignKey => "reservation_id",
            };
            with_info(Code::AlreadyExists, message, "ID_REUSED", &[("field", field.to_owned())])
        }
        LedgerError::PoolRemoved => unavailable(message, "POOL_CHANGING"),
        LedgerError::Full { .. } => unavailable(message, "REPLICA_FULL"),
        LedgerError::NoConfiguration => unavailable(message, "NO_CONFIGURATION"),
        LedgerError::NewerLayout(_) => unavailable(message, "NEWER_VERSION"),
        LedgerError::Unreachable(_) => {
            unavailable(format!("{UNREACHABLE}: send the call again"), "STORE_UNAVAILABLE")
        }
        LedgerError::Store(error) => of_store(&error),
    }
}

pub(super) fn of_admin(error: AdminError) -> Status {
    match error {
        AdminError::Refused(refused) => of_change(refused),
        error @ AdminError::OthersAreLive(_) => {
            let variables = "QUOTA_STORE_DRIVER, QUOTA_STORE_REDIS_URL".to_owned();
            let message = error.to_string();
            with_info(Code::FailedPrecondition, message, "REPLICAS_ARE_LIVE", &[("variables", variables)])
        }
        AdminError::Store(error) => of_store(&error),
        AdminError::Ledger(error) => of_ledger(error),
    }
}

fn of_store(error: &StoreError) -> Status {
    match error {
        StoreError::Unavailable { store, doing, .. } => {
            // Whoever writes there says each change once.
            tracing::debug!(error = error as &dyn std::error::Error, "answered UNAVAILABLE");
            unavailable(format!("{store} failed while {doing}: send the call again"), "STORE_UNAVAILABLE")
        }
        StoreError::Corrupt { store, what, .. } => {
            tracing::error!(error = error as &dyn std::error::Error, "answered INTERNAL");
            Status::internal(format!("{store} holds something as {what} that this version cannot read"))
        }
    }
}
