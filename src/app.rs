//! The composition root: builds the service, runs it, and takes it apart.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{net::TcpListener, sync::watch, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    clock::Clock,
    config::Config,
    core::{
        import::Import,
        settings::{Settings, StoreDriver},
    },
    service::{AdminError, Imported, Service, Start},
    store::{
        DirectoryStore, Ledger, StoreError,
        sqlite::{OpenError, SqliteDirectory, SqliteLedger, SqliteStore},
    },
    telemetry::{Metrics, TelemetryError},
    transport::{
        grpc::{self, Health},
        http,
    },
};

/// How long open calls get to finish when the service stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long calls that were cut off take to notice.
const CUT_OFF_TIMEOUT: Duration = Duration::from_secs(1);
/// How often what has ended is dropped from memory and from the database.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// A running service.
pub struct Running {
    address: SocketAddr,
    http_address: Option<SocketAddr>,
    health: Health,
    server: JoinHandle<Result<(), grpc::ServeError>>,
    pages: Option<JoinHandle<io::Result<()>>>,
    background: [JoinHandle<()>; 2],
    stop: CancellationToken,
    cut_off: CancellationToken,
    service: Service,
    ledger: Arc<SqliteLedger>,
    store: SqliteStore,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Why the service did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be listened on.
    #[error(
        "cannot listen on {address}: {source}: stop what listens there, or set {variable} to another address"
    )]
    Listen {
        /// What sets the address.
        variable: &'static str,
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The data directory cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// What is stored cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The driver redis was asked for.
    #[error(
        "the driver redis is not in this version, and with sqlite every replica would count for itself: set \
         QUOTA_STORE_DRIVER=sqlite to run one replica alone"
    )]
    NoRedis,
    /// Metrics cannot be collected.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// Calls cannot be served.
    #[error(transparent)]
    Serve(#[from] grpc::ServeError),
}

/// Why nothing was imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// There is no service to import into.
    #[error(transparent)]
    Start(#[from] StartError),
    /// It was refused or could not be written.
    #[error(transparent)]
    Admin(#[from] AdminError),
}

/// Starts the service: the store first, then what decides on it, then the door.
pub async fn start(config: Config, clock: Arc<dyn Clock>) -> Result<Running, StartError> {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let (listener, address) = bind("QUOTA_LISTEN", config.listen).await?;
    let http = match config.http_listen {
        Some(address) => Some(bind("QUOTA_HTTP_LISTEN", address).await?),
        None => None,
    };

    let Opened { store, ledger, service, metrics } = open(&config, clock).await?;
    let pools = service.directory().pool_count();
    let (stop, cut_off) = (CancellationToken::new(), CancellationToken::new());
    metrics.observe(&service);
    let (health, server) =
        grpc::server(service.clone(), metrics.rpc(), listener, stop.clone(), &cut_off).await?;
    let server = tokio::spawn(watch_server(server, health.clone(), stop.clone()));
    let http_address = http.as_ref().map(|(_, address)| *address);
    let pages = http.map(|(listener, _)| {
        let (serving, stop) = (health.serving(), stop.clone().cancelled_owned());
        tokio::spawn(http::server(service.clone(), Arc::clone(&metrics), serving, listener, stop))
    });
    let sweeper = tokio::spawn(sweep(Arc::clone(&ledger), service.clone(), Arc::clone(&metrics)));
    let disk_watcher = tokio::spawn(watch_disk(ledger.failing(), health.clone()));
    tracing::info!(driver = "sqlite", data = %store.path().display(), pools, http = http_address.map_or_else(|| "off".to_owned(), |address| address.to_string()), "listening on {address}");
    let background = [sweeper, disk_watcher];
    Ok(Running {
        address,
        http_address,
        health,
        server,
        pages,
        background,
        stop,
        cut_off,
        service,
        ledger,
        store,
        metrics,
    })
}

/// The service on its store, with no door yet.
struct Opened {
    store: SqliteStore,
    ledger: Arc<SqliteLedger>,
    service: Service,
    metrics: Arc<Metrics>,
}

async fn open(config: &Config, clock: Arc<dyn Clock>) -> Result<Opened, StartError> {
    let store = SqliteStore::open(&config.data_dir).await?;
    let directories = Arc::new(SqliteDirectory::new(&store));
    let directory = directories.load().await?;
    let metrics = Arc::new(Metrics::new(&config.otlp)?);
    let ledger = SqliteLedger::start(&store, &directory, Arc::clone(&clock), metrics.commits()).await?;
    let ledger = Arc::new(ledger);
    if let Some(warning) = check_driver(config, directory.settings().store_driver)? {
        tracing::warn!("{warning}");
    }
    let start = Start {
        replica_id: store.replica_id(|| Uuid::now_v7().to_string()).await?,
        settings: Settings {
            saturation_threshold: config.saturation_threshold,
            soft_deprioritize_factor: config.soft_deprioritize_factor,
            consumption_retention_days: config.consumption_retention_days,
        },
        id_life_ms: u64::from(config.id_life_seconds) * 1_000,
        signal_ttl_ms: u64::from(config.signal_ttl_seconds) * 1_000,
        redis_url_configured: config.redis_url_configured,
    };
    let counters: Arc<dyn Ledger> = ledger.clone();
    let service = Service::new(directory, directories, counters, clock, start);
    Ok(Opened { store, ledger, service, metrics })
}

async fn bind(variable: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Listen { variable, address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Takes `import` over into the data directory, which no other process may use meanwhile.
pub async fn import(config: &Config, clock: Arc<dyn Clock>, import: Import) -> Result<Imported, ImportError> {
    let Opened { store, ledger, service, .. } = open(config, clock).await?;
    let imported = service.import(import).await;
    ledger.close().await;
    store.close().await;
    Ok(imported?)
}

/// A stored driver wins over a configured one; redis without a URL is as good as none, which is told.
pub(crate) fn check_driver(
    config: &Config,
    stored: Option<StoreDriver>,
) -> Result<Option<&'static str>, StartError> {
    match stored.unwrap_or(config.store_driver) {
        StoreDriver::Sqlite => Ok(None),
        StoreDriver::Redis if config.redis_url_configured => Err(StartError::NoRedis),
        StoreDriver::Redis => {
            Ok(Some("the driver redis needs QUOTA_STORE_REDIS_URL, which is not set: using sqlite"))
        }
    }
}

/// Health says whether everything can be done: decisions go on while the disk fails, records are refused.
async fn watch_disk(mut failing: watch::Receiver<Option<StoreError>>, health: Health) {
    while failing.changed().await.is_ok() {
        let serving = failing.borrow_and_update().is_none();
        health.set(serving).await;
    }
}

/// A server that ends without having been asked to is said, and not sent any more calls.
async fn watch_server(
    server: impl Future<Output = Result<(), grpc::ServeError>>,
    health: Health,
    stop: CancellationToken,
) -> Result<(), grpc::ServeError> {
    let result = server.await;
    if !stop.is_cancelled() {
        tracing::error!(?result, "calls are not served any more: restart the service");
        health.set(false).await;
    }
    result
}

async fn sweep(ledger: Arc<SqliteLedger>, service: Service, metrics: Arc<Metrics>) {
    let mut interval = tokio::time::interval(SWEEP_INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        metrics.refresh(&service).await;
        match ledger.sweep(service.settings().consumption_retention_days).await {
            Ok(swept) => tracing::debug!(rows = swept.rows, "swept"),
            Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "the sweep failed"),
        }
    }
}

impl Running {
    /// Where gRPC is served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where /metrics, /livez and /readyz are served.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// Stops in order, each step ending what feeds the next:
    ///
    /// 1. report NOT_SERVING;
    /// 2. take no new call, and let open ones and changes of the configuration finish, for a bounded time;
    /// 3. wait until what was asked for is on disk, and let go of the data directory.
    pub async fn stop(self) {
        for task in &self.background {
            task.abort();
        }
        self.health.set(false).await;
        self.stop.cancel();
        let mut server = self.server;
        match timeout(DRAIN_TIMEOUT, &mut server).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => {
                tracing::error!(error = &error as &dyn std::error::Error, "the server ended with an error");
            }
            Ok(Err(error)) => {
                tracing::error!(error = &error as &dyn std::error::Error, "the server's task failed");
            }
            Err(_) => {
                self.cut_off.cancel();
                tracing::warn!(?DRAIN_TIMEOUT, "open calls were cut off");
                if timeout(CUT_OFF_TIMEOUT, &mut server).await.is_err() {
                    tracing::error!("a call goes on while the store is closed");
                }
            }
        }
        self.service.finish_changes().await;
        if let Some(pages) = self.pages {
            pages.abort();
        }
        self.ledger.close().await;
        self.store.close().await;
        self.metrics.stop().await;
        tracing::info!("stopped");
    }
}
