//! Redis servers of one's own, alone or as a cluster: to be paused, killed and started again.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use futures::future::join_all;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::{OnceCell, oneshot},
};

use super::{
    ports,
    process::{Ended, PATIENCE, STARTING, end_of},
};

const POLL: Duration = Duration::from_millis(5);
const SOCKET: &str = "redis.sock";
const SLOTS: usize = 16_384;
const MASTERS: usize = 3;
/// Of the shared server: more than tests there are.
const DATABASES: usize = 4_096;

/// Runs redis-server until its own input ends, which is when whoever started it lets go of it or dies, however that
/// happens. Only who has said `keep` has use for the folder then. Signals to the whole group, as Ctrl-C sends them, do
/// not keep it from this.
const GUARD: &str = r#"
trap '' INT TERM HUP
sh -c 'echo $$; exec redis-server "$@" 2>&1' sh "$@" &
exec >&-
read -r word
kill -9 $!
wait
[ "$word" = keep ] || rm -rf "$FOLDER"
"#;

/// Whether Redis is not installed, said aloud; where `tests/run` has set things up, that is a failure.
pub(crate) fn redis_is_missing() -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let is_there = |name: &&str| env::split_paths(&path).any(|folder| folder.join(name).exists());
    let Some(name) = ["redis-server", "redis-cli"].into_iter().find(|name| !is_there(name)) else {
        return false;
    };
    assert!(env::var_os("QUOTA_TESTS_NEED_TOOLS").is_none(), "{name} is not on PATH");
    println!("skipped: {name} is not on PATH; tests/run installs it");
    true
}

/// A `redis-server` of one's own, on a free port and on a Unix socket in a folder of its own. Ends with the value, and
/// with this process at the latest.
#[derive(Debug)]
pub(crate) struct TestRedis {
    server: Option<Server>,
    port: u16,
    args: Vec<String>,
    // Goes last: the server writes to it.
    folder: TempDir,
}

impl TestRedis {
    /// A server with nothing in it, that keeps nothing.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// A server with these arguments, which it gets at a restart, too. A first one that is no option is the path of its
    /// configuration.
    pub(crate) async fn start_with(args: &[&str]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let args: Vec<_> = args.iter().map(|&arg| arg.to_owned()).collect();
        for _ in 0..ports::ATTEMPTS_MAX {
            let port = ports::candidate();
            if let Some(server) = Server::listening(folder.path(), port, &args).await {
                return Self { server: Some(server), port, args, folder };
            }
        }
        panic!("there is no free port");
    }

    /// The one server of all tests that keep to keys of their own and do it no harm.
    pub(crate) async fn shared() -> &'static Self {
        static SHARED: OnceCell<TestRedis> = OnceCell::const_new();
        let start = async || Self::start_with(&["--databases", &DATABASES.to_string()]).await;
        SHARED.get_or_init(start).await
    }

    /// The URL of a database of the shared server that nobody else has. The first one is for those who keep to keys of
    /// their own.
    pub(crate) async fn database_of_ones_own() -> String {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let database = NEXT.fetch_add(1, Ordering::Relaxed);
        assert!(database < DATABASES, "tests use more databases than {DATABASES}");
        format!("{}/{database}", Self::shared().await.url())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Where it is, over TCP; without the password, if there is one.
    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address())
    }

    /// Where it is, over its Unix socket.
    pub(crate) fn socket_url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.running().pid.as_raw().unsigned_abs()
    }

    /// Keeps it from doing anything: connections are made by the system and stay open, and nothing is answered.
    pub(crate) async fn pause(&self) {
        self.running().signal(Signal::SIGSTOP);
        let asked = Instant::now();
        while !is_stopped(self.pid()) {
            assert!(asked.elapsed() < PATIENCE, "the server does not stand still");
            tokio::time::sleep(POLL).await;
        }
    }

    /// Lets a paused server go on, with all that it was sent meanwhile.
    pub(crate) fn wake(&self) {
        self.running().signal(Signal::SIGCONT);
    }

    /// SIGTERM, and waits until it has shut down, which takes its connections down in order.
    pub(crate) async fn stop(&mut self) {
        let Some(server) = self.server.take() else { return };
        server.signal(Signal::SIGTERM);
        let asked = Instant::now();
        while !server.has_ended() {
            assert!(asked.elapsed() < PATIENCE, "the server does not stop: {}", server.log());
            tokio::time::sleep(POLL).await;
        }
    }

    /// SIGKILL, and waits until the process is gone.
    pub(crate) fn kill(&mut self) {
        self.server = None;
    }

    /// Starts it again on its port and in its folder. One that still runs is killed before.
    pub(crate) async fn restart(&mut self) {
        self.kill();
        let asked = Instant::now();
        while self.server.is_none() {
            assert!(asked.elapsed() < PATIENCE, "somebody has taken port {}", self.port);
            self.server = Server::listening(self.folder.path(), self.port, &self.args).await;
        }
    }

    /// What redis-cli prints when it is asked this. A refusal of the server is printed as well.
    pub(crate) async fn cli(&self, args: &[&str]) -> String {
        let ended = self.ended_cli(args).await;
        assert_eq!(ended.code, Some(0), "redis-cli {args:?}: {} {}", ended.stdout, ended.stderr);
        ended.stdout.trim_end().to_owned()
    }

    /// The same of a server that may hang up; `None` if it does.
    pub(super) async fn try_cli(&self, args: &[&str]) -> Option<String> {
        let ended = self.ended_cli(args).await;
        (ended.code == Some(0)).then(|| ended.stdout.trim_end().to_owned())
    }

    async fn ended_cli(&self, args: &[&str]) -> Ended {
        // It would wait for a paused server for ever.
        let mut command = Command::new("timeout");
        command
            .arg(PATIENCE.as_secs().to_string())
            .args(["redis-cli", "-p", &self.port.to_string()])
            .args(args);
        end_of(&mut command).await
    }

    /// Has a server that was started with a certificate listen with TLS, too, on the port that is returned.
    pub(crate) async fn listen_with_tls(&self) -> u16 {
        for _ in 0..ports::ATTEMPTS_MAX {
            let port = ports::candidate();
            if self.cli(&["CONFIG", "SET", "tls-port", &port.to_string()]).await == "OK" {
                return port;
            }
        }
        panic!("there is no free port");
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    #[track_caller]
    fn running(&self) -> &Server {
        self.server.as_ref().expect("a server that runs")
    }
}

/// Three masters that share all slots, each of which is a server as any other. They keep nothing but what they know of
/// the cluster.
#[derive(Debug)]
pub(crate) struct TestCluster {
    /// The masters first.
    nodes: Vec<TestRedis>,
}

impl TestCluster {
    /// A cluster with nothing in it, without replicas. It takes two seconds: a master of a cluster takes no writes
    /// before.
    pub(crate) async fn start() -> Self {
        Self::start_nodes(MASTERS).await
    }

    /// The same with so many nodes, of which all but the first three have no slots.
    pub(super) async fn start_nodes(nodes: usize) -> Self {
        let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1500"];
        // What copies a master is told to does so at once.
        let args = [&args[..], &["--repl-diskless-sync-delay", "0"]].concat();
        let nodes = join_all((0..nodes).map(|_| TestRedis::start_with(&args))).await;
        let cluster = Self { nodes };
        for node in 0..MASTERS {
            let [first, last] = [SLOTS * node / MASTERS, SLOTS * (node + 1) / MASTERS - 1];
            cluster.order(node, &["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]).await;
            cluster.order(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(node + 1).to_string()]).await;
        }
        // Each is told of each, which is faster than that one hears of the other through the third.
        for node in 0..cluster.nodes.len() {
            for other in &cluster.nodes[node + 1..] {
                cluster.order(node, &["CLUSTER", "MEET", "127.0.0.1", &other.port.to_string()]).await;
            }
        }
        cluster.until_it_is_whole().await;
        cluster
    }

    /// The one cluster of all tests that keep to keys of their own and do it no harm.
    pub(crate) async fn shared() -> &'static Self {
        static SHARED: OnceCell<TestCluster> = OnceCell::const_new();
        SHARED.get_or_init(Self::start).await
    }

    pub(crate) fn url(&self) -> String {
        let [first, second, third] = [0, 1, 2].map(|node| self.nodes[node].address());
        format!("redis-cluster://{first}?node={second}&node={third}")
    }

    /// The masters in the order of their slots, then the others.
    pub(crate) fn nodes(&self) -> &[TestRedis] {
        &self.nodes
    }

    /// The same, to be killed and started again.
    pub(crate) fn nodes_mut(&mut self) -> &mut [TestRedis] {
        &mut self.nodes
    }

    /// Which of the masters has this slot, as long as none was moved.
    pub(crate) fn place_of(slot: u16) -> usize {
        (0..MASTERS).rfind(|node| SLOTS * node / MASTERS <= usize::from(slot)).expect("the first has slot 0")
    }

    /// Its servers, for somebody else to look after.
    pub(super) fn into_nodes(self) -> Vec<TestRedis> {
        self.nodes
    }

    /// As [`TestRedis::cli`], of one node; `-c` among the arguments follows where that one points to.
    pub(crate) async fn cli(&self, node: usize, args: &[&str]) -> String {
        self.nodes[node].cli(args).await
    }

    /// Waits until all nodes see all nodes and take commands.
    pub(crate) async fn until_it_is_whole(&self) {
        let asked = Instant::now();
        let all = format!("cluster_known_nodes:{}", self.nodes.len());
        for node in 0..self.nodes.len() {
            loop {
                let info = self.cli(node, &["CLUSTER", "INFO"]).await;
                if info.contains("cluster_state:ok") && info.contains(&all) {
                    break;
                }
                assert!(asked.elapsed() < PATIENCE, "the cluster is not whole: {info}");
                tokio::time::sleep(10 * POLL).await;
            }
        }
    }

    /// Moves a slot with its keys, as an operator does, while clients go on.
    pub(crate) async fn move_slot(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        let [from_id, to_id] = [self.id(from).await, self.id(to).await];
        self.order(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await;
        self.order(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await;
        let port = self.nodes[to].port.to_string();
        let timeout_ms = PATIENCE.as_millis().to_string();
        loop {
            let keys = self.cli(from, &["CLUSTER", "GETKEYSINSLOT", &slot, "100"]).await;
            if keys.is_empty() {
                break;
            }
            let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", &timeout_ms, "KEYS"];
            migrate.extend(keys.lines());
            let moved = self.cli(from, &migrate).await;
            // A key may have expired meanwhile.
            assert!(moved == "OK" || moved == "NOKEY", "{moved}");
        }
        // The new owner first, so that at no time nobody owns it.
        for node in [to, from, MASTERS - from - to] {
            self.order(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await;
        }
    }

    pub(super) async fn id(&self, node: usize) -> String {
        self.cli(node, &["CLUSTER", "MYID"]).await
    }

    pub(super) async fn order(&self, node: usize, args: &[&str]) {
        assert_eq!(self.cli(node, args).await, "OK", "{args:?}");
    }
}

/// A process of redis-server under its guard. Killed with the value.
#[derive(Debug)]
struct Server {
    guard: Child,
    // The guard has not waited for it yet, so that no other process can have this id.
    pid: Pid,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the server and waits until it answers; `None` where somebody else has the port.
    async fn listening(folder: &Path, port: u16, args: &[String]) -> Option<Self> {
        let server = Self::spawn(folder, port, args).await;
        let asked = Instant::now();
        // Asked over its socket, for at the port somebody else might answer.
        while !answers(&folder.join(SOCKET)).await {
            if server.has_ended() && server.log().contains("Failed listening on port") {
                return None;
            }
            let may_come = !server.has_ended() && asked.elapsed() < PATIENCE;
            assert!(may_come, "redis-server {args:?} does not answer: {}", server.log());
            tokio::time::sleep(POLL).await;
        }
        Some(server)
    }

    async fn spawn(folder: &Path, port: u16, args: &[String]) -> Self {
        let has_path = args.first().is_some_and(|first| !first.starts_with("--"));
        let (path, args) = args.split_at(usize::from(has_path));
        let starting = STARTING.write().await;
        let mut guard = Command::new("sh")
            .args(["-c", GUARD, "sh"])
            .args(path)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--unixsocket", SOCKET])
            .args(["--save", "", "--appendonly", "no"])
            .args(args)
            .current_dir(folder)
            .env("FOLDER", folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("there is a shell");
        drop(starting);
        let stdout = guard.stdout.take().expect("piped above");
        let (tell, pid) = oneshot::channel();
        let log = Arc::default();
        let reader = std::thread::spawn({
            let log = Arc::clone(&log);
            move || follow(stdout, &log, tell)
        });
        let pid = pid.await.expect("the guard tells the server's process id");
        Self { guard, pid, log, reader: Some(reader) }
    }

    fn signal(&self, signal: Signal) {
        kill(self.pid, signal).expect("the process is there");
    }

    /// Its log ends when it does.
    fn has_ended(&self) -> bool {
        self.reader.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn log(&self) -> String {
        self.log.lock().expect("nobody panics with a log in hand").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut guard) = self.guard.stdin.take() {
            // Fails if somebody has killed the guard.
            let _ = guard.write_all(b"keep\n");
        }
        let _ = self.guard.wait();
        if let Some(reader) = self.reader.take() {
            reader.join().expect("reading a log does not fail");
        }
    }
}

/// Tells the process id, which comes first, and keeps what is logged.
fn follow(stdout: ChildStdout, log: &Mutex<String>, tell: oneshot::Sender<Pid>) {
    let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
    if let Some(pid) = lines.next().and_then(|line| line.parse().ok()) {
        // Nobody waits for it where the test has ended.
        let _ = tell.send(Pid::from_raw(pid));
    }
    for line in lines {
        let mut log = log.lock().expect("nobody panics with a log in hand");
        log.push_str(&line);
        log.push('\n');
    }
}

/// Whether a server takes commands at this socket, or would if it were told the password.
async fn answers(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket).await else { return false };
    let mut answer = [0; 7];
    let asked = async {
        stream.write_all(b"PING\r\n").await?;
        stream.read_exact(&mut answer).await
    };
    matches!(tokio::time::timeout(PATIENCE, asked).await, Ok(Ok(_)))
        && (answer == *b"+PONG\r\n" || answer == *b"-NOAUTH")
}

/// Whether a process stands still. The state follows the name, which is in brackets.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process is there");
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
}
