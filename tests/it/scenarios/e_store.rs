//! E: what is counted stays counted.

use futures::future::join_all;

use crate::harness::{Client, TestProcess, cost, dimension, hard, pb, pool, refusal, spent, tokens, usd};

/// The machine's clock runs here, so the window is one whose bucket does not end during the test.
const WINDOW: &str = "tokens/366d";

#[tokio::test]
async fn e05_many_writers_share_one_counter_that_survives_a_kill() {
    const CLIENTS: usize = 64;
    const RECORDS: usize = 500;
    let mut process = TestProcess::start().await;
    process.put_plan("c1", [dimension(WINDOW, 1e8), dimension("usd/366d", 1e6)]).await;
    process.create(pool("p", ["c1"], [hard("A", 100.0)])).await;

    let writers = join_all((0..CLIENTS).map(|_| Client::connect(process.address()))).await;
    join_all(writers.iter().map(async |writer| {
        for _ in 0..RECORDS {
            writer.record("A", "c1", tokens(7)).await;
        }
    }))
    .await;
    assert_eq!(process.used("p", WINDOW).await, (224_000.0, 0.0));

    process.kill_and_restart().await;
    assert_eq!(process.used("p", WINDOW).await, (224_000.0, 0.0));

    let refused = [
        (cost(1, -5), "cost.tokens"),
        (cost(1, i64::MAX), "cost.tokens"),
        (usd(f64::NAN), "cost.usd"),
        (usd(1e308), "cost.usd"),
        (usd(1e308), "cost.usd"),
    ];
    for (cost, field) in refused {
        refusal(process.quota().record_consumption(spent("A", "c1", cost)).await).names(&[field]);
    }
    process.record("A", "c1", pb::Cost { requests: Some(0), ..usd(0.000_01) }).await;
    assert_eq!(process.used("p", "usd/366d").await, (0.000_01, 0.0));
    assert_eq!(process.used("p", WINDOW).await, (224_000.0, 0.0));
}
