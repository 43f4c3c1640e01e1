//! Of concurrent requests exactly those that fit are admitted.

use futures::future::join_all;

use crate::harness::{TestServer, Verdict, burst, dimension, pool, tokens};

const CLIENTS: usize = 64;
const ROUNDS: usize = 200;
const LIMIT: usize = 100;
const DIMENSION: &str = "tokens/hourly";

/// In every round 64 clients ask at once, for four keys; what was admitted is given back before the next.
#[tokio::test]
async fn of_concurrent_reservations_exactly_those_that_fit_are_admitted() {
    const KEYS: [&str; 4] = ["A", "B", "C", "D"];
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(DIMENSION, LIMIT as f64)]).await;
    server.create(pool("p", ["c1"], KEYS.map(|key| burst(key, 25.0)))).await;
    let clients = join_all((0..CLIENTS).map(|_| server.another_client())).await;

    for round in 0..ROUNDS {
        let estimate = 2 + round % 7;
        let callers = clients.iter().zip(KEYS.into_iter().cycle());
        let asked = callers.map(|(client, key)| client.reserve(key, "c1", tokens(estimate as i64)));
        let answers = join_all(asked).await.into_iter();
        let admitted: Vec<_> = answers
            .filter(|answer| answer.verdict() == Verdict::Allow)
            .map(|answer| answer.reservation_id)
            .collect();
        let fits = LIMIT / estimate;
        assert_eq!(admitted.len(), fits, "round {round}: {estimate} each");
        assert_eq!(server.used("p", DIMENSION).await, (0.0, (fits * estimate) as f64), "round {round}");
        let released = join_all(clients.iter().zip(&admitted).map(|(client, id)| client.release(id))).await;
        assert!(released.into_iter().all(|released| released), "round {round}");
    }
    assert_eq!(server.used("p", DIMENSION).await, (0.0, 0.0));
}
