//! FAIL_LOCAL: replicas that are cut off admit what is left between them, and no more than was promised.

use std::sync::Arc;

use proptest::prelude::*;
use quota_share::{
    clock::{Clock, ManualClock},
    core::{
        local_share::LocalShare,
        units::{Timestamp, Unit},
    },
};

use crate::{
    harness::{
        Client, Proxy, T0, TestRedis, TestServer, ask, burst, dimension, hard,
        pb::{self, enforce_response::Decision, pool::FailureMode},
        pool, redis_is_missing, tokens,
    },
    model::{Call, Rig, START, allocation, dimension_spec, pool as pool_spec, tokens as tokens_of},
    redis_team::until,
};

const WINDOW: &str = "tokens/366d";
const REPLICAS: usize = 3;
const LIMIT: i64 = 1_000;

/// Replicas on one Redis, each on a line of its own, with the same pools and a clock that stands.
struct Replicas {
    servers: Vec<TestServer>,
    lines: Vec<Proxy>,
    _redis: TestRedis,
}

impl Replicas {
    /// With these pools on connections `c0`, `c1`, ..., each with [`LIMIT`] tokens.
    async fn with(pools: &[pb::Pool]) -> Self {
        let redis = TestRedis::start().await;
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::new(T0));
        let (mut servers, mut lines) = (Vec::new(), Vec::new());
        for _ in 0..REPLICAS {
            let line = Proxy::to(redis.address()).await;
            let server = TestServer::start_on(&line.url(), Arc::clone(&clock)).await;
            servers.push(server);
            lines.push(line);
        }
        for pool in pools {
            servers[0].put_plan(&pool.connection_ids[0], [dimension(WINDOW, LIMIT as f64)]).await;
            servers[0].create(pool.clone()).await;
        }
        for server in &servers {
            server.until_it_follows(&servers[0]).await;
        }
        let replicas = Self { servers, lines, _redis: redis };
        for server in &replicas.servers {
            let live = format!("quota_share_replicas {REPLICAS}");
            until("it knows the others", async || server.page("/metrics").await.1.contains(&live)).await;
        }
        replicas
    }

    /// Every replica hears of the pool's counters.
    async fn all_hear(&self, connection: &str) {
        for server in &self.servers {
            for key in ["A", "B"] {
                assert!(!server.enforce(key, connection, tokens(1)).await.degraded);
            }
        }
    }

    async fn cut_off(&mut self, replica: usize) {
        self.lines[replica].refuse(true).await;
        self.lines[replica].cut().await;
        let server = &self.servers[replica];
        until("it is cut off", async || server.status().await.degraded).await;
    }

    async fn bring_back(&mut self, replica: usize) {
        self.lines[replica].refuse(false).await;
        self.servers[replica].until_counters_are_in_reach().await;
    }
}

/// How much `key` is admitted, `step` by `step`, until it is blocked.
async fn take_all(client: &Client, key: &str, connection: &str, step: i64) -> i64 {
    let mut taken = 0;
    loop {
        let answer = client.reserve(key, connection, tokens(step)).await;
        if answer.decision() == Decision::Block {
            return taken;
        }
        taken += step;
        assert!(taken <= 2 * LIMIT, "there is no end");
    }
}

/// A pool of two keys that may take whatever there is.
fn open_pool(id: &str, connection: &'static str) -> pb::Pool {
    pool(id, [connection], [burst("A", 50.0), burst("B", 50.0)]).failing(FailureMode::FailLocal)
}

#[tokio::test]
async fn each_replica_that_is_cut_off_takes_one_slice_at_most() {
    if redis_is_missing() {
        return;
    }
    let connections = ["c1", "c2", "c3"];
    let pools = connections.map(|connection| open_pool(connection, connection));
    let mut replicas = Replicas::with(&pools).await;
    for connection in connections {
        replicas.servers[0].record("A", connection, tokens(100)).await;
        replicas.all_hear(connection).await;
    }
    let slice = (LIMIT - 100) / REPLICAS as i64;
    for (cut, connection) in connections.into_iter().enumerate() {
        replicas.cut_off(cut).await;
        let mut taken = Vec::new();
        for server in &replicas.servers {
            // What is only looked at takes nothing.
            for _ in 0..20 {
                server.preview(ask("A", connection, tokens(10))).await;
            }
            taken.push(take_all(server, "A", connection, 10).await);
        }
        let cut_off = cut as i64 + 1;
        println!("{cut_off} of {REPLICAS} cut off: {taken:?}");
        assert!(taken[..=cut].iter().all(|of| *of == slice), "{taken:?}");
        let above = if cut + 1 < REPLICAS { cut_off * slice } else { 0 };
        assert!(100 + taken.iter().sum::<i64>() <= LIMIT + above, "{taken:?}");
        assert!(taken.iter().sum::<i64>() >= LIMIT - 100, "nothing is kept back: {taken:?}");
    }
    // One more token is one too much, everywhere, and the other key's as well.
    for server in &replicas.servers {
        assert_eq!(server.enforce("B", "c3", tokens(1)).await.decision(), Decision::Block);
    }
    for replica in 0..REPLICAS {
        replicas.bring_back(replica).await;
        assert_eq!(replicas.servers[replica].used("c1", WINDOW).await.0, 100.0);
    }
}

#[tokio::test]
async fn in_strict_mode_a_key_gets_its_part_of_a_slice() {
    if redis_is_missing() {
        return;
    }
    let keys = [hard("A", 60.0), hard("B", 40.0)];
    let pool = pool("p", ["c1"], keys).failing(FailureMode::FailLocal);
    let mut replicas = Replicas::with(&[pool]).await;
    replicas.servers[0].record("A", "c1", tokens(300)).await;
    replicas.servers[0].record("B", "c1", tokens(250)).await;
    replicas.all_hear("c1").await;
    replicas.cut_off(0).await;
    replicas.cut_off(1).await;
    for replica in [0, 1] {
        let server = &replicas.servers[replica];
        // (600 - 300) / 3 and (400 - 250) / 3; together they are the pool's (1,000 - 550) / 3.
        assert_eq!(take_all(server, "A", "c1", 10).await, 100, "replica {replica}");
        assert_eq!(take_all(server, "B", "c1", 10).await, 50, "replica {replica}");
    }
}

#[tokio::test]
async fn what_is_recorded_takes_the_place_of_what_was_admitted_for_it() {
    if redis_is_missing() {
        return;
    }
    let pools = ["c1", "c2"].map(|connection| open_pool(connection, connection));
    let mut replicas = Replicas::with(&pools).await;
    for connection in ["c1", "c2"] {
        replicas.all_hear(connection).await;
    }
    replicas.cut_off(0).await;
    let server = &replicas.servers[0];
    // connection | cost of what was expected to cost 10 | how much is admitted of 1,000 / 3
    for (connection, cost, want) in [("c1", 10, 330), ("c2", 30, 110)] {
        let mut taken = 0;
        while server.reserve("A", connection, tokens(10)).await.decision() == Decision::Allow {
            taken += 10;
            assert!(server.record("A", connection, tokens(cost)).await.journaled);
        }
        assert!((want..=want + 10).contains(&taken), "{connection}: {taken}");
    }
    replicas.bring_back(0).await;
    replicas.servers[0].until_the_journal_is_empty().await;
    assert_eq!(replicas.servers[1].used("c1", WINDOW).await, (330.0, 0.0));
}

#[tokio::test]
async fn what_the_last_answer_held_is_not_given_away_again() {
    if redis_is_missing() {
        return;
    }
    let mut replicas = Replicas::with(&[open_pool("p", "c1")]).await;
    replicas.all_hear("c1").await;
    for server in &replicas.servers[..2] {
        assert_eq!(server.reserve("A", "c1", tokens(350)).await.decision(), Decision::Allow);
    }
    for replica in 0..REPLICAS {
        replicas.cut_off(replica).await;
    }
    // The first knows of 350, the second of 700, the third of none.
    let mut taken = Vec::new();
    for server in &replicas.servers[..2] {
        taken.push(take_all(server, "A", "c1", 10).await);
    }
    assert_eq!(taken, [210, 100]);
}

#[tokio::test]
async fn without_an_answer_for_the_pool_since_its_start_a_replica_blocks() {
    if redis_is_missing() {
        return;
    }
    let pools = ["c1", "c2"].map(|connection| open_pool(connection, connection));
    let mut replicas = Replicas::with(&pools).await;
    replicas.servers[0].enforce("A", "c1", tokens(1)).await;
    replicas.cut_off(0).await;
    let [heard, unheard] = ["c1", "c2"];
    for (connection, want) in [(heard, Decision::Allow), (unheard, Decision::Block)] {
        let answer = replicas.servers[0].reserve("A", connection, tokens(1)).await;
        assert_eq!((answer.decision(), answer.degraded), (want, true), "{connection}: {}", answer.message);
    }
}

/// What one of several replicas does.
#[derive(Clone, Debug)]
enum Step {
    Ask { replica: usize, key: usize, cost: u64, recorded: Option<u64> },
    Look { replica: usize, key: usize, cost: u64 },
    Wait(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let cost = prop_oneof![6 => 0..30u64, 1 => 0..400u64];
    let recorded = prop_oneof![2 => Just(None), 1 => (0..40u64).prop_map(Some)];
    prop_oneof![
        8 => (0..5usize, 0..2usize, cost.clone(), recorded)
            .prop_map(|(replica, key, cost, recorded)| Step::Ask { replica, key, cost, recorded }),
        1 => (0..5usize, 0..2usize, cost).prop_map(|(replica, key, cost)| Step::Look { replica, key, cost }),
        1 => prop_oneof![4 => 0..60_000u64, 1 => 0..5_000_000u64].prop_map(Step::Wait),
    ]
}

const KEYS: [&str; 2] = ["a", "b"];

fn rig(policy: &str) -> Rig {
    let keys = vec![allocation("a", 50.0, policy), allocation("b", 50.0, policy)];
    Rig::new(pool_spec(keys), vec![dimension_spec(Unit::Tokens, "hourly", Some(1_000.0))], START)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Replicas that have heard the same and are then alone never admit more than was left, whatever is asked, of whom and
    /// in which order, and however much time passes; nor more to a key, in strict mode, than was left of its share.
    #[test]
    fn replicas_with_the_same_last_answer_admit_together_what_was_left(
        replicas in 1..=5usize,
        before in (0..900u64, 0..600u64),
        is_hard in any::<bool>(),
        offset_ms in 0..3_600_000u64,
        steps in prop::collection::vec(any_step(), 0..150),
    ) {
        let mut rig = rig(if is_hard { "hard" } else { "burst" });
        rig.wait(offset_ms);
        for (key, cost) in KEYS.into_iter().zip([before.0, before.1]) {
            rig.record(&Call::new(key, tokens_of(cost)), "", "").expect("no id to contradict");
        }
        let mut shares: Vec<LocalShare> = (0..replicas).map(|_| LocalShare::default()).collect();
        for key in KEYS {
            let call = Call::new(key, tokens_of(0));
            let (charge, reading) = (rig.charge(&call), rig.reading(&call));
            shares.iter_mut().for_each(|share| share.heard(&charge, &reading, false, true));
        }
        let began_strict = before.0 + before.1 >= 500;
        // Admitted in buckets, as the counters would have it if all of it had been counted.
        let mut truth = rig.clone();
        for step in steps {
            match step {
                Step::Wait(ms) => {
                    rig.wait(ms);
                    truth.wait(ms);
                }
                Step::Look { replica, key, cost } => {
                    let charge = rig.charge(&Call::new(KEYS[key], tokens_of(cost)));
                    let share = &mut shares[replica % replicas];
                    let said = share.admits(&charge, rig.now, replicas as u64);
                    prop_assert_eq!(said, share.admits(&charge, rig.now, replicas as u64));
                }
                Step::Ask { replica, key, cost, recorded } => {
                    let call = Call::new(KEYS[key], tokens_of(cost));
                    let share = &mut shares[replica % replicas];
                    let charge = rig.charge(&call);
                    let said = share.admits(&charge, rig.now, replicas as u64);
                    let admitted = share.admit(&charge, rig.now, replicas as u64);
                    prop_assert_eq!(said, admitted);
                    if admitted != Some(true) {
                        continue;
                    }
                    truth.record(&call, "", "").expect("no id to contradict");
                    let (consumed, _) = truth.totals()[0];
                    prop_assert!(consumed <= 1_000.0 + 1e-6, "{} is used of 1,000", consumed);
                    if is_hard && began_strict && rig.now == START.plus_ms(offset_ms) {
                        let dimension = truth.entry().dimension_keys()[0];
                        let (of_key, _) = truth.of_key(KEYS[key], dimension);
                        prop_assert!(of_key <= 500.0 + 1e-6, "{} is used of a share of 500", of_key);
                    }
                    if let Some(recorded) = recorded {
                        let counts = rig.consumption(&Call::new(KEYS[key], tokens_of(recorded)), "", "").counts;
                        share.recorded(&charge.api_key, &counts, rig.now);
                    }
                }
            }
        }
    }
}

#[test]
fn a_replica_alone_may_take_all_that_was_left() {
    let mut rig = rig("burst");
    rig.record(&Call::new("a", tokens_of(400)), "", "").expect("no id to contradict");
    let call = Call::new("a", tokens_of(100));
    let (charge, reading) = (rig.charge(&call), rig.reading(&call));
    let mut share = LocalShare::default();
    assert_eq!(share.admit(&charge, rig.now, 1), None, "nothing was heard");
    share.heard(&charge, &reading, false, true);
    let admitted = (0..10).take_while(|_| share.admit(&charge, rig.now, 1) == Some(true)).count();
    assert_eq!(admitted, 6);
    // What is over an hour old has been forgotten by everybody.
    let later = Timestamp::from_unix_ms(rig.now.unix_ms() + 2 * 3_600_000);
    assert_eq!(share.admit(&charge, later, 1), Some(true));
    share.heard(&charge, &reading, false, true);
    assert_eq!(share.admit(&charge, rig.now, 1), Some(true), "what was spent here is counted there now");
}
