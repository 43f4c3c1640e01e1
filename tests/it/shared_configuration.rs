//! Replicas that share a Redis have one configuration: written on any, it is on all.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use quota_share::{
    clock::{ManualClock, SystemClock},
    core::{
        directory::{Directory, Documents},
        document::DocumentName,
    },
    store::{DirectoryStore, sqlite::SqliteDirectory},
};
use tonic::Code;

use crate::harness::{
    Client, PATIENCE, T0, TestCluster, TestRedis, TestServer, Verdict, ask, dimension, hard, pb,
    pb::settings::StoreDriver, pool, redis_is_missing, refusal, run, tokens, told,
};

/// Where Redis has all of it.
pub(crate) const CONFIGURATION: &str = "quota-share:{configuration}";

/// What is stored in a data directory, also while a service has it.
pub(crate) async fn stored(data_dir: &Path) -> Directory {
    let store = SqliteDirectory::read_only(data_dir).await.expect("a data directory");
    store.load().await.expect("what can be read")
}

/// Waits until all of these have the same documents, of the same write, and returns them.
pub(crate) async fn until_alike(data_dirs: &[&Path]) -> Documents {
    let asked = Instant::now();
    loop {
        let mut all = Vec::new();
        for data_dir in data_dirs {
            all.push(stored(data_dir).await);
        }
        let heads: BTreeSet<String> = all.iter().map(|of| format!("{:?}", of.head())).collect();
        if heads.len() == 1 && all[0].head().is_some() {
            let documents = all[0].documents();
            for other in &all {
                assert_eq!(other.documents(), documents, "of one head");
            }
            return documents;
        }
        assert!(asked.elapsed() < PATIENCE, "they stay apart: {heads:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What `quota-share export` prints.
pub(crate) async fn export(data_dir: &Path) -> String {
    let ended = run(&["export"], &[("DATA_DIR", &data_dir.display().to_string())]).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended.stdout
}

pub(crate) fn name(text: &str) -> DocumentName {
    text.parse().expect("a document's name")
}

pub(crate) async fn until(what: &str, so: impl AsyncFn() -> bool) {
    let asked = Instant::now();
    while !so().await {
        assert!(asked.elapsed() < PATIENCE, "not {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn three(url: &str) -> [TestServer; 3] {
    let one = TestServer::start_on(url, Arc::new(SystemClock)).await;
    let (two, three) = (one.another_replica().await, one.another_replica().await);
    [one, two, three]
}

#[tokio::test]
async fn a_pool_created_on_one_replica_decides_on_the_others_within_a_second() {
    if redis_is_missing() {
        return;
    }
    let url = TestRedis::database_of_ones_own().await;
    let replicas = three(&url).await;
    replicas[0].put_plan("c1", [dimension("tokens/daily", 10.0)]).await;
    let created = replicas[0].create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    let began = Instant::now();
    for replica in &replicas[1..] {
        until("it decides there", async || replica.enforce("A", "c1", None).await.pool_id == "p").await;
    }
    let took = began.elapsed();
    println!("decided on the others after {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
    for replica in &replicas {
        let answer = replica.enforce("A", "c1", tokens(11)).await;
        assert!(matches!(answer.verdict(), Verdict::Block { .. }), "{answer:?}");
        assert_eq!(answer.config_revision, created.revision);
        assert_eq!(replica.usage("p").await.config_revision, created.revision);
    }

    // Each says which others there are, and how far they have come.
    until("all have said so", async || {
        let status = replicas[1].status().await;
        status.replicas.len() == 3 && status.replicas.iter().all(|of| of.config_revision == created.revision)
    })
    .await;
    for replica in &replicas {
        let status = replica.status().await;
        assert_eq!(status.newest_config_revision, created.revision);
        assert!(status.replicas.iter().any(|of| of.replica_id == status.replica_id), "{status:?}");
        for other in &status.replicas {
            assert_eq!(other.version, env!("CARGO_PKG_VERSION"));
        }
    }

    // What is deleted is gone at once, for whoever asks its counters.
    assert!(replicas[0].delete_pool("p").await);
    for replica in &replicas[1..] {
        let answer = replica.enforce("A", "c1", tokens(1)).await;
        assert_eq!((answer.verdict(), answer.pool_id.as_str()), (Verdict::Allow, ""));
    }
    until_alike(&replicas.each_ref().map(|replica| replica.data_dir())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_writes_of_three_administrators_end_in_the_same_documents_everywhere() {
    if redis_is_missing() {
        return;
    }
    const WRITES_EACH: usize = 167;
    let url = TestRedis::database_of_ones_own().await;
    let replicas = three(&url).await;
    let began = Instant::now();
    let administrators = replicas.iter().map(|replica| {
        let client = (**replica).clone();
        tokio::spawn(async move { administrate(client, WRITES_EACH).await })
    });
    // What was answered, by the revision that it has got; it is nobody else's.
    let mut answered = BTreeMap::new();
    let mut deleted = BTreeSet::new();
    for administrator in administrators.collect::<Vec<_>>() {
        let (written, gone) = administrator.await.unwrap();
        for (revision, document) in written {
            let other = answered.insert(revision, document);
            assert_eq!(other, None, "two writes have revision {revision}");
        }
        deleted.extend(gone);
    }
    println!("{} writes were answered in {:?}", answered.len(), began.elapsed());
    let documents = until_alike(&replicas.each_ref().map(|replica| replica.data_dir())).await;
    let exports = [export(replicas[0].data_dir()).await, export(replicas[2].data_dir()).await];
    assert_eq!(exports[0], exports[1]);

    let last: BTreeMap<&str, i64> = answered.iter().map(|(revision, of)| (of.as_str(), *revision)).collect();
    assert!(last.len() > 10, "{last:?}");
    for (of, revision) in last {
        let document = &documents[&name(of)];
        let stored = i64::try_from(document.revision).unwrap();
        let is_it = stored == revision && document.content.is_some();
        let was_deleted = stored > revision && document.content.is_none() && deleted.contains(of);
        assert!(is_it || was_deleted, "{of} was last written at {revision}: {document:?}");
    }
}

/// Writes at random for a while; what was answered, by revision, and what was deleted.
async fn administrate(client: Client, writes: usize) -> (Vec<(i64, String)>, Vec<String>) {
    const CONNECTIONS: [&str; 12] =
        ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "c10", "c11"];
    let (mut written, mut deleted) = (Vec::new(), Vec::new());
    for _ in 0..writes {
        let n = rand::random_range(0..8usize);
        let connection = CONNECTIONS[rand::random_range(0..CONNECTIONS.len())];
        let id = format!("p{n}");
        let weight = f64::from(rand::random_range(0..=50u8));
        let put = match rand::random_range(0..10u8) {
            0..3 => {
                let request =
                    pb::CreatePoolRequest { pool: Some(pool(&id, [connection], [hard("A", weight)])) };
                client.pools().create_pool(request).await.map(|of| of.into_inner().pool)
            }
            3..5 => {
                let request =
                    pb::UpdatePoolRequest { pool: Some(pool(&id, [connection], [hard("B", weight)])) };
                client.pools().update_pool(request).await.map(|of| of.into_inner().pool)
            }
            5..7 => {
                let allocation = Some(hard("C", weight));
                let request = pb::PutAllocationRequest { pool_id: id.clone(), allocation, revision: 0 };
                client.pools().put_allocation(request).await.map(|of| of.into_inner().pool)
            }
            7 => {
                let request = pb::DeletePoolRequest { pool_id: id.clone(), revision: 0 };
                if told(client.pools().delete_pool(request).await).deleted {
                    deleted.push(format!("pool:{id}"));
                }
                continue;
            }
            8 => {
                let request = pb::PutPlanRequest::of(connection, [dimension("tokens/daily", 1.0 + weight)]);
                let plan = told(client.plans().put_plan(request).await).plan.expect("the plan");
                written.push((plan.revision, format!("plan:{connection}")));
                continue;
            }
            _ => {
                client.delete_plan(connection).await;
                deleted.push(format!("plan:{connection}"));
                continue;
            }
        };
        match put {
            Ok(of) => written.push((of.expect("the pool").revision, format!("pool:{id}"))),
            Err(status) => {
                let expected =
                    [Code::AlreadyExists, Code::NotFound, Code::FailedPrecondition, Code::InvalidArgument];
                assert!(expected.contains(&status.code()), "{status:?}");
            }
        }
    }
    (written, deleted)
}

#[tokio::test]
async fn of_two_administrators_with_one_revision_one_wins_and_the_other_is_told_the_current_one() {
    if redis_is_missing() {
        return;
    }
    let url = TestRedis::database_of_ones_own().await;
    let one = TestServer::start_on(&url, Arc::new(SystemClock)).await;
    let other = one.another_replica().await;
    let mut known = one.create(pool("p", ["c1"], [hard("A", 50.0)])).await;
    other.until_it_follows(&one).await;
    for round in 0..5 {
        let update = |client: &Client, name: String| {
            let mut pools = client.pools();
            let request = pb::UpdatePoolRequest { pool: Some(pb::Pool { name, ..known.clone() }) };
            async move { pools.update_pool(request).await }
        };
        let (here, there) =
            tokio::join!(update(&one, format!("here {round}")), update(&other, format!("there {round}")));
        let (won, lost) = if here.is_ok() { (here, there) } else { (there, here) };
        let won = told(won).pool.unwrap();
        let lost = refusal(lost);
        assert_eq!((lost.code, lost.reason.as_str()), (Code::Aborted, "REVISION_DIFFERS"));
        assert_eq!(lost.metadata["current_revision"], won.revision.to_string());
        known = won;
    }
    until_alike(&[one.data_dir(), other.data_dir()]).await;
}

#[tokio::test]
async fn the_first_start_on_redis_publishes_what_is_there_and_driver_and_url_stay_the_replicas_own() {
    if redis_is_missing() {
        return;
    }
    let url = TestRedis::database_of_ones_own().await;
    let mut one = TestServer::start_on_sqlite().await;
    one.put_plan("c1", [dimension("tokens/daily", 10.0)]).await;
    one.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    one.create(pool("gone", ["c2"], [hard("A", 100.0)])).await;
    one.delete_pool("gone").await;
    let before = export(one.data_dir()).await;
    let redis = pb::Settings {
        store_driver: StoreDriver::Redis.into(),
        redis_url: url.clone(),
        ..Default::default()
    };
    one.update_settings(redis, &[]).await;
    one.until_counters_are_in_reach().await;

    let mut two = TestServer::start_on(&url, Arc::new(ManualClock::new(T0))).await;
    let dirs = [one.data_dir(), two.data_dir()].map(Path::to_owned);
    let dirs = dirs.each_ref().map(|of| of.as_path());
    until_alike(&dirs).await;
    assert_eq!(export(two.data_dir()).await, before);

    let shared = pb::Settings { saturation_threshold: Some(0.25), ..Default::default() };
    two.update_settings(shared, &[]).await;
    one.until_it_follows(&two).await;
    let stored_of = async |client: &Client| {
        let settings = told(client.settings().get_settings(pb::GetSettingsRequest {}).await);
        settings.stored.expect("what is stored")
    };
    assert_eq!(stored_of(&one).await.store_driver(), StoreDriver::Redis);
    assert_eq!(stored_of(&one).await.saturation_threshold, Some(0.25));
    assert_eq!(stored_of(&two).await.store_driver(), StoreDriver::Unspecified);
    assert_eq!(stored(two.data_dir()).await.settings().redis_url, None);

    // A restart by the stored choice alone is on the same configuration; away from Redis and back it goes on from there.
    one.restart().await;
    one.until_counters_are_in_reach().await;
    let sqlite = pb::Settings { store_driver: StoreDriver::Sqlite.into(), ..Default::default() };
    // A replica that has stopped is not missed first.
    two.stop().await;
    one.update_settings(sqlite, &[]).await;
    one.create(pool("alone", ["c3"], [hard("A", 100.0)])).await;
    let redis = pb::Settings { store_driver: StoreDriver::Redis.into(), ..Default::default() };
    one.update_settings(redis, &[]).await;
    two.restart().await;
    let documents = until_alike(&dirs).await;
    assert!(documents[&name("pool:alone")].content.is_some());
    assert!(documents[&name("pool:gone")].content.is_none());
}

/// A replica alone with another driver would count apart from the others.
#[tokio::test]
async fn the_driver_and_its_url_are_not_changed_while_other_replicas_are_live() {
    if redis_is_missing() {
        return;
    }
    let [url, elsewhere] = [TestRedis::database_of_ones_own().await, TestRedis::database_of_ones_own().await];
    let one = TestServer::start_on(&url, Arc::new(ManualClock::new(T0))).await;
    let mut two = one.another_replica().await;
    one.create(pool("p", ["c1"], [hard("A", 100.0)])).await;
    two.until_it_follows(&one).await;
    let before = (
        told(one.settings().get_settings(pb::GetSettingsRequest {}).await),
        one.status().await.config_revision,
    );
    let away = |update: pb::Settings, clear: &[&str]| {
        let clear = clear.iter().map(|name| (*name).to_owned()).collect();
        pb::UpdateSettingsRequest { settings: Some(update), clear }
    };
    let sqlite = pb::Settings { store_driver: StoreDriver::Sqlite.into(), ..Default::default() };
    let other_url = pb::Settings { redis_url: elsewhere, ..Default::default() };
    let both = pb::Settings { saturation_threshold: Some(0.25), ..sqlite.clone() };
    for update in [&sqlite, &other_url, &both] {
        let refused = refusal(one.settings().update_settings(away(update.clone(), &[])).await);
        assert_eq!(refused.code, Code::FailedPrecondition, "{refused:?}");
        assert!(refused.message.contains("QUOTA_STORE_REDIS_URL"), "{refused:?}");
        assert!(refused.message.contains(&two.status().await.replica_id), "{refused:?}");
    }
    let after = (
        told(one.settings().get_settings(pb::GetSettingsRequest {}).await),
        one.status().await.config_revision,
    );
    assert_eq!(after, before);
    // What is in force already is no change, and what all share may be changed.
    let same = pb::Settings { store_driver: StoreDriver::Redis.into(), ..Default::default() };
    one.update_settings(same, &[]).await;
    one.update_settings(pb::Settings { saturation_threshold: Some(0.25), ..Default::default() }, &[]).await;
    two.stop().await;
    one.update_settings(sqlite, &["saturation_threshold"]).await;
    assert_eq!(one.status().await.replicas.len(), 1);
}

#[tokio::test]
async fn replicas_on_a_cluster_share_a_configuration_as_well() {
    if redis_is_missing() {
        return;
    }
    let cluster = TestCluster::start().await;
    let one = TestServer::start_on(&cluster.url(), Arc::new(SystemClock)).await;
    let two = one.another_replica().await;
    for (n, connection) in ["c0", "c1", "c2", "c3"].into_iter().enumerate() {
        let writer = [&one, &two][n % 2];
        writer.create(pool(&format!("p{n}"), [connection], [hard("A", 100.0)])).await;
    }
    two.delete_pool("p1").await;
    let documents = until_alike(&[one.data_dir(), two.data_dir()]).await;
    assert_eq!(documents.len(), 4);
    assert_eq!(one.list_pools().await.len(), 3);
    let answer = told(one.quota().enforce(ask("A", "c3", None)).await);
    assert_eq!(answer.pool_id, "p3");
}

#[tokio::test]
async fn deletions_are_forgotten_after_90_days_here_and_in_redis() {
    if redis_is_missing() {
        return;
    }
    const DAY_MS: u64 = 86_400_000;
    let redis = TestRedis::start().await;
    let mut server = TestServer::start_on_redis_at(&redis.url()).await;
    for (id, connection) in [("p", "c1"), ("q", "c2"), ("back", "c3")] {
        server.create(pool(id, [connection], [hard("A", 100.0)])).await;
        server.delete_pool(id).await;
        server.wait(DAY_MS);
    }
    server.create(pool("back", ["c3"], [hard("A", 100.0)])).await;
    // Of the first it is 90 days ago then, of the second a day less.
    server.wait(87 * DAY_MS);
    server.restart().await;
    let in_redis = async |name: &str| redis.cli(&["HEXISTS", CONFIGURATION, name]).await == "1";
    until("it is forgotten", async || !in_redis("pool:p").await).await;
    until("here, too", async || stored(server.data_dir()).await.deletion(&name("pool:p")).is_none()).await;
    assert!(in_redis("pool:q").await && in_redis("pool:back").await);
    assert!(stored(server.data_dir()).await.deletion(&name("pool:q")).is_some());
    // Who was before the deletion cannot follow past it.
    let fields = redis.cli(&["HKEYS", CONFIGURATION]).await;
    let of = |kind: &str| -> Vec<u64> {
        let mut of: Vec<u64> =
            fields.lines().filter_map(|field| field.strip_prefix(kind)?.parse().ok()).collect();
        of.sort_unstable();
        of
    };
    // What is remembered of a document goes with it.
    assert_eq!((of("write:"), of("at:")), (vec![2, 3, 4, 5, 6, 7], vec![4, 7]), "{fields}");
}
