//! Replays a trace of real requests against a running quota-share, and shows what each key got of it.
//!
//! ```sh
//! cargo run --release                                                               # the service
//! cargo run --release --example replay -- tests/data/traces/azure_llm_2023_code.csv # the replay
//! ```
//!
//! It makes a pool and a plan of its own and deletes them at its end. What it does not change, `setting`, `trace` and `tally`, is
//! what `tests/it/replay.rs` checks the service with, in virtual time.

mod args;
mod run;
mod setting;
mod tally;
mod trace;

use std::{process::ExitCode, sync::Arc, time::Duration};

use clap::Parser;
use tonic::transport::{Channel, Endpoint};

use crate::{args::Args, tally::Tally};

/// The contract as a client sees it.
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

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> ExitCode {
    match replay(Args::parse()).await {
        Ok(tally) => {
            println!("{tally}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn replay(args: Args) -> Result<Tally, String> {
    let requests = args.requests()?;
    let (setting, windows) = args.setting(&requests)?;
    let channel = connect(&args.server).await?;
    let keys = args.demand.assign(requests.len(), setting.keys.len(), args.seed);
    let run = run::Run { channel, setting: Arc::new(setting), speed: args.speed };
    let tally = Tally::new(&run.setting, windows);
    tokio::select! {
        tally = run.whole(requests.into_iter().zip(keys).collect(), tally) => {
            run.clean_up().await;
            tally
        }
        _ = tokio::signal::ctrl_c() => {
            run.clean_up().await;
            Err("stopped".to_owned())
        }
    }
}

async fn connect(server: &str) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(server.to_owned())
        .map_err(|_| format!("--server {server:?} is not valid: use a URL such as http://127.0.0.1:50051"))?;
    endpoint.connect_timeout(CONNECT_TIMEOUT).connect().await.map_err(|_| {
        format!("nothing answers at {server}: start the service with `cargo run --release`, or name another with --server")
    })
}
