//! Pools and plans as an administrator writes and reads them.

use tonic::Code;

use crate::harness::{
    T0, TestServer, Verdict, ask, dimension, exempt, hard,
    pb::{self, allocation::Policy, dimension::Unit, plan::Source, pool::FailureMode},
    pool, refusal, requests, soft, spent, tokens, told, unix_ms,
};

const HOURLY: &str = "tokens/hourly";

/// A pool with something in every field.
fn full_pool() -> pb::Pool {
    pb::Pool {
        provider: "kimi".to_owned(),
        name: "Team Ä".to_owned(),
        saturation_threshold: Some(0.0),
        failure_mode: FailureMode::FailLocal.into(),
        owner_reserve: 0.123_456,
        group: "teams".to_owned(),
        ..pool(
            "team-a.1_x",
            ["c1", "c2"],
            [
                soft("Z", 33.333_333).capped(0.000_000_001, Unit::Usd),
                hard("A", 66.6).capped_for("large", HOURLY, 7.5).capped_for("large", "usd/90s", 0.1),
                exempt("owner"),
            ],
        )
        .in_shadow()
    }
}

#[tokio::test]
async fn what_is_read_can_be_written_as_it_is() {
    let server = TestServer::start().await;
    let created = server.create(full_pool()).await;
    let given = pb::Pool { created_at: None, updated_at: None, revision: 0, ..created.clone() };
    assert_eq!(given, full_pool(), "nothing is lost or changed");
    assert_eq!((unix_ms(&created.created_at), unix_ms(&created.updated_at)), (T0.unix_ms(), T0.unix_ms()));
    assert_eq!(server.list_pools().await, std::slice::from_ref(&created));

    server.wait(5);
    let read = server.get_pool(&created.pool_id).await;
    assert_eq!(read.pool.as_ref(), Some(&created));
    let plan = read.plan.expect("the plan that applies");
    assert_eq!((plan.source(), plan.provider.as_str()), (Source::Catalog, "kimi"));
    let updated = server.update(created.clone()).await;
    assert!(updated.revision > created.revision);
    assert_eq!(
        (unix_ms(&updated.created_at), unix_ms(&updated.updated_at)),
        (T0.unix_ms(), T0.unix_ms() + 5)
    );

    assert!(server.delete_pool(&created.pool_id).await);
    let listed = pb::Pool { revision: updated.revision, ..updated };
    let again = server.create(listed.clone()).await;
    assert!(again.revision > listed.revision, "a revision never comes back");
    assert_eq!(unix_ms(&again.created_at), T0.unix_ms() + 5);

    let stored = server.put_plan("c1", [dimension(HOURLY, 0.3), dimension("usd/90s", 1e-9)]).await;
    let request = pb::PutPlanRequest { plan: Some(stored.clone()) };
    let put = told(server.plans().put_plan(request).await).plan.expect("the plan that was stored");
    assert_eq!(pb::Plan { revision: stored.revision, ..put.clone() }, stored);
    assert!(put.revision > stored.revision);
    assert_eq!(server.list_plans().await, [put]);
}

#[tokio::test]
async fn what_is_left_unsaid_gets_its_default() {
    let server = TestServer::start().await;
    let bare = pb::Pool {
        name: "bare".to_owned(),
        connection_ids: vec!["c1".to_owned()],
        allocations: vec![pb::Allocation { api_key_id: "A".to_owned(), ..Default::default() }],
        ..Default::default()
    };
    let first = server.create(bare.clone()).await;
    let second = server.create(pb::Pool { connection_ids: vec!["c2".to_owned()], ..bare }).await;
    assert_eq!(
        (first.enforcement(), first.failure_mode()),
        (pb::pool::Enforcement::Enforce, FailureMode::FailOpen)
    );
    assert_eq!(first.allocations[0].policy(), Policy::Hard);
    assert_eq!(first.saturation_threshold, None);
    for id in [&first.pool_id, &second.pool_id] {
        // UUIDv7: 36 characters, the version in the fifteenth.
        assert!(id.len() == 36 && id.as_bytes()[14] == b'7' && *id == id.to_lowercase(), "{id}");
    }
    assert_ne!(first.pool_id, second.pool_id);
}

#[tokio::test]
async fn what_is_probably_not_meant_is_stored_with_a_warning() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    let warnings = async |pool: pb::Pool| {
        let created =
            told(server.pools().create_pool(pb::CreatePoolRequest { pool: Some(pool.clone()) }).await);
        let updated = told(server.pools().update_pool(pb::UpdatePoolRequest { pool: created.pool }).await);
        assert_eq!(created.warnings, updated.warnings);
        server.delete_pool(&pool.pool_id).await;
        created.warnings
    };
    // the pool | what a warning names; none: there is no warning
    let cases = [
        (pool("p", ["c1"], [hard("A", 100.0)]), None),
        (pool("p", ["c1"], [hard("A", 0.0), hard("B", 0.0)]), None),
        (pool("p", ["c2"], [hard("A", 100.0)]), Some("plan")),
        (pool("p", ["c1"], [hard("A", 100.0).capped(5.0, Unit::Usd)]), Some("cap of A")),
        (pool("p", ["c1"], [hard("A", 90.0)]), Some("90")),
        (pool("p", ["c1"], [soft("A", 90.0)]), None),
        (pool("p", ["c1"], [hard("A", 100.0), hard("idle", 0.0)]), Some("idle")),
    ];
    for (pool, want) in cases {
        let warnings = warnings(pool.clone()).await;
        match want {
            None => assert!(warnings.is_empty(), "{pool:?}: {warnings:?}"),
            Some(word) => {
                assert!(warnings.len() == 1 && warnings[0].contains(word), "{pool:?}: {warnings:?}");
            }
        }
    }

    server.create(pool("p", ["c1", "c2"], [hard("A", 100.0)])).await;
    let of_a_member = pb::PutPlanRequest::of("c2", [dimension(HOURLY, 5.0)]);
    let put = told(server.plans().put_plan(of_a_member).await);
    assert_eq!(put.warnings.len(), 1, "it is not the pool's primary: {put:?}");
    assert_eq!(
        server.get_plan("c2", "").await.limits(),
        [(HOURLY.to_owned(), Some(100.0))],
        "the pool's plan"
    );
    let of_the_primary = pb::PutPlanRequest::of("c1", [dimension(HOURLY, 5.0)]);
    assert_eq!(told(server.plans().put_plan(of_the_primary).await).warnings, [""; 0]);
    let request =
        pb::PutAllocationRequest { pool_id: "p".to_owned(), allocation: Some(hard("A", 60.0)), revision: 0 };
    assert_eq!(told(server.pools().put_allocation(request).await).warnings.len(), 1);
}

#[tokio::test]
async fn deleting_what_is_not_there_changes_nothing() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)]).with_provider("kimi")).await;
    assert!(server.delete_allocation("p", "B").await);
    server.put_plan("c1", [dimension(HOURLY, 1.0)]).await;
    server.delete_plan("c1").await;
    let revision = server.enforce("A", "c1", None).await.config_revision;
    let before = server.get_pool("p").await;

    assert!(!server.delete_allocation("p", "B").await);
    assert_eq!(server.delete_plan("c1").await.source(), Source::Catalog);
    assert_eq!(server.delete_plan("nobody's").await.source(), Source::NoPlan);
    assert!(!server.delete_pool("nowhere").await);
    assert_eq!(server.get_pool("p").await, before);
    assert_eq!(server.enforce("A", "c1", None).await.config_revision, revision);

    assert!(server.delete_pool("p").await);
    assert!(!server.delete_pool("p").await);
    assert_eq!(server.list_pools().await, []);
}

#[tokio::test]
async fn a_key_that_leaves_stays_in_the_total_until_it_has_aged_out_and_returns_to_its_own() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    server.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)])).await;
    server.record("A", "c1", tokens(90)).await;
    server.delete_allocation("p", "A").await;

    assert_eq!(server.used("p", HOURLY).await, (90.0, 0.0));
    let usage = server.usage("p").await;
    let gone = usage.dimension(HOURLY).key("A");
    assert_eq!((gone.consumed, gone.allocated, gone.weight), (90.0, false, 0.0));
    assert!(matches!(server.enforce("B", "c1", tokens(11)).await.verdict(), Verdict::Block { .. }));
    assert_eq!(server.enforce("A", "c1", None).await.pool_id, "", "it is in no pool");

    server.put_allocation("p", hard("A", 50.0)).await;
    assert_eq!(server.enforce("A", "c1", None).await.dimension(HOURLY).key_consumed, 90.0);

    server.delete_allocation("p", "A").await;
    server.at(2 * 3_600_000);
    let usage = server.usage("p").await;
    let keys: Vec<&str> = usage.dimension(HOURLY).keys.iter().map(|key| key.api_key_id.as_str()).collect();
    assert_eq!((usage.dimension(HOURLY).consumed, keys), (0.0, vec!["B"]));
}

#[tokio::test]
async fn a_reset_sets_consumption_to_zero_and_leaves_the_rest() {
    const DAILY: &str = "tokens/daily";
    const LARGE: &str = "tokens/5h of large";
    let mut server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 1_000.0), dimension(DAILY, 1_000.0)]).await;
    let capped = hard("A", 50.0).capped_for("large", "tokens/5h", 500.0);
    server.create(pool("p", ["c1"], [capped, hard("B", 50.0)])).await;
    let record = |key, cost| spent(key, "c1", tokens(cost)).with_model("large").once("key");
    told(server.quota().record_consumption(record("A", 40)).await);
    server.record("B", "c1", tokens(2)).await;
    server.reserve("B", "c1", tokens(30)).await;

    let reset = async |server: &TestServer, key: &str, unit: Unit, window: &str| {
        let request = pb::ResetUsageRequest {
            pool_id: "p".to_owned(),
            api_key_id: key.to_owned(),
            unit: unit.into(),
            window: window.to_owned(),
        };
        server.pools().reset_usage(request).await
    };
    let large = async |server: &TestServer| {
        let request = ask("A", "c1", None).with_model("large");
        told(server.quota().enforce(request).await).dimension(LARGE).key_consumed
    };
    // Both or neither, and only what the plan has.
    for (unit, window) in
        [(Unit::Tokens, ""), (Unit::Unspecified, "hourly"), (Unit::Usd, "hourly"), (Unit::Tokens, "weekly")]
    {
        let refused = refusal(reset(&server, "A", unit, window).await);
        assert_eq!(refused.code, Code::InvalidArgument, "{unit:?} {window}: {refused:?}");
    }
    assert_eq!(server.used("p", HOURLY).await, (42.0, 30.0));

    told(reset(&server, "A", Unit::Tokens, "60m").await);
    server.restart().await;
    assert_eq!(server.used("p", HOURLY).await, (2.0, 30.0), "one key's comes out of the total");
    assert_eq!(server.used("p", DAILY).await, (42.0, 30.0));
    assert_eq!(large(&server).await, 40.0);

    told(reset(&server, "", Unit::Unspecified, "").await);
    server.restart().await;
    for name in [HOURLY, DAILY] {
        assert_eq!(server.used("p", name).await, (0.0, 30.0), "{name}");
    }
    assert_eq!(large(&server).await, 0.0, "without a dimension, model caps too");
    assert!(told(server.quota().record_consumption(record("A", 40)).await).duplicate, "ids stay");
}

#[tokio::test]
async fn editing_a_plan_loses_no_usage() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0), dimension("requests/hourly", 10.0)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    server.record("A", "c1", tokens(40)).await;

    server.put_plan("c1", [dimension("tokens/60m", 50.0)]).await;
    assert_eq!(server.used("p", HOURLY).await, (40.0, 0.0));
    server.record("A", "c1", tokens(1)).await;
    server.put_plan("c1", [dimension("requests/hourly", 10.0), dimension(HOURLY, 1.0)]).await;
    assert_eq!(server.used("p", HOURLY).await, (41.0, 0.0));
    assert_eq!(server.used("p", "requests/hourly").await, (1.0, 0.0), "what came meanwhile is not in it");
}

#[tokio::test]
async fn a_pool_knows_when_a_call_last_matched_it() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.enforce("A", "c9", None).await;
    server.enforce("Z", "c1", None).await;
    assert_eq!(server.get_pool("p").await.last_matched_at, None);
    server.at(1_000);
    server.enforce("A", "c1", None).await;
    assert_eq!(unix_ms(&server.get_pool("p").await.last_matched_at), T0.unix_ms() + 1_000);
    server.at(2_000);
    server.record("A", "c1", requests(1)).await;
    assert_eq!(unix_ms(&server.get_pool("p").await.last_matched_at), T0.unix_ms() + 2_000);
}

#[tokio::test]
async fn every_write_is_one_revision_and_every_answer_says_which_it_used() {
    let server = TestServer::start().await;
    assert_eq!(server.enforce("A", "c1", None).await.config_revision, 0);
    let plan = server.put_plan("c1", [dimension(HOURLY, 1.0)]).await;
    let created = server.create(pool("p", ["c1"], [hard("A", 50.0)])).await;
    let changed = server.put_allocation("p", hard("A", 100.0)).await;
    assert_eq!((plan.revision, created.revision, changed.revision), (1, 2, 3));
    server.delete_plan("c1").await;
    assert_eq!(server.enforce("A", "c1", None).await.config_revision, 4);
    assert_eq!(server.enforce("Z", "c9", None).await.config_revision, 4);
    assert_eq!(server.usage("p").await.config_revision, 4);
    assert_eq!(server.get_pool("p").await.pool.expect("the pool").revision, 3, "its own last write");
}

#[tokio::test]
async fn a_restart_keeps_everything_that_was_acknowledged() {
    let mut server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 1_000.0), dimension("usd/daily", 5.0)]).await;
    server.put_plan("c7", [dimension("percent/weekly", 80.0)]).await;
    server.create(full_pool()).await;
    server.create(pool("gone", ["c8"], [hard("A", 100.0)])).await;
    let model = |request: pb::EnforceRequest| request.with_model("large");
    let minute = std::time::Duration::from_secs(60);
    let attempt = model(ask("A", "c2", tokens(4)).holding(minute).named("attempt"));
    let held = told(server.quota().enforce(attempt.clone()).await);
    let record = spent("A", "c1", tokens(5)).with_model("large").once("record");
    told(server.quota().record_consumption(record.clone()).await);
    server.delete_pool("gone").await;
    server.wait(1_000);
    server.record("owner", "c1", pb::Cost { usd: Some(0.1), ..tokens(6) }).await;

    let state = async |server: &TestServer| {
        let asked = told(server.quota().enforce(model(ask("A", "c1", tokens(1)))).await);
        let (pools, plans) = (server.list_pools().await, server.list_plans().await);
        let (usage, held) = (server.usage("team-a.1_x").await, server.reservations("team-a.1_x").await);
        (pools, plans, usage, held, asked)
    };
    let before = state(&server).await;
    server.restart().await;
    assert_eq!(state(&server).await, before);
    let again = told(server.quota().enforce(attempt).await);
    assert_eq!((again.reservation_id, again.repeated_request), (held.reservation_id, true));
    assert!(told(server.quota().record_consumption(record).await).duplicate);
    let next = server.create(pool("next", ["c9"], [])).await;
    assert_eq!(next.revision, before.4.config_revision + 1);
}
