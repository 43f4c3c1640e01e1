//! The binary as it is run, with the machine's clock: to be killed and started again.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    ops::Deref,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::sync::{RwLock, oneshot};

use super::Client;

/// Far more than a start or a stop takes, so that a machine under load fails no test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Held while a process is started: until it has replaced itself with the binary, it has copies of all files that this
/// process has open, and with them the lock on every data directory. Whoever lets go of one and takes it again must not
/// be between the two meanwhile.
pub(super) static STARTING: RwLock<()> = RwLock::const_new(());

/// The real binary in a process of its own, on a free port, in a folder of its own. Killed with the value.
#[derive(Debug)]
pub(crate) struct TestProcess {
    process: Process,
    client: Client,
    // Goes last: the process writes to it.
    folder: TempDir,
}

impl TestProcess {
    /// A process with nothing in it.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// A process with nothing in it and `vars` in its environment, which a restart does not get.
    pub(crate) async fn start_with(vars: &[(&str, &str)]) -> Self {
        Self::start_as(&[], vars).await
    }

    /// A process on data that somebody else keeps.
    pub(crate) async fn start_on(data_dir: &Path) -> Self {
        Self::start_as(&["--data-dir", &data_dir.display().to_string()], &[]).await
    }

    /// A process with these arguments, which may name another folder than its own.
    pub(crate) async fn start_as(args: &[&str], vars: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let (process, client) = listening(folder.path(), args, vars).await;
        Self { process, client, folder }
    }

    /// Ends the process as a power cut would, and starts another one on the same data.
    pub(crate) async fn kill_and_restart(&mut self) {
        self.kill();
        (self.process, self.client) = listening(self.folder.path(), &[], &[]).await;
    }

    /// SIGKILL, and waits until the process is gone.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts another process on the data of one that has ended.
    pub(crate) async fn restart(&mut self) {
        (self.process, self.client) = listening(self.folder.path(), &[], &[]).await;
    }

    /// Ends the process, and starts another one on its data with `vars` in its environment.
    pub(crate) async fn restart_with(&mut self, vars: &[(&str, &str)]) {
        self.kill();
        (self.process, self.client) = listening(self.folder.path(), &[], vars).await;
    }

    /// Sends `signal` and waits for the process to end by itself; returns its exit code and how long it took.
    pub(crate) async fn end_with(&mut self, signal: Signal) -> (Option<i32>, Duration) {
        let sent = Instant::now();
        self.signal(signal);
        let status = self.process.ended().await;
        assert_eq!(status.signal(), None, "the process handles {signal}: {}", self.log());
        (status.code(), sent.elapsed())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).expect("the process is there");
    }

    /// Waits for the process to end by itself; returns its exit code.
    pub(crate) async fn ended(&mut self) -> Option<i32> {
        self.process.ended().await.code()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.child.id()
    }

    pub(crate) fn data_dir(&self) -> &Path {
        self.folder.path()
    }

    /// What this process has logged until now.
    pub(crate) fn log(&self) -> String {
        self.process.log()
    }
}

impl Deref for TestProcess {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// The exit code and the log of a start that fails.
pub(crate) async fn failed_start(data_dir: &Path, vars: &[(&str, &str)]) -> (Option<i32>, String) {
    let (mut process, _address) = Process::spawn(data_dir, &[], vars).await;
    let status = process.ended().await;
    process.read_to_end();
    (status.code(), process.log())
}

/// What a command has said, and its exit code.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the binary to its end, with no other variables than `vars`.
pub(crate) async fn run(args: &[&str], vars: &[(&str, &str)]) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quota-share"));
    end_of(command.env_clear().args(args).envs(vars.iter().copied())).await
}

/// Runs a command to its end.
pub(crate) async fn end_of(command: &mut Command) -> Ended {
    let starting = STARTING.write().await;
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    drop(starting);
    let child = child.expect("the program is there");
    let ended = tokio::task::spawn_blocking(|| child.wait_with_output()).await;
    let output = ended.expect("waiting does not panic").expect("it is our child");
    let text = |bytes| String::from_utf8(bytes).expect("the program speaks UTF-8");
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

async fn listening(data_dir: &Path, args: &[&str], vars: &[(&str, &str)]) -> (Process, Client) {
    let (process, address) = Process::spawn(data_dir, args, vars).await;
    let Ok(Ok(address)) = tokio::time::timeout(PATIENCE, address).await else {
        panic!("the process does not listen: {}", process.log());
    };
    (process, Client::connect(address).await)
}

#[derive(Debug)]
struct Process {
    child: Child,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts the binary; the receiver gets the address as soon as it is logged.
    async fn spawn(
        data_dir: &Path,
        args: &[&str],
        vars: &[(&str, &str)],
    ) -> (Self, oneshot::Receiver<SocketAddr>) {
        let starting = STARTING.write().await;
        let mut child = Command::new(env!("CARGO_BIN_EXE_quota-share"))
            .env_clear()
            .args(args)
            .env("DATA_DIR", data_dir)
            .env("QUOTA_LISTEN", "127.0.0.1:0")
            .env("QUOTA_HTTP_LISTEN", "127.0.0.1:0")
            .envs(vars.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary was built");
        drop(starting);
        let stderr = child.stderr.take().expect("piped above");
        let (tell, address) = oneshot::channel();
        let log = Arc::default();
        let reader = std::thread::spawn({
            let log = Arc::clone(&log);
            move || follow(stderr, &log, tell)
        });
        (Self { child, log, reader: Some(reader) }, address)
    }

    async fn ended(&mut self) -> ExitStatus {
        let asked = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status;
            }
            assert!(asked.elapsed() < PATIENCE, "the process does not end: {}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.read_to_end();
    }

    fn read_to_end(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("reading a log does not fail");
        }
    }

    fn log(&self) -> String {
        self.log.lock().expect("nobody panics with a log in hand").clone()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Keeps what is logged, and tells the first address that is listened on.
fn follow(stderr: ChildStderr, log: &Mutex<String>, tell: oneshot::Sender<SocketAddr>) {
    let mut tell = Some(tell);
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        if let Some(address) = listened_on(&line)
            && let Some(tell) = tell.take()
        {
            // Nobody waits for it where the start is to fail.
            let _ = tell.send(address);
        }
        let mut log = log.lock().expect("nobody panics with a log in hand");
        log.push_str(&line);
        log.push('\n');
    }
}

fn listened_on(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once("listening on ")?;
    // The log is JSON where it is not a terminal.
    rest.split([' ', '"']).next()?.parse().ok()
}
