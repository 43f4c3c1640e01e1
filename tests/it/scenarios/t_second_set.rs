//! T: the second set. Unless said otherwise: one key of weight 100, hard, in an idle pool with a limit of 100 tokens an hour.

use std::time::Duration;

use futures::future::join_all;
use tonic::Code;

use crate::harness::{
    TestServer, Verdict, ask, blocked, cost, dimension, hard,
    pb::{
        self,
        dimension::Unit,
        dimension_status::{
            Mode,
            Reason::{ExceedsLimit, FairShare, GlobalSaturated},
        },
    },
    pool, redis_is_missing, refusal, requests, spent, tokens, usd,
};

const HOURLY: &str = "tokens/hourly";

/// The pool `p` of connection `c1`, with a limit of `limit` tokens an hour.
async fn server_with(limit: f64, allocations: impl Into<Vec<pb::Allocation>>) -> TestServer {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, limit)]).await;
    server.create(pool("p", ["c1"], allocations)).await;
    server
}

async fn server_of_one_key() -> TestServer {
    server_with(100.0, [hard("A", 100.0)]).await
}

/// Two replicas of the pool `p` of connection `c1`, with a limit of 100 tokens an hour for one key; `None` without Redis.
async fn two_replicas() -> Option<[TestServer; 2]> {
    if redis_is_missing() {
        return None;
    }
    let one = TestServer::start_on_redis().await;
    let other = one.another_replica().await;
    one.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    one.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    other.until_it_follows(&one).await;
    Some([other, one])
}

#[tokio::test]
async fn t01_two_replicas_together_admit_exactly_what_fits() {
    let Some(replicas) = two_replicas().await else { return };
    for round in 0..100 {
        let asked = (0..60).map(|n| replicas[n % 2].reserve("A", "c1", tokens(3)));
        let answers = join_all(asked).await;
        let is_full = |verdict| matches!(verdict, Verdict::Block { reason: GlobalSaturated, .. });
        let blocked = answers.iter().filter(|answer| is_full(answer.verdict())).count();
        let held: Vec<_> =
            answers.into_iter().map(|answer| answer.reservation_id).filter(|id| !id.is_empty()).collect();
        assert_eq!((held.len(), blocked), (33, 27), "round {round}");
        for replica in &replicas {
            assert_eq!(replica.used("p", HOURLY).await, (0.0, 99.0), "round {round}");
        }
        // Whichever replica has made a reservation, any can give it back.
        let released = join_all(held.iter().enumerate().map(|(n, id)| replicas[n % 2].release(id))).await;
        assert!(released.into_iter().all(|released| released), "round {round}");
    }
}

#[tokio::test]
async fn t02_a_refused_request_costs_nothing() {
    let server = server_of_one_key().await;
    server.record("A", "c1", tokens(90)).await;

    let verdict = server.reserve("A", "c1", tokens(50)).await.verdict();
    assert!(matches!(verdict, Verdict::Block { reason: GlobalSaturated, .. }), "{verdict:?}");
    assert_eq!(server.reserve("A", "c1", tokens(10)).await.verdict(), Verdict::Allow);
    // The 90 that were recorded age by 1 in 40 s of the next hour; the 10 that are held end after a minute.
    let verdict = server.reserve("A", "c1", tokens(1)).await.verdict();
    assert_eq!(verdict, blocked(GlobalSaturated, HOURLY, 60_000));
    assert_eq!(server.used("p", HOURLY).await, (90.0, 10.0));
}

#[tokio::test]
async fn t03_what_one_dimension_refuses_costs_nothing_in_the_others() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension("requests/hourly", 10.0), dimension(HOURLY, 100.0)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    server.record("A", "c1", cost(1, 95)).await;

    for _ in 0..20 {
        let answer = server.reserve("A", "c1", cost(1, 10)).await;
        let Verdict::Block { reason: GlobalSaturated, by, .. } = answer.verdict() else {
            panic!("105 of 100 tokens: {answer:?}");
        };
        assert_eq!(by, HOURLY);
    }
    assert_eq!(server.reserve("A", "c1", cost(1, 5)).await.verdict(), Verdict::Allow);
    assert_eq!(server.used("p", "requests/hourly").await, (1.0, 1.0));
    assert_eq!(server.used("p", HOURLY).await, (95.0, 5.0));
}

#[tokio::test]
async fn t04_what_can_never_fit_is_told_so() {
    let server = server_with(100.0, [hard("A", 50.0), hard("capped", 50.0).capped(50.0, Unit::Tokens)]).await;

    let answer = server.reserve("A", "c1", tokens(150)).await;
    assert_eq!(answer.verdict(), blocked(ExceedsLimit, HOURLY, None));
    assert!(answer.message.contains("100") && answer.message.contains("150"), "{}", answer.message);

    let answer = server.reserve("capped", "c1", tokens(60)).await;
    assert_eq!(answer.verdict(), blocked(ExceedsLimit, HOURLY, None));
    assert!(answer.message.contains("cap") && answer.message.contains("50"), "{}", answer.message);
    assert_eq!(answer.dimension(HOURLY).cap, Some(50.0));

    assert_eq!(server.used("p", HOURLY).await, (0.0, 0.0));
    assert_eq!(server.reservations("p").await, []);
}

#[tokio::test]
async fn t05_settling_counts_what_it_cost_and_remaining_is_never_negative() {
    let server = server_of_one_key().await;

    let held = server.reserve("A", "c1", tokens(40)).await;
    assert_eq!(server.used("p", HOURLY).await, (0.0, 40.0));
    server.settle("A", "c1", &held.reservation_id, tokens(15)).await;
    assert_eq!(server.used("p", HOURLY).await, (15.0, 0.0));

    let held = server.reserve("A", "c1", tokens(40)).await;
    server.settle("A", "c1", &held.reservation_id, tokens(120)).await;
    assert_eq!(server.used("p", HOURLY).await, (135.0, 0.0));

    let answer = server.reserve("A", "c1", tokens(1)).await;
    assert!(matches!(answer.verdict(), Verdict::Block { reason: GlobalSaturated, .. }), "{answer:?}");
    assert_eq!(answer.dimension(HOURLY).key_remaining, Some(0.0));
}

#[tokio::test]
async fn t06_reservations_that_nobody_settles_end_at_their_deadline() {
    let server = server_of_one_key().await;
    for _ in 0..10 {
        assert_eq!(server.reserve("A", "c1", tokens(10)).await.verdict(), Verdict::Allow);
    }

    server.at(30_000);
    let verdict = server.enforce("A", "c1", tokens(1)).await.verdict();
    assert_eq!(verdict, blocked(GlobalSaturated, HOURLY, 30_000));
    server.at(59_999);
    assert_eq!(server.enforce("A", "c1", tokens(1)).await.verdict(), blocked(GlobalSaturated, HOURLY, 1));
    for at in [60_000, 61_000] {
        server.at(at);
        assert_eq!(server.enforce("A", "c1", tokens(1)).await.verdict(), Verdict::Allow, "at T0+{at}");
        assert_eq!(server.used("p", HOURLY).await, (0.0, 0.0));
    }
}

#[tokio::test]
async fn t07_a_record_that_is_sent_again_counts_once() {
    counts_once(&[server_of_one_key().await]).await;
}

#[tokio::test]
async fn t07_a_record_that_is_sent_again_to_another_replica_counts_once() {
    let Some(replicas) = two_replicas().await else { return };
    counts_once(&replicas).await;
}

/// What is sent to `replicas` five times at once, and once more with another cost.
async fn counts_once(replicas: &[TestServer]) {
    let callers = (0..5).map(|n| &replicas[n % replicas.len()]);
    let clients = join_all(callers.map(|replica| replica.another_client())).await;
    let answers =
        join_all(clients.iter().map(async |client| {
            client.quota().record_consumption(spent("A", "c1", tokens(30)).once("x")).await
        }))
        .await;
    let duplicates =
        answers.into_iter().filter(|answer| answer.as_ref().is_ok_and(|answer| answer.get_ref().duplicate));
    assert_eq!(duplicates.count(), 4);
    for replica in replicas {
        assert_eq!(replica.used("p", HOURLY).await, (30.0, 0.0));
        let another_cost = spent("A", "c1", tokens(31)).once("x");
        let refused = refusal(replica.quota().record_consumption(another_cost).await);
        assert_eq!(refused.code, Code::AlreadyExists);
        assert_eq!(replica.used("p", HOURLY).await, (30.0, 0.0));
    }
}

#[tokio::test]
async fn t08_a_fall_back_to_another_connection_leaves_nothing_behind() {
    let server = TestServer::start().await;
    for (id, connection) in [("p1", "c1"), ("p2", "c2")] {
        let plan = [dimension("requests/hourly", 100.0), dimension(HOURLY, 100.0)];
        server.put_plan(connection, plan).await;
        server.create(pool(id, [connection], [hard("A", 100.0)])).await;
    }

    let failed = server.reserve("A", "c1", cost(1, 10)).await;
    assert!(server.release(&failed.reservation_id).await);
    server.reserve("A", "c2", cost(1, 10)).await;
    assert_eq!(server.used("p1", HOURLY).await, (0.0, 0.0));
    assert_eq!(server.used("p1", "requests/hourly").await, (0.0, 0.0));
    assert_eq!(server.used("p2", HOURLY).await, (0.0, 10.0));

    // The provider counted the request that failed.
    let failed = server.reserve("A", "c1", cost(1, 10)).await;
    server.settle("A", "c1", &failed.reservation_id, cost(1, 0)).await;
    server.reserve("A", "c2", cost(1, 10)).await;
    assert_eq!(server.used("p1", HOURLY).await, (0.0, 0.0));
    assert_eq!(server.used("p1", "requests/hourly").await, (1.0, 0.0));
    assert_eq!(server.used("p2", HOURLY).await, (0.0, 20.0));
}

#[tokio::test]
async fn t09_a_key_that_has_used_its_half_leaves_the_other_half_alone() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(750)).await;

    let verdict = server.enforce("A", "c1", requests(1)).await.verdict();
    assert_eq!(verdict, blocked(FairShare, "requests/hourly", 3_600_001));
    assert_eq!(server.enforce("B", "c1", requests(1)).await.verdict(), Verdict::Allow);
}

#[tokio::test]
async fn t10_a_key_borrows_until_the_threshold_and_again_once_usage_has_aged() {
    let server = server_with(1_000.0, [hard("A", 20.0), hard("B", 80.0)]).await;
    server.record("A", "c1", tokens(400)).await;
    let answer = server.enforce("A", "c1", tokens(50)).await;
    assert_eq!((answer.verdict(), answer.dimension(HOURLY).borrowing), (Verdict::Allow, true));

    server.record("A", "c1", tokens(100)).await;
    let verdict = server.enforce("A", "c1", tokens(1)).await.verdict();
    assert!(matches!(verdict, Verdict::Block { reason: FairShare, .. }), "{verdict:?}");
    assert_eq!(server.enforce("B", "c1", tokens(1)).await.verdict(), Verdict::Allow);
    assert_eq!(server.enforce("B", "c1", tokens(500)).await.verdict(), Verdict::Allow);
    server.record("B", "c1", tokens(500)).await;
    let verdict = server.enforce("B", "c1", tokens(1)).await.verdict();
    assert!(matches!(verdict, Verdict::Block { reason: GlobalSaturated, .. }), "{verdict:?}");

    // The pool has room long before, but A is past its share until half of everything has aged out.
    let generous_again = 5_400_001;
    server.at(generous_again - 1);
    let answer = server.enforce("A", "c1", tokens(1)).await;
    assert_eq!(answer.verdict(), blocked(FairShare, HOURLY, 1));
    assert_eq!(answer.dimension(HOURLY).mode(), Mode::Strict);
    server.at(generous_again);
    let answer = server.enforce("A", "c1", tokens(1)).await;
    assert_eq!(answer.verdict(), Verdict::Allow);
    assert_eq!((answer.dimension(HOURLY).mode(), answer.dimension(HOURLY).borrowing), (Mode::Generous, true));
}

#[tokio::test]
async fn t11_shares_are_those_that_are_shown_and_never_more_than_the_whole() {
    let server = server_with(1_000.0, [hard("A", 60.0), hard("B", 40.0)]).await;
    let before = server.get_pool("p").await.pool.expect("the pool");

    let too_much = pb::Pool { allocations: vec![hard("A", 60.0), hard("B", 80.0)], ..before.clone() };
    let refused = refusal(server.pools().update_pool(pb::UpdatePoolRequest { pool: Some(too_much) }).await);
    refused.names(&["pool.allocations"]);
    assert!(refused.message.contains("140"), "{}", refused.message);
    assert_eq!(server.get_pool("p").await.pool.expect("the pool"), before);

    // weights of A and B | their shares of 1,000
    for (weights, shares) in
        [([60.0, 40.0], [600.0, 400.0]), ([0.0, 0.0], [500.0, 500.0]), ([0.0, 60.0], [0.0, 600.0])]
    {
        let allocations = vec![hard("A", weights[0]), hard("B", weights[1])];
        server.update(pb::Pool { allocations, revision: 0, ..before.clone() }).await;
        let usage = server.usage("p").await;
        for (key, share) in ["A", "B"].into_iter().zip(shares) {
            let enforced = server.enforce(key, "c1", None).await.dimension(HOURLY).fair_share;
            let shown = usage.dimension(HOURLY).key(key).fair_share;
            assert_eq!((enforced, shown), (Some(share), Some(share)), "{key} of {weights:?}");
        }
    }

    server.record("B", "c1", tokens(400)).await;
    assert_eq!(server.enforce("A", "c1", tokens(1)).await.verdict(), Verdict::Allow);
    server.record("B", "c1", tokens(100)).await;
    let answer = server.enforce("A", "c1", tokens(1)).await;
    assert_eq!(answer.verdict(), blocked(FairShare, HOURLY, 3_600_001));
    assert_eq!(answer.dimension(HOURLY).fair_share, Some(0.0));
}

#[tokio::test]
async fn t12_a_pool_of_many_accounts_has_the_sum_of_their_limits_everywhere() {
    const DAILY: &str = "usd/daily";
    let server = TestServer::start().await;
    server.put_plan("c0", [dimension(DAILY, 66.67)]).await;
    let accounts = (0..27).map(|n| format!("c{n}")).collect();
    let allocations = [hard("A", 2.0), hard("B", 98.0)];
    server.create(pb::Pool { connection_ids: accounts, ..pool("p", [], allocations) }).await;
    server.record("A", "c26", usd(54.09)).await;

    let usage = server.usage("p").await;
    let usage = usage.dimension(DAILY);
    let close = |got: Option<f64>, want: f64| got.is_some_and(|got| (got - want).abs() < 1e-9);
    assert!(close(usage.limit, 1_800.09) && close(usage.used_fraction, 54.09 / 1_800.09), "{usage:?}");
    // key | fair share | borrowing
    for (key, share, borrowing) in [("A", 36.001_8, true), ("B", 1_764.088_2, false)] {
        let shown = usage.key(key);
        assert!(close(shown.fair_share, share), "{shown:?}");
        let asked = ask(key, "c13", usd(0.01));
        for answer in [server.preview(asked).await, server.enforce(key, "c13", usd(0.01)).await] {
            let status = answer.dimension(DAILY);
            assert_eq!((status.limit, status.fair_share), (usage.limit, shown.fair_share), "{key}");
            assert_eq!((status.borrowing, shown.borrowing), (borrowing, borrowing), "{key}");
        }
    }
}

#[tokio::test]
async fn t13_a_preview_is_what_enforce_then_answers_and_changes_nothing() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 20.0), hard("B", 80.0)]).with_provider("kimi")).await;
    server.record("A", "c1", requests(500)).await;
    server.reserve("B", "c1", requests(240)).await;
    let before = (server.usage("p").await, server.reservations("p").await);

    for n in 0..1_000 {
        // Half of them past what is left of the limit of 1,500: 760.
        let estimate = if n % 2 == 0 { n / 2 } else { 760 + n };
        let asked = ask(["A", "B"][usize::from(n % 4 > 1)], "c1", requests(estimate));
        let preview = server.preview(asked.clone().holding(Duration::from_secs(60)).named("same")).await;
        let answer = server.quota().enforce(asked).await.expect("a decision").into_inner();
        assert_eq!(preview, answer, "estimate {estimate}");
        assert_ne!(n % 2 == 1, preview.verdict() == Verdict::Allow, "estimate {estimate}");
    }
    assert_eq!((server.usage("p").await, server.reservations("p").await), before);
}

#[tokio::test]
async fn t14_retry_after_is_honest_to_the_millisecond() {
    let server = server_of_one_key().await;
    server.record("A", "c1", tokens(100)).await;

    server.at(1_200_000);
    // The burst ages to 99 after 36 s of the next hour.
    let retry_after = 2_436_000;
    let verdict = server.enforce("A", "c1", tokens(1)).await.verdict();
    assert_eq!(verdict, blocked(GlobalSaturated, HOURLY, retry_after));
    for wait in [retry_after / 10 * 9, retry_after - 1] {
        server.at(1_200_000 + wait);
        let verdict = server.enforce("A", "c1", tokens(1)).await.verdict();
        assert_eq!(verdict, blocked(GlobalSaturated, HOURLY, retry_after - wait));
    }
    server.at(1_200_000 + retry_after);
    assert_eq!(server.enforce("A", "c1", tokens(1)).await.verdict(), Verdict::Allow);
}
