//! What a ledger knows of the accounts behind its pool's connections.

use super::{Change, Consumption, PoolLedger};
use crate::core::{
    account::{Account, AccountChange, AccountKey, Edit, Head, Observation, Unread},
    headers::Reset,
    ids::{ApiKeyId, ConnectionId},
    plan::DimensionKey,
    units::{Timestamp, Unit},
};

impl PoolLedger {
    /// Reads figures of `connection`, each by itself: for each, why it was not taken.
    pub fn report(
        &mut self,
        connection: &ConnectionId,
        seen: &[Observation],
        clock: Timestamp,
    ) -> Vec<Result<(), Unread>> {
        self.advance(clock);
        seen.iter().map(|seen| self.observe(connection, seen)).collect()
    }

    pub(super) fn account(&self, dimension: DimensionKey, connection: &ConnectionId) -> Option<&Account> {
        self.accounts.get(&dimension)?.get(connection)
    }

    pub(super) fn observe(&mut self, connection: &ConnectionId, seen: &Observation) -> Result<(), Unread> {
        let dimension = seen.dimension;
        let now = self.now;
        // While time stands still, what is true now is not older than what was true before.
        let seen = &Observation { observed_at: seen.observed_at.plus_ms(self.lag_ms), ..*seen };
        let is_anchored = self.account(dimension, connection).is_some_and(|account| account.is_anchored(now));
        let anchors = seen.alone && matches!(seen.reset, Reset::WindowEnd(_)) && !is_anchored;
        let carried = if anchors { self.sliding_estimates(connection, dimension) } else { Vec::new() };
        self.edit(connection, dimension, |edit| edit.observe(seen, now, || carried))
    }

    /// What each key has used in the sliding window, rounded to steps.
    fn sliding_estimates(&self, connection: &ConnectionId, dimension: DimensionKey) -> Vec<(ApiKeyId, u64)> {
        let Some(position) = self.position(dimension).filter(|_| dimension.unit != Unit::Percent) else {
            return Vec::new();
        };
        let account = self.account(dimension, connection);
        let keys = self.keys.iter().filter_map(|(key, counters)| {
            let slid = account.and_then(|account| account.slid(Some(key), dimension.window, self.now));
            let counter = slid.or_else(|| counters.dimensions.get(position).map(|own| own.consumed))?;
            Some((key.clone(), counter.at(dimension.window, self.now).round_ties_even() as u64))
        });
        keys.filter(|(_, steps)| *steps > 0).collect()
    }

    /// Records on the connection's accounts: of every PERCENT dimension, and of others of which something is known.
    pub(super) fn record_on_accounts(&mut self, consumption: &Consumption, at: Timestamp) {
        let Some(connection) = &consumption.connection else { return };
        let (key, cost, now) = (&consumption.api_key, &consumption.cost, self.now);
        for (counter, _) in consumption.counts.iter().filter(|(counter, _)| counter.model.is_none()) {
            let dimension = counter.dimension;
            if dimension.unit == Unit::Percent || self.account(dimension, connection).is_some() {
                self.edit(connection, dimension, |edit| edit.record(key, cost, dimension, at, now));
            }
        }
    }

    /// Lets windows end whose end has come: everything in them starts at 0.
    pub(super) fn end_windows(&mut self) {
        let now = self.now;
        let ended = |account: &Account| account.head().window_end.is_some_and(|end| end <= now);
        let ended = self.all_accounts().filter(|(_, _, account)| ended(account));
        let ended: Vec<_> = ended.map(|(connection, of, _)| (connection.clone(), of)).collect();
        for (connection, dimension) in ended {
            self.edit(&connection, dimension, |edit| edit.end_window());
        }
        self.find_next_window_end();
    }

    fn all_accounts(&self) -> impl Iterator<Item = (&ConnectionId, DimensionKey, &Account)> {
        self.accounts.iter().flat_map(|(dimension, accounts)| {
            accounts.iter().map(|(connection, account)| (connection, *dimension, account))
        })
    }

    pub(super) fn find_next_window_end(&mut self) {
        self.next_window_end =
            self.all_accounts().filter_map(|(_, _, account)| account.head().window_end).min();
    }

    /// Forgets what providers said until `from` and every key's part, of one dimension or of all; of one key its part
    /// alone.
    pub(super) fn forget_accounts(
        &mut self,
        api_key: Option<&ApiKeyId>,
        dimension: Option<DimensionKey>,
        from: Timestamp,
    ) {
        let meant = |of: &DimensionKey| dimension.is_none_or(|only| only == *of);
        let all = self.all_accounts().filter(|(_, of, _)| meant(of));
        let all: Vec<_> = all.map(|(connection, of, _)| (connection.clone(), of)).collect();
        for (connection, of) in all {
            self.edit(&connection, of, |edit| match api_key {
                Some(key) => edit.forget_part(key, of.unit),
                None => edit.forget(from),
            });
        }
        self.find_next_window_end();
    }

    /// Drops accounts about which nothing is left to know.
    pub(super) fn forget_idle_accounts(&mut self) {
        let now = self.now;
        let all: Vec<_> = self.all_accounts().map(|(connection, of, _)| (connection.clone(), of)).collect();
        for (connection, of) in all {
            self.edit(&connection, of, |edit| edit.forget_old_records(of.window, now));
        }
        let idle = self.all_accounts().filter(|(_, of, account)| account.head().is_idle(of.window, self.now));
        let idle: Vec<_> = idle.map(|(connection, of, _)| (connection.clone(), of)).collect();
        for (connection, dimension) in idle {
            let ((), mut change) =
                self.change(&connection, dimension, |edit| edit.forget(Timestamp::default()));
            change.after = None;
            self.remove_account(&change.account);
            self.changes.push(Change::Account(Box::new(change)));
        }
    }

    /// Changes an account, made where it is not known yet, and keeps the change. An edit that fails has changed nothing.
    fn edit<T>(
        &mut self,
        connection: &ConnectionId,
        dimension: DimensionKey,
        edit: impl FnOnce(&mut Edit<'_>) -> T,
    ) -> T {
        let (answer, change) = self.change(connection, dimension, edit);
        if change.before.is_none() && change.after == Some(Head::default()) {
            self.remove_account(&change.account);
        } else if change.before != change.after || !change.shares.is_empty() {
            if change.risen > 0 {
                self.dimension_mut(dimension).sampler.add(change.risen);
            }
            let end = change.after.as_ref().and_then(|head| head.window_end);
            self.next_window_end = self.next_window_end.into_iter().chain(end).min();
            self.changes.push(Change::Account(Box::new(change)));
        }
        answer
    }

    fn change<T>(
        &mut self,
        connection: &ConnectionId,
        dimension: DimensionKey,
        edit: impl FnOnce(&mut Edit<'_>) -> T,
    ) -> (T, AccountChange) {
        let accounts = self.accounts.entry(dimension).or_default();
        let is_new = !accounts.contains_key(connection);
        let account = accounts.entry(connection.clone()).or_default();
        let mut change = Edit::new(account, is_new);
        let answer = edit(&mut change);
        (answer, change.finish(AccountKey { connection: connection.clone(), dimension }))
    }

    fn remove_account(&mut self, account: &AccountKey) {
        if let Some(accounts) = self.accounts.get_mut(&account.dimension) {
            accounts.remove(&account.connection);
            if accounts.is_empty() {
                self.accounts.remove(&account.dimension);
            }
        }
    }

    /// Takes over what an earlier life of the process knew.
    pub(super) fn put_account(&mut self, change: AccountChange) {
        let AccountChange { account, after, shares, .. } = change;
        let accounts = self.accounts.entry(account.dimension).or_default();
        let known = accounts.entry(account.connection).or_default();
        let head = after.unwrap_or_else(|| known.head().clone());
        let end = head.window_end;
        known.put(Some(head), shares.into_iter().map(|share| (share.key, share.after)));
        self.next_window_end = self.next_window_end.into_iter().chain(end).min();
    }

    /// Undoes a change that could not be made durable.
    pub(super) fn revert_account(&mut self, change: AccountChange) {
        if change.risen > 0 {
            self.dimension_mut(change.account.dimension).sampler.take_back(change.risen);
        }
        let AccountChange { account, before, shares, .. } = change;
        if before.is_none() {
            self.remove_account(&account);
        } else {
            let accounts = self.accounts.entry(account.dimension).or_default();
            let known = accounts.entry(account.connection).or_default();
            known.put(before, shares.into_iter().map(|share| (share.key, share.before)));
        }
        self.find_next_window_end();
    }
}
