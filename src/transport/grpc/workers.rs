//! One thread for each core, each with a runtime and connections of its own.
//!
//! A call is decided in microseconds, of which handing it from thread to thread would take most: `benches/server` has
//! the figures. A connection stays with the thread that it was given to, so the threads get them in turn.

use std::{io, net::TcpStream as StdStream, num::NonZero, thread, time::Duration};

use tokio::{
    net::TcpListener,
    runtime, select,
    sync::{
        mpsc::{self, error::TrySendError},
        oneshot,
    },
    time::sleep,
};
use tokio_util::sync::CancellationToken;

/// Connections that were accepted and that a thread has not taken yet.
const WAITING_MAX: usize = 64;
/// How long to wait when no connection can be accepted, for example because the process has too many files open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why calls are not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors of the contract are damaged.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// A thread could not be started.
    #[error("a thread for connections cannot be started: {0}")]
    Thread(#[from] io::Error),
    /// A thread has panicked.
    #[error("a thread for connections has panicked")]
    Panicked,
}

/// A thread that takes connections until none can come and those that it has are closed.
#[derive(Debug)]
pub(super) struct Worker {
    connections: mpsc::Sender<StdStream>,
    ended: oneshot::Receiver<()>,
}

/// Starts a thread for each core, which runs what `serve` makes of its connections, until `cut_off` at the latest.
pub(super) fn start<F>(
    serve: impl Fn(mpsc::Receiver<StdStream>) -> F,
    cut_off: &CancellationToken,
) -> Result<Vec<Worker>, ServeError>
where
    F: Future<Output = ()> + Send + 'static,
{
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let worker = |number: usize| {
        let (connections, receiver) = mpsc::channel(WAITING_MAX);
        let (tell, ended) = oneshot::channel();
        let serving = cut_off.clone().run_until_cancelled_owned(serve(receiver));
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name(format!("grpc-{number}")).spawn(move || {
            runtime.block_on(serving);
            // With it go the calls that were cut off.
            drop(runtime);
            // Nobody asks where the start has failed.
            let _ = tell.send(());
        })?;
        Ok(Worker { connections, ended })
    };
    (0..cores).map(worker).collect()
}

/// Gives connections to `workers` in turn until `stop`, then waits until they have served the last one.
pub(super) async fn run(
    listener: TcpListener,
    workers: Vec<Worker>,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let (connections, ended): (Vec<_>, Vec<_>) =
        workers.into_iter().map(|worker| (worker.connections, worker.ended)).unzip();
    select! {
        () = hand_out(&listener, &connections) => {}
        () = stop.cancelled() => {}
    }
    drop((listener, connections));
    let mut all = Ok(());
    for ended in ended {
        all = all.and(ended.await.map_err(|_| ServeError::Panicked));
    }
    all
}

/// Ends only if a thread does. A thread that has too many waiting is passed over.
async fn hand_out(listener: &TcpListener, workers: &[mpsc::Sender<StdStream>]) {
    let mut turn = 0;
    let mut accepting = Accepting { listener, failing: false };
    loop {
        let mut connection = accepting.next().await;
        let mut passed_over = 0;
        loop {
            turn += 1;
            connection = match workers[turn % workers.len()].try_send(connection) {
                Ok(()) => break,
                Err(TrySendError::Full(connection)) if passed_over < workers.len() => {
                    passed_over += 1;
                    connection
                }
                Err(TrySendError::Full(connection)) => {
                    sleep(ACCEPT_PAUSE).await;
                    connection
                }
                Err(TrySendError::Closed(_)) => return,
            };
        }
    }
}

/// The connections of a listener.
struct Accepting<'a> {
    listener: &'a TcpListener,
    /// None could be accepted; each change is said once.
    failing: bool,
}

impl Accepting<'_> {
    async fn next(&mut self) -> StdStream {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, NotConnected};
        loop {
            let accepted = self.listener.accept().await.and_then(|(connection, _)| {
                connection.set_nodelay(true)?;
                connection.into_std()
            });
            match accepted {
                Ok(connection) => {
                    if std::mem::take(&mut self.failing) {
                        tracing::warn!("connections are accepted again");
                    }
                    return connection;
                }
                // The caller has gone before it was let in.
                Err(error)
                    if matches!(
                        error.kind(),
                        ConnectionAborted | ConnectionRefused | ConnectionReset | NotConnected
                    ) => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(
                            error,
                            "no connection can be accepted: has the process too many files open?"
                        );
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}
