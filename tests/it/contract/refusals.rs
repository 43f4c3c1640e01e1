//! A refused call changes nothing, and says which field, whose pool or which revision it was.

use prost_types::Duration;
use tonic::Code;

use crate::harness::{
    Refusal, TestServer, ask, cost, dimension, hard,
    pb::{self, dimension::Unit},
    percent, pool, refusal, requests, spent, tokens, unlimited, usd,
};

const HOURLY: &str = "tokens/hourly";

/// The pool `p` of `c1` and `c2` with a plan, and the pool `q` of `c3` without one.
async fn server_with_two_pools() -> (TestServer, pb::Pool) {
    let server = TestServer::start().await;
    server.put_plan("c1", [dimension(HOURLY, 100.0)]).await;
    let p = server.create(pool("p", ["c1", "c2"], [hard("A", 50.0), hard("B", 50.0)])).await;
    server.create(pool("q", ["c3"], [hard("A", 100.0)])).await;
    (server, p)
}

/// All that a refused call could have changed.
async fn state(server: &TestServer) -> impl PartialEq + std::fmt::Debug {
    (
        server.list_pools().await,
        server.list_plans().await,
        server.usage("p").await,
        server.reservations("p").await,
        server.enforce("A", "c1", None).await.config_revision,
    )
}

async fn create(server: &TestServer, pool: pb::Pool) -> Refusal {
    refusal(server.pools().create_pool(pb::CreatePoolRequest { pool: Some(pool) }).await)
}

async fn update(server: &TestServer, pool: pb::Pool) -> Refusal {
    refusal(server.pools().update_pool(pb::UpdatePoolRequest { pool: Some(pool) }).await)
}

#[tokio::test]
async fn every_mistake_in_a_pool_is_named_by_its_path() {
    let (server, p) = server_with_two_pools().await;
    let before = state(&server).await;
    let twice = hard("A", 1.0).capped_for("m", HOURLY, 1.0).capped_for("m", "tokens/60m", 2.0);
    let in_the_pool = pb::Pool {
        pool_id: "Team A".to_owned(),
        name: String::new(),
        provider: "x".repeat(65),
        group: "tab\there".to_owned(),
        connection_ids: vec!["c8".to_owned(), String::new(), "c8".to_owned()],
        ..p.clone()
    };
    let in_its_keys = pb::Pool {
        allocations: vec![
            hard("B", 1.0).capped(-1.0, Unit::Tokens),
            hard("C", 1.0).capped(1.0, Unit::Unspecified),
            hard("D", 101.0),
            twice,
            hard("A", 1.0),
            hard(&"x".repeat(257), f64::NAN),
        ],
        ..p.clone()
    };
    let not_fractions = pb::Pool { saturation_threshold: Some(50.0), owner_reserve: 20.0, ..p };
    let cases: [(pb::Pool, &[&str]); 3] = [
        (
            in_the_pool,
            &[
                "pool.connection_ids[1]",
                "pool.connection_ids[2]",
                "pool.group",
                "pool.name",
                "pool.pool_id",
                "pool.provider",
            ],
        ),
        (
            in_its_keys,
            &[
                "pool.allocations[0].cap.value",
                "pool.allocations[1].cap.unit",
                "pool.allocations[2].weight",
                "pool.allocations[3].model_caps[1]",
                "pool.allocations[4].api_key_id",
                "pool.allocations[5].api_key_id",
                "pool.allocations[5].weight",
            ],
        ),
        (not_fractions, &["pool.owner_reserve", "pool.saturation_threshold"]),
    ];
    for (mistaken, want) in cases {
        let mut refused = create(&server, mistaken).await;
        refused.fields.sort();
        refused.names(want);
        if want.contains(&"pool.owner_reserve") {
            let hinted =
                ["did you mean 0.5?", "did you mean 0.2?"].map(|hint| refused.message.contains(hint));
            assert_eq!(hinted, [true, true], "{}", refused.message);
        }
    }
    assert_eq!(state(&server).await, before);
}

#[tokio::test]
async fn a_pool_keeps_to_its_bounds() {
    let (server, p) = server_with_two_pools().await;
    let before = state(&server).await;
    let many = |n: usize| (0..n).map(|n| format!("k{n}"));
    let caps = |n| (0..n).fold(hard("A", 1.0), |key, n| key.capped_for(&format!("m{n}"), HOURLY, 1.0));
    // the pool | the field that is named
    let cases = [
        (pb::Pool { connection_ids: vec![], ..p.clone() }, "pool.connection_ids"),
        (pb::Pool { connection_ids: many(65).collect(), ..p.clone() }, "pool.connection_ids"),
        (
            pb::Pool { allocations: many(10_001).map(|k| hard(&k, 0.0)).collect(), ..p.clone() },
            "pool.allocations",
        ),
        (pb::Pool { allocations: vec![hard("A", 60.0), hard("B", 40.002)], ..p.clone() }, "pool.allocations"),
        (pb::Pool { allocations: vec![caps(33)], ..p.clone() }, "pool.allocations[0].model_caps"),
        (pb::Pool { name: "x".repeat(121), ..p.clone() }, "pool.name"),
        (pb::Pool { owner_reserve: 1.0, ..p.clone() }, "pool.owner_reserve"),
        (pb::Pool { owner_reserve: -0.1, ..p.clone() }, "pool.owner_reserve"),
        (pb::Pool { saturation_threshold: Some(f64::NAN), ..p.clone() }, "pool.saturation_threshold"),
        (pb::Pool { pool_id: "x".repeat(129), ..p.clone() }, "pool.pool_id"),
    ];
    for (pool, field) in cases {
        update(&server, pool).await.names(&[field]);
    }
    refusal(server.pools().create_pool(pb::CreatePoolRequest { pool: None }).await).names(&["pool"]);
    refusal(server.pools().update_pool(pb::UpdatePoolRequest { pool: None }).await).names(&["pool"]);
    assert_eq!(state(&server).await, before);

    // Thirds may be rounded up, and the most of everything is accepted.
    let thirds = ["A", "B", "C"].map(|key| hard(key, 33.333_4));
    let most = pb::Pool {
        connection_ids: many(64).collect(),
        allocations: thirds
            .into_iter()
            .chain(
                [pb::Allocation { weight: 0.0, ..caps(32) }]
                    .map(|a| pb::Allocation { api_key_id: "D".to_owned(), ..a }),
            )
            .collect(),
        name: "é".repeat(120),
        saturation_threshold: Some(0.0),
        ..p
    };
    server.update(most).await;
}

#[tokio::test]
async fn an_allocation_is_named_by_its_place_in_the_request() {
    let (server, _) = server_with_two_pools().await;
    // allocation | the field that is named
    let cases = [
        (Some(hard("A", 101.0)), "allocation.weight"),
        (Some(hard("", 1.0)), "allocation.api_key_id"),
        (Some(hard("A", 1.0).capped(f64::INFINITY, Unit::Usd)), "allocation.cap.value"),
        (Some(hard("A", 51.0)), "allocation"),
        (None, "allocation"),
    ];
    for (allocation, field) in cases {
        let request = pb::PutAllocationRequest { pool_id: "p".to_owned(), allocation, revision: 0 };
        refusal(server.pools().put_allocation(request).await).names(&[field]);
    }
}

#[tokio::test]
async fn a_plan_is_named_by_its_path_and_keeps_to_its_bounds() {
    let (server, _) = server_with_two_pools().await;
    let before = state(&server).await;
    let many = (1..=17).map(|n| unlimited(&format!("tokens/{n}s"))).collect();
    // dimensions | the field that is named
    let cases: [(Vec<pb::Dimension>, &str); 7] = [
        (many, "plan.dimensions"),
        (vec![pb::Dimension { unit: 99, ..unlimited(HOURLY) }], "plan.dimensions[0].unit"),
        (vec![unlimited(HOURLY), unlimited("tokens/0s")], "plan.dimensions[1].window"),
        (vec![unlimited("tokens/367d")], "plan.dimensions[0].window"),
        (vec![dimension("usd/daily", 9_000_001.0)], "plan.dimensions[0].limit"),
        (vec![dimension(HOURLY, f64::NAN)], "plan.dimensions[0].limit"),
        (vec![dimension(HOURLY, 9.1e15)], "plan.dimensions[0].limit"),
    ];
    for (dimensions, field) in cases {
        refusal(server.plans().put_plan(pb::PutPlanRequest::of("c1", dimensions)).await).names(&[field]);
    }
    let nobodys = pb::PutPlanRequest::of("", [dimension(HOURLY, 1.0)]);
    refusal(server.plans().put_plan(nobodys).await).names(&["plan.connection_id"]);
    refusal(server.plans().put_plan(pb::PutPlanRequest { plan: None }).await).names(&["plan"]);
    let nobodys = pb::GetPlanRequest { connection_id: String::new(), provider: "kimi".to_owned() };
    refusal(server.plans().get_plan(nobodys).await).names(&["connection_id"]);
    assert_eq!(state(&server).await, before);
}

#[tokio::test]
async fn a_write_that_knows_another_revision_is_aborted_and_told_the_stored_one() {
    let (server, p) = server_with_two_pools().await;
    let plan = server.get_plan("c1", "").await;
    let before = state(&server).await;
    let stale = p.revision - 1;
    let mut pools = server.pools();
    let mut plans = server.plans();

    let mut refused = vec![(update(&server, pb::Pool { revision: stale, ..p.clone() }).await, p.revision)];
    let request = pb::DeletePoolRequest { pool_id: "p".to_owned(), revision: stale };
    refused.push((refusal(pools.delete_pool(request).await), p.revision));
    let request = pb::PutAllocationRequest {
        pool_id: "p".to_owned(),
        allocation: Some(hard("A", 1.0)),
        revision: stale,
    };
    refused.push((refusal(pools.put_allocation(request).await), p.revision));
    let request =
        pb::DeleteAllocationRequest { pool_id: "p".to_owned(), api_key_id: "A".to_owned(), revision: stale };
    refused.push((refusal(pools.delete_allocation(request).await), p.revision));
    let other = plan.revision + 7;
    let request = pb::PutPlanRequest { plan: Some(pb::Plan { revision: other, ..plan.clone() }) };
    refused.push((refusal(plans.put_plan(request).await), plan.revision));
    let request = pb::DeletePlanRequest { connection_id: "c1".to_owned(), revision: other };
    refused.push((refusal(plans.delete_plan(request).await), plan.revision));

    for (refused, stored) in refused {
        assert_eq!(refused.code, Code::Aborted, "{refused:?}");
        assert_eq!(refused.metadata["current_revision"], stored.to_string(), "{refused:?}");
    }
    assert_eq!(state(&server).await, before);
    assert!(server.update(p.clone()).await.revision > p.revision, "the stored one is taken");
}

#[tokio::test]
async fn a_connection_of_another_pool_is_refused_with_that_pool() {
    let (server, p) = server_with_two_pools().await;
    let before = state(&server).await;
    let refused = [
        create(&server, pool("r", ["c9", "c3"], [])).await,
        update(&server, p.with_connections(["c1", "c3"])).await,
    ];
    for refused in refused {
        assert_eq!(refused.code, Code::FailedPrecondition, "{refused:?}");
        assert_eq!(refused.metadata["pool_id"], "q", "{refused:?}");
        assert!(refused.message.contains("c3") && refused.message.contains('q'), "{refused:?}");
    }
    assert_eq!(state(&server).await, before);
}

#[tokio::test]
async fn a_pool_that_is_not_there_is_not_found_by_name() {
    let (server, p) = server_with_two_pools().await;
    let mut pools = server.pools();
    let nowhere = || "nowhere".to_owned();
    let put = pb::PutAllocationRequest { pool_id: nowhere(), allocation: Some(hard("A", 1.0)), revision: 0 };
    let delete = pb::DeleteAllocationRequest { pool_id: nowhere(), api_key_id: "A".to_owned(), revision: 0 };
    let usage = pb::GetPoolUsageRequest { pool_id: nowhere(), ..Default::default() };
    let reservations = pb::ListReservationsRequest { pool_id: nowhere(), ..Default::default() };
    let reset = pb::ResetUsageRequest { pool_id: nowhere(), ..Default::default() };
    let refused = [
        refusal(pools.get_pool(pb::GetPoolRequest { pool_id: nowhere() }).await),
        update(&server, pb::Pool { pool_id: nowhere(), connection_ids: vec!["c7".to_owned()], ..p }).await,
        refusal(pools.put_allocation(put).await),
        refusal(pools.delete_allocation(delete).await),
        refusal(pools.get_pool_usage(usage).await),
        refusal(pools.list_reservations(reservations).await),
        refusal(pools.reset_usage(reset).await),
    ];
    for refused in refused {
        assert_eq!(refused.code, Code::NotFound, "{refused:?}");
        assert!(refused.message.contains("nowhere"), "{refused:?}");
    }
}

#[tokio::test]
async fn ids_that_are_taken_already_exist() {
    let (server, p) = server_with_two_pools().await;
    let taken = create(&server, pb::Pool { connection_ids: vec!["c7".to_owned()], ..p }).await;
    assert_eq!(taken.code, Code::AlreadyExists, "{taken:?}");

    let life = std::time::Duration::from_secs(60);
    let attempt = ask("A", "c1", tokens(10)).with_model("m").holding(life).named("attempt");
    let held = server.quota().enforce(attempt.clone()).await.expect("an answer").into_inner();
    let record = spent("A", "c1", tokens(5)).with_model("m").once("record");
    server.quota().record_consumption(record.clone()).await.expect("an answer");
    let settled = spent("A", "c1", tokens(7)).with_model("m").settling(&held.reservation_id);
    server.quota().record_consumption(settled.clone()).await.expect("an answer");
    let before = state(&server).await;

    let attempts = [
        pb::EnforceRequest { estimated_cost: Some(tokens(11)), ..attempt.clone() },
        pb::EnforceRequest { api_key_id: "B".to_owned(), ..attempt.clone() },
        attempt.with_model("other"),
    ];
    for attempt in attempts {
        let refused = refusal(server.quota().enforce(attempt).await);
        assert_eq!(refused.code, Code::AlreadyExists, "{refused:?}");
        assert!(refused.message.contains("request_id"), "{refused:?}");
    }
    let records = [
        (pb::RecordConsumptionRequest { cost: Some(tokens(6)), ..record.clone() }, "idempotency_key"),
        (pb::RecordConsumptionRequest { api_key_id: "B".to_owned(), ..record.clone() }, "idempotency_key"),
        (record.with_model("other"), "idempotency_key"),
        (pb::RecordConsumptionRequest { cost: Some(cost(2, 7)), ..settled.clone() }, "reservation_id"),
        (settled.with_model("other"), "reservation_id"),
    ];
    for (record, id) in records {
        let refused = refusal(server.quota().record_consumption(record).await);
        assert_eq!(refused.code, Code::AlreadyExists, "{refused:?}");
        assert!(refused.message.contains(id), "{refused:?}");
    }
    assert_eq!(state(&server).await, before);
}

#[tokio::test]
async fn a_decision_call_that_cannot_be_understood_names_the_field() {
    let (server, _) = server_with_two_pools().await;
    let before = state(&server).await;
    let long = |bytes: usize| "x".repeat(bytes);
    let nanos = |nanos| Some(Duration { seconds: 0, nanos });
    let asked = || ask("A", "c1", None);
    let asks = [
        (ask(&long(257), "c1", None), "api_key_id"),
        (ask("a\nb", "c1", None), "api_key_id"),
        (ask("A", "", None), "connection_id"),
        (pb::EnforceRequest { provider: long(65), ..asked() }, "provider"),
        (asked().with_model(&long(257)), "model"),
        (asked().named(&long(129)), "request_id"),
        (ask("A", "c1", requests(-1)), "estimated_cost.requests"),
        (ask("A", "c1", tokens(i64::MIN)), "estimated_cost.tokens"),
        (ask("A", "c1", usd(f64::INFINITY)), "estimated_cost.usd"),
        (ask("A", "c1", percent(-0.1)), "estimated_cost.percent"),
        (pb::EnforceRequest { reserve_for: nanos(0), ..asked() }, "reserve_for"),
        (pb::EnforceRequest { reserve_for: nanos(-1_000_000), ..asked() }, "reserve_for"),
        (asked().holding(std::time::Duration::from_millis(3_600_001)), "reserve_for"),
        (
            pb::EnforceRequest {
                reserve_for: Some(Duration { seconds: i64::MAX, nanos: i32::MAX }),
                ..asked()
            },
            "reserve_for",
        ),
    ];
    for (request, field) in asks {
        refusal(server.quota().enforce(request.clone()).await).names(&[field]);
        let preview = pb::PreviewDecisionRequest { request: Some(request) };
        let refused = refusal(server.pools().preview_decision(preview).await);
        // A preview has no reservation to make, but a call that would be refused is refused here, too.
        refused.names(&[&format!("request.{field}")]);
    }

    let record = || spent("A", "c1", None);
    let records = [
        (spent("", "c1", None), "api_key_id"),
        (spent("A", &long(257), None), "connection_id"),
        (record().once(&long(129)), "idempotency_key"),
        (record().settling(&long(257)), "reservation_id"),
        (record().with_model("\u{7}"), "model"),
        (spent("A", "c1", percent(f64::NAN)), "cost.percent"),
        (spent("A", "c1", percent(9.1e9)), "cost.percent"),
        (pb::RecordConsumptionRequest { headers_age: nanos(-1), ..record() }, "headers_age"),
    ];
    for (request, field) in records {
        refusal(server.quota().record_consumption(request).await).names(&[field]);
    }
    let nothing = pb::ReleaseReservationRequest::default();
    refusal(server.quota().release_reservation(nothing).await).names(&["reservation_id"]);
    let nothing = pb::PreviewDecisionRequest { request: None };
    refusal(server.pools().preview_decision(nothing).await)
        .names(&["request.api_key_id", "request.connection_id"]);
    assert_eq!(state(&server).await, before);
}
