//! The wire: gRPC in and out, and HTTP for probes and metrics. Wire types stop here.

pub(crate) mod grpc;
pub(crate) mod http;
