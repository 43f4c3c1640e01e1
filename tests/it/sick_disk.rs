//! A disk that takes no writes: records are refused, decisions go on, and all is well again when the disk is.

use std::time::Duration;

use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use crate::harness::{
    TestServer, UNREACHABLE, Verdict, ask, dimension, hard, pb, pool, redis_is_missing, refusal, requests,
    spent, tokens, told,
};
use crate::shared_configuration::until;

/// Every commit of counters and of the configuration updates this table.
pub(crate) const BREAK: &str =
    "CREATE TRIGGER sick BEFORE UPDATE ON service BEGIN SELECT RAISE(ABORT, 'the disk is sick'); END";
pub(crate) const MEND: &str = "DROP TRIGGER sick";

pub(crate) async fn sql(server: &TestServer, statement: &'static str) {
    let options = SqliteConnectOptions::new().filename(server.data_dir().join("storage.sqlite"));
    let mut connection: SqliteConnection =
        options.connect().await.expect("the database opens beside the server");
    sqlx::query(statement).execute(&mut connection).await.expect("the statement is valid");
    connection.close().await.expect("nothing is left to write");
}

#[tokio::test]
async fn a_record_is_never_acknowledged_by_a_disk_that_did_not_take_it() {
    let server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(10)).await;
    sql(&server, BREAK).await;

    let record = || spent("A", "c1", requests(5)).once("once");
    let refused = refusal(server.quota().record_consumption(record()).await);
    assert_eq!(refused.code, Code::Unavailable, "{}", refused.message);
    let hold = ask("A", "c1", requests(7)).holding(Duration::from_secs(60));
    assert_eq!(refusal(server.quota().enforce(hold.clone()).await).code, Code::Unavailable);
    let another = pb::CreatePoolRequest { pool: Some(pool("q", ["c2"], [hard("A", 100.0)])) };
    assert_eq!(refusal(server.pools().create_pool(another.clone()).await).code, Code::Unavailable);

    // What was refused has left nothing, and decisions go on.
    assert_eq!(server.used("p", "requests/hourly").await, (10.0, 0.0));
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);
    assert_eq!(server.list_pools().await.len(), 1);
    server.until_health_is(ServingStatus::NotServing).await;
    assert_eq!(server.page("/readyz").await.0, 503);
    assert_eq!(server.page("/livez").await.0, 200);
    assert!(server.page("/metrics").await.1.contains("quota_share_store_failing 1"));
    let warnings = server.status().await.warnings;
    assert!(warnings.iter().any(|warning| warning.contains("the disk is sick")), "{warnings:?}");

    sql(&server, MEND).await;
    server.until_health_is(ServingStatus::Serving).await;
    assert_eq!(server.page("/readyz").await.0, 200);
    assert!(server.status().await.warnings.is_empty());
    let counted = told(server.quota().record_consumption(record()).await);
    assert!(!counted.duplicate, "the refused call has left no id");
    assert!(told(server.quota().record_consumption(record()).await).duplicate);
    assert!(!told(server.quota().enforce(hold).await).reservation_id.is_empty());
    told(server.pools().create_pool(another).await);
    assert_eq!(server.used("p", "requests/hourly").await, (15.0, 7.0));
}

#[tokio::test]
async fn what_a_sick_disk_refused_is_not_there_after_a_restart() {
    let mut server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    let held = server.reserve("A", "c1", requests(3)).await;
    sql(&server, BREAK).await;
    let settle = spent("A", "c1", requests(2)).settling(&held.reservation_id);
    assert_eq!(refusal(server.quota().record_consumption(settle.clone()).await).code, Code::Unavailable);
    assert_eq!(server.used("p", "requests/hourly").await, (0.0, 3.0), "the hold stands again");
    sql(&server, MEND).await;
    server.restart().await;
    assert_eq!(server.used("p", "requests/hourly").await, (0.0, 3.0));
    let settled = told(server.quota().record_consumption(settle).await);
    assert!(!settled.duplicate && !settled.reservation_expired);
    assert_eq!(server.used("p", "requests/hourly").await, (2.0, 0.0));
}

#[tokio::test]
async fn a_sick_disk_refuses_another_driver_and_is_watched_when_sqlite_is_chosen_again() {
    use pb::settings::StoreDriver::{Redis, Sqlite};
    let server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(10)).await;
    for (driver, other) in [(Sqlite, Redis), (Redis, Sqlite)] {
        server.switch_to(driver).await;
        sql(&server, BREAK).await;
        let settings = pb::Settings {
            store_driver: other.into(),
            redis_url: UNREACHABLE.to_owned(),
            ..Default::default()
        };
        let request = pb::UpdateSettingsRequest { settings: Some(settings), clear: Vec::new() };
        let refused = refusal(server.settings().update_settings(request).await);
        assert_eq!(refused.code, Code::Unavailable, "{refused:?}");
        assert!(!format!("{refused:?}").contains("hidden"), "{refused:?}");
        assert_eq!(server.status().await.active_store(), driver);
        sql(&server, MEND).await;
    }
    server.switch_to(Sqlite).await;
    assert_eq!(server.used("p", "requests/hourly").await, (10.0, 0.0));
    sql(&server, BREAK).await;
    refusal(server.quota().record_consumption(spent("A", "c1", requests(5))).await);
    server.until_health_is(ServingStatus::NotServing).await;
    sql(&server, MEND).await;
    server.until_health_is(ServingStatus::Serving).await;
    server.record("A", "c1", requests(5)).await;
    assert_eq!(server.used("p", "requests/hourly").await, (15.0, 0.0));
}

/// What SQLite itself does where a disk is full: it ends the transaction, and whoever has begun it is not asked.
const BREAK_AND_ROLL_BACK: &str =
    "CREATE TRIGGER sick BEFORE UPDATE ON service BEGIN SELECT RAISE(ROLLBACK, 'the disk is full'); END";

fn plan() -> pb::PutPlanRequest {
    let dimensions = vec![dimension("tokens/daily", 10.0)];
    let plan = pb::Plan { connection_id: "c1".to_owned(), dimensions, ..Default::default() };
    pb::PutPlanRequest { plan: Some(plan) }
}

#[tokio::test]
async fn changes_are_made_again_as_soon_as_a_disk_that_was_full_takes_them() {
    let server = TestServer::start_on_sqlite().await;
    sql(&server, BREAK_AND_ROLL_BACK).await;
    for _ in 0..3 {
        assert_eq!(refusal(server.plans().put_plan(plan()).await).code, Code::Unavailable);
    }
    // Nobody counts, and still it is known, and found out that it is over.
    server.until_health_is(ServingStatus::NotServing).await;
    sql(&server, MEND).await;
    server.until_health_is(ServingStatus::Serving).await;
    told(server.plans().put_plan(plan()).await);
    server.put_plan("c1", [dimension("tokens/daily", 20.0)]).await;
}

/// With the driver redis a replica decides and counts without its disk; what it cannot do, it says.
#[tokio::test]
async fn a_replica_on_redis_whose_disk_is_full_says_so_and_catches_up_when_it_is_not() {
    if redis_is_missing() {
        return;
    }
    let one = TestServer::start_on_redis().await;
    let other = one.another_replica().await;
    one.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    other.until_it_follows(&one).await;
    sql(&other, BREAK_AND_ROLL_BACK).await;
    one.put_plan("c1", [dimension("tokens/daily", 10.0)]).await;
    one.put_plan("c1", [dimension("tokens/daily", 20.0)]).await;
    until("it says so", async || {
        let status = other.status().await;
        let says = status.warnings.iter().any(|warning| warning.contains("the disk takes no writes"));
        says && status.newest_config_revision > status.config_revision
    })
    .await;
    assert!(other.page("/metrics").await.1.contains("quota_share_store_failing 1"));
    let health = told(other.health().check(HealthCheckRequest::default()).await);
    assert_eq!(health.status(), ServingStatus::Serving);
    other.record("A", "c1", tokens(5)).await;
    let refused = refusal(other.plans().put_plan(plan()).await);
    assert_eq!(refused.code, Code::Unavailable);

    sql(&other, MEND).await;
    other.until_it_follows(&one).await;
    until("it is well", async || other.status().await.warnings.is_empty()).await;
    assert!(other.page("/metrics").await.1.contains("quota_share_store_failing 0"));
}
