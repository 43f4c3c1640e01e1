//! What the service tells about itself: logs, traces and metrics. The names of all metrics are here.

use std::{io::IsTerminal, sync::Arc, time::Duration};

use opentelemetry::{
    KeyValue,
    metrics::{BoundHistogram, Counter, Histogram, Meter, MeterProvider},
    trace::TracerProvider,
};
use opentelemetry_otlp::{MetricExporter, SpanExporter};
use opentelemetry_sdk::{
    Resource,
    metrics::{Instrument, PeriodicReader, SdkMeterProvider, Stream},
    propagation::TraceContextPropagator,
    trace::SdkTracerProvider,
};
use parking_lot::Mutex;
use prometheus::{Encoder, Registry, TextEncoder};
use tracing_subscriber::{
    EnvFilter, Layer,
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use crate::{
    config::Otlp,
    core::ledger::Ended,
    service::{DecisionCount, Service, UsedFraction},
    store::{Condition, JournalCondition, sqlite::Commit},
};

/// The target of the spans of calls, which are made only for an exporter of traces.
pub const RPC_TARGET: &str = "quota_share::rpc";

const SERVICE_NAME: &str = "quota-share";
/// Most series of one instrument: 100,000 pools have one of each dimension, and a few of decisions.
const SERIES_MAX: usize = 1_000_000;
/// Upper bounds of the buckets of durations, in seconds: a decision in memory takes microseconds, a commit milliseconds.
const SECONDS: [f64; 14] =
    [0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];
const CALLS: [f64; 13] =
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0];

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("telemetry cannot be set up: {0}")]
pub struct TelemetryError(String);

fn failed(error: impl std::fmt::Display) -> TelemetryError {
    TelemetryError(error.to_string())
}

/// Logs and traces of the process.
#[derive(Debug)]
pub struct Tracing {
    traces: Option<SdkTracerProvider>,
}

/// What is logged unless `RUST_LOG` says otherwise. Whether Redis is there is said once by the service, and not again by its
/// client for every connection.
const LOGGED: &str = "info,fred=error";

impl Tracing {
    /// Sets up logs on standard error (text on a terminal, JSON elsewhere; `RUST_LOG` says what, `info` by default) and, if
    /// it is asked for, the export of traces. Call once in a process, within a Tokio runtime.
    pub fn start(otlp: &Otlp) -> Result<Self, TelemetryError> {
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOGGED));
        let text = std::io::stderr().is_terminal();
        let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let logs = if text { logs.boxed() } else { logs.json().flatten_event(true).boxed() };
        let traces = otlp.traces.then(tracer_provider).transpose()?;
        let spans = traces.as_ref().map(|provider| {
            opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
            let spans = tracing_opentelemetry::layer().with_tracer(provider.tracer(SERVICE_NAME));
            spans.with_filter(Targets::new().with_target(RPC_TARGET, LevelFilter::DEBUG))
        });
        tracing_subscriber::registry()
            .with(spans)
            .with(logs.with_filter(filter))
            .try_init()
            .map_err(failed)?;
        Ok(Self { traces })
    }

    /// Exports what has been collected; waits a bounded time for a collector that is slow.
    pub async fn stop(self) {
        if let Some(provider) = self.traces {
            shut_down("traces", move || provider.shutdown_with_timeout(FLUSH_TIMEOUT).map_err(failed)).await;
        }
    }
}

/// How long a collector may take to receive what is left when the process stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Off the runtime's threads: a flush blocks.
async fn shut_down(what: &str, flush: impl FnOnce() -> Result<(), TelemetryError> + Send + 'static) {
    match tokio::task::spawn_blocking(flush).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("the last {what} were not exported: {error}"),
        Err(error) => tracing::warn!("the last {what} were not exported: {error}"),
    }
}

fn resource() -> Resource {
    // `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win over what is said here.
    let name = std::env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| SERVICE_NAME.to_owned());
    Resource::builder()
        .with_service_name(name)
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build()
}

fn tracer_provider() -> Result<SdkTracerProvider, TelemetryError> {
    let exporter = SpanExporter::builder().with_tonic().build().map_err(failed)?;
    Ok(SdkTracerProvider::builder().with_resource(resource()).with_batch_exporter(exporter).build())
}

/// The metrics of one service.
#[derive(Debug)]
pub struct Metrics {
    provider: SdkMeterProvider,
    registry: Registry,
    meter: Meter,
    rpc: RpcMetrics,
    /// As of the last look: reading them is for the service, and collecting is not.
    used_fractions: Arc<Mutex<Vec<UsedFraction>>>,
}

/// What is measured of calls.
#[derive(Clone, Debug)]
pub(crate) struct RpcMetrics {
    duration: Histogram<f64>,
    rejected: Counter<u64>,
}

/// What is measured of the calls of one method.
#[derive(Debug)]
pub(crate) struct MethodMetrics {
    of_all: RpcMetrics,
    method: KeyValue,
    /// Of calls that end well, found once.
    ok_duration: BoundHistogram<f64>,
}

impl RpcMetrics {
    pub(crate) fn of_method(&self, name: String) -> MethodMetrics {
        let method = KeyValue::new("method", name);
        let ok_duration = self.duration.bind(&[method.clone(), KeyValue::new("code", OK)]);
        MethodMetrics { of_all: self.clone(), method, ok_duration }
    }
}

const OK: &str = "OK";

impl MethodMetrics {
    /// A call ended with the status `code` after `elapsed`.
    pub(crate) fn ended(&self, code: &'static str, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if code == OK {
            return self.ok_duration.record(seconds);
        }
        let method = &self.method;
        self.of_all.duration.record(seconds, &[method.clone(), KeyValue::new("code", code)]);
        if code == "INVALID_ARGUMENT" {
            self.of_all.rejected.add(1, std::slice::from_ref(method));
        }
    }
}

impl Metrics {
    /// Instruments that feed a Prometheus registry and, if it is asked for, an OTLP collector. Call within a Tokio runtime.
    pub fn new(otlp: &Otlp) -> Result<Self, TelemetryError> {
        let registry = Registry::new();
        let prometheus = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .scope_info_enabled(false)
            .without_target_info()
            .build()
            .map_err(failed)?;
        let wide = |_: &Instrument| Stream::builder().with_cardinality_limit(SERIES_MAX).build().ok();
        let mut provider =
            SdkMeterProvider::builder().with_resource(resource()).with_reader(prometheus).with_view(wide);
        if otlp.metrics {
            let exporter = MetricExporter::builder().with_tonic().build().map_err(failed)?;
            provider = provider.with_reader(PeriodicReader::builder(exporter).build());
        }
        let provider = provider.build();
        let meter = provider.meter(SERVICE_NAME);
        let rpc = RpcMetrics {
            duration: meter
                .f64_histogram("quota_share.rpc.duration")
                .with_unit("s")
                .with_description("Time from a call's arrival to its answer, by method and status code")
                .with_boundaries(SECONDS.to_vec())
                .build(),
            rejected: meter
                .u64_counter("quota_share.rejected_input")
                .with_description("Calls refused as INVALID_ARGUMENT, by method")
                .build(),
        };
        Ok(Self { provider, registry, meter, rpc, used_fractions: Arc::default() })
    }

    pub(crate) fn rpc(&self) -> RpcMetrics {
        self.rpc.clone()
    }

    /// What to call after every commit of the embedded driver.
    pub fn commits(&self) -> impl Fn(Commit) + Send + Sync + 'static {
        let duration = self
            .meter
            .f64_histogram("quota_share.commit.duration")
            .with_unit("s")
            .with_description("Time that a commit to the database took, by result")
            .with_boundaries(SECONDS.to_vec())
            .build();
        let calls = self
            .meter
            .u64_histogram("quota_share.commit.calls")
            .with_description("Calls that shared a commit")
            .with_boundaries(CALLS.to_vec())
            .build();
        move |commit| {
            let result = KeyValue::new("result", if commit.succeeded { "ok" } else { "error" });
            duration.record(commit.elapsed.as_secs_f64(), &[result]);
            calls.record(commit.calls, &[]);
        }
    }

    /// Has what `service` counts read whenever metrics are collected.
    pub fn observe(&self, service: &Service) {
        self.observe_decisions(service);
        self.observe_store(service);
        self.observe_outages(service);
        let used_fractions = Arc::clone(&self.used_fractions);
        self.meter
            .f64_observable_gauge("quota_share.used_fraction")
            .with_description("Used fraction of a pool's limit, by dimension; may exceed 1")
            .with_callback(move |gauge| {
                for UsedFraction { pool, dimension, fraction } in &*used_fractions.lock() {
                    let pool = KeyValue::new("pool", pool.to_string());
                    gauge.observe(*fraction, &[pool, KeyValue::new("dimension", dimension.to_string())]);
                }
            })
            .build();
        self.meter
            .u64_observable_gauge("quota_share.build_info")
            .with_description("1, with the version of the program")
            .with_callback(|gauge| gauge.observe(1, &[KeyValue::new("version", env!("CARGO_PKG_VERSION"))]))
            .build();
    }

    fn observe_decisions(&self, service: &Service) {
        let decided = service.clone();
        self.meter
            .u64_observable_counter("quota_share.decisions")
            .with_description("Decisions of Enforce, by pool, decision, reason and mode")
            .with_callback(move |counter| {
                for DecisionCount { pool, decision, reason, mode, count } in decided.decision_counts() {
                    let labels = [
                        KeyValue::new("pool", pool.to_string()),
                        KeyValue::new("decision", decision),
                        KeyValue::new("reason", reason),
                        KeyValue::new("mode", mode),
                    ];
                    counter.observe(count, &labels);
                }
            })
            .build();
        let reported = service.clone();
        self.meter
            .u64_observable_counter("quota_share.signals")
            .with_description(
                "Figures of providers, reported or with records: taken over, or ignored, as headers that cannot be read",
            )
            .with_callback(move |counter| {
                let (taken, ignored) = reported.signal_counts();
                counter.observe(taken, &[KeyValue::new("outcome", "taken")]);
                counter.observe(ignored, &[KeyValue::new("outcome", "ignored")]);
            })
            .build();
        let service = service.clone();
        self.meter
            .u64_observable_counter("quota_share.no_pool")
            .with_description("Decisions in no pool, by whether the connection is in one")
            .with_callback(move |counter| {
                let (known, unknown) = service.no_pool_counts();
                counter.observe(known, &[KeyValue::new("connection", "known")]);
                counter.observe(unknown, &[KeyValue::new("connection", "unknown")]);
            })
            .build();
    }

    fn observe_store(&self, service: &Service) {
        type Read = fn(&Condition) -> u64;
        let gauges: [(&'static str, &'static str, Read); 3] = [
            ("quota_share.reservations.open", "Reservations that hold something", |now| {
                now.open_reservations
            }),
            ("quota_share.remembered_ids", "Ids that are remembered", |now| now.remembered_ids),
            ("quota_share.store.may_evict", "1 while Redis may drop counters when it is full", |now| {
                u64::from(now.eviction_policy.is_some())
            }),
        ];
        for (name, description, read) in gauges {
            let service = service.clone();
            self.meter
                .u64_observable_gauge(name)
                .with_description(description)
                .with_callback(move |gauge| gauge.observe(read(&service.condition()), &[]))
                .build();
        }
        let kept = service.clone();
        self.meter
            .u64_observable_gauge("quota_share.store.failing")
            .with_description("1 while the disk takes no writes")
            .with_callback(move |gauge| gauge.observe(u64::from(kept.sick_disk().is_some()), &[]))
            .build();
        let ended = service.clone();
        self.meter
            .u64_observable_counter("quota_share.reservations.ended")
            .with_description("Reservations that ended, by how")
            .with_callback(move |counter| {
                let Ended { settled, released, expired } = ended.condition().ended;
                for (how, count) in [("settled", settled), ("released", released), ("expired", expired)] {
                    counter.observe(count, &[KeyValue::new("how", how)]);
                }
            })
            .build();
        let vanished = service.clone();
        self.meter
            .u64_observable_counter("quota_share.vanished_pools")
            .with_description("Pools whose counters were gone from Redis before their time")
            .with_callback(move |counter| counter.observe(vanished.condition().vanished_pools, &[]))
            .build();
        let service = service.clone();
        self.meter
            .u64_observable_counter("quota_share.clock_steps")
            .with_description("Times that the clock went back by more than an hour")
            .with_callback(move |counter| counter.observe(service.condition().clock_steps, &[]))
            .build();
    }

    fn observe_outages(&self, service: &Service) {
        type Read<T> = fn(&Service) -> T;
        let gauges: [(&'static str, &'static str, Read<u64>); 3] = [
            ("quota_share.store.degraded", "1 while Redis is out of reach", |service| {
                u64::from(service.is_degraded())
            }),
            ("quota_share.journal.entries", "Records and releases that wait in the journal", |service| {
                service.journal().entries
            }),
            ("quota_share.replicas", "Replicas that share the counters, as far as is known", |service| {
                service.live_replicas()
            }),
        ];
        for (name, description, read) in gauges {
            let service = service.clone();
            let gauge = self.meter.u64_observable_gauge(name).with_description(description);
            gauge.with_callback(move |gauge| gauge.observe(read(&service), &[])).build();
        }
        let counters: [(&'static str, &'static str, Read<u64>); 5] = [
            ("quota_share.journal.kept", "Records and releases that the journal has taken", |service| {
                service.journal().kept
            }),
            (
                "quota_share.journal.unprotected",
                "Records of the journal that were counted after the life of their ids",
                |service| service.journal().unprotected,
            ),
            (
                "quota_share.failover.resent_batches",
                "Batches that a fail-over lost and that were sent again",
                |service| service.condition().losses.resent_batches,
            ),
            ("quota_share.failover.missing_batches", "Batches that a fail-over lost for good", |service| {
                service.condition().losses.missing_batches
            }),
            ("quota_share.failover.lost_reservations", "Reservations that a fail-over lost", |service| {
                service.condition().losses.reservations
            }),
        ];
        for (name, description, read) in counters {
            let service = service.clone();
            let counter = self.meter.u64_observable_counter(name).with_description(description);
            counter.with_callback(move |counter| counter.observe(read(&service), &[])).build();
        }
        let drained = service.clone();
        self.meter
            .u64_observable_counter("quota_share.journal.drained")
            .with_description(
                "Records and releases of the journal that have reached the counters, by outcome",
            )
            .with_callback(move |counter| {
                let JournalCondition { counted, duplicates, refused, removed, .. } = drained.journal();
                let outcomes = [
                    ("counted", counted),
                    ("duplicate", duplicates),
                    ("refused", refused),
                    ("pool_removed", removed),
                ];
                for (outcome, count) in outcomes {
                    counter.observe(count, &[KeyValue::new("outcome", outcome)]);
                }
            })
            .build();
        let degraded = service.clone();
        self.meter
            .f64_observable_counter("quota_share.store.degraded_time")
            .with_unit("s")
            .with_description("Time for which Redis has been out of reach since the start")
            .with_callback(move |counter| {
                counter.observe(degraded.condition().degraded_for.as_secs_f64(), &[]);
            })
            .build();
    }

    /// Looks at the pools again.
    pub async fn refresh(&self, service: &Service) {
        let used_fractions = service.used_fractions().await;
        *self.used_fractions.lock() = used_fractions;
    }

    /// All metrics in the text format of Prometheus.
    pub fn text(&self) -> Result<String, TelemetryError> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text).map_err(failed)?;
        String::from_utf8(text).map_err(failed)
    }

    /// Exports what has been collected; waits a bounded time for a collector that is slow.
    pub async fn stop(&self) {
        let provider = self.provider.clone();
        shut_down("metrics", move || provider.shutdown_with_timeout(FLUSH_TIMEOUT).map_err(failed)).await;
    }
}
