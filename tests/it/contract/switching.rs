//! Another driver takes over while the service runs.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use futures::future::join_all;
use tokio::time::timeout;

use crate::harness::{
    Client, TestServer, ask, dimension, hard, pb,
    pb::{
        Settings,
        settings::StoreDriver::{self, Redis, Sqlite},
    },
    pool, redis_is_missing, requests, spent, tokens, told,
};

const DAILY: &str = "tokens/daily";
/// Far more than any call takes here.
const HANGS: Duration = Duration::from_secs(30);

/// What was acknowledged by calls that went on all the time.
#[derive(Debug, Default)]
struct Acknowledged {
    records: AtomicU64,
    holds: AtomicU64,
    /// Decisions without counters.
    degraded: AtomicU64,
    refused: AtomicU64,
}

/// Records, reserves and checks without a pause until `stop`.
async fn call_until(client: Client, acknowledged: &Acknowledged, stop: &AtomicBool) {
    let count = |count: &AtomicU64| count.fetch_add(1, Ordering::Relaxed);
    while !stop.load(Ordering::Relaxed) {
        let record = client.quota().record_consumption(spent("A", "c1", tokens(1))).await;
        match record {
            Ok(_) => count(&acknowledged.records),
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}");
                assert!(status.message().contains("could not be reached"), "{status:?}");
                count(&acknowledged.refused)
            }
        };
        let hold = ask("A", "c1", tokens(1)).holding(Duration::from_secs(600));
        for request in [hold, ask("A", "c1", tokens(1))] {
            let answer = told(client.quota().enforce(request).await);
            if answer.degraded {
                count(&acknowledged.degraded);
            } else if !answer.reservation_id.is_empty() {
                count(&acknowledged.holds);
            }
        }
    }
}

#[tokio::test]
async fn no_acknowledged_call_is_lost_and_none_hangs_while_drivers_take_turns() {
    const CLIENTS: usize = 8;
    const TURNS: usize = 5;
    let mut server = TestServer::start_on_sqlite().await;
    server.put_plan("c1", [dimension(DAILY, 1e9)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    let (acknowledged, stop) = (Acknowledged::default(), AtomicBool::new(false));
    let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let clients = join_all((0..CLIENTS).map(|_| server.another_client())).await;
    let calls = join_all(clients.into_iter().map(|client| call_until(client, &acknowledged, &stop)));
    let turns = async {
        for _ in 0..TURNS {
            for (driver, moves) in [(Redis, &acknowledged.degraded), (Sqlite, &acknowledged.records)] {
                server.switch_to(driver).await;
                // Until the new driver has answered calls.
                let before = read(moves);
                while read(moves) < before + 20 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    };
    let both = async { tokio::join!(calls, turns) };
    timeout(HANGS, both).await.expect("no call hangs");

    assert_eq!(read(&acknowledged.refused), 0, "{acknowledged:?}");
    server.until_the_journal_is_empty().await;
    let counted = (read(&acknowledged.records) as f64, read(&acknowledged.holds) as f64);
    assert_eq!(server.used("p", DAILY).await, counted, "{acknowledged:?}");
    server.restart().await;
    assert_eq!(server.used("p", DAILY).await, counted, "{acknowledged:?}");
}

#[tokio::test]
async fn what_was_acknowledged_is_counted_on_one_side_or_the_other_while_drivers_take_turns() {
    const CLIENTS: usize = 8;
    const TURNS: usize = 5;
    if redis_is_missing() {
        return;
    }
    let server = TestServer::start_on_redis().await;
    server.put_plan("c1", [dimension(DAILY, 1e9)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    let (acknowledged, stop) = (Acknowledged::default(), AtomicBool::new(false));
    let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let turn_to = async |driver: StoreDriver| {
        let settings = Settings { store_driver: driver.into(), ..Default::default() };
        server.update_settings(settings, &[]).await;
        server.until_counters_are_in_reach().await;
    };
    let clients = join_all((0..CLIENTS).map(|_| server.another_client())).await;
    let calls = join_all(clients.into_iter().map(|client| call_until(client, &acknowledged, &stop)));
    let turns = async {
        for _ in 0..TURNS {
            for driver in [Sqlite, Redis] {
                turn_to(driver).await;
                let before = read(&acknowledged.records);
                while read(&acknowledged.records) < before + 20 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    };
    let both = async { tokio::join!(calls, turns) };
    timeout(HANGS, both).await.expect("no call hangs");

    assert_eq!(read(&acknowledged.refused), 0, "{acknowledged:?}");
    server.until_the_journal_is_empty().await;
    let in_redis = server.used("p", DAILY).await;
    turn_to(Sqlite).await;
    let in_sqlite = server.used("p", DAILY).await;
    assert!(in_redis.0 > 0.0 && in_sqlite.0 > 0.0, "{in_redis:?} {in_sqlite:?}");
    let counted = (read(&acknowledged.records) as f64, read(&acknowledged.holds) as f64);
    assert_eq!((in_redis.0 + in_sqlite.0, in_redis.1 + in_sqlite.1), counted, "{acknowledged:?}");
}

#[tokio::test]
async fn what_sqlite_has_kept_is_there_when_it_is_chosen_again() {
    let mut server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.create(pool("q", ["c2"], [hard("A", 100.0)]).with_provider("kimi")).await;
    let record = || spent("A", "c1", requests(5)).once("once");
    told(server.quota().record_consumption(record()).await);
    let held = server.reserve("A", "c1", requests(3)).await.reservation_id;
    let sees = async |line: &str| {
        let metrics = server.page("/metrics").await.1;
        assert!(metrics.contains(line), "{line} in {metrics}");
    };
    sees("quota_share_reservations_open 1").await;

    server.switch_to(Redis).await;
    sees("quota_share_reservations_open 0").await;

    server.switch_to(Sqlite).await;
    assert!(server.delete_pool("q").await);
    server.create(pool("q", ["c2"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.create(pool("r", ["c3"], [hard("A", 100.0)]).with_provider("kimi")).await;
    sees("quota_share_reservations_open 1").await;
    assert_eq!(server.used("p", "requests/hourly").await, (5.0, 3.0));
    assert!(told(server.quota().record_consumption(record()).await).duplicate);
    assert!(!server.settle("A", "c1", &held, requests(2)).await.reservation_expired);
    server.record("A", "c3", requests(1)).await;
    sees("quota_share_reservations_ended_total{how=\"settled\"} 1").await;
    assert!(server.delete_pool("r").await);
    server.restart().await;
    assert_eq!(server.used("p", "requests/hourly").await, (7.0, 0.0));
    assert_eq!(server.used("q", "requests/hourly").await, (0.0, 0.0));
    assert_eq!(server.reservations("p").await, Vec::<pb::Reservation>::new());
}
