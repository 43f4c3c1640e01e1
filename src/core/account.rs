//! What is known of one connection's account in one dimension: what the provider last said, and how much of it is whose.
//!
//! A provider says only what the whole account has used. In a PERCENT dimension each rise of its figure is split over the
//! keys that have recorded on the connection since the last rise, by weight; a rise that nobody here explains is *external*.
//! So `parts + external = figure`, always. In a countable dimension of an account whose window is known, the parts are
//! what was recorded in that window.
//!
//! A window ends at the end that the provider has named, or before: a lower figure with a later end is a new window.
//! Ends wander by seconds from response to response, and a response may be read long after it came, so a figure is taken
//! in the order of observation, and a lower one alone is an old response unless it was reported on purpose.

mod share;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};

pub use self::share::Share;
use self::share::{Slices, Split, Weight, scaled};
use super::{
    headers::Reset,
    ids::{ApiKeyId, ConnectionId},
    plan::DimensionKey,
    units::{Amount, Cost, Timestamp, Unit},
    window::{SlidingCounter, Window},
};

/// A fraction of 1 in steps of per cent.
const FULL: f64 = 1e8;
/// Ends that differ by less than this part of the window are one end.
const SAME_END_PART: u64 = 20;
/// Where it is known when a figure was true, an end so much later is another one if the figure is at most half.
const EARLY_RESET_MS: u64 = 10_000;

/// Names an account's dimension within a pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AccountKey {
    /// Whose account.
    pub connection: ConnectionId,
    /// What is counted there, in which window.
    pub dimension: DimensionKey,
}

/// A provider's figure, as it was read from a response or reported.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Which dimension it speaks of.
    pub dimension: DimensionKey,
    /// The used fraction of the account's limit, 0 to 1.5.
    pub fraction: f64,
    /// When it was true; now, if that is to come.
    pub observed_at: Timestamp,
    /// When it ends.
    pub reset: Reset,
    /// How long it is believed if it has no end, in ms.
    pub life_ms: u64,
    /// It was reported on purpose: a lower figure is one.
    pub believed: bool,
    /// `observed_at` is known and not only when it arrived.
    pub age_known: bool,
    /// The pool has no other connection: its counters are in the provider's window.
    pub alone: bool,
}

/// Why a figure was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Unread {
    /// It is older than one window.
    TooOld,
    /// The window that it speaks of is over.
    Ended,
    /// A newer one is known.
    Older,
    /// It is lower than the known one, in a response whose window is the same.
    Lower,
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unread::TooOld => "observed more than a window ago",
            Unread::Ended => "speaks of a window that has ended",
            Unread::Older => "a newer figure is known",
            Unread::Lower => "lower than the known figure of this window: an old response",
        })
    }
}

/// What is known of an account as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// What the provider last said, 0 at the start of a window.
    pub fraction: f64,
    /// When that was true; `None`: nothing was said of this window.
    pub observed_at: Option<Timestamp>,
    /// Until when it is believed.
    pub fresh_until: Timestamp,
    /// `fresh_until` is an end that the provider has named.
    pub has_end: bool,
    /// When the provider's window ends.
    pub window_end: Option<Timestamp>,
    /// The end of the window before, where that was reset before it came.
    pub previous_end: Option<Timestamp>,
    /// What was true before this is of an earlier window.
    pub window_start: Timestamp,
    /// The pool had no other connection when the figure was read.
    pub alone: bool,
    /// PERCENT: what nobody here explains, in steps.
    pub external: u64,
    /// All keys' parts, in steps.
    pub parts: u64,
    /// What all keys have recorded since `window_start`.
    pub slid: SlidingCounter,
    /// When something was last recorded or said.
    pub touched_at: Timestamp,
}

/// One connection's account in one dimension.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    head: Head,
    shares: BTreeMap<ApiKeyId, Share>,
    /// Those of them that have recorded something that no rise has been split by.
    recorders: BTreeSet<ApiKeyId>,
}

/// A change of an account: what was, and what is. A key whose share is all zero is not kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AccountChange {
    /// Which account.
    pub account: AccountKey,
    /// `None`: nothing was known. For undoing, and not kept.
    #[serde(skip)]
    pub before: Option<Head>,
    /// `None`: forgotten.
    pub after: Option<Head>,
    /// Keys that differ.
    pub shares: Vec<ShareChange>,
    /// PERCENT: how much was split over keys beyond what they had stated, in steps. Not kept.
    #[serde(skip)]
    pub risen: u64,
}

/// A change of a key's share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShareChange {
    /// Whose.
    pub key: ApiKeyId,
    /// What it was. For undoing, and not kept.
    #[serde(skip)]
    pub before: Share,
    /// What it is.
    pub after: Share,
}

impl Head {
    /// The figure in steps of per cent.
    pub fn figure(&self) -> u64 {
        figure(self.fraction)
    }

    /// It is believed at `at`.
    pub fn is_fresh(&self, at: Timestamp) -> bool {
        self.observed_at.is_some() && at < self.fresh_until
    }

    /// The window that is known began after `at`: ends wander by up to a twentieth of a window.
    fn began_after(&self, at: Timestamp, window: Window) -> bool {
        let longest_ms = window.length_ms() + window.length_ms() / 20;
        let named = self.window_end.is_some_and(|end| end.ms_since(at) > longest_ms);
        at < self.window_start || named
    }

    /// Nothing was said and believed for a window's length.
    fn is_stale(&self, window: Window, at: Timestamp) -> bool {
        let said = self.observed_at.is_some() && self.window_end.is_none();
        said && at.ms_since(self.fresh_until) >= window.length_ms()
    }

    /// A window that ends at `end` is an earlier one than the known.
    fn is_after(&self, end: Timestamp, window: Window) -> bool {
        let Some(known) = self.window_end else { return false };
        let apart = |other: Timestamp| other.ms_since(end).max(end.ms_since(other));
        known.ms_since(end) >= window.length_ms() / SAME_END_PART
            || self.previous_end.is_some_and(|previous| apart(previous) < apart(known))
    }

    /// Nothing has happened for so long that all of it has aged out.
    pub fn is_idle(&self, window: Window, at: Timestamp) -> bool {
        !self.is_fresh(at) && at.ms_since(self.touched_at) > 2 * window.length_ms()
    }

    /// `seen` is of a later window than what is known.
    fn is_followed_by(&self, seen: &Observation) -> bool {
        let (Some(known), Reset::WindowEnd(end)) = (self.window_end, seen.reset) else { return false };
        let later_ms = end.ms_since(known);
        let (before, now) = (self.figure(), figure(seen.fraction));
        let another_end = later_ms >= seen.dimension.window.length_ms() / SAME_END_PART;
        let early = seen.age_known && later_ms >= EARLY_RESET_MS && now <= before / 2;
        now < before && (another_end || early)
    }
}

fn figure(fraction: f64) -> u64 {
    (fraction * FULL).round_ties_even() as u64
}

impl Account {
    /// What is known of it as a whole.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The part of `api_key`, in steps.
    pub fn part(&self, api_key: &ApiKeyId) -> u64 {
        self.shares.get(api_key).map_or(0, |share| share.part)
    }

    /// What is recorded counts in the provider's window at `at`.
    pub fn is_anchored(&self, at: Timestamp) -> bool {
        self.head.alone && self.head.window_end.is_some_and(|end| at < end)
    }

    /// What `api_key`, or everybody, has recorded since the last end of a window, as long as a sliding window could still
    /// see what was before it.
    pub fn slid(&self, api_key: Option<&ApiKeyId>, window: Window, at: Timestamp) -> Option<SlidingCounter> {
        let start = self.head.window_start;
        let slides =
            self.head.alone && start > Timestamp::default() && at.ms_since(start) < 2 * window.length_ms();
        let slid = || match api_key {
            Some(key) => self.shares.get(key).map(|share| share.slid).unwrap_or_default(),
            None => self.head.slid,
        };
        slides.then(slid)
    }

    /// The keys of which something is known.
    pub fn keys(&self) -> impl Iterator<Item = &ApiKeyId> {
        self.shares.keys()
    }

    /// Puts what `change` says, or takes it back.
    pub fn put(&mut self, head: Option<Head>, shares: impl IntoIterator<Item = (ApiKeyId, Share)>) {
        self.head = head.unwrap_or_default();
        for (key, share) in shares {
            self.put_share(key, share);
        }
    }

    fn put_share(&mut self, key: ApiKeyId, share: Share) {
        if share.since.is_empty() {
            self.recorders.remove(&key);
        } else {
            self.recorders.insert(key.clone());
        }
        if share == Share::default() {
            self.shares.remove(&key);
        } else {
            self.shares.insert(key, share);
        }
    }
}

/// A change of an account that is being made.
#[derive(Debug)]
pub struct Edit<'a> {
    account: &'a mut Account,
    before: Option<Head>,
    shares_before: BTreeMap<ApiKeyId, Share>,
    risen: u64,
}

impl<'a> Edit<'a> {
    /// Starts a change; `is_new`: nothing was known of the account.
    pub fn new(account: &'a mut Account, is_new: bool) -> Self {
        let before = (!is_new).then(|| account.head.clone());
        Self { account, before, shares_before: BTreeMap::new(), risen: 0 }
    }

    /// The change that was made.
    pub fn finish(self, account: AccountKey) -> AccountChange {
        let now = &self.account.shares;
        let shares = self.shares_before.into_iter().map(|(key, before)| {
            let after = now.get(&key).cloned().unwrap_or_default();
            ShareChange { key, before, after }
        });
        let shares = shares.filter(|share| share.before != share.after).collect();
        let after = Some(self.account.head.clone());
        AccountChange { account, before: self.before, after, shares, risen: self.risen }
    }

    fn set(&mut self, key: &ApiKeyId, share: Share) {
        let before = self.share(key);
        self.account.head.parts = self.account.head.parts - before.part + share.part;
        self.shares_before.entry(key.clone()).or_insert(before);
        self.account.put_share(key.clone(), share);
    }

    fn share(&self, key: &ApiKeyId) -> Share {
        self.account.shares.get(key).cloned().unwrap_or_default()
    }

    fn shares(&self) -> Vec<(ApiKeyId, Share)> {
        self.account.shares.iter().map(|(key, share)| (key.clone(), share.clone())).collect()
    }

    /// `api_key` has recorded `cost` on the account at `at`, which is told at `now`. What was recorded before the window
    /// began is no part of it.
    pub fn record(
        &mut self,
        api_key: &ApiKeyId,
        cost: &Cost,
        of: DimensionKey,
        at: Timestamp,
        now: Timestamp,
    ) {
        if at < now && self.account.head.began_after(at, of.window) {
            return;
        }
        let mut share = self.share(api_key);
        let amount = cost.of(of.unit);
        if of.unit == Unit::Percent {
            share.weigh(cost, at);
        } else if self.account.is_anchored(now) {
            share.part += amount.room_on(self.account.head.parts);
        }
        let bucket = of.window.bucket(at);
        let in_view = bucket + 1 >= of.window.bucket(now);
        if in_view && self.account.slid(None, of.window, now).is_some() {
            let added = self.account.head.slid.add(bucket, amount);
            share.slid.add(bucket, Amount::saturating(added));
        }
        self.set(api_key, share);
        self.account.head.touched_at = now;
    }

    /// What `api_key` has used is set to zero. In a PERCENT dimension the figure stands: what was the key's is nobody's then.
    pub fn forget_part(&mut self, api_key: &ApiKeyId, unit: Unit) {
        let share = self.share(api_key);
        self.account.head.slid.take(&share.slid);
        self.set(api_key, Share::default());
        if unit == Unit::Percent {
            self.account.head.external += share.part;
        }
    }

    /// The window has ended, or another one has begun: everything starts at 0. What was recorded since the last rise may be
    /// of the new window unless `weights` go too.
    fn start_over(&mut self, weights: bool) {
        for (key, share) in self.shares() {
            let since = if weights { Slices::new() } else { share.since };
            self.set(&key, Share { since, ..Share::default() });
        }
        let head = &mut self.account.head;
        (head.fraction, head.external, head.slid) = (0.0, 0, SlidingCounter::default());
    }

    /// The end that the provider has named has come.
    pub fn end_window(&mut self) {
        self.start_over(true);
        let head = &mut self.account.head;
        head.window_start = head.window_end.take().unwrap_or(head.window_start);
        (head.observed_at, head.previous_end) = (None, None);
    }

    /// Forgets what the provider said, and with it every part. What was true before `from` is not believed any more.
    pub fn forget(&mut self, from: Timestamp) {
        self.start_over(true);
        let Head { touched_at, alone, .. } = self.account.head;
        self.account.head = Head { touched_at, alone, window_start: from, ..Head::default() };
    }

    /// Reads a figure at `now`, which is before the end of the window that is known. `carried` gives what each key has used
    /// in the sliding window, for a countable dimension that enters the provider's.
    ///
    /// # Errors
    /// Says why it is not taken; nothing has changed then.
    pub fn observe(
        &mut self,
        seen: &Observation,
        now: Timestamp,
        carried: impl FnOnce() -> Vec<(ApiKeyId, u64)>,
    ) -> Result<(), Unread> {
        let window = seen.dimension.window;
        let observed_at = seen.observed_at.min(now);
        let fresh_until = seen.reset.end().unwrap_or(observed_at.plus_ms(seen.life_ms));
        self.check(seen, observed_at, now)?;
        let percent = seen.dimension.unit == Unit::Percent;
        let was_anchored = self.account.is_anchored(now);
        if self.account.head.is_stale(window, now) {
            self.start_over(false);
        } else if self.account.head.is_followed_by(seen) {
            self.start_over(false);
            let head = &mut self.account.head;
            (head.previous_end, head.window_start) = (head.window_end, observed_at);
        }
        if percent {
            self.move_figure(figure(seen.fraction), observed_at);
        }
        let head = &mut self.account.head;
        head.fraction = seen.fraction;
        head.observed_at = Some(observed_at);
        (head.fresh_until, head.has_end) = (fresh_until, seen.reset != Reset::Unknown);
        head.alone = seen.alone;
        head.touched_at = now;
        if let Reset::WindowEnd(end) = seen.reset {
            head.window_end = Some(end);
        }
        if !percent && !was_anchored && self.account.is_anchored(now) {
            for (key, part) in carried() {
                let share = self.share(&key);
                self.set(&key, Share { part, ..share });
            }
        }
        Ok(())
    }

    fn check(&self, seen: &Observation, observed_at: Timestamp, now: Timestamp) -> Result<(), Unread> {
        let head = &self.account.head;
        let window = seen.dimension.window;
        if now.ms_since(observed_at) > window.length_ms() {
            return Err(Unread::TooOld);
        }
        if seen.reset.end().is_some_and(|end| end <= now) || observed_at < head.window_start {
            return Err(Unread::Ended);
        }
        if head.observed_at.is_some_and(|known| observed_at < known) {
            return Err(Unread::Older);
        }
        if let Reset::WindowEnd(end) = seen.reset
            && !seen.believed
            && head.is_after(end, window)
        {
            return Err(Unread::Ended);
        }
        let in_a_window = seen.dimension.unit == Unit::Percent || head.window_end.is_some();
        let lower = figure(seen.fraction) < head.figure();
        if lower && !seen.believed && in_a_window && head.is_fresh(now) && !head.is_followed_by(seen) {
            return Err(Unread::Lower);
        }
        Ok(())
    }

    /// A rise is split over those who recorded since the last one; a fall lowers every part alike.
    fn move_figure(&mut self, figure: u64, observed_at: Timestamp) {
        let before = self.account.head.figure();
        if figure > before {
            self.rise(figure - before, observed_at);
        } else if figure < before {
            let mut left = figure;
            for (key, share) in self.shares() {
                let part = scaled(share.part, figure, before).min(left);
                left -= part;
                self.set(&key, Share { part, ..share });
            }
            self.account.head.external = left;
        }
    }

    /// What was recorded after a figure was true is no part of it and waits for the next rise, unless nothing else explains
    /// this one.
    fn rise(&mut self, rise: u64, observed_at: Timestamp) {
        let recorders = self.account.recorders.iter();
        let shares: Vec<_> = recorders.map(|key| (key.clone(), self.share(key))).collect();
        let explained = shares.iter().any(|(_, share)| share.weight(observed_at) != Weight::default());
        let until = if explained { observed_at } else { Timestamp::from_unix_ms(u64::MAX) };

        let weights: Vec<Weight> = shares.iter().map(|(_, share)| share.weight(until)).collect();
        let stated = Split::new(&weights, |weight| weight.percent);
        let by_statement = rise.min(stated.sum);
        self.give(&shares, &stated, by_statement);
        let rest = rise - by_statement;
        let left = self.give(&shares, &Split::by_weight(&weights), rest);
        let left = self.give(&shares, &stated, left);
        // What was stated has been counted when it was.
        self.risen += rest - left;
        self.account.head.external += left;
        for (key, _) in shares {
            let share = self.share(&key).after(until);
            self.set(&key, share);
        }
    }

    /// Drops what keys recorded longer ago than a window: no rise will be split by it.
    pub fn forget_old_records(&mut self, window: Window, now: Timestamp) {
        let old = Timestamp::from_unix_ms(now.unix_ms().saturating_sub(window.length_ms()));
        let recorders: Vec<ApiKeyId> = self.account.recorders.iter().cloned().collect();
        for key in recorders {
            let share = self.share(&key).after(old);
            self.set(&key, share);
        }
    }

    /// Gives `amount` to the keys of `split`; returns what nobody got.
    fn give(&mut self, shares: &[(ApiKeyId, Share)], split: &Split, amount: u64) -> u64 {
        if split.sum == 0 || amount == 0 {
            return amount;
        }
        let mut left = amount;
        let mut largest = 0;
        for (index, weight) in split.weights.iter().enumerate() {
            let given = scaled(amount, *weight, split.sum).min(left);
            left -= given;
            if *weight > split.weights[largest] {
                largest = index;
            }
            self.add_part(&shares[index].0, given);
        }
        // What rounding has left, less than a step for each key.
        self.add_part(&shares[largest].0, left);
        0
    }

    fn add_part(&mut self, key: &ApiKeyId, steps: u64) {
        let share = self.share(key);
        self.set(key, Share { part: share.part + steps, ..share });
    }
}
