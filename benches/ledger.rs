//! A driver without a server: operations and commits a second, by operations in flight, over 100,000 keys in 1,000
//! pools; and the memory that a key takes.
//!
//! ```sh
//! cargo bench --bench ledger
//! ```

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
        sqlite::{SqliteLedger, SqliteStore},
    },
};

use crate::world::{DIMENSIONS, Size, World};

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
    ledger: SqliteLedger,
    /// Commits since the start.
    commits: Arc<AtomicU64>,
    started: AtomicU64,
    done: AtomicU64,
}

#[tokio::main]
async fn main() {
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let store = SqliteStore::open(folder.path()).await.expect("a new database");
    let world = World::new(SIZE);
    let commits = Arc::new(AtomicU64::new(0));
    let committed = Arc::clone(&commits);
    let committed = move |_| {
        committed.fetch_add(1, Ordering::Relaxed);
    };
    let ledger = SqliteLedger::start(&store, &world.directory, Arc::new(SystemClock), committed);
    let ledger = ledger.await.expect("nothing to load");
    let bench =
        Arc::new(Bench { world, ledger, commits, started: AtomicU64::new(0), done: AtomicU64::new(0) });

    let before = memory();
    bench.fill().await;
    let bytes = (memory() - before) as f64 / (bench.world.askers.len() * DIMENSIONS.len()) as f64;
    println!("memory: {bytes:.0} bytes for a key in a dimension\n");

    println!(
        "| operations | in flight | a second | commits a second | operations a commit |\n|---|---|---|---|---|"
    );
    for operations in [Operations::Check, Operations::ReserveAndSettle, Operations::Record] {
        for in_flight in IN_FLIGHT {
            let (done, commits) = Arc::clone(&bench).run(operations, in_flight).await;
            let each = if commits == 0.0 { "".to_owned() } else { format!("{:.1}", done / commits) };
            println!("| {operations:?} | {in_flight} | {done:.0} | {commits:.0} | {each} |");
        }
    }
    bench.ledger.close().await;
    store.close().await;
}

impl Bench {
    /// Every key uses something in every dimension.
    async fn fill(&self) {
        for keys in self.world.askers.chunks(256) {
            let records = keys.iter().map(|asker| async move {
                let (pool, consumption) = self.world.consumption(asker, None);
                self.ledger.record(pool, &consumption).await.expect("the disk takes it");
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
                self.ledger.check(&self.world.charge(asker)).await.expect("it is in memory");
                1
            }
            Operations::Record => {
                let (pool, consumption) = self.world.consumption(asker, Some(&name));
                self.ledger.record(pool, &consumption).await.expect("the disk takes it");
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
                let held =
                    self.ledger.enforce(&self.world.charge(asker), wish).await.expect("the disk takes it");
                let id = held.reserved.expect("the plan never binds").id;
                let (pool, mut consumption) = self.world.consumption(asker, None);
                let call = CallId::of_reservation_id(&id.to_string());
                consumption.reservation = Some(Settlement { call, id: Some(id), held_elsewhere: false });
                self.ledger.record(pool, &consumption).await.expect("the disk takes it");
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
