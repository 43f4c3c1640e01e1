//! The gRPC services of the contract, health and reflection.

mod answers;
mod convert;
mod convert_signals;
mod health_check;
mod observe;
mod page;
mod plan_admin;
mod pool_admin;
mod quota_share;
mod settings_admin;
mod status;
mod workers;

use std::future::Future;

use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};
use tonic_health::{ServingStatus, server::HealthReporter};
use tonic_reflection::server::Builder;
use tower::util::MapResponseLayer;

pub(crate) use health_check::check_health;
pub(crate) use workers::ServeError;

use self::observe::ObserveLayer;
use crate::{service::Service, telemetry::RpcMetrics};

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

/// Serves on `listener` until `stop` is cancelled, then lets open calls finish, until `cut_off`. The server reports
/// SERVING at once.
pub(crate) async fn server(
    service: Service,
    metrics: RpcMetrics,
    listener: TcpListener,
    stop: CancellationToken,
    cut_off: &CancellationToken,
) -> Result<(Health, impl Future<Output = Result<(), ServeError>> + Send + use<>), ServeError> {
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let health = Health { reporter, serving: watch::Sender::new(false) };
    health.set(true).await;
    let (reflection, reflection_alpha) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    let serve = |connections| {
        // Made for each thread: of what is shared, threads would wait for each other's counts of references.
        let routes = routes(&service, &stop)
            .add_service(health_service.clone())
            .add_service(reflection.clone())
            .add_service(reflection_alpha.clone());
        Server::builder()
            .layer(ObserveLayer::new(&metrics))
            .layer(MapResponseLayer::new(status::blame_the_caller))
            .add_routes(routes)
            .serve_with_incoming_shutdown(connections, stop.clone().cancelled_owned())
    };
    let workers = workers::start(serve, cut_off)?;
    Ok((health, workers::run(listener, workers, stop)))
}

/// The services of the contract.
fn routes(service: &Service, stop: &CancellationToken) -> Routes {
    let pool_admin = pool_admin::Api { service: service.clone(), stop: stop.clone() };
    Routes::new(pb::quota_share_server::QuotaShareServer::new(quota_share::Api(service.clone())))
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
