//! A commit that fails while time goes on: what it carried is undone whole, with all that was done on top of it, and what
//! was done for other reasons stays. And what no table could hold does not stop those that can.

use std::time::Duration;

use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};

use crate::harness::{
    T0, TestServer, ask, dimension, hard, pb, pool, refusal, requests, said, spent, tokens,
};

const SHORT: &str = "percent/5h";
const HOUR_MS: u64 = 3_600_000;
/// The most that one input may name.
const MOST: i64 = 9_000_000_000_000_000;

async fn server_with_a_pool(provider: &str) -> TestServer {
    let server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)]).with_provider(provider)).await;
    server
}

/// Another process that writes the database, until it commits.
async fn lock_of_another(server: &TestServer) -> SqliteConnection {
    let options = SqliteConnectOptions::new()
        .filename(server.data_dir().join("storage.sqlite"))
        .busy_timeout(Duration::from_secs(10));
    let mut other = options.connect().await.expect("the database opens beside the server");
    sqlx::query("BEGIN IMMEDIATE").execute(&mut other).await.expect("nobody writes");
    other
}

/// Asks again, as a caller does whose call was not acknowledged, until the disk is back.
async fn once_the_disk_is_back(server: &TestServer) {
    let record = || spent("A", "c1", requests(0)).once("the disk is back");
    while server.quota().record_consumption(record()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A record waits for the lock of another process, and in vain; meanwhile usage is read at another time.
async fn fail_while_usage_is_read(server: &TestServer, record: pb::RecordConsumptionRequest, at_ms: u64) {
    let mut other = lock_of_another(server).await;
    let mut quota = server.quota();
    let waiting = tokio::spawn(async move { quota.record_consumption(record).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.at(at_ms);
    server.usage("p").await;
    refusal(waiting.await.expect("it does not panic"));
    sqlx::query("ROLLBACK").execute(&mut other).await.expect("it is in a transaction");
    other.close().await.expect("nothing is left to write");
}

#[tokio::test]
async fn a_window_that_a_look_has_ended_ends_once_though_the_commit_before_it_fails() {
    let mut server = server_with_a_pool("codex").await;
    server.report("c1", [said(SHORT, 0.0).until(HOUR_MS)]).await;
    server.record("A", "c1", tokens(50)).await;
    server.record("B", "c1", tokens(20)).await;
    server.report("c1", [said(SHORT, 70.0).until(HOUR_MS)]).await;
    server.at(HOUR_MS - 1_000);
    fail_while_usage_is_read(&server, spent("A", "c1", tokens(5)), HOUR_MS).await;
    once_the_disk_is_back(&server).await;
    server.record("A", "c1", tokens(1)).await;
    server.report("c1", [said(SHORT, 40.0).until(6 * HOUR_MS)]).await;
    for look in ["before a restart", "after it"] {
        assert_eq!(server.used("p", SHORT).await, (40.0, 0.0), "{look}");
        assert_eq!(server.parts("p", SHORT).await, (vec![("A".to_owned(), 40.0)], 0.0), "{look}");
        server.restart().await;
    }
}

#[tokio::test]
async fn what_was_refused_while_the_clock_went_back_is_not_there_after_a_restart() {
    let mut server = server_with_a_pool("kimi").await;
    server.at(3 * HOUR_MS);
    server.record("A", "c1", requests(10)).await;
    // The commit that says that the clock went back is refused.
    let mut other = lock_of_another(&server).await;
    let back = T0.plus_ms(2 * HOUR_MS).unix_ms();
    let trigger = format!(
        "CREATE TRIGGER sick BEFORE UPDATE ON service WHEN NEW.last_seen_ms < {back}
         BEGIN SELECT RAISE(ABORT, 'the disk is sick'); END"
    );
    sqlx::query(sqlx::AssertSqlSafe(trigger)).execute(&mut other).await.expect("the statement is valid");
    let mut quota = server.quota();
    let first = tokio::spawn(async move { quota.record_consumption(spent("A", "c1", requests(1))).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (mut quota, mut holder) = (server.quota(), server.quota());
    let record = tokio::spawn(async move { quota.record_consumption(spent("A", "c1", requests(500))).await });
    let hold = ask("A", "c1", requests(300)).holding(Duration::from_secs(3_600));
    let hold = tokio::spawn(async move { holder.enforce(hold).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.at(HOUR_MS);
    sqlx::query("COMMIT").execute(&mut other).await.expect("it is in a transaction");
    first.await.expect("it does not panic").expect("its commit was under way");
    refusal(record.await.expect("it does not panic"));
    refusal(hold.await.expect("it does not panic"));
    sqlx::query("DROP TRIGGER sick").execute(&mut other).await.expect("it is there");
    other.close().await.expect("nothing is left to write");

    once_the_disk_is_back(&server).await;
    assert_eq!(server.used("p", "requests/hourly").await, (11.0, 0.0));
    server.restart().await;
    assert_eq!(server.used("p", "requests/hourly").await, (11.0, 0.0));
}

#[tokio::test]
async fn sums_past_the_ceiling_stop_nobody() {
    let mut server = TestServer::start_on_sqlite().await;
    server.put_plan("c1", [dimension("tokens/hourly", 9e15), dimension("tokens/1s", 9e15)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    for second in 0..1_030 {
        server.at(8 * HOUR_MS + second * 1_000);
        server.record("A", "c1", tokens(MOST)).await;
    }
    server.restart().await;
    server.at(9 * HOUR_MS);
    server.record("A", "c1", tokens(MOST)).await;
    // Two buckets that are full become one.
    server.at(2 * HOUR_MS);
    server.record("A", "c1", tokens(1)).await;
    server.restart().await;
    assert_eq!(server.used("p", "tokens/hourly").await, (9e15, 0.0));
    server.record("A", "c1", tokens(1)).await;
}
