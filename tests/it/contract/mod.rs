//! What the contract in `proto/` promises beyond the scenarios.

mod admin;
mod decisions;
mod degraded;
mod infrastructure;
mod large_pool;
mod pages;
mod refusals;
mod settings;
mod switching;
