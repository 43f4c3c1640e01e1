//! E: what is counted stays counted.

use futures::future::join_all;
use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};

use crate::harness::{
    Client, TestProcess, TestRedis, TestServer, UNREACHABLE, ask, cost, dimension, failed_start, hard,
    pb::{self, Settings, UpdateSettingsRequest, settings::StoreDriver},
    pool, redis_is_missing, refusal, spent, tokens, told, usd,
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
/// What a busy machine needs is no concern of these tests.
const PATIENT: (&str, &str) = ("QUOTA_STORE_TIMEOUT_MS", "60000");

#[tokio::test]
async fn e01_the_environment_chooses_a_driver_and_what_it_cannot_have_is_told_once() {
    const BAD_SCHEME: &str = "mongo://user:hidden@host";
    // start | variables | what the one warning names
    type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], Option<&'a str>);
    let starts: [Row<'_>; 7] = [
        ("1", &[], None),
        ("5", &[(DRIVER, "redis")], Some(URL)),
        ("6, bad scheme", &[(DRIVER, "redis"), (URL, BAD_SCHEME)], Some(URL)),
        ("6, not asked for", &[(URL, BAD_SCHEME)], Some(URL)),
        ("7", &[(DRIVER, "mongo")], Some("mongo")),
        ("7, with a URL", &[(DRIVER, "mongo"), (URL, UNREACHABLE)], Some("mongo")),
        ("not asked for", &[(URL, UNREACHABLE)], None),
    ];
    for (start, vars, named) in starts {
        let process = TestProcess::start_with(vars).await;
        assert_eq!(process.status().await.active_store(), StoreDriver::Sqlite, "start {start}");
        assert!(process.is_serving().await, "start {start}");
        let log = process.log();
        let warnings: Vec<&str> = log.lines().filter(|line| line.contains("\"WARN\"")).collect();
        assert_eq!(warnings.len(), usize::from(named.is_some()), "start {start}: {log}");
        assert!(named.is_none_or(|named| warnings[0].contains(named)), "start {start}: {log}");
        assert!(!log.contains("hidden"), "start {start}: {log}");
    }
    // Start 6, refused port: redis is used, and is out of reach.
    let process = TestProcess::start_with(&[(DRIVER, "redis"), (URL, UNREACHABLE)]).await;
    let status = process.status().await;
    assert_eq!((status.active_store(), status.degraded), (StoreDriver::Redis, true));
    // It has never had a configuration, so it cannot say that there is no pool.
    assert!(!process.is_serving().await);
    let refused = refusal(process.quota().enforce(ask("A", "c1", None)).await);
    assert_eq!(refused.reason, "NO_CONFIGURATION");
    let recorded = refusal(process.quota().record_consumption(spent("A", "c1", tokens(1))).await);
    assert_eq!(recorded.reason, "NO_CONFIGURATION");
    assert!(process.log().contains("\"driver\":\"redis\""), "{}", process.log());
    let told = format!("{} {status:?} {recorded:?} {:?}", process.log(), process.status().await);
    assert!(!told.contains("hidden"), "{told}");
}

/// A Redis that asks for a password, which must not be seen anywhere, and its URL.
async fn redis_with_a_password() -> (TestRedis, String) {
    let redis = TestRedis::start_with(&["--requirepass", "hidden"]).await;
    let url = redis.url().replace("redis://", "redis://:hidden@");
    (redis, url)
}

/// How many keys of pools a Redis has.
async fn keys_in(redis: &TestRedis) -> String {
    let script = "return #redis.call('KEYS', 'quota-share:1:*')";
    redis.cli(&["-a", "hidden", "--no-auth-warning", "EVAL", script, "0"]).await
}

/// Counts seven tokens of `p`, and shows them.
async fn counts_seven(client: &Client) {
    client.put_plan("c1", [dimension(WINDOW, 100.0)]).await;
    client.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    client.record("A", "c1", tokens(7)).await;
    assert_eq!(client.used("p", WINDOW).await, (7.0, 0.0));
}

#[tokio::test]
async fn e01_a_redis_that_is_there_is_used_by_whichever_start_chooses_it() {
    if redis_is_missing() {
        return;
    }
    let (redis, url) = redis_with_a_password().await;

    // Start 2: the environment chooses it.
    let process = TestProcess::start_with(&[(DRIVER, "redis"), (URL, &url), PATIENT]).await;
    process.until_counters_are_in_reach().await;
    assert_eq!(process.status().await.active_store(), StoreDriver::Redis);
    assert_eq!(keys_in(&redis).await, "0");
    counts_seven(&process).await;
    assert_ne!(keys_in(&redis).await, "0");
    assert!(!process.log().contains("hidden"), "{}", process.log());
    drop(process);

    // Start 3: stored sqlite wins.
    redis.cli(&["-a", "hidden", "--no-auth-warning", "FLUSHALL"]).await;
    let mut process = TestProcess::start().await;
    process.switch_to(StoreDriver::Sqlite).await;
    process.restart_with(&[(DRIVER, "redis"), (URL, &url), PATIENT]).await;
    let status = process.status().await;
    assert_eq!((status.active_store(), status.degraded), (StoreDriver::Sqlite, false));
    counts_seven(&process).await;
    assert_eq!(keys_in(&redis).await, "0", "nobody has been there");

    // Start 4: stored redis wins.
    let settings = Settings { store_driver: StoreDriver::Redis.into(), redis_url: url, ..Default::default() };
    process.update_settings(settings, &[]).await;
    let log = process.log();
    process.restart_with(&[(DRIVER, "sqlite"), PATIENT]).await;
    process.until_counters_are_in_reach().await;
    assert_eq!(process.status().await.active_store(), StoreDriver::Redis);
    assert_eq!(process.used("p", WINDOW).await, (0.0, 0.0), "it knows nothing of what SQLite counts");
    process.record("A", "c1", tokens(5)).await;
    assert_eq!(process.used("p", WINDOW).await, (5.0, 0.0));
    assert_ne!(keys_in(&redis).await, "0");
    let settings = told(process.settings().get_settings(pb::GetSettingsRequest {}).await);
    let told = format!("{settings:?} {:?} {log} {}", process.status().await, process.log());
    assert!(!told.contains("hidden"), "{told}");
}

#[tokio::test]
async fn e01_the_counters_are_in_the_redis_that_was_set_last() {
    if redis_is_missing() {
        return;
    }
    let (redis, url) = redis_with_a_password().await;
    let server = TestServer::start_on_redis().await;
    counts_seven(&server).await;

    let settings = Settings { redis_url: url.clone(), ..Default::default() };
    let effective = server.update_settings(settings, &[]).await.effective.expect("what is in force");
    assert_eq!((effective.redis_url.as_str(), effective.store_driver()), ("", StoreDriver::Redis));
    server.until_counters_are_in_reach().await;
    server.record("A", "c1", tokens(5)).await;
    assert_eq!(server.used("p", WINDOW).await, (5.0, 0.0));
    let in_redis = keys_in(&redis).await;
    assert_ne!(in_redis, "1", "more than the layout");

    // Whoever has the former Redis has what was counted there, and nothing else.
    let former = server.another_replica().await;
    assert_eq!(former.used("p", WINDOW).await, (7.0, 0.0));

    // And back again.
    server.update_settings(Settings::default(), &["redis_url"]).await;
    server.until_counters_are_in_reach().await;
    server.record("A", "c1", tokens(2)).await;
    assert_eq!(former.used("p", WINDOW).await, (9.0, 0.0));
    assert_eq!(keys_in(&redis).await, in_redis);
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
    assert_eq!(process.status().await.active_store(), StoreDriver::Sqlite);
    let settings = told(process.settings().get_settings(pb::GetSettingsRequest {}).await);
    let effective = settings.effective.expect("what is in force");
    assert_eq!((effective.redis_url.as_str(), effective.redis_url_configured), ("", true));
    assert!(!process.log().contains("hidden"), "{}", process.log());

    // Start 4.
    process.switch_to(StoreDriver::Redis).await;
    let log = process.log();
    process.restart_with(&[(DRIVER, "sqlite")]).await;
    assert_eq!(process.status().await.active_store(), StoreDriver::Redis);
    let settings = told(process.settings().get_settings(pb::GetSettingsRequest {}).await);
    let told = format!("{settings:?} {:?} {log} {}", process.status().await, process.log());
    assert!(settings.effective.is_some_and(|effective| effective.redis_url_configured));
    assert!(!told.contains("hidden"), "{told}");
}

/// A settings document that cannot be read stops the start, and is not shown: the URL is in it.
#[tokio::test]
async fn e01_settings_that_cannot_be_read_are_not_shown() {
    let mut process = TestProcess::start().await;
    process.switch_to(StoreDriver::Redis).await;
    process.kill();
    let options = SqliteConnectOptions::new().filename(process.data_dir().join("storage.sqlite"));
    let mut connection = options.connect().await.expect("nobody has the file");
    let broken = "UPDATE service SET settings = replace(settings, '\"redis\"', '\"mongo\"')";
    let done = sqlx::query(broken).execute(&mut connection).await.expect("the statement is valid");
    assert_eq!(done.rows_affected(), 1);
    connection.close().await.expect("nothing is left to write");
    let (code, log) = failed_start(process.data_dir(), &[]).await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("the settings") && !log.contains("hidden"), "{log}");
}
