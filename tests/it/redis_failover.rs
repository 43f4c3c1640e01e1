//! A master of Redis is gone, and its replica takes over: what was acknowledged is counted, though Redis has lost it.

use std::time::{Duration, Instant};

use crate::{
    chaos::{
        Book, Caller, Course, Habits, Kind, REQUESTS, SharedPool, drained, left_over, miscounted, sent_again,
        usage_of,
    },
    harness::{
        Client, PATIENCE, TestPairs, TestReplica, ask, dimension, hard, pb::pool::FailureMode, pool,
        redis_is_missing, spent, tokens, told,
    },
};

const CALLERS: usize = 16;
const TOKENS: &str = "tokens/366d";
const LONG: Duration = Duration::from_secs(3_600);
const POLL: Duration = Duration::from_millis(20);
/// Records that a new master has certainly not seen, where that is to be so.
const LOST_MIN: f64 = 40.0;
/// How much is shown of what is wrong.
const SHOWN_MAX: usize = 10;
/// So long callers go on when the new master is there.
const AFTERWARDS: Duration = Duration::from_secs(2);

/// What happens to a master while callers call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    /// It is killed. What its replica has seen is a matter of luck.
    Killed,
    /// It is killed after its replica has been cut off from it for a while.
    KilledAlone,
    /// Its replica is told to take over, and it lives on as a replica.
    Demoted,
}

/// Replicas with one pool on the same Redis.
#[derive(Debug)]
struct Scene {
    redis: TestPairs,
    replicas: Vec<TestReplica>,
    clients: Vec<Client>,
    pools: [SharedPool; 1],
    /// By which the pool is found in a cluster.
    tag: String,
}

impl Scene {
    async fn set_up(redis: TestPairs, replicas: usize, timeout_ms: &str) -> Self {
        let pools = [SharedPool::new("open", Kind::Roomy, FailureMode::FailOpen)];
        let urls = vec![redis.url(); replicas];
        let replicas = TestReplica::start_team(&urls, timeout_ms, async |writer| {
            pools[0].create(writer, CALLERS).await;
        });
        let replicas = replicas.await;
        let clients: Vec<_> = replicas.iter().map(TestReplica::client).collect();
        let revision = clients[0].get_pool("open").await.pool.expect("the pool").revision;
        Self { redis, replicas, clients, pools, tag: format!("{{{revision}}}") }
    }

    /// Requests that are counted, as far as a replica can tell now.
    async fn requests(&self) -> f64 {
        let usage = usage_of(&self.clients[0], &self.pools[0]).await;
        usage.map_or(0.0, |usage| usage.dimension(REQUESTS).consumed)
    }

    async fn until_requests(&self, least: f64) {
        let asked = Instant::now();
        while self.requests().await < least {
            assert!(asked.elapsed() < PATIENCE, "nobody records");
            tokio::time::sleep(POLL).await;
        }
    }

    async fn strike(&mut self, blow: Blow) {
        let tag = self.tag.clone();
        if blow == Blow::KilledAlone {
            self.redis.cut_replication(&tag).await;
            self.until_requests(self.requests().await + LOST_MIN).await;
        }
        match blow {
            Blow::Demoted => self.redis.fail_over(&tag).await,
            Blow::Killed | Blow::KilledAlone => self.redis.kill_master(&tag).await,
        }
    }

    /// What is lost is sent again in the background: waits until usage is as callers know it, if it ever is.
    async fn assert_counted(&self, book: &Book) {
        let asked = Instant::now();
        let mut broken = miscounted(&self.clients, &self.pools, book).await;
        while !broken.is_empty() && asked.elapsed() < PATIENCE / 4 {
            tokio::time::sleep(POLL).await;
            broken = miscounted(&self.clients, &self.pools, book).await;
        }
        broken.truncate(SHOWN_MAX);
        assert!(broken.is_empty(), "{broken:#?}\n{}", self.logs());
    }

    fn logs(&self) -> String {
        self.replicas.iter().map(TestReplica::log).collect::<Vec<_>>().join("\n")
    }
}

async fn sentinels() -> Option<TestPairs> {
    if redis_is_missing() {
        return None;
    }
    Some(TestPairs::behind_sentinels().await)
}

async fn cluster() -> Option<TestPairs> {
    if redis_is_missing() {
        return None;
    }
    Some(TestPairs::as_cluster().await)
}

#[tokio::test]
async fn a_master_behind_sentinels_that_is_killed_under_load_takes_nothing_along() {
    under_load(sentinels().await, 1, Blow::Killed).await;
}

#[tokio::test]
async fn a_master_behind_sentinels_that_is_killed_alone_takes_nothing_of_two_replicas_along() {
    under_load(sentinels().await, 2, Blow::KilledAlone).await;
}

#[tokio::test]
async fn a_master_behind_sentinels_that_lives_on_as_a_replica_is_left() {
    under_load(sentinels().await, 2, Blow::Demoted).await;
}

#[tokio::test]
async fn a_master_of_a_cluster_that_is_killed_under_load_takes_nothing_of_two_replicas_along() {
    under_load(cluster().await, 2, Blow::Killed).await;
}

#[tokio::test]
async fn a_master_of_a_cluster_that_is_killed_alone_takes_nothing_along() {
    under_load(cluster().await, 1, Blow::KilledAlone).await;
}

#[tokio::test]
async fn a_master_of_a_cluster_that_lives_on_as_a_replica_is_left() {
    under_load(cluster().await, 2, Blow::Demoted).await;
}

/// Callers record, hold, settle and release, and send again what nobody answers; in the midst of it a master is struck.
async fn under_load(redis: Option<TestPairs>, replicas: usize, blow: Blow) {
    let Some(redis) = redis else { return };
    let mut scene = Scene::set_up(redis, replicas, "150").await;
    let habits = Habits {
        roomy: scene.pools.to_vec(),
        tight: Vec::new(),
        life_ms: 1_000..=4_000,
        rest_ms: 10,
        redis_keeps: false,
    };
    let course = Course::begin();
    let caller = |number| Caller::new(number, &scene.clients, &course, &habits, 1);
    let callers: Vec<_> = (0..CALLERS).map(|number| tokio::spawn(caller(number).call())).collect();
    scene.until_requests(LOST_MIN).await;
    scene.strike(blow).await;
    let (back_in, _) = drained(&scene.replicas).await;
    course.pause(AFTERWARDS).await;
    course.end();
    course.heal();
    let mut book = Book::default();
    for caller in callers {
        book.merge(caller.await.expect("callers do not panic"));
    }
    let (_, not_drained) = drained(&scene.replicas).await;

    for replica in 0..replicas {
        let seconds = book.degraded_seconds(replica);
        println!("{blow:?}: replica {replica} gave degraded answers in {seconds:.1} s");
    }
    let (acknowledged, journaled) = (book.acknowledged, book.journaled);
    println!("{blow:?}: {acknowledged} acknowledged, {journaled} journaled, normal after {back_in:.2?}");
    assert!(book.broken.is_empty(), "{:#?}", book.broken);
    assert_eq!(not_drained, Vec::<String>::new());
    scene.assert_counted(&book).await;
    assert_eq!(sent_again(&scene.clients, &book).await, Vec::<String>::new());
    assert_eq!(left_over(&scene.clients, &scene.pools).await, Vec::<String>::new());
    scene.assert_counted(&book).await;
}

#[tokio::test]
async fn what_only_a_dead_master_behind_sentinels_knew_is_sent_again() {
    sent_again_in_order(sentinels().await).await;
}

#[tokio::test]
async fn what_only_a_dead_master_of_a_cluster_knew_is_sent_again() {
    sent_again_in_order(cluster().await).await;
}

/// Settles, releases and records that a new master has not seen, of reservations that it has.
async fn sent_again_in_order(redis: Option<TestPairs>) {
    let Some(redis) = redis else { return };
    let mut scene = Scene::set_up(redis, 2, "2000").await;
    scene.clients[0].put_plan("c1", [dimension(TOKENS, 1_000.0)]).await;
    scene.clients[0].create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    scene.clients[1].until_it_follows(&scene.clients[0]).await;
    let revision = scene.clients[0].get_pool("p").await.pool.expect("the pool").revision;
    let tag = format!("{{{revision}}}");
    let client = |n: usize| &scene.clients[n % 2];
    let mut held = Vec::new();
    for n in 0..12 {
        let asked = ask("A", "c1", tokens(10)).holding(LONG);
        held.push(told(client(n).quota().enforce(asked).await).reservation_id);
    }
    scene.redis.until_in_step(&tag).await;
    scene.redis.cut_replication(&tag).await;

    let settling = held[..4].iter().map(|id| spent("A", "c1", tokens(7)).settling(id));
    let records = settling.chain((0..20).map(|n| spent("A", "c1", tokens(3)).once(&format!("record-{n}"))));
    let records: Vec<_> = records.collect();
    for (n, record) in records.iter().enumerate() {
        let told = told(client(n).quota().record_consumption(record.clone()).await);
        assert_eq!((told.duplicate, told.reservation_expired, told.journaled), (false, false, false));
    }
    for (n, id) in held[4..8].iter().enumerate() {
        assert!(client(n).release(id).await, "{id} was held");
    }
    let expected = (4.0 * 7.0 + 20.0 * 3.0, 4.0 * 10.0);
    assert_eq!(client(0).used("p", TOKENS).await, expected);

    scene.redis.kill_master(&tag).await;
    drained(&scene.replicas).await;
    let asked = Instant::now();
    let client = |n: usize| &scene.clients[n % 2];
    while client(0).used("p", TOKENS).await != expected && asked.elapsed() < PATIENCE / 4 {
        tokio::time::sleep(POLL).await;
    }
    assert_eq!(client(0).used("p", TOKENS).await, expected, "{}", scene.logs());
    for (n, record) in records.iter().enumerate() {
        let told = told(client(n + 1).quota().record_consumption(record.clone()).await);
        assert!(told.duplicate, "{record:?} was counted before: {told:?}");
    }
    for (n, id) in held[4..8].iter().enumerate() {
        assert!(!client(n + 1).release(id).await, "{id} was released before");
    }
    assert_eq!(client(1).used("p", TOKENS).await, expected);
    for (n, id) in held[8..].iter().enumerate() {
        assert!(!client(n).settle("A", "c1", id, tokens(1)).await.reservation_expired, "{id} was kept");
    }
    assert_eq!(client(0).used("p", TOKENS).await, (expected.0 + 4.0, 0.0));
}
