//! What is read from a ledger, for decisions and for people.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{AccountUsage, Hold, KeyCounters, PoolLedger, UsageReading};
use crate::core::{
    account::Account,
    admission::{AccountReading, Counter, Counters, Reading, Release},
    charge::{Charge, CounterKey, PerCheck},
    ids::{ApiKeyId, ConnectionId, ReservationId},
    plan::DimensionKey,
    retry_after::DEADLINES_FOLLOWED_MAX,
    units::Timestamp,
};

impl PoolLedger {
    /// Reads what `charge` needs, without any effect.
    pub fn check(&mut self, charge: &Charge, clock: Timestamp) -> Reading {
        self.advance(clock);
        self.read(charge)
    }

    /// What the counters of the whole pool hold in each of `dimensions`, and what is known of the accounts of
    /// `connections`.
    pub fn totals(
        &mut self,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
        clock: Timestamp,
    ) -> (Timestamp, PerCheck<Counters>) {
        self.advance(clock);
        let total = |key: &DimensionKey| Counters {
            key: Counter::default(),
            pool: self.position(*key).map(|position| self.dimensions[position].total).unwrap_or_default(),
            accounts: self.account_readings(*key, connections, None, None),
        };
        (self.now, dimensions.iter().map(total).collect())
    }

    /// What usage shows of `dimensions` and of the accounts of `connections`, on demand with their samples.
    pub fn usage(
        &mut self,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
        with_samples: bool,
        clock: Timestamp,
    ) -> UsageReading {
        let (_, totals) = self.totals(dimensions, connections, clock);
        let positions: PerCheck<Option<usize>> = dimensions.iter().map(|key| self.position(*key)).collect();
        let samplers =
            || positions.iter().map(|position| position.map(|position| &self.dimensions[position].sampler));
        let rates =
            samplers().map(|sampler| sampler.map(|sampler| sampler.rate_at(self.now)).unwrap_or_default());
        let samples = samplers().map(|sampler| {
            sampler
                .filter(|_| with_samples)
                .map(|sampler| sampler.history().copied().collect())
                .unwrap_or_default()
        });
        UsageReading {
            at: self.now,
            keys: self.key_usage(dimensions, connections),
            accounts: dimensions.iter().map(|key| self.account_usage(*key, connections)).collect(),
            totals,
            rates: rates.collect(),
            samples: samples.collect(),
            open_reservations: self.holds.len(),
            oldest_deadline: self.by_deadline.keys().next().map(|(deadline, _)| *deadline),
        }
    }

    /// `(consumed, reserved)` of each key with something in any of `dimensions`.
    fn key_usage(
        &self,
        dimensions: &[DimensionKey],
        connections: &[ConnectionId],
    ) -> BTreeMap<ApiKeyId, PerCheck<(f64, f64)>> {
        let with_parts = self.accounts.values().flat_map(|accounts| accounts.values());
        let with_parts = with_parts.flat_map(Account::keys);
        let names: BTreeSet<&ApiKeyId> = self.keys.keys().chain(with_parts).collect();
        let usage = names.into_iter().map(|key| {
            let counters = self.keys.get(key);
            let seen = dimensions.iter().map(|dimension| {
                let counters =
                    self.counters_of(key, counters, &CounterKey::from(*dimension), connections, None);
                let level = counters.level(*dimension, None, self.now);
                (level.key_consumed, level.key_reserved)
            });
            (key, seen.collect::<PerCheck<_>>())
        });
        let in_use = usage.filter(|(_, seen)| seen.iter().any(|seen| *seen != (0.0, 0.0)));
        in_use.map(|(key, seen)| (key.clone(), seen)).collect()
    }

    fn account_usage(&self, dimension: DimensionKey, connections: &[ConnectionId]) -> Vec<AccountUsage> {
        let known = connections.iter().filter_map(|connection| {
            let head = self.account(dimension, connection)?.head();
            head.observed_at.map(|observed_at| AccountUsage {
                connection: connection.clone(),
                fraction: head.fraction,
                ends_at: head.has_end.then_some(head.fresh_until),
                observed_at,
                fresh: head.is_fresh(self.now),
                external: head.external,
                parts: head.parts,
            })
        });
        known.collect()
    }

    /// Open reservations after `(deadline, name)`, the oldest deadline first, of one key or of all; at most `count`.
    pub fn reservations(
        &mut self,
        after: Option<(Timestamp, [u8; 12])>,
        api_key: Option<&ApiKeyId>,
        count: usize,
        clock: Timestamp,
    ) -> Vec<(ReservationId, Arc<Hold>)> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.advance(clock);
        let open = self.by_deadline.range((after.map_or(Unbounded, Excluded), Unbounded));
        open.filter(|(_, hold)| api_key.is_none_or(|key| *key == hold.api_key))
            .take(count)
            .map(|((_, random), hold)| (ReservationId { pool: self.pool, random: *random }, Arc::clone(hold)))
            .collect()
    }

    /// What the counters of `charge` hold. Open reservations are looked through only where a wait will be asked for.
    pub(super) fn read(&self, charge: &Charge) -> Reading {
        let key = self.keys.get(&charge.api_key);
        let counters = charge.checks.iter().map(|check| {
            let serving = Some(&charge.serving);
            self.counters_of(&charge.api_key, key, &check.counter, &charge.connections, serving)
        });
        let counters = counters.collect();
        let mut reading = Reading { at: self.now, counters, releases: Vec::new() };
        if charge.findings(&reading).iter().any(|finding| finding.block.is_some()) {
            reading.releases = self.releases(charge, &reading);
        }
        reading
    }

    fn counters_of(
        &self,
        api_key: &ApiKeyId,
        key: Option<&KeyCounters>,
        counter: &CounterKey,
        connections: &[ConnectionId],
        serving: Option<&ConnectionId>,
    ) -> Counters {
        let (key, pool) = self.counters(key, counter);
        let accounts = match &counter.model {
            None => self.account_readings(counter.dimension, connections, serving, Some(api_key)),
            Some(_) => Vec::new(),
        };
        Counters { key, pool, accounts }
    }

    /// The key's own and, for a dimension of the plan, the pool's.
    pub(super) fn counters(&self, key: Option<&KeyCounters>, counter: &CounterKey) -> (Counter, Counter) {
        if let Some(model) = &counter.model {
            let models = key.map_or(&[][..], |key| &key.models);
            let own =
                models.iter().find(|(cap, _)| cap.model == *model && cap.dimension == counter.dimension);
            return (own.map_or_else(Counter::default, |(_, own)| *own), Counter::default());
        }
        let Some(position) = self.position(counter.dimension) else { return Default::default() };
        let own = key.and_then(|key| key.dimensions.get(position)).copied();
        (own.unwrap_or_default(), self.dimensions[position].total)
    }

    fn account_readings(
        &self,
        dimension: DimensionKey,
        connections: &[ConnectionId],
        serving: Option<&ConnectionId>,
        api_key: Option<&ApiKeyId>,
    ) -> Vec<AccountReading> {
        let Some(accounts) = self.accounts.get(&dimension) else { return Vec::new() };
        let known = connections.iter().filter_map(|connection| Some((connection, accounts.get(connection)?)));
        let readings = known.filter_map(|(connection, account)| {
            let head = account.head();
            let window = dimension.window;
            let alone = head.alone && connections.len() == 1;
            let slid = account.slid(None, window, self.now).filter(|_| alone).map(|pool| {
                let key = api_key.and_then(|key| account.slid(Some(key), window, self.now));
                (key.unwrap_or_default(), pool)
            });
            let says_something = head.is_fresh(self.now) || head.window_end.is_some() || slid.is_some();
            says_something.then(|| AccountReading {
                serving: serving == Some(connection),
                fraction: head.fraction,
                figure: head.figure() as f64,
                fresh_until: head.is_fresh(self.now).then_some(head.fresh_until),
                has_end: head.has_end,
                window_end: head.window_end,
                alone,
                slid,
                key_part: api_key.map_or(0, |key| account.part(key)) as f64,
                parts: head.parts as f64,
            })
        });
        readings.collect()
    }

    fn releases(&self, charge: &Charge, reading: &Reading) -> Vec<Release> {
        let mut releases: Vec<Release> = Vec::new();
        for ((deadline, _), hold) in self.by_deadline.iter().take(DEADLINES_FOLLOWED_MAX) {
            let own = hold.api_key == charge.api_key;
            let held = charge.checks.iter().map(|check| {
                let steps = hold.on(&check.counter);
                (if own { steps } else { 0 }, steps)
            });
            releases.push(Release { deadline: *deadline, held: held.collect() });
        }
        if self.by_deadline.len() > DEADLINES_FOLLOWED_MAX
            && let Some((&(deadline, _), _)) = self.by_deadline.last_key_value()
        {
            let held =
                reading.counters.iter().map(|counters| (counters.key.reserved, counters.pool.reserved));
            releases.push(Release { deadline, held: held.collect() });
        }
        releases
    }
}
