//! The program: a command line, done to its end.

use std::process::ExitCode;

use clap::Parser;
use quota_share::cli::Cli;

#[tokio::main]
async fn main() -> ExitCode {
    Cli::parse().run().await
}
