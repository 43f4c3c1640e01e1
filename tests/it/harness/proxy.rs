//! A connection that fails in a given way, at a given time: a proxy that knows bytes and no protocol.

use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};

use super::{ports, process::PATIENCE};

const POLL: Duration = Duration::from_millis(5);

/// What is read at once. What a client writes at once arrives as one chunk if it is no longer than this.
const CHUNK_BYTES_MAX: usize = 64 * 1_024;

/// Chunks on their way in one direction of a connection: more wait at their sender.
const ON_THE_WAY_MAX: usize = 1_024;

/// In front of a server, on a free port. Passes everything on until it is told otherwise; what it is told holds for the
/// connections that it has and for those to come. Ends with the value.
#[derive(Debug)]
pub(crate) struct Proxy {
    address: SocketAddr,
    connections: Connections,
    line: Arc<Line>,
    /// One task, which has the listener; none while connections are refused.
    accepting: JoinSet<()>,
}

type Connections = Arc<Mutex<JoinSet<()>>>;

impl Proxy {
    pub(crate) async fn to(server: SocketAddr) -> Self {
        let listener = listen().await;
        let line = Line {
            server,
            faults: watch::Sender::default(),
            losing: Mutex::default(),
            connections: AtomicU64::new(0),
            requests: Mutex::default(),
            answers: AtomicU64::new(0),
        };
        let mut proxy = Self {
            address: listener.local_addr().expect("it listens"),
            connections: Arc::default(),
            line: Arc::new(line),
            accepting: JoinSet::new(),
        };
        proxy.accept_from(listener);
        proxy
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// How many connections were accepted.
    pub(crate) fn connections(&self) -> u64 {
        self.line.connections.load(Ordering::SeqCst)
    }

    /// How many chunks clients have sent that say `part`, from the first such question on; other requests may go by.
    pub(crate) fn requests(&self, part: &str) -> u64 {
        let mut counted = self.line.requests.lock().expect("nobody panics with it in hand");
        *counted.entry(part.to_owned()).or_default()
    }

    /// How many chunks the server has sent, whether or not they were passed on.
    pub(crate) fn answers(&self) -> u64 {
        self.line.answers.load(Ordering::SeqCst)
    }

    /// From now on everything takes this long, in each direction.
    pub(crate) fn delay(&self, delay: Duration) {
        self.line.faults.send_modify(|faults| faults.delay = delay);
    }

    /// Whether answers are lost: the server gets every request, and nothing comes back.
    pub(crate) fn swallow(&self, swallow: bool) {
        self.line.faults.send_modify(|faults| faults.swallow = swallow);
    }

    /// Whether nothing goes on, in neither direction, and all connections stay open. What came meanwhile is passed on
    /// afterwards.
    pub(crate) fn hang(&self, hang: bool) {
        self.line.faults.send_modify(|faults| faults.hang = hang);
    }

    /// Closes the connections that are there: on return, both sides have been told.
    pub(crate) async fn cut(&self) {
        let mut present =
            std::mem::take(&mut *self.connections.lock().expect("nobody panics with it in hand"));
        present.shutdown().await;
    }

    /// Whether new connections are refused, as where nobody listens. Those that are there stay.
    pub(crate) async fn refuse(&mut self, refuse: bool) {
        self.accepting.shutdown().await;
        if refuse {
            until_nobody_listens(self.address).await;
        } else {
            let listener = listen_at(self.address).await;
            self.accept_from(listener);
        }
    }

    /// Lets the next `requests` chunks from clients through, and cuts the connection of the last one in place of its
    /// answer. The server has done what it was asked before the client learns anything.
    pub(crate) fn cut_after_requests(&self, requests: u64) {
        assert!(requests > 0, "the last request is the one whose answer is lost");
        self.line.lose(Losing { passing: requests - 1, lost: 1 });
    }

    /// Cuts the connection in place of the answer for each of the next `answers` chunks from clients.
    pub(crate) fn lose_next_answers(&self, answers: u64) {
        self.line.lose(Losing { passing: 0, lost: answers });
    }

    fn accept_from(&mut self, listener: TcpListener) {
        let (connections, line) = (Arc::clone(&self.connections), Arc::clone(&self.line));
        self.accepting.spawn(async move {
            loop {
                let (client, _) = listener.accept().await.expect("the listener is fine");
                let mut connections = connections.lock().expect("nobody panics with it in hand");
                connections.spawn(Arc::clone(&line).carry(client));
                line.connections.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
}

async fn listen() -> TcpListener {
    for _ in 0..ports::ATTEMPTS_MAX {
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, ports::candidate())).await {
            return listener;
        }
    }
    panic!("there is no free port");
}

/// A process that is being started has copies of all files until it has replaced itself, and so of a listener that was
/// closed here.
async fn until_nobody_listens(address: SocketAddr) {
    let asked = Instant::now();
    while TcpStream::connect(address).await.is_ok() {
        assert!(asked.elapsed() < PATIENCE, "somebody has taken {address}");
        tokio::time::sleep(POLL).await;
    }
}

async fn listen_at(address: SocketAddr) -> TcpListener {
    let asked = Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => assert!(asked.elapsed() < PATIENCE, "somebody has taken {address}: {error}"),
        }
        tokio::time::sleep(POLL).await;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    delay: Duration,
    swallow: bool,
    hang: bool,
}

/// Which of the next requests lose their answers: so many pass, then so many lose.
#[derive(Debug, Default)]
struct Losing {
    passing: u64,
    lost: u64,
}

/// What all connections have in common.
#[derive(Debug)]
struct Line {
    server: SocketAddr,
    faults: watch::Sender<Faults>,
    losing: Mutex<Losing>,
    connections: AtomicU64,
    /// By what they say.
    requests: Mutex<HashMap<String, u64>>,
    answers: AtomicU64,
}

/// Bytes, and when they arrive.
type Chunk = (Instant, Vec<u8>);

impl Line {
    /// One connection, to its end: that of the server's answers, or a failure on either side.
    async fn carry(self: Arc<Self>, client: TcpStream) {
        let Ok(server) = TcpStream::connect(self.server).await else { return };
        // Small chunks are not to wait for each other.
        if client.set_nodelay(true).and(server.set_nodelay(true)).is_err() {
            return;
        }
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let (requests, requests_out) = mpsc::channel(ON_THE_WAY_MAX);
        let (answers, answers_out) = mpsc::channel(ON_THE_WAY_MAX);
        let ends = AtomicBool::new(false);
        let requests = futures::future::try_join(
            self.read(from_client, |bytes| self.count_request(bytes), |_| false, requests),
            self.write_requests(requests_out, to_server, &ends),
        );
        let answers = futures::future::try_join(
            self.read(
                from_server,
                |_| {
                    self.answers.fetch_add(1, Ordering::SeqCst);
                },
                |faults| faults.swallow,
                answers,
            ),
            self.write_answers(answers_out, to_client, &ends),
        );
        tokio::select! {
            _ = answers => (),
            Err(_) = requests => (),
        }
    }

    async fn read(
        &self,
        mut from: OwnedReadHalf,
        count: impl Fn(&[u8]),
        is_lost: fn(Faults) -> bool,
        chunks: mpsc::Sender<Chunk>,
    ) -> io::Result<()> {
        let mut buffer = vec![0; CHUNK_BYTES_MAX];
        loop {
            let read = from.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            // Counted when it is settled whether it is lost, so that whoever sees the count may end the fault.
            let faults = *self.faults.borrow();
            count(&buffer[..read]);
            let chunk = (Instant::now() + faults.delay, buffer[..read].to_vec());
            if !is_lost(faults) && chunks.send(chunk).await.is_err() {
                return Ok(());
            }
        }
    }

    fn count_request(&self, bytes: &[u8]) {
        let mut counted = self.requests.lock().expect("nobody panics with it in hand");
        for (part, count) in &mut *counted {
            *count += u64::from(bytes.windows(part.len()).any(|some| some == part.as_bytes()));
        }
    }

    async fn write_requests(
        &self,
        mut chunks: mpsc::Receiver<Chunk>,
        mut to: OwnedWriteHalf,
        ends: &AtomicBool,
    ) -> io::Result<()> {
        while let Some((due, bytes)) = chunks.recv().await {
            self.arrival(due).await;
            let is_last = self.loses_one();
            ends.fetch_or(is_last, Ordering::SeqCst);
            to.write_all(&bytes).await?;
            if is_last {
                break;
            }
        }
        // The server reads all that it was sent before it sees this end and closes; if the connection were closed at
        // once it might throw the last request away.
        to.shutdown().await
    }

    async fn write_answers(
        &self,
        mut chunks: mpsc::Receiver<Chunk>,
        mut to: OwnedWriteHalf,
        ends: &AtomicBool,
    ) -> io::Result<()> {
        while let Some((due, bytes)) = chunks.recv().await {
            self.arrival(due).await;
            if !ends.load(Ordering::SeqCst) {
                to.write_all(&bytes).await?;
            }
        }
        to.shutdown().await
    }

    async fn arrival(&self, due: Instant) {
        if due > Instant::now() {
            sleep_until(due).await;
        }
        let mut faults = self.faults.subscribe();
        faults.wait_for(|faults| !faults.hang).await.expect("the sender is in this value");
    }

    fn lose(&self, losing: Losing) {
        *self.losing.lock().expect("nobody panics with it in hand") = losing;
    }

    /// Whether this request, which is now passed on, loses its answer.
    fn loses_one(&self) -> bool {
        let mut losing = self.losing.lock().expect("nobody panics with it in hand");
        if losing.passing > 0 {
            losing.passing -= 1;
            return false;
        }
        let loses = losing.lost > 0;
        losing.lost -= u64::from(loses);
        loses
    }
}
