//! What a decision says and what it holds, beyond the scenarios.

use std::time::Duration;

use crate::harness::{
    T0, TestServer, Verdict, ask, blocked, cost, dimension, exempt, hard, millis,
    pb::{
        self,
        dimension_status::Reason::{self, ExceedsLimit, GlobalSaturated, ModelCap},
        enforce_response::Decision,
    },
    percent, pool, requests, spent, tokens, told, unix_ms, unlimited,
};

const HOURLY: &str = "tokens/hourly";
const MINUTE: Duration = Duration::from_secs(60);

/// The pool `p` of `c1` with 100 tokens an hour.
async fn server_with(allocations: impl Into<Vec<pb::Allocation>>) -> TestServer {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    server.create(pool("p", ["c1"], allocations)).await;
    server
}

#[tokio::test]
async fn a_repeated_attempt_gets_its_reservation_back_and_holds_nothing_more() {
    let mut server = server_with([hard("A", 100.0)]).await;
    let attempt = ask("A", "c1", tokens(60)).holding(MINUTE).named("attempt");
    let first = told(server.quota().enforce(attempt.clone()).await);
    assert_eq!((first.verdict(), first.repeated_request), (Verdict::Allow, false));
    assert_eq!(unix_ms(&first.reservation_expires_at), T0.unix_ms() + 60_000);

    server.wait(10_000);
    // Twice 60 would be past the limit; another life is ignored.
    for life in [MINUTE, Duration::from_secs(1)] {
        server.restart().await;
        let again = told(server.quota().enforce(attempt.clone().holding(life)).await);
        assert_eq!((again.verdict(), again.repeated_request), (Verdict::Allow, true));
        assert_eq!(again.reservation_id, first.reservation_id);
        assert_eq!(again.reservation_expires_at, first.reservation_expires_at);
        assert_eq!(again.dimension(HOURLY).pool_reserved, 60.0, "today's numbers");
    }
    assert_eq!(server.used("p", HOURLY).await, (0.0, 60.0));

    // Settled, and still the same attempt until its deadline.
    server.settle("A", "c1", &first.reservation_id, tokens(30)).await;
    let again = told(server.quota().enforce(attempt.clone()).await);
    assert_eq!((again.reservation_id, again.repeated_request), (first.reservation_id.clone(), true));
    assert_eq!(server.used("p", HOURLY).await, (30.0, 0.0));

    server.at(60_000);
    let afresh = told(server.quota().enforce(attempt).await);
    assert!(!afresh.repeated_request && afresh.reservation_id != first.reservation_id, "{afresh:?}");
    assert_eq!(server.used("p", HOURLY).await, (30.0, 60.0));
}

#[tokio::test]
async fn a_block_is_not_remembered_and_another_connection_is_another_attempt() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 50.0)]).await;
    server.create(pool("p", ["c1", "c2"], [hard("A", 100.0)])).await;
    server.record("A", "c1", tokens(70)).await;
    let attempt = |connection| ask("A", connection, tokens(40)).holding(MINUTE).named("attempt");

    let answer = told(server.quota().enforce(attempt("c1")).await);
    let Verdict::Block { retry_after_ms: Some(wait), .. } = answer.verdict() else {
        panic!("110 of 100: {answer:?}");
    };
    server.wait(wait);
    let first = told(server.quota().enforce(attempt("c1")).await);
    assert_eq!((first.verdict(), first.repeated_request), (Verdict::Allow, false));
    let check = ask("A", "c1", tokens(1)).named("attempt");
    assert!(!told(server.quota().enforce(check).await).repeated_request, "a check has no attempt");

    server.reset("p").await;
    let second = told(server.quota().enforce(attempt("c2")).await);
    assert_eq!((second.verdict(), second.repeated_request), (Verdict::Allow, false));
    assert_ne!(second.reservation_id, first.reservation_id);
    assert_eq!(server.used("p", HOURLY).await, (0.0, 80.0));
}

#[tokio::test]
async fn a_settlement_is_remembered_as_long_as_an_idempotency_key() {
    let mut server = server_with([hard("A", 100.0)]).await;
    let held = server.reserve("A", "c1", tokens(10)).await.reservation_id;
    server.settle("A", "c1", &held, tokens(5)).await;
    let keyed = spent("A", "c1", tokens(5)).once("key");
    told(server.quota().record_consumption(keyed.clone()).await);

    server.at(600_000 - 1);
    server.restart().await;
    assert!(told(server.quota().record_consumption(keyed.clone()).await).duplicate);
    server.at(600_000);
    assert!(!told(server.quota().record_consumption(keyed).await).duplicate);
    // Its deadline was a minute after T0.
    server.at(660_000 - 1);
    assert!(server.settle("A", "c1", &held, tokens(5)).await.duplicate);
    server.at(660_000);
    let forgotten = server.settle("A", "c1", &held, tokens(5)).await;
    assert!(!forgotten.duplicate && forgotten.reservation_expired);
    assert_eq!(server.used("p", HOURLY).await, (20.0, 0.0));
}

#[tokio::test]
async fn an_idempotency_key_with_a_reservation_gives_the_hold_back_all_the_same() {
    let server = server_with([hard("A", 100.0)]).await;
    told(server.quota().record_consumption(spent("A", "c1", tokens(5)).once("key")).await);
    let held = server.reserve("A", "c1", tokens(10)).await.reservation_id;
    let both = spent("A", "c1", tokens(5)).once("key").settling(&held);
    assert!(told(server.quota().record_consumption(both).await).duplicate);
    assert_eq!(server.used("p", HOURLY).await, (5.0, 0.0));
    assert!(server.settle("A", "c1", &held, tokens(5)).await.duplicate, "both are remembered");
    assert_eq!(server.used("p", HOURLY).await, (5.0, 0.0));
}

#[tokio::test]
async fn a_late_settlement_counts_once_and_says_so() {
    let server = server_with([hard("A", 100.0)]).await;
    let expired = server.reserve("A", "c1", tokens(10)).await.reservation_id;
    let released = server.reserve("A", "c1", tokens(10)).await.reservation_id;
    assert!(server.release(&released).await);
    server.at(60_000);
    let mut counted = 0.0;
    for id in [expired.as_str(), released.as_str(), "never heard of", "r999-0123456789abcdef01234567"] {
        counted += 3.0;
        for duplicate in [false, true] {
            let late = server.settle("A", "c1", id, tokens(3)).await;
            assert_eq!((late.duplicate, late.reservation_expired), (duplicate, true), "{id}");
            assert_eq!(server.used("p", HOURLY).await, (counted, 0.0), "{id}");
        }
    }
}

#[tokio::test]
async fn an_absent_cost_is_one_request_and_a_further_part_is_none() {
    let server = TestServer::start().await;
    server.put_plan("c1", [unlimited("requests/hourly"), unlimited(HOURLY), unlimited("percent/5h")]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    told(server.quota().record_consumption(spent("A", "c1", None)).await);
    server.record("A", "c1", tokens(5)).await;
    server.record("A", "c1", cost(0, 7)).await;
    server.record("A", "c1", percent(0.29)).await;
    let usage = server.usage("p").await;
    let consumed = ["requests/hourly", HOURLY, "percent/5h"].map(|name| usage.dimension(name).consumed);
    assert_eq!(consumed, [3.0, 12.0, 0.29]);

    let answer = server.enforce("A", "c1", None).await;
    assert_eq!(answer.dimension("requests/hourly").estimate, 1.0);
    let held = server.reserve("A", "c1", requests(0)).await;
    assert_ne!(held.reservation_id, "", "a reservation may hold nothing");
    assert!(server.release(&held.reservation_id).await);
}

#[tokio::test]
async fn a_pool_in_shadow_allows_counts_holds_and_says_what_it_would_have_said() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).in_shadow()).await;

    let answer = server.reserve("A", "c1", tokens(90)).await;
    assert_eq!(answer.verdict(), Verdict::Allow);
    let shadow = answer.shadow.expect("what it would have been");
    assert_eq!((shadow.decision(), shadow.reason()), (Decision::Allow, Reason::Ok));

    let answer = server.enforce("A", "c1", tokens(20)).await;
    assert_eq!(answer.verdict(), Verdict::Allow);
    assert_eq!(answer.dimension(HOURLY).reason(), GlobalSaturated);
    let shadow = answer.shadow.expect("what it would have been");
    assert_eq!((shadow.decision(), shadow.reason()), (Decision::Block, GlobalSaturated));
    assert_eq!(shadow.retry_after.as_ref().map(millis), Some(60_000));
    assert_ne!(shadow.message, "");
    assert_eq!(server.used("p", HOURLY).await, (0.0, 90.0), "a check holds nothing");

    // The request will be sent, so it is held although it would be blocked.
    let answer = server.reserve("A", "c1", tokens(20)).await;
    assert_ne!(answer.reservation_id, "");
    assert_eq!(server.used("p", HOURLY).await, (0.0, 110.0));
    server.settle("A", "c1", &answer.reservation_id, tokens(25)).await;
    assert_eq!(server.used("p", HOURLY).await, (25.0, 90.0));
}

#[tokio::test]
async fn an_exempt_key_is_counted_and_never_limited() {
    let server = server_with([exempt("owner"), hard("A", 0.0), hard("B", 0.0)]).await;
    server.record("owner", "c1", tokens(95)).await;
    let answer = server.reserve("owner", "c1", tokens(500)).await;
    assert_eq!((answer.verdict(), answer.reason()), (Verdict::Allow, Reason::Ok));
    let status = answer.dimension(HOURLY);
    assert_eq!((status.key_remaining, status.fair_share, status.borrowing), (None, None, false));
    assert_eq!(server.used("p", HOURLY).await, (95.0, 500.0));

    let answer = server.enforce("A", "c1", tokens(1)).await;
    assert!(matches!(answer.verdict(), Verdict::Block { reason: GlobalSaturated, .. }), "{answer:?}");
    assert_eq!(answer.dimension(HOURLY).fair_share, Some(50.0), "split among the keys that are limited");
    let usage = server.usage("p").await;
    let owner = usage.dimension(HOURLY).key("owner");
    assert_eq!((owner.consumed, owner.reserved, owner.fair_share), (95.0, 500.0, None));
}

#[tokio::test]
async fn a_model_cap_binds_that_model_alone_also_without_a_plan() {
    const LARGE: &str = "tokens/hourly of large";
    let server = TestServer::start().await;
    let capped = hard("A", 100.0).capped_for("large", HOURLY, 50.0);
    let stored = server.create(pool("p", ["c1"], [capped, hard("B", 0.0)])).await;
    let ask_large = |n| ask("A", "c1", tokens(n)).with_model("large");
    let enforce = async |request: pb::EnforceRequest| told(server.quota().enforce(request).await);

    let answer = enforce(ask_large(50)).await;
    assert_eq!((answer.verdict(), answer.reason()), (Verdict::Allow, Reason::NoPlan));
    assert_eq!(answer.dimension(LARGE).key_remaining, Some(50.0));
    assert_eq!(enforce(ask_large(51)).await.verdict(), blocked(ExceedsLimit, LARGE, None));

    let held = enforce(ask_large(10).holding(MINUTE)).await.reservation_id;
    assert_eq!(enforce(ask_large(41)).await.verdict(), blocked(ModelCap, LARGE, 60_000));
    let settle = spent("A", "c1", tokens(50)).with_model("large").settling(&held);
    told(server.quota().record_consumption(settle).await);
    // Below 50 as soon as the next hour has begun; a token is free 72 s later.
    assert_eq!(enforce(ask_large(1)).await.verdict(), blocked(ModelCap, LARGE, 3_672_000));
    for other in [ask("A", "c1", tokens(1)).with_model("small"), ask("A", "c1", tokens(1))] {
        let answer = enforce(other).await;
        assert_eq!((answer.verdict(), answer.reason()), (Verdict::Allow, Reason::NoPlan));
        assert_eq!(answer.dimensions, []);
    }
    let of_b = pb::EnforceRequest { api_key_id: "B".to_owned(), ..ask_large(99) };
    assert_eq!(enforce(of_b).await.verdict(), Verdict::Allow);

    // A new value keeps the counter, a new window starts at 0.
    let recapped = |name: &str, value| {
        let allocations = vec![hard("A", 100.0).capped_for("large", name, value)];
        pb::Pool { allocations, revision: 0, ..stored.clone() }
    };
    server.update(recapped("tokens/60m", 60.0)).await;
    assert_eq!(enforce(ask_large(1)).await.dimension(LARGE).key_consumed, 50.0);
    server.update(recapped("tokens/5h", 60.0)).await;
    assert_eq!(enforce(ask_large(1)).await.dimension("tokens/5h of large").key_consumed, 0.0);
}

#[tokio::test]
async fn of_several_refusals_the_longest_is_reported_and_the_status_of_all() {
    let server = TestServer::start().await;
    server
        .put_plan(
            "c1",
            [dimension(HOURLY, 100.0), dimension("tokens/daily", 100.0), dimension("tokens/5h", 900.0)],
        )
        .await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    server.record("A", "c1", tokens(100)).await;

    let answer = server.enforce("A", "c1", tokens(1)).await;
    assert_eq!(answer.verdict(), blocked(GlobalSaturated, "tokens/daily", 87_264_000));
    // dimension | why | how long, of itself
    let cases = [
        (HOURLY, GlobalSaturated, Some(3_636_000)),
        ("tokens/daily", GlobalSaturated, Some(87_264_000)),
        ("tokens/5h", Reason::Ok, None),
    ];
    for (name, reason, wait) in cases {
        let status = answer.dimension(name);
        assert_eq!((status.reason(), status.retry_after.as_ref().map(millis)), (reason, wait), "{name}");
    }
    let order: Vec<&str> = answer.dimensions.iter().map(|status| status.window.as_str()).collect();
    assert_eq!(order, ["hourly", "daily", "5h"], "the plan's order");
}

#[tokio::test]
async fn remaining_is_the_largest_estimate_that_is_allowed() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    let allocations = [hard("A", 30.0), hard("B", 70.0).capped(40.0, pb::dimension::Unit::Tokens)];
    server.create(pool("p", ["c1", "c2"], allocations)).await;

    // recorded for A | A | B
    let cases = [
        (0, 100.0, 40.0),  // one connection's limit; the cap
        (70, 100.0, 40.0), // 130 are left of 200
        (29, 100.0, 40.0), // 101 are left, the mode is generous
        (1, 0.0, 40.0),    // strict: A is past its share of 60
        (80, 0.0, 20.0),   // what the pool has left
    ];
    for (recorded, a, b) in cases {
        server.record("A", "c1", tokens(recorded)).await;
        for (key, want) in [("A", a), ("B", b)] {
            let status = server.enforce(key, "c2", tokens(0)).await;
            let remaining = status.dimension(HOURLY).key_remaining;
            assert_eq!(remaining, Some(want), "{key} after {recorded}");
            let largest = server.enforce(key, "c2", tokens(want as i64)).await.verdict();
            assert!(want == 0.0 || largest == Verdict::Allow, "{key} after {recorded}: {largest:?}");
            let larger = server.enforce(key, "c2", tokens(want as i64 + 1)).await.verdict();
            assert_ne!(larger, Verdict::Allow, "{key} after {recorded}");
        }
    }
}

#[tokio::test]
async fn the_owners_reserve_is_kept_out_of_every_share() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension("percent/5h", 100.0)]).await;
    let kept = pb::Pool { owner_reserve: 0.2, ..pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)]) };
    server.create(kept).await;
    let answer = server.enforce("A", "c1", percent(81.0)).await;
    assert_eq!(answer.verdict(), blocked(ExceedsLimit, "percent/5h", None));
    let status = answer.dimension("percent/5h");
    assert_eq!((status.limit, status.fair_share), (Some(80.0), Some(40.0)));
    assert_eq!(status.used_fraction, None, "nothing is known of it yet");
    assert_eq!(server.enforce("A", "c1", percent(80.0)).await.verdict(), Verdict::Allow);
}

#[tokio::test]
async fn a_small_step_back_of_the_clock_stops_time_and_a_large_one_is_believed() {
    const HOUR: u64 = 3_600_000;
    let mut server = server_with([hard("A", 100.0)]).await;
    server.at(2 * HOUR);
    server.record("A", "c1", tokens(50)).await;
    server.reserve("A", "c1", tokens(10)).await;

    for restart in [false, true] {
        server.at(HOUR + HOUR / 2);
        if restart {
            server.restart().await;
        }
        assert_eq!(server.used("p", HOURLY).await, (50.0, 10.0), "restarted: {restart}");
        let generated_at = server.usage("p").await.generated_at;
        assert_eq!(unix_ms(&generated_at), T0.unix_ms() + 2 * HOUR, "restarted: {restart}");
    }

    // What was ahead counts in the present hour, and nothing is held for longer than anything may be.
    server.at(HOUR - 1);
    assert_eq!(server.used("p", HOURLY).await, (50.0, 10.0));
    server.record("A", "c1", tokens(6)).await;
    server.restart().await;
    // ms after T0 | consumed | reserved
    for (at, consumed, reserved) in
        [(HOUR + HOUR / 2, 28.0, 10.0), (2 * HOUR - 2, 0.0, 10.0), (2 * HOUR - 1, 0.0, 0.0)]
    {
        server.at(at);
        let (seen, held) = server.used("p", HOURLY).await;
        assert_eq!((seen.floor(), held), (consumed, reserved), "at T0+{at}");
    }
}

#[tokio::test]
async fn sums_stop_at_their_ceiling_and_what_was_held_is_given_back_exactly() {
    const MOST: i64 = 9_000_000_000_000_000;
    let server = server_with([exempt("A")]).await;
    let first = server.reserve("A", "c1", tokens(MOST)).await.reservation_id;
    let second = server.reserve("A", "c1", tokens(7)).await.reservation_id;
    assert_eq!(server.used("p", HOURLY).await, (0.0, MOST as f64));
    assert!(server.release(&first).await);
    server.reserve("A", "c1", tokens(5)).await;
    assert!(server.release(&second).await);
    assert_eq!(server.used("p", HOURLY).await, (0.0, 5.0));

    for _ in 0..2 {
        server.record("A", "c1", tokens(MOST)).await;
        assert_eq!(server.used("p", HOURLY).await, (MOST as f64, 5.0));
    }
}
