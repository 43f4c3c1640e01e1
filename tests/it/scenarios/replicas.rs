//! Replicas that share a Redis are one service, whatever their machines' clocks say.

use std::{sync::Arc, time::Instant};

use quota_share::{
    clock::{Clock, SystemClock},
    core::units::Timestamp,
};

use crate::harness::{
    Client, Proxy, TestRedis, TestServer, Verdict, codex, dimension, hard, pb,
    pb::dimension_status::Reason::{FairShare, GlobalSaturated},
    pool, redis_is_missing, refusal, said, spent, tokens, told, unix_ms,
};

/// The clocks run here, so the window is one whose bucket does not end during the test.
const WINDOW: &str = "tokens/366d";
const SHORT: &str = "percent/5h";
/// How far the clocks of the replicas are off, one each way.
const OFF_MS: i64 = 300_000;
/// How exact a wait and an instant are.
const EXACT_MS: u64 = 1_000;

/// The machine's clock, and so many milliseconds.
#[derive(Debug)]
struct Off(i64);

impl Clock for Off {
    fn now(&self) -> Timestamp {
        Timestamp::from_unix_ms(SystemClock.now().unix_ms().saturating_add_signed(self.0))
    }
}

/// Two replicas whose clocks are ten minutes apart, with the same pools; `None` without Redis.
async fn replicas_ten_minutes_apart() -> Option<[TestServer; 2]> {
    if redis_is_missing() {
        return None;
    }
    let url = TestRedis::database_of_ones_own().await;
    let replicas = [
        TestServer::start_on(&url, Arc::new(Off(-OFF_MS))).await,
        TestServer::start_on(&url, Arc::new(Off(OFF_MS))).await,
    ];
    let [one, other] = &replicas;
    one.put_plan("c1", [dimension(WINDOW, 100.0)]).await;
    one.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)])).await;
    let keys = [hard("A", 50.0), hard("B", 50.0)];
    one.create(pool("q", ["c2"], keys).with_provider("codex")).await;
    other.until_it_follows(one).await;
    Some(replicas)
}

/// What both replicas answer: one verdict, here without its wait, and waits until one instant.
async fn verdict_of_both(
    replicas: &[TestServer; 2],
    key: &str,
    connection: &str,
    cost: impl Into<Option<pb::Cost>>,
) -> (Verdict, Option<u64>) {
    let cost = cost.into();
    let asked = Instant::now();
    let (verdict, wait_ms) = parted(&replicas[0].enforce(key, connection, cost).await);
    let (others, others_wait_ms) = parted(&replicas[1].enforce(key, connection, cost).await);
    let took_ms = asked.elapsed().as_millis() as u64;
    assert_eq!((&verdict, wait_ms.is_some()), (&others, others_wait_ms.is_some()));
    let apart_ms = wait_ms.unwrap_or(0).abs_diff(others_wait_ms.unwrap_or(0));
    assert!(apart_ms <= EXACT_MS + took_ms, "waits of {wait_ms:?} and {others_wait_ms:?} ms");
    (verdict, wait_ms)
}

/// The same where the wait lasts until `end`, by the true clock.
async fn waits_until(
    end: &Option<prost_types::Timestamp>,
    replicas: &[TestServer; 2],
    key: &str,
    connection: &str,
    cost: impl Into<Option<pb::Cost>>,
) -> Verdict {
    let ((verdict, wait_ms), span) = timed(verdict_of_both(replicas, key, connection, cost)).await;
    let wait_ms = wait_ms.expect("a wait helps");
    assert_is(end, span, wait_ms as i64);
    verdict
}

fn parted(answer: &pb::EnforceResponse) -> (Verdict, Option<u64>) {
    match answer.verdict() {
        Verdict::Block { reason, by, retry_after_ms } => {
            (Verdict::Block { reason, by, retry_after_ms: None }, retry_after_ms)
        }
        verdict => (verdict, None),
    }
}

/// What is used in pool `p`, by each key and in total, as either replica shows it.
async fn shown(replicas: &[TestServer; 2]) -> (f64, f64, Vec<(String, f64)>) {
    let mut shown = Vec::new();
    for replica in replicas {
        let (used, reserved) = replica.used("p", WINDOW).await;
        shown.push((used, reserved, replica.parts("p", WINDOW).await.0));
    }
    assert_eq!(shown[0], shown[1]);
    shown.swap_remove(0)
}

/// Runs `call` and returns what it gives, and between which instants of the true clock it ran.
async fn timed<T>(call: impl Future<Output = T>) -> (T, [u64; 2]) {
    let began = SystemClock.now().unix_ms();
    let value = call.await;
    (value, [began, SystemClock.now().unix_ms()])
}

/// Whether an instant is `later` (or, if negative, earlier) than a span of the true clock.
#[track_caller]
fn assert_is(at: &Option<prost_types::Timestamp>, [began, ended]: [u64; 2], later_ms: i64) {
    let at = unix_ms(at);
    let [first, last] = [began, ended].map(|of| of.saturating_add_signed(later_ms));
    assert!(first - EXACT_MS <= at && at <= last + EXACT_MS, "{at} is not in {first} to {last}");
}

#[tokio::test]
async fn replicas_whose_clocks_are_ten_minutes_apart_decide_alike() {
    let Some(replicas) = replicas_ten_minutes_apart().await else { return };
    for (n, cost) in [10, 15, 20, 5].into_iter().enumerate() {
        let key = ["A", "B"][n / 2];
        let answer = replicas[n % 2].enforce(key, "c1", tokens(cost)).await;
        assert_eq!(answer.verdict(), Verdict::Allow);
        replicas[n % 2].record(key, "c1", tokens(cost)).await;
    }
    let keys = |a: f64, b: f64| vec![("A".to_owned(), a), ("B".to_owned(), b)];
    assert_eq!(shown(&replicas).await, (50.0, 0.0, keys(25.0, 25.0)));

    // What one replica holds the other sees, and when it ends.
    let (held, span) = timed(replicas[0].reserve("A", "c1", tokens(25))).await;
    assert_is(&held.reservation_expires_at, span, 60_000);
    let [one, other] = [replicas[0].reservations("p").await, replicas[1].reservations("p").await];
    assert_eq!(one, other);
    assert_is(&one[0].expires_at, span, 60_000);
    assert_eq!(shown(&replicas).await, (50.0, 25.0, keys(25.0, 25.0)));

    let verdict = waits_until(&one[0].expires_at, &replicas, "A", "c1", tokens(1)).await;
    assert!(matches!(verdict, Verdict::Block { reason: FairShare, .. }), "{verdict:?}");

    // One replica settles what the other holds, once.
    for (replica, duplicate) in [(&replicas[1], false), (&replicas[0], true)] {
        let settled = replica.settle("A", "c1", &held.reservation_id, tokens(30)).await;
        assert_eq!((settled.duplicate, settled.reservation_expired), (duplicate, false));
    }
    assert_eq!(shown(&replicas).await, (80.0, 0.0, keys(55.0, 25.0)));
    assert_eq!(verdict_of_both(&replicas, "B", "c1", tokens(20)).await.0, Verdict::Allow);
    let verdict = verdict_of_both(&replicas, "B", "c1", tokens(21)).await.0;
    assert!(matches!(verdict, Verdict::Block { reason: GlobalSaturated, .. }), "{verdict:?}");

    // Usage and the instant for which it is true, by the shared clock.
    for replica in &replicas {
        let (usage, span) = timed(replica.usage("p")).await;
        assert_is(&usage.generated_at, span, 0);
    }
}

#[tokio::test]
async fn replicas_whose_clocks_are_ten_minutes_apart_read_what_a_provider_says_alike() {
    const HOUR_MS: i64 = 3_600_000;
    const AGE_MS: i64 = 30_000;
    let Some(replicas) = replicas_ten_minutes_apart().await else { return };
    let signal = async |client: &Client| {
        let usage = client.usage("q").await;
        usage.dimension(SHORT).signals[0].clone()
    };

    // Headers that came half a minute ago, with a window that was to end in four hours.
    let first = spent("A", "c2", tokens(100)).with_headers(codex(300, 0.0, 4 * 3_600), 2 * AGE_MS / 1_000);
    told(replicas[0].quota().record_consumption(first).await);
    let record = spent("A", "c2", tokens(1)).with_headers(codex(300, 60.0, 4 * 3_600), AGE_MS / 1_000);
    let (_, span) = timed(async { told(replicas[1].quota().record_consumption(record).await) }).await;
    let seen = [signal(&replicas[0]).await, signal(&replicas[1]).await];
    assert_eq!(seen[0], seen[1]);
    assert!(seen[0].fresh && seen[0].used_fraction == 0.6, "{seen:?}");
    assert_is(&seen[0].observed_at, span, -AGE_MS);
    assert_is(&seen[0].resets_at, span, 4 * HOUR_MS - AGE_MS);
    let parts = [replicas[0].parts("q", SHORT).await, replicas[1].parts("q", SHORT).await];
    assert_eq!(parts[0], parts[1]);

    let verdict = waits_until(&seen[0].resets_at, &replicas, "A", "c2", None).await;
    assert!(matches!(verdict, Verdict::Block { reason: FairShare, .. }), "{verdict:?}");

    // What is reported is true now, whichever replica is told.
    for (n, replica) in replicas.iter().enumerate() {
        let (outcome, span) = timed(replica.report_some("c2", [said(SHORT, 61.0 + n as f64)])).await;
        assert_eq!(outcome.ignored, Vec::<String>::new());
        assert_is(&outcome.accepted[0].observed_at, span, 0);
        for other in &replicas {
            let seen = signal(other).await;
            assert!((seen.used_fraction - 0.61 - n as f64 / 100.0).abs() < 1e-9, "{seen:?}");
            assert_is(&seen.observed_at, span, 0);
        }
    }
    let headers = [("x-codex-primary-used-percent", "70"), ("x-codex-primary-window-minutes", "300")];
    let ends = ("x-codex-primary-reset-after-seconds", "14000");
    let (outcome, span) = timed(replicas[1].report_headers("c2", headers.into_iter().chain([ends]))).await;
    assert_is(&outcome.accepted[0].observed_at, span, 0);
    assert_is(&outcome.accepted[0].resets_at, span, 14_000_000);
    assert_eq!(signal(&replicas[0]).await, signal(&replicas[1]).await);
}

#[tokio::test]
async fn what_a_provider_says_is_not_read_by_a_clock_that_does_not_decide() {
    if redis_is_missing() {
        return;
    }
    let url = TestRedis::database_of_ones_own().await;
    let server = TestServer::start_on(&url, Arc::new(Off(OFF_MS))).await;
    server.create(pool("q", ["c2"], [hard("A", 50.0), hard("B", 50.0)]).with_provider("codex")).await;
    let redis = TestRedis::shared().await.address();
    let proxy = Proxy::to(redis).await;
    proxy.hang(true);
    let redis_url = url.replace(&redis.to_string(), &proxy.address().to_string());
    server.update_settings(pb::Settings { redis_url, ..Default::default() }, &[]).await;

    // Nothing was heard from there yet: a cost is kept, and headers mean nothing until then.
    let record = || spent("A", "c2", tokens(1)).with_headers(codex(300, 60.0, 14_400), 0);
    let kept = record().with_headers(codex(300, 90.0, 14_400), 0);
    assert!(told(server.quota().record_consumption(kept).await).journaled);
    let report = pb::ReportSignalsRequest {
        connection_id: "c2".to_owned(),
        utilizations: vec![said(SHORT, 50.0)],
        ..Default::default()
    };
    assert_eq!(refusal(server.quota().report_signals(report).await).reason, "STORE_UNAVAILABLE");

    proxy.hang(false);
    server.until_counters_are_in_reach().await;
    let (_, span) = timed(async { told(server.quota().record_consumption(record()).await) }).await;
    let usage = server.usage("q").await;
    let signal = &usage.dimension(SHORT).signals[0];
    assert_is(&signal.observed_at, span, 0);
    assert_is(&signal.resets_at, span, 14_400_000);
}
