//! C: which plan is in force, and what an unknown limit means.

use crate::harness::{
    TestServer, Verdict, blocked, dimension, hard,
    pb::{
        self,
        dimension_status::{Mode, Reason},
        plan::Source,
    },
    pool, refusal, requests, tokens, unlimited,
};

#[tokio::test]
async fn c01_the_catalogue_knows_the_plans_of_providers() {
    let server = TestServer::start().await;
    // provider | dimensions and limits; none: manual configuration is required
    let cases: &[(&str, &[&str])] = &[
        ("codex", &["percent/5h/100", "percent/weekly/100"]),
        ("glm", &["tokens/5h/unknown", "tokens/weekly/unknown"]),
        ("minimax", &["tokens/5h/unknown", "tokens/weekly/unknown"]),
        ("bailian", &["percent/5h/100", "percent/weekly/100", "percent/monthly/100"]),
        ("bailian-coding-plan", &["percent/5h/100", "percent/weekly/100", "percent/monthly/100"]),
        ("kimi", &["requests/hourly/1500"]),
        ("alibaba", &["requests/monthly/90000"]),
        ("openai", &[]),
        ("anthropic", &[]),
        ("nosuch", &[]),
    ];
    for &(provider, dimensions) in cases {
        let plan = server.get_plan("c1", provider).await;
        let limit = |limit: Option<f64>| limit.map_or("unknown".to_owned(), |limit| limit.to_string());
        let named = plan.limits().into_iter().map(|(name, known)| format!("{name}/{}", limit(known)));
        assert_eq!(named.collect::<Vec<_>>(), dimensions, "{provider}");
        let source = if dimensions.is_empty() { Source::NoPlan } else { Source::Catalog };
        assert_eq!(plan.source(), source, "{provider}");
    }
}

#[tokio::test]
async fn c02_an_unknown_limit_is_recorded_but_never_enforced() {
    let server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 10.0), hard("B", 90.0)]).with_provider("glm")).await;
    server.create(pool("q", ["c2"], [hard("A", 50.0)]).with_provider("minimax")).await;
    server.record("A", "c1", tokens(9_000_000)).await;
    server.record("A", "c2", tokens(9_000_000)).await;

    for (key, connection) in [("A", "c1"), ("A", "c2"), ("B", "c1")] {
        let answer = server.enforce(key, connection, None).await;
        assert_eq!((answer.verdict(), answer.reason()), (Verdict::Allow, Reason::Ok), "{key} {connection}");
    }
    let usage = server.usage("p").await;
    for name in ["tokens/5h", "tokens/weekly"] {
        let usage = usage.dimension(name);
        assert_eq!((usage.consumed, usage.limit, usage.used_fraction), (9e6, None, None), "{name}");
        assert_eq!(usage.mode(), Mode::Unspecified, "{name}");
        let key = usage.key("A");
        assert_eq!((key.consumed, key.fair_share, key.over_fair_share), (9e6, None, None), "{name}");
    }

    server.put_plan("c1", [dimension("tokens/5h", 1e7), dimension("tokens/weekly", 5e7)]).await;
    let answer = server.enforce("A", "c1", None).await;
    assert_eq!(answer.verdict(), blocked(Reason::FairShare, "tokens/5h", 26_000_001));
    let status = answer.dimension("tokens/5h");
    assert_eq!((status.used_fraction, status.fair_share), (Some(0.9), Some(1e6)));

    let zero = pb::PutPlanRequest::of("c1", [dimension("tokens/5h", 0.0)]);
    refusal(server.plans().put_plan(zero).await).names(&["plan.dimensions[0].limit"]);
}

#[tokio::test]
async fn c03_an_override_that_is_deleted_reverts_to_the_catalogue() {
    let mut server = TestServer::start().await;
    server.create(pool("p", ["c1"], [hard("A", 100.0)]).with_provider("kimi")).await;
    let ten = [("requests/hourly".to_owned(), Some(10.0))];
    let catalogue = [("requests/hourly".to_owned(), Some(1_500.0))];

    server.put_plan("c1", [dimension("requests/hourly", 10.0)]).await;
    let plan = server.get_plan("c1", "").await;
    assert_eq!((plan.source(), &plan.limits()[..]), (Source::Manual, &ten[..]));
    server.record("A", "c1", requests(10)).await;
    let verdict = server.enforce("A", "c1", None).await.verdict();
    assert_eq!(verdict, blocked(Reason::GlobalSaturated, "requests/hourly", 3_960_000));

    let deleted = server.delete_plan("c1").await;
    assert_eq!((deleted.source(), &deleted.limits()[..]), (Source::Catalog, &catalogue[..]));
    assert_eq!(server.get_plan("c1", "").await, deleted);
    let answer = server.enforce("A", "c1", None).await;
    assert_eq!(answer.verdict(), Verdict::Allow);
    assert_eq!(answer.dimension("requests/hourly").key_consumed, 10.0, "the counter is the same counter");
    assert_eq!(server.delete_plan("c1").await, deleted, "idempotent");

    let stored = server.put_plan("c1", [dimension("requests/hourly", 10.0)]).await;
    // refused dimensions | the field that is named
    let cases = [
        (vec![], "plan.dimensions"),
        (vec![dimension("requests/yearly", 1.0)], "plan.dimensions[0].window"),
        (vec![dimension("requests/hourly", -1.0)], "plan.dimensions[0].limit"),
        (vec![dimension("requests/hourly", 1.0), unlimited("requests/60m")], "plan.dimensions[1]"),
    ];
    for (dimensions, field) in cases {
        let request = pb::PutPlanRequest::of("c1", dimensions);
        refusal(server.plans().put_plan(request).await).names(&[field]);
        assert_eq!(server.get_plan("c1", "").await, stored, "a refused call changes nothing");
    }
    server.restart().await;
    assert_eq!(server.get_plan("c1", "").await, stored, "an override survives a restart");
}
