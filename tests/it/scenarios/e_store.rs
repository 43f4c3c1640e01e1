//! E: what is counted stays counted.

use futures::future::join_all;

use crate::harness::{
    Client, TestProcess, cost, dimension, hard,
    pb::{self, Settings, UpdateSettingsRequest, settings::StoreDriver},
    pool, refusal, spent, tokens, told, usd,
};

/// The machine's clock runs here, so the window is one whose bucket does not end during the test.
const WINDOW: &str = "tokens/366d";

#[tokio::test]
async fn e05_many_writers_share_one_counter_that_survives_a_kill() {
    const CLIENTS: usize = 64;
    const RECORDS: usize = 500;
    let mut process = TestProcess::start().await;
    process.put_plan("c1", [dimension(WINDOW, 1e8), dimension("usd/366d", 1e6)]).await;
    process.create(pool("p", ["c1"], [hard("A", 100.0)])).await;

    let writers = join_all((0..CLIENTS).map(|_| Client::connect(process.address()))).await;
    join_all(writers.iter().map(async |writer| {
        for _ in 0..RECORDS {
            writer.record("A", "c1", tokens(7)).await;
        }
    }))
    .await;
    assert_eq!(process.used("p", WINDOW).await, (224_000.0, 0.0));

    process.kill_and_restart().await;
    assert_eq!(process.used("p", WINDOW).await, (224_000.0, 0.0));

    let refused = [
        (cost(1, -5), "cost.tokens"),
        (cost(1, i64::MAX), "cost.tokens"),
        (usd(f64::NAN), "cost.usd"),
        (usd(1e308), "cost.usd"),
        (usd(1e308), "cost.usd"),
    ];
    for (cost, field) in refused {
        refusal(process.quota().record_consumption(spent("A", "c1", cost)).await).names(&[field]);
    }
    process.record("A", "c1", pb::Cost { requests: Some(0), ..usd(0.000_01) }).await;
    assert_eq!(process.used("p", "usd/366d").await, (0.000_01, 0.0));
    assert_eq!(process.used("p", WINDOW).await, (224_000.0, 0.0));
}

const DRIVER: &str = "QUOTA_STORE_DRIVER";
const URL: &str = "QUOTA_STORE_REDIS_URL";

async fn active_driver(process: &TestProcess) -> StoreDriver {
    told(process.settings().get_status(pb::GetStatusRequest {}).await).active_store()
}

#[tokio::test]
async fn e01_without_a_redis_the_driver_is_sqlite_and_it_is_said_why() {
    let (nothing, redis, mongo) = ([].as_slice(), [(DRIVER, "redis")], [(DRIVER, "mongo")]);
    // start | set | what the one warning names
    for (start, vars, named) in [(1, nothing, None), (5, &redis, Some(URL)), (7, &mongo, Some("mongo"))] {
        let process = TestProcess::start_with(vars).await;
        assert_eq!(active_driver(&process).await, StoreDriver::Sqlite, "start {start}");
        let log = process.log();
        let warnings: Vec<&str> = log.lines().filter(|line| line.contains("\"WARN\"")).collect();
        assert_eq!(warnings.len(), usize::from(named.is_some()), "start {start}: {log}");
        assert!(named.is_none_or(|named| warnings[0].contains(named)), "start {start}: {log}");
    }
}

#[tokio::test]
async fn e01_a_stored_driver_wins_over_the_environment_and_the_url_is_never_returned() {
    let mut process = TestProcess::start().await;
    let store = |settings| UpdateSettingsRequest { settings: Some(settings), clear: vec![] };
    let sqlite = Settings { store_driver: StoreDriver::Sqlite.into(), ..Default::default() };
    told(process.settings().update_settings(store(sqlite)).await);
    let redis = Settings { store_driver: StoreDriver::Redis.into(), ..Default::default() };
    refusal(process.settings().update_settings(store(redis)).await).names(&["settings.redis_url"]);

    // Start 3.
    process.restart_with(&[(DRIVER, "redis"), (URL, "redis://user:hidden@host")]).await;
    assert_eq!(active_driver(&process).await, StoreDriver::Sqlite);
    let settings = told(process.settings().get_settings(pb::GetSettingsRequest {}).await);
    let effective = settings.effective.expect("what is in force");
    assert_eq!((effective.redis_url.as_str(), effective.redis_url_configured), ("", true));
    assert!(!process.log().contains("hidden"), "{}", process.log());
}
