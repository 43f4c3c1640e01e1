//! The decision core: what may be used, by whom, and why not.
//!
//! Everything here is a plain value or a plain function of plain values. The core does not await, read a clock, draw a
//! random number, log, or touch a socket; whoever calls it hands in the time and the counters.
//!
//! Read in this order:
//!
//! | file            | question it answers                                                  |
//! |-----------------|----------------------------------------------------------------------|
//! | [`units`]       | how do we count, and how high?                                       |
//! | [`ids`]         | what are things called, and how is a repeated call recognised?       |
//! | [`window`]      | how long is a window, and what is in it at an instant?               |
//! | [`plan`]        | what may an account use?                                             |
//! | [`catalog`]     | which plans does the service know without being told?                |
//! | [`pool`]        | who shares what, in which proportion?                                |
//! | [`settings`]    | what applies where a pool has nothing of its own?                    |
//! | [`directory`]   | all pools and plans at one revision: what may change, and to what?   |
//! | [`import`]      | what do others' pools become here, and how does the configuration leave? |
//! | [`charge`]      | what would this request use, up to which bounds?                     |
//! | [`admission`]   | given the counters, is it allowed? The one definition of the rule    |
//! | [`retry_after`] | if not, when?                                                        |
//! | [`burn_rate`]   | how fast is it consumed?                                             |
//! | [`headers`]     | what does a provider say of an account in a response's headers?      |
//! | [`account`]     | what is known of an account, and how much of it is whose?            |
//! | [`ledger`]      | one pool's counters, reservations and remembered ids                 |

pub mod account;
pub mod admission;
pub mod burn_rate;
pub mod catalog;
pub mod charge;
pub mod directory;
pub mod document;
pub mod headers;
pub mod ids;
pub mod import;
pub mod ledger;
pub mod local_share;
pub mod memory;
pub mod plan;
pub mod pool;
pub mod retry_after;
pub mod settings;
pub mod units;
pub mod window;
