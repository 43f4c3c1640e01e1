//! What a run is asked for.

use std::{env, fmt, ops::RangeInclusive, str::FromStr};

use super::faults::FaultKind;

/// Ids are remembered for ten minutes, and records are sent again at the end.
const SECONDS: RangeInclusive<u64> = 1..=400;

/// See the module. The same setting has the same faults at the same times, as far as starting a process takes as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) replicas: usize,
    pub(super) clients: usize,
    /// Of load and faults.
    pub(super) seconds: u64,
    pub(super) seed: u64,
    pub(super) faults: Faults,
}

/// Which kinds of faults there are.
pub(super) type Faults = [bool; FaultKind::COUNT];

impl Setting {
    /// As `QUOTA_CHAOS_*` say; what is not set is as `tests/chaos` has it.
    pub(super) fn from_environment() -> Self {
        Self {
            replicas: number("QUOTA_CHAOS_REPLICAS", 3, 1..=16) as usize,
            clients: number("QUOTA_CHAOS_CLIENTS", 64, 1..=1_000) as usize,
            seconds: number("QUOTA_CHAOS_SECONDS", 120, SECONDS),
            seed: number("QUOTA_CHAOS_SEED", 1, 0..=u64::MAX),
            faults: faults("QUOTA_CHAOS_FAULTS"),
        }
    }

    /// As options of `tests/chaos`.
    pub(super) fn options(&self) -> String {
        let Self { replicas, clients, seconds, seed, faults } = self;
        let asked = FaultKind::EACH.into_iter().filter(|kind| faults[*kind as usize]);
        let faults = asked.map(FaultKind::name).collect::<Vec<_>>().join(",");
        format!(
            "--replicas {replicas} --clients {clients} --seconds {seconds} --seed {seed} --faults {faults}"
        )
    }
}

fn number<T: FromStr + PartialOrd + fmt::Debug>(
    variable: &str,
    default: T,
    accepted: RangeInclusive<T>,
) -> T {
    let Ok(given) = env::var(variable) else { return default };
    let number = given.parse().ok().filter(|number| accepted.contains(number));
    number.unwrap_or_else(|| panic!("{variable}={given}: set it to a number in {accepted:?}"))
}

fn faults(variable: &str) -> Faults {
    let Ok(given) = env::var(variable) else { return FaultKind::ALL };
    let mut faults = [false; FaultKind::COUNT];
    for name in given.split(',').filter(|name| !name.is_empty()) {
        let kind = FaultKind::EACH.into_iter().find(|kind| kind.name() == name);
        let kind = kind.unwrap_or_else(|| {
            let accepted = FaultKind::EACH.map(FaultKind::name).join(",");
            panic!("{variable}={given}: {name:?} is no fault; name some of {accepted}")
        });
        faults[kind as usize] = true;
    }
    faults
}
