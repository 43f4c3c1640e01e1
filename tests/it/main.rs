//! The promises of the service, asked of it from outside: of the core by its values, of the server over gRPC, of the
//! program as a process.

mod account_properties;
mod auth;
mod brute_force;
mod cases;
mod codex_hour;
mod command_line;
mod contract;
mod drivers;
mod drivers_agree;
mod failed_commits;
mod harness;
mod headers;
mod hostile_input;
mod import;
mod kill;
mod ledger_contract;
mod ledger_ids;
mod many_clients;
mod memory_journal;
mod model;
mod oracle;
mod readme_tour;
mod redis_cluster_faults;
mod redis_faults;
mod redis_harness;
mod redis_keeps;
mod redis_team;
mod replay;
mod reservations_outlive;
mod rule_properties;
mod scenarios;
mod sick_disk;
mod signals;
mod taking_over;
mod telemetry;
