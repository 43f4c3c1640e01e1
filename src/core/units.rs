//! How quota is counted, and how high.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a dimension counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Unit {
    /// Per cent of the provider's plan.
    Percent,
    /// Upstream requests.
    Requests,
    /// Model tokens, prompt and completion together.
    Tokens,
    /// US dollars.
    Usd,
}

impl Unit {
    /// Every unit, in the order of the contract.
    pub const ALL: [Unit; 4] = [Unit::Percent, Unit::Requests, Unit::Tokens, Unit::Usd];

    /// The unit's name in messages, documents and database rows.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Percent => "percent",
            Unit::Requests => "requests",
            Unit::Tokens => "tokens",
            Unit::Usd => "usd",
        }
    }

    /// The unit of this [`name`](Unit::name).
    pub fn from_name(name: &str) -> Option<Unit> {
        Unit::ALL.into_iter().find(|unit| unit.name() == name)
    }

    /// How many integer steps make one of the unit: stored amounts count steps.
    pub const fn steps_per_one(self) -> f64 {
        match self {
            Unit::Percent => 1e6,
            Unit::Requests | Unit::Tokens => 1.0,
            Unit::Usd => 1e9,
        }
    }

    /// The most of the unit that one input may name: [`Amount::MAX`] in the unit.
    pub const fn max_input(self) -> f64 {
        Amount::MAX.0 as f64 / self.steps_per_one()
    }

    /// `value` in steps, not rounded: for limits, caps and shares.
    pub fn to_steps(self, value: f64) -> f64 {
        value * self.steps_per_one()
    }

    /// `steps` in the unit, as shown to clients.
    pub fn from_steps(self, steps: f64) -> f64 {
        steps / self.steps_per_one()
    }

    /// `value` as a stored amount: rounded half to even to the unit's step.
    ///
    /// `None` if it is not a number, negative or above [`max_input`](Unit::max_input).
    pub fn amount(self, value: f64) -> Option<Amount> {
        let steps = self.to_steps(value).round_ties_even();
        // NaN fails both comparisons.
        (value >= 0.0 && steps <= Amount::MAX.0 as f64).then_some(Amount(steps as u64))
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A quantity of quota in integer steps of its unit: one request, one token, 1e-9 US dollars, 1e-6 per cent.
///
/// Never above [`Amount::MAX`]: doubles, the only numbers that a Redis script knows, are exact below 2^53.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u64")]
pub struct Amount(u64);

impl From<u64> for Amount {
    /// [`Amount::saturating`].
    fn from(steps: u64) -> Self {
        Self::saturating(steps)
    }
}

impl Amount {
    /// Nothing.
    pub const ZERO: Amount = Amount(0);
    /// The ceiling of every input and of every stored sum.
    pub const MAX: Amount = Amount(9_000_000_000_000_000);

    /// `steps`, or the ceiling if that is less.
    pub const fn saturating(steps: u64) -> Amount {
        if steps > Amount::MAX.0 { Amount::MAX } else { Amount(steps) }
    }

    /// The number of steps.
    pub const fn steps(self) -> u64 {
        self.0
    }

    /// The number of steps as the rule computes with it; exact.
    pub const fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// How much of `self` can be added to `sum` before it reaches the ceiling of stored sums.
    pub const fn room_on(self, sum: u64) -> u64 {
        let room = Amount::MAX.0.saturating_sub(sum);
        if self.0 < room { self.0 } else { room }
    }
}

/// An instant: milliseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The instant `ms` milliseconds after the epoch.
    pub const fn from_unix_ms(ms: u64) -> Timestamp {
        Timestamp(ms)
    }

    /// Milliseconds since the epoch.
    pub const fn unix_ms(self) -> u64 {
        self.0
    }

    /// The instant `ms` milliseconds later.
    #[must_use]
    pub const fn plus_ms(self, ms: u64) -> Timestamp {
        Timestamp(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to `self`; 0 if it is not earlier.
    pub const fn ms_since(self, earlier: Timestamp) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// What one request costs, or is expected to cost, in each unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cost {
    /// Upstream requests.
    pub requests: Amount,
    /// Model tokens.
    pub tokens: Amount,
    /// US dollars.
    pub usd: Amount,
    /// Per cent of the plan, where the provider states the cost of a request so.
    pub percent: Amount,
}

impl Cost {
    /// The part of the cost that dimensions of `unit` count.
    pub const fn of(&self, unit: Unit) -> Amount {
        match unit {
            Unit::Percent => self.percent,
            Unit::Requests => self.requests,
            Unit::Tokens => self.tokens,
            Unit::Usd => self.usd,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_rounded_half_to_even_to_the_step_of_its_unit_or_refused() {
        use Unit::{Percent, Requests, Tokens, Usd};

        // unit | value | steps
        let cases: &[(Unit, f64, Option<u64>)] = &[
            (Usd, 0.000_1, Some(100_000)),
            (Usd, 0.4e-9, Some(0)),                          // below half a step
            (Usd, 0.5e-9, Some(0)),                          // half to even: down
            (Usd, 1.5e-9, Some(2)),                          // half to even: up
            (Percent, 0.29, Some(290_000)),                  //
            (Tokens, 9e15, Some(9_000_000_000_000_000)),     // the ceiling itself
            (Tokens, 9e15 + 2.0, None),                      // past it
            (Usd, 9_000_000.0, Some(9_000_000_000_000_000)), // the ceiling in dollars
            (Usd, 9_000_001.0, None),                        //
            (Requests, -1.0, None),                          //
            (Usd, f64::NAN, None),                           //
            (Usd, f64::INFINITY, None),                      //
            (Usd, -0.0, Some(0)),                            //
        ];
        for &(unit, value, want) in cases {
            assert_eq!(unit.amount(value).map(Amount::steps), want, "{value} {unit}");
        }
    }

    #[test]
    fn a_million_small_costs_add_up_exactly() {
        let step = Unit::Usd.amount(0.000_1).unwrap().steps();
        assert_eq!(Unit::Usd.from_steps((step * 1_000_000) as f64), 100.0);
    }
}
