//! The service in this process, with time in the test's hands.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Deref,
    path::Path,
    sync::Arc,
    time::Duration,
};

use quota_share::{
    app::{self, Running},
    clock::ManualClock,
    config::{Args, Config},
    core::units::Timestamp,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{Client, process::STARTING};

/// 2026-07-01T00:00:00Z: the edge of an hour, of a bucket of 5 h and of a day.
pub(crate) const T0: Timestamp = Timestamp::from_unix_ms(1_782_864_000_000);

const FREE_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// The real server on a free port, in a folder of its own, at [`T0`] until the test moves its clock.
#[derive(Debug)]
pub(crate) struct TestServer {
    client: Client,
    running: Option<Running>,
    clock: Arc<ManualClock>,
    config: Config,
    // Goes last: the server writes to it.
    _folder: TempDir,
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
        let mut stream = TcpStream::connect(address).await.expect("the server accepts connections");
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("the server reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("the server answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line");
        (code, body.to_owned())
    }

    /// A server with nothing in it.
    pub(crate) async fn start() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let defaults = Config::check(&Args::default()).expect("the defaults are valid");
        let config = Config {
            listen: FREE_PORT,
            http_listen: Some(FREE_PORT),
            data_dir: folder.path().to_owned(),
            ..defaults
        };
        let clock = Arc::new(ManualClock::new(T0));
        let (running, client) = start(&config, &clock).await;
        Self { client, running: Some(running), clock, config, _folder: folder }
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
        self.clock.set(T0.plus_ms(ms));
    }

    /// Moves the clock on by `ms` milliseconds.
    pub(crate) fn wait(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
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

async fn start(config: &Config, clock: &Arc<ManualClock>) -> (Running, Client) {
    let running = app::start(config.clone(), clock.clone()).await.expect("the server starts");
    let client = Client::connect(running.address()).await;
    (running, client)
}
