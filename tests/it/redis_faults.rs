//! The driver redis while its Redis or the way there fails: every call is answered in time, and nothing is applied twice.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use quota_share::{
    clock::{Clock, SystemClock},
    core::{
        document::{Document, DocumentName, Head},
        ledger::Recorded,
        units::Timestamp,
    },
    store::{Kept, Ledger, LedgerError, ReplicaNote, SharedDirectory, redis::RedisLedger},
};

use crate::{
    harness::{PATIENCE, Proxy, TestRedis, redis_is_missing},
    memory_journal::MemoryJournal,
    model::START,
    redis_team::{
        Asked, COUNTED, HOUR_MS, MINUTE_MS, Team, a, b, begun, begun_with, everything, failing, hurried,
        is_unreachable, reached, said, standing, until,
    },
};

/// For a machine that does much else.
const SLACK: Duration = Duration::from_secs(2);

/// A call was waited for, or is kept because somebody had found out before: it is counted in the end.
async fn counts_in_the_end(ledger: &RedisLedger, answer: Result<Kept<Recorded>, LedgerError>) {
    let kept = answer.expect("there is time");
    assert!(kept == COUNTED || kept == Kept::Journaled, "{kept:?}");
    until("the journal is empty", async || ledger.all_counted()).await;
}

#[tokio::test]
async fn a_batch_whose_answer_was_lost_is_sent_again_and_gets_its_answers() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let clock = standing();
    let ledger = reached(&proxy.url(), Arc::clone(&clock) as _).await;
    let mut team = Team::usual(&ledger, 100.0);
    let mut open = Vec::new();
    for turn in 0..6 {
        let asked = team.enforce(&a(turn), HOUR_MS, "");
        let Asked::Enforce(_, wish) = &asked else { unreachable!("it was made so") };
        open.push(quota_share::core::ids::ReservationId { pool: team.rig.life, random: wish.random });
        assert_eq!(team.ask(&asked).await, team.tell(&asked));
    }
    let mut asked = Vec::new();
    for turn in 0..6 {
        asked.push(team.enforce(&a(10), MINUTE_MS, &format!("request {}", turn % 4)));
        asked.push(team.cost(&b(turn), &format!("key {}", turn % 4), ""));
        asked.push(team.cost(&b(1), "", ""));
        asked.push(match turn % 2 {
            0 => team.cost(&a(20), "", &open[turn as usize].to_string()),
            _ => Asked::Release(open[turn as usize]),
        });
        asked.push(Asked::Report(vec![said(0.01 * turn as f64)]));
    }
    assert_eq!(asked.len(), 30);
    let before = (proxy.connections(), redis_calls(redis, &team).await);
    proxy.lose_next_answers(3);
    let answers = join_all(asked.iter().map(|asked| team.ask(asked))).await;
    let want: Vec<_> = asked.iter().map(|asked| team.tell(asked)).collect();
    assert!(proxy.connections() > before.0, "an answer was lost");
    // After each connection a batch of nothing finds out whether something was lost.
    let looks = (proxy.connections() - before.0) as u64;
    let batches = redis_calls(redis, &team).await - before.1;
    assert!((1..=1 + looks).contains(&batches), "they were one batch: {batches}");
    assert_eq!(answers, want);
    assert_eq!(format!("{:?}", team.usage().await), format!("{:?}", team.rig.usage()));
}

/// How many batches Redis has applied to a pool: the last number of its only sender.
async fn redis_calls(redis: &TestRedis, team: &Team) -> u64 {
    let script = "for _, f in ipairs(redis.call('HKEYS', KEYS[1])) do if f:byte() == 3 then \
                  return cmsgpack.unpack(redis.call('HGET', KEYS[1], f))[1] end end return 0";
    redis.cli(&["EVAL", script, "1", &team.hash()]).await.parse().expect("a number")
}

#[tokio::test]
async fn records_through_a_connection_that_keeps_failing_are_counted_once_each() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let ledger = reached(&proxy.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    let records: Vec<_> = (0..431)
        .map(|turn| {
            let key = if turn % 2 == 0 { format!("key {turn}") } else { String::new() };
            team.rig.consumption(&a(1 + turn), &key, "")
        })
        .collect();
    for (turn, some) in records.chunks(16).enumerate() {
        match turn % 3 {
            0 => proxy.lose_next_answers(1),
            1 => proxy.cut_after_requests(2),
            _ => proxy.lose_next_answers(4),
        }
        let life = team.rig.life;
        let asking = some.iter().map(|record| ledger.record(life, record));
        let cutting = async {
            tokio::task::yield_now().await;
            proxy.cut().await;
        };
        let (answers, ()) = tokio::join!(join_all(asking), cutting);
        for answer in answers {
            assert_eq!(answer.expect("there is time"), COUNTED);
        }
    }
    let sum = (0..431).map(|turn| 1 + turn).sum::<u64>();
    assert_eq!(team.total().await, (sum as f64, 0.0));
    assert!(proxy.connections() > 10, "{} connections", proxy.connections());
}

/// Enforcements that are asked of a Redis that stands still; returns what was released afterwards.
async fn enforcements_past_their_budget_hold_nothing(clock: Arc<dyn Clock>) -> u64 {
    const BUDGET: Duration = Duration::from_millis(50);
    let redis = TestRedis::start().await;
    let observer = reached(&redis.url(), Arc::clone(&clock)).await;
    let ledger = hurried(&redis.url(), Arc::clone(&clock), BUDGET).await;
    let mut team = Team::usual(&ledger, 1e9);
    team.through(&observer).must_record(&a(1)).await;
    redis.pause().await;
    let calls = (0..250).map(|turn| {
        let charge = team.rig.charge(&a(1));
        let wish = team.rig.wish(&a(1), HOUR_MS, if turn % 2 == 0 { "" } else { "the same" });
        let ledger = Arc::clone(&ledger);
        async move {
            let asked = Instant::now();
            let answer = ledger.enforce(&charge, wish).await;
            (answer, asked.elapsed())
        }
    });
    for (answer, took) in join_all(calls.collect::<Vec<_>>()).await {
        assert!(is_unreachable(&answer), "{answer:?}");
        assert!(took < BUDGET + SLACK, "it took {took:?}");
    }
    redis.wake();
    ledger.close().await;
    // The connection of the first may have been given up while Redis stood still.
    let seen = team.through(&reached(&redis.url(), clock).await);
    assert_eq!((seen.total().await, seen.usage().await.open_reservations), ((1.0, 0.0), 0));
    ledger.condition().ended.released
}

#[tokio::test]
async fn enforcements_that_reach_redis_too_late_hold_nothing_by_its_clock() {
    if !redis_is_missing() {
        let released = enforcements_past_their_budget_hold_nothing(Arc::new(SystemClock)).await;
        assert_eq!(released, 0, "none was made");
    }
}

#[tokio::test]
async fn enforcements_without_an_answer_are_given_back_if_they_were_in_time_after_all() {
    if !redis_is_missing() {
        let released = enforcements_past_their_budget_hold_nothing(standing()).await;
        assert!(released > 0, "by a clock that stands none was late");
    }
}

#[tokio::test]
async fn an_enforcement_whose_caller_hangs_up_holds_nothing_in_the_end() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let observer = reached(&redis.url(), standing()).await;
    let ledger = reached(&proxy.url(), standing()).await;
    let mut team = Team::usual(&ledger, 100.0);
    proxy.hang(true);
    let sent = proxy.requests(&team.hash());
    let mut on_its_way = team.clone();
    let on_its_way = tokio::spawn(async move { on_its_way.must_hold(&a(1), HOUR_MS).await });
    until("it is on its way", async || proxy.requests(&team.hash()) > sent).await;
    team.rig.skip_names(1);
    let mut waiting = team.clone();
    let waiting = tokio::spawn(async move { waiting.must_hold(&a(1), HOUR_MS).await });
    tokio::task::yield_now().await;
    on_its_way.abort();
    waiting.abort();
    assert!(on_its_way.await.is_err_and(|error| error.is_cancelled()));
    assert!(waiting.await.is_err_and(|error| error.is_cancelled()));
    proxy.hang(false);
    ledger.close().await;
    let seen = team.through(&observer);
    assert_eq!((seen.total().await, seen.usage().await.open_reservations), ((0.0, 0.0), 0));
    assert_eq!(ledger.condition().ended.released, 1, "the other one was never sent");
}

#[tokio::test]
async fn replicas_that_take_each_other_for_the_same_drop_no_record() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let start = async || {
        let ledger = begun(&redis.url(), "copied", standing(), PATIENCE).await;
        until("it is reached", async || ledger.condition().failing.is_none()).await;
        ledger
    };
    let (one, other) = tokio::join!(start(), start());
    let mut team = Team::usual(&one, 1e9);
    let mut twin = team.through(&other);
    for _ in 0..20 {
        let (by_a, by_b) = (a(1), b(1));
        let (left, right) = tokio::join!(team.record(&by_a, "", ""), twin.record(&by_b, "", ""));
        assert_eq!((left.expect("an answer"), right.expect("an answer")), (COUNTED, COUNTED));
    }
    one.close().await;
    let again = start().await;
    for _ in 0..20 {
        team.through(&again).must_record(&a(1)).await;
    }
    assert_eq!(team.through(&again).total().await, (60.0, 0.0));
}

#[tokio::test]
async fn a_script_that_redis_has_forgotten_is_sent_again() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start().await;
    let ledger = reached(&redis.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    for _ in 0..3 {
        team.must_record(&a(1)).await;
        assert_eq!(redis.cli(&["SCRIPT", "FLUSH"]).await, "OK");
    }
    team.must_record(&a(1)).await;
    assert_eq!(team.total().await, (4.0, 0.0));
    redis.restart().await;
    let answer = team.record(&a(1), "", "").await;
    counts_in_the_end(&ledger, answer).await;
    assert_eq!(team.total().await, (5.0, 0.0), "it has forgotten the rest, too, and was told again");
}

#[tokio::test]
async fn a_call_waits_while_redis_loads_what_it_kept() {
    if redis_is_missing() {
        return;
    }
    // Each key takes so many microseconds to load.
    let args = [
        "--appendonly",
        "yes",
        "--key-load-delay",
        "2000",
        "--loading-process-events-interval-bytes",
        "1024",
    ];
    let mut redis = TestRedis::start_with(&args).await;
    let ledger = reached(&redis.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    team.must_record(&a(1)).await;
    let fill = "for i = 1, 2000 do redis.call('SET', 'filler:' .. i, string.rep('x', 100)) end return 1";
    assert_eq!(redis.cli(&["EVAL", fill, "0"]).await, "1");
    redis.kill();
    let mut calling = team.clone();
    let calling = tokio::spawn(async move { calling.record(&a(1), "", "").await });
    let mut said = false;
    let watching = async {
        while !calling.is_finished() {
            said |= failing(&ledger).contains("LOADING");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let ((), ()) = tokio::join!(redis.restart(), watching);
    counts_in_the_end(&ledger, calling.await.expect("no panic")).await;
    assert_eq!(team.total().await, (2.0, 0.0));
    println!("it was told that Redis was loading: {said}");
}

#[tokio::test]
async fn a_call_waits_for_a_master_and_is_unreachable_without_one() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let ledger = reached(&redis.url(), standing()).await;
    let short = hurried(&redis.url(), standing(), Duration::from_millis(300)).await;
    let mut team = Team::usual(&ledger, 1e9);
    team.must_record(&a(1)).await;
    assert_eq!(redis.cli(&["REPLICAOF", "127.0.0.1", "1"]).await, "OK");
    let mut hurry = team.through(&short);
    let held = hurry.hold(&a(1), HOUR_MS, "").await;
    assert!(is_unreachable(&held), "{held:?}");
    let mut calling = team.clone();
    let calling = tokio::spawn(async move { calling.record(&a(1), "", "").await });
    until("it says why", async || failing(&ledger).contains("READONLY")).await;
    assert_eq!(redis.cli(&["REPLICAOF", "NO", "ONE"]).await, "OK");
    counts_in_the_end(&ledger, calling.await.expect("no panic")).await;
    short.close().await;
    assert_eq!(team.total().await, (2.0, 0.0));
}

#[tokio::test]
async fn a_call_waits_for_the_end_of_a_script_of_somebody_else() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start_with(&["--lua-time-limit", "5"]).await;
    let ledger = reached(&redis.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    team.must_record(&a(1)).await;
    let calling = async {
        until("it is busy", async || redis.cli(&["PING"]).await.contains("BUSY")).await;
        let mut calling = team.clone();
        let calling = tokio::spawn(async move { calling.record(&a(1), "", "").await });
        until("it says why", async || failing(&ledger).contains("BUSY")).await;
        assert_eq!(redis.cli(&["SCRIPT", "KILL"]).await, "OK");
        calling.await.expect("no panic")
    };
    let (_, recorded) = tokio::join!(redis.cli(&["EVAL", "while true do end", "0"]), calling);
    counts_in_the_end(&ledger, recorded).await;
    assert_eq!(team.total().await, (2.0, 0.0));
}

/// A digest of the hash of a pool and its other keys: a ledger would be refused the writes by which it says that it is there.
async fn kept_of(redis: &TestRedis, team: &Team) -> String {
    let script = "local kept, fields = {}, redis.call('HGETALL', KEYS[1]) \
                  for i = 1, #fields, 2 do kept[#kept + 1] = fields[i] .. fields[i + 1] end \
                  for _, key in ipairs(redis.call('KEYS', KEYS[1] .. ':*')) do \
                  kept[#kept + 1] = key .. redis.call('DUMP', key) end \
                  table.sort(kept) return redis.sha1hex(table.concat(kept))";
    redis.cli(&["EVAL", script, "1", &team.hash()]).await
}

#[tokio::test]
async fn a_redis_without_memory_refuses_what_would_be_kept_and_changes_nothing() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let ledger = reached(&redis.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    let held = team.must_hold(&a(7), HOUR_MS).await;
    team.must_record(&a(1)).await;
    let before = kept_of(&redis, &team).await;
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]).await, "OK");
    let mut others: Vec<_> = (0..5).map(|_| team.clone()).collect();
    others.iter_mut().enumerate().for_each(|(turn, other)| other.rig.skip_names(100 * turn as u64));
    let call = a(5);
    let refused = join_all(others.iter_mut().map(|other| other.record(&call, "k", ""))).await;
    assert!(refused.iter().all(|answer| matches!(answer, Ok(Kept::Journaled))), "{refused:?}");
    let holding = team.hold(&b(5), HOUR_MS, "r").await;
    assert!(is_unreachable(&holding), "it is decided by failure mode: {holding:?}");
    assert!(failing(&ledger).contains("OOM"), "{}", failing(&ledger));
    assert_eq!(kept_of(&redis, &team).await, before, "half of it was done");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]).await, "OK");
    until("it is written to again", async || failing(&ledger).is_empty()).await;
    until("the journal is empty", async || ledger.all_counted()).await;
    assert_eq!(team.total().await, (6.0, 7.0), "five times one record");
    assert_ne!(kept_of(&redis, &team).await, before);
    team.record(&a(5), "k", &held.to_string()).await.expect("an answer");
    assert_eq!(team.total().await, (6.0, 0.0));
}

#[tokio::test]
async fn a_pool_whose_keys_are_of_another_type_fails_alone() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let ledger = reached(&redis.url(), standing()).await;
    let (mut broken, mut whole) = (Team::usual(&ledger, 1e9), Team::usual(&ledger, 1e9));
    whole.must_record(&a(1)).await;
    assert_eq!(redis.cli(&["SET", &broken.hash(), "somebody else's"]).await, "OK");
    for _ in 0..5 {
        let (broken_check, broken_usage) = (broken.clone(), broken.clone());
        let (checked, usable) = (whole.clone(), whole.clone());
        let (call, no_call) = (a(1), a(0));
        let (recorded, counted, read, seen, looked, shown) = tokio::join!(
            broken.record(&call, "", ""),
            whole.record(&no_call, "", ""),
            broken_check.check(&call),
            checked.check(&call),
            broken_usage.try_usage(),
            usable.try_usage(),
        );
        assert!(matches!(recorded, Ok(Kept::Journaled)), "{recorded:?}");
        for (what, error) in [("check", read.err()), ("usage", looked.err())] {
            let text = error.map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains("WRONGTYPE"), "{what}: {text}");
        }
        assert_eq!(counted.expect("the other pool is fine"), COUNTED);
        seen.expect("the other pool is fine");
        shown.expect("the other pool is fine");
        assert_eq!(failing(&ledger), "", "Redis itself is fine");
    }
    assert_eq!(whole.total().await, (1.0, 0.0));
    assert_eq!(redis.cli(&["DEL", &broken.hash()]).await, "1");
    until("the journal is empty", async || ledger.all_counted()).await;
    broken.must_record(&a(2)).await;
    assert_eq!(broken.total().await, (7.0, 0.0));
}

#[tokio::test]
async fn a_wrong_password_is_said_and_not_shown() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start_with(&["--requirepass", "right"]).await;
    let wrong = format!("redis://:hidden-secret@{}", redis.address());
    let ledger = begun(&wrong, "one", standing(), Duration::from_millis(500)).await;
    let mut team = Team::usual(&ledger, 1e9);
    let mut texts = vec![format!("{ledger:?}")];
    until("it says why", async || {
        let held = team.hold(&a(1), HOUR_MS, "").await;
        assert!(is_unreachable(&held), "{held:?}");
        texts.push(held.expect_err("as above").to_string());
        texts.push(failing(&ledger));
        failing(&ledger).contains("WRONGPASS")
    })
    .await;
    println!("{}", texts.last().expect("some"));
    assert!(texts.iter().all(|text| !text.contains("hidden-secret")), "{texts:?}");
    assert_eq!(redis.cli(&["-a", "right", "CONFIG", "SET", "requirepass", "hidden-secret"]).await, "OK");
    until("it is let in", async || failing(&ledger).is_empty()).await;
}

/// What README lets a user of Redis do, after the name and the password.
fn rights() -> Vec<&'static str> {
    let readme = include_str!("../../README.md");
    let (_, order) = readme.split_once("ACL SETUSER quota-share on >PASSWORD").expect("it names them");
    order.split("```").next().expect("there is a first part").split_whitespace().collect()
}

/// Does everything that replicas do with what they share.
async fn share(shared: &dyn SharedDirectory) {
    let name: DocumentName = "plan:c1".parse().expect("a name");
    let document = Document { revision: 1, written_at: START, content: None };
    let documents = [(name.clone(), document)].into();
    let head = Head { lineage: "all".to_owned(), revision: 1, write: "first".to_owned() };
    let next = Head { revision: 2, write: "second".to_owned(), ..head.clone() };
    assert!(shared.commit(None, &head, &documents).await.expect("an answer"));
    assert!(shared.commit(Some(&head), &next, &documents).await.expect("an answer"));
    assert_eq!(shared.head().await.expect("an answer"), Some(next.clone()));
    assert_eq!(shared.write_at(1).await.expect("an answer"), Some(head.write));
    assert_eq!(shared.after(0).await.expect("an answer"), (Some(next), documents));
    shared.forget(&[(name, 1)]).await.expect("an answer");
    assert!(shared.after(0).await.expect("an answer").1.is_empty());

    let version = "0.1.0".to_owned();
    let note = ReplicaNote { replica_id: "one".to_owned(), version, config_revision: 2, age_ms: 0 };
    shared.say(&note).await.expect("an answer");
    assert_eq!(shared.replicas().await.expect("an answer").len(), 1);
    shared.leave("one").await.expect("an answer");
    assert!(shared.replicas().await.expect("an answer").is_empty());
}

#[tokio::test]
async fn a_user_with_the_commands_that_are_needed_can_do_everything() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let order: Vec<_> = ["ACL", "SETUSER", "quota", "on", ">secret"].into_iter().chain(rights()).collect();
    assert_eq!(redis.cli(&order).await, "OK");
    let url = format!("redis://quota:secret@{}", redis.address());
    let clock = standing();
    let ledger = begun(&url, "one", Arc::clone(&clock) as _, PATIENCE).await;
    let asked = Instant::now();
    while !failing(&ledger).is_empty() {
        let log = redis.cli(&["ACL", "LOG"]).await;
        assert!(asked.elapsed() < Duration::from_secs(20), "{}: {log}", failing(&ledger));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut team = everything(&ledger, &clock).await;
    team.rig.now = Timestamp::from_unix_ms(clock.now().unix_ms());
    let entry = team.rig.entry();
    ledger.reservations(team.rig.life, None, None, 9).await.expect("an answer");
    ledger.reset(team.rig.life, None, Some(entry.dimension_keys()[0])).await.expect("an answer");
    ledger.remove(team.rig.life).await.expect("an answer");
    share(&*ledger.directory().expect("replicas share one there")).await;
    ledger.close().await;
    let log = redis.cli(&["ACL", "LOG"]).await;
    assert_eq!(log, "", "{log}");
}

#[tokio::test]
async fn while_redis_is_gone_all_records_are_kept_and_all_decisions_are_unreachable() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start().await;
    let ledger = hurried(&redis.url(), standing(), Duration::from_millis(50)).await;
    let mut team = Team::usual(&ledger, 1e9);
    redis.kill();
    for _ in 0..22 {
        let records: Vec<_> = (0..1_000).map(|_| team.rig.consumption(&a(1), "", "")).collect();
        let answers = join_all(records.iter().map(|record| ledger.record(team.rig.life, record))).await;
        for answer in answers {
            assert!(matches!(answer, Ok(Kept::Journaled)), "{answer:?}");
        }
    }
    let held = team.hold(&a(1), HOUR_MS, "").await;
    assert!(is_unreachable(&held), "{held:?}");
    redis.restart().await;
    until("the journal is empty", async || ledger.all_counted()).await;
    assert_eq!(team.total().await, (22_000.0, 0.0));
}

#[tokio::test]
async fn what_neither_redis_nor_the_journal_can_take_is_refused() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start().await;
    let journal = Arc::<MemoryJournal>::default();
    let budget = Duration::from_millis(500);
    let ledger = begun_with(&redis.url(), "one", standing(), budget, Arc::clone(&journal)).await;
    until("it is reached", async || ledger.condition().failing.is_none()).await;
    let mut team = Team::usual(&ledger, 1e9);
    redis.kill();
    assert!(is_unreachable(&team.hold(&a(1), HOUR_MS, "").await));
    journal.set_full(true);
    let refused = team.record(&a(1), "", "").await;
    assert!(matches!(refused, Err(LedgerError::Store(_))), "{refused:?}");
    assert!(journal.all().is_empty());
    journal.set_full(false);
    assert!(matches!(team.record(&a(2), "", "").await, Ok(Kept::Journaled)));
    redis.restart().await;
    until("the journal is empty", async || ledger.all_counted()).await;
    assert_eq!(team.total().await, (2.0, 0.0));
}

#[tokio::test]
async fn closing_waits_for_what_was_asked_and_what_is_asked_later_fails() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let observer = reached(&redis.url(), standing()).await;
    let ledger = reached(&proxy.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    proxy.delay(Duration::from_millis(300));
    let mut calling = team.clone();
    let calling = tokio::spawn(async move { calling.record(&a(1), "", "").await });
    let sent = proxy.requests(&team.hash());
    until("it is on its way", async || proxy.requests(&team.hash()) > sent).await;
    ledger.close().await;
    assert_eq!(calling.await.expect("no panic").expect("it was waited for"), COUNTED);
    let asked = Instant::now();
    let (recorded, checked, looked) =
        (team.record(&a(1), "", "").await, team.check(&a(1)).await, team.try_usage().await);
    assert!(is_unreachable(&recorded), "{recorded:?}");
    assert!(is_unreachable(&checked), "{checked:?}");
    assert!(is_unreachable(&looked), "{looked:?}");
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    assert_eq!(team.through(&observer).total().await, (1.0, 0.0));
}

#[tokio::test]
async fn closing_ends_within_its_bound_though_redis_is_gone() {
    if redis_is_missing() {
        return;
    }
    for stands_still in [true, false] {
        let mut redis = TestRedis::start().await;
        let ledger = reached(&redis.url(), standing()).await;
        let mut team = Team::usual(&ledger, 1e9);
        if stands_still {
            redis.pause().await
        } else {
            redis.kill()
        }
        let calling = tokio::spawn(async move { team.record(&a(1), "", "").await });
        let mut later = Team::usual(&ledger, 1e9);
        tokio::task::yield_now().await;
        let asked = Instant::now();
        ledger.close().await;
        // Five seconds for the call, half a second for a farewell.
        assert!(asked.elapsed() < Duration::from_secs(6) + SLACK, "{:?}", asked.elapsed());
        let answer = calling.await.expect("no panic");
        assert!(matches!(answer, Ok(Kept::Journaled)), "{answer:?}");
        assert!(is_unreachable(&later.hold(&a(1), HOUR_MS, "").await));
    }
}

#[tokio::test]
async fn a_check_waits_as_long_as_it_may() {
    if redis_is_missing() {
        return;
    }
    let proxy = Proxy::to(TestRedis::shared().await.address()).await;
    let ledger = reached(&proxy.url(), standing()).await;
    let mut team = Team::usual(&ledger, 100.0);
    team.must_record(&a(1)).await;
    // Both ways.
    proxy.delay(Duration::from_millis(300));
    assert!(team.check(&a(1)).await.is_ok());
}

#[tokio::test]
async fn a_request_whose_reservation_was_taken_back_is_decided_afresh() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let ledger = hurried(&redis.url(), standing(), Duration::from_millis(500)).await;
    let mut team = Team::usual(&ledger, 100.0);
    until("there is a pool", async || team.record(&a(1), "one", "").await.is_ok()).await;
    redis.pause().await;
    assert!(is_unreachable(&team.hold(&a(10), HOUR_MS, "request").await));
    redis.wake();
    until("it is taken back", async || ledger.condition().ended.released == 1).await;
    let mut again = None;
    until("it is asked again", async || {
        again = team.hold(&a(10), HOUR_MS, "request").await.ok();
        again.is_some()
    })
    .await;
    let reserved = again.and_then(|(_, reserved)| reserved).expect("there is room");
    assert!(!reserved.repeated, "{reserved:?}");
    assert_eq!(team.total().await, (1.0, 10.0));
}

#[tokio::test]
async fn a_reservation_ends_though_the_deadlines_are_lost() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let clock = standing();
    let ledger = reached(&redis.url(), clock.clone()).await;
    let mut team = Team::usual(&ledger, 100.0);
    team.must_hold(&a(60), MINUTE_MS).await;
    team.must_hold(&a(20), HOUR_MS).await;
    assert_eq!(redis.cli(&["DEL", &format!("{}:deadlines", team.hash())]).await, "1");
    clock.advance(Duration::from_millis(MINUTE_MS));
    team.must_hold(&a(70), MINUTE_MS).await;
    assert_eq!(team.total().await, (0.0, 90.0));
    clock.advance(Duration::from_millis(HOUR_MS));
    team.must_hold(&a(100), MINUTE_MS).await;
    assert_eq!(team.total().await, (0.0, 100.0));
}
