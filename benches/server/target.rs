//! What is measured: the service's binary, and bare echoes, each in a process of its own.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use clap::ValueEnum;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::{net::TcpListener, runtime, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use crate::{
    Failure,
    pb::{
        self,
        quota_share_server::{QuotaShare, QuotaShareServer},
    },
    setting,
};

/// On which runtimes an echo runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Echo {
    /// One runtime of one thread.
    Single,
    /// One runtime of one thread for each core, each with its connections.
    PerCore,
    /// One runtime of a thread for each core.
    Multi,
}

impl Echo {
    pub(crate) const ALL: [Echo; 3] = [Echo::Single, Echo::PerCore, Echo::Multi];
}

/// A server in a process of its own, which ends with the value.
#[derive(Debug)]
pub(crate) struct Target {
    child: Child,
    address: SocketAddr,
    /// From its start until it listened.
    pub(crate) started_in: Duration,
    folder: TempDir,
    redis_url: Option<String>,
}

impl Target {
    /// The service with its defaults and an empty database, its counters there or in a Redis.
    pub(crate) fn service(redis_url: Option<String>) -> Result<Self, Failure> {
        Self::service_on(TempDir::new_in(env!("CARGO_TARGET_TMPDIR"))?, redis_url)
    }

    fn service_on(folder: TempDir, redis_url: Option<String>) -> Result<Self, Failure> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quota-share"));
        command
            .env("DATA_DIR", folder.path())
            .env("QUOTA_LISTEN", "127.0.0.1:0")
            .env("QUOTA_HTTP_LISTEN", "127.0.0.1:0");
        if let Some(url) = &redis_url {
            // What a busy machine needs is not measured here.
            command
                .env("QUOTA_STORE_DRIVER", "redis")
                .env("QUOTA_STORE_REDIS_URL", url)
                .env("QUOTA_STORE_TIMEOUT_MS", "5000");
        }
        let mut target = Self::start(command, folder)?;
        target.redis_url = redis_url;
        Ok(target)
    }

    /// Stops the service in order, and starts another one on its data.
    pub(crate) fn restarted(mut self) -> Result<Self, Failure> {
        kill(Pid::from_raw(self.child.id().try_into()?), Signal::SIGTERM)?;
        self.child.wait()?;
        let folder = std::mem::replace(&mut self.folder, TempDir::new()?);
        Self::service_on(folder, self.redis_url.take())
    }

    pub(crate) fn echo(echo: Echo) -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        let name = echo.to_possible_value().ok_or("every echo has a name")?;
        command.arg("--echo").arg(name.get_name());
        Self::start(command, TempDir::new()?)
    }

    fn start(mut command: Command, folder: TempDir) -> Result<Self, Failure> {
        let started = Instant::now();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut log = BufReader::new(child.stderr.take().ok_or("its errors are piped")?).lines();
        let address = loop {
            let line = log.next().ok_or("the server has ended")??;
            if let Some((_, rest)) = line.split_once("listening on ") {
                break rest.split([' ', '"']).next().unwrap_or_default().parse()?;
            }
        };
        let started_in = started.elapsed();
        // Nobody reads on; what is still logged must not block the server.
        std::thread::spawn(move || log.for_each(drop));
        Ok(Self { child, address, started_in, folder, redis_url: None })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The memory that it has now, in bytes.
    pub(crate) fn memory(&self) -> Result<u64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1_024)
    }

    /// The time that its threads have run, user and system.
    pub(crate) fn cpu_time(&self) -> Result<Duration, Failure> {
        const TICKS_A_SECOND: u64 = 100;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The name, which may hold spaces, is in parentheses; user and system time are the 12th and 13th field after it.
        let (_, fields) = stat.rsplit_once(')').ok_or("no name in stat")?;
        let ticks: Result<Vec<u64>, _> = fields.split_whitespace().skip(11).take(2).map(str::parse).collect();
        Ok(Duration::from_millis(ticks?.iter().sum::<u64>() * 1_000 / TICKS_A_SECOND))
    }

    fn end(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.end();
    }
}

/// Answers every call with the same bytes, until it is killed.
pub(crate) fn serve_echo(echo: Echo) -> Result<(), Failure> {
    let multi = || runtime::Builder::new_multi_thread().enable_all().build();
    let single = || runtime::Builder::new_current_thread().enable_all().build();
    match echo {
        Echo::Multi => multi()?.block_on(listen_and_serve()),
        Echo::Single => single()?.block_on(listen_and_serve()),
        Echo::PerCore => single()?.block_on(hand_out_connections()),
    }
}

async fn bind() -> Result<TcpListener, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    eprintln!("listening on {}", listener.local_addr()?);
    Ok(listener)
}

async fn listen_and_serve() -> Result<(), Failure> {
    let incoming = TcpIncoming::from(bind().await?).with_nodelay(Some(true));
    Ok(Server::builder()
        .add_service(QuotaShareServer::new(Api::default()))
        .serve_with_incoming(incoming)
        .await?)
}

/// One thread for each core; each gets the next connection in turn.
async fn hand_out_connections() -> Result<(), Failure> {
    let listener = bind().await?;
    let threads = std::thread::available_parallelism()?.get();
    let threads: Vec<_> = (0..threads).map(|_| serving_thread()).collect();
    for thread in threads.iter().cycle() {
        let (connection, _) = listener.accept().await?;
        connection.set_nodelay(true)?;
        thread.send(connection.into_std()?).await?;
    }
    Ok(())
}

fn serving_thread() -> mpsc::Sender<std::net::TcpStream> {
    let (sender, mut receiver) = mpsc::channel::<std::net::TcpStream>(16);
    std::thread::spawn(move || -> Result<(), Failure> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let (here, incoming) = mpsc::channel(16);
            tokio::spawn(async move {
                while let Some(connection) = receiver.recv().await {
                    let _ = here.send(tokio::net::TcpStream::from_std(connection)).await;
                }
            });
            let server = Server::builder().add_service(QuotaShareServer::new(Api::default()));
            Ok(server.serve_with_incoming(ReceiverStream::new(incoming)).await?)
        })
    });
    sender
}

struct Api {
    decision: pb::EnforceResponse,
}

impl Default for Api {
    fn default() -> Self {
        Self { decision: setting::answer() }
    }
}

#[tonic::async_trait]
impl QuotaShare for Api {
    async fn enforce(&self, _: Request<pb::EnforceRequest>) -> Result<Response<pb::EnforceResponse>, Status> {
        Ok(Response::new(self.decision.clone()))
    }

    async fn record_consumption(
        &self,
        _: Request<pb::RecordConsumptionRequest>,
    ) -> Result<Response<pb::RecordConsumptionResponse>, Status> {
        Err(Status::unimplemented("the echo answers Enforce"))
    }

    async fn release_reservation(
        &self,
        _: Request<pb::ReleaseReservationRequest>,
    ) -> Result<Response<pb::ReleaseReservationResponse>, Status> {
        Err(Status::unimplemented("the echo answers Enforce"))
    }

    async fn report_signals(
        &self,
        _: Request<pb::ReportSignalsRequest>,
    ) -> Result<Response<pb::ReportSignalsResponse>, Status> {
        Err(Status::unimplemented("the echo answers Enforce"))
    }
}
