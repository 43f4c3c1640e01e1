//! One pool's calls that wait for Redis, and what was last heard of it.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{
    batches::Answer,
    keys,
    wire::{Call, Header},
};
use crate::{
    core::{ids::PoolRevision, units::Timestamp},
    store::LedgerError,
};

/// Most calls of one pool that wait.
const WAITING_MAX: usize = 20_000;
/// Most calls of one pool that travel together.
const BATCH_CALLS_MAX: usize = 128;

/// One life of a pool.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) pool: PoolRevision,
    pub(super) keys: [Bytes; 7],
    state: Mutex<SlotState>,
    /// Something is known of an account of its connections.
    pub(super) has_accounts: AtomicBool,
}

#[derive(Debug, Default)]
struct SlotState {
    waiting: VecDeque<Waiting>,
    /// A batch is under way, or the sender has been told.
    busy: bool,
    sequence: u64,
    removed: bool,
    /// Of the last answer.
    header: Option<Header>,
    /// That the counters are gone was said, and there was no answer since.
    loss_said: bool,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) call: Call,
    pub(super) _counted: Counted,
    /// Nobody waits for what has none.
    pub(super) answer: Option<oneshot::Sender<Answer>>,
    /// The reservation that it may make.
    pub(super) makes: Option<[u8; 12]>,
}

/// Counts one for as long as it lives.
#[derive(Debug)]
pub(super) struct Counted(Arc<AtomicU64>);

impl Counted {
    pub(super) fn new(count: &Arc<AtomicU64>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How much Redis keeps of a pool, as far as this process has heard.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    pub(super) open_reservations: u64,
    pub(super) remembered_ids: u64,
}

impl Waiting {
    /// Somebody waits for it, or it has to be done all the same.
    pub(super) fn is_wanted(&self) -> bool {
        self.answer.as_ref().is_none_or(|answer| !answer.is_closed())
    }
}

impl Slot {
    pub(super) fn new(pool: PoolRevision) -> Self {
        Self {
            pool,
            keys: keys::of_pool(pool),
            state: Mutex::default(),
            has_accounts: AtomicBool::new(false),
        }
    }

    /// The hash of the pool.
    pub(super) fn hash(&self) -> Bytes {
        self.keys[0].clone()
    }

    /// Where it is written until when there must be counters.
    pub(super) fn mark(&self) -> Bytes {
        self.keys[6].clone()
    }

    pub(super) fn is_removed(&self) -> bool {
        self.state.lock().removed
    }

    pub(super) fn remove(&self) {
        let mut state = self.state.lock();
        (state.removed, state.header) = (true, None);
    }

    pub(super) fn known(&self) -> Known {
        let header = self.state.lock().header;
        header.map_or_else(Known::default, |header| Known {
            open_reservations: header.open_reservations,
            remembered_ids: header.remembered_ids,
        })
    }

    /// Counters that were begun at `born` are those that were known, if any were; true if others should still be there.
    pub(super) fn has_lost(&self, born: Option<Timestamp>, clock: Timestamp) -> bool {
        let mut state = self.state.lock();
        let Some(known) = state.header else { return false };
        let lost = born != Some(known.born) && clock < known.expires_at;
        if lost {
            // Said once.
            state.header = None;
            state.loss_said = true;
        }
        lost
    }

    /// That the counters are gone was said already.
    pub(super) fn has_said_loss(&self) -> bool {
        self.state.lock().loss_said
    }

    pub(super) fn heard(&self, header: Header) {
        let mut state = self.state.lock();
        (state.header, state.loss_said) = (Some(header), false);
    }

    /// Takes back a call that may make the reservation `random` if it has not been sent; false if it has.
    pub(super) fn withdraw(&self, random: [u8; 12]) -> bool {
        let mut state = self.state.lock();
        let found = state.waiting.iter().position(|waiting| waiting.makes == Some(random));
        found.is_some_and(|index| state.waiting.remove(index).is_some())
    }

    /// Queues a call; true if the sender has to be told.
    pub(super) fn push(&self, waiting: Waiting) -> Result<bool, LedgerError> {
        let mut state = self.state.lock();
        if state.waiting.len() >= WAITING_MAX {
            state.waiting.retain(Waiting::is_wanted);
        }
        if state.waiting.len() >= WAITING_MAX {
            let max = WAITING_MAX as u64;
            return Err(LedgerError::Full { what: "calls of a pool that wait for Redis", max });
        }
        state.waiting.push_back(waiting);
        Ok(!std::mem::replace(&mut state.busy, true))
    }

    /// The next batch; `None`: nobody waits any more.
    pub(super) fn next_batch(self: &Arc<Self>, calls_max: usize) -> Option<Batch> {
        let mut state = self.state.lock();
        let mut calls = Vec::new();
        while calls.len() < calls_max.min(BATCH_CALLS_MAX)
            && let Some(waiting) = state.waiting.pop_front()
        {
            // Whoever has given up before it was sent wants it no more.
            if waiting.is_wanted() {
                calls.push(waiting);
            }
        }
        if calls.is_empty() {
            state.busy = false;
            return None;
        }
        state.sequence += 1;
        Some(Batch { slot: Arc::clone(self), sequence: state.sequence, calls })
    }

    /// The batch is done; true if there is a next one.
    pub(super) fn finish(&self) -> bool {
        let mut state = self.state.lock();
        state.busy = !state.waiting.is_empty();
        state.busy
    }
}

/// Calls of one pool that travel together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) slot: Arc<Slot>,
    pub(super) sequence: u64,
    pub(super) calls: Vec<Waiting>,
}
