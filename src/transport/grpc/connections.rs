//! Connections: how one is opened, what it may use, and when it is closed.
//!
//! A connection is bounded in everything that its caller decides: how long it takes to open one, how many calls it has
//! at once, how large their headers are, and how much is sent before it is read. It is closed after a time, so that
//! callers look for other replicas now and then, and so that no certificate or token outlives its removal for long.

use std::{
    convert::Infallible,
    error::Error,
    io,
    net::TcpStream as StdStream,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::Body;
use hyper::{body::Incoming, server::conn::http2};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    select,
    sync::{Semaphore, mpsc},
    time::{Instant, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::codegen::http::{Request, Response};
use tower::Service;

use super::sparing::Sparing;
use crate::transport::{
    auth::CertificateNames,
    tls::{self, SharedTls},
};

/// Connections of the process. Each takes some 50 KB while it does its worst.
const CONNECTIONS_MAX: usize = 16_384;
/// How long a caller may take to say what HTTP/2 begins with, and before that for the handshake of TLS.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// What HTTP/2 begins with: the preface, and the head of a frame with settings.
const OPENING_BYTES: usize = 24 + 9;
/// After which silence a caller is asked whether it is still there, and how long it has to answer.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Calls of one connection at once; clients keep more of them waiting.
const STREAMS_MAX: u32 = 256;
/// All headers of a call, names and values and 32 bytes each.
const HEADERS_BYTES_MAX: u32 = 16 * 1_024;
/// What one call, and all calls of a connection, may send before it is read.
const STREAM_WINDOW_BYTES: u32 = 64 * 1_024;
const CONNECTION_WINDOW_BYTES: u32 = 256 * 1_024;
/// What is written for one call before its caller takes it.
const SEND_BUFFER_BYTES: usize = 64 * 1_024;
/// Calls that were reset before they were looked at: a caller who goes on is let go.
const PENDING_RESETS_MAX: usize = 32;
/// Calls that were ended for mistakes of their caller: one who goes on is let go.
const ERROR_RESETS_MAX: usize = 256;
/// How long calls that are open when a connection is too old get to finish.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(30);
/// By how much ages differ, so that the callers of a replica do not all come back at once.
const AGE_JITTER_FRACTION: f64 = 0.1;

/// How connections are opened, and how old they get.
#[derive(Clone)]
pub(super) struct Opening {
    tls: Option<SharedTls>,
    /// Give or take a tenth.
    age_max: Duration,
    /// Says of connections that they were not opened.
    unopened: Arc<Sparing>,
    /// One for each connection that there may be.
    places: Arc<Semaphore>,
}

impl Opening {
    pub(super) fn new(tls: Option<SharedTls>, age_max: Duration) -> Self {
        Self { tls, age_max, unopened: Arc::default(), places: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

/// Serves each of `connections` with what `calls` makes for it, until none can come and all are closed. On `stop` they
/// are closed as soon as their calls are answered.
pub(super) async fn serve<S, B>(
    mut connections: mpsc::Receiver<StdStream>,
    opening: Opening,
    calls: impl Fn(CertificateNames) -> S + Clone + Send + 'static,
    stop: CancellationToken,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let open = TaskTracker::new();
    while let Some(Some(stream)) = stop.run_until_cancelled(connections.recv()).await {
        let Ok(place) = Arc::clone(&opening.places).try_acquire_owned() else {
            opening.unopened.say(|more| {
                tracing::warn!(more, "a connection was not opened: there are {CONNECTIONS_MAX} already");
            });
            continue;
        };
        let (opening, calls, stop) = (opening.clone(), calls.clone(), stop.clone());
        open.spawn(async move {
            let _place = place;
            match stop.run_until_cancelled(open_one(stream, opening.tls.as_ref())).await {
                None => {}
                Some(Err(error)) => opening.unopened.say(|more| {
                    tracing::info!(error, more, "a connection was not opened");
                }),
                Some(Ok((stream, certificate))) => {
                    let calls = TowerToHyperService::new(calls(certificate));
                    serve_one(stream, calls, age(opening.age_max), stop).await;
                }
            }
        });
    }
    open.close();
    open.wait().await;
}

/// The stream that HTTP/2 is spoken on, and the names in its caller's certificate.
async fn open_one(stream: StdStream, tls: Option<&SharedTls>) -> Result<(Stream, CertificateNames), String> {
    let peer = stream.peer_addr().map_or_else(|_| "a caller".to_owned(), |address| address.to_string());
    let stream = TcpStream::from_std(stream).map_err(|error| format!("{peer}: {error}"))?;
    let Some(tls) = tls else { return Ok((Stream::Plain(stream), None)) };
    let acceptor = TlsAcceptor::from(tls.load_full());
    let stream = match timeout(OPENING_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(format!("{peer}: {error}")),
        Err(_) => return Err(format!("{peer}: no handshake within {} s", OPENING_TIMEOUT.as_secs())),
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let names = certificate.map(|certificate| tls::names(certificate).into());
    Ok((Stream::Tls(Box::new(stream)), names))
}

/// Serves a connection until it is closed: by its caller, because it is too old, or after `stop`.
async fn serve_one<S, B>(
    stream: Stream,
    calls: TowerToHyperService<S>,
    age_max: Duration,
    stop: CancellationToken,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let opened = Arc::new(AtomicBool::new(false));
    let stream = Opened { stream, read_bytes: 0, opened: Arc::clone(&opened) };
    let mut connection = pin!(protocol().serve_connection(TokioIo::new(stream), calls));
    let mut timer = pin!(sleep(OPENING_TIMEOUT.min(age_max)));
    let (too_old, mut stage) = (Instant::now() + age_max, Stage::Opening);
    loop {
        select! {
            biased;
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(error = &error as &dyn Error, "a connection has failed");
                }
                return;
            }
            () = stop.cancelled(), if stage != Stage::Closing => {
                stage = Stage::Closing;
                connection.as_mut().graceful_shutdown();
                timer.as_mut().reset(Instant::now() + CLOSING_TIMEOUT);
            }
            () = &mut timer => match stage {
                Stage::Opening if !opened.load(Relaxed) => return,
                Stage::Opening => {
                    stage = Stage::Open;
                    timer.as_mut().reset(too_old);
                }
                Stage::Open => {
                    stage = Stage::Closing;
                    connection.as_mut().graceful_shutdown();
                    timer.as_mut().reset(Instant::now() + CLOSING_TIMEOUT);
                }
                Stage::Closing => return,
            }
        }
    }
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opening,
    Open,
    /// No more calls are taken.
    Closing,
}

fn protocol() -> http2::Builder<TokioExecutor> {
    let mut protocol = http2::Builder::new(TokioExecutor::new());
    protocol
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_local_error_reset_streams(ERROR_RESETS_MAX);
    protocol
}

fn age(age_max: Duration) -> Duration {
    age_max.mul_f64(1.0 + AGE_JITTER_FRACTION * rand::random_range(-1.0..=1.0))
}

/// What the bytes of a connection come through.
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A stream, and whether anything of use has come through it.
struct Opened {
    stream: Stream,
    read_bytes: usize,
    opened: Arc<AtomicBool>,
}

impl AsyncRead for Opened {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(context, buffer),
        };
        if self.read_bytes < OPENING_BYTES {
            self.read_bytes += buffer.filled().len() - before;
            self.opened.store(self.read_bytes >= OPENING_BYTES, Relaxed);
        }
        read
    }
}

impl AsyncWrite for Opened {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_differ_by_a_tenth_at_most() {
        let ages: Vec<_> = (0..1_000).map(|_| age(Duration::from_secs(100)).as_secs_f64()).collect();
        assert!(ages.iter().all(|age| (90.0..=110.0).contains(age)), "{ages:?}");
        assert!(ages.iter().any(|age| *age < 95.0) && ages.iter().any(|age| *age > 105.0));
    }
}
