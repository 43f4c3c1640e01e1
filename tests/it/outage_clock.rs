//! An outage of half an hour over the edge of a window, by a clock that the test moves: afterwards everything is as if
//! there had been none.

use std::sync::Arc;

use quota_share::clock::{Clock, ManualClock};

use crate::harness::{
    Client, Proxy, T0, TestRedis, TestServer, codex, dimension, hard, pb, pool, redis_is_missing, spent,
    tokens, told,
};
use crate::redis_team::until;

const MINUTE_MS: u64 = 60_000;
const COUNTED: [&str; 3] = ["tokens/hourly", "tokens/5h", "requests/1m"];
const SHORT: &str = "percent/5h";

async fn with_pools(url: &str, clock: &Arc<ManualClock>) -> TestServer {
    let server = TestServer::start_on(url, Arc::clone(clock) as Arc<dyn Clock>).await;
    server.put_plan("c1", COUNTED.map(|name| dimension(name, 1e6))).await;
    server.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)])).await;
    server.create(pool("q", ["c2"], [hard("A", 50.0), hard("B", 50.0)]).with_provider("codex")).await;
    server
}

/// What a provider says with a response: per cent used, and seconds to the end of its window.
type Said = Option<(f64, u64)>;

/// What is recorded, and when: minute | key | connection | tokens | what the provider says.
const RECORDS: [(u64, &str, &str, i64, Said); 14] = [
    (10, "A", "c1", 5, None),
    (10, "B", "c1", 50, None),
    (10, "A", "c2", 10, Some((0.0, 3_000))),
    (20, "A", "c2", 100, Some((20.0, 2_400))),
    // From here on Redis is away; the provider's window ends with the hour.
    (50, "A", "c1", 700, None),
    (50, "A", "c2", 300, None),
    (52, "B", "c2", 100, Some((40.0, 480))),
    (59, "B", "c1", 3_000, None),
    (60, "A", "c1", 20_000, None),
    (61, "A", "c2", 100, None),
    (70, "B", "c2", 50, Some((5.0, 18_000))),
    (74, "B", "c1", 100_000, None),
    // And it is back.
    (76, "A", "c2", 100, Some((9.0, 17_640))),
    (76, "B", "c1", 7, None),
];
const GONE_FROM: u64 = 45;
const BACK_AT: u64 = 75;

/// What is used in all dimensions, and by whom.
async fn seen(server: &Client) -> Vec<(String, f64, Vec<(String, f64)>, f64)> {
    let mut seen = Vec::new();
    for (pool, name) in COUNTED.map(|name| ("p", name)).into_iter().chain([("q", SHORT)]) {
        let (keys, external) = server.parts(pool, name).await;
        seen.push((name.to_owned(), server.used(pool, name).await.0, keys, external));
    }
    seen
}

#[tokio::test]
async fn an_outage_over_the_edge_of_a_window_changes_no_count() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let mut line = Proxy::to(redis.address()).await;
    let clock = Arc::new(ManualClock::new(T0));
    let subject = with_pools(&line.url(), &clock).await;
    let control = with_pools(&TestRedis::database_of_ones_own().await, &clock).await;
    let mut is_gone = false;
    for (minute, key, connection, cost, said) in RECORDS {
        if (GONE_FROM..BACK_AT).contains(&minute) && !is_gone {
            line.refuse(true).await;
            line.cut().await;
            until("it is given up", async || subject.status().await.degraded).await;
            is_gone = true;
        }
        if minute >= BACK_AT && is_gone {
            clock.set(T0.plus_ms(BACK_AT * MINUTE_MS));
            line.refuse(false).await;
            subject.until_counters_are_in_reach().await;
            subject.until_the_journal_is_empty().await;
            assert_eq!(seen(&subject).await, seen(&control).await, "when it is back");
            is_gone = false;
        }
        clock.set(T0.plus_ms(minute * MINUTE_MS));
        let mut record = spent(key, connection, tokens(cost));
        if let Some((percent, ends_in_s)) = said {
            record = record.with_headers(codex(300, percent, ends_in_s), 0);
        }
        for server in [&subject, &control] {
            let recorded: pb::RecordConsumptionResponse =
                told(server.quota().record_consumption(record.clone()).await);
            let is_kept = is_gone && std::ptr::eq(server, &subject);
            assert_eq!(recorded.journaled, is_kept, "minute {minute}");
        }
    }
    let hourly = async |client: &Client| client.used("p", "tokens/hourly").await.0;
    // 3,755 before the edge, of which 44 of 60 minutes are in view.
    let want = 3_755.0 * 44.0 / 60.0 + 120_007.0;
    assert!((hourly(&subject).await - want).abs() < 1e-6, "{} of {want}", hourly(&subject).await);
    for minute in [76, 90, 119, 121, 150, 200, 310, 371, 650] {
        clock.set(T0.plus_ms(minute * MINUTE_MS));
        assert_eq!(seen(&subject).await, seen(&control).await, "minute {minute}");
    }
}
