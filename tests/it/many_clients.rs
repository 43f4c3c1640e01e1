//! Of concurrent requests exactly those that fit are admitted.

use std::{collections::HashSet, time::Duration};

use futures::future::join_all;

use crate::harness::{Client, TestServer, Verdict, ask, burst, dimension, pool, spent, tokens, told};

const CLIENTS: usize = 64;
const ROUNDS: usize = 200;
const LIMIT: usize = 100;
const DIMENSION: &str = "tokens/hourly";

const KEYS: [&str; 4] = ["A", "B", "C", "D"];

/// A pool `p` of four keys, and clients on connections of their own.
async fn server_and_clients() -> (TestServer, Vec<Client>) {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(DIMENSION, LIMIT as f64)]).await;
    server.create(pool("p", ["c1"], KEYS.map(|key| burst(key, 25.0)))).await;
    let clients = join_all((0..CLIENTS).map(|_| server.another_client())).await;
    (server, clients)
}

/// In every round 64 clients ask at once, for four keys; what was admitted is given back before the next.
#[tokio::test]
async fn of_concurrent_reservations_exactly_those_that_fit_are_admitted() {
    let (server, clients) = server_and_clients().await;
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

#[tokio::test]
async fn of_concurrent_repeats_of_one_attempt_one_holds_and_all_get_its_reservation() {
    let (server, clients) = server_and_clients().await;
    for round in 0..ROUNDS / 10 {
        let attempt = ask("A", "c1", tokens(3)).holding(Duration::from_secs(60)).named(&round.to_string());
        let answers =
            join_all(clients.iter().map(async |client| told(client.quota().enforce(attempt.clone()).await)));
        let answers = answers.await;
        let ids: HashSet<_> = answers.iter().map(|answer| &answer.reservation_id).collect();
        assert_eq!(ids.len(), 1, "round {round}");
        let repeated = answers.iter().filter(|answer| answer.repeated_request).count();
        assert_eq!(repeated, CLIENTS - 1, "round {round}");
        assert_eq!(server.used("p", DIMENSION).await, (0.0, 3.0 * (round + 1) as f64), "round {round}");
    }
}

#[tokio::test]
async fn a_reservation_that_many_settle_and_release_at_once_is_counted_and_given_back_once() {
    let (server, clients) = server_and_clients().await;
    for round in 0..ROUNDS / 10 {
        let held = server.reserve("A", "c1", tokens(3)).await.reservation_id;
        let answers = join_all(clients.iter().enumerate().map(async |(n, client)| {
            if n % 2 == 0 {
                let record = spent("A", "c1", tokens(2)).settling(&held);
                u32::from(!told(client.quota().record_consumption(record).await).duplicate)
            } else {
                client.release(&held).await;
                0
            }
        }));
        assert_eq!(answers.await.iter().sum::<u32>(), 1, "round {round}: counted once");
        assert_eq!(server.used("p", DIMENSION).await, (2.0 * (round + 1) as f64, 0.0), "round {round}");
    }
}
