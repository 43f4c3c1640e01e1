//! G: what is shown comes from the same numbers as what is enforced.

use crate::harness::{
    TestServer, Verdict, ask, blocked, hard, pb::dimension_status::Reason::FairShare, pool, requests,
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
