//! What the service tells about itself: to Prometheus, to an OTLP collector, to a log.

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
};

use nix::sys::signal::Signal;
use opentelemetry_proto::tonic::{
    collector::{
        metrics::v1::{
            ExportMetricsServiceRequest, ExportMetricsServiceResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
        trace::v1::{
            ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
    },
    common::v1::any_value::Value,
    trace::v1::Span,
};
use tokio::net::TcpListener;
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use crate::harness::{
    TestProcess, TestServer, ask, hard, pb::settings::StoreDriver, pool, requests, soft, spent, told,
};

/// A tool that `tests/run` has installed; `None`, said aloud, where the tests are run without it.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/target/tools")).join(name);
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var_os("QUOTA_TESTS_NEED_TOOLS").is_none(), "{name} is not in target/tools");
    println!("skipped: {name} is not in target/tools; tests/run installs it");
    None
}

/// A server on which every kind of decision has been made once.
async fn busy_server() -> TestServer {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 20.0), soft("B", 80.0)]).with_provider("kimi")).await;
    server.create(pool("shadow", ["c2"], [hard("A", 100.0)]).with_provider("kimi").in_shadow()).await;
    server.record("A", "c1", requests(800)).await;
    server.enforce("A", "c1", None).await;
    server.enforce("B", "c1", None).await;
    server.enforce("A", "c2", requests(2_000)).await;
    server.enforce("A", "c9", None).await;
    server.enforce("Z", "c1", None).await;
    server.preview(ask("A", "c1", None)).await;
    let held = server.reserve("B", "c1", requests(3)).await;
    server.settle("B", "c1", &held.reservation_id, requests(2)).await;
    let held = server.reserve("B", "c1", requests(4)).await;
    server.release(&held.reservation_id).await;
    server.reserve("B", "c1", requests(5)).await;
    server.quota().enforce(ask("", "c1", None)).await.expect_err("a key is required");
    server
}

#[tokio::test]
async fn metrics_count_decisions_by_pool_reason_and_mode_and_nothing_by_key() {
    let server = busy_server().await;
    let (code, text) = server.page("/metrics").await;
    assert_eq!(code, 200);
    for line in [
        "quota_share_decisions_total{decision=\"block\",mode=\"strict\",pool=\"p\",reason=\"FAIR_SHARE\"} 1",
        "quota_share_decisions_total{decision=\"allow\",mode=\"strict\",pool=\"p\",reason=\"OK\"} 4",
        "quota_share_decisions_total{decision=\"would_block\",mode=\"generous\",pool=\"shadow\",reason=\"EXCEEDS_LIMIT\"} 1",
        "quota_share_no_pool_total{connection=\"known\"} 1",
        "quota_share_no_pool_total{connection=\"unknown\"} 1",
        "quota_share_reservations_open 1",
        "quota_share_reservations_ended_total{how=\"settled\"} 1",
        "quota_share_reservations_ended_total{how=\"released\"} 1",
        "quota_share_reservations_ended_total{how=\"expired\"} 0",
        "quota_share_rejected_input_total{method=\"quotashare.v1.QuotaShare/Enforce\"} 1",
        "quota_share_store_failing 0",
        "quota_share_used_fraction{dimension=\"requests/hourly\",pool=\"shadow\"} 0",
    ] {
        assert!(text.lines().any(|other| other == line), "{line}\nis not in\n{text}");
    }
    for name in ["quota_share_rpc_duration_seconds_bucket", "quota_share_build_info"] {
        assert!(text.contains(name), "{name} is not in\n{text}");
    }
    // Redis commits nothing that this replica could time.
    let commits = server.driver() == StoreDriver::Sqlite;
    for name in ["quota_share_commit_duration_seconds_count", "quota_share_commit_calls_sum"] {
        assert_eq!(text.contains(name), commits, "{name}\n{text}");
    }
    assert!(!text.contains("\"A\"") && !text.contains("\"B\""), "no series names a key:\n{text}");
}

#[tokio::test]
async fn the_metrics_page_pleases_promtool() {
    let Some(promtool) = tool("promtool") else { return };
    let server = busy_server().await;
    let (_, text) = server.page("/metrics").await;
    let mut check = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    check.stdin.take().expect("piped above").write_all(text.as_bytes()).expect("promtool reads");
    let output = check.wait_with_output().expect("promtool ends");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success() && said.is_empty(), "{}", String::from_utf8_lossy(&said));
}

/// A collector that remembers what it was sent.
#[derive(Clone, Debug, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    metrics: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let scopes =
            request.into_inner().resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        self.spans.lock().expect("nobody panics with it").extend(scopes.flat_map(|scope| scope.spans));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Collector {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let scopes =
            request.into_inner().resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
        let names = scopes.flat_map(|scope| scope.metrics).map(|metric| metric.name);
        self.metrics.lock().expect("nobody panics with it").extend(names);
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

impl Collector {
    /// Starts receiving; the endpoint is what exporters are told.
    async fn start() -> (Self, String) {
        let collector = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        let server = Server::builder()
            .add_service(TraceServiceServer::new(collector.clone()))
            .add_service(MetricsServiceServer::new(collector.clone()));
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        (collector, endpoint)
    }
}

fn attribute<'a>(span: &'a Span, name: &str) -> Option<&'a str> {
    let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

#[tokio::test]
async fn a_collector_gets_a_span_for_each_call_below_the_callers_and_all_metrics() {
    let (collector, endpoint) = Collector::start().await;
    let mut process = TestProcess::start_with(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]).await;
    process.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    let mut request = Request::new(ask("A", "c1", requests(2_000)));
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    request.metadata_mut().insert("traceparent", parent.parse().expect("plain text"));
    told(process.quota().enforce(request).await);
    told(process.quota().record_consumption(spent("A", "c1", requests(1))).await);
    assert_eq!(process.end_with(Signal::SIGTERM).await.0, Some(0));

    let spans = collector.spans.lock().expect("nobody panics with it").clone();
    let enforce = spans.iter().find(|span| span.name == "quotashare.v1.QuotaShare/Enforce").expect("a span");
    assert_eq!(enforce.trace_id, 0x4bf92f3577b34da6a3ce929d0e0e4736_u128.to_be_bytes());
    assert_eq!(enforce.parent_span_id, 0x00f067aa0ba902b7_u64.to_be_bytes());
    let told = ["quota_share.pool", "quota_share.decision", "quota_share.reason", "rpc.grpc.status_code"];
    let told = told.map(|name| attribute(enforce, name));
    assert_eq!(told, [Some("p"), Some("BLOCK"), Some("EXCEEDS_LIMIT"), Some("OK")]);
    assert!(spans.iter().any(|span| span.name == "quotashare.v1.QuotaShare/RecordConsumption"));
    let metrics = collector.metrics.lock().expect("nobody panics with it").clone();
    for name in ["quota_share.decisions", "quota_share.rpc.duration", "quota_share.commit.duration"] {
        assert!(metrics.iter().any(|other| other == name), "{name} is not in {metrics:?}");
    }
}

#[tokio::test]
async fn a_collector_that_never_answers_holds_up_nobody() {
    // Connections are made by the system and never accepted.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
    let vars = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_METRIC_EXPORT_INTERVAL", "50"),
        ("OTEL_BSP_SCHEDULE_DELAY", "10"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "16"),
    ];
    let mut process = TestProcess::start_with(&vars).await;
    process.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    // More spans than the exporter can keep: they are dropped.
    for _ in 0..200 {
        process.enforce("A", "c1", None).await;
    }
    assert_eq!(process.end_with(Signal::SIGTERM).await.0, Some(0));
}

#[tokio::test]
async fn the_log_is_json_where_it_is_not_a_terminal() {
    let mut process = TestProcess::start().await;
    process.end_with(Signal::SIGTERM).await;
    let log = process.log();
    assert!(!log.is_empty());
    for line in log.lines() {
        let entry: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(entry["timestamp"].is_string() && entry["level"].is_string(), "{line}");
    }
}
