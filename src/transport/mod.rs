//! The wire: gRPC in and out. Wire types stop here.

pub(crate) mod grpc;
