//! A service that shares the quota of upstream LLM accounts fairly among API keys.
//!
//! ```text
//!   transport ──▶ service ──▶ core ◀── store
//!   gRPC,         one async   pure     counters in memory and
//!   wire types    fn a use             SQLite, or in Redis
//!                 case
//! ```
//!
//! Arrows are "knows about". `core` knows about nobody, so it is the place to start reading. Wire types stop at
//! `transport`; rows stop at `store`. `app` is the one place that knows everybody.

pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod core;
pub mod service;
pub mod store;
pub mod telemetry;
mod transport;
