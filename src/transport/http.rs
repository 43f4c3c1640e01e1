//! HTTP for probes and Prometheus: `/livez`, `/readyz`, `/metrics`.

use std::{future::Future, io, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::{net::TcpListener, sync::watch};

use crate::{service::Service, telemetry::Metrics};

/// What the pages are made from.
#[derive(Clone)]
struct Pages {
    service: Service,
    metrics: Arc<Metrics>,
    serving: watch::Receiver<bool>,
}

/// Serves on `listener` until `stop` ends. `serving` says whether this replica is ready.
pub(crate) fn server(
    service: Service,
    metrics: Arc<Metrics>,
    serving: watch::Receiver<bool>,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = io::Result<()>> + Send {
    let router = Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_text))
        .with_state(Pages { service, metrics, serving });
    axum::serve(listener, router).with_graceful_shutdown(stop).into_future()
}

async fn ready(State(pages): State<Pages>) -> Response {
    match *pages.serving.borrow() {
        true => "ready\n".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n").into_response(),
    }
}

async fn metrics_text(State(pages): State<Pages>) -> Response {
    pages.metrics.refresh(&pages.service).await;
    match pages.metrics.text() {
        Ok(text) => ([(CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
