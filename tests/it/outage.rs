//! Redis is gone, in each of the ways in which that happens: every call is answered at once, each change is said once, and
//! all that was acknowledged is counted afterwards.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use quota_share::clock::SystemClock;
use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tonic::Code;

use crate::{
    harness::{
        Client, Proxy, TestProcess, TestRedis, TestServer, UNREACHABLE, ask, dimension, hard,
        pb::{self, enforce_response::Decision, pool::FailureMode, settings::StoreDriver},
        pool, redis_is_missing, refusal, requests, spent, tokens, told,
    },
    redis_team::until,
};

/// The machine's clock runs here, so the window is one whose bucket does not end during a test.
const WINDOW: &str = "tokens/366d";
/// For a machine that does much else.
const SLACK: Duration = Duration::from_secs(15);
/// How long it may take until decisions are normal again.
const RETURN: Duration = Duration::from_secs(2);

const MODES: [(&str, FailureMode, Decision); 3] = [
    ("c1", FailureMode::FailOpen, Decision::Allow),
    ("c2", FailureMode::FailClosed, Decision::Block),
    ("c3", FailureMode::FailLocal, Decision::Allow),
];

/// A pool of each failure mode, named after its connection, of which the service has heard.
async fn create_pools(client: &Client) {
    for (connection, mode, _) in MODES {
        client.put_plan(connection, [dimension(WINDOW, 9e15)]).await;
        client.create(pool(connection, [connection], [hard("A", 100.0)]).failing(mode)).await;
    }
    client.until_counters_are_in_reach().await;
    for (connection, ..) in MODES {
        until("it is heard of", async || !client.enforce("A", connection, tokens(1)).await.degraded).await;
    }
}

async fn durable_redis() -> TestRedis {
    TestRedis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await
}

/// More than the default, so that a machine that does much else is no outage.
const BUDGET_MS: &str = "300";

async fn process_on(url: &str) -> TestProcess {
    let vars = [
        ("QUOTA_STORE_DRIVER", "redis"),
        ("QUOTA_STORE_REDIS_URL", url),
        ("QUOTA_STORE_TIMEOUT_MS", BUDGET_MS),
    ];
    let process = TestProcess::start_with(&vars).await;
    create_pools(&process).await;
    process
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Killed,
    StandsStill,
    NeverAnswers,
    Cut,
}

impl Fault {
    async fn begin(self, redis: &mut TestRedis, line: &mut Proxy) {
        match self {
            Fault::Killed => redis.kill(),
            Fault::StandsStill => redis.pause().await,
            Fault::NeverAnswers => line.hang(true),
            Fault::Cut => {
                line.refuse(true).await;
                line.cut().await;
            }
        }
    }

    async fn end(self, redis: &mut TestRedis, line: &mut Proxy) {
        match self {
            Fault::Killed => redis.restart().await,
            Fault::StandsStill => redis.wake(),
            Fault::NeverAnswers => line.hang(false),
            Fault::Cut => line.refuse(false).await,
        }
    }
}

/// Asks and records in every pool; the longest that an enforcement took.
async fn call_all(client: &Client, calls: i64, is_degraded: bool) -> Duration {
    let mut longest = Duration::ZERO;
    for _ in 0..calls {
        for (connection, _, want) in MODES {
            for hold in [false, true] {
                let asked = ask("A", connection, tokens(1));
                let asked = if hold { asked.holding(Duration::from_millis(1)) } else { asked };
                let began = Instant::now();
                let answer = told(client.quota().enforce(asked).await);
                longest = longest.max(began.elapsed());
                if is_degraded {
                    assert_eq!((answer.decision(), answer.degraded), (want, true), "{answer:?}");
                }
            }
            let recorded = client.record("A", connection, tokens(1)).await;
            assert!(recorded.journaled || !is_degraded, "{recorded:?}");
        }
    }
    longest
}

/// That Redis is out of reach is known, and not only that a call has waited for too long.
fn has_said_so(process: &TestProcess, outages: usize) -> bool {
    process.log().lines().filter(|line| line.contains("Redis is out of reach")).count() == outages
}

async fn outages_are_said_once(fault: Fault) {
    const CALLS: i64 = 40;
    const ROUNDS: usize = 2;
    let mut redis = durable_redis().await;
    let mut line = Proxy::to(redis.address()).await;
    let process = process_on(&line.url()).await;
    let mut recorded = 0;
    for round in 1..=ROUNDS {
        fault.begin(&mut redis, &mut line).await;
        let began = Instant::now();
        let mut longest = Duration::ZERO;
        while !has_said_so(&process, round) {
            longest = longest.max(call_all(&process, 1, false).await);
            recorded += 1;
        }
        let entered = began.elapsed();
        let longest_degraded = call_all(&process, CALLS, true).await;
        recorded += CALLS;
        assert!(longest.max(longest_degraded) < SLACK, "{fault:?}: {longest:?}, {longest_degraded:?}");
        fault.end(&mut redis, &mut line).await;
        let back = Instant::now();
        for (connection, ..) in MODES {
            until("it is back", async || !process.enforce("A", connection, tokens(1)).await.degraded).await;
        }
        let took = back.elapsed();
        println!(
            "{fault:?}: degraded after {entered:?}; an Enforce took {longest:?} before and {longest_degraded:?} \
             then at most; normal after {took:?}"
        );
        assert!(took < RETURN + SLACK, "{fault:?}: {took:?}");
        process.until_the_journal_is_empty().await;
        for (connection, ..) in MODES {
            assert_eq!(process.used(connection, WINDOW).await.0, recorded as f64, "{fault:?}: {connection}");
        }
        // A decision is normal before the log says so.
        let says_so = || process.log().lines().filter(|line| line.contains("Redis answers again")).count();
        until("it says that Redis is back", async || says_so() >= round).await;
        let log = process.log();
        let loud = ["\"level\":\"WARN\"", "\"level\":\"ERROR\""];
        let said: Vec<_> = log.lines().filter(|line| loud.iter().any(|level| line.contains(level))).collect();
        let of = |what: &str| said.iter().filter(|line| line.contains(what)).count();
        let changes = (of("Redis is out of reach"), of("Redis answers again"));
        assert_eq!((changes, said.len()), ((round, round), 2 * round), "{fault:?}: {said:#?}");
    }
    let lines = process.log().lines().count();
    assert!(lines < 60, "{lines} lines of log for {recorded} records and twice as many decisions");
}

#[tokio::test]
async fn whichever_way_redis_goes_every_call_is_answered_and_each_change_is_said_once() {
    if redis_is_missing() {
        return;
    }
    let faults = [Fault::Killed, Fault::StandsStill, Fault::NeverAnswers, Fault::Cut];
    join_all(faults.map(outages_are_said_once)).await;
}

/// With a budget of a minute for each call: whatever waited for Redis would be noticed.
#[tokio::test]
async fn once_degraded_no_call_waits_for_redis() {
    if redis_is_missing() {
        return;
    }
    for fault in [Fault::Killed, Fault::StandsStill, Fault::NeverAnswers, Fault::Cut] {
        let mut redis = TestRedis::start().await;
        let mut line = Proxy::to(redis.address()).await;
        let server = TestServer::start_on(&line.url(), Arc::new(SystemClock)).await;
        create_pools(&server).await;
        let held = server.reserve("A", "c1", tokens(1)).await.reservation_id;
        fault.begin(&mut redis, &mut line).await;
        // Somebody has to find out.
        let waiting = {
            let client = server.another_client().await;
            tokio::spawn(async move { client.quota().enforce(ask("A", "c1", None)).await })
        };
        let began = Instant::now();
        server.status().await;
        assert!(began.elapsed() < Duration::from_secs(4), "GetStatus took {:?}", began.elapsed());
        until("it is degraded", async || server.status().await.degraded).await;
        let began = Instant::now();
        call_all(&server, 3, true).await;
        assert!(server.settle("A", "c1", &held, tokens(1)).await.journaled);
        server.preview(ask("A", "c1", None)).await;
        assert!(began.elapsed() < Duration::from_secs(30), "{fault:?}: {:?}", began.elapsed());
        waiting.abort();
    }
}

/// What is wrong with a Redis, by its own word, how that comes about, and how it ends.
async fn has_its_own_word(word: &str, begin: &[&[&str]], end: &[&[&str]]) {
    let redis = TestRedis::start().await;
    let process = process_on(&redis.url()).await;
    process.record("A", "c1", tokens(1)).await;
    let hash =
        format!("quota-share:1:{{{}}}", process.get_pool("c1").await.pool.expect("it is there").revision);
    let run = async |orders: &[&[&str]]| {
        for order in orders {
            let order: Vec<_> =
                order.iter().map(|part| if *part == "HASH" { &*hash } else { part }).collect();
            redis.cli(&order).await;
        }
    };
    run(begin).await;
    let mut recorded = 0;
    until(&format!("{word} is said"), async || {
        recorded += 1;
        process.record("A", "c1", tokens(1)).await;
        process.log().contains(word)
    })
    .await;
    for _ in 0..50 {
        recorded += 1;
        process.record("A", "c1", tokens(1)).await;
        assert!(process.enforce("A", "c1", None).await.degraded, "{word}");
    }
    let log = process.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains(word)).collect();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    run(end).await;
    until("it is back", async || !process.enforce("A", "c1", None).await.degraded).await;
    process.until_the_journal_is_empty().await;
    let (used, all) = (process.used("c1", WINDOW).await.0, f64::from(1 + recorded));
    // What was deleted is sent again where that was within ten seconds.
    let was_deleted = word == "WRONGTYPE";
    assert!(used == all || (was_deleted && used == all - 1.0), "{word}: {used} of {all}");
}

#[tokio::test]
async fn what_is_wrong_with_redis_is_said_by_its_own_word() {
    if redis_is_missing() {
        return;
    }
    tokio::join!(
        has_its_own_word(
            "OOM",
            &[&["CONFIG", "SET", "maxmemory", "1"]],
            &[&["CONFIG", "SET", "maxmemory", "0"]]
        ),
        has_its_own_word("READONLY", &[&["REPLICAOF", "127.0.0.1", "1"]], &[&["REPLICAOF", "NO", "ONE"]]),
        has_its_own_word("WRONGTYPE", &[&["SET", "HASH", "somebody else's"]], &[&["DEL", "HASH"]]),
        has_its_own_word(
            "NOAUTH",
            &[
                &["CONFIG", "SET", "requirepass", "secret"],
                &["-a", "secret", "CLIENT", "KILL", "TYPE", "normal"]
            ],
            &[&["-a", "secret", "CONFIG", "SET", "requirepass", ""]],
        ),
    );
}

async fn sql(data_dir: &Path, statements: &[&'static str]) {
    let options = SqliteConnectOptions::new().filename(data_dir.join("storage.sqlite"));
    let mut connection: SqliteConnection =
        options.connect().await.expect("the database opens beside the service");
    for statement in statements {
        sqlx::query(*statement).execute(&mut connection).await.expect("the statement is valid");
    }
    connection.close().await.expect("nothing is left to write");
}

const FILL: [&str; 3] = [
    "CREATE TRIGGER full_1 BEFORE INSERT ON journal BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
    "CREATE TRIGGER full_2 BEFORE UPDATE ON journal BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
    "CREATE TRIGGER full_3 BEFORE DELETE ON journal BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
];
const EMPTY: [&str; 3] = ["DROP TRIGGER full_1", "DROP TRIGGER full_2", "DROP TRIGGER full_3"];

#[tokio::test]
async fn a_disk_that_fills_up_while_redis_is_gone_acknowledges_nothing() {
    if redis_is_missing() {
        return;
    }
    let mut redis = durable_redis().await;
    let process = process_on(&redis.url()).await;
    let mut held = String::new();
    until("it is held", async || {
        held = process.reserve("A", "c1", tokens(7)).await.reservation_id;
        !held.is_empty()
    })
    .await;
    redis.kill();
    for _ in 0..20 {
        assert!(process.record("A", "c1", tokens(1)).await.journaled);
    }
    sql(process.data_dir(), &FILL).await;
    let record = |n: i32| spent("A", "c1", tokens(100)).once(&format!("key {n}"));
    let settle = || spent("A", "c1", tokens(5)).settling(&held);
    for n in 0..20 {
        let refused = refusal(process.quota().record_consumption(record(n)).await);
        assert_eq!((refused.code, refused.reason.as_str()), (Code::Unavailable, "STORE_UNAVAILABLE"));
        assert!(refused.message.contains("the journal"), "{}", refused.message);
    }
    refusal(process.quota().record_consumption(settle()).await);
    let release = pb::ReleaseReservationRequest { reservation_id: held.clone(), api_key_id: String::new() };
    refusal(process.quota().release_reservation(release).await);
    let answer = process.enforce("A", "c1", None).await;
    assert_eq!((answer.decision(), answer.degraded), (Decision::Allow, true), "decisions go on");

    // Redis is back before the disk is.
    redis.restart().await;
    process.until_counters_are_in_reach().await;
    let mut acknowledged = 0;
    for n in 0..10 {
        acknowledged += i32::from(process.quota().record_consumption(record(n)).await.is_ok());
    }
    assert_eq!(process.status().await.journal_length, 20);
    sql(process.data_dir(), &EMPTY).await;
    process.until_the_journal_is_empty().await;
    for n in 0..20 {
        told(process.quota().record_consumption(record(n)).await);
    }
    assert!(!told(process.quota().record_consumption(settle()).await).duplicate);
    assert_eq!(process.used("c1", WINDOW).await, (2_025.0, 0.0), "{acknowledged} while the disk was full");
    let log = process.log();
    let said = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    assert_eq!((said("the disk takes no writes"), said("the disk takes writes again")), (1, 1), "{log}");
}

fn redis_at(url: &str) -> pb::Settings {
    pb::Settings { store_driver: StoreDriver::Redis.into(), redis_url: url.to_owned(), ..Default::default() }
}

#[tokio::test]
async fn a_stored_url_of_a_dead_redis_is_corrected_while_records_wait() {
    if redis_is_missing() {
        return;
    }
    let mut server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.update_settings(redis_at(UNREACHABLE), &[]).await;
    for n in 0..50 {
        let record = spent("A", "c1", requests(1)).once(&format!("key {}", n % 40));
        assert!(told(server.quota().record_consumption(record).await).journaled);
    }
    // The setting is stored, and so is the journal.
    server.restart().await;
    assert!(server.status().await.degraded);
    assert!(server.record("A", "c1", requests(2)).await.journaled);
    server.update_settings(redis_at(&TestRedis::database_of_ones_own().await), &[]).await;
    server.until_counters_are_in_reach().await;
    server.until_the_journal_is_empty().await;
    assert_eq!(server.used("p", "requests/hourly").await, (42.0, 0.0));
}

#[tokio::test]
async fn what_waits_for_a_dead_redis_is_counted_once_where_counters_are_kept_next() {
    if redis_is_missing() {
        return;
    }
    let mut redis = durable_redis().await;
    let server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    let used = async || server.used("p", "requests/hourly").await;
    let to_sqlite = || pb::Settings { store_driver: StoreDriver::Sqlite.into(), ..Default::default() };
    server.update_settings(redis_at(&redis.url()), &[]).await;
    server.until_counters_are_in_reach().await;
    server.record("A", "c1", requests(1)).await;
    server.until_the_journal_is_empty().await;
    redis.kill();
    for _ in 0..30 {
        assert!(server.record("A", "c1", requests(1)).await.journaled);
    }
    server.update_settings(to_sqlite(), &[]).await;
    server.until_the_journal_is_empty().await;
    assert_eq!(used().await, (30.0, 0.0), "nothing is copied, and nothing is lost");
    server.record("A", "c1", requests(100)).await;
    assert_eq!(used().await, (130.0, 0.0));

    redis.restart().await;
    server.update_settings(redis_at(&redis.url()), &[]).await;
    server.until_counters_are_in_reach().await;
    assert_eq!(used().await, (1.0, 0.0));
    redis.kill();
    assert!(server.record("A", "c1", requests(10)).await.journaled);
    redis.restart().await;
    server.until_counters_are_in_reach().await;
    server.until_the_journal_is_empty().await;
    assert_eq!(used().await, (11.0, 0.0));
    server.update_settings(to_sqlite(), &[]).await;
    assert_eq!(used().await, (130.0, 0.0), "what Redis has counted is not brought again");
}
