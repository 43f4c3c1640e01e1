//! One decision, without a server and without a store: from key and connection to the verdict.
//!
//! ```sh
//! cargo bench --bench decide
//! ```
//!
//! Times come from criterion. Instructions, which do not depend on what else the machine does, are counted by valgrind
//! where it is installed: this program runs under it with two numbers of decisions, and the difference is theirs alone.

#[allow(dead_code)]
mod world;

use std::{collections::HashMap, hint::black_box, process::Command};

use criterion::Criterion;
use quota_share::core::{admission::Verdict, ids::PoolRevision, ledger::PoolLedger};

use crate::world::{NOW, Size, World};

const SIZES: [Size; 3] =
    [Size { pools: 1, keys: 10 }, Size { pools: 1, keys: 10_000 }, Size { pools: 1_000, keys: 100 }];
/// Decisions of the two runs: so many more that what differs in making the pools does not show.
const COUNTED: [usize; 2] = [1_000, 201_000];
/// The argument of a run under valgrind, followed by the position of a size and a number of decisions.
const RUN: &str = "--run";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, run, size, decisions] = args.as_slice()
        && run == RUN
    {
        let number = |text: &str| text.parse::<usize>().expect("a number");
        let mut decisions_of = Decisions::new(SIZES[number(size)]);
        (0..number(decisions)).for_each(|_| decisions_of.next());
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    for size in SIZES {
        let mut decisions = Decisions::new(size);
        criterion.bench_function(&name(size), |bencher| bencher.iter(|| decisions.next()));
    }
    criterion.final_summary();
    count_instructions();
}

fn name(size: Size) -> String {
    format!("{} pools of {} keys", size.pools, size.keys)
}

fn count_instructions() {
    let mut first = None;
    for (position, size) in SIZES.into_iter().enumerate() {
        let [few, many] = COUNTED.map(|decisions| instructions(position, decisions));
        let (Some(few), Some(many)) = (few, many) else {
            println!("instructions are not counted: valgrind is not installed");
            return;
        };
        let each = (many - few) / (COUNTED[1] - COUNTED[0]) as f64;
        let ratio = each / *first.get_or_insert(each);
        println!("{}: {each:.0} instructions a decision, {ratio:.2} of the first", name(size));
    }
}

/// Of a whole run; `None` without valgrind.
fn instructions(position: usize, decisions: usize) -> Option<f64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe().ok()?)
        .args([RUN, &position.to_string(), &decisions.to_string()])
        .output()
        .ok()?;
    let report = String::from_utf8_lossy(&output.stderr);
    let (_, counted) = report.split_once("Collected : ")?;
    counted.split_whitespace().next()?.parse().ok()
}

/// Pools whose keys have all used something, asked one key after the other.
struct Decisions {
    world: World,
    ledgers: HashMap<PoolRevision, PoolLedger>,
    made: usize,
}

impl Decisions {
    fn new(size: Size) -> Self {
        let world = World::new(size);
        let mut ledgers = HashMap::new();
        for asker in &world.askers {
            let (pool, consumption) = world.consumption(asker, None);
            let ledger = ledgers.entry(pool).or_insert_with(|| PoolLedger::new(pool, NOW));
            ledger.record(&consumption, NOW).expect("it contradicts nothing");
            ledger.take_changes();
        }
        Self { world, ledgers, made: 0 }
    }

    fn next(&mut self) {
        self.made += 1;
        let charge = self.world.charge(self.world.nth(self.made));
        let ledger = self.ledgers.get_mut(&charge.pool).expect("it has recorded");
        let reading = ledger.check(&charge, NOW);
        let verdict = black_box(Verdict::of(&charge, &reading));
        assert!(verdict.block().is_none(), "the plan never binds");
    }
}
