//! The drivers without a server: operations and commits a second, by operations in flight, over 100,000 keys in 1,000
//! pools; and the memory that a key takes, here or in Redis.
//!
//! ```sh
//! cargo bench --bench ledger [-- sqlite | redis]
//! ```

mod redis;
#[allow(dead_code)]
mod world;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use quota_share::{
    clock::SystemClock,
    core::{
        ids::CallId,
        ledger::{HoldRequest, Settlement},
    },
    store::{
        Ledger,
        redis::{RedisLedger, RedisOptions, RedisUrl},
        sqlite::{SqliteJournal, SqliteLedger, SqliteStore},
    },
};

use crate::{
    redis::Redis,
    world::{DIMENSIONS, Size, World},
};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SIZE: Size = Size { pools: 1_000, keys: 100 };
const IN_FLIGHT: [usize; 4] = [1, 16, 64, 256];
const TIME: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
enum Operations {
    Check,
    ReserveAndSettle,
    Record,
}

/// What the loops share.
struct Bench {
    world: World,
    ledger: Arc<dyn Ledger>,
    /// Commits since the start.
    commits: Arc<AtomicU64>,
    started: AtomicU64,
    done: AtomicU64,
}

#[tokio::main]
async fn main() {
    let only = std::env::args().nth(1).filter(|argument| !argument.starts_with("--"));
    let wanted = |driver: &str| only.as_deref().is_none_or(|only| only == driver);
    if wanted("sqlite") {
        sqlite().await;
    }
    if wanted("redis") {
        redis().await;
    }
}

async fn sqlite() {
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let store = SqliteStore::open(folder.path()).await.expect("a new database");
    let world = World::new(SIZE);
    let commits = Arc::new(AtomicU64::new(0));
    let committed = Arc::clone(&commits);
    let committed = move |_| {
        committed.fetch_add(1, Ordering::Relaxed);
    };
    let ledger = SqliteLedger::start(&store, &world.directory, Arc::new(SystemClock), committed);
    let ledger = Arc::new(ledger.await.expect("nothing to load"));
    println!("## sqlite\n");
    Bench::new(world, ledger, commits).run_all(memory).await;
    store.close().await;
}

async fn redis() {
    let redis = Redis::start();
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let store = SqliteStore::open(folder.path()).await.expect("a new database");
    let options = RedisOptions {
        url: RedisUrl::parse(&redis.url()).expect("a URL"),
        replica_id: "bench".to_owned(),
        timeout: Duration::from_secs(1),
        clock: Arc::new(SystemClock),
        journal: Arc::new(SqliteJournal::open(&store).await.expect("a new database")),
        admits: true,
    };
    let ledger = Arc::new(RedisLedger::start(options).await.expect("a URL that can be used"));
    while ledger.condition().failing.is_some() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("\n## redis\n");
    Bench::new(World::new(SIZE), ledger, Arc::default()).run_all(|| redis.memory()).await;
}

impl Bench {
    fn new(world: World, ledger: Arc<dyn Ledger>, commits: Arc<AtomicU64>) -> Arc<Self> {
        Arc::new(Self { world, ledger, commits, started: AtomicU64::new(0), done: AtomicU64::new(0) })
    }

    async fn run_all(self: Arc<Self>, memory: impl Fn() -> u64) {
        let before = memory();
        self.fill().await;
        let bytes = (memory() - before) as f64 / (self.world.askers.len() * DIMENSIONS.len()) as f64;
        println!("memory: {bytes:.0} bytes for a key in a dimension\n");
        println!(
            "| operations | in flight | a second | commits a second | operations a commit |\n|---|---|---|---|---|"
        );
        for operations in [Operations::Check, Operations::Record, Operations::ReserveAndSettle] {
            for in_flight in IN_FLIGHT {
                let (done, commits) = Arc::clone(&self).run(operations, in_flight).await;
                let each = if commits == 0.0 { "".to_owned() } else { format!("{:.1}", done / commits) };
                println!("| {operations:?} | {in_flight} | {done:.0} | {commits:.0} | {each} |");
            }
        }
        self.ledger.close().await;
    }

    /// Every key uses something in every dimension.
    async fn fill(&self) {
        for keys in self.world.askers.chunks(256) {
            let records = keys.iter().map(|asker| async move {
                let (pool, consumption) = self.world.consumption(asker, None);
                self.ledger.record(pool, &consumption).await.expect("an answer");
            });
            futures::future::join_all(records).await;
        }
    }

    /// Operations and commits a second.
    async fn run(self: Arc<Self>, operations: Operations, in_flight: usize) -> (f64, f64) {
        let began = Instant::now();
        let until = began + TIME;
        let (done, commits) = (self.done.load(Ordering::Relaxed), self.commits.load(Ordering::Relaxed));
        let loops = (0..in_flight).map(|_| tokio::spawn(Arc::clone(&self).repeat(operations, until)));
        for ended in loops.collect::<Vec<_>>() {
            ended.await.expect("no operation fails");
        }
        let seconds = began.elapsed().as_secs_f64();
        let since = |count: &AtomicU64, before| (count.load(Ordering::Relaxed) - before) as f64 / seconds;
        (since(&self.done, done), since(&self.commits, commits))
    }

    async fn repeat(self: Arc<Self>, operations: Operations, until: Instant) {
        while Instant::now() < until {
            let number = self.started.fetch_add(1, Ordering::Relaxed);
            self.done.fetch_add(self.one(operations, number).await, Ordering::Relaxed);
        }
    }

    /// How many operations it took.
    async fn one(&self, operations: Operations, number: u64) -> u64 {
        let asker = self.world.nth(number as usize);
        let name = format!("{number:032x}");
        match operations {
            Operations::Check => {
                self.ledger.check(&self.world.charge(asker)).await.expect("an answer");
                1
            }
            Operations::Record => {
                let (pool, consumption) = self.world.consumption(asker, Some(&name));
                self.ledger.record(pool, &consumption).await.expect("an answer");
                1
            }
            Operations::ReserveAndSettle => {
                let wish = HoldRequest {
                    random: rand::random(),
                    connection: asker.1.clone(),
                    model: None,
                    reserve_for_ms: 60_000,
                    request_id: name,
                    fingerprint: self.world.fingerprint(&asker.0),
                };
                let held = self.ledger.enforce(&self.world.charge(asker), wish).await.expect("an answer");
                let id = held.reserved.expect("the plan never binds").id;
                let (pool, mut consumption) = self.world.consumption(asker, None);
                let call = CallId::of_reservation_id(&id.to_string());
                consumption.reservation = Some(Settlement { call, id: Some(id), held_elsewhere: false });
                self.ledger.record(pool, &consumption).await.expect("an answer");
                2
            }
        }
    }
}

/// Of this process, in bytes.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kB") * 1_024
}
