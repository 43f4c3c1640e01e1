//! Answers while the shared counters are out of reach.

use std::time::Duration;

use tonic::Code;

use crate::harness::{
    Refusal, TestServer, Verdict, ask, exempt, hard,
    pb::{
        self, dimension_status::Reason, enforce_response::Decision, pool::FailureMode, settings::StoreDriver,
    },
    pool, refusal, requests, said, spent, told,
};

/// A server whose Redis cannot be reached, with `pools` on a plan of 1,500 requests an hour.
async fn server_with(pools: impl IntoIterator<Item = pb::Pool>) -> TestServer {
    let server = TestServer::start_on_sqlite().await;
    for pool in pools {
        server.create(pool.with_provider("kimi")).await;
    }
    server.switch_to(StoreDriver::Redis).await;
    server
}

#[tokio::test]
async fn without_the_shared_counters_each_pool_answers_by_its_failure_mode() {
    use Decision::{Allow, Block};
    use FailureMode::{FailClosed, FailLocal, FailOpen};
    // pool | connection | mode | in shadow | decision | what it would be | what the message says
    let rows = [
        ("open", "c1", FailOpen, false, Allow, None, "allowed by its failure mode FAIL_OPEN"),
        ("closed", "c2", FailClosed, false, Block, None, "FAIL_CLOSED blocks"),
        ("local", "c3", FailLocal, false, Block, None, "has not heard of them since it started"),
        ("open-shadow", "c4", FailOpen, true, Allow, Some(Allow), "the pool is in SHADOW"),
        ("closed-shadow", "c5", FailClosed, true, Allow, Some(Block), "the pool is in SHADOW"),
    ];
    let pools = rows.map(|(id, connection, mode, shadow, ..)| {
        let pool = pool(id, [connection], [hard("A", 100.0), exempt("X")]).failing(mode);
        if shadow { pool.in_shadow() } else { pool }
    });
    let server = server_with(pools).await;
    let revision = server.status().await.config_revision;

    for (id, connection, _, _, decision, would_be, says) in rows {
        let check = ask("A", connection, requests(2_000));
        let hold = check.clone().holding(Duration::from_secs(60)).named("once");
        let answers = [
            told(server.quota().enforce(check.clone()).await),
            told(server.quota().enforce(hold).await),
            server.preview(check).await,
        ];
        for answer in answers {
            let shadow = answer.shadow.clone();
            assert_eq!(shadow.as_ref().map(|shadow| shadow.decision()), would_be, "{id}");
            assert!(shadow.is_none_or(|shadow| shadow.reason() == Reason::StoreUnavailable), "{id}");
            assert!(answer.message.contains("could not be reached") && answer.message.contains(says), "{id}");
            let want = pb::EnforceResponse {
                decision: decision.into(),
                reason: Reason::StoreUnavailable.into(),
                score_factor: 1.0,
                pool_id: id.to_owned(),
                degraded: true,
                config_revision: revision,
                message: answer.message.clone(),
                shadow: answer.shadow.clone(),
                ..Default::default()
            };
            assert_eq!(answer, want, "{id}: and nothing that only counters could tell");
        }
        let answer = server.enforce("X", connection, None).await;
        assert_eq!(
            (answer.decision(), answer.degraded),
            (Allow, true),
            "{id}: exempt keys are never limited"
        );
    }
    let metrics = server.page("/metrics").await.1;
    for (pool, decision, count) in
        [("open", "allow", 3), ("closed", "block", 2), ("closed-shadow", "would_block", 2)]
    {
        let counted = metrics.lines().find(|line| {
            line.starts_with("quota_share_decisions_total")
                && line.contains(&format!("pool=\"{pool}\""))
                && line.contains(&format!("decision=\"{decision}\""))
        });
        let counted = counted.unwrap_or_else(|| panic!("no decisions of {pool}: {metrics}"));
        assert!(
            counted.contains("reason=\"STORE_UNAVAILABLE\"") && counted.ends_with(&format!(" {count}")),
            "{counted}"
        );
    }
    let unmatched = server.status().await.warnings;
    assert!(!unmatched.iter().any(|warning| warning.contains("no call has matched")), "{unmatched:?}");
}

#[tokio::test]
async fn where_there_is_nothing_to_count_nothing_is_degraded() {
    let server = server_with([pool("p", ["c1"], [hard("A", 100.0)]).failing(FailureMode::FailClosed)]).await;
    for (key, connection) in [("B", "c1"), ("A", "c2")] {
        let answer = server.enforce(key, connection, None).await;
        assert_eq!((answer.verdict(), answer.reason()), (Verdict::Allow, Reason::NoPool));
        assert_eq!(
            server.record(key, connection, requests(1)).await,
            pb::RecordConsumptionResponse::default()
        );
    }
}

#[tokio::test]
async fn without_the_shared_counters_costs_and_releases_are_kept_and_nothing_is_shown() {
    let server = TestServer::start_on_sqlite().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    let reservation = server.reserve("A", "c1", requests(3)).await.reservation_id;
    let mut watched = {
        let interval = Some(prost_types::Duration { seconds: 1, nanos: 0 });
        let request = pb::WatchPoolUsageRequest { pool_id: "p".to_owned(), interval, ..Default::default() };
        told(server.pools().watch_pool_usage(request).await)
    };
    assert!(watched.message().await.is_ok_and(|usage| usage.is_some()));
    server.switch_to(StoreDriver::Redis).await;

    let pool_id = || "p".to_owned();
    let (mut quota, mut pools) = (server.quota(), server.pools());
    let record = spent("A", "c1", requests(1)).once("once");
    let settle = spent("A", "c1", requests(1)).settling(&reservation);
    let release = pb::ReleaseReservationRequest { reservation_id: reservation, api_key_id: String::new() };
    let report = pb::ReportSignalsRequest {
        connection_id: "c1".to_owned(),
        utilizations: vec![said("requests/hourly", 50.0)],
        ..Default::default()
    };
    let usage = pb::GetPoolUsageRequest { pool_id: pool_id(), ..Default::default() };
    let watch = pb::WatchPoolUsageRequest { pool_id: pool_id(), ..Default::default() };
    let list = pb::ListReservationsRequest { pool_id: pool_id(), ..Default::default() };
    let reset = pb::ResetUsageRequest { pool_id: pool_id(), ..Default::default() };
    // What it saw before comes first.
    let last = loop {
        match watched.message().await {
            Ok(Some(_)) => {}
            ended => break refusal(ended.map(tonic::Response::new)),
        }
    };
    for record in [record, settle] {
        let want =
            pb::RecordConsumptionResponse { journaled: true, pool_id: pool_id(), ..Default::default() };
        assert_eq!(told(quota.record_consumption(record).await), want);
    }
    let want = pb::ReleaseReservationResponse { released: false, journaled: true };
    assert_eq!(told(quota.release_reservation(release).await), want);
    let others = [
        refusal(quota.report_signals(report).await),
        refusal(pools.get_pool_usage(usage).await),
        refusal(told(pools.watch_pool_usage(watch).await).message().await.map(tonic::Response::new)),
        last,
        refusal(pools.list_reservations(list).await),
        refusal(pools.reset_usage(reset).await),
    ];
    others.iter().for_each(assert_unavailable);
    // What is in no counter is there, and stays as it is: other replicas could not be told.
    assert_eq!(server.list_pools().await.len(), 1);
    let delete = pb::DeletePoolRequest { pool_id: pool_id(), revision: 0 };
    assert_unavailable(&refusal(pools.delete_pool(delete).await));
}

fn assert_unavailable(refused: &Refusal) {
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::Unavailable, "STORE_UNAVAILABLE"),
        "{refused:?}"
    );
    assert!(refused.has_retry_info && refused.message.contains("could not be reached"), "{refused:?}");
    assert!(!refused.message.contains("hidden") && !refused.message.contains("127.0.0.1"), "{refused:?}");
}
