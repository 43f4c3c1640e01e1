//! A reservation is settled or released in the pool that it was made in, whatever has become of that pool, its plan, the key
//! and the connection: nothing leaks, and nothing of an old pool touches a new one.

use std::time::Duration;

use crate::harness::{TestServer, ask, dimension, hard, pb, pool, refusal, spent, tokens, told};

const HOURLY: &str = "tokens/hourly";
const DAILY: &str = "tokens/daily";

/// What happens between Enforce and Record.
#[derive(Clone, Copy, Debug)]
enum Event {
    Nothing,
    KeyLeft,
    KeyLeftAndReturned,
    /// The connection is in a pool that lists the key, too.
    ConnectionMoved,
    /// The connection is in a pool that does not list the key.
    ConnectionMovedAwayFromTheKey,
    ConnectionInNoPool,
    PlanChanged,
    LimitRaised,
    LimitBelowWhatIsHeld,
    PlanDeleted,
}

use Event::{
    ConnectionInNoPool, ConnectionMoved, ConnectionMovedAwayFromTheKey, KeyLeft, KeyLeftAndReturned,
    LimitBelowWhatIsHeld, LimitRaised, Nothing, PlanChanged, PlanDeleted,
};

const EVENTS: [Event; 10] = [
    Nothing,
    KeyLeft,
    KeyLeftAndReturned,
    ConnectionMoved,
    ConnectionMovedAwayFromTheKey,
    ConnectionInNoPool,
    PlanChanged,
    LimitRaised,
    LimitBelowWhatIsHeld,
    PlanDeleted,
];

/// A pool `p` of the connections `c1` and `c2`, in which A holds 40 tokens on `c2`.
async fn server_with_a_hold() -> (TestServer, String) {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 1_000.0)]).await;
    server.put_plan("c3", [dimension(HOURLY, 1_000.0)]).await;
    server.create(pool("p", ["c1", "c2"], [hard("A", 50.0), hard("B", 50.0)])).await;
    let held = server.reserve("A", "c2", tokens(40)).await.reservation_id;
    assert_eq!(server.used("p", HOURLY).await, (0.0, 40.0));
    (server, held)
}

impl Event {
    async fn happens(self, server: &TestServer) {
        match self {
            Nothing => {}
            KeyLeft => assert!(server.delete_allocation("p", "A").await),
            KeyLeftAndReturned => {
                assert!(server.delete_allocation("p", "A").await);
                server.put_allocation("p", hard("A", 50.0)).await;
            }
            ConnectionMoved => move_c2_to_a_pool_of("A", server).await,
            ConnectionMovedAwayFromTheKey => move_c2_to_a_pool_of("B", server).await,
            ConnectionInNoPool => drop(take_c2_out(server).await),
            PlanChanged => drop(server.put_plan("c1", [dimension(DAILY, 1_000.0)]).await),
            LimitRaised => drop(server.put_plan("c1", [dimension(HOURLY, 9_000.0)]).await),
            LimitBelowWhatIsHeld => drop(server.put_plan("c1", [dimension(HOURLY, 10.0)]).await),
            PlanDeleted => drop(server.delete_plan("c1").await),
        }
    }

    /// Where a cost on `c2` is counted afterwards, if anywhere.
    fn counted_in(self) -> Option<(&'static str, &'static str)> {
        match self {
            ConnectionMoved => Some(("q", HOURLY)),
            PlanChanged => Some(("p", DAILY)),
            PlanDeleted => None,
            _ => Some(("p", HOURLY)),
        }
    }
}

async fn take_c2_out(server: &TestServer) -> pb::Pool {
    let stored = server.get_pool("p").await.pool.expect("the pool");
    server.update(stored.with_connections(["c1"])).await
}

async fn move_c2_to_a_pool_of(key: &str, server: &TestServer) {
    take_c2_out(server).await;
    server.create(pool("q", ["c3", "c2"], [hard(key, 100.0)])).await;
}

/// Everything that is held anywhere, with the plan of `c1` as it was.
async fn assert_that_nothing_is_held(server: &TestServer, event: Event) {
    server.put_plan("c1", [dimension(HOURLY, 1_000.0), dimension(DAILY, 1_000.0)]).await;
    for pool in server.list_pools().await {
        let usage = server.usage(&pool.pool_id).await;
        let reserved = |usage: &pb::DimensionUsage| {
            usage.reserved + usage.keys.iter().map(|key| key.reserved).sum::<f64>()
        };
        assert_eq!(usage.dimensions.iter().map(reserved).sum::<f64>(), 0.0, "{event:?}: {usage:?}");
        assert_eq!((usage.open_reservations, usage.oldest_reservation_deadline), (0, None), "{event:?}");
        assert_eq!(server.reservations(&pool.pool_id).await, [], "{event:?}");
    }
}

/// What all pools have consumed in a dimension that all of them have.
async fn counted_in_all_pools(server: &TestServer, name: &str) -> f64 {
    let mut counted = 0.0;
    for pool in server.list_pools().await {
        counted += server.used(&pool.pool_id, name).await.0;
    }
    counted
}

#[tokio::test]
async fn a_release_gives_back_what_was_held_whatever_happened_since() {
    for event in EVENTS {
        let (server, held) = server_with_a_hold().await;
        event.happens(&server).await;
        assert!(server.release(&held).await, "{event:?}");
        assert!(!server.release(&held).await, "{event:?}: once");
        assert_that_nothing_is_held(&server, event).await;
        assert_eq!(server.used("p", HOURLY).await.0, 0.0, "{event:?}");
    }
}

#[tokio::test]
async fn a_settled_cost_is_counted_once_where_the_connection_is_by_then() {
    for event in EVENTS {
        let (server, held) = server_with_a_hold().await;
        event.happens(&server).await;
        let settled = server.settle("A", "c2", &held, tokens(15)).await;
        assert_eq!((settled.duplicate, settled.reservation_expired), (false, false), "{event:?}");
        let pool = event.counted_in().map_or("p", |(pool, _)| pool);
        assert_eq!(settled.pool_id, pool, "{event:?}");
        let again = server.settle("A", "c2", &held, tokens(15)).await;
        assert_eq!((again.duplicate, again.reservation_expired), (true, false), "{event:?}");
        if let Some((pool, name)) = event.counted_in() {
            assert_eq!(server.used(pool, name).await, (15.0, 0.0), "{event:?}");
            let usage = server.usage(pool).await;
            let key = usage.dimension(name).key("A");
            let allocated = !matches!(event, KeyLeft);
            assert_eq!((key.consumed, key.allocated), (15.0, allocated), "{event:?}");
        }
        assert_that_nothing_is_held(&server, event).await;
        let counted = counted_in_all_pools(&server, HOURLY).await + server.used("p", DAILY).await.0;
        let want = if event.counted_in().is_some() { 15.0 } else { 0.0 };
        assert_eq!(counted, want, "{event:?}: counted once, in one dimension");
    }
}

#[tokio::test]
async fn a_settlement_that_is_sent_again_counts_nothing_whatever_happened_since() {
    for event in EVENTS {
        let (mut server, held) = server_with_a_hold().await;
        server.settle("A", "c2", &held, tokens(15)).await;
        event.happens(&server).await;
        server.restart().await;
        let again = server.settle("A", "c2", &held, tokens(15)).await;
        assert_eq!((again.duplicate, again.reservation_expired), (true, false), "{event:?}");
        assert_that_nothing_is_held(&server, event).await;
        assert_eq!(counted_in_all_pools(&server, HOURLY).await, 15.0, "{event:?}");
        assert_eq!(server.used("p", DAILY).await.0, 0.0, "{event:?}");
    }
}

#[tokio::test]
async fn what_a_model_cap_holds_is_given_back_whatever_model_was_used() {
    let (server, _) = server_with_a_hold().await;
    let caps = |models: [&str; 2]| {
        models.into_iter().fold(hard("A", 50.0), |key, model| key.capped_for(model, HOURLY, 100.0))
    };
    let held_of = async |model: &str| {
        let asked = ask("A", "c1", None).with_model(model);
        let answer = told(server.quota().enforce(asked).await);
        let status = answer.dimension(&format!("{HOURLY} of {model}"));
        (status.key_consumed, status.key_reserved)
    };
    server.put_allocation("p", caps(["large", "small"])).await;
    let attempt = ask("A", "c1", tokens(30)).with_model("large").holding(Duration::from_secs(60));
    let first = told(server.quota().enforce(attempt.clone()).await).reservation_id;
    let second = told(server.quota().enforce(attempt).await).reservation_id;
    assert_eq!(held_of("large").await, (0.0, 60.0));

    let fell_back = spent("A", "c1", tokens(20)).with_model("small").settling(&first);
    told(server.quota().record_consumption(fell_back).await);
    assert_eq!((held_of("large").await, held_of("small").await), ((0.0, 30.0), (20.0, 0.0)));

    server.put_allocation("p", caps(["small", "other"])).await;
    assert!(server.release(&second).await);
    server.put_allocation("p", caps(["large", "small"])).await;
    assert_eq!((held_of("large").await, held_of("small").await), ((0.0, 0.0), (20.0, 0.0)));
}

#[tokio::test]
async fn a_hold_that_nobody_gives_back_ends_at_its_deadline_whatever_happened_since() {
    for event in EVENTS {
        let (mut server, held) = server_with_a_hold().await;
        event.happens(&server).await;
        server.at(59_999);
        let usage = server.usage("p").await;
        assert_eq!(usage.open_reservations, 1, "{event:?}");
        server.at(60_000);
        assert_that_nothing_is_held(&server, event).await;
        assert!(!server.release(&held).await, "{event:?}");

        server.restart().await;
        for duplicate in [false, true] {
            let late = server.settle("A", "c2", &held, tokens(15)).await;
            assert_eq!((late.duplicate, late.reservation_expired), (duplicate, true), "{event:?}");
            let pool = event.counted_in().map_or("p", |(pool, _)| pool);
            assert_eq!(late.pool_id, pool, "{event:?}");
        }
    }
}

#[tokio::test]
async fn a_deleted_pool_takes_its_holds_along() {
    let (server, held) = server_with_a_hold().await;
    assert!(server.delete_pool("p").await);
    assert!(!server.release(&held).await);
    let settled = server.settle("A", "c2", &held, tokens(15)).await;
    assert_eq!(settled.pool_id, "", "no pool lists the key and the connection");

    server.create(pool("p", ["c1", "c2"], [hard("A", 50.0), hard("B", 50.0)])).await;
    assert_eq!(server.used("p", HOURLY).await, (0.0, 0.0));
}

#[tokio::test]
async fn nothing_of_a_deleted_pool_touches_the_next_one_of_its_name() {
    let (server, released) = server_with_a_hold().await;
    let settled = server.reserve("A", "c2", tokens(30)).await.reservation_id;
    server.record("A", "c2", tokens(7)).await;
    assert!(server.delete_pool("p").await);
    server.create(pool("p", ["c1", "c2"], [hard("A", 50.0), hard("B", 50.0)])).await;
    let of_the_new_pool = server.reserve("A", "c2", tokens(20)).await.reservation_id;
    assert_eq!(server.used("p", HOURLY).await, (0.0, 20.0));

    assert!(!server.release(&released).await);
    assert_eq!(server.used("p", HOURLY).await, (0.0, 20.0));

    // What it cost is news, and belongs to whoever has the connection now.
    for duplicate in [false, true] {
        let late = server.settle("A", "c2", &settled, tokens(15)).await;
        assert_eq!((late.duplicate, late.reservation_expired), (duplicate, true));
        assert_eq!(late.pool_id, "p");
        assert_eq!(server.used("p", HOURLY).await, (15.0, 20.0));
    }

    // Nor when the first hold of the old pool would have ended.
    server.at(60_000);
    assert_eq!(server.used("p", HOURLY).await, (15.0, 0.0));
    assert!(!server.release(&of_the_new_pool).await);
}

#[tokio::test]
async fn what_is_held_outlives_a_restart_and_ends_at_its_deadline() {
    let (mut server, settled) = server_with_a_hold().await;
    let released = server.reserve("A", "c1", tokens(30)).await.reservation_id;
    server.reserve("B", "c1", tokens(20)).await;
    let before = server.reservations("p").await;

    server.restart().await;
    assert_eq!(server.reservations("p").await, before);
    assert_eq!(server.used("p", HOURLY).await, (0.0, 90.0));
    assert!(server.release(&released).await);
    server.settle("A", "c2", &settled, tokens(15)).await;
    assert_eq!(server.used("p", HOURLY).await, (15.0, 20.0));

    server.restart().await;
    server.at(59_999);
    assert_eq!(server.used("p", HOURLY).await, (15.0, 20.0));
    server.at(60_000);
    server.restart().await;
    assert_eq!(server.used("p", HOURLY).await, (15.0, 0.0));
}

#[tokio::test]
async fn a_reservation_is_settled_by_its_own_key_alone() {
    let (server, held) = server_with_a_hold().await;
    let foreign = spent("B", "c2", tokens(15)).settling(&held);
    refusal(server.quota().record_consumption(foreign).await).names(&["reservation_id"]);
    let foreign = pb::ReleaseReservationRequest { reservation_id: held.clone(), api_key_id: "B".to_owned() };
    refusal(server.quota().release_reservation(foreign).await).names(&["reservation_id"]);
    assert_eq!(server.used("p", HOURLY).await, (0.0, 40.0));
    assert!(server.release(&held).await);
}
