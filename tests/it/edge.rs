//! The limits of the edge: calls in flight, deadlines, sizes, the age of connections, and crowds that mean no good.

use std::{
    error::Error,
    io::Write,
    net::{SocketAddr, TcpStream as StdStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use futures::future::join_all;
use hyper_util::rt::TokioIo;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use prost::Message;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::{
    Code, Request, Status,
    codegen::http::{self, HeaderMap},
    transport::Endpoint,
};

use crate::harness::{
    Client, Frames, PATIENCE, TestProcess, TestServer, ask, hang_raw, hard, pb, pool, refusal, requests,
    spent, told,
};

const ENFORCE: &str = "/quotashare.v1.QuotaShare/Enforce";
const RECORD: &str = "/quotashare.v1.QuotaShare/RecordConsumption";
const CROWD: usize = 1_000;
/// The error of HTTP/2 for whoever asks too much.
const ENHANCE_YOUR_CALM: u32 = 11;

/// A server with a pool, and something else than the defaults.
async fn server_with(change: impl FnOnce(&mut quota_share::config::Config)) -> TestServer {
    let mut server = TestServer::start_on_sqlite().await;
    server.restart_with(change).await;
    server.create(pool("team", ["c1"], [hard("A", 50.0)]).with_provider("kimi")).await;
    server
}

#[tokio::test]
async fn calls_that_are_too_many_are_told_to_come_back_and_others_have_room_of_their_own() {
    let server = server_with(|config| config.max_calls_in_flight = 2).await;
    // Calls whose messages do not come.
    let hanging: Vec<_> = (0..2).map(|_| tokio::spawn(hang_raw(server.channel(), ENFORCE))).collect();
    let asked = Instant::now();
    let refused = loop {
        match server.quota().enforce(ask("A", "c1", None)).await {
            Err(status) => break refusal::<()>(Err(status)),
            Ok(_) => assert!(asked.elapsed() < PATIENCE, "there is room for all"),
        }
    };
    assert_eq!((refused.code, refused.reason.as_str()), (Code::Unavailable, "OVERLOADED"), "{refused:?}");
    assert!(refused.has_retry_info && refused.message.contains("QUOTA_MAX_CALLS_IN_FLIGHT"), "{refused:?}");
    let refused = refusal(server.quota().record_consumption(spent("A", "c1", requests(1))).await);
    assert_eq!(refused.code, Code::Unavailable);
    assert!(server.is_serving().await);
    assert_eq!(server.list_pools().await.len(), 1);
    assert_eq!(server.preview(ask("A", "c1", None)).await.pool_id, "team");

    // Given up by their callers, they leave their room.
    for call in hanging {
        call.abort();
    }
    let asked = Instant::now();
    while server.quota().enforce(ask("A", "c1", None)).await.is_err() {
        assert!(asked.elapsed() < PATIENCE, "the room stays taken");
    }
    assert_eq!(server.used("team", "requests/hourly").await, (0.0, 0.0), "what was refused had no effect");
}

/// Sends a call as a client library would, but for the deadline, which it would look after itself.
async fn call_until(address: SocketAddr, path: &str, timeout: &str, message: Option<Vec<u8>>) -> HeaderMap {
    let stream = TcpStream::connect(address).await.expect("the server accepts connections");
    let (sender, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    let request = http::Request::post(format!("http://{address}{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-timeout", timeout)
        .body(())
        .expect("a request");
    let mut sender = sender.ready().await.expect("a connection");
    let (answer, mut body) = sender.send_request(request, false).expect("a stream");
    if let Some(message) = message {
        let length = u32::try_from(message.len()).expect("a small message").to_be_bytes();
        let framed = [&[0][..], &length, &message].concat();
        // An answer may have come before.
        let _ = body.send_data(framed.into(), true);
    }
    answer.await.expect("an answer").headers().clone()
}

#[tokio::test]
async fn a_call_whose_deadline_has_passed_is_not_begun_and_one_that_lasts_longer_is_ended() {
    let server = server_with(|_| {}).await;
    let message = spent("A", "c1", requests(5)).encode_to_vec();
    // until when | message | words
    let cases = [("0m", Some(message), "nothing was done"), ("20m", None, "before there was an answer")];
    for (timeout, message, words) in cases {
        let headers = call_until(server.address(), RECORD, timeout, message).await;
        let status = Status::from_header_map(&headers).expect("a status");
        assert_eq!(status.code(), Code::DeadlineExceeded, "{timeout}: {status:?}");
        assert!(status.message().contains(words), "{timeout}: {status:?}");
    }
    assert_eq!(server.used("team", "requests/hourly").await, (0.0, 0.0));
    let message = spent("A", "c1", requests(5)).encode_to_vec();
    let headers = call_until(server.address(), RECORD, "1H", Some(message)).await;
    assert!(Status::from_header_map(&headers).is_none_or(|status| status.code() == Code::Ok), "{headers:?}");
    assert_eq!(server.used("team", "requests/hourly").await, (5.0, 0.0));
}

#[tokio::test]
async fn messages_and_headers_that_are_too_large_are_refused_and_the_rest_goes_on() {
    let server = server_with(|_| {}).await;
    let mut record = spent("A", "c1", requests(1));
    record.provider_headers.insert("x-large".to_owned(), "x".repeat(300 * 1_024));
    let refused = refusal(server.quota().record_consumption(record).await);
    assert_eq!(refused.code, Code::OutOfRange, "{refused:?}");
    let mut request = Request::new(ask("A", "c1", None));
    request.metadata_mut().insert("x-large", "x".repeat(32 * 1_024).parse().expect("a value"));
    server.quota().enforce(request).await.expect_err("headers are too large");
    assert!(server.is_serving().await);
    assert_eq!(server.used("team", "requests/hourly").await, (0.0, 0.0));
}

/// tonic's client gives up a call that waits to be sent when its connection closes, where others send it on the next one.
fn was_not_sent(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[tokio::test]
async fn connections_are_closed_when_they_are_old_and_no_call_fails() {
    let server = server_with(|config| config.max_connection_age_seconds = 1).await;
    let (address, made) = (server.address(), Arc::new(AtomicUsize::new(0)));
    let connector = tower::service_fn({
        let made = Arc::clone(&made);
        move |_| {
            made.fetch_add(1, Ordering::SeqCst);
            async move { Ok::<_, std::io::Error>(TokioIo::new(TcpStream::connect(address).await?)) }
        }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await.expect("the server accepts connections");
    let (asked, mut rounds, mut answered) = (Instant::now(), 0, 0);
    while made.load(Ordering::SeqCst) < 4 {
        let quota = pb::quota_share_client::QuotaShareClient::new(channel.clone());
        let calls = (0..8).map(|_| {
            let mut quota = quota.clone();
            async move { quota.enforce(ask("A", "c1", None)).await }
        });
        let mut sent = join_all(calls).await;
        sent.retain(|answer| !answer.as_ref().is_err_and(was_not_sent));
        answered += sent.into_iter().map(told).count();
        rounds += 1;
        assert!(asked.elapsed() < PATIENCE, "connections do not age");
    }
    assert!(answered > 7 * rounds, "{answered} of {} calls were sent", 8 * rounds);
}

/// Reads to the end, which comes because the server closes the connection.
async fn until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut read = Vec::new();
    let closed = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut read)).await;
    // An end and a reset both close it.
    let _ = closed.expect("the server closes the connection");
    read
}

#[tokio::test]
async fn a_connection_that_says_nothing_or_half_of_it_is_closed() {
    let server = server_with(|_| {}).await;
    let opening = Frames::opening().bytes;
    let said = [&[][..], &opening[..10], &opening[..opening.len() - 1], b"GET / HTTP/1.1\r\n\r\n"];
    let closed = said.map(async |said| {
        let mut stream = TcpStream::connect(server.address()).await.expect("the server accepts connections");
        stream.write_all(said).await.expect("it can be written");
        until_closed(stream).await;
    });
    join_all(closed).await;
    assert!(server.is_serving().await);
}

#[tokio::test]
async fn a_watcher_does_not_keep_an_old_connection_open_for_ever() {
    let server = server_with(|config| config.max_connection_age_seconds = 1).await;
    let client = server.another_client().await;
    let request = pb::WatchPoolUsageRequest { pool_id: "team".to_owned(), ..Default::default() };
    let mut usage = told(client.pools().watch_pool_usage(request).await);
    let ended = tokio::time::timeout(PATIENCE, async { while let Ok(Some(_)) = usage.message().await {} });
    ended.await.expect("it ends with its connection");
}

/// What a process has in memory, in bytes.
fn memory_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kilobytes * 1_024
}

/// Sends as much of `bytes` as is taken without being asked twice, and never reads.
fn push(address: SocketAddr, bytes: &[u8]) -> StdStream {
    let mut stream = StdStream::connect(address).expect("the server accepts connections");
    stream.set_nonblocking(true).expect("a socket");
    let mut rest = bytes;
    // The server may close the connection, or take no more.
    while let Ok(written) = stream.write(rest) {
        rest = &rest[written..];
        if rest.is_empty() {
            break;
        }
    }
    stream
}

/// A third says nothing, a third resets its calls at once, a third asks and does not read: there are 1,000 of them.
#[tokio::test]
async fn a_crowd_that_means_no_good_takes_no_memory_and_keeps_nobody_from_being_answered() {
    let (_, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, hard_limit, hard_limit).expect("it can be raised as far as this");
    let process = TestProcess::start().await;
    process.create(pool("team", ["c1"], [hard("A", 50.0)]).with_provider("kimi")).await;
    let before = memory_bytes(process.pid());

    let (mut resetting, mut asking) = (Frames::opening(), Frames::opening());
    let message = ask("A", "c1", None).encode_to_vec();
    for _ in 0..500 {
        resetting.call_and_reset(ENFORCE);
        asking.call(ENFORCE, &message);
    }
    let kinds = [&[][..], &resetting.bytes, &asking.bytes];
    let mut crowd = Vec::new();
    for number in 0..CROWD {
        crowd.push(push(process.address(), kinds[number % kinds.len()]));
        if number % 100 == 0 {
            assert!(process.is_serving().await);
            process.enforce("A", "c1", None).await;
        }
    }
    for _ in 0..20 {
        assert!(Client::connect(process.address()).await.is_serving().await, "also to who comes now");
        process.enforce("A", "c1", None).await;
    }
    let grown = memory_bytes(process.pid()).saturating_sub(before);
    println!("{CROWD} connections have taken {} KiB", grown / 1_024);
    assert!(grown < 100 << 20, "{CROWD} connections have taken {} MiB", grown >> 20);
    drop(crowd);
    process.enforce("A", "c1", None).await;
}

#[tokio::test]
async fn whoever_resets_all_calls_at_once_is_let_go() {
    let server = server_with(|_| {}).await;
    let mut frames = Frames::opening();
    (0..2_000).for_each(|_| frames.call_and_reset(ENFORCE));
    let mut stream = TcpStream::connect(server.address()).await.expect("the server accepts connections");
    // It may be closed before all is written.
    let _ = stream.write_all(&frames.bytes).await;
    let read = until_closed(stream).await;
    assert_eq!(farewell(&read), Some(ENHANCE_YOUR_CALM), "{}", read.escape_ascii());
    assert!(server.is_serving().await);
}

/// The error of a GOAWAY, by which HTTP/2 ends a connection.
fn farewell(mut frames: &[u8]) -> Option<u32> {
    const GOAWAY: u8 = 7;
    while let Some((head, rest)) = frames.split_at_checked(9) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let (payload, rest) = rest.split_at_checked(length)?;
        if head[3] == GOAWAY {
            return payload.get(4..8).map(|code| u32::from_be_bytes([code[0], code[1], code[2], code[3]]));
        }
        frames = rest;
    }
    None
}
