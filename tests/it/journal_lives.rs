//! A replica that dies again and again, on a connection and a disk that keep failing, loses no record that it has
//! acknowledged and counts none twice.
//!
//! Each life is a runtime of its own that is dropped amidst its work: whatever awaits then goes no further, as when a
//! process is killed. What Redis was sent, and what the journal has, is all that the next life finds.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use async_trait::async_trait;
use futures::future::join_all;
use parking_lot::Mutex;
use quota_share::{
    core::{
        ids::{PoolRevision, ReservationId},
        ledger::Consumption,
    },
    store::{
        BatchName, Deferred, Entry, EntryId, Journal, JournalCounts, Kept, Ledger, StoreError,
        redis::{RedisLedger, RedisOptions, RedisUrl},
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use tokio::sync::{OwnedMutexGuard, oneshot};

use crate::{
    harness::{Proxy, TestRedis, redis_is_missing},
    memory_journal::MemoryJournal,
    model::{Call, key, tokens},
    redis_team::{HOUR_MS, Team, a, reached, standing, until},
};

/// So short that calls give up while their batches are under way.
const BUDGET: Duration = Duration::from_millis(20);
/// Calls that one life has under way together.
const CALLERS: u64 = 16;
/// Calls of one history.
const WISHES: u64 = 640;

/// How many histories are tried, and of which number the first is.
fn seeds() -> std::ops::Range<u64> {
    let number = |name, default| env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let first = number("QUOTA_OUTAGE_FIRST_SEED", 0);
    first..first + number("QUOTA_OUTAGE_SEEDS", 6)
}

/// A journal whose writes take their time, before and after they are durable.
#[derive(Debug, Default)]
struct SlowJournal {
    kept: MemoryJournal,
    writes: AtomicU64,
}

impl SlowJournal {
    /// Each write takes another time: most none, some so long that much happens meanwhile.
    async fn wait(&self) {
        match self.writes.fetch_add(1, Ordering::Relaxed) % 7 {
            0 => tokio::time::sleep(Duration::from_millis(3)).await,
            3 => tokio::time::sleep(Duration::from_millis(30)).await,
            1 | 5 => tokio::task::yield_now().await,
            _ => {}
        }
    }
}

#[async_trait]
impl Journal for SlowJournal {
    async fn add(
        &self,
        pool: PoolRevision,
        batch: Option<BatchName>,
        call: &Deferred,
    ) -> Result<EntryId, StoreError> {
        self.wait().await;
        let added = self.kept.add(pool, batch, call).await;
        self.wait().await;
        added
    }

    async fn assign(&self, entries: Vec<(EntryId, Option<BatchName>)>) -> Result<(), StoreError> {
        self.wait().await;
        let assigned = self.kept.assign(entries).await;
        self.wait().await;
        assigned
    }

    async fn remove(&self, entries: Vec<EntryId>) -> Result<(), StoreError> {
        self.wait().await;
        let removed = self.kept.remove(entries).await;
        self.wait().await;
        removed
    }

    async fn unsent(
        &self,
        count: usize,
        left_out: &BTreeSet<PoolRevision>,
    ) -> Result<Vec<Entry>, StoreError> {
        self.kept.unsent(count, left_out).await
    }

    async fn sent_by_others(&self, sender: [u8; 16]) -> Result<Vec<Entry>, StoreError> {
        self.kept.sent_by_others(sender).await
    }

    fn len(&self) -> u64 {
        self.kept.len()
    }

    fn counts(&self) -> &JournalCounts {
        self.kept.counts()
    }

    async fn turn(&self) -> OwnedMutexGuard<()> {
        self.kept.turn().await
    }
}

/// Something that a caller wants done, once.
#[derive(Clone, Debug)]
enum Wish {
    /// Counted under a name of its own, and sent again until it is acknowledged.
    Named(Consumption),
    /// Without a name: sent once.
    Unnamed(Consumption),
    Release(ReservationId),
}

/// What is known of wishes.
#[derive(Debug, Default)]
struct Known {
    /// By key: what was acknowledged.
    counted: BTreeMap<String, u64>,
    /// By key: what was sent and not acknowledged, which may be counted.
    perhaps: BTreeMap<String, u64>,
    journaled: u64,
    waiting: Vec<Wish>,
    under_way: usize,
}

impl Known {
    fn next(&mut self) -> Option<Wish> {
        let next = self.waiting.pop();
        self.under_way += usize::from(next.is_some());
        next
    }

    fn settle(&mut self, wish: Wish, acknowledged: bool, journaled: bool) {
        self.journaled += u64::from(journaled);
        self.under_way -= 1;
        let sum = match &wish {
            Wish::Named(_) | Wish::Release(_) if !acknowledged => return self.waiting.push(wish),
            Wish::Named(_) => &mut self.counted,
            Wish::Unnamed(_) if acknowledged => &mut self.counted,
            Wish::Unnamed(_) => &mut self.perhaps,
            Wish::Release(_) => return,
        };
        if let Wish::Named(of) | Wish::Unnamed(of) = wish {
            *sum.entry(of.api_key.to_string()).or_default() += of.cost.tokens.steps();
        }
    }
}

/// A wish that is under way: should the process die, nobody has acknowledged it.
#[derive(Debug)]
struct UnderWay<'a> {
    known: &'a Mutex<Known>,
    wish: Option<Wish>,
}

impl UnderWay<'_> {
    fn end(mut self, acknowledged: bool, journaled: bool) {
        if let Some(wish) = self.wish.take() {
            self.known.lock().settle(wish, acknowledged, journaled);
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some(wish) = self.wish.take() {
            self.known.lock().settle(wish, false, false);
        }
    }
}

/// One life of the replica: it works until all is done or it is killed.
async fn live(options: RedisOptions, life: PoolRevision, known: &Mutex<Known>) {
    let ledger = RedisLedger::start(options).await.expect("a URL");
    let work = async |caller: u64| {
        for turn in 0_u64.. {
            // Much has to go on while something fails.
            tokio::time::sleep(Duration::from_millis(5 + 13 * (caller + turn) % 120)).await;
            let Some(wish) = known.lock().next() else { return };
            let under_way = UnderWay { known, wish: Some(wish.clone()) };
            let (acknowledged, journaled) = match &wish {
                Wish::Named(of) | Wish::Unnamed(of) => {
                    let answer = ledger.record(life, of).await;
                    (answer.is_ok(), matches!(answer, Ok(Kept::Journaled)))
                }
                Wish::Release(id) => {
                    let answer = ledger.release(*id, None).await;
                    (answer.is_ok(), matches!(answer, Ok(Kept::Journaled)))
                }
            };
            under_way.end(acknowledged, journaled);
        }
    };
    join_all((0..CALLERS).map(work)).await;
    // It drains until it is killed.
    std::future::pending().await
}

/// Has a life of the replica in a thread and a runtime of its own, until `kill`; nothing of it is left then.
fn have_a_life(
    options: RedisOptions,
    life: PoolRevision,
    known: Arc<Mutex<Known>>,
    kill: oneshot::Receiver<()>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            tokio::select! {
                () = live(options, life, &known) => {}
                // Whoever drops it wants the same.
                _ = kill => {}
            }
        });
        drop(runtime);
    })
}

/// What goes wrong next, or is well again.
async fn fail(random: &mut StdRng, proxy: &mut Proxy, journal: &SlowJournal, redis: &TestRedis) {
    match random.random_range(0..16) {
        0 => proxy.lose_next_answers(random.random_range(1..4)),
        1 => proxy.cut_after_requests(random.random_range(1..5)),
        2 => proxy.cut().await,
        3 | 4 => proxy.hang(true),
        5 => {
            proxy.refuse(true).await;
            proxy.cut().await;
        }
        6 | 7 => proxy.swallow(true),
        8 => journal.kept.set_full(true),
        9 | 10 => {
            // Refused for good, which ends batches of which it is known that they were not applied.
            redis.cli(&["CONFIG", "SET", "maxmemory", "1"]).await;
            tokio::time::sleep(Duration::from_millis(random.random_range(0..200))).await;
            redis.cli(&["CONFIG", "SET", "maxmemory", "0"]).await;
        }
        11 => {
            // What was under way is lost.
            proxy.hang(true);
            tokio::time::sleep(Duration::from_millis(random.random_range(0..400))).await;
            proxy.cut().await;
            proxy.hang(false);
        }
        _ => mend(proxy, journal).await,
    }
}

/// All is well again.
async fn mend(proxy: &mut Proxy, journal: &SlowJournal) {
    proxy.hang(false);
    proxy.swallow(false);
    // An answer that was swallowed is missing from what its connection says: no line goes on after that.
    proxy.cut().await;
    proxy.lose_next_answers(0);
    proxy.refuse(false).await;
    journal.kept.set_full(false);
}

/// One history; returns how many records went through the journal.
async fn a_history(seed: u64) -> u64 {
    let mut random = StdRng::seed_from_u64(seed);
    let redis = TestRedis::start().await;
    let observer = reached(&redis.url(), standing()).await;
    let mut proxy = Proxy::to(redis.address()).await;
    let journal = Arc::new(SlowJournal::default());
    let mut team = Team::usual(&observer, 1e12);
    let known = Arc::new(Mutex::new(Known::default()));
    let mut settled = 0;
    for n in 0..WISHES {
        let cost = 1 + n;
        let wish = match n % 8 {
            0 => {
                let id = team.must_hold(&a(10), HOUR_MS).await;
                settled += cost;
                Wish::Named(team.rig.consumption(&a(cost), "", &id.to_string()))
            }
            1 => Wish::Release(team.must_hold(&a(10), HOUR_MS).await),
            2 | 3 => {
                let call = Call::new(&format!("named-{n}"), tokens(cost));
                Wish::Named(team.rig.consumption(&call, &format!("key {n}"), ""))
            }
            _ => Wish::Unnamed(team.rig.consumption(&Call::new(&format!("plain-{n}"), tokens(cost)), "", "")),
        };
        known.lock().waiting.push(wish);
    }
    known.lock().waiting.shuffle(&mut random);

    let options = || RedisOptions {
        url: RedisUrl::parse(&proxy.url()).expect("a URL"),
        replica_id: "one".to_owned(),
        timeout: BUDGET,
        clock: standing(),
        journal: Arc::clone(&journal) as _,
        admits: true,
    };
    let options = options();
    for _ in 0..random.random_range(6..12) {
        let (kill, killed) = oneshot::channel();
        let life = have_a_life(options.clone(), team.rig.life, Arc::clone(&known), killed);
        for _ in 0..random.random_range(1..6) {
            fail(&mut random, &mut proxy, &journal, &redis).await;
            tokio::time::sleep(Duration::from_millis(random.random_range(0..250))).await;
        }
        drop(kill);
        tokio::task::spawn_blocking(|| life.join()).await.expect("no panic").expect("no panic");
    }
    mend(&mut proxy, &journal).await;
    let (kill, killed) = oneshot::channel();
    let life = have_a_life(options, team.rig.life, Arc::clone(&known), killed);
    until("all is acknowledged", async || {
        let known = known.lock();
        known.waiting.is_empty() && known.under_way == 0
    })
    .await;
    until("the journal is empty", async || journal.is_empty()).await;
    drop(kill);
    tokio::task::spawn_blocking(|| life.join()).await.expect("no panic").expect("no panic");

    let usage = team.usage().await;
    let known = known.lock();
    assert_eq!(usage.open_reservations, 0, "seed {seed}");
    assert_eq!(known.counted.get("a"), Some(&settled), "seed {seed}: each was acknowledged once");
    for (name, sum) in &known.counted {
        let consumed = usage.keys.get(&key(name)).map_or(0.0, |of| of[0].0);
        assert_eq!(consumed, *sum as f64, "seed {seed}: {name} was acknowledged");
    }
    for (name, sum) in &known.perhaps {
        let consumed = usage.keys.get(&key(name)).map_or(0.0, |of| of[0].0);
        assert!(consumed == 0.0 || consumed == *sum as f64, "seed {seed}: {name} has {consumed} of {sum}");
    }
    println!(
        "seed {seed}: {} keys acknowledged, {} answers through the journal, {} perhaps",
        known.counted.len(),
        known.journaled,
        known.perhaps.len()
    );
    known.journaled
}

#[tokio::test]
async fn whatever_fails_and_whenever_a_replica_dies_what_was_acknowledged_is_counted_once() {
    if redis_is_missing() {
        return;
    }
    let journaled: u64 = join_all(seeds().map(a_history)).await.into_iter().sum();
    assert!(journaled > 0, "there were outages");
}
