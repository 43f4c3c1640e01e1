//! The program: configuration, then the service until it is told to stop.

use std::{process::ExitCode, sync::Arc};

use clap::Parser;
use quota_share::{
    app,
    clock::SystemClock,
    config::{Args, Config, OtelVars},
    telemetry::Tracing,
};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args { otel: OtelVars::from_env(), ..Args::parse() };
    let config = match Config::check(&args) {
        Ok(config) => config,
        Err(mistakes) => {
            eprintln!("{mistakes}");
            return ExitCode::from(2);
        }
    };
    match run(config).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until SIGTERM or SIGINT.
async fn run(config: Config) -> Result<(), Box<dyn std::error::Error>> {
    let tracing = Tracing::start(&config.otlp)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let running = app::start(config, Arc::new(SystemClock)).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    running.stop().await;
    tracing.stop().await;
    Ok(())
}
