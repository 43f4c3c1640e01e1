//! The program: a command line, done to its end.

use std::process::ExitCode;

use clap::Parser;
use quota_share::cli::Cli;

/// Calls and their answers are many small pieces of memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> ExitCode {
    Cli::parse().run().await
}
