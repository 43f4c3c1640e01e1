//! One thread for each core, each with a runtime and connections of its own.
//!
//! A call is decided in microseconds, of which handing it from thread to thread would take most: `benches/server` has
//! the figures. A connection stays with the thread that it was given to, so the threads get them in turn.

use std::{io, net::TcpStream as StdStream, num::NonZero, thread, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    runtime, select,
    sync::{mpsc, oneshot},
    time::sleep,
};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
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
    /// The server of a thread has failed.
    #[error(transparent)]
    Server(#[from] tonic::transport::Error),
    /// A thread has panicked.
    #[error("a thread for connections has panicked")]
    Panicked,
}

/// The connections that one thread serves.
pub(super) type Connections = std::pin::Pin<Box<dyn Stream<Item = io::Result<TcpStream>> + Send>>;

/// A thread that takes connections until none can come and those that it has are closed.
#[derive(Debug)]
pub(super) struct Worker {
    connections: mpsc::Sender<StdStream>,
    ended: oneshot::Receiver<Result<(), tonic::transport::Error>>,
}

/// Starts a thread for each core, which runs what `serve` makes of its connections, until `cut_off` at the latest.
pub(super) fn start<F>(
    serve: impl Fn(Connections) -> F,
    cut_off: &CancellationToken,
) -> Result<Vec<Worker>, ServeError>
where
    F: Future<Output = Result<(), tonic::transport::Error>> + Send + 'static,
{
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let worker = |number: usize| {
        let (connections, receiver) = mpsc::channel(WAITING_MAX);
        let (tell, ended) = oneshot::channel();
        let incoming = ReceiverStream::new(receiver).map(TcpStream::from_std);
        let serving = cut_off.clone().run_until_cancelled_owned(serve(Box::pin(incoming)));
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name(format!("grpc-{number}")).spawn(move || {
            let result = runtime.block_on(serving).unwrap_or(Ok(()));
            // Nobody asks where the start has failed.
            let _ = tell.send(result);
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
    for ended in ended {
        ended.await.map_err(|_| ServeError::Panicked)??;
    }
    Ok(())
}

/// Ends only if a thread does.
async fn hand_out(listener: &TcpListener, workers: &[mpsc::Sender<StdStream>]) {
    for worker in workers.iter().cycle() {
        let connection = accept(listener).await;
        if worker.send(connection).await.is_err() {
            return;
        }
    }
}

async fn accept(listener: &TcpListener) -> StdStream {
    loop {
        let accepted = listener.accept().await.and_then(|(connection, _)| {
            connection.set_nodelay(true)?;
            connection.into_std()
        });
        match accepted {
            Ok(connection) => return connection,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "a connection was not accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
