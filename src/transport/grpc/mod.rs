//! The gRPC services of the contract, health and reflection.

mod answers;
mod author;
mod connections;
mod convert;
mod convert_signals;
mod edge;
mod health_check;
mod methods;
mod observe;
mod page;
mod plan_admin;
mod pool_admin;
mod quota_share;
mod settings_admin;
mod sparing;
mod status;
mod workers;

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic_health::{ServingStatus, server::HealthReporter};
use tonic_reflection::server::Builder;
use tower::{Layer, util::MapResponse};

pub(crate) use health_check::check_health;
pub(crate) use workers::ServeError;

use self::{
    connections::Opening,
    edge::{Edge, Room, Rules},
    observe::ObserveLayer,
};
use crate::{
    service::Service,
    telemetry::RpcMetrics,
    transport::{
        auth::{Authentication, CertificateNames},
        tls::SharedTls,
    },
};

/// The generated types of the contract.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, dead_code, clippy::all)]
mod pb {
    tonic::include_proto!("quotashare.v1");
    pub(super) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
}

/// The services whose health is told apart from that of the whole server.
const SERVICES: [&str; 4] = [
    "quotashare.v1.QuotaShare",
    "quotashare.v1.PoolAdmin",
    "quotashare.v1.PlanAdmin",
    "quotashare.v1.SettingsAdmin",
];

/// Largest message of a decision or a record: many times the headers that a provider sends. Others may have 4 MiB, the
/// library's default, since a pool can be that large.
const DECISION_BYTES_MAX: usize = 256 * 1_024;

/// Tells health checks whether this server can decide.
#[derive(Clone)]
pub(crate) struct Health {
    reporter: HealthReporter,
    serving: watch::Sender<bool>,
}

impl Health {
    /// Follows whether this server can decide.
    pub(crate) fn serving(&self) -> watch::Receiver<bool> {
        self.serving.subscribe()
    }

    /// The same for the server and for each of its services.
    pub(crate) async fn set(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in std::iter::once("").chain(SERVICES) {
            self.reporter.set_service_status(service, status).await;
        }
        self.serving.send_replace(serving);
    }
}

/// What the operator decides of the server's edge.
pub(crate) struct Doors {
    pub(crate) authentication: Arc<Authentication>,
    /// `None`: connections are not encrypted.
    pub(crate) tls: Option<SharedTls>,
    /// The service describes itself.
    pub(crate) reflection: bool,
    /// Decisions and records in flight at once.
    pub(crate) calls_in_flight_max: usize,
    /// When a connection is closed, give or take a tenth.
    pub(crate) connection_age_max: Duration,
}

/// Serves on `listener` until `stop` is cancelled, then lets open calls finish, until `cut_off`. Health says from the first
/// answer on whether the server is `serving`.
pub(crate) async fn server(
    service: Service,
    metrics: RpcMetrics,
    doors: Doors,
    listener: TcpListener,
    serving: bool,
    stop: CancellationToken,
    cut_off: &CancellationToken,
) -> Result<(Health, impl Future<Output = Result<(), ServeError>> + Send + use<>), ServeError> {
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let health = Health { reporter, serving: watch::Sender::new(false) };
    health.set(serving).await;
    let described =
        if doors.reflection { Some((reflection().build_v1()?, reflection().build_v1alpha()?)) } else { None };
    let opening = Opening::new(doors.tls, doors.connection_age_max);
    let room = Arc::new(Room::new(doors.calls_in_flight_max));
    let serve = |connections| {
        // Made for each thread: of what is shared, threads would wait for each other's counts of references.
        let mut routes = routes(&service, &stop).add_service(health_service.clone());
        if let Some((v1, v1alpha)) = described.clone() {
            routes = routes.add_service(v1).add_service(v1alpha);
        }
        let routes = MapResponse::new(routes.prepare(), status::blame_the_caller);
        let rules = Rules { authentication: Arc::clone(&doors.authentication), room: Arc::clone(&room) };
        let (rules, observe) = (Arc::new(rules), ObserveLayer::new(&metrics));
        let calls = move |certificate: CertificateNames| {
            observe.layer(Edge { inner: routes.clone(), rules: Arc::clone(&rules), certificate })
        };
        connections::serve(connections, opening.clone(), calls, stop.clone())
    };
    let workers = workers::start(serve, cut_off)?;
    Ok((health, workers::run(listener, workers, stop)))
}

/// The services of the contract.
fn routes(service: &Service, stop: &CancellationToken) -> Routes {
    let pool_admin = pool_admin::Api { service: service.clone(), stop: stop.clone() };
    let quota_share = pb::quota_share_server::QuotaShareServer::new(quota_share::Api(service.clone()));
    Routes::new(quota_share.max_decoding_message_size(DECISION_BYTES_MAX))
        .add_service(pb::pool_admin_server::PoolAdminServer::new(pool_admin))
        .add_service(pb::plan_admin_server::PlanAdminServer::new(plan_admin::Api(service.clone())))
        .add_service(pb::settings_admin_server::SettingsAdminServer::new(settings_admin::Api(
            service.clone(),
        )))
}

/// With the descriptors of error details, so that clients such as grpcurl print them decoded.
fn reflection() -> Builder<'static> {
    Builder::configure()
        .register_encoded_file_descriptor_set(pb::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}
