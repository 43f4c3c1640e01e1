//! D: what the provider says.

use crate::harness::{
    TestServer, Verdict, blocked, codex, dimension, hard,
    pb::dimension_status::Reason::{FairShare, GlobalSaturated},
    pool, said, spent, tokens, told, unix_ms,
};

const SHORT: &str = "percent/5h";
const LONG: &str = "percent/weekly";

#[tokio::test]
async fn d02_codex_windows_are_read_separately_and_by_their_length() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("codex")).await;
    let verdict = async || server.enforce("A", "c1", None).await.verdict();
    // of 5 h | of the week | what is full
    for (short, long, full) in [
        (Some(100.0), Some(20.0), Some(SHORT)),
        (Some(20.0), Some(100.0), Some(LONG)),
        (None, Some(100.0), Some(LONG)),
        (Some(20.0), Some(30.0), None),
    ] {
        let figures =
            [(SHORT, short), (LONG, long)].into_iter().filter_map(|(name, used)| Some(said(name, used?)));
        server.report("c1", figures.collect::<Vec<_>>()).await;
        let want = full.map_or(Verdict::Allow, |full| blocked(GlobalSaturated, full, None));
        assert_eq!(verdict().await, want, "{short:?} {long:?}");
    }

    // The same as headers: the slot does not matter, the window's length does.
    let record = spent("A", "c1", tokens(0)).with_headers(codex(10_080, 100.0, 86_400), 0);
    told(server.quota().record_consumption(record).await);
    assert_eq!(verdict().await, blocked(GlobalSaturated, LONG, 86_400_000));
    server.report("c1", [said(LONG, 30.0)]).await;

    // A limit below 100 keeps a reserve for the account's owner.
    server.put_plan("c1", [dimension(SHORT, 80.0)]).await;
    server.report("c1", [said(SHORT, 79.0)]).await;
    assert_eq!(verdict().await, Verdict::Allow);
    server.report("c1", [said(SHORT, 81.0)]).await;
    assert_eq!(verdict().await, blocked(GlobalSaturated, SHORT, None));
}

#[tokio::test]
async fn d04_a_figure_is_forgotten_after_its_time_and_resets_are_understood() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 10.0), hard("B", 90.0)]).with_provider("codex")).await;
    server.report("c1", [said(SHORT, 0.0)]).await;
    server.record("A", "c1", tokens(100)).await;
    server.report("c1", [said(SHORT, 95.0)]).await;
    let verdict = async || server.enforce("A", "c1", None).await.verdict();
    assert_eq!(verdict().await, blocked(FairShare, SHORT, None), "the rise is A's");
    server.at(29_000);
    assert_eq!(verdict().await, blocked(FairShare, SHORT, None));
    server.at(61_000);
    assert_eq!(verdict().await, Verdict::Allow, "nothing is known any more");
    let usage = server.usage("p").await;
    let signal = &usage.dimension(SHORT).signals[0];
    assert_eq!(
        (signal.used_fraction, signal.fresh, unix_ms(&signal.observed_at)),
        (0.95, false, 1_782_864_000_000)
    );
}

#[tokio::test]
async fn d04_headers_of_a_minute_end_a_figure_and_anchor_nothing() {
    let server = TestServer::start().await;
    server.put_plan("c2", [dimension("tokens/1m", 1_000.0)]).await;
    server.create(pool("q", ["c2"], [hard("A", 10.0), hard("B", 90.0)]).with_provider("openai")).await;
    let headers = |reset| {
        [
            ("X-RateLimit-Limit-Tokens", "1000"),
            ("x-ratelimit-remaining-tokens", "100"),
            ("x-ratelimit-reset-tokens", reset),
        ]
    };
    // reset | ms after T0
    for (reset, ends) in [
        ("6m0s", 360_000),
        ("1h30m15s", 5_415_000),
        ("1.5s", 1_500),
        ("250ms", 250),
        ("2026-07-01T00:00:30Z", 30_000),
    ] {
        let outcome = server.report_headers("c2", headers(reset)).await;
        assert_eq!(outcome.ignored, Vec::<String>::new(), "{reset}");
        let ends_at = 1_782_864_000_000 + ends;
        assert_eq!(unix_ms(&outcome.accepted[0].resets_at), ends_at, "{reset}");
        let usage = server.usage("q").await;
        let usage = usage.dimension("tokens/1m");
        assert_eq!((usage.signals[0].used_fraction, unix_ms(&usage.signals[0].resets_at)), (0.9, ends_at));
        assert_eq!((&usage.resets_at, usage.external), (&None, 900.0), "{reset} anchors nothing");
    }
    let before = server.usage("q").await;
    for (limit, remaining) in [(Some("1000"), "1001"), (Some("0"), "0"), (None, "100")] {
        let limit = limit.map(|limit| ("x-ratelimit-limit-tokens", limit));
        let remaining = ("x-ratelimit-remaining-tokens", remaining);
        let outcome = server.report_headers("c2", limit.into_iter().chain([remaining])).await;
        assert_eq!(outcome.accepted, [], "{limit:?} {remaining:?}");
        assert_eq!(outcome.ignored.len(), 1, "{:?}", outcome.ignored);
        assert!(outcome.ignored[0].starts_with("x-ratelimit-"), "{:?}", outcome.ignored);
        assert_eq!(server.usage("q").await, before);
    }
}
