//! The composition root: builds the service, runs it, and takes it apart.

mod adopt;
mod doors;
mod drivers;

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    net::{TcpListener, TcpSocket},
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use self::adopt::{AdoptError, Adopted, adopt};
use self::{
    doors::{Following, doors},
    drivers::Drivers,
};
use crate::{
    clock::Clock,
    config::{Config, InvalidConfig},
    core::{
        directory::Directory,
        import::Import,
        settings::{Settings, StoreDriver},
    },
    service::{AdminError, Author, Counters, Imported, Service, Start},
    store::{
        DirectoryStore, Journal, OpenLedger, Place, StoreError,
        sqlite::{OpenError, SqliteDirectory, SqliteJournal, SqliteStore},
    },
    telemetry::{Metrics, TelemetryError},
    transport::{
        grpc::{self, Health},
        http,
        tls::install_provider,
    },
};

/// How long open calls get to finish when the service stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long calls that were cut off take to notice.
const CUT_OFF_TIMEOUT: Duration = Duration::from_secs(1);
/// How often what has ended is dropped from memory and from the database.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// How often it is looked whether the store of counters refuses.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How often the disk is asked whether it takes writes where the driver seldom writes, and where it has not taken some.
const DISK_LOOK_INTERVAL: Duration = Duration::from_secs(10);
const SICK_DISK_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A running service.
pub struct Running {
    address: SocketAddr,
    http_address: Option<SocketAddr>,
    health: Health,
    server: JoinHandle<Result<(), grpc::ServeError>>,
    pages: Option<JoinHandle<io::Result<()>>>,
    store_watcher: JoinHandle<()>,
    background: Vec<JoinHandle<()>>,
    shutdown_delay: Duration,
    stop: CancellationToken,
    cut_off: CancellationToken,
    service: Service,
    store: Arc<SqliteStore>,
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
    /// A file has changed since the configuration was checked, and cannot be used any more.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The data directory cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// What is stored cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
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
    install_provider();
    let (doors, following) = doors(&config)?;
    let taken = TakenAddress::take("QUOTA_LISTEN", config.listen)?;
    let http = config.http_listen.map(|address| TakenAddress::take("QUOTA_HTTP_LISTEN", address));
    let http = http.transpose()?;

    let Opened { store, service, metrics } = open(&config, Arc::clone(&clock), Counts::Chosen).await?;
    for warning in config.warnings_with(service.directory().settings()) {
        tracing::warn!("{warning}");
    }
    let pools = service.directory().pool_count();
    let (stop, cut_off) = (CancellationToken::new(), CancellationToken::new());
    metrics.observe(&service);
    let (address, http_address) = (taken.address, http.as_ref().map(|taken| taken.address));
    let listening =
        taken.listen().and_then(|listener| Ok((listener, http.map(TakenAddress::listen).transpose()?)));
    let (listener, http) = match listening {
        Ok(listening) => listening,
        Err(error) => {
            service.close().await;
            store.close().await;
            return Err(error);
        }
    };
    let (health, server) = grpc::server(
        service.clone(),
        metrics.rpc(),
        doors,
        listener,
        is_well(&service),
        stop.clone(),
        &cut_off,
    )
    .await?;
    let server = tokio::spawn(watch_server(server, health.clone(), stop.clone()));
    let pages = http.map(|listener| {
        let (serving, stop) = (health.serving(), stop.clone().cancelled_owned());
        tokio::spawn(http::server(service.clone(), Arc::clone(&metrics), serving, listener, stop))
    });
    let sweeper = tokio::spawn(sweep(Arc::clone(&store), service.clone(), Arc::clone(&metrics), clock));
    let store_watcher = tokio::spawn(watch_stores(Arc::clone(&store), service.clone(), health.clone()));
    tracing::info!(driver = service.driver().name(), data = %store.path().display(), pools, http = http_address.map_or_else(|| "off".to_owned(), |address| address.to_string()), "listening on {address}");
    let follower = tokio::spawn(service.clone().follow());
    let following = following.into_iter().map(Following::start);
    let background = [sweeper, follower].into_iter().chain(following).collect();
    Ok(Running {
        address,
        http_address,
        health,
        server,
        pages,
        store_watcher,
        background,
        shutdown_delay: config.shutdown_delay(),
        stop,
        cut_off,
        service,
        store,
        metrics,
    })
}

/// The service on its store, with no door yet.
struct Opened {
    store: Arc<SqliteStore>,
    service: Service,
    metrics: Arc<Metrics>,
}

/// Which counters a process needs.
enum Counts {
    /// Those of the driver that is stored or configured.
    Chosen,
    /// None: nobody calls.
    Unused,
}

/// The data directory with what is in it, and what opens counters.
struct Base {
    store: Arc<SqliteStore>,
    directories: Arc<SqliteDirectory>,
    directory: Directory,
    replica_id: String,
    journal: Arc<dyn Journal>,
    drivers: Drivers,
    metrics: Arc<Metrics>,
}

async fn base(config: &Config, clock: Arc<dyn Clock>) -> Result<Base, StartError> {
    let store = Arc::new(SqliteStore::open(&config.data_dir).await?);
    let directories = Arc::new(SqliteDirectory::new(&store));
    let directory = directories.load().await?;
    let metrics = Arc::new(Metrics::new(&config.otlp)?);
    let replica_id = store.replica_id(|| Uuid::now_v7().to_string()).await?;
    let journal: Arc<dyn Journal> = Arc::new(SqliteJournal::open(&store).await?);
    let drivers = Drivers {
        store: Arc::clone(&store),
        committed: Arc::new(metrics.commits()),
        clock,
        replica_id: replica_id.clone(),
        journal: Arc::clone(&journal),
        timeout: config.store_timeout(),
    };
    Ok(Base { store, directories, directory, replica_id, journal, drivers, metrics })
}

async fn open(config: &Config, clock: Arc<dyn Clock>, counts: Counts) -> Result<Opened, StartError> {
    let Base { store, directories, directory, replica_id, journal, drivers, metrics } =
        base(config, Arc::clone(&clock)).await?;
    let place = match &counts {
        Counts::Chosen => config.store().choose(directory.settings()).place,
        Counts::Unused => Place::Sqlite,
    };
    let ledger = drivers.open(&place, &directory).await?;
    let counters = Counters { place, ledger, drivers: Arc::new(drivers), journal };
    let start = Start {
        replica_id,
        settings: Settings {
            saturation_threshold: config.saturation_threshold,
            soft_deprioritize_factor: config.soft_deprioritize_factor,
            consumption_retention_days: config.consumption_retention_days,
        },
        id_life_ms: u64::from(config.id_life_seconds) * 1_000,
        signal_ttl_ms: u64::from(config.signal_ttl_seconds) * 1_000,
        store: config.store(),
    };
    let service = Service::new(directory, directories, counters, clock, start);
    if matches!(counts, Counts::Chosen) {
        // What replicas share is met before anybody calls, if it can be.
        service.follow_once().await;
    }
    Ok(Opened { store, service, metrics })
}

/// An address on which nobody listens. Connections are refused there until this replica does: whoever calls one that is
/// starting does not wait for it, and goes to another one.
struct TakenAddress {
    variable: &'static str,
    address: SocketAddr,
    socket: TcpSocket,
}

impl TakenAddress {
    /// How many connections wait to be accepted at most.
    const BACKLOG: u32 = 1_024;

    fn take(variable: &'static str, address: SocketAddr) -> Result<Self, StartError> {
        let take = || {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            // Connections of a former process may linger.
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            Ok((socket.local_addr()?, socket))
        };
        let (address, socket) = take().map_err(|source| StartError::Listen { variable, address, source })?;
        Ok(Self { variable, address, socket })
    }

    fn listen(self) -> Result<TcpListener, StartError> {
        let Self { variable, address, socket } = self;
        socket.listen(Self::BACKLOG).map_err(|source| StartError::Listen { variable, address, source })
    }
}

/// Takes `import` over into the data directory, which no other process may use meanwhile.
pub async fn import(config: &Config, clock: Arc<dyn Clock>, import: Import) -> Result<Imported, ImportError> {
    let Opened { store, service, .. } = open(config, clock, Counts::Unused).await?;
    let author = Author { name: "the command import".into(), role: None };
    let imported = service.import(author, import).await;
    service.close().await;
    store.close().await;
    Ok(imported?)
}

/// Whether everything can be done: decisions go on while the disk fails, but records are refused where they are kept
/// there; where the configuration is not known or the counters are laid out by a newer version, nothing is decided.
fn is_well(service: &Service) -> bool {
    let needs_disk = service.driver() == StoreDriver::Sqlite;
    let lacks_disk = needs_disk && service.sick_disk().is_some();
    !lacks_disk && !service.refuses()
}

/// Health says whether all is well.
async fn watch_stores(store: Arc<SqliteStore>, service: Service, health: Health) {
    let mut failing = store.failing();
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    let (mut known, mut asked) = (None, Instant::now());
    loop {
        tokio::select! {
            changed = failing.changed() => if changed.is_err() { return },
            _ = looks.tick() => {}
        }
        let is_sick = failing.borrow_and_update().is_some();
        let patience = if is_sick { SICK_DISK_LOOK_INTERVAL } else { DISK_LOOK_INTERVAL };
        // Who counts there finds out.
        if service.driver() != StoreDriver::Sqlite && asked.elapsed() >= patience {
            store.probe().await;
            asked = Instant::now();
        }
        let serving = Some(is_well(&service));
        if serving != known {
            health.set(serving == Some(true)).await;
        }
        known = serving;
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

async fn sweep(store: Arc<SqliteStore>, service: Service, metrics: Arc<Metrics>, clock: Arc<dyn Clock>) {
    let mut interval = tokio::time::interval(SWEEP_INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        metrics.refresh(&service).await;
        service.compact();
        if let Err(error) = service.forget_deletions().await {
            tracing::debug!(error = &error as &dyn std::error::Error, "deletions are remembered for longer");
        }
        match store.sweep(clock.now(), service.settings().consumption_retention_days).await {
            Ok(rows) => tracing::debug!(rows, "swept"),
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
    /// 1. report NOT_SERVING, and go on for as long as load balancers take to notice;
    /// 2. take no new call, and let open ones and changes of the configuration finish, for a bounded time;
    /// 3. wait until what was asked for is on disk, and let go of the data directory.
    pub async fn stop(self) {
        // It would say that all is well again.
        self.store_watcher.abort();
        // It has been cancelled.
        let _ = self.store_watcher.await;
        self.health.set(false).await;
        tokio::time::sleep(self.shutdown_delay).await;
        for task in self.background {
            task.abort();
        }
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
        self.service.close().await;
        self.store.close().await;
        self.metrics.stop().await;
        tracing::info!("stopped");
    }
}
