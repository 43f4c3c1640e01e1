//! Replicas are replaced one after the other while routers go on calling.

use std::{
    error::Error,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use futures::future::join_all;
use nix::sys::signal::Signal;
use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::net::TcpStream;
use tonic::{Code, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;

use crate::{
    harness::{
        Client, TestProcess, TestRedis, TestReplica, ask, dimension, hard, pb, pool, redis_is_missing, spent,
        tokens, told,
    },
    shared_configuration::until,
};

const CLIENTS: usize = 16;
/// As deploy/service-config.json has it.
const ATTEMPTS_MAX: usize = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(100);
const WINDOW: &str = "tokens/366d";

/// A router: round robin over all replicas, and three attempts where one is not there, each at another one: a client of
/// gRPC does not choose again what has just refused its connection.
struct Router<'a> {
    replicas: &'a [Client],
    next: &'a AtomicUsize,
}

impl Router<'_> {
    async fn call<T>(&self, call: impl AsyncFn(&Client) -> Result<Response<T>, Status>) -> Result<T, Status> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let mut attempt = 1;
        loop {
            match call(&self.replicas[(turn + attempt) % self.replicas.len()]).await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) if is_retried(&status) && attempt < ATTEMPTS_MAX => {
                    attempt += 1;
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(status) => return Err(status),
            }
        }
    }
}

/// UNAVAILABLE, or no answer of a server: tonic says CANCELLED of a call whose connection was closed before it was sent.
fn is_retried(status: &Status) -> bool {
    status.code() == Code::Unavailable || status.source().is_some()
}

/// Reserves, settles and records until `stop`; returns how many tokens were acknowledged.
async fn route(router: Router<'_>, name: usize, stop: &AtomicBool, calls: &AtomicU64) -> u64 {
    let mut acknowledged = 0;
    for turn in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let request = ask("A", "c1", tokens(3)).holding(Duration::from_secs(60));
        let held = router.call(async |replica| replica.quota().enforce(request.clone()).await).await;
        let held = held.unwrap_or_else(|status| panic!("a failed call: {status:?}"));
        let record = match held.reservation_id.as_str() {
            "" => spent("A", "c1", tokens(2)).once(&format!("{name} {turn}")),
            id => spent("A", "c1", tokens(2)).settling(id),
        };
        let recorded = router.call(async |replica| replica.quota().record_consumption(record.clone()).await);
        recorded.await.unwrap_or_else(|status| panic!("a failed call: {status:?}"));
        acknowledged += 2;
        calls.fetch_add(2, Ordering::Relaxed);
    }
    acknowledged
}

#[tokio::test]
async fn a_rolling_restart_under_load_fails_no_call_and_loses_no_record() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start_with(&["--appendonly", "yes"]).await;
    let url = redis.url();
    let vars = [("QUOTA_SHUTDOWN_DELAY_SECONDS", "1"), ("QUOTA_STORE_TIMEOUT_MS", "2000")];
    let mut replicas = [
        TestReplica::start(&url, &vars).await,
        TestReplica::start(&url, &vars).await,
        TestReplica::start(&url, &vars).await,
    ];
    let clients: Vec<Client> = replicas.iter().map(TestReplica::client).collect();
    clients[0].put_plan("c1", [dimension(WINDOW, 1e9)]).await;
    clients[0].create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    for client in &clients[1..] {
        client.until_it_follows(&clients[0]).await;
    }

    let (stop, calls, next) = (AtomicBool::new(false), AtomicU64::new(0), AtomicUsize::new(0));
    let routers = (0..CLIENTS).map(|name| {
        let router = Router { replicas: &clients, next: &next };
        route(router, name, &stop, &calls)
    });
    let rolling = async {
        for replica in &mut replicas {
            let before = calls.load(Ordering::Relaxed);
            // What the orchestrator does: end it, wait for its end, start it anew.
            replica.stop().await;
            replica.restart().await;
            replica.client().until_counters_are_in_reach().await;
            assert!(calls.load(Ordering::Relaxed) > before, "the others went on");
        }
        stop.store(true, Ordering::Relaxed);
    };
    let (acknowledged, ()) = tokio::join!(join_all(routers), rolling);
    let acknowledged: u64 = acknowledged.iter().sum();
    println!("{} calls", calls.load(Ordering::Relaxed));
    for client in &clients {
        client.until_the_journal_is_empty().await;
        assert_eq!(client.used("p", WINDOW).await, (acknowledged as f64, 0.0));
        let found: Vec<pb::Reservation> = client.reservations("p").await;
        assert!(found.is_empty(), "{found:?}");
    }
}

/// Load balancers may send it calls until the delay is over, and those are to be decided as on the other replicas.
#[tokio::test]
async fn a_replica_that_is_about_to_end_follows_changes_for_as_long_as_it_serves() {
    if redis_is_missing() {
        return;
    }
    let url = TestRedis::database_of_ones_own().await;
    let mut ending = TestReplica::start(&url, &[("QUOTA_SHUTDOWN_DELAY_SECONDS", "300")]).await;
    let other = TestReplica::start(&url, &[]).await;
    let (client, admin) = (ending.client(), other.client());
    client.until_it_follows(&admin).await;
    ending.signal(Signal::SIGTERM);
    client.until_health_is(ServingStatus::NotServing).await;
    admin.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    client.until_it_follows(&admin).await;
    assert_eq!(client.get_pool("p").await.pool, admin.get_pool("p").await.pool);
    ending.kill();
}

/// A process with one pool, which is told how long load balancers take to notice that it ends.
async fn process_with_a_pool(delay_seconds: &str) -> TestProcess {
    let process = TestProcess::start_with(&[("QUOTA_SHUTDOWN_DELAY_SECONDS", delay_seconds)]).await;
    process.put_plan("c1", [dimension(WINDOW, 1e9)]).await;
    process.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    process
}

/// For longer than the test takes.
#[tokio::test]
async fn told_to_end_a_replica_says_so_and_answers_on_until_load_balancers_have_noticed() {
    let process = process_with_a_pool("60").await;
    process.signal(Signal::SIGTERM);
    until("it says so", async || !process.is_serving().await).await;
    let late = Client::connect(process.address()).await;
    assert_eq!(late.enforce("A", "c1", None).await.pool_id, "p");
    late.record("A", "c1", tokens(7)).await;
    assert_eq!(process.used("p", WINDOW).await, (7.0, 0.0));
}

/// Another process has the database's lock, so that a call is under way for as long as the test wants.
#[tokio::test]
async fn told_to_end_a_replica_takes_no_new_call_and_finishes_those_that_are_under_way() {
    let mut process = process_with_a_pool("0").await;
    let options = SqliteConnectOptions::new().filename(process.data_dir().join("storage.sqlite"));
    let mut other: SqliteConnection = options.connect().await.expect("the database opens beside the process");
    sqlx::query("BEGIN IMMEDIATE").execute(&mut other).await.expect("nobody writes");
    let mut quota = process.quota();
    let record = tokio::spawn(async move { quota.record_consumption(spent("A", "c1", tokens(7))).await });
    until("it is under way", async || process.used("p", WINDOW).await.0 == 7.0).await;
    process.signal(Signal::SIGTERM);
    until("it takes no call", async || TcpStream::connect(process.address()).await.is_err()).await;
    assert!(!record.is_finished(), "it waits for the lock");
    sqlx::query("ROLLBACK").execute(&mut other).await.expect("it is in a transaction");
    other.close().await.expect("nothing is left to write");

    told(record.await.expect("it does not panic"));
    assert_eq!(process.ended().await, Some(0), "{}", process.log());
    process.restart().await;
    assert_eq!(process.used("p", WINDOW).await, (7.0, 0.0));
}
