//! G: what is shown comes from the same numbers as what is enforced.

use crate::harness::{
    TestServer, Verdict, ask, blocked, dimension, hard, millis,
    pb::{self, dimension_status::Reason::FairShare},
    pool, requests, tokens, usd,
};

#[tokio::test]
async fn g01_preview_and_usage_read_the_numbers_of_enforcement_and_change_nothing() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 20.0), hard("B", 80.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(760)).await;

    // Generous again once 760 has aged to below 750.
    let want = blocked(FairShare, "requests/hourly", 3_647_369);
    for _ in 0..1_000 {
        assert_eq!(server.preview(ask("A", "c1", requests(1))).await.verdict(), want);
        assert_eq!(server.enforce("A", "c1", requests(1)).await.verdict(), want);
    }
    let usage = server.usage("p").await;
    let usage = usage.dimension("requests/hourly");
    assert_eq!((usage.consumed, usage.reserved), (760.0, 0.0));
    assert_eq!(usage.used_fraction, Some(760.0 / 1_500.0));
    // key | over its share | borrowing
    for (key, over, borrowing) in [("A", 460.0, true), ("B", -1_200.0, false)] {
        let key = usage.key(key);
        assert_eq!((key.over_fair_share, key.borrowing), (Some(over), borrowing), "{key:?}");
    }
}

#[tokio::test]
async fn g01_the_estimate_counts_against_the_fair_share() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 20.0), hard("B", 80.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(298)).await;
    server.record("B", "c1", requests(500)).await;

    assert_eq!(server.enforce("A", "c1", requests(1)).await.verdict(), Verdict::Allow);
    // 303 of 300, and 0.53 is strict; 298 has aged to 295 after 36.24 s of the next hour.
    let verdict = server.enforce("A", "c1", requests(5)).await.verdict();
    assert_eq!(verdict, blocked(FairShare, "requests/hourly", 3_636_242));
}

/// Units a second, and the time to exhaustion in ms.
async fn burn(server: &TestServer, dimension: &str) -> (f64, Option<u64>) {
    let usage = server.usage("p").await;
    let rate = usage.dimension(dimension).burn_rate.expect("each dimension has one");
    (rate.units_per_second, rate.time_to_exhaustion.as_ref().map(millis))
}

#[tokio::test]
async fn g03_the_burn_rate_is_an_average_over_samples_of_any_unit() {
    let server = TestServer::start().await;
    server
        .put_plan(
            "c1",
            [dimension("tokens/5h", 1e6), dimension("requests/5h", 4.0), dimension("usd/5h", 1e3)],
        )
        .await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    assert_eq!(burn(&server, "tokens/5h").await, (0.0, None));
    let one = |tokens: pb::Cost, dollars| pb::Cost { usd: Some(dollars), ..tokens };
    server.record("A", "c1", one(tokens(0), 0.0)).await;
    assert_eq!(burn(&server, "tokens/5h").await, (0.0, None), "one sample");
    // tokens and dollars in 10 s | tokens a second
    for (more, want) in [(1_000, 100.0), (2_000, 130.0), (0, 91.0)] {
        server.wait(10_000);
        server.record("A", "c1", one(tokens(more), more as f64 / 100.0)).await;
        assert_eq!(burn(&server, "tokens/5h").await.0, want);
    }
    let left_ms = burn(&server, "tokens/5h").await.1.expect("it is used");
    assert!(left_ms.abs_diff(10_956_044) <= 1, "{left_ms}");
    assert!((burn(&server, "usd/5h").await.0 - 0.91).abs() < 1e-9);
    let (rate, left_ms) = burn(&server, "requests/5h").await;
    assert!((rate - 0.1).abs() < 1e-9);
    assert_eq!(left_ms, Some(0), "the limit is reached");

    // The first second of a new window is no burst.
    server.wait(5 * 3_600_000);
    server.record("A", "c1", usd(0.0)).await;
    let (rate, _) = burn(&server, "tokens/5h").await;
    assert!(rate < 91.0, "{rate}");
}
