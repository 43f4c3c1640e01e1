//! What a provider says of an account: whose it is, when it ends, and what it lets through.

use std::time::Duration;

use sqlx::{ConnectOptions, sqlite::SqliteConnectOptions};
use tonic::Code;

use crate::harness::{
    T0, TestServer, Verdict, ask, blocked, codex, dimension, hard, millis,
    pb::{
        self,
        dimension_status::Reason::{ConnectionSaturated, FairShare, GlobalSaturated},
    },
    percent, pool, refusal, requests, said, spent, tokens, told, unix_ms, usd,
};

const SHORT: &str = "percent/5h";
const HOUR_MS: u64 = 3_600_000;

/// A pool of one Codex account whose window ends in five hours and has not been used.
async fn codex_pool(keys: impl Into<Vec<pb::Allocation>>) -> TestServer {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], keys).with_provider("codex")).await;
    server.report("c1", [said(SHORT, 0.0).until(5 * HOUR_MS)]).await;
    server
}

fn halves() -> [pb::Allocation; 2] {
    [hard("A", 50.0), hard("B", 50.0)]
}

async fn parts(server: &TestServer) -> (Vec<(String, f64)>, f64) {
    server.parts("p", SHORT).await
}

fn of(parts: &[(&str, f64)]) -> Vec<(String, f64)> {
    parts.iter().map(|(key, part)| ((*key).to_owned(), *part)).collect()
}

#[tokio::test]
async fn a_rise_is_split_by_what_was_recorded_since_the_last_one() {
    let server = codex_pool(halves()).await;
    server.record("A", "c1", tokens(900_000)).await;
    server.record("B", "c1", tokens(100_000)).await;
    server.report("c1", [said(SHORT, 60.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 54.0), ("B", 6.0)]), 0.0));
    assert_eq!(
        server.enforce("A", "c1", None).await.verdict(),
        blocked(FairShare, SHORT, 5 * HOUR_MS),
        "54 of 50"
    );
    assert_eq!(server.enforce("B", "c1", None).await.verdict(), Verdict::Allow);

    // A fall that is reported on purpose lowers every part alike.
    server.report("c1", [said(SHORT, 40.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 36.0), ("B", 4.0)]), 0.0));
    // By price, if everything since has one; else by tokens.
    server.record("A", "c1", pb::Cost { usd: Some(1.0), ..tokens(1) }).await;
    server.record("B", "c1", pb::Cost { usd: Some(3.0), ..tokens(999) }).await;
    server.report("c1", [said(SHORT, 44.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 37.0), ("B", 7.0)]), 0.0));
    server.record("A", "c1", usd(5.0)).await;
    server.record("B", "c1", tokens(10)).await;
    server.report("c1", [said(SHORT, 45.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 37.0), ("B", 8.0)]), 0.0));
    // By requests, if nothing else is known.
    for key in ["A", "A", "A", "B"] {
        server.record(key, "c1", requests(1)).await;
    }
    server.report("c1", [said(SHORT, 49.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 40.0), ("B", 9.0)]), 0.0));
}

#[tokio::test]
async fn what_nobody_here_explains_is_nobodys_and_blocks_nobody_from_a_share() {
    let server = codex_pool(halves()).await;
    server.report("c1", [said(SHORT, 60.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (vec![], 60.0));
    for key in ["A", "B"] {
        assert_eq!(server.enforce(key, "c1", None).await.verdict(), Verdict::Allow);
    }
    let status = server.enforce("A", "c1", None).await;
    let status = status.dimension(SHORT);
    assert_eq!((status.external, status.used_fraction, status.signal_fraction), (60.0, Some(0.6), Some(0.6)));
    assert_eq!(unix_ms(&status.resets_at), T0.plus_ms(5 * HOUR_MS).unix_ms());
    // But the account has no more than it has.
    let verdict = server.enforce("A", "c1", percent(41.0)).await.verdict();
    assert_eq!(verdict, blocked(GlobalSaturated, SHORT, 5 * HOUR_MS));
}

#[tokio::test]
async fn stated_per_cents_are_set_against_a_rise_first() {
    let server = codex_pool(halves()).await;
    server.record("A", "c1", pb::Cost { tokens: Some(1_000_000), ..percent(2.0) }).await;
    server.record("B", "c1", tokens(10)).await;
    server.report("c1", [said(SHORT, 10.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 2.0), ("B", 8.0)]), 0.0));
    // More was stated than the figure rose by: that much each in proportion.
    server.record("A", "c1", percent(3.0)).await;
    server.record("B", "c1", percent(1.0)).await;
    server.report("c1", [said(SHORT, 12.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 3.5), ("B", 8.5)]), 0.0));
}

#[tokio::test]
async fn figures_that_stand_still_forget_nothing() {
    let server = codex_pool(halves()).await;
    server.record("A", "c1", tokens(300)).await;
    for _ in 0..9 {
        server.report("c1", [said(SHORT, 0.0).until(5 * HOUR_MS)]).await;
    }
    server.record("B", "c1", tokens(100)).await;
    server.report("c1", [said(SHORT, 4.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 3.0), ("B", 1.0)]), 0.0));
}

#[tokio::test]
async fn figures_are_taken_in_the_order_in_which_they_were_true() {
    let server = codex_pool(halves()).await;
    server.at(100_000);
    server.report("c1", [said(SHORT, 10.0).until(5 * HOUR_MS).observed(60_000)]).await;
    let older = said(SHORT, 5.0).until(5 * HOUR_MS).observed(59_999);
    let outcome = server.report_some("c1", [older]).await;
    assert_eq!(
        (outcome.accepted.len(), outcome.ignored),
        (0, vec![format!("{SHORT}: a newer figure is known")])
    );
    // Of equal ones the later arrival wins; what is to come is now.
    server.report("c1", [said(SHORT, 8.0).until(5 * HOUR_MS).observed(60_000)]).await;
    server.report("c1", [said(SHORT, 9.0).until(5 * HOUR_MS).observed(900_000)]).await;
    let usage = server.usage("p").await;
    let signal = &usage.dimension(SHORT).signals[0];
    assert_eq!((signal.used_fraction, unix_ms(&signal.observed_at)), (0.09, T0.plus_ms(100_000).unix_ms()));
    // A response that is older than what is known, and one whose lower figure can only be old.
    server.at(200_000);
    for (age_s, figure) in [(150, 50.0), (10, 7.0)] {
        let record = spent("A", "c1", tokens(1)).with_headers(codex(300, figure, 17_000), age_s);
        told(server.quota().record_consumption(record).await);
        assert_eq!(server.usage("p").await.dimension(SHORT).signals[0].used_fraction, 0.09);
    }
}

#[tokio::test]
async fn an_early_reset_frees_a_key_at_once_and_a_wandering_end_does_not() {
    let server = codex_pool([hard("A", 10.0), hard("B", 90.0)]).await;
    let end_s = 5 * 3_600;
    let after = async |at_s: u64, figure: f64, ends_in_s: u64| {
        server.at(at_s * 1_000);
        let record = spent("A", "c1", tokens(100)).with_headers(codex(300, figure, ends_in_s), 0);
        told(server.quota().record_consumption(record).await);
        server.enforce("A", "c1", None).await.verdict()
    };
    assert_eq!(after(10, 100.0, end_s - 10).await, blocked(GlobalSaturated, SHORT, (end_s - 10) * 1_000));
    // The same window, whose end wanders by 2 s, and a response with a figure one lower.
    assert!(matches!(after(20, 99.0, end_s - 18).await, Verdict::Block { .. }));
    assert_eq!(parts(&server).await, (of(&[("A", 100.0)]), 0.0));
    // Half a minute into the window it ends 7 minutes later with 2 per cents: the provider has reset it.
    assert_eq!(after(30, 2.0, end_s - 30 + 420).await, Verdict::Allow);
    assert_eq!(parts(&server).await, (of(&[("A", 2.0)]), 0.0));
}

#[tokio::test]
async fn at_the_end_of_a_window_everything_starts_at_zero() {
    let mut server = codex_pool([hard("A", 10.0), hard("B", 90.0)]).await;
    server.record("A", "c1", tokens(100)).await;
    server.report("c1", [said(SHORT, 70.0).until(5 * HOUR_MS)]).await;
    server.at(5 * HOUR_MS - 1);
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), blocked(FairShare, SHORT, 1));
    server.restart().await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), blocked(FairShare, SHORT, 1));
    server.at(5 * HOUR_MS);
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);
    assert_eq!(parts(&server).await, (vec![], 0.0));
    // What was true before the end says nothing of the new window.
    let late = said(SHORT, 71.0).until(5 * HOUR_MS + 60_000).observed(5 * HOUR_MS - 2);
    assert_eq!(server.report_some("c1", [late]).await.accepted, []);
    server.record("B", "c1", tokens(1)).await;
    server.report("c1", [said(SHORT, 1.0).until(10 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("B", 1.0)]), 0.0), "what A recorded was of the window before");
}

#[tokio::test]
async fn a_figure_without_a_reset_is_forgotten_and_the_next_request_goes_through() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], halves()).with_provider("codex")).await;
    server.report("c1", [said(SHORT, 100.0)]).await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), blocked(GlobalSaturated, SHORT, None));
    server.wait(30_000);
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);
    // Stale for a window's length, it is no base for what comes.
    server.wait(5 * HOUR_MS);
    server.record("A", "c1", tokens(1)).await;
    server.report("c1", [said(SHORT, 3.0)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 3.0)]), 0.0));
}

#[tokio::test]
async fn connections_have_windows_of_their_own_and_one_that_leaves_takes_its_parts_along() {
    let server = TestServer::start().await;
    let team = pool("p", ["c1", "c2", "c3"], halves()).with_provider("codex");
    server.create(team.clone()).await;
    for (connection, ends, key, figure) in [("c1", 1, "A", 10.0), ("c2", 2, "B", 20.0), ("c3", 3, "A", 40.0)]
    {
        server.report(connection, [said(SHORT, 0.0).until(ends * HOUR_MS)]).await;
        server.record(key, connection, tokens(5)).await;
        server.report(connection, [said(SHORT, figure).until(ends * HOUR_MS)]).await;
    }
    assert_eq!(parts(&server).await, (of(&[("A", 50.0), ("B", 20.0)]), 0.0));
    let usage = server.usage("p").await;
    assert_eq!(usage.dimension(SHORT).used_fraction, Some(70.0 / 300.0));
    assert_eq!(usage.dimension(SHORT).signals.len(), 3);
    server.at(HOUR_MS);
    assert_eq!(parts(&server).await, (of(&[("A", 40.0), ("B", 20.0)]), 0.0));

    let hold = ask("A", "c3", percent(5.0)).holding(Duration::from_secs(3_600));
    let held = told(server.quota().enforce(hold).await);
    let without = pb::Pool { revision: 0, ..team.clone() }.with_connections(["c1", "c2"]);
    server.update(without).await;
    assert_eq!(parts(&server).await, (of(&[("B", 20.0)]), 0.0));
    assert_eq!(server.used("p", SHORT).await, (20.0, 5.0), "the reservation stays");
    assert!(!server.settle("A", "c3", &held.reservation_id, tokens(5)).await.reservation_expired);
    assert_eq!(server.used("p", SHORT).await, (20.0, 0.0));
    // Back in time, it has brought its parts along.
    server.update(pb::Pool { revision: 0, ..team }).await;
    assert_eq!(parts(&server).await, (of(&[("A", 40.0), ("B", 20.0)]), 0.0));
}

#[tokio::test]
async fn a_connection_that_is_full_is_refused_and_the_others_are_not() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1", "c2", "c3"], halves()).with_provider("codex")).await;
    server.report("c2", [said(SHORT, 100.0).until(HOUR_MS)]).await;
    let answer = server.enforce("A", "c2", None).await;
    assert_eq!(answer.verdict(), blocked(ConnectionSaturated, SHORT, HOUR_MS));
    assert!(answer.message.contains("connection c2"), "{}", answer.message);
    assert_eq!(answer.dimension(SHORT).key_remaining, Some(0.0));
    for connection in ["c1", "c3"] {
        assert_eq!(server.enforce("A", connection, None).await.verdict(), Verdict::Allow);
    }
    let text = server.page("/metrics").await.1;
    assert!(text.contains("reason=\"CONNECTION_SATURATED\""), "{text}");
    assert!(text.contains("quota_share_signals_total{outcome=\"taken\"} 1"), "{text}");
}

#[tokio::test]
async fn a_counted_plan_follows_the_providers_window_and_figure() {
    let mut server = TestServer::start().await;
    server.create(pool("p", ["c1"], halves()).with_provider("kimi")).await;
    server.record("A", "c1", requests(200)).await;
    let hourly = "requests/hourly";
    server.at(600_000);
    let full = said(hourly, 100.0).until(1_800_000);
    server.report("c1", [full.clone()]).await;
    let answer = server.enforce("B", "c1", requests(1)).await;
    assert_eq!(answer.verdict(), blocked(GlobalSaturated, hourly, 1_200_000), "20 minutes are left");
    assert_eq!(answer.dimension(hourly).external, 1_300.0);
    assert!(answer.message.contains("1300 of it outside"), "{}", answer.message);
    // What was counted in the sliding window is taken over; in the provider's it does not fade.
    server.restart().await;
    server.at(1_799_999);
    assert_eq!(server.used("p", hourly).await, (200.0, 0.0));
    assert_eq!(server.enforce("B", "c1", requests(1)).await.verdict(), blocked(GlobalSaturated, hourly, 1));
    server.at(1_800_000);
    assert_eq!(server.enforce("B", "c1", requests(1)).await.verdict(), Verdict::Allow);
    assert_eq!(server.used("p", hourly).await, (0.0, 0.0));
    // It slides again, from 0.
    server.record("A", "c1", requests(100)).await;
    server.at(2 * HOUR_MS - 1_800_000);
    assert_eq!(server.used("p", hourly).await, (50.0, 0.0));
}

#[tokio::test]
async fn external_use_below_the_owners_reserve_is_the_owners() {
    let server = TestServer::start().await;
    let team = pb::Pool { owner_reserve: 0.2, ..pool("p", ["c1"], halves()).with_provider("kimi") };
    server.create(team).await;
    server.record("A", "c1", requests(200)).await;
    // 300 are the owner's: 500 used are 200 here and 300 there.
    for (used, external) in [(500.0, 0.0), (600.0, 100.0)] {
        let figure = said("requests/hourly", used / 15.0).until(1_200_000);
        server.report("c1", [figure]).await;
        let answer = server.enforce("B", "c1", requests(1)).await;
        assert_eq!(answer.verdict(), Verdict::Allow);
        let status = answer.dimension("requests/hourly");
        assert!((status.external - external).abs() < 1e-6, "{status:?}");
    }
}

#[tokio::test]
async fn t14_in_the_providers_window_the_wait_is_the_time_to_its_reset() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension("requests/hourly", 100.0)]).await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    server.report("c1", [said("requests/hourly", 0.0).until(3_000_000)]).await;
    server.record("A", "c1", requests(100)).await;
    server.at(1_200_000);
    let want = blocked(GlobalSaturated, "requests/hourly", 1_800_000);
    assert_eq!(server.enforce("A", "c1", requests(1)).await.verdict(), want);
    server.at(2_999_999);
    assert!(matches!(server.enforce("A", "c1", requests(1)).await.verdict(), Verdict::Block { .. }));
    server.at(3_000_000);
    assert_eq!(server.enforce("A", "c1", requests(1)).await.verdict(), Verdict::Allow);
}

#[tokio::test]
async fn a_wait_ends_with_the_figure_though_what_was_stated_still_counts() {
    let server = codex_pool(halves()).await;
    server.put_plan("d1", [dimension(SHORT, 100.0)]).await;
    server.create(pool("q", ["d1", "d2"], [hard("A", 100.0)])).await;
    server.record("A", "d1", percent(200.0)).await;
    assert!(matches!(server.enforce("A", "d1", None).await.verdict(), Verdict::Block { .. }));
    // The provider knows better, for an hour.
    server.report("d1", [said(SHORT, 50.0).until(HOUR_MS)]).await;
    server.report("d2", [said(SHORT, 100.0).until(1_800_000)]).await;
    let answer = server.enforce("A", "d2", None).await;
    assert_eq!(answer.verdict(), blocked(ConnectionSaturated, SHORT, 1_800_000));
    server.at(1_800_000);
    assert_eq!(server.enforce("A", "d2", None).await.verdict(), Verdict::Allow);
    server.at(HOUR_MS);
    let Verdict::Block { retry_after_ms: Some(wait), .. } = server.enforce("A", "d2", None).await.verdict()
    else {
        panic!("200 stated per cents of 200 are in the sliding window");
    };
    server.at(HOUR_MS + wait - 1);
    assert!(matches!(server.enforce("A", "d2", None).await.verdict(), Verdict::Block { .. }));
    server.at(HOUR_MS + wait);
    assert_eq!(server.enforce("A", "d2", None).await.verdict(), Verdict::Allow);
}

#[tokio::test]
async fn signals_survive_a_restart_whole() {
    let mut server = codex_pool(halves()).await;
    server.record("A", "c1", tokens(7)).await;
    server.record("B", "c1", tokens(3)).await;
    server.report("c1", [said(SHORT, 50.0).until(5 * HOUR_MS), said("percent/weekly", 5.0)]).await;
    server.record("A", "c1", tokens(1)).await;
    let before = server.usage("p").await;
    server.restart().await;
    let rates = |usage: pb::PoolUsage| pb::PoolUsage {
        dimensions: usage
            .dimensions
            .into_iter()
            .map(|of| pb::DimensionUsage { burn_rate: None, ..of })
            .collect(),
        ..usage
    };
    assert_eq!(rates(server.usage("p").await), rates(before));
    // So do the weights since the last rise.
    server.report("c1", [said(SHORT, 51.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 36.0), ("B", 15.0)]), 0.0));
}

#[tokio::test]
async fn a_reset_of_usage_forgets_what_the_provider_said() {
    let server = codex_pool(halves()).await;
    server.record("A", "c1", tokens(7)).await;
    server.record("B", "c1", tokens(3)).await;
    server.report("c1", [said(SHORT, 50.0).until(5 * HOUR_MS)]).await;
    let one =
        pb::ResetUsageRequest { pool_id: "p".to_owned(), api_key_id: "A".to_owned(), ..Default::default() };
    told(server.pools().reset_usage(one).await);
    // The figure stands: what was a key's is nobody's.
    assert_eq!(parts(&server).await, (of(&[("B", 15.0)]), 35.0));
    server.reset("p").await;
    assert_eq!(parts(&server).await, (vec![], 0.0));
    assert_eq!(server.usage("p").await.dimension(SHORT).signals, []);
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);
}

#[tokio::test]
async fn what_cannot_be_is_refused_whole_and_what_is_not_meant_is_named() {
    let server = codex_pool(halves()).await;
    let before = server.usage("p").await;
    let scale = |used| pb::Utilization { used, ..said(SHORT, 0.0) };
    let used_of = |used, limit| scale(Some(pb::utilization::Used::UsedOf(pb::UsedOf { used, limit })));
    let fraction = |fraction| scale(Some(pb::utilization::Used::UsedFraction(fraction)));
    // figure | the field that is named
    let cases = [
        (said(SHORT, 151.0), "utilizations[1].used_percent"),
        (said(SHORT, -1.0), "utilizations[1].used_percent"),
        (said(SHORT, f64::NAN), "utilizations[1].used_percent"),
        (fraction(1.6), "utilizations[1].used_fraction"),
        (used_of(1.0, 0.0), "utilizations[1].used_of.limit"),
        (used_of(1.0, f64::INFINITY), "utilizations[1].used_of.limit"),
        (used_of(16.0, 10.0), "utilizations[1].used_of.used"),
        (scale(None), "utilizations[1].used"),
        (said(SHORT, 1.0).until(0), "utilizations[1].resets_at"),
        (said(SHORT, 1.0).until(400 * 24 * HOUR_MS), "utilizations[1].resets_at"),
        (pb::Utilization { window: "5 h".to_owned(), ..said(SHORT, 1.0) }, "utilizations[1].window"),
        (pb::Utilization { unit: 0, ..said(SHORT, 1.0) }, "utilizations[1].unit"),
    ];
    for (bad, field) in cases {
        let utilizations = vec![said(SHORT, 77.0), bad];
        let request =
            pb::ReportSignalsRequest { connection_id: "c1".to_owned(), utilizations, ..Default::default() };
        let refused = refusal(server.quota().report_signals(request).await);
        assert_eq!(refused.code, Code::InvalidArgument);
        refused.names(&[field]);
        assert_eq!(server.usage("p").await, before, "{field}");
    }
    let outcome = server.report_some("c1", [said("percent/monthly", 5.0), said("tokens/1m", 5.0)]).await;
    let why = "the plan has no such dimension";
    assert_eq!(outcome.ignored, [format!("percent/monthly: {why}"), format!("tokens/1m: {why}")]);
    let outcome = server.report_some("elsewhere", [said(SHORT, 5.0)]).await;
    assert_eq!(outcome.ignored, [format!("{SHORT}: the connection is in no pool")]);
    let outcome = server.report_headers("c1", [("X-Codex-Primary-Used-Percent", "12")]).await;
    assert_eq!((outcome.accepted.len(), outcome.ignored.len()), (0, 1));
    assert_eq!(server.usage("p").await, before);
}

#[tokio::test]
async fn per_cents_burn_as_fast_as_the_figure_rises() {
    let server = codex_pool(halves()).await;
    for figure in 1..=4 {
        server.record("A", "c1", tokens(10)).await;
        server.report("c1", [said(SHORT, f64::from(figure)).until(5 * HOUR_MS)]).await;
        server.wait(10_000);
    }
    server.record("A", "c1", tokens(10)).await;
    let usage = server.usage("p").await;
    let rate = usage.dimension(SHORT).burn_rate.expect("each dimension has one");
    assert!((rate.units_per_second - 0.1).abs() < 1e-9, "{rate:?}");
    let left_ms = rate.time_to_exhaustion.as_ref().map(millis).expect("it rises");
    assert!(left_ms.abs_diff(960_000) <= 1, "{left_ms}");
}

#[tokio::test]
async fn the_end_of_one_connections_window_takes_nothing_from_another() {
    let server = TestServer::start().await;
    let team = pool("p", ["c1"], halves()).with_provider("kimi");
    server.create(team.clone()).await;
    server.record("A", "c1", requests(100)).await;
    server.report("c1", [said("requests/hourly", 10.0).until(600_000)]).await;
    server.update(team.with_connections(["c1", "c2"])).await;
    server.record("B", "c2", requests(300)).await;
    server.at(600_000);
    assert_eq!(server.used("p", "requests/hourly").await, (400.0, 0.0), "two windows slide");
}

#[tokio::test]
async fn the_end_of_a_window_leaves_the_table_of_consumption_as_it_was() {
    let mut server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], halves()).with_provider("kimi")).await;
    server.report("c1", [said("requests/hourly", 0.0).until(600_000)]).await;
    server.record("A", "c1", requests(100)).await;
    server.at(600_000);
    server.record("A", "c1", requests(7)).await;
    assert_eq!(server.used("p", "requests/hourly").await, (7.0, 0.0));
    server.restart().await;
    assert_eq!(server.used("p", "requests/hourly").await, (7.0, 0.0));
    server.stop().await;
    let options = SqliteConnectOptions::new().filename(server.data_dir().join("storage.sqlite"));
    let mut database = options.connect().await.expect("the database opens");
    let kept: i64 = sqlx::query_scalar("SELECT sum(consumed) FROM quota_consumption WHERE unit = 'requests'")
        .fetch_one(&mut database)
        .await
        .expect("the statement is valid");
    assert_eq!(kept, 107);
}

#[tokio::test]
async fn what_was_true_before_a_reset_of_usage_does_not_come_back() {
    let server = codex_pool(halves()).await;
    server.at(60_000);
    server.report("c1", [said(SHORT, 100.0).until(5 * HOUR_MS)]).await;
    server.reset("p").await;
    server.at(70_000);
    let record = spent("A", "c1", tokens(1)).with_headers(codex(300, 100.0, 17_000), 30);
    told(server.quota().record_consumption(record).await);
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);
    let text = server.page("/metrics").await.1;
    assert!(text.contains("quota_share_signals_total{outcome=\"ignored\"} 1"), "{text}");
}

#[tokio::test]
async fn a_response_of_the_window_before_does_not_bring_back_its_figure() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], halves()).with_provider("codex")).await;
    // The window is reset early; a stream that began before ends after, and does not say how old its headers are.
    // the end before | after
    for (round, (before, after)) in
        [(2 * HOUR_MS, 5 * HOUR_MS), (6 * HOUR_MS, 6 * HOUR_MS + 420_000)].into_iter().enumerate()
    {
        let start = round as u64 * 90 * 60_000;
        server.at(start);
        server.report("c1", [said(SHORT, 100.0).until(before)]).await;
        server.at(start + 60_000);
        server.report("c1", [said(SHORT, 0.0).until(after)]).await;
        server.at(start + 70_000);
        let ends_in_s = (before - start) / 1_000 - 60;
        let headers = spent("A", "c1", tokens(5)).with_headers(codex(300, 100.0, ends_in_s), 0);
        let record = pb::RecordConsumptionRequest { headers_age: None, ..headers };
        told(server.quota().record_consumption(record).await);
        assert_eq!(server.enforce("B", "c1", None).await.verdict(), Verdict::Allow, "{before} {after}");
    }
}

#[tokio::test]
async fn while_time_stands_still_figures_are_taken() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], halves()).with_provider("codex")).await;
    server.at(40 * 60_000);
    server.report("c1", [said(SHORT, 100.0)]).await;
    server.at(10 * 60_000);
    server.report("c1", [said(SHORT, 5.0)]).await;
    assert_eq!(server.enforce("A", "c1", None).await.verdict(), Verdict::Allow);
}

#[tokio::test]
async fn a_connection_exactly_at_its_limit_is_full_whatever_the_limit_is() {
    let server = TestServer::start().await;
    // 29, 57 and 58 hundredths are not exact in binary digits.
    for (limit, c1, c2) in
        [(1, "a1", "b1"), (29, "a2", "b2"), (57, "a3", "b3"), (58, "a4", "b4"), (100, "a5", "b5")]
    {
        server.put_plan(c1, [dimension(SHORT, f64::from(limit))]).await;
        server.create(pool(&format!("p{limit}"), [c1, c2], halves())).await;
        server.report(c1, [said(SHORT, f64::from(limit)).until(HOUR_MS)]).await;
        let verdict = server.enforce("A", c1, None).await.verdict();
        assert_eq!(verdict, blocked(ConnectionSaturated, SHORT, HOUR_MS), "{limit}");
    }
}

#[tokio::test]
async fn a_figure_that_went_stale_leaves_the_providers_window_as_it_is() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], halves()).with_provider("kimi")).await;
    let hourly = "requests/hourly";
    server.report("c1", [said(hourly, 0.0).until(63 * 60_000)]).await;
    server.record("A", "c1", requests(1_500)).await;
    server.at(1_000);
    server.report("c1", [said(hourly, 0.0)]).await;
    server.at(3_632_000);
    server.report("c1", [said(hourly, 0.0)]).await;
    assert_eq!(server.used("p", hourly).await, (1_500.0, 0.0), "it ends at 63 minutes");
}

#[tokio::test]
async fn traffic_that_states_too_little_is_still_local_traffic() {
    let server = codex_pool(halves()).await;
    server.record("A", "c1", pb::Cost { tokens: Some(1_000_000), ..percent(0.1) }).await;
    server.report("c1", [said(SHORT, 60.0).until(5 * HOUR_MS)]).await;
    assert_eq!(parts(&server).await, (of(&[("A", 60.0)]), 0.0));
}
