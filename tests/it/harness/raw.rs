//! Calls of any method, with bytes for a message.

use prost::bytes::{Buf, BufMut};
use prost_types::FileDescriptorSet;
use tonic::{
    Code, Request, Response, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

/// Calls `path`, such as `/quotashare.v1.QuotaShare/Enforce`, with `message`; what is answered is the first message.
pub(crate) async fn call_raw(
    channel: Channel,
    path: &str,
    message: Vec<u8>,
    token: Option<&str>,
) -> Result<Vec<u8>, Status> {
    let mut grpc = Grpc::new(channel);
    let ready = grpc.ready().await;
    ready.map_err(|error| Status::unknown(format!("the server is gone: {error}")))?;
    let path = PathAndQuery::try_from(path).expect("a path");
    let mut request = Request::new(message);
    if let Some(token) = token {
        let authorization = format!("Bearer {token}").parse().expect("a header's value");
        request.metadata_mut().insert("authorization", authorization);
    }
    let answers = grpc.server_streaming(request, path, RawCodec).await?;
    Ok(answers.into_inner().message().await?.unwrap_or_default())
}

/// Calls `path`, and never sends the message. If there is no room, calls again.
pub(crate) async fn hang_raw(channel: Channel, path: &str) {
    let mut grpc = Grpc::new(channel);
    let path = PathAndQuery::try_from(path).expect("a path");
    loop {
        grpc.ready().await.expect("the server is there");
        let messages = Request::new(futures::stream::pending::<Vec<u8>>());
        let answer: Result<Response<Vec<u8>>, Status> =
            grpc.client_streaming(messages, path.clone(), RawCodec).await;
        assert_eq!(answer.expect_err("there is no message").code(), Code::Unavailable);
    }
}

/// The paths of all methods of the contract.
pub(crate) fn paths_of(descriptors: FileDescriptorSet) -> Vec<String> {
    let mut paths = Vec::new();
    for file in descriptors.file {
        for service in &file.service {
            let of = |name: &str| format!("/{}.{}/{name}", file.package(), service.name());
            paths.extend(service.method.iter().map(|method| of(method.name())));
        }
    }
    paths
}

/// Takes messages for the bytes that they are.
#[derive(Clone, Copy, Debug, Default)]
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for RawCodec {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, message: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&message);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining()).to_vec()))
    }
}
