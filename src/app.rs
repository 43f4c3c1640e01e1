//! The composition root: builds the service, runs it, and takes it apart.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{net::TcpListener, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::Clock,
    config::Config,
    core::settings::{Settings, StoreDriver},
    service::{Service, Start},
    store::{
        DirectoryStore, Ledger, StoreError,
        sqlite::{OpenError, SqliteDirectory, SqliteLedger, SqliteStore},
    },
    transport::grpc::{self, Health},
};

/// How long open calls get to finish when the service stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How often what has ended is dropped from memory and from the database.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// A running service.
pub struct Running {
    address: SocketAddr,
    health: Health,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    sweeper: JoinHandle<()>,
    stop: CancellationToken,
    ledger: Arc<SqliteLedger>,
    store: SqliteStore,
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
    #[error("cannot listen on {address} (QUOTA_LISTEN): {source}")]
    Listen {
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
    /// The descriptors of the contract are damaged.
    #[error("reflection: {0}")]
    Reflection(#[from] grpc::ReflectionError),
}

/// Starts the service: the store first, then what decides on it, then the door.
pub async fn start(config: Config, clock: Arc<dyn Clock>) -> Result<Running, StartError> {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let listening = |source| StartError::Listen { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;

    let store = SqliteStore::open(&config.data_dir).await?;
    let directories = Arc::new(SqliteDirectory::new(&store));
    let directory = directories.load().await?;
    let ledger = Arc::new(SqliteLedger::start(&store, &directory, Arc::clone(&clock)).await?);
    let pools = directory.pools_after(None).count();
    let settings = Settings {
        saturation_threshold: config.saturation_threshold,
        soft_deprioritize_factor: config.soft_deprioritize_factor,
        id_life_ms: u64::from(config.id_life_seconds) * 1_000,
    };
    let counters: Arc<dyn Ledger> = ledger.clone();
    let service = Service::new(directory, directories, counters, clock, settings);

    let stop = CancellationToken::new();
    let (health, server) = grpc::server(service, listener, stop.clone().cancelled_owned()).await?;
    let server = tokio::spawn(server);
    let sweeper = tokio::spawn(sweep(Arc::clone(&ledger), config.consumption_retention_days));
    tracing::info!(driver = "sqlite", data = %store.path().display(), pools, "listening on {address}");
    Ok(Running { address, health, server, sweeper, stop, ledger, store })
}

async fn sweep(ledger: Arc<SqliteLedger>, retention_days: u32) {
    let mut interval = tokio::time::interval(SWEEP_INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        match ledger.sweep(retention_days).await {
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

    /// Stops in order, each step ending what feeds the next:
    ///
    /// 1. report NOT_SERVING;
    /// 2. take no new call, and let open ones finish, for a bounded time;
    /// 3. wait until what was asked for is on disk, and let go of the data directory.
    pub async fn stop(self) {
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
                server.abort();
                tracing::warn!(?DRAIN_TIMEOUT, "open calls were cut off");
            }
        }
        self.sweeper.abort();
        self.ledger.close().await;
        self.store.close().await;
        tracing::info!("stopped");
    }
}
