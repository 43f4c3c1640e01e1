//! A: who is admitted, in which mode, under which policy.

use quota_share::config::{Args, Config};
use tonic::Code;

use crate::harness::{
    TestServer, Verdict, ask, blocked, burst, cost, dimension, failed_start, hard,
    pb::{
        dimension::Unit,
        dimension_status::{
            Mode,
            Reason::{self, CapAbsolute, FairShare, GlobalSaturated},
        },
    },
    pool, refusal, requests, soft, tokens,
};

#[tokio::test]
async fn a01_generous_mode_lets_a_key_borrow_idle_capacity() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 20.0), hard("B", 80.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(600)).await;

    let answer = server.enforce("A", "c1", None).await;
    assert_eq!((answer.verdict(), answer.reason()), (Verdict::Allow, Reason::Ok));
    let status = answer.dimension("requests/hourly");
    assert_eq!((status.mode(), status.used_fraction), (Mode::Generous, Some(0.4)));
    assert_eq!((status.borrowing, status.fair_share), (true, Some(300.0)));

    let usage = server.usage("p").await;
    let usage = usage.dimension("requests/hourly");
    assert_eq!((usage.limit, usage.consumed, usage.mode()), (Some(1_500.0), 600.0, Mode::Generous));
    // key | consumed | fair share | over it | borrowing
    let cases = [("A", 600.0, 300.0, 300.0, true), ("B", 0.0, 1_200.0, -1_200.0, false)];
    for (key, consumed, share, over, borrowing) in cases {
        let key = usage.key(key);
        assert_eq!((key.consumed, key.borrowing), (consumed, borrowing), "{key:?}");
        assert_eq!((key.fair_share, key.over_fair_share), (Some(share), Some(over)), "{key:?}");
    }
}

#[tokio::test]
async fn a04_a_soft_key_past_its_share_is_ranked_lower_and_never_blocked_by_it() {
    let mut server = TestServer::start().await;
    server.create(pool("p", ["c1"], [soft("A", 20.0), hard("B", 80.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(400)).await;
    server.record("B", "c1", requests(400)).await;

    let answer = server.enforce("A", "c1", None).await;
    assert_eq!((answer.verdict(), answer.reason()), (Verdict::Deprioritize(0.7), Reason::Ok));
    assert_eq!(server.enforce("B", "c1", None).await.verdict(), Verdict::Allow);
    assert!(0.90 * answer.score_factor < 0.65, "another candidate ranks first");

    server.restart_with(|config| config.soft_deprioritize_factor = 0.25).await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Deprioritize(0.25));
}

#[tokio::test]
async fn a04_a_factor_that_is_no_fraction_refuses_the_start_and_says_why() {
    let folder = tempfile::TempDir::new().expect("a temporary folder");
    let given = [("QUOTA_SOFT_DEPRIORITIZE_FACTOR", "7"), ("QUOTA_SATURATION_THRESHOLD", "half")];
    let (code, log) = failed_start(folder.path(), &given).await;
    assert_eq!(code, Some(2), "{log}");
    for (variable, value) in given {
        assert!(log.contains(variable) && log.contains(value), "{log}");
    }
    assert!(log.contains("0 to 1"), "{log}");

    let args = Args { quota_soft_deprioritize_factor: Some("7".to_owned()), ..Args::default() };
    assert_eq!(Config::check(&args).expect_err("7 is no fraction").0.len(), 1);
}

#[tokio::test]
async fn a05_a_soft_key_is_still_stopped_by_the_pool_ceiling() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [soft("A", 20.0), hard("B", 80.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(400)).await;
    server.record("B", "c1", requests(1_100)).await;

    for key in ["A", "B"] {
        let verdict = server.enforce(key, "c1", None).await.verdict();
        assert_eq!(verdict, blocked(GlobalSaturated, "requests/hourly", 3_602_400), "{key}");
    }
}

#[tokio::test]
async fn a06_a_burst_key_in_strict_mode_passes_until_the_pool_is_empty() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [burst("A", 10.0), hard("B", 90.0)]).with_provider("kimi")).await;

    server.record("A", "c1", requests(1_000)).await;
    let answer = server.enforce("A", "c1", None).await;
    assert_eq!(answer.verdict(), Verdict::Allow);
    assert_eq!(answer.dimension("requests/hourly").mode(), Mode::Strict);

    server.record("A", "c1", requests(499)).await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);

    server.record("A", "c1", requests(1)).await;
    for key in ["A", "B"] {
        let verdict = server.enforce(key, "c1", None).await.verdict();
        assert_eq!(verdict, blocked(GlobalSaturated, "requests/hourly", 3_602_400), "{key}");
    }
}

#[tokio::test]
async fn a07_an_absolute_cap_beats_mode_and_policy() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension("tokens/daily", 1e6)]).await;
    server.create(pool("p", ["c1"], [burst("A", 100.0).capped(50_000.0, Unit::Tokens)])).await;

    server.record("A", "c1", tokens(49_999)).await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);

    server.record("A", "c1", tokens(1)).await;
    let answer = server.enforce("A", "c1", None).await;
    assert_eq!(answer.verdict(), blocked(CapAbsolute, "tokens/daily", 86_400_001));
    assert_eq!(answer.dimension("tokens/daily").used_fraction, Some(0.05));
}

#[tokio::test]
async fn a10_any_dimension_blocks_and_none_leaks_into_another() {
    let server = TestServer::start().await;
    let plan = [dimension("requests/hourly", 1_500.0), dimension("tokens/daily", 1e6)];
    server.put_plan("c1", plan).await;
    server.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)])).await;
    server.record("A", "c1", cost(10, 400_000)).await;
    server.record("B", "c1", cost(10, 600_000)).await;

    let verdict = server.enforce("A", "c1", None).await.verdict();
    assert_eq!(verdict, blocked(GlobalSaturated, "tokens/daily", 86_400_001));

    // at | requests | tokens
    for (at, requests, tokens) in [(0, 20.0, 1e6), (5_400_000, 10.0, 1e6)] {
        server.at(at);
        let usage = server.usage("p").await;
        let seen = ["requests/hourly", "tokens/daily"].map(|name| usage.dimension(name).consumed);
        assert_eq!(seen, [requests, tokens], "at T0+{at}");
    }
}

#[tokio::test]
async fn a12_the_limit_is_split_equally_only_when_all_weights_are_zero() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension("tokens/daily", 1e6)]).await;
    let keys = ["A", "B", "C", "D"];
    let stored = server.create(pool("p", ["c1"], keys.map(|key| hard(key, 0.0)))).await;
    server.record("A", "c1", tokens(300_000)).await;
    server.record("B", "c1", tokens(240_000)).await;

    // A comes back where the mode is generous again: 540,000 has aged to below 500,000.
    let generous_again = blocked(FairShare, "tokens/daily", 92_800_001);
    let expected = [generous_again, Verdict::Allow, Verdict::Allow, Verdict::Allow];
    for (key, verdict) in keys.into_iter().zip(expected) {
        let answer = server.enforce(key, "c1", None).await;
        assert_eq!(answer.verdict(), verdict, "{key}");
        assert_eq!(answer.dimension("tokens/daily").fair_share, Some(250_000.0), "{key}");
        let usage = server.usage("p").await;
        assert_eq!(usage.dimension("tokens/daily").key(key).fair_share, Some(250_000.0), "{key}");
    }

    let allocations = vec![hard("A", 0.0), hard("B", 60.0)];
    server.update(crate::harness::pb::Pool { allocations, ..stored }).await;
    server.reset("p").await;
    server.record("A", "c1", tokens(1_000)).await;
    server.record("B", "c1", tokens(400_000)).await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);

    server.record("B", "c1", tokens(150_000)).await;
    let answer = server.enforce("A", "c1", None).await;
    assert_eq!(answer.verdict(), blocked(FairShare, "tokens/daily", 94_397_097));
    assert_eq!(answer.dimension("tokens/daily").fair_share, Some(0.0));
    assert_eq!(server.enforce("B", "c1", None).await.verdict(), Verdict::Allow);
}

#[tokio::test]
async fn a13_keys_and_connections_outside_every_pool_are_not_limited() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(1_500)).await;

    for (key, connection) in [("Z", "c1"), ("A", "c9")] {
        let answer = server.enforce(key, connection, None).await;
        assert_eq!(
            (answer.verdict(), answer.reason()),
            (Verdict::Allow, Reason::NoPool),
            "{key} {connection}"
        );
        assert_eq!((answer.pool_id.as_str(), answer.dimensions.len()), ("", 0), "{key} {connection}");
    }
    let recorded = server.record("Z", "c1", requests(1)).await;
    assert_eq!((recorded.pool_id.as_str(), recorded.duplicate), ("", false));
    assert_eq!(server.used("p", "requests/hourly").await, (1_500.0, 0.0));

    let refused = refusal(server.quota().enforce(ask("", "c1", None)).await);
    assert_eq!(refused.code, Code::InvalidArgument);
    refused.names(&["api_key_id"]);
}
