//! The real server and a real client, next to bare echoes of the same messages: requests a second, and what a caller
//! waits, by calls in flight, over 100,000 keys in 1,000 pools.
//!
//! ```sh
//! cargo bench --bench server                                # everything: about five minutes
//! cargo bench --bench server -- --driver redis              # the same with counters in a Redis of its own
//! cargo bench --bench server -- --in-flight 256 --rounds 1  # a quick look
//! ```
//!
//! Client and server share the machine, and other things on it make noise: read the ratios to the fastest echo of the
//! same run, which is the most that any server of this kind could reach. A cell is the round in the middle: calls a
//! second, what half of the callers waited at most and what all but one in a hundred did, the processor time of the
//! server for each call, and the ratio.

mod load;
#[path = "../redis.rs"]
mod redis;
mod setting;
mod target;

use std::{collections::BTreeMap, time::Duration};

use clap::{Parser, ValueEnum};

use crate::{
    load::{Calls, Load, Measured},
    redis::Redis,
    target::{Echo, Target},
};

/// The contract as a client sees it; the echoes serve it too.
#[allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    missing_debug_implementations,
    clippy::all,
    clippy::unwrap_used
)]
mod pb {
    include!(concat!(env!("OUT_DIR"), "/quotashare.v1.rs"));
}

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What cannot be taken back is counted over this many keys, in pools of a hundred.
const KEYS: usize = 100_000;

#[derive(Debug, Parser)]
struct Args {
    /// Seconds for each measurement, after a quarter of it to warm up
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// How often everything is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Calls in flight, comma-separated
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256")]
    in_flight: Vec<usize>,
    /// Where the service counts
    #[arg(long, value_enum, default_value_t = Driver::Sqlite)]
    driver: Driver,
    /// Which calls of the service, comma-separated
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Calls::ALL)]
    calls: Vec<Calls>,
    /// Serve as a bare echo: this process is one of those that are measured
    #[arg(long, hide = true)]
    echo: Option<Echo>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Driver {
    Sqlite,
    Redis,
}

/// One column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Column {
    Echo(Echo),
    Service(Calls),
}

fn main() -> Result<(), Failure> {
    let args = Args::parse();
    if let Some(echo) = args.echo {
        return target::serve_echo(echo);
    }
    let redis = (args.driver == Driver::Redis).then(Redis::start);
    if let Some(redis) = &redis {
        println!("a PING of Redis takes {:.3} ms, the median of many", redis.ping().as_secs_f64() * 1e3);
    }
    let service = Target::service(redis.as_ref().map(Redis::url))?;
    let empty = service.memory()?;
    setting::fill(&service, KEYS)?;
    let service = service.restarted()?;
    let each = (service.memory()? - empty) as f64 / KEYS as f64;
    println!(
        "{KEYS} keys in {} pools: a start takes {:.2?}; a key that has used two dimensions takes {each:.0} bytes of memory, \
         its allocation and its part of pool and plan included\n",
        setting::pools(KEYS),
        service.started_in
    );
    let measured = measure(&args, &service)?;
    report(&args, &measured);
    let service = service.restarted()?;
    println!("\nA start with all that was recorded and remembered takes {:.2?}", service.started_in);
    Ok(())
}

type Rounds = BTreeMap<(usize, Column), Vec<Measured>>;

fn measure(args: &Args, service: &Target) -> Result<Rounds, Failure> {
    let mut all = Rounds::new();
    for round in 1..=args.rounds {
        for &in_flight in &args.in_flight {
            let mut load = |column, target: &Target, calls| -> Result<(), Failure> {
                let load = Load { calls, in_flight, time: Duration::from_secs_f64(args.seconds) };
                let measured = load.run(target)?;
                eprintln!("round {round}, {in_flight} in flight, {column:?}: {measured}");
                all.entry((in_flight, column)).or_default().push(measured);
                Ok(())
            };
            for echo in Echo::ALL {
                let target = Target::echo(echo)?;
                load(Column::Echo(echo), &target, Calls::Check)?;
            }
            for &calls in &args.calls {
                load(Column::Service(calls), service, calls)?;
            }
        }
    }
    Ok(all)
}

fn report(args: &Args, all: &Rounds) {
    let columns: Vec<Column> = Echo::ALL
        .map(Column::Echo)
        .into_iter()
        .chain(args.calls.iter().copied().map(Column::Service))
        .collect();
    let header: Vec<String> = columns.iter().map(|column| column.name()).collect();
    println!("| in flight | {} |", header.join(" | "));
    println!("|---|{}", "---|".repeat(columns.len()));
    for &in_flight in &args.in_flight {
        let of = |column: &Column| median(&all[&(in_flight, *column)]);
        let fastest =
            Echo::ALL.map(|echo| of(&Column::Echo(echo)).per_second()).into_iter().fold(0.0, f64::max);
        let cells = columns.iter().map(|column| {
            let measured = of(column);
            format!("{measured}, **{:.2}**", measured.per_second() / fastest)
        });
        println!("| {in_flight} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
}

/// The round in the middle, by its rate.
fn median(rounds: &[Measured]) -> &Measured {
    let mut rounds: Vec<&Measured> = rounds.iter().collect();
    rounds.sort_by(|a, b| a.per_second().total_cmp(&b.per_second()));
    rounds[rounds.len() / 2]
}

impl Column {
    fn name(&self) -> String {
        match self {
            Column::Echo(Echo::Single) => "echo, one runtime".to_owned(),
            Column::Echo(Echo::PerCore) => "echo, one runtime a core".to_owned(),
            Column::Echo(Echo::Multi) => "echo, multi-threaded".to_owned(),
            Column::Service(Calls::Check) => "check-only Enforce".to_owned(),
            Column::Service(Calls::ReserveAndSettle) => "Enforce with reservation, settled".to_owned(),
            Column::Service(Calls::Record) => "RecordConsumption".to_owned(),
        }
    }
}
