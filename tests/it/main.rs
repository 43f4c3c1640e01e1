//! The promises of the decision core, asked of it from outside.

mod brute_force;
mod cases;
mod ledger_ids;
mod model;
mod oracle;
mod rule_properties;
