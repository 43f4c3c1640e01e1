//! What the journal has taken is counted once, at its time, and what it could not take is not acknowledged: a ledger of
//! Redis, asked as the service asks it.

use std::{sync::Arc, thread, time::Duration};

use futures::future::join_all;
use quota_share::{
    clock::{Clock, SystemClock},
    core::units::Unit,
    store::{Journal, JournalCondition, Kept, Ledger, LedgerError, redis::RedisLedger},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    harness::{PATIENCE, Proxy, TestRedis, redis_is_missing},
    memory_journal::MemoryJournal,
    model::{allocation, dimension_spec, pool},
    redis_team::{
        COUNTED, HOUR_MS, MINUTE_MS, Team, a, b, begun_with, failing, is_unreachable, reached, standing,
        until,
    },
};

/// So short that calls give up while their batches are under way.
const BUDGET: Duration = Duration::from_millis(20);

/// A ledger that has reached its Redis, with a journal of the test's.
async fn ledger_with(url: &str, clock: Arc<dyn Clock>, journal: &Arc<MemoryJournal>) -> Arc<RedisLedger> {
    let ledger = begun_with(url, "one", clock, BUDGET, Arc::clone(journal)).await;
    until("it is reached", async || ledger.condition().failing.is_none()).await;
    ledger
}

fn assert_journaled<T: std::fmt::Debug>(answer: &Result<Kept<T>, LedgerError>) {
    assert!(matches!(answer, Ok(Kept::Journaled)), "{answer:?}");
}

/// Runs `work` in a runtime of its own and drops that when it is done: whatever else it has begun is cut off, as when a
/// process is killed.
async fn killed_after<W: Future<Output = ()>>(work: impl FnOnce() -> W + Send + 'static) {
    let life = thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(work());
    });
    tokio::task::spawn_blocking(|| life.join()).await.expect("no panic").expect("no panic");
}

/// By Redis' own clock, since that decides when a batch arrives: after two windows nothing of the record is to be seen.
#[tokio::test]
async fn a_record_that_was_under_way_when_redis_fell_silent_counts_at_its_time() {
    if redis_is_missing() {
        return;
    }
    const WINDOW: Duration = Duration::from_secs(2);
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let journal = Arc::default();
    let ledger = ledger_with(&proxy.url(), Arc::clone(&clock), &journal).await;
    let observer = reached(&redis.url(), clock).await;
    let keys = vec![allocation("a", 50.0, "burst"), allocation("b", 50.0, "burst")];
    let mut team = Team::new(&ledger, pool(keys), vec![dimension_spec(Unit::Tokens, "2s", Some(1e9))]);
    team.record(&a(0), "", "").await.expect("an answer");
    proxy.hang(true);
    let sent = proxy.requests(&team.hash());
    assert_journaled(&team.record(&a(600), "", "").await);
    let is_under_way = proxy.requests(&team.hash()) > sent && journal.all()[0].batch.is_some();
    tokio::time::sleep(2 * WINDOW).await;
    // What was under way never arrives; it is sent again.
    proxy.cut().await;
    proxy.hang(false);
    until("the journal is empty", async || ledger.all_counted()).await;
    assert_eq!(team.through(&observer).total().await, (0.0, 0.0), "under way: {is_under_way}");
}

#[tokio::test]
async fn what_waits_out_an_outage_counts_in_the_bucket_of_its_time() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let mut proxy = Proxy::to(redis.address()).await;
    let clock = standing();
    clock.advance(Duration::from_millis(50 * MINUTE_MS));
    let ledger = ledger_with(&proxy.url(), clock.clone(), &Arc::default()).await;
    let observer = reached(&redis.url(), clock.clone()).await;
    let mut team = Team::usual(&ledger, 1e9);
    team.through(&observer).must_record(&a(60)).await;
    proxy.refuse(true).await;
    proxy.cut().await;
    assert_journaled(&team.record(&a(600), "", "").await);
    clock.advance(Duration::from_millis(40 * MINUTE_MS));
    assert_journaled(&team.record(&a(6_000), "", "").await);
    proxy.refuse(false).await;
    until("the journal is empty", async || ledger.all_counted()).await;
    // Half of the hour before is in view.
    assert_eq!(team.through(&observer).total().await, (6_330.0, 0.0));
}

#[tokio::test]
async fn what_a_disk_would_not_forget_is_forgotten_when_it_can() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let mut proxy = Proxy::to(redis.address()).await;
    let journal = Arc::<MemoryJournal>::default();
    let ledger = ledger_with(&proxy.url(), standing(), &journal).await;
    let observer = reached(&redis.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    proxy.refuse(true).await;
    proxy.cut().await;
    for _ in 0..3 {
        assert_journaled(&team.record(&a(1), "", "").await);
    }
    proxy.delay(Duration::from_millis(30));
    proxy.refuse(false).await;
    until("they are under way", async || journal.all().iter().all(|entry| entry.batch.is_some())).await;
    journal.set_full(true);
    until("they could not be removed", async || journal.refused() > 0).await;
    journal.set_full(false);
    until("the journal is empty", async || journal.is_empty()).await;
    assert_eq!(team.through(&observer).total().await, (3.0, 0.0));
}

#[tokio::test]
async fn a_full_disk_acknowledges_nothing_and_loses_nothing_of_what_it_has() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start().await;
    let journal = Arc::<MemoryJournal>::default();
    let ledger = ledger_with(&redis.url(), standing(), &journal).await;
    let observer_url = redis.url();
    let mut team = Team::usual(&ledger, 1e9);
    let mut other = Team::usual(&ledger, 1e9);
    redis.kill();
    for _ in 0..300 {
        assert_journaled(&team.record(&a(1), "", "").await);
    }
    let open = quota_share::core::ids::ReservationId { pool: team.rig.life, random: [7; 12] };
    journal.set_full(true);
    let refused = team.record(&a(10), "named", "").await;
    assert!(
        matches!(&refused, Err(error) if error.to_string().contains("the journal failed while writing")),
        "{refused:?}"
    );
    let refused = ledger.release(open, None).await;
    assert!(matches!(refused, Err(LedgerError::Store(_))), "{refused:?}");
    assert!(is_unreachable(&team.hold(&a(1), HOUR_MS, "").await), "decisions go on by the failure mode");

    // Full while it drains as well: what is waiting stays, whatever needs no disk is done.
    redis.restart().await;
    until("it is reached", async || failing(&ledger).is_empty()).await;
    let refusals = journal.refused();
    until("it was tried to drain", async || journal.refused() > refusals + 1).await;
    until("what needs no disk is done", async || other.record(&b(5), "five", "").await.is_ok()).await;
    let mut acknowledged = 0;
    for turn in 0..20 {
        match team.record(&b(100), &format!("key {turn}"), "").await {
            Ok(kept) => {
                assert_eq!(kept, COUNTED, "nothing can be kept");
                acknowledged += 1;
            }
            Err(error) => println!("refused while it drains: {error}"),
        }
    }
    assert_eq!(journal.len(), 300);
    journal.set_full(false);
    until("the journal is empty", async || journal.is_empty()).await;
    for turn in 0..20 {
        team.record(&b(100), &format!("key {turn}"), "").await.expect("there is room again");
    }
    team.record(&a(10), "named", "").await.expect("there is room again");
    until("the journal is empty", async || journal.is_empty()).await;
    let observer = reached(&observer_url, standing()).await;
    assert_eq!(team.through(&observer).total().await, (2_310.0, 0.0), "{acknowledged} were taken at once");
    assert_eq!(other.through(&observer).total().await, (5.0, 0.0));
}

/// A record whose batch `faults` leave without an answer, by a process that is killed before it finds out.
async fn of_unknown_outcome(was_applied: bool) {
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let observer = reached(&redis.url(), standing()).await;
    let mut team = Team::usual(&observer, 1e9);
    team.must_record(&a(1)).await;
    let journal = Arc::<MemoryJournal>::default();
    let (url, kept, dying) = (proxy.url(), Arc::clone(&journal), team.clone());
    let proxy = Arc::new(proxy);
    let line = Arc::clone(&proxy);
    killed_after(move || async move {
        let ledger = ledger_with(&url, standing(), &kept).await;
        let mut team = dying.through(&ledger);
        if was_applied {
            line.swallow(true)
        } else {
            line.hang(true)
        }
        let answered = line.answers();
        let records: Vec<_> = (0..5).map(|_| team.rig.consumption(&a(10), "", "")).collect();
        let records = records.iter().map(|record| ledger.record(team.rig.life, record));
        join_all(records).await.iter().for_each(assert_journaled);
        if was_applied {
            until("Redis has answered", async || line.answers() > answered).await;
        }
    })
    .await;
    let carried = journal.all().iter().filter(|entry| entry.batch.is_some()).count();
    assert!(carried > 0, "{:?}", journal.all());
    // What was on its way goes no further.
    proxy.cut().await;
    let applied = team.total().await.0;
    assert_eq!(applied > 1.0, was_applied, "{applied}");

    let next = ledger_with(&redis.url(), standing(), &journal).await;
    until("the journal is empty", async || journal.is_empty()).await;
    assert_eq!(team.through(&next).total().await, (51.0, 0.0), "{carried} in batches; {applied} before");
}

#[tokio::test]
async fn what_redis_has_done_without_an_answer_counts_once_after_a_kill() {
    if !redis_is_missing() {
        of_unknown_outcome(true).await;
    }
}

#[tokio::test]
async fn what_redis_has_not_got_counts_once_after_a_kill() {
    if !redis_is_missing() {
        of_unknown_outcome(false).await;
    }
}

/// It is not known that nothing was done, whatever is refused later.
#[tokio::test]
async fn a_refusal_after_an_answer_that_was_lost_makes_nothing_count_twice() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let proxy = Proxy::to(redis.address()).await;
    let journal = Arc::<MemoryJournal>::default();
    let ledger = ledger_with(&proxy.url(), standing(), &journal).await;
    let mut team = Team::usual(&ledger, 1e9);
    team.record(&a(1), "", "").await.expect("an answer");
    proxy.swallow(true);
    let answered = proxy.answers();
    assert_journaled(&team.record(&a(10), "", "").await);
    until("Redis has answered", async || proxy.answers() > answered).await;
    let rights = async |changes: [&str; 2]| {
        let order = ["ACL", "SETUSER", "default", changes[0], changes[1]];
        assert_eq!(redis.cli(&order).await, "OK");
    };
    rights(["-eval", "-evalsha"]).await;
    proxy.cut().await;
    proxy.swallow(false);
    until("it is refused", async || failing(&ledger).contains("NOPERM")).await;
    assert_journaled(&team.record(&a(100), "", "").await);
    // What is still refused is not taken for what is possible again.
    rights(["+eval", "-evalsha"]).await;
    let given_up = ledger.condition().degraded_for;
    until("it was asked some times", async || {
        assert!(!failing(&ledger).is_empty(), "it was taken for one that is back");
        ledger.condition().degraded_for > given_up + Duration::from_millis(500)
    })
    .await;
    rights(["+eval", "+evalsha"]).await;
    until("the journal is empty", async || ledger.all_counted()).await;
    assert_eq!(team.total().await, (111.0, 0.0));
}

#[tokio::test]
async fn a_retry_on_another_replica_counts_once_though_both_were_cut_off() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    let journals = [Arc::<MemoryJournal>::default(), Arc::default()];
    let one = ledger_with(&redis.url(), standing(), &journals[0]).await;
    let other = ledger_with(&redis.url(), standing(), &journals[1]).await;
    let mut left = Team::usual(&one, 1e9);
    let mut right = left.through(&other);
    let mut patient = left.through(&reached(&redis.url(), standing()).await);
    let settled = patient.must_hold(&a(50), HOUR_MS).await.to_string();
    let released = patient.must_hold(&a(50), HOUR_MS).await;
    redis.kill();
    for team in [&mut left, &mut right] {
        assert_journaled(&team.record(&a(0), "", "").await);
        until("it is given up", async || !failing(&team.ledger).is_empty()).await;
        assert_journaled(&team.record(&a(7), "the same", "").await);
        assert_journaled(&team.record(&a(1), "", &settled).await);
        assert_journaled(&team.record(&a(1), "", &settled).await);
        assert_journaled(&team.ledger.release(released, None).await);
    }
    assert_journaled(&left.record(&a(100), "contradiction", "").await);
    assert_journaled(&left.record(&a(200), "contradiction", "").await);
    redis.restart().await;
    for ledger in [&one, &other] {
        until("the journal is empty", async || ledger.all_counted()).await;
    }
    let usage = left.usage().await;
    assert_eq!((left.total().await, usage.open_reservations), ((108.0, 0.0), 0));
    let counts = journals.map(|journal| journal.condition());
    let sum = |of: fn(&JournalCondition) -> u64| counts.iter().map(of).sum::<u64>();
    assert_eq!((sum(|of| of.kept), sum(|of| of.refused), sum(|of| of.duplicates)), (12, 1, 4));
    assert_eq!((sum(|of| of.unprotected), sum(|of| of.removed)), (0, 0));
}

#[tokio::test]
async fn the_first_of_two_records_that_contradict_each_other_wins() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start().await;
    let journal = Arc::<MemoryJournal>::default();
    let ledger = ledger_with(&redis.url(), standing(), &journal).await;
    let mut team = Team::usual(&ledger, 1e9);
    redis.kill();
    assert_journaled(&team.record(&a(0), "", "").await);
    until("it is given up", async || !failing(&ledger).is_empty()).await;
    assert_journaled(&team.record(&a(100), "same", "").await);
    assert_journaled(&team.record(&a(200), "same", "").await);
    redis.restart().await;
    until("the journal is empty", async || ledger.all_counted()).await;
    assert_eq!(team.total().await, (100.0, 0.0));
    assert_eq!(journal.condition().refused, 1);
}

/// Two replicas see each other, and Redis is away for longer than a replica is thought to live.
#[tokio::test]
async fn the_first_replica_that_is_back_does_not_take_itself_for_the_only_one() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let clock = standing();
    let mut proxies = [Proxy::to(redis.address()).await, Proxy::to(redis.address()).await];
    let one = ledger_with(&proxies[0].url(), clock.clone(), &Arc::default()).await;
    let other = ledger_with(&proxies[1].url(), clock.clone(), &Arc::default()).await;
    let count = || (one.live_replicas(), other.live_replicas());
    until("they see each other", async || count() == (2, 2)).await;
    for proxy in &mut proxies {
        proxy.refuse(true).await;
        proxy.cut().await;
    }
    until("both are cut off", async || !failing(&one).is_empty() && !failing(&other).is_empty()).await;
    clock.advance(Duration::from_millis(10_000));
    proxies[0].refuse(false).await;
    until("one is back", async || failing(&one).is_empty()).await;
    let members = ["ZCARD", "quota-share:replicas"];
    until("it has said so", async || redis.cli(&members).await == "1").await;
    for _ in 0..20 {
        assert_eq!(one.live_replicas(), 2, "the other one may be back in a moment");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    proxies[1].refuse(false).await;
    until("they see each other", async || count() == (2, 2)).await;
}

/// What a Redis has acknowledged in the last seconds it forgets, again and again, as at fail-overs.
#[tokio::test]
async fn what_redis_forgets_again_and_again_is_counted_once() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let journal = Arc::<MemoryJournal>::default();
    let ledger =
        begun_with(&proxy.url(), "one", standing(), Duration::from_millis(500), Arc::clone(&journal)).await;
    let mut team = Team::usual(&ledger, 1e9);
    until("it is counted", async || team.record(&a(1), "first", "").await.is_ok_and(|kept| kept == COUNTED))
        .await;
    let hash = team.hash();
    let keys = ["", ":deadlines", ":recorders", ":ids0", ":ids1", ":ids2", ":mark"];
    let keys: Vec<String> = keys.iter().map(|suffix| format!("{hash}{suffix}")).collect();
    let there = redis.cli(&["EXISTS", &keys[0], &keys[6]]).await;
    assert_eq!(there, "2", "the keys are named so");
    let save = "for _, key in ipairs(KEYS) do local value = redis.call('DUMP', key) \
                if value then redis.call('SET', 'saved:' .. key, value) else redis.call('DEL', 'saved:' .. key) end \
                end return 'OK'";
    let restore = "for _, key in ipairs(KEYS) do redis.call('DEL', key) local value = redis.call('GET', 'saved:' .. key) \
                   if value then redis.call('RESTORE', key, 0, value) end end return 'OK'";
    let run = async |script: &str| {
        let mut args = vec!["EVAL", script, "7"];
        args.extend(keys.iter().map(String::as_str));
        assert_eq!(redis.cli(&args).await, "OK");
    };
    let mut random = StdRng::seed_from_u64(6);
    let (mut sum, mut number) = (1, 0_u64);
    for _ in 0..12 {
        let mut calling = Vec::new();
        for _ in 0..random.random_range(5..60) {
            number += 1;
            sum += number;
            let key = if number.is_multiple_of(2) { format!("key {number}") } else { String::new() };
            let record = team.rig.consumption(&a(number), &key, "");
            let (ledger, life) = (Arc::clone(&ledger), team.rig.life);
            let wait = Duration::from_millis(random.random_range(0..60));
            calling.push(tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                ledger.record(life, &record).await
            }));
        }
        run(save).await;
        match random.random_range(0..9) {
            0 => proxy.lose_next_answers(1),
            1 => proxy.cut_after_requests(2),
            2 => proxy.cut().await,
            _ => {}
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(0..60))).await;
        run(restore).await;
        for call in calling {
            call.await.expect("no panic").expect("it is counted or kept");
        }
    }
    until("the journal is empty", async || ledger.all_counted()).await;
    until("the last batch was not lost", async || {
        team.record(&a(0), "", "").await.is_ok_and(|kept| kept == COUNTED)
    })
    .await;
    let losses = ledger.condition().losses;
    println!("{losses:?}, {:?}", journal.condition());
    assert_eq!(losses.missing_batches, 0, "this machine has stood still for ten seconds: {PATIENCE:?}");
    assert!(losses.resent_batches > 0);
    let observer = reached(&redis.url(), standing()).await;
    assert_eq!(team.through(&observer).total().await, (sum as f64, 0.0));
}

/// Otherwise another ledger might bring a part of a batch under its number, and the rest would be taken for done.
#[tokio::test]
async fn a_ledger_that_closes_leaves_the_journal_to_others_when_it_has_all_that_was_acknowledged() {
    if redis_is_missing() {
        return;
    }
    let proxy = Proxy::to(TestRedis::shared().await.address()).await;
    let journal = Arc::<MemoryJournal>::default();
    let ledger = begun_with(&proxy.url(), "one", standing(), PATIENCE, Arc::clone(&journal)).await;
    until("it is reached", async || failing(&ledger).is_empty()).await;
    let mut team = Team::usual(&ledger, 1e9);
    proxy.hang(true);
    let hash = team.hash();
    let sent = proxy.requests(&hash);
    let calling = tokio::spawn(async move { team.record(&a(1), "", "").await });
    until("it is on its way", async || proxy.requests(&hash) > sent).await;
    let closing = tokio::spawn(async move { ledger.close().await });
    let _turn = journal.turn().await;
    assert_eq!(journal.len(), 1);
    assert_journaled(&calling.await.expect("no panic"));
    closing.await.expect("no panic");
}
