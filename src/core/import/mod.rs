//! Moving in and out: what the pools of other programs become here, and the configuration as one document.
//!
//! | file          | what it reads                                                            |
//! |---------------|--------------------------------------------------------------------------|
//! | [`legacy`]    | the JSON array that the OmniRoute dashboard kept                         |
//! | [`omniroute`] | the rows of an OmniRoute installation's database                         |
//! | [`document`]  | what this service itself exports, and how it writes it                   |
//! | `mend`        | shared by the first two: oddities become valid, each with a warning      |

pub mod document;
pub mod legacy;
mod mend;
pub mod omniroute;

use super::{plan::PlanSpec, pool::PoolSpec, settings::StoredSettings};

/// Most warnings that are told of one import: the rest is counted.
const WARNINGS_MAX: usize = 1_000;

/// What is brought from elsewhere, not yet checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Import {
    /// Pools; one without an id is given one.
    pub pools: Vec<PoolSpec>,
    /// Plans of connections.
    pub plans: Vec<PlanSpec>,
    /// Settings to store.
    pub settings: StoredSettings,
    /// What was changed to make it fit.
    pub warnings: Warnings,
}

/// Things that whoever imports should know, up to a bound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Warnings {
    told: Vec<String>,
    untold: usize,
}

impl Warnings {
    /// Adds one more.
    pub fn add(&mut self, warning: impl Into<String>) {
        if self.told.len() < WARNINGS_MAX {
            self.told.push(warning.into());
        } else {
            self.untold += 1;
        }
    }

    /// All that are told, and how many are not.
    pub fn into_vec(mut self) -> Vec<String> {
        if self.untold > 0 {
            self.told.push(format!("and {} more warnings", self.untold));
        }
        self.told
    }
}
