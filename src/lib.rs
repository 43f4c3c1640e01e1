//! A service that shares the quota of upstream LLM accounts fairly among API keys.

pub mod app;
pub mod clock;
pub mod config;
pub mod core;
