//! What the driver redis keeps: for how long, in how much memory, and what it says when that is gone.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use quota_share::{
    clock::ManualClock,
    core::{
        account::Observation,
        plan::DimensionSpec,
        pool::PoolSpec,
        units::{Amount, Cost, Unit},
    },
    store::{Ledger, LedgerError, redis::RedisLedger},
};

use crate::{
    harness::{PATIENCE, TestRedis, redis_is_missing},
    model::{
        CONNECTION, Call, ID_LIFE_MS, START, allocation, connection, cost, dimension, dimension_spec, pool,
        tokens,
    },
    redis_team::{
        Asked, COUNTED, DAY_MS, HOUR_MS, MINUTE_MS, Team, a, b, begun, everything, failing, reached, said,
        standing, until,
    },
};

/// A Redis of one's own, and time in it.
struct Place {
    redis: TestRedis,
    clock: Arc<ManualClock>,
    ledger: Arc<RedisLedger>,
}

impl Place {
    async fn new() -> Self {
        let (redis, clock) = (TestRedis::start().await, standing());
        let ledger = reached(&redis.url(), Arc::clone(&clock) as _).await;
        Self { redis, clock, ledger }
    }

    /// Another replica.
    async fn other(&self) -> Arc<RedisLedger> {
        reached(&self.redis.url(), Arc::clone(&self.clock) as _).await
    }

    /// Lets time pass, for Redis' expiries as well.
    async fn pass(&self, team: &mut Team, ms: u64) {
        let script = "for _, key in ipairs(redis.call('KEYS', '*')) do local life = redis.call('PTTL', key) \
                      if life >= 0 then redis.call('PEXPIRE', key, life - ARGV[1]) end end return 1";
        assert_eq!(self.redis.cli(&["EVAL", script, "0", &ms.to_string()]).await, "1");
        self.clock.advance(Duration::from_millis(ms));
        team.rig.wait(ms);
    }

    /// How long each key lives, in ms; -1: for ever.
    async fn lives(&self) -> BTreeMap<String, i64> {
        let script = "local lives = {} for _, key in ipairs(redis.call('KEYS', '*')) do \
                      lives[#lives + 1] = key .. ' ' .. redis.call('PTTL', key) end return lives";
        let lives = self.redis.cli(&["EVAL", script, "0"]).await;
        let parts = lives.lines().map(|line| line.rsplit_once(' ').expect("a key and its life"));
        parts.map(|(key, life)| (key.to_owned(), life.parse().expect("a number"))).collect()
    }

    /// The memory of the keys that begin with `prefix`.
    async fn memory(&self, prefix: &str) -> u64 {
        let script = "local sum = 0 for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do \
                      sum = sum + redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) end return sum";
        self.redis.cli(&["EVAL", script, "0", prefix]).await.parse().expect("a number")
    }

    fn vanished(&self) -> u64 {
        self.ledger.condition().vanished_pools
    }
}

/// Redis and the specification give the same answer.
async fn agree(team: &mut Team, asked: Asked) {
    let got = team.ask(&asked).await;
    let want = team.tell(&asked);
    assert_eq!(got, want, "{asked:?} at {:?}", team.rig.now);
}

async fn agree_on_usage(team: &mut Team) {
    assert_eq!(format!("{:?}", team.usage().await), format!("{:?}", team.rig.usage()));
}

/// Rates of dimensions that have aged out go when either likes.
async fn agree_but_for_rates(team: &mut Team) {
    let (got, want) = (team.usage().await, team.rig.usage());
    assert_eq!((got.totals, got.keys, got.accounts), (want.totals, want.keys, want.accounts));
}

fn percent_5h() -> Vec<DimensionSpec> {
    vec![dimension_spec(Unit::Tokens, "hourly", Some(1e9)), dimension_spec(Unit::Percent, "5h", Some(100.0))]
}

fn two_keys() -> PoolSpec {
    pool(vec![allocation("a", 50.0, "burst"), allocation("b", 50.0, "burst")])
}

/// A figure of the account in its five hours.
fn figure(team: &Team, fraction: f64) -> Asked {
    let of = Observation {
        dimension: dimension(Unit::Percent, "5h"),
        observed_at: team.rig.now,
        ..said(fraction)
    };
    Asked::Report(vec![of])
}

#[tokio::test]
async fn every_key_has_the_tag_of_its_pool_and_a_life_of_two_windows_at_least() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let team = everything(&place.ledger, &place.clock).await;
    let weekly = vec![dimension_spec(Unit::Tokens, "weekly", Some(1e9))];
    let mut long = Team::new(&place.ledger, two_keys(), weekly);
    long.must_record(&a(1)).await;
    // The marks and the layout say what must be there.
    let lives = place.lives().await;
    assert!(lives.len() > 6, "{lives:?}");
    for (key, life) in lives {
        let of = [(&team, 2 * 5 * HOUR_MS), (&long, 14 * DAY_MS)];
        let of = of.iter().find(|(team, _)| key.starts_with(&team.hash()));
        match of {
            None if key == "quota-share:replicas" => assert!(life > 0),
            None => assert_eq!((key.as_str(), life), ("quota-share:layout", -1)),
            Some((team, _)) if key == team.hash() + ":mark" => assert_eq!(life, -1),
            Some((team, two_windows)) => {
                assert!(life > 0, "{key} lives for ever");
                let counts = key == team.hash() || key.ends_with(":recorders");
                assert!(!counts || life as u64 > *two_windows, "{key} lives for {life} ms");
            }
        }
    }
}

#[tokio::test]
async fn who_has_recorded_since_the_last_rise_is_known_however_long_that_is_ago() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let mut team = Team::new(&place.ledger, two_keys(), percent_5h());
    let none = figure(&team, 0.1);
    agree(&mut team, none).await;
    for _ in 0..72 {
        for (key, of_tokens) in [("a", 3), ("b", 1)] {
            // Of as many requests: a rise is split by tokens.
            let call = Call::new(key, Cost { requests: Amount::saturating(1), ..tokens(of_tokens) });
            let asked = team.cost(&call, "", "");
            agree(&mut team, asked).await;
        }
        place.pass(&mut team, HOUR_MS).await;
    }
    let risen = figure(&team, 0.3);
    agree(&mut team, risen).await;
    agree_but_for_rates(&mut team).await;
}

#[tokio::test]
async fn nothing_lives_too_short_after_a_clock_that_was_far_ahead_has_gone_back() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let mut team = Team::usual(&place.ledger, 1e9);
    place.pass(&mut team, 30 * DAY_MS).await;
    for turn in 0..3 {
        let asked = team.cost(&a(1), &format!("ahead {turn}"), "");
        agree(&mut team, asked).await;
    }
    place.clock.set(START);
    team.rig.now = START;
    for turn in 0..90_u64 {
        let asked = team.cost(&a(1), &format!("key {turn}"), "");
        agree(&mut team, asked).await;
        if let Some(before) = turn.checked_sub(1) {
            let again = team.cost(&a(1), &format!("key {before}"), "");
            agree(&mut team, again).await;
        }
        let endless = place.lives().await.into_iter().filter(|(_, life)| *life < 0);
        let endless: Vec<_> = endless.map(|(key, _)| key).collect();
        assert_eq!(endless, [team.hash() + ":mark", "quota-share:layout".to_owned()]);
        place.pass(&mut team, if turn < 30 { 5 * MINUTE_MS } else { HOUR_MS }).await;
    }
    agree_but_for_rates(&mut team).await;
    assert_eq!(place.vanished(), 0);
}

#[tokio::test]
async fn flushed_counters_are_reported_and_calls_go_on() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let mut teams: Vec<_> = (0..3).map(|_| Team::usual(&place.ledger, 1e9)).collect();
    for team in &mut teams {
        team.must_record(&a(1)).await;
        team.must_hold(&a(1), HOUR_MS).await;
    }
    let mut calling: Vec<_> = teams.clone();
    let calling = tokio::spawn(async move {
        for turn in 0..100_u64 {
            for team in &mut calling {
                team.rig.skip_names(7 + turn);
                team.must_record(&b(1)).await;
                team.must_hold(&b(1), HOUR_MS).await;
                team.check(&a(1)).await.expect("an answer");
            }
        }
    });
    until("they have begun", async || teams[0].total().await.0 > 5.0).await;
    // Counters are told from those before by when they were begun.
    place.clock.advance(Duration::from_millis(1));
    assert_eq!(place.redis.cli(&["FLUSHALL"]).await, "OK");
    calling.await.expect("every call is answered");
    assert_eq!(place.vanished(), 3);
}

#[tokio::test]
async fn a_pool_whose_hash_alone_is_gone_is_reported_once_by_whoever_comes_later() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let mut teams: Vec<_> = (0..2).map(|_| Team::usual(&place.ledger, 1e9)).collect();
    for team in &mut teams {
        team.must_record(&a(1)).await;
        assert_eq!(place.redis.cli(&["DEL", &team.hash()]).await, "1");
    }
    let other = place.other().await;
    let [mut first, mut second] = [0, 1].map(|index: usize| teams[index].through(&other));
    first.must_record(&a(1)).await;
    assert_eq!(other.condition().vanished_pools, 1);
    first.must_record(&a(1)).await;
    second.usage().await;
    second.check(&a(1)).await.expect("an answer");
    second.must_record(&a(1)).await;
    second.usage().await;
    assert_eq!(other.condition().vanished_pools, 2);
}

#[tokio::test]
async fn looking_at_a_pool_that_has_vanished_reports_it_once() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let mut team = Team::usual(&place.ledger, 1e9);
    team.must_record(&a(1)).await;
    assert_eq!(place.redis.cli(&["DEL", &team.hash()]).await, "1");
    team.usage().await;
    team.must_record(&a(1)).await;
    team.usage().await;
    assert_eq!(place.vanished(), 1);
}

#[tokio::test]
async fn a_pool_whose_hash_alone_is_gone_works_on_past_the_deadlines_of_what_it_held() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let mut team = Team::usual(&place.ledger, 10.0);
    team.must_hold(&a(4), MINUTE_MS).await;
    assert_eq!(team.record(&a(1), "k", "").await.expect("an answer"), COUNTED);
    assert_eq!(place.redis.cli(&["DEL", &team.hash()]).await, "1");
    // What it held is lost, and what was recorded is told again.
    team.must_hold(&a(8), HOUR_MS).await;
    let (verdict, reserved) = team.hold(&a(8), HOUR_MS, "").await.expect("an answer");
    assert!(reserved.is_none(), "{verdict:?}");
    assert_eq!(verdict.allowed_after_ms, Some(HOUR_MS));
    place.pass(&mut team, 2 * MINUTE_MS).await;
    assert_ne!(team.record(&a(1), "k", "").await.expect("an answer"), COUNTED, "its id came along");
    assert_eq!((team.total().await, team.usage().await.open_reservations), ((1.0, 8.0), 1));
}

#[tokio::test]
async fn what_has_expired_or_was_removed_has_not_vanished() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let mut team = everything(&place.ledger, &place.clock).await;
    place.pass(&mut team, 40 * DAY_MS).await;
    let other = place.other().await;
    team.through(&other).usage().await;
    team.through(&other).must_record(&a(1)).await;
    team.usage().await;
    team.must_record(&a(1)).await;
    let mut removed = Team::usual(&place.ledger, 1e9);
    removed.must_record(&a(1)).await;
    removed.through(&other).must_record(&a(1)).await;
    other.remove(removed.rig.life).await.expect("an answer");
    let looked = removed.try_usage().await;
    assert!(matches!(looked, Err(LedgerError::PoolRemoved)), "{looked:?}");
    let recorded = removed.record(&a(1), "", "").await;
    assert!(matches!(recorded, Err(LedgerError::PoolRemoved)), "{recorded:?}");
    assert_eq!((place.vanished(), other.condition().vanished_pools), (0, 0));
}

#[tokio::test]
async fn a_policy_that_evicts_is_reported_whenever_it_comes() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start().await;
    let ledger = reached(&redis.url(), standing()).await;
    assert_eq!(ledger.condition().eviction_policy, None);
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]).await, "OK");
    let other = reached(&redis.url(), standing()).await;
    assert_eq!(other.condition().eviction_policy.as_deref(), Some("volatile-ttl"));
    // What is configured is looked at now and then, and at every connection.
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await, "OK");
    until("it is looked at again", async || other.condition().eviction_policy.is_none()).await;
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]).await, "OK");
    until("it is seen", async || other.condition().eviction_policy.is_some()).await;
    redis.restart().await;
    until("it is looked at again", async || other.condition().eviction_policy.is_none()).await;
}

#[tokio::test]
async fn where_a_newer_layout_was_used_no_call_is_answered() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start_with(&["--appendonly", "yes"]).await;
    let running = reached(&redis.url(), standing()).await;
    let mut team = Team::usual(&running, 1e9);
    team.must_record(&a(1)).await;
    assert_eq!(redis.cli(&["SET", "quota-share:layout", "99"]).await, "OK");

    let late = begun(&redis.url(), "late", standing(), PATIENCE).await;
    let mut early = team.through(&late);
    until("it says so", async || {
        let recorded = tokio::time::timeout(Duration::from_millis(20), early.record(&a(1), "", "")).await;
        assert!(recorded.is_err() || recorded.is_ok_and(|it| it.is_err()), "it was answered");
        failing(&late).contains("99")
    })
    .await;
    let says = failing(&late);
    assert!(says.contains("99") && says.contains("layouts up to 1"), "{says}");
    let (recorded, checked, looked) =
        (early.record(&a(1), "", "").await, early.check(&a(1)).await, early.try_usage().await);
    // Not as a Redis out of reach, for which the pool's failure mode would decide.
    assert!(matches!(recorded, Err(LedgerError::NewerLayout(_))), "{recorded:?}");
    assert!(matches!(checked, Err(LedgerError::NewerLayout(_))), "{checked:?}");
    assert!(matches!(looked, Err(LedgerError::NewerLayout(_))), "{looked:?}");

    // Whoever is there already hears of it without a new connection, too.
    until("it is met", async || failing(&running).contains("99")).await;
    redis.restart().await;
    let recorded = team.record(&a(1), "", "").await;
    assert!(matches!(recorded, Err(LedgerError::NewerLayout(_))), "{recorded:?}");
}

#[tokio::test]
async fn an_id_costs_about_a_hundred_bytes() {
    if redis_is_missing() {
        return;
    }
    const IDS: u64 = 20_000;
    let place = Place::new().await;
    let mut team = Team::usual(&place.ledger, 1e9);
    record_many(&mut team, (0..IDS).map(|turn| (a(1), format!("key {turn}")))).await;
    let bytes = place.memory(&(team.hash() + ":ids")).await / IDS;
    println!("{bytes} bytes for a remembered record");
    assert!(bytes <= 110, "{bytes} bytes");

    let mut team = Team::usual(&place.ledger, 1e9);
    for turns in 0..IDS / 200 {
        let asked: Vec<_> =
            (0..200).map(|turn| team.enforce(&a(1), HOUR_MS, &format!("request {turns} {turn}"))).collect();
        join_all(asked.iter().map(|asked| team.ask(asked))).await;
    }
    let (ids, holds) = (place.memory(&(team.hash() + ":ids")).await, place.memory(&team.hash()).await);
    println!("{} bytes for a request id, {} for its hold", ids / IDS, (holds - ids) / IDS);
    assert!(ids / IDS <= 120, "{} bytes", ids / IDS);
}

/// Records that travel in large batches.
async fn record_many(team: &mut Team, calls: impl Iterator<Item = (Call, String)>) {
    let records: Vec<_> = calls.map(|(call, key)| team.rig.consumption(&call, &key, "")).collect();
    for some in records.chunks(500) {
        let answers = join_all(some.iter().map(|record| team.ledger.record(team.rig.life, record))).await;
        answers.into_iter().for_each(|answer| assert_eq!(answer.expect("an answer"), COUNTED));
    }
}

#[tokio::test]
async fn a_key_in_a_dimension_costs_less_than_150_bytes() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    for (keys, dimensions) in [(100, 2), (10_000, 2), (10_000, 1)] {
        let names: Vec<_> = (0..keys).map(|key| format!("api-key-{key:05}")).collect();
        let plan = [
            dimension_spec(Unit::Tokens, "hourly", Some(1e12)),
            dimension_spec(Unit::Requests, "daily", Some(1e9)),
        ];
        let spec = pool(names.iter().map(|name| allocation(name, 100.0 / keys as f64, "burst")).collect());
        let mut team = Team::new(&place.ledger, spec, plan[..dimensions].to_vec());
        let spent =
            quota_share::core::units::Cost { requests: cost(Unit::Requests, 1).requests, ..tokens(12_345) };
        record_many(&mut team, names.iter().map(|name| (Call::new(name, spent), String::new()))).await;
        let bytes = place.memory(&team.hash()).await as f64 / (keys * dimensions) as f64;
        println!("{keys} keys in {dimensions} dimensions: {bytes:.0} bytes for each");
        assert!(dimensions == 1 || bytes < 150.0, "{bytes} bytes");
    }
}

#[tokio::test]
async fn ids_are_remembered_for_their_life_and_not_kept_for_two() {
    if redis_is_missing() {
        return;
    }
    const TURNS: u64 = 20;
    let place = Place::new().await;
    let mut team = Team::usual(&place.ledger, 1e9);
    let mut most = 0;
    for turn in 0..6 * TURNS {
        let key = format!("key {turn}");
        let asked = team.cost(&a(1), &key, "");
        agree(&mut team, asked).await;
        if let Some(old) = turn.checked_sub(TURNS) {
            // One is at its end, the next one is not.
            let next = team.cost(&a(1), &format!("key {}", old + 1), "");
            let got = team.ask(&next).await;
            assert!(got.contains("duplicate: true"), "{got}");
            assert_eq!(got, team.tell(&next));
        }
        let count = "local sum = 0 for i = 0, 2 do sum = sum + redis.call('HLEN', KEYS[1] .. ':ids' .. i) end return sum";
        let kept: u64 = place.redis.cli(&["EVAL", count, "1", &team.hash()]).await.parse().expect("a number");
        most = most.max(kept);
        place.pass(&mut team, ID_LIFE_MS / TURNS - 1).await;
        place.pass(&mut team, 1).await;
    }
    println!("at most {most} ids were kept, of {TURNS} that are alive");
    assert!(most <= 2 * TURNS + 2, "{most} of {TURNS}");
    // To the millisecond.
    for wait_ms in [ID_LIFE_MS - 1, 1] {
        let asked = team.cost(&a(1), "exact", "");
        agree(&mut team, asked).await;
        place.pass(&mut team, wait_ms).await;
    }
    let asked = team.cost(&a(1), "exact", "");
    let got = team.ask(&asked).await;
    assert!(got.contains("duplicate: false"), "{got}");
    assert_eq!(got, team.tell(&asked));
}

#[tokio::test]
async fn a_pool_of_ten_thousand_keys_works() {
    if redis_is_missing() {
        return;
    }
    let place = Place::new().await;
    let names: Vec<_> = (0..10_000).map(|key| format!("api-key-{key:05}")).collect();
    let spec = pool(names.iter().map(|name| allocation(name, 0.01, "burst")).collect());
    let mut team = Team::new(&place.ledger, spec, percent_5h());
    let begin = Observation {
        dimension: dimension(Unit::Percent, "5h"),
        reset: quota_share::core::headers::Reset::WindowEnd(START.plus_ms(2 * HOUR_MS)),
        ..said(0.1)
    };
    agree(&mut team, Asked::Report(vec![begin])).await;
    for some in names.chunks(500) {
        let asked: Vec<_> =
            some.iter().map(|name| team.cost(&Call::new(name, tokens(1_000)), "", "")).collect();
        join_all(asked.iter().map(|asked| team.ask(asked))).await;
        asked.iter().for_each(|asked| assert!(team.tell(asked).contains("duplicate: false")));
    }
    let timed = async |what: &str, team: &mut Team, asked: Asked| {
        assert_eq!(place.redis.cli(&["CONFIG", "RESETSTAT"]).await, "OK");
        let began = Instant::now();
        agree(team, asked).await;
        let took = began.elapsed();
        let stats = place.redis.cli(&["INFO", "commandstats"]).await;
        let script = stats.lines().find(|line| line.starts_with("cmdstat_evalsha")).unwrap_or_default();
        println!("{what}: {took:?} in all; {script}");
    };
    let one = team.cost(&Call::new(&names[0], tokens(1)), "", "");
    timed("a record", &mut team, one).await;
    let risen = Observation { fraction: 0.4, observed_at: team.rig.now.plus_ms(1), ..begin };
    place.pass(&mut team, 5_000).await;
    timed("a rise", &mut team, Asked::Report(vec![risen])).await;
    let began = Instant::now();
    agree_on_usage(&mut team).await;
    println!("usage: {:?}", began.elapsed());
    place.pass(&mut team, 2 * HOUR_MS).await;
    let one = team.cost(&Call::new(&names[0], tokens(1)), "", "");
    timed("the end of a window", &mut team, one).await;
    agree_but_for_rates(&mut team).await;
}

#[tokio::test]
async fn names_of_any_kind_are_kept_apart() {
    if redis_is_missing() {
        return;
    }
    let long = "é".repeat(128);
    let names = [
        "a",
        "a:b",
        "a:b:",
        "1",
        "1:",
        "1:a",
        "2:1:",
        ":",
        "::",
        "{x}",
        "}{",
        "%d%s%%",
        "%",
        "removed",
        "-1",
        "0",
        "Tokens:3600000",
        "Percent:18000000:a",
        "null",
        "\\1",
        "'\"",
        " ",
        "\u{a0}",
        "\u{10ffff}",
        "[a",
        "(1;",
        "+",
        "-",
        &long,
    ];
    let place = Place::new().await;
    let plan = vec![
        dimension_spec(Unit::Tokens, "hourly", Some(1e9)),
        dimension_spec(Unit::Percent, "5h", Some(100.0)),
    ];
    let share = 100.0 / names.len() as f64;
    let spec = PoolSpec {
        connection_ids: [CONNECTION].iter().chain(&names).map(|&name| name.to_owned()).collect(),
        ..pool(names.iter().map(|name| allocation(name, share, "burst")).collect())
    };
    let mut team = Team::new(&place.ledger, spec, plan);
    for round in 0..4 {
        for (at, name) in names.iter().enumerate() {
            team.rig.serving = connection(name);
            let call = |offset: usize| {
                let call = Call::new(names[(at * 5 + round + offset) % names.len()], tokens(1 + at as u64));
                let model = names[(at + 3 * offset) % names.len()];
                if offset == 0 { call } else { call.model(model) }
            };
            let asked = team.enforce(&call(0), HOUR_MS, names[(at + round) % names.len()]);
            agree(&mut team, asked).await;
            for offset in 1..4 {
                let asked = team.cost(&call(offset), names[(at + offset) % names.len()], "");
                agree(&mut team, asked).await;
            }
            let risen = figure(&team, 0.02 * (1 + round * 3 + at % 3) as f64);
            agree(&mut team, risen).await;
            place.pass(&mut team, 3_000).await;
        }
        agree_on_usage(&mut team).await;
    }
    for name in names {
        let charge = team.rig.charge(&Call::new(name, tokens(1)));
        let got = place.ledger.check(&charge).await.expect("an answer");
        assert_eq!(got, team.rig.reading(&Call::new(name, tokens(1))), "{name}");
    }
}
