//! What becomes of the shared configuration when Redis loses it, replicas are away or cut off, or something else is there.

use std::{
    cell::Cell,
    env,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use quota_share::{
    clock::SystemClock,
    core::{document::Head, settings::StoreDriver},
    store::Ledger,
};
use tonic::Code;

use crate::{
    harness::{
        Client, PATIENCE, Proxy, TestProcess, TestRedis, TestServer, Verdict, ask, dimension, hard, pb, pool,
        redis_is_missing, refusal, run, spent, tokens, told,
    },
    redis_team::{reached, standing},
    shared_configuration::{CONFIGURATION, export, name, stored, until, until_alike},
    sick_disk::{BREAK, MEND, sql},
};

/// What replicas say of themselves.
const REPLICAS: &str = "quota-share:{configuration}:replicas";

async fn started(url: &str) -> TestServer {
    TestServer::start_on(url, Arc::new(SystemClock)).await
}

async fn create(client: &Client, id: &str, connection: &'static str) -> pb::Pool {
    client.create(pool(id, [connection], [hard("A", 100.0)])).await
}

/// All of the configuration in Redis, to be compared.
async fn dump(redis: &TestRedis) -> Vec<String> {
    let script = "local all, fields = redis.call('HGETALL', KEYS[1]), {}
        for index = 1, #all, 2 do fields[#fields + 1] = all[index] .. '=' .. all[index + 1] end
        table.sort(fields)
        return fields";
    redis.cli(&["EVAL", script, "1", CONFIGURATION]).await.lines().map(str::to_owned).collect()
}

/// Keeps the configuration that is there, so that it can be set back.
async fn keep(redis: &TestRedis) {
    redis.cli(&["COPY", CONFIGURATION, CONFIGURATION, "DB", "1", "REPLACE"]).await;
}

/// Sets all of Redis back to what was kept, at one instant, as a restored dump does.
async fn set_back(redis: &TestRedis) {
    let script = "redis.call('FLUSHDB'); redis.call('SELECT', 1)
        local kept = redis.call('DUMP', KEYS[1])
        redis.call('SELECT', 0)
        redis.call('RESTORE', KEYS[1], 0, kept)";
    redis.cli(&["EVAL", script, "1", CONFIGURATION]).await;
}

#[tokio::test]
async fn whoever_was_away_or_has_an_empty_disk_comes_to_what_the_others_have() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let one = started(&redis.url()).await;
    let mut away = one.another_replica().await;
    create(&one, "kept", "c1").await;
    create(&one, "gone", "c2").await;
    away.until_it_follows(&one).await;
    away.stop().await;
    one.delete_pool("gone").await;
    // Another one has its connection.
    create(&one, "new", "c2").await;
    one.put_allocation("kept", hard("B", 0.0)).await;
    away.restart().await;
    let empty = one.another_replica().await;
    let documents = until_alike(&[one.data_dir(), away.data_dir(), empty.data_dir()]).await;
    assert!(documents[&name("pool:gone")].content.is_none());
    for replica in [&away, &empty] {
        let pools = replica.list_pools().await;
        assert_eq!(pools.iter().map(|of| of.pool_id.as_str()).collect::<Vec<_>>(), ["kept", "new"]);
    }
    assert_eq!(export(empty.data_dir()).await, export(one.data_dir()).await);
}

#[tokio::test]
async fn a_flushed_redis_gets_everything_back_and_no_deletion_is_undone() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let mut one = started(&redis.url()).await;
    let mut away = one.another_replica().await;
    create(&one, "kept", "c1").await;
    create(&one, "gone", "c2").await;
    away.until_it_follows(&one).await;
    away.stop().await;
    one.delete_pool("gone").await;
    create(&one, "new", "c3").await;
    // This one has only ever heard of the deletion.
    let mut heard = one.another_replica().await;
    until_alike(&[one.data_dir(), heard.data_dir()]).await;
    one.stop().await;
    heard.restart().await;

    redis.cli(&["FLUSHALL"]).await;
    until("it is back", async || redis.cli(&["HEXISTS", CONFIGURATION, "pool:new"]).await == "1").await;
    away.restart().await;
    one.restart().await;
    let documents = until_alike(&[one.data_dir(), away.data_dir(), heard.data_dir()]).await;
    assert!(documents[&name("pool:gone")].content.is_none(), "{documents:?}");
    assert!(documents[&name("pool:new")].content.is_some());
    assert_eq!(away.list_pools().await.len(), 2);

    // Again, under writes: what is answered is there in the end.
    for (n, connection) in ["d0", "d1", "d2", "d3", "d4", "d5"].into_iter().enumerate() {
        if n % 2 == 1 {
            redis.cli(&["FLUSHALL"]).await;
        }
        create([&one, &away, &heard][n % 3], &format!("w{n}"), connection).await;
    }
    let documents = until_alike(&[one.data_dir(), away.data_dir(), heard.data_dir()]).await;
    for n in 0..6 {
        assert!(documents[&name(&format!("pool:w{n}"))].content.is_some());
    }
    assert!(documents[&name("pool:gone")].content.is_none());
}

#[tokio::test]
async fn a_redis_set_back_to_an_older_state_gets_the_newer_documents() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let one = started(&redis.url()).await;
    let mut away = one.another_replica().await;
    create(&one, "kept", "c1").await;
    create(&one, "gone", "c2").await;
    keep(&redis).await;
    one.delete_pool("gone").await;
    let short = create(&one, "short", "c3").await;
    away.until_it_follows(&one).await;
    away.stop().await;
    one.delete_pool("short").await;
    one.put_allocation("kept", hard("B", 0.0)).await;
    let newest = one.status().await.config_revision;

    set_back(&redis).await;
    until("it is given back", async || one.status().await.config_revision > newest).await;
    away.restart().await;
    let fresh = one.another_replica().await;
    let documents = until_alike(&[one.data_dir(), away.data_dir(), fresh.data_dir()]).await;
    for gone in ["pool:gone", "pool:short"] {
        assert!(documents[&name(gone)].content.is_none(), "{gone} came back");
    }
    assert_eq!(fresh.get_pool("kept").await.pool.unwrap().allocations.len(), 2);
    // A life is nobody else's, though revisions were lost.
    let next = create(&one, "next", "c3").await;
    assert!(next.revision > short.revision);
    let answer = fresh.enforce("A", "c3", None).await;
    assert!(["", "next"].contains(&answer.pool_id.as_str()), "{answer:?}");
}

#[tokio::test]
async fn of_equal_revisions_with_different_content_that_in_redis_stays() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let mut one = started(&redis.url()).await;
    let first = create(&one, "p", "c1").await;
    keep(&redis).await;
    let lost = one.update(pb::Pool { name: "lost".to_owned(), ..first.clone() }).await;
    let newer = create(&one, "newer", "c2").await;
    one.stop().await;
    set_back(&redis).await;

    let other = one.another_replica().await;
    let won = other.update(pb::Pool { name: "won".to_owned(), ..first }).await;
    assert_eq!(won.revision, lost.revision);
    one.restart().await;
    let documents = until_alike(&[one.data_dir(), other.data_dir()]).await;
    assert!(documents[&name("pool:newer")].revision > u64::try_from(newer.revision).unwrap());
    for replica in [&one, &other] {
        assert_eq!(replica.get_pool("p").await.pool.unwrap().name, "won");
    }
}

/// What came after the other write does not tell what that was.
#[tokio::test]
async fn who_has_a_write_that_redis_has_lost_takes_over_the_one_in_its_place_also_when_others_came_after_it()
{
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let mut one = started(&redis.url()).await;
    let first = create(&one, "p", "c1").await;
    keep(&redis).await;
    let lost = one.update(pb::Pool { name: "lost".to_owned(), ..first.clone() }).await;
    one.stop().await;
    set_back(&redis).await;

    let other = one.another_replica().await;
    let won = other.update(pb::Pool { name: "won".to_owned(), ..first }).await;
    assert_eq!(won.revision, lost.revision);
    create(&other, "later", "c2").await;
    one.restart().await;
    assert_eq!(until_alike(&[one.data_dir(), other.data_dir()]).await.len(), 2);
    assert_eq!(one.get_pool("p").await.pool.unwrap().name, "won");
}

#[tokio::test]
async fn a_write_on_top_of_anything_but_what_is_there_changes_nothing() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let one = started(&redis.url()).await;
    create(&one, "p", "c1").await;
    create(&one, "q", "c2").await;
    let there = stored(one.data_dir()).await;
    let head = there.head().expect("it is shared");
    let ledger = reached(&redis.url(), standing()).await;
    let shared = ledger.directory().expect("replicas share one there");
    let before = dump(&redis).await;
    let next = Head { revision: 3, write: "next".to_owned(), ..head.clone() };
    let known = [
        None,
        Some(Head { lineage: "another".to_owned(), ..head.clone() }),
        Some(Head { revision: 1, ..head.clone() }),
        Some(Head { write: "another".to_owned(), ..head.clone() }),
    ];
    for known in known {
        let written = shared.commit(known.as_ref(), &next, &there.documents()).await;
        assert!(!written.expect("Redis answers"), "{known:?}");
        assert_eq!(dump(&redis).await, before, "{known:?}");
    }
    // Without memory it is refused, also where there would be no more than before.
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]).await, "OK");
    assert!(shared.commit(Some(&head), &next, &there.documents()).await.is_err());
    assert_eq!(dump(&redis).await, before);
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]).await, "OK");
    assert!(shared.commit(Some(&head), &next, &there.documents()).await.expect("Redis answers"));
    ledger.close().await;
}

/// Pages are read one after another, and another configuration may be put there in between.
#[tokio::test]
async fn what_is_read_in_pages_is_of_one_configuration() {
    if redis_is_missing() {
        return;
    }
    // Documents of each revision are read, or, where there are too many, all of them.
    tokio::join!(read_while_it_is_replaced(1), read_while_it_is_replaced(100));
}

async fn read_while_it_is_replaced(revisions_apart: usize) {
    const DOCUMENTS: usize = 1_200;
    let redis = TestRedis::start().await;
    let ledger = reached(&redis.url(), standing()).await;
    let shared = ledger.directory().expect("replicas share one there");
    let make = "local hash, newest = KEYS[1], ARGV[1] * ARGV[2]
        for index = 1, ARGV[1] do
            local name, revision = 'plan:' .. hash .. index, index * ARGV[2]
            local document = string.format('{\"revision\":%d,\"written_at\":1,\"content\":null}', revision)
            redis.call('HSET', hash, name, document, 'at:' .. revision, name)
        end
        redis.call('HSET', hash, 'lineage', hash, 'revision', newest, 'write', hash, 'write:' .. newest, hash)";
    for lineage in ["one", "two"] {
        let (documents, apart) = (DOCUMENTS.to_string(), revisions_apart.to_string());
        redis.cli(&["EVAL", make, "1", lineage, &documents, &apart]).await;
    }
    let has_read = Cell::new(false);
    let replacing = async {
        for turn in (0..).take_while(|_| !has_read.get()) {
            redis.cli(&["COPY", ["one", "two"][turn % 2], CONFIGURATION, "REPLACE"]).await;
        }
    };
    let read_whole = async || {
        let (head, documents) = shared.after(0).await.expect("Redis answers");
        let lineage = &head.as_ref()?.lineage;
        let of_it = documents.keys().filter(|name| name.to_string()[5..].starts_with(lineage)).count();
        assert_eq!((of_it, documents.len()), (DOCUMENTS, DOCUMENTS), "{head:?}");
        head
    };
    let reading = async {
        let (mut whole, mut between) = (0, 0);
        while whole < 3 || between < 3 {
            match read_whole().await {
                Some(_) => whole += 1,
                None => between += 1,
            }
        }
        has_read.set(true);
    };
    let both = futures::future::join(reading, replacing);
    tokio::time::timeout(PATIENCE, both).await.expect("it is replaced between pages, and at other times");
    // However large a number somebody has written there, reading ends.
    let far = (1_u64 << 53).to_string();
    redis.cli(&["HSET", CONFIGURATION, "revision", &far, "write", "w", &format!("write:{far}"), "w"]).await;
    assert!(read_whole().await.is_some());
    ledger.close().await;
}

#[tokio::test]
async fn a_replica_that_is_cut_off_refuses_writes_at_once_decides_on_and_comes_back() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let mut proxy = Proxy::to(redis.address()).await;
    let one = started(&redis.url()).await;
    create(&one, "p", "c1").await;
    let cut_off = started(&proxy.url()).await;
    cut_off.until_it_follows(&one).await;
    proxy.refuse(true).await;
    proxy.cut().await;
    until("it is degraded", async || cut_off.status().await.degraded).await;

    let began = Instant::now();
    let request = pb::CreatePoolRequest { pool: Some(pool("q", ["c2"], [hard("A", 100.0)])) };
    let refused = refusal(cut_off.pools().create_pool(request).await);
    assert_eq!((refused.code, refused.reason.as_str()), (Code::Unavailable, "STORE_UNAVAILABLE"));
    println!("refused after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(2));
    let answer = told(cut_off.quota().enforce(ask("A", "c1", None)).await);
    assert!(answer.degraded && answer.pool_id == "p", "{answer:?}");
    assert_eq!(cut_off.list_pools().await.len(), 1);
    assert!(cut_off.is_serving().await);

    one.delete_pool("p").await;
    create(&one, "r", "c1").await;
    proxy.refuse(false).await;
    let documents = until_alike(&[one.data_dir(), cut_off.data_dir()]).await;
    assert!(documents[&name("pool:p")].content.is_none());
    cut_off.until_counters_are_in_reach().await;
    assert_eq!(cut_off.enforce("A", "c1", None).await.pool_id, "r");
}

#[tokio::test]
async fn a_write_whose_answer_was_lost_is_everywhere_or_nowhere() {
    if redis_is_missing() {
        return;
    }
    const CONNECTIONS: [&str; 10] = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9"];
    let redis = TestRedis::start().await;
    let proxy = Proxy::to(redis.address()).await;
    let one = started(&redis.url()).await;
    let other = started(&proxy.url()).await;
    let mut answered = Vec::new();
    for (n, connection) in CONNECTIONS.into_iter().enumerate() {
        let id = format!("p{n}");
        // A write asks for the head, then writes; others ask as well.
        proxy.cut_after_requests(1 + n as u64 % 3);
        let request = pb::CreatePoolRequest { pool: Some(pool(&id, [connection], [hard("A", 100.0)])) };
        match other.pools().create_pool(request).await {
            Ok(_) => answered.push(id),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status:?}"),
        }
        other.until_counters_are_in_reach().await;
    }
    let documents = until_alike(&[one.data_dir(), other.data_dir()]).await;
    println!("{} of 10 answered, {} there", answered.len(), documents.len());
    assert!(!documents.is_empty(), "no write has come as far as Redis");
    for id in answered {
        assert!(documents.contains_key(&name(&format!("pool:{id}"))), "{id} was answered");
    }
}

/// The answer says that the write is in Redis and on this disk. Without the disk it is in Redis, so it comes to all.
#[tokio::test]
async fn a_write_is_not_acknowledged_by_a_replica_whose_disk_did_not_take_it() {
    if redis_is_missing() {
        return;
    }
    let url = TestRedis::database_of_ones_own().await;
    let one = started(&url).await;
    let other = one.another_replica().await;
    create(&one, "p", "c1").await;
    sql(&one, BREAK).await;
    let request = pb::CreatePoolRequest { pool: Some(pool("q", ["c2"], [hard("A", 100.0)])) };
    let refused = refusal(one.pools().create_pool(request).await);
    assert_eq!((refused.code, refused.reason.as_str()), (Code::Unavailable, "STORE_UNAVAILABLE"));
    until("the other has it", async || other.list_pools().await.len() == 2).await;
    assert_eq!(one.list_pools().await.len(), 1, "what is not on the disk is not in force");

    sql(&one, MEND).await;
    let documents = until_alike(&[one.data_dir(), other.data_dir()]).await;
    assert!(documents[&name("pool:q")].content.is_some());
}

#[tokio::test]
async fn a_disk_that_takes_a_part_of_what_others_have_written_takes_none_of_it() {
    if redis_is_missing() {
        return;
    }
    const TAKES_NO_PLAN: &str =
        "CREATE TRIGGER sick BEFORE INSERT ON plans BEGIN SELECT RAISE(ABORT, 'the disk is sick'); END";
    let url = TestRedis::database_of_ones_own().await;
    let one = started(&url).await;
    let other = one.another_replica().await;
    create(&one, "p", "c1").await;
    other.until_it_follows(&one).await;
    let before = stored(other.data_dir()).await;
    sql(&other, TAKES_NO_PLAN).await;
    one.put_plan("c1", [dimension("tokens/daily", 10.0)]).await;
    create(&one, "q", "c2").await;
    // A write goes on top of what others have written.
    let request = pb::CreatePoolRequest { pool: Some(pool("r", ["c3"], [hard("A", 100.0)])) };
    assert_eq!(refusal(other.pools().create_pool(request).await).code, Code::Unavailable);
    let after = stored(other.data_dir()).await;
    assert_eq!((after.head(), after.documents()), (before.head(), before.documents()));

    sql(&other, MEND).await;
    assert_eq!(until_alike(&[one.data_dir(), other.data_dir()]).await.len(), 3);
}

#[tokio::test]
async fn two_fresh_replicas_that_start_at_once_share_one_configuration() {
    if redis_is_missing() {
        return;
    }
    for _ in 0..3 {
        let redis = TestRedis::start().await;
        let url = redis.url();
        let (one, other) = tokio::join!(started(&url), started(&url));
        until("both are ready", async || one.is_serving().await && other.is_serving().await).await;
        create(&one, "p", "c1").await;
        create(&other, "q", "c2").await;
        assert_eq!(until_alike(&[one.data_dir(), other.data_dir()]).await.len(), 2);
    }
}

/// Variables of a process on this Redis.
fn on(url: &str) -> [(&str, &str); 3] {
    [("QUOTA_STORE_DRIVER", "redis"), ("QUOTA_STORE_REDIS_URL", url), ("QUOTA_STORE_TIMEOUT_MS", "5000")]
}

#[tokio::test]
async fn a_fresh_replica_without_its_redis_is_not_ready_and_never_says_no_pool() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let one = started(&redis.url()).await;
    create(&one, "p", "c1").await;
    let mut proxy = Proxy::to(redis.address()).await;
    proxy.refuse(true).await;
    let fresh = TestProcess::start_with(&on(&proxy.url())).await;
    assert!(!fresh.is_serving().await, "it says so from the first answer on");
    let asked = refusal(fresh.quota().enforce(ask("A", "c1", None)).await);
    assert_eq!((asked.code, asked.reason.as_str()), (Code::Unavailable, "NO_CONFIGURATION"));
    let asked = refusal(fresh.quota().record_consumption(spent("A", "c1", tokens(1))).await);
    assert_eq!((asked.code, asked.reason.as_str()), (Code::Unavailable, "NO_CONFIGURATION"));
    let unknown = |of: &String| of.contains("has not been seen");
    assert!(fresh.status().await.warnings.iter().any(unknown), "reading calls are answered");

    proxy.refuse(false).await;
    until("it is ready", async || fresh.is_serving().await).await;
    assert_eq!(fresh.enforce("A", "c1", None).await.pool_id, "p");
}

#[tokio::test]
async fn the_redis_of_others_changes_nothing_on_either_side_until_it_is_adopted() {
    if redis_is_missing() {
        return;
    }
    let (own, others) = (TestRedis::start().await, TestRedis::start().await);
    let theirs = started(&others.url()).await;
    let first = create(&theirs, "theirs", "c1").await;
    theirs.put_plan("c1", [dimension("tokens/366d", 10.0)]).await;
    theirs.record("A", "c1", tokens(7)).await;
    let proxy = Proxy::to(own.address()).await;
    let mut process = TestProcess::start_with(&on(&proxy.url())).await;
    until("it is ready", async || process.is_serving().await).await;
    let ours = create(&process, "ours", "c1").await;
    assert_eq!(ours.revision, first.revision, "of its counters, those there have the name");
    let store_driver = pb::settings::StoreDriver::Redis.into();
    let threshold = pb::Settings { saturation_threshold: Some(0.75), store_driver, ..Default::default() };
    process.update_settings(threshold, &[]).await;
    let replica_id = process.status().await.replica_id;
    process.end_with(Signal::SIGTERM).await;
    let dir = process.data_dir().to_owned();
    let dir_text = dir.display().to_string();
    let (before, in_redis) = (export(&dir).await, dump(&others).await);
    let ours = stored(&dir).await.head().unwrap().lineage;
    let lineage = stored(theirs.data_dir()).await.head().unwrap().lineage;

    process.restart_with(&on(&others.url())).await;
    assert!(!process.is_serving().await, "it says so from the first answer on");
    for _ in 0..3 {
        let asked = refusal(process.quota().enforce(ask("A", "c1", None)).await);
        assert_eq!((asked.code, asked.reason.as_str()), (Code::Unavailable, "NO_CONFIGURATION"));
    }
    let record = refusal(process.quota().record_consumption(spent("A", "c1", tokens(1))).await);
    assert_eq!(record.code, Code::Unavailable);
    let request = pb::CreatePoolRequest { pool: Some(pool("q", ["c2"], [hard("A", 100.0)])) };
    assert_eq!(refusal(process.pools().create_pool(request).await).code, Code::Unavailable);
    let reset = pb::ResetUsageRequest { pool_id: "ours".to_owned(), ..Default::default() };
    assert_eq!(refusal(process.pools().reset_usage(reset).await).code, Code::Unavailable);
    assert_eq!(theirs.used("theirs", "tokens/366d").await, (7.0, 0.0));
    let warnings = process.status().await.warnings.join("\n");
    for id in [&ours, &lineage] {
        assert!(process.log().contains(id.as_str()) && warnings.contains(id.as_str()), "{warnings}");
    }
    assert!(!theirs.status().await.replicas.iter().any(|of| of.replica_id == replica_id));

    let adopt = async |more: &[&str]| {
        let url = others.url();
        let vars: Vec<_> = on(&url).into_iter().chain([("DATA_DIR", dir_text.as_str())]).collect();
        run(&[&["adopt"], more].concat(), &vars).await
    };
    let refused = adopt(&[]).await;
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("is in use by the process"), "{}", refused.stderr);
    process.end_with(Signal::SIGTERM).await;
    assert_eq!((export(&dir).await, dump(&others).await), (before.clone(), in_redis.clone()));

    // What waits for its own Redis would be counted nowhere.
    process.restart_with(&on(&proxy.url())).await;
    let mut proxy = proxy;
    proxy.refuse(true).await;
    proxy.cut().await;
    until("it is degraded", async || process.status().await.degraded).await;
    let kept = told(process.quota().record_consumption(spent("A", "c1", tokens(1))).await);
    assert!(kept.journaled, "{kept:?}");
    process.kill();
    let refused = adopt(&[]).await;
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("--set-journal-aside"), "{}", refused.stderr);
    assert_eq!(export(&dir).await, before);

    let adopted = adopt(&["--set-journal-aside"]).await;
    assert_eq!(adopted.code, Some(0), "{}", adopted.stderr);
    println!("{}", adopted.stdout);
    assert!(adopted.stdout.contains(&lineage) && adopted.stdout.contains("1 pool"), "{}", adopted.stdout);
    assert_eq!(export(&dir).await, export(theirs.data_dir()).await);
    assert_eq!(dump(&others).await, in_redis);
    assert_eq!(stored(&dir).await.settings().store_driver, Some(StoreDriver::Redis), "a choice of its own");
    let set_aside = adopted.stdout.lines().last().unwrap().rsplit(' ').next().unwrap();
    assert!(set_aside.starts_with(&format!("{dir_text}/storage.sqlite.2")), "{set_aside}");
    let elsewhere = tempfile::TempDir::new().unwrap();
    std::fs::copy(set_aside, elsewhere.path().join("storage.sqlite")).unwrap();
    assert_eq!(export(elsewhere.path()).await, before, "nothing of it is in another file");
    let mut files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|of| of.unwrap().file_name()).collect();
    files.sort();
    let aside = Path::new(set_aside).file_name().unwrap();
    assert_eq!(files, ["quota-share.lock".as_ref(), "storage.sqlite".as_ref(), aside]);

    process.restart_with(&on(&others.url())).await;
    until("it is ready", async || process.is_serving().await).await;
    assert_eq!(process.enforce("A", "c1", None).await.pool_id, "theirs");
    assert_eq!(process.status().await.replica_id, replica_id);
    process.end_with(Signal::SIGTERM).await;
    let again = adopt(&[]).await;
    assert!(again.code == Some(0) && again.stdout.starts_with("nothing to do"), "{again:?}");
    let alone = run(&["adopt"], &[("DATA_DIR", &dir_text)]).await;
    assert!(alone.code == Some(1) && alone.stderr.contains("QUOTA_STORE_DRIVER=redis"), "{alone:?}");
}

/// As often as `QUOTA_KILL_ROUNDS` says.
#[tokio::test]
async fn a_replica_that_is_killed_amidst_writes_agrees_with_the_others() {
    if redis_is_missing() {
        return;
    }
    let rounds = env::var("QUOTA_KILL_ROUNDS").map_or(4, |rounds| rounds.parse().unwrap());
    let redis = TestRedis::start().await;
    let other = started(&redis.url()).await;
    let url = redis.url();
    let mut process = TestProcess::start_with(&on(&url)).await;
    let mut answered = Vec::new();
    for round in 0..rounds {
        until("it is ready", async || process.is_serving().await).await;
        let client = (*process).clone();
        let writer = tokio::spawn(async move {
            let mut answered = Vec::new();
            for n in 0.. {
                let id = format!("p{round}-{n}");
                let connection_ids = vec![format!("c-{id}")];
                let pool = pb::Pool { connection_ids, ..pool(&id, [], [hard("A", 100.0)]) };
                let request = pb::CreatePoolRequest { pool: Some(pool) };
                match client.pools().create_pool(request).await {
                    Ok(_) => answered.push(id),
                    Err(_) => break,
                }
            }
            answered
        });
        tokio::time::sleep(Duration::from_millis(rand::random_range(5..300))).await;
        process.kill();
        answered.extend(writer.await.unwrap());
        process.restart_with(&on(&url)).await;
        let documents = until_alike(&[other.data_dir(), process.data_dir()]).await;
        for id in &answered {
            assert!(documents.contains_key(&name(&format!("pool:{id}"))), "{id} was answered");
        }
    }
    println!("{} writes answered over {rounds} kills", answered.len());
}

/// Writes a document as a newer version of the program would.
async fn write_as_newer(redis: &TestRedis, name: &str, content: &str) {
    let revision: u64 = redis.cli(&["HGET", CONFIGURATION, "revision"]).await.parse().expect("a revision");
    let (next, write) = ((revision + 1).to_string(), format!("newer-{revision}"));
    let content = content.replace("REVISION", &next);
    let document = format!(r#"{{"revision":{next},"written_at":1,"content":{content}}}"#);
    let script = "local hash, name, document, revision, write = KEYS[1], unpack(ARGV)
        redis.call('HSET', hash, name, document, 'at:' .. revision, name, 'write:' .. revision, write)
        redis.call('HSET', hash, 'revision', revision, 'write', write)";
    redis.cli(&["EVAL", script, "1", CONFIGURATION, name, &document, &next, &write]).await;
}

async fn rewrite(redis: &TestRedis, name: &str, document: &str) {
    redis.cli(&["HSET", CONFIGURATION, name, document]).await;
}

const NEWER_POOL: &str = r#"{"pool":{"created_revision":REVISION,"created_at":1,"spec":{"pool_id":"n","name":"n",
    "connection_ids":["n1"],"allocations":[{"api_key_id":"A","weight":100,"policy":"hard","mood":"good",
    "cap":{"value":50,"unit":"tokens","soft":0.8},"model_caps":[{"model":"m","value":9,"unit":"tokens","window":"60m","tint":1}]}],
    "enforcement":"enforce","failure_mode":"fail_open","flavour":{"of":[1,2.5]}}}}"#;

#[tokio::test]
async fn what_a_newer_version_has_written_stays_in_documents_that_this_one_writes() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let one = started(&redis.url()).await;
    write_as_newer(&redis, "pool:n", NEWER_POOL).await;
    let plan = r#"{"plan":{"connection_id":"n1","dimensions":[{"unit":"tokens","window":"daily","limit":5,"burst":7}],"hue":"red"}}"#;
    write_as_newer(&redis, "plan:n1", plan).await;
    write_as_newer(&redis, "settings", r#"{"settings":{"saturation_threshold":0.5,"verve":3}}"#).await;
    until("it follows", async || one.status().await.config_revision == 3).await;
    let answer = one.enforce("A", "n1", tokens(6)).await;
    assert!(matches!(answer.verdict(), Verdict::Block { .. }), "{answer:?}");

    let of = one.get_pool("n").await.pool.unwrap();
    one.update(pb::Pool { name: "renamed".to_owned(), ..of }).await;
    one.put_allocation("n", hard("B", 0.0)).await;
    one.put_plan("n1", [dimension("tokens/daily", 6.0)]).await;
    let threshold = pb::Settings { saturation_threshold: Some(0.6), ..Default::default() };
    one.update_settings(threshold, &[]).await;
    for (name, known, unknown) in [
        (
            "pool:n",
            "renamed",
            vec![r#""flavour":{"of":[1,2.5]}"#, r#""mood":"good""#, r#""soft":0.8"#, r#""tint":1"#],
        ),
        ("plan:n1", "6.0", vec![r#""hue":"red""#, r#""burst":7"#]),
        ("settings", "0.6", vec![r#""verve":3"#]),
    ] {
        let document = redis.cli(&["HGET", CONFIGURATION, name]).await;
        assert!(document.contains(known), "{document}");
        unknown.iter().for_each(|of| assert!(document.contains(of), "{of} is not in {document}"));
    }
    // On the disk as well; an import, which might be misspelt, names them.
    let exported = export(one.data_dir()).await;
    assert!(exported.contains("flavour") && exported.contains("verve"), "{exported}");
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("export.json");
    std::fs::write(&file, &exported).unwrap();
    let data = folder.path().join("data").display().to_string();
    let imported = run(&["import", &file.display().to_string()], &[("DATA_DIR", &data)]).await;
    assert!(imported.code == Some(1) && imported.stderr.contains("flavour"), "{imported:?}");
}

#[tokio::test]
async fn a_document_that_this_version_cannot_take_is_a_warning_and_decisions_go_on() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let one = started(&redis.url()).await;
    create(&one, "p", "c1").await;
    write_as_newer(&redis, "pool:n", NEWER_POOL).await;
    until("it follows", async || one.status().await.config_revision == 2).await;
    let good =
        redis.cli(&["HGET", CONFIGURATION, "pool:n"]).await.replace("\"revision\":2", "\"revision\":3");
    write_as_newer(&redis, "pool:n", "[]").await;
    let documents = [
        good.replace("\"enforce\"", "\"persuade\""),
        "garbage".to_owned(),
        String::new(),
        "[".repeat(100_000),
        good.replace("\"n1\"", "\"c1\""),
        good.replace("\"pool_id\":\"n\"", "\"pool_id\":\"m\""),
        good.replace("\"weight\":100", "\"weight\":1e9"),
        good.replace("\"revision\":3", "\"revision\":18446744073709551615"),
        good.replace("\"created_revision\":2", "\"created_revision\":1"),
        good.replace("\"written_at\":1", "\"written_at\":18446744073709551615"),
    ];
    let behind = async |client: &Client| {
        let status = client.status().await;
        status.config_revision == 2
            && status.warnings.iter().any(|of| of.contains("cannot be followed, and this replica decides"))
    };
    for document in &documents {
        assert_ne!(*document, good);
        rewrite(&redis, "pool:n", document).await;
        until("it says so", async || behind(&one).await).await;
        assert_eq!(one.enforce("A", "c1", None).await.pool_id, "p");
        assert!(one.is_serving().await);
        let status = one.status().await;
        assert_eq!(status.newest_config_revision, 3);
        assert!(status.warnings.iter().all(|of| of.len() < 1_000), "{:?}", status.warnings);
        let request = pb::CreatePoolRequest { pool: Some(pool("q", ["c2"], [hard("A", 100.0)])) };
        assert!(one.pools().create_pool(request).await.is_err());
    }
    // One that has nothing yet has nothing to decide by.
    let url = redis.url();
    let mut fresh = TestProcess::start_with(&on(&url)).await;
    let asked = refusal(fresh.quota().enforce(ask("A", "c1", None)).await);
    assert_eq!((asked.code, asked.reason.as_str()), (Code::Unavailable, "NO_CONFIGURATION"));

    rewrite(&redis, "pool:n", &good).await;
    until_alike(&[one.data_dir(), fresh.data_dir()]).await;
    until("it is ready", async || fresh.is_serving().await).await;

    // A head that is none.
    redis.cli(&["HSET", CONFIGURATION, "revision", "99999999999999999999"]).await;
    until("it says so", async || !one.status().await.warnings.is_empty()).await;
    assert_eq!(one.enforce("A", "c1", None).await.pool_id, "p");
    // Whoever starts now cannot know whose it is.
    fresh.kill();
    fresh.restart_with(&on(&url)).await;
    assert!(fresh.enforce("A", "c1", None).await.degraded);
    let status = fresh.status().await;
    let why = "has not been seen since this replica started: Redis holds";
    assert!(status.degraded && status.warnings.iter().any(|of| of.contains(why)), "{status:?}");
}

/// Redis evicts keys, whole: the documents must not go before their head.
#[tokio::test]
async fn a_configuration_in_redis_goes_as_a_whole_and_one_that_lacks_a_document_is_not_taken_for_all_of_it() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let mut one = started(&redis.url()).await;
    for (id, connection) in [("p", "c1"), ("q", "c2"), ("r", "c3")] {
        create(&one, id, connection).await;
    }
    one.delete_pool("r").await;
    one.put_allocation("p", hard("B", 0.0)).await;
    let keys = async || {
        let mut keys: Vec<String> =
            redis.cli(&["KEYS", "*configuration*"]).await.lines().map(str::to_owned).collect();
        keys.sort();
        keys
    };
    until("there is one key", async || keys().await == [CONFIGURATION, REPLICAS]).await;
    // Of former writes only the last is known where it is put back.
    let lasting = async || -> Vec<String> {
        dump(&redis).await.into_iter().filter(|field| !field.starts_with("write:")).collect()
    };
    let all = lasting().await;
    redis.cli(&["UNLINK", CONFIGURATION]).await;
    until("it is put back", async || lasting().await == all).await;
    one.stop().await;

    let document = redis.cli(&["HGET", CONFIGURATION, "pool:q"]).await;
    redis.cli(&["HDEL", CONFIGURATION, "pool:q"]).await;
    let left = dump(&redis).await;
    let url = redis.url();
    let fresh = TestProcess::start_with(&on(&url)).await;
    until("it says so", async || fresh.log().contains("no pool:q")).await;
    let asked = refusal(fresh.quota().enforce(ask("A", "c1", None)).await);
    assert_eq!((asked.code, asked.reason.as_str()), (Code::Unavailable, "NO_CONFIGURATION"));
    assert!(!fresh.is_serving().await);
    let warnings = fresh.status().await.warnings;
    assert!(warnings.iter().any(|of| of.contains("this replica has none to decide by")), "{warnings:?}");
    assert_eq!(dump(&redis).await, left, "it touches nothing");
    assert_eq!(redis.cli(&["HLEN", REPLICAS]).await, "0", "it shares nothing yet");
    redis.cli(&["HSET", CONFIGURATION, "pool:q", &document]).await;
    until("it is ready", async || fresh.is_serving().await).await;
    assert_eq!(fresh.enforce("A", "c2", None).await.pool_id, "q");

    let losses: [(&[&str], &str); 3] = [
        (&["HSET", CONFIGURATION, "revision", "77"], "revision 77, where no write"),
        (&["SET", CONFIGURATION, "text"], "WRONGTYPE"),
        (&["HDEL", CONFIGURATION, "write"], "holds \\\"a part of it\\\" as the configuration's head"),
    ];
    for (loss, why) in losses {
        redis.cli(loss).await;
        until(why, async || fresh.log().contains(why)).await;
        assert_eq!(fresh.enforce("A", "c2", None).await.pool_id, "q");
        redis.cli(&["UNLINK", CONFIGURATION]).await;
        until("it is put back", async || lasting().await == all).await;
    }
    // What is left without a head is nobody's.
    let stray = document.replace("\"q\"", "\"stray\"");
    redis.cli(&["HSET", CONFIGURATION, "pool:stray", &stray, "at:9", "pool:stray"]).await;
    redis.cli(&["HDEL", CONFIGURATION, "lineage", "revision", "write"]).await;
    until("it is put back", async || lasting().await == all).await;
}

/// A server on SQLite with so many pools.
async fn with_many_pools(pools: usize) -> TestServer {
    let mut server = TestServer::start_on_sqlite().await;
    server.stop().await;
    let folder = tempfile::TempDir::new().expect("a temporary folder");
    let file = folder.path().join("pools.json");
    let lines: Vec<String> = (0..pools)
        .map(|n| {
            format!(r#"{{"pool_id":"p{n}","name":"p{n}","connection_ids":["c{n}"],"allocations":[{{"api_key_id":"A","weight":1}}]}}"#)
        })
        .collect();
    std::fs::write(&file, format!(r#"{{"version":1,"pools":[{}]}}"#, lines.join(","))).expect("it has room");
    let data = server.data_dir().display().to_string();
    let imported = run(&["import", &file.display().to_string()], &[("DATA_DIR", &data)]).await;
    assert_eq!(imported.code, Some(0), "{}", imported.stderr);
    server.restart().await;
    server
}

async fn to_redis(server: &TestServer, redis_url: String) {
    let store_driver = pb::settings::StoreDriver::Redis.into();
    server.update_settings(pb::Settings { store_driver, redis_url, ..Default::default() }, &[]).await;
}

/// Documents are read in pages; the last one is not half full, and others are.
#[tokio::test]
async fn more_documents_than_are_read_at_once_come_to_an_empty_disk() {
    if redis_is_missing() {
        return;
    }
    const POOLS: usize = 1_201;
    let url = TestRedis::database_of_ones_own().await;
    let one = with_many_pools(POOLS).await;
    to_redis(&one, url.clone()).await;
    one.put_allocation("p7", hard("B", 0.0)).await;
    let empty = started(&url).await;
    assert_eq!(until_alike(&[one.data_dir(), empty.data_dir()]).await.len(), POOLS);
    assert_eq!(export(empty.data_dir()).await, export(one.data_dir()).await);
}

/// How long it takes to publish and to take over as many pools as `QUOTA_MANY_POOLS` says.
#[tokio::test]
#[ignore = "a measurement"]
async fn many_pools_are_published_and_taken_over() {
    let pools: usize = env::var("QUOTA_MANY_POOLS").map_or(10_000, |pools| pools.parse().unwrap());
    let redis = TestRedis::start().await;
    let one = with_many_pools(pools).await;
    let began = Instant::now();
    to_redis(&one, redis.url()).await;
    until("it is there", async || redis.cli(&["HGET", CONFIGURATION, "revision"]).await == pools.to_string())
        .await;
    println!("{pools} pools were published after {:?}", began.elapsed());
    println!("{}", redis.cli(&["SLOWLOG", "GET", "2"]).await.chars().take(200).collect::<String>());
    let began = Instant::now();
    let two = started(&redis.url()).await;
    two.until_it_follows(&one).await;
    println!("and taken over after {:?}", began.elapsed());
}
