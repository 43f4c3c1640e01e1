//! Lists come in pages, and a page's token stays good while the list changes.

use std::time::Duration;

use crate::harness::{
    TestServer, ask, dimension, hard,
    pb::{self, GetPoolUsageRequest, ListPlansRequest, ListPoolsRequest, ListReservationsRequest},
    pool, refusal, tokens, told,
};

const HOURLY: &str = "tokens/hourly";

async fn pools(server: &TestServer, request: ListPoolsRequest) -> (Vec<String>, String) {
    let page = told(server.pools().list_pools(request).await);
    (page.pools.into_iter().map(|pool| pool.pool_id).collect(), page.next_page_token)
}

async fn plans(server: &TestServer, request: ListPlansRequest) -> (Vec<String>, String) {
    let page = told(server.plans().list_plans(request).await);
    (page.plans.into_iter().map(|plan| plan.connection_id).collect(), page.next_page_token)
}

async fn keys(server: &TestServer, request: GetPoolUsageRequest) -> (Vec<String>, String) {
    let page = told(server.pools().get_pool_usage(request).await);
    let usage = page.usage.expect("usage").checked();
    let keys = usage.dimension(HOURLY).keys.iter().map(|key| key.api_key_id.clone()).collect();
    (keys, page.next_page_token)
}

async fn reservations(server: &TestServer, request: ListReservationsRequest) -> (Vec<String>, String) {
    let page = told(server.pools().list_reservations(request).await);
    (page.reservations.into_iter().map(|held| held.request_id).collect(), page.next_page_token)
}

/// One pool for each letter, each with a connection of its own and the key A.
async fn server_with_pools(ids: &str) -> TestServer {
    let server = TestServer::start().await;
    for id in ids.chars().map(String::from) {
        create(&server, &id, "team").await;
    }
    server
}

async fn create(server: &TestServer, id: &str, group: &str) {
    let pool = pb::Pool {
        connection_ids: vec![format!("c-{id}")],
        group: group.to_owned(),
        ..pool(id, [], [hard("A", 100.0)])
    };
    server.create(pool).await;
}

#[tokio::test]
async fn pages_of_pools_go_on_after_the_last_name_whatever_changed_between() {
    let server = server_with_pools("bdfhj").await;
    let request = ListPoolsRequest { page_size: 2, group: "team".to_owned(), ..Default::default() };
    let (first, token) = pools(&server, request.clone()).await;
    assert_eq!(first, ["b", "d"]);

    // The name that the token stands on goes, one comes before it, one after, and one that is not asked for.
    server.delete_pool("d").await;
    create(&server, "a", "team").await;
    create(&server, "e", "team").await;
    create(&server, "g", "other").await;
    let (second, token) = pools(&server, ListPoolsRequest { page_token: token, ..request.clone() }).await;
    assert_eq!(second, ["e", "f"]);
    let (third, token) = pools(&server, ListPoolsRequest { page_token: token, ..request }).await;
    assert_eq!((third, token), (vec!["h".to_owned(), "j".to_owned()], String::new()));
}

#[tokio::test]
async fn pools_are_found_by_connection_key_and_group() {
    let server = server_with_pools("ab").await;
    create(&server, "c", "other").await;
    server.put_allocation("b", hard("B", 0.0)).await;
    let all = ListPoolsRequest::default();
    // request | pools
    let cases = [
        (all.clone(), vec!["a", "b", "c"]),
        (ListPoolsRequest { connection_id: "c-b".to_owned(), ..all.clone() }, vec!["b"]),
        (ListPoolsRequest { connection_id: "c-z".to_owned(), ..all.clone() }, vec![]),
        (ListPoolsRequest { api_key_id: "B".to_owned(), ..all.clone() }, vec!["b"]),
        (ListPoolsRequest { group: "team".to_owned(), ..all.clone() }, vec!["a", "b"]),
        (
            ListPoolsRequest { group: "other".to_owned(), api_key_id: "A".to_owned(), ..all.clone() },
            vec!["c"],
        ),
        (ListPoolsRequest { group: "other".to_owned(), connection_id: "c-a".to_owned(), ..all }, vec![]),
    ];
    for (request, want) in cases {
        let (found, token) = pools(&server, request.clone()).await;
        assert_eq!(
            (found, token.as_str()),
            (want.into_iter().map(str::to_owned).collect(), ""),
            "{request:?}"
        );
    }
}

#[tokio::test]
async fn pages_of_plans_go_on_after_the_last_connection() {
    let server = TestServer::start().await;
    for connection in ["c1", "c3", "c5"] {
        server.put_plan(connection, [dimension(HOURLY, 1.0)]).await;
    }
    let request = ListPlansRequest { page_size: 2, ..Default::default() };
    let (first, token) = plans(&server, request.clone()).await;
    assert_eq!(first, ["c1", "c3"]);
    server.delete_plan("c3").await;
    server.put_plan("c4", [dimension(HOURLY, 1.0)]).await;
    let (second, token) = plans(&server, ListPlansRequest { page_token: token, ..request }).await;
    assert_eq!((second, token), (vec!["c4".to_owned(), "c5".to_owned()], String::new()));
}

#[tokio::test]
async fn pages_of_usage_go_on_after_the_last_key_and_show_the_whole_pools_totals() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    server.create(pool("p", ["c1"], ["b", "d", "f", "h"].map(|key| hard(key, 25.0)))).await;
    server.record("d", "c1", tokens(10)).await;
    server.record("h", "c1", tokens(20)).await;

    let request = GetPoolUsageRequest { pool_id: "p".to_owned(), page_size: 2, ..Default::default() };
    let (first, token) = keys(&server, request.clone()).await;
    assert_eq!(first, ["b", "d"]);
    // h leaves the pool, and stays in sight with what it consumed.
    server.delete_allocation("p", "d").await;
    server.delete_allocation("p", "h").await;
    server.put_allocation("p", hard("a", 25.0)).await;
    server.put_allocation("p", hard("e", 25.0)).await;
    let (second, token) = keys(&server, GetPoolUsageRequest { page_token: token, ..request.clone() }).await;
    assert_eq!(second, ["e", "f"]);
    let (third, token) = keys(&server, GetPoolUsageRequest { page_token: token, ..request.clone() }).await;
    assert_eq!((third, token), (vec!["h".to_owned()], String::new()));

    let asked = vec!["h".to_owned(), "a".to_owned(), "nobody".to_owned()];
    let request = GetPoolUsageRequest { api_key_ids: asked, page_size: 0, ..request };
    let usage = told(server.pools().get_pool_usage(request).await).usage.expect("usage");
    let usage = usage.dimension(HOURLY);
    assert_eq!(usage.consumed, 30.0, "of the whole pool");
    // key | consumed | weight | allocated
    for (key, consumed, weight, allocated) in [("a", 0.0, 25.0, true), ("h", 20.0, 0.0, false)] {
        let key = usage.key(key);
        assert_eq!((key.consumed, key.weight, key.allocated), (consumed, weight, allocated), "{key:?}");
    }
}

#[tokio::test]
async fn pages_of_reservations_come_by_deadline_and_go_on_after_the_last_one() {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 1_000.0)]).await;
    server.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)])).await;
    let hold = async |key: &str, seconds: u64| {
        let request = ask(key, "c1", tokens(seconds as i64)).holding(Duration::from_secs(seconds));
        let request = request.with_model("m").named(&format!("{seconds}s"));
        told(server.quota().enforce(request).await).reservation_id
    };
    for seconds in [30, 10, 50] {
        hold("A", seconds).await;
    }
    let twenty = hold("B", 20).await;

    let request = ListReservationsRequest { pool_id: "p".to_owned(), page_size: 2, ..Default::default() };
    let (first, token) = reservations(&server, request.clone()).await;
    assert_eq!(first, ["10s", "20s"]);
    assert!(server.release(&twenty).await);
    hold("A", 15).await;
    hold("A", 40).await;
    let (second, token) =
        reservations(&server, ListReservationsRequest { page_token: token, ..request.clone() }).await;
    assert_eq!(second, ["30s", "40s"]);
    let (third, token) =
        reservations(&server, ListReservationsRequest { page_token: token, ..request.clone() }).await;
    assert_eq!((third, token), (vec!["50s".to_owned()], String::new()));

    let of_b = ListReservationsRequest { api_key_id: "B".to_owned(), ..request };
    assert_eq!(reservations(&server, of_b).await, (vec![], String::new()));

    let listed = &server.reservations("p").await[0];
    let names = (listed.api_key_id.as_str(), listed.connection_id.as_str(), listed.model.as_str());
    assert_eq!(names, ("A", "c1", "m"));
    assert_eq!(listed.held.as_ref().and_then(|held| held.tokens), Some(10));
    let usage = server.usage("p").await;
    assert_eq!((usage.open_reservations, usage.oldest_reservation_deadline), (5, listed.expires_at));
}

/// What a token of one list says to another, and what no list ever said.
#[tokio::test]
async fn tokens_of_other_lists_and_garbage_are_refused() {
    let server = server_with_pools("abc").await;
    for id in ["a", "b"] {
        server.put_plan(&format!("c-{id}"), [dimension(HOURLY, 100.0)]).await;
    }
    server.put_allocation("a", hard("B", 0.0)).await;
    server.reserve("A", "c-a", tokens(1)).await;
    server.reserve("B", "c-a", tokens(1)).await;
    let of_pools = ListPoolsRequest { page_size: 1, ..Default::default() };
    let of_plans = ListPlansRequest { page_size: 1, ..Default::default() };
    let of_keys = GetPoolUsageRequest { pool_id: "a".to_owned(), page_size: 1, ..Default::default() };
    let of_holds = ListReservationsRequest { pool_id: "a".to_owned(), page_size: 1, ..Default::default() };
    let mut tokens = vec![
        pools(&server, of_pools.clone()).await.1,
        plans(&server, of_plans.clone()).await.1,
        keys(&server, of_keys.clone()).await.1,
        reservations(&server, of_holds.clone()).await.1,
    ];
    assert!(tokens.iter().all(|token| !token.is_empty()), "each list has a second page: {tokens:?}");
    tokens.extend(["x", "AAAA", "////", "é", "0"].map(str::to_owned));
    tokens.push("A".repeat(100_000));

    for token in tokens {
        let page_token = token.clone();
        let request = ListPoolsRequest { page_token, group: "team".to_owned(), ..of_pools.clone() };
        refusal(server.pools().list_pools(request).await).names(&["page_token"]);
        let page_token = format!("{token}A");
        refusal(server.plans().list_plans(ListPlansRequest { page_token, ..of_plans.clone() }).await)
            .names(&["page_token"]);
        let (page_token, pool_id) = (token.clone(), "b".to_owned());
        let request = GetPoolUsageRequest { page_token, pool_id, ..of_keys.clone() };
        refusal(server.pools().get_pool_usage(request).await).names(&["page_token"]);
        let (page_token, api_key_id) = (token, "A".to_owned());
        let request = ListReservationsRequest { page_token, api_key_id, ..of_holds.clone() };
        refusal(server.pools().list_reservations(request).await).names(&["page_token"]);
    }
    for page_size in [-1, 1_001, i32::MIN, i32::MAX] {
        let request = ListPoolsRequest { page_size, ..Default::default() };
        refusal(server.pools().list_pools(request).await).names(&["page_size"]);
        let request = GetPoolUsageRequest { page_size, ..of_keys.clone() };
        refusal(server.pools().get_pool_usage(request).await).names(&["page_size"]);
    }
}
