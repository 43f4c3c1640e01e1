//! The service in this process, with time in the test's hands.

use std::{
    env,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Deref,
    path::Path,
    sync::Arc,
    time::Duration,
};

use super::{
    Client, TestRedis,
    client::page,
    pb::settings::StoreDriver,
    process::{PATIENCE, STARTING},
    redis_is_missing,
};
use quota_share::{
    app::{self, Running},
    clock::{Clock, ManualClock},
    config::{Args, Config},
    core::{settings::StoreDriver as CoreDriver, units::Timestamp},
    store::redis::RedisUrl,
};
use tempfile::TempDir;

/// 2026-07-01T00:00:00Z: the edge of an hour, of a bucket of 5 h and of a day.
pub(crate) const T0: Timestamp = Timestamp::from_unix_ms(1_782_864_000_000);

const FREE_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Names the driver of all servers whose test does not choose one: `sqlite`, or `redis`.
const DRIVER: &str = "QUOTA_TEST_DRIVER";

/// The driver that tests are asked to run on.
fn asked_driver() -> StoreDriver {
    match env::var(DRIVER).as_deref() {
        Err(_) | Ok("sqlite") => StoreDriver::Sqlite,
        // What is missing has been said then.
        Ok("redis") if redis_is_missing() => StoreDriver::Sqlite,
        Ok("redis") => StoreDriver::Redis,
        Ok(other) => panic!("{DRIVER}={other}: set it to sqlite or redis"),
    }
}

/// The real server on a free port, in a folder of its own, at [`T0`] until the test moves its clock.
///
/// Its driver is what `QUOTA_TEST_DRIVER` names, unless the test chooses one. On Redis it has a database of its own.
#[derive(Debug)]
pub(crate) struct TestServer {
    client: Client,
    running: Option<Running>,
    clock: TestClock,
    config: Config,
    // Goes last: the server writes to it.
    _folder: TempDir,
}

/// By what a server tells the time.
#[derive(Clone, Debug)]
enum TestClock {
    /// By a clock that the test moves, and so does its driver.
    Manual(Arc<ManualClock>),
    /// By one that goes on by itself; its driver may have another.
    Running(Arc<dyn Clock>),
}

impl TestClock {
    fn shared(&self) -> Arc<dyn Clock> {
        match self {
            TestClock::Manual(clock) => Arc::clone(clock) as _,
            TestClock::Running(clock) => Arc::clone(clock),
        }
    }

    #[track_caller]
    fn manual(&self) -> &ManualClock {
        match self {
            TestClock::Manual(clock) => clock,
            TestClock::Running(_) => panic!("this clock goes on by itself"),
        }
    }
}

impl TestServer {
    /// Where the database is.
    pub(crate) fn data_dir(&self) -> &Path {
        &self.config.data_dir
    }

    /// GET of one of the pages for probes and Prometheus: the status line's code and the body.
    pub(crate) async fn page(&self, path: &str) -> (u16, String) {
        let running = self.running.as_ref().expect("a server that was started");
        let address = running.http_address().expect("pages are served");
        page(address, path).await
    }

    /// A server with nothing in it.
    pub(crate) async fn start() -> Self {
        match asked_driver() {
            StoreDriver::Redis => Self::start_on_redis().await,
            _ => Self::start_on_sqlite().await,
        }
    }

    /// A server with nothing in it, on SQLite whatever others are on: for tests of SQLite's file, or of leaving it.
    pub(crate) async fn start_on_sqlite() -> Self {
        Self::start_as(None, TestClock::Manual(Arc::new(ManualClock::new(T0)))).await
    }

    /// A server with nothing in it, on a database of Redis of its own.
    pub(crate) async fn start_on_redis() -> Self {
        let url = TestRedis::database_of_ones_own().await;
        Self::start_as(Some(url_of(&url)), TestClock::Manual(Arc::new(ManualClock::new(T0)))).await
    }

    /// A server with nothing in it, that counts in the Redis at `url` by a clock that the test moves.
    pub(crate) async fn start_on_redis_at(url: &str) -> Self {
        Self::start_as(Some(url_of(url)), TestClock::Manual(Arc::new(ManualClock::new(T0)))).await
    }

    /// A server with no pools that counts in the Redis at `url`, and whose clock goes on by itself.
    pub(crate) async fn start_on(url: &str, clock: Arc<dyn Clock>) -> Self {
        Self::start_as(Some(url_of(url)), TestClock::Running(clock)).await
    }

    /// Another replica, with no pools yet, that counts in the same Redis by the same clock.
    pub(crate) async fn another_replica(&self) -> Self {
        let url = self.config.redis_url.clone().expect("replicas share a Redis");
        Self::start_as(Some(url), self.clock.clone()).await
    }

    async fn start_as(redis_url: Option<RedisUrl>, clock: TestClock) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let defaults = Config::check(&Args::default()).expect("the defaults are valid");
        let mut config = Config {
            listen: FREE_PORT,
            http_listen: Some(FREE_PORT),
            data_dir: folder.path().to_owned(),
            ..defaults
        };
        if redis_url.is_some() {
            config.store_driver = CoreDriver::Redis;
            config.redis_url = redis_url;
            // What a busy machine needs is no concern of these tests.
            config.store_timeout_ms = PATIENCE.as_millis() as u32;
        }
        let (running, client) = start(&config, &clock).await;
        Self { client, running: Some(running), clock, config, _folder: folder }
    }

    /// The driver that it was started with: what a test expects of one driver alone depends on this.
    pub(crate) fn driver(&self) -> StoreDriver {
        match self.config.store_driver {
            CoreDriver::Sqlite => StoreDriver::Sqlite,
            CoreDriver::Redis => StoreDriver::Redis,
        }
    }

    /// Stops the server and starts another one on the same data, at the same instant.
    pub(crate) async fn restart(&mut self) {
        self.restart_with(|_| {}).await;
    }

    /// As [`restart`](Self::restart), with another configuration.
    pub(crate) async fn restart_with(&mut self, change: impl FnOnce(&mut Config)) {
        let _nobody_starts = STARTING.read().await;
        self.stop().await;
        change(&mut self.config);
        let (running, client) = start(&self.config, &self.clock).await;
        (self.running, self.client) = (Some(running), client);
    }

    /// Stops the server: what it has done is in its database then.
    pub(crate) async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop().await;
        }
    }

    /// Moves the clock to `ms` milliseconds after [`T0`], forward or back.
    pub(crate) fn at(&self, ms: u64) {
        self.clock.manual().set(T0.plus_ms(ms));
    }

    /// Moves the clock on by `ms` milliseconds.
    pub(crate) fn wait(&self, ms: u64) {
        self.clock.manual().advance(Duration::from_millis(ms));
    }

    /// One more caller, on a connection of its own.
    pub(crate) async fn another_client(&self) -> Client {
        Client::connect(self.address()).await
    }
}

impl Deref for TestServer {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

fn url_of(url: &str) -> RedisUrl {
    RedisUrl::parse(url).expect("a URL")
}

async fn start(config: &Config, clock: &TestClock) -> (Running, Client) {
    let running = app::start(config.clone(), clock.shared()).await.expect("the server starts");
    let client = Client::connect(running.address()).await;
    if config.store_driver == CoreDriver::Redis {
        client.until_counters_are_in_reach().await;
    }
    (running, client)
}
