//! A process that dies with a full journal: what it has acknowledged is counted once when it comes back.

use std::time::Duration;

use futures::future::join_all;
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    harness::{
        Client, TestProcess, TestRedis, ask, dimension, hard, pb, pool, redis_is_missing, spent, tokens, told,
    },
    redis_team::until,
};

/// The machine's clock runs here, so the window is one whose bucket does not end during a test.
const WINDOW: &str = "tokens/366d";
const CALLERS: i64 = 8;
/// Of each caller: where there are to be many, and where there need not be.
const MANY: i64 = 300;
const SOME: i64 = 120;
const HELD: i64 = 10;
/// A third is settled, a third released, a third left open.
const RESERVATIONS: usize = 60;

/// With more time for Redis than a busy machine takes.
fn vars(url: &str) -> [(&str, &str); 3] {
    [("QUOTA_STORE_DRIVER", "redis"), ("QUOTA_STORE_REDIS_URL", url), ("QUOTA_STORE_TIMEOUT_MS", "1000")]
}

async fn durable_redis() -> TestRedis {
    TestRedis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await
}

async fn process_on(redis: &TestRedis) -> TestProcess {
    let process = TestProcess::start_with(&vars(&redis.url())).await;
    process.put_plan("c1", [dimension(WINDOW, 9e15)]).await;
    process.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)])).await;
    process.until_counters_are_in_reach().await;
    process
}

/// Fills the journal of a process whose Redis is gone: `(consumed, reserved)` when it has drained.
async fn fill_the_journal(process: &TestProcess, redis: &mut TestRedis, records: i64) -> (f64, f64) {
    process.record("A", "c1", tokens(5)).await;
    let mut reservations = Vec::new();
    for _ in 0..RESERVATIONS {
        let hold = ask("A", "c1", tokens(HELD)).holding(Duration::from_secs(3_600));
        let held = told(process.quota().enforce(hold).await);
        assert!(!held.degraded, "{held:?}");
        reservations.push(held.reservation_id);
    }
    redis.kill();
    let (settled, rest) = reservations.split_at(RESERVATIONS / 3);
    let (released, open) = rest.split_at(RESERVATIONS / 3);
    let recording = (0..CALLERS).map(|caller| async move {
        let client = Client::connect(process.address()).await;
        let mut sum = 0;
        for n in 0..records {
            let cost = 1 + caller * records + n;
            let mut record = spent("A", "c1", tokens(cost));
            if n % 2 == 0 {
                record = record.once(&format!("{caller}-{n}"));
            }
            if n % 10 == 0 {
                // A retry, which is none of a new record.
                told(client.quota().record_consumption(record.clone()).await);
            }
            told(client.quota().record_consumption(record).await);
            sum += cost;
        }
        sum
    });
    let settling = join_all(settled.iter().map(|id| process.settle("A", "c1", id, tokens(7))));
    let releasing = join_all(released.iter().map(|id| process.release(id)));
    let (sums, settled, _) = tokio::join!(join_all(recording), settling, releasing);
    assert!(settled.iter().all(|settled| settled.journaled && !settled.duplicate));
    let consumed = 5 + sums.iter().sum::<i64>() + 7 * settled.len() as i64;
    (consumed as f64, (HELD * open.len() as i64) as f64)
}

#[tokio::test]
async fn a_process_killed_with_a_full_journal_drains_it_when_it_is_back() {
    if redis_is_missing() {
        return;
    }
    let mut redis = durable_redis().await;
    let mut process = process_on(&redis).await;
    let want = fill_the_journal(&process, &mut redis, MANY).await;
    let entries = process.status().await.journal_length;
    assert!(entries > CALLERS * MANY, "{entries}");
    process.kill();
    redis.restart().await;
    process.restart_with(&vars(&redis.url())).await;
    process.until_the_journal_is_empty().await;
    assert_eq!(process.used("p", WINDOW).await, want);
}

#[tokio::test]
async fn kills_amidst_draining_lose_nothing_and_count_nothing_twice() {
    if redis_is_missing() {
        return;
    }
    let mut random = StdRng::seed_from_u64(0x6a6f_7572);
    let mut redis = durable_redis().await;
    let mut process = process_on(&redis).await;
    let want = fill_the_journal(&process, &mut redis, SOME).await;
    process.kill();
    redis.restart().await;
    let mut left = Vec::new();
    for _ in 0..8 {
        process.restart_with(&vars(&redis.url())).await;
        let before = process.status().await.journal_length;
        until("it drains", async || process.status().await.journal_length < before.max(1)).await;
        tokio::time::sleep(Duration::from_millis(random.random_range(0..10))).await;
        left.push(process.status().await.journal_length);
        process.kill();
        if left.last() == Some(&0) {
            break;
        }
    }
    println!("entries at each kill: {left:?}");
    process.restart_with(&vars(&redis.url())).await;
    process.until_the_journal_is_empty().await;
    assert_eq!(process.used("p", WINDOW).await, want);
}

#[tokio::test]
async fn told_to_end_without_redis_a_process_ends_well_and_its_journal_is_drained_later() {
    if redis_is_missing() {
        return;
    }
    let mut redis = durable_redis().await;
    let mut process = process_on(&redis).await;
    let want = fill_the_journal(&process, &mut redis, SOME).await;
    let (code, took) = process.end_with(Signal::SIGTERM).await;
    assert_eq!(code, Some(0), "{}", process.log());
    assert!(took < Duration::from_secs(20), "{took:?}");
    redis.restart().await;
    process.restart_with(&vars(&redis.url())).await;
    process.until_the_journal_is_empty().await;
    assert_eq!(process.used("p", WINDOW).await, want);
}

#[tokio::test]
async fn a_process_that_starts_without_its_redis_decides_and_keeps_until_it_appears() {
    use pb::{enforce_response::Decision, pool::FailureMode};
    if redis_is_missing() {
        return;
    }
    let mut redis = durable_redis().await;
    let url = redis.url();
    let mut process = TestProcess::start_with(&vars(&url)).await;
    let modes = [
        ("c1", FailureMode::FailOpen, Decision::Allow),
        ("c2", FailureMode::FailClosed, Decision::Block),
        ("c3", FailureMode::FailLocal, Decision::Block),
    ];
    for (connection, mode, _) in modes {
        process.put_plan(connection, [dimension(WINDOW, 9e15)]).await;
        process.create(pool(connection, [connection], [hard("A", 100.0)]).failing(mode)).await;
    }
    process.kill();
    redis.kill();
    process.restart_with(&vars(&url)).await;
    for (connection, _, want) in modes {
        for hold in [false, true] {
            let asked = ask("A", connection, tokens(1));
            let asked = if hold { asked.holding(Duration::from_secs(60)) } else { asked };
            let answer = told(process.quota().enforce(asked).await);
            assert_eq!((answer.decision(), answer.degraded), (want, true), "{connection}");
        }
        for n in 0..20 {
            assert!(process.record("A", connection, tokens(n)).await.journaled);
        }
    }
    // It is killed before it has seen its Redis again.
    process.restart_with(&vars(&url)).await;
    assert!(process.status().await.degraded);
    assert!(process.record("A", "c1", tokens(1_000)).await.journaled);
    redis.restart().await;
    process.until_counters_are_in_reach().await;
    process.until_the_journal_is_empty().await;
    for (connection, consumed) in [("c1", 1_190.0), ("c2", 190.0), ("c3", 190.0)] {
        assert_eq!(process.used(connection, WINDOW).await, (consumed, 0.0));
        let answer = process.enforce("A", connection, tokens(1)).await;
        assert_eq!((answer.decision(), answer.degraded), (Decision::Allow, false));
    }
    until("it has been said", async || process.log().contains("answers")).await;
    let said = process.log().lines().filter(|line| line.contains("out of reach")).count();
    assert_eq!(said, 1, "{}", process.log());
}
