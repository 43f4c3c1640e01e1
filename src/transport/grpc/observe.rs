//! Every call measured, and traced where traces are exported.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use hashbrown::HashMap;
use opentelemetry::propagation::Extractor;
use prost::Message;
use tonic::{
    Code, Status,
    codegen::http::{HeaderMap, Request, Response},
};
use tower::{Layer, Service};
use tracing::{Instrument, Span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::{pb, status::code_name};
use crate::telemetry::{MethodMetrics, RPC_TARGET, RpcMetrics};

/// Measures the calls of the services that it wraps.
#[derive(Clone)]
pub(super) struct ObserveLayer(Arc<Methods>);

/// By path: only methods of the contract are told apart, so that callers cannot make series.
type Methods = HashMap<String, Arc<MethodMetrics>>;

impl ObserveLayer {
    pub(super) fn new(metrics: &RpcMetrics) -> Self {
        // What build.rs wrote can be decoded; if not, calls are measured without their names.
        let files = prost_types::FileDescriptorSet::decode(pb::DESCRIPTORS).unwrap_or_default().file;
        let mut methods = HashMap::new();
        for file in files {
            for service in &file.service {
                for method in &service.method {
                    let name = format!("{}.{}/{}", file.package(), service.name(), method.name());
                    methods.insert(format!("/{name}"), Arc::new(metrics.of_method(name)));
                }
            }
        }
        Self(Arc::new(methods))
    }
}

impl<S> Layer<S> for ObserveLayer {
    type Service = Observe<S>;

    fn layer(&self, inner: S) -> Observe<S> {
        Observe { inner, methods: Arc::clone(&self.0) }
    }
}

#[derive(Clone)]
pub(super) struct Observe<S> {
    inner: S,
    methods: Arc<Methods>,
}

impl<S, B, A> Service<Request<B>> for Observe<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    A: Send + 'static,
{
    type Response = Response<A>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let started = Instant::now();
        let method = self.methods.get(request.uri().path()).map(Arc::clone);
        let span = span(&request);
        let answer = self.inner.call(request).instrument(span.clone());
        Box::pin(async move {
            let answer = answer.await;
            if let (Some(method), Ok(response)) = (method, &answer) {
                // A status in the headers is the whole answer; one that follows a message is in the trailers, and OK.
                let code =
                    Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code());
                let code = code_name(code);
                span.record("rpc.grpc.status_code", code);
                method.ended(code, started.elapsed());
            }
            answer
        })
    }
}

/// A span below the caller's, by W3C trace context; disabled unless traces are exported.
fn span<B>(request: &Request<B>) -> Span {
    let path = request.uri().path().trim_start_matches('/');
    let span = tracing::debug_span!(
        target: RPC_TARGET,
        "rpc",
        otel.name = path,
        otel.kind = "server",
        rpc.system = "grpc",
        rpc.grpc.status_code = Empty,
        quota_share.pool = Empty,
        quota_share.decision = Empty,
        quota_share.reason = Empty,
    );
    if !span.is_disabled() {
        let parent = opentelemetry::global::get_text_map_propagator(|propagator| {
            propagator.extract(&Headers(request.headers()))
        });
        // Without a layer for traces there is nothing to set.
        let _ = span.set_parent(parent);
    }
    span
}

/// Writes a decision into the span of its call.
pub(super) fn record_decision(response: &pb::EnforceResponse) {
    let span = Span::current();
    if !span.is_disabled() {
        span.record("quota_share.pool", response.pool_id.as_str());
        span.record("quota_share.decision", response.decision().as_str_name());
        span.record("quota_share.reason", response.reason().as_str_name());
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}
