//! What an operator stores, and what the service says of itself.

use quota_share::{core::settings::StoreDriver as CoreDriver, store::redis::RedisUrl};
use tonic::{Code, Status, Streaming};

use crate::harness::{
    TestServer, UNREACHABLE, Verdict, dimension, hard, millis,
    pb::{self, Settings, UpdateSettingsRequest, settings::StoreDriver},
    pool, refusal, requests, soft, tokens, told,
};

async fn update(server: &TestServer, settings: Settings, clear: &[&str]) -> Settings {
    server.update_settings(settings, clear).await.effective.expect("what is in force")
}

async fn get(server: &TestServer) -> (Settings, Settings) {
    let settings = told(server.settings().get_settings(pb::GetSettingsRequest {}).await);
    (settings.stored.expect("what is stored"), settings.effective.expect("what is in force"))
}

#[tokio::test]
async fn what_is_stored_wins_at_once_and_after_a_restart_until_it_is_cleared() {
    let mut server = TestServer::start().await;
    server.create(pool("p", ["c1"], [soft("A", 20.0), hard("B", 80.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(800)).await;
    assert_eq!(get(&server).await.0, Settings::default(), "nothing is stored");
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Deprioritize(0.7));

    let before = server.enforce("A", "c1", None).await.config_revision;
    update(&server, Settings { soft_deprioritize_factor: Some(0.4), ..Default::default() }, &[]).await;
    let answer = server.enforce("A", "c1", None).await;
    assert_eq!((answer.verdict(), answer.config_revision), (Verdict::Deprioritize(0.4), before + 1));
    let stored = Settings {
        saturation_threshold: Some(0.6),
        consumption_retention_days: Some(30),
        ..Default::default()
    };
    update(&server, stored, &[]).await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow, "0.53 is generous now");

    server.restart_with(|config| config.soft_deprioritize_factor = 0.25).await;
    let (stored, effective) = get(&server).await;
    for settings in [&stored, &effective] {
        assert_eq!(settings.saturation_threshold, Some(0.6));
        assert_eq!(settings.soft_deprioritize_factor, Some(0.4));
        assert_eq!(settings.consumption_retention_days, Some(30));
    }
    let drivers = (stored.store_driver(), effective.store_driver());
    assert_eq!(drivers, (StoreDriver::Unspecified, server.driver()));

    let names = ["saturation_threshold", "soft_deprioritize_factor", "consumption_retention_days"];
    let effective = update(&server, Settings::default(), &names).await;
    assert_eq!((effective.soft_deprioritize_factor, effective.saturation_threshold), (Some(0.25), Some(0.5)));
    assert_eq!(get(&server).await, (Settings::default(), effective));
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Deprioritize(0.25));
}

#[tokio::test]
async fn settings_that_cannot_be_are_named_and_change_nothing() {
    // The driver redis is refused where no URL is known.
    let server = TestServer::start_on_sqlite().await;
    update(&server, Settings { saturation_threshold: Some(0.4), ..Default::default() }, &[]).await;
    let before = (get(&server).await, server.status().await.config_revision);
    let good = Settings { soft_deprioritize_factor: Some(0.1), ..Default::default() };
    // settings | names to clear | the field that is named
    let cases: [(Settings, &[&str], &str); 8] = [
        (Settings { saturation_threshold: Some(50.0), ..good.clone() }, &[], "settings.saturation_threshold"),
        (
            Settings { soft_deprioritize_factor: Some(f64::NAN), ..good.clone() },
            &[],
            "settings.soft_deprioritize_factor",
        ),
        (
            Settings { consumption_retention_days: Some(0), ..good.clone() },
            &[],
            "settings.consumption_retention_days",
        ),
        (Settings { store_driver: StoreDriver::Redis.into(), ..good.clone() }, &[], "settings.redis_url"),
        (
            Settings { store_driver: StoreDriver::Redis.into(), ..with_url("mongo://user:hidden@host") },
            &[],
            "settings.redis_url",
        ),
        (with_url(UNREACHABLE), &["redis_url"], "clear[0]"),
        (Settings { store_driver: 99, ..good.clone() }, &[], "settings.store_driver"),
        (good, &["saturation_threshold", "nonsense"], "clear[1]"),
    ];
    for (settings, clear, field) in cases {
        let clear = clear.iter().map(|name| (*name).to_owned()).collect();
        let request = UpdateSettingsRequest { settings: Some(settings), clear };
        let refused = refusal(server.settings().update_settings(request).await);
        refused.names(&[field]);
        assert!(!format!("{refused:?}").contains("hidden"), "{refused:?}");
    }
    // Every mistake is named, that of the URL too.
    let settings = Settings { saturation_threshold: Some(50.0), ..with_url(":hidden@") };
    let request = UpdateSettingsRequest { settings: Some(settings), clear: Vec::new() };
    let refused = refusal(server.settings().update_settings(request).await);
    refused.names(&["settings.redis_url", "settings.saturation_threshold"]);
    assert_eq!((get(&server).await, server.status().await.config_revision), before);
}

fn with_url(url: &str) -> Settings {
    Settings { redis_url: url.to_owned(), ..Default::default() }
}

fn with_driver(driver: StoreDriver) -> Settings {
    Settings { store_driver: driver.into(), ..Default::default() }
}

#[tokio::test]
async fn a_driver_is_changed_while_the_service_runs_and_chosen_anew_when_it_is_cleared() {
    use StoreDriver::{Redis, Sqlite, Unspecified};
    let mut server = TestServer::start_on_sqlite().await;
    // settings | names to clear | driver stored, in use | a URL is stored, known | how often sqlite is warned of
    type Row<'a> = (Settings, &'a [&'a str], (StoreDriver, StoreDriver), (bool, bool), usize);
    let rows: [Row<'_>; 7] = [
        (with_url(UNREACHABLE), &[], (Unspecified, Sqlite), (true, true), 0),
        (with_driver(Redis), &[], (Redis, Redis), (true, true), 0),
        (with_url("redis://user:hidden@127.0.0.1:2"), &[], (Redis, Redis), (true, true), 0),
        // Without a URL there is nothing to reach.
        (Settings::default(), &["redis_url"], (Redis, Sqlite), (false, false), 1),
        (with_url(UNREACHABLE), &[], (Redis, Redis), (true, true), 0),
        (Settings::default(), &["store_driver"], (Unspecified, Sqlite), (true, true), 0),
        (with_driver(Sqlite), &["redis_url"], (Sqlite, Sqlite), (false, false), 0),
    ];
    for (number, (settings, clear, drivers, urls, warnings)) in rows.into_iter().enumerate() {
        let answer = server.update_settings(settings, clear).await;
        let warned = |of: &str| answer.warnings.iter().filter(|told| told.contains(of)).count();
        assert_eq!(warned("using sqlite"), warnings, "row {number}: {answer:?}");
        // That nobody answers there is said at once as well.
        let out_of_reach = usize::from(drivers.1 == Redis);
        assert_eq!(warned("records go to the journal"), out_of_reach, "row {number}: {answer:?}");
        let (stored, effective) = get(&server).await;
        assert_eq!((stored.store_driver(), effective.store_driver()), drivers, "row {number}");
        assert_eq!((stored.redis_url_configured, effective.redis_url_configured), urls, "row {number}");
        let status = server.status().await;
        assert_eq!(status.active_store(), drivers.1, "row {number}");
        assert_eq!(status.warnings.iter().filter(|told| told.contains("using sqlite")).count(), warnings);
        let told = format!("{answer:?} {stored:?} {effective:?} {status:?}");
        assert!(!told.contains("hidden") && !told.contains("127.0.0.1"), "row {number}: {told}");
    }

    // A configured URL serves a stored driver, and a configured driver is what is left when none is stored.
    server
        .restart_with(|config| {
            config.redis_url = RedisUrl::parse(UNREACHABLE).ok();
            config.store_driver = CoreDriver::Redis;
        })
        .await;
    assert_eq!(get(&server).await.1.store_driver(), Sqlite, "stored");
    assert!(get(&server).await.1.redis_url_configured);
    assert_eq!(update(&server, Settings::default(), &["store_driver"]).await.store_driver(), Redis);
    assert_eq!(update(&server, with_driver(Sqlite), &[]).await.store_driver(), Sqlite);
    assert_eq!(update(&server, with_driver(Redis), &[]).await.store_driver(), Redis);
}

#[tokio::test]
async fn the_status_names_pools_that_no_call_has_matched() {
    let mut server = TestServer::start().await;
    server.create(pool("used", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.create(pool("mistyped", ["c2"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.enforce("A", "c1", None).await;
    server.enforce("A", "C2", None).await;

    let first = server.status().await;
    assert!(first.warnings.len() == 1 && first.warnings[0].contains("mistyped"), "{:?}", first.warnings);
    assert_eq!((first.config_revision, first.newest_config_revision), (2, 2));
    assert_eq!((first.active_store(), first.degraded), (server.driver(), false));
    assert_ne!((first.replica_id.as_str(), first.version.as_str()), ("", ""));
    let replicas: Vec<_> = first.replicas.iter().map(|replica| &replica.replica_id).collect();
    assert_eq!(replicas, [&first.replica_id]);

    server.record("A", "c2", requests(1)).await;
    assert_eq!(server.status().await.warnings, [""; 0]);
    server.restart().await;
    server.wait(7_000);
    let second = server.status().await;
    assert_eq!(second.replica_id, first.replica_id, "the data directory's");
    assert_eq!(second.uptime.as_ref().map(millis), Some(7_000));
}

#[tokio::test]
async fn a_watcher_is_told_now_and_at_every_interval_until_the_pool_or_the_server_ends() {
    const HOURLY: &str = "tokens/hourly";
    let mut server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    server.create(pool("q", ["c2"], [])).await;
    let watch = |pool: &str, seconds: i64| pb::WatchPoolUsageRequest {
        pool_id: pool.to_owned(),
        interval: Some(prost_types::Duration { seconds, nanos: 0 }),
        ..Default::default()
    };
    for seconds in [0, 3_601] {
        refusal(server.pools().watch_pool_usage(watch("p", seconds)).await).names(&["interval"]);
    }
    let refused = refusal(server.pools().watch_pool_usage(watch("nowhere", 1)).await);
    assert_eq!(refused.code, Code::NotFound);

    let mut of_p = told(server.pools().watch_pool_usage(watch("p", 1)).await);
    let mut of_q = told(server.pools().watch_pool_usage(watch("q", 1)).await);
    for consumed in [0.0, 7.0] {
        let usage = of_p.message().await.expect("usage").expect("usage").usage.expect("usage");
        assert_eq!(usage.dimension(HOURLY).consumed, consumed);
        assert_eq!(usage, server.usage("p").await);
        server.record("A", "c1", tokens(7)).await;
    }
    assert!(of_q.message().await.is_ok_and(|first| first.is_some()));
    server.delete_pool("q").await;
    assert_eq!(end_of(of_q).await.code(), Code::NotFound);

    server.restart().await;
    assert_eq!(end_of(of_p).await.code(), Code::Unavailable);
}

/// What a watcher is told at last.
async fn end_of(mut stream: Streaming<pb::WatchPoolUsageResponse>) -> Status {
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ends without a word"),
            Err(status) => return status,
        }
    }
}
