//! What one replica admits of a pool by itself while the shared counters are out of reach: the failure mode FAIL_LOCAL.
//!
//! It knows what the counters held when they last answered, and how many replicas there are, and supposes that each of
//! them does as it does itself: what it admits counts as many times. With L the limit and `ut` what was used then, that is
//! to admit (L - ut) / replicas more, and of one key in strict mode (F - uk) / replicas: together they stay within the
//! limit. While some replicas still share the counters, each that is cut off may take such a slice above it.

use std::collections::HashMap;

use super::{
    admission::{AccountReading, Counter, Counters, Reading},
    charge::{Charge, CounterKey, PerCheck},
    ids::ApiKeyId,
    ledger::RESERVE_MS_MAX,
    units::{Amount, Timestamp},
    window::{SlidingCounter, Window},
};

/// See the module.
#[derive(Debug, Default)]
pub struct LocalShare {
    pool: HashMap<CounterKey, Known>,
    keys: HashMap<ApiKeyId, HashMap<CounterKey, Known>>,
}

/// What is known of one counter.
#[derive(Debug, Default)]
struct Known {
    heard: Counter,
    heard_at: Timestamp,
    accounts: Vec<AccountReading>,
    admitted: SlidingCounter,
    recorded: SlidingCounter,
}

impl Known {
    /// What was admitted here, or has been recorded if that turned out to be more, in whole steps.
    fn spent(&self, window: Window, at: Timestamp) -> f64 {
        self.admitted.at(window, at).max(self.recorded.at(window, at)).ceil()
    }

    /// What the counter holds at `at` if so many replicas do as this one.
    fn seen(&self, window: Window, at: Timestamp, replicas: u64) -> Counter {
        // By then every reservation that it has heard of has ended.
        let is_old = at.ms_since(self.heard_at) >= RESERVE_MS_MAX;
        let held = if is_old { 0 } else { self.heard.reserved };
        let spent = (self.spent(window, at) * replicas as f64) as u64;
        Counter { reserved: held.saturating_add(spent), ..self.heard }
    }

    fn forget_spent(&mut self) {
        (self.admitted, self.recorded) = Default::default();
    }
}

impl LocalShare {
    /// The shared counters have answered, and `holds` what was asked for, which is not in the reading yet. `all_counted`:
    /// what was spent here is in them.
    pub fn heard(&mut self, charge: &Charge, reading: &Reading, holds: bool, all_counted: bool) {
        if all_counted {
            self.pool.values_mut().for_each(Known::forget_spent);
            self.keys.values_mut().flat_map(HashMap::values_mut).for_each(Known::forget_spent);
        }
        let own = self.keys.entry(charge.api_key.clone()).or_default();
        for (check, counters) in charge.checks.iter().zip(&reading.counters) {
            let held = if holds { check.estimate.steps() } else { 0 };
            let after = |of: Counter| Counter { reserved: of.reserved.saturating_add(held), ..of };
            let key = own.entry(check.counter.clone()).or_default();
            (key.heard, key.heard_at, key.accounts) =
                (after(counters.key), reading.at, counters.accounts.clone());
            let pool = self.pool.entry(check.counter.clone()).or_default();
            (pool.heard, pool.heard_at, pool.accounts) =
                (after(counters.pool), reading.at, counters.accounts.clone());
        }
    }

    /// Admits what `charge` asks for at `at` if it is within the slice of one of so many replicas: `None` if the pool has not
    /// been heard of.
    pub fn admit(&mut self, charge: &Charge, at: Timestamp, replicas: u64) -> Option<bool> {
        let admits = self.admits(charge, at, replicas)?;
        if admits {
            let amounts = charge.checks.iter().map(|check| (&check.counter, check.estimate));
            self.spend(&charge.api_key, amounts, at, |known| &mut known.admitted);
        }
        Some(admits)
    }

    /// What [`admit`](Self::admit) would do, without any effect.
    pub fn admits(&self, charge: &Charge, at: Timestamp, replicas: u64) -> Option<bool> {
        let own = self.keys.get(&charge.api_key);
        let mut counters = PerCheck::new();
        for check in &charge.checks {
            let pool = self.pool.get(&check.counter).filter(|_| check.counter.model.is_none());
            if pool.is_none() && check.counter.model.is_none() {
                return None;
            }
            let key = own.and_then(|own| own.get(&check.counter));
            let window = check.counter.dimension.window;
            let seen = |known: Option<&Known>| {
                known.map(|known| known.seen(window, at, replicas)).unwrap_or_default()
            };
            let accounts = pool.map(|pool| accounts(pool, key)).unwrap_or_default();
            counters.push(Counters { key: seen(key), pool: seen(pool), accounts });
        }
        let mut scaled = charge.clone();
        for check in &mut scaled.checks {
            check.estimate = Amount::saturating(check.estimate.steps().saturating_mul(replicas));
        }
        let reading = Reading { at, counters, releases: Vec::new() };
        Some(scaled.findings(&reading).iter().all(|finding| finding.block.is_none()))
    }

    /// A cost was taken here that the shared counters have not heard of yet.
    pub fn recorded(&mut self, api_key: &ApiKeyId, counts: &[(CounterKey, Amount)], at: Timestamp) {
        let amounts = counts.iter().map(|(counter, amount)| (counter, *amount));
        self.spend(api_key, amounts, at, |known| &mut known.recorded);
    }

    fn spend<'a>(
        &mut self,
        api_key: &ApiKeyId,
        amounts: impl Iterator<Item = (&'a CounterKey, Amount)>,
        at: Timestamp,
        on: fn(&mut Known) -> &mut SlidingCounter,
    ) {
        let own = self.keys.entry(api_key.clone()).or_default();
        for (counter, amount) in amounts {
            let bucket = counter.dimension.window.bucket(at);
            on(own.entry(counter.clone()).or_default()).add(bucket, amount);
            if let Some(pool) = self.pool.get_mut(counter) {
                on(pool).add(bucket, amount);
            }
        }
    }
}

/// The accounts as the pool was last heard of, with the part that the key had when it was. Nothing is known of which of them
/// is to serve.
fn accounts(pool: &Known, key: Option<&Known>) -> Vec<AccountReading> {
    let own = |index: usize| key.and_then(|key| key.accounts.get(index));
    let all = pool.accounts.iter().enumerate().map(|(index, account)| AccountReading {
        serving: false,
        key_part: own(index).map_or(0.0, |own| own.key_part),
        slid: account.slid.map(|(_, total)| {
            (own(index).and_then(|own| own.slid).map(|(own, _)| own).unwrap_or_default(), total)
        }),
        ..*account
    });
    all.collect()
}
