//! The wire: gRPC in and out, and HTTP for probes and metrics. Wire types stop here.

pub(crate) mod auth;
pub(crate) mod files;
pub(crate) mod grpc;
pub(crate) mod http;
pub(crate) mod tls;
