//! One pool's calls that wait for Redis, and what was last heard of it.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{
    batches::Answer,
    keys,
    reach::Reach,
    ticket::{Stage, Ticket},
    wire::{Call, Header},
};
use crate::{
    core::{ids::PoolRevision, units::Timestamp},
    store::{EntryId, LedgerError, StoreError},
};

/// Most calls of one pool that wait.
const WAITING_MAX: usize = 20_000;
/// Most calls of one pool that travel together.
const BATCH_CALLS_MAX: usize = 128;

/// How long after its answer a batch is kept, for a fail-over that loses it.
const RECENT: Duration = Duration::from_secs(10);
/// How long the script is sure to know a sender that sends nothing.
const SENDER_LIFE: Duration = Duration::from_secs(3_600);

/// One life of a pool.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) pool: PoolRevision,
    pub(super) keys: [Bytes; 7],
    /// Of the node that has the pool.
    pub(super) reach: Arc<Reach>,
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
    /// The last batch that was applied, and when that was heard.
    applied: Option<(u64, Instant)>,
    /// Batches that a fail-over may lose, the oldest first.
    recent: VecDeque<Recent>,
    /// The last of those that were forgotten.
    forgotten: u64,
    /// That batches fail was said, and none was applied since.
    failure_said: bool,
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
    /// Of what goes to the journal if it takes too long.
    pub(super) ticket: Option<Arc<Ticket>>,
}

/// A batch that was applied.
#[derive(Debug)]
struct Recent {
    sequence: u64,
    heard_at: Instant,
    /// What is to be sent again if it is lost.
    again: Vec<Call>,
    /// How many reservations it may have made.
    holds: u64,
}

/// What is sent before a batch, to a store that has not got it any more.
#[derive(Debug)]
pub(super) struct Replay {
    pub(super) sequence: u64,
    pub(super) calls: Vec<Call>,
}

/// What a store has lost of a pool.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) replays: Vec<Replay>,
    pub(super) missing_batches: u64,
    pub(super) holds: u64,
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
        self.answer.as_ref().is_none_or(|answer| !answer.is_closed()) || self.entry().is_some()
    }

    /// What the journal has of it.
    pub(super) fn entry(&self) -> Option<EntryId> {
        self.ticket.as_ref()?.entry()
    }

    /// Its end has come; returns the entry of the journal to be seen to.
    pub(super) fn end(&self, stage: Stage) -> Option<EntryId> {
        self.ticket.as_ref()?.end(stage)
    }

    fn is_withdrawn(&self, sequence: u64) -> bool {
        self.ticket.as_ref().is_some_and(|ticket| !ticket.send(sequence))
    }
}

impl Slot {
    pub(super) fn new(pool: PoolRevision, reach: Arc<Reach>) -> Self {
        Self {
            pool,
            keys: keys::of_pool(pool),
            reach,
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

    /// Batch `sequence` of `calls` was applied.
    pub(super) fn heard(&self, sequence: u64, header: Header, calls: Vec<Call>) {
        let mut state = self.state.lock();
        let heard_at = Instant::now();
        (state.header, state.loss_said, state.failure_said) = (Some(header), false, false);
        state.applied = Some((sequence, heard_at));
        let holds = calls.iter().filter(|call| call.holds()).count() as u64;
        let again: Vec<Call> = calls.into_iter().filter_map(|call| call.again(header.clock)).collect();
        state.recent.push_back(Recent { sequence, heard_at, again, holds });
        state.forget_recent(heard_at);
    }

    /// Forgets what no fail-over will lose any more.
    pub(super) fn compact(&self) {
        self.state.lock().forget_recent(Instant::now());
    }

    /// There is something that a fail-over may have lost.
    pub(super) fn may_have_lost(&self) -> bool {
        self.state.lock().recent.iter().any(|batch| batch.holds > 0 || !batch.again.is_empty())
    }

    /// What is to be done where the last batch that was applied is `done`, which is not the last that was.
    pub(super) fn lost(&self, done: u64) -> Lost {
        let state = self.state.lock();
        let recent = state.recent.iter().filter(|batch| batch.sequence > done);
        let replays = recent
            .clone()
            .filter(|batch| !batch.again.is_empty())
            .map(|batch| Replay { sequence: batch.sequence, calls: batch.again.clone() });
        Lost {
            replays: replays.collect(),
            missing_batches: state.forgotten.saturating_sub(done),
            holds: recent.map(|batch| batch.holds).sum(),
        }
    }

    /// A call has failed by itself, for this pool alone. Said once, until a batch is applied.
    pub(super) fn fails(&self, error: &StoreError) {
        if !std::mem::replace(&mut self.state.lock().failure_said, true) {
            tracing::error!(created_revision = self.pool.0, %error, "a pool's calls fail in Redis");
        }
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
        let sequence = state.sequence + 1;
        let mut calls = Vec::new();
        while calls.len() < calls_max.min(BATCH_CALLS_MAX)
            && let Some(waiting) = state.waiting.pop_front()
        {
            // Whoever has given up before it was sent wants it no more.
            if waiting.is_wanted() && !waiting.is_withdrawn(sequence) {
                calls.push(waiting);
            }
        }
        if calls.is_empty() {
            state.busy = false;
            return None;
        }
        state.sequence = sequence;
        // A store keeps what it knows of a sender for longer.
        let of_late = state.applied.filter(|(_, heard_at)| heard_at.elapsed() < SENDER_LIFE);
        let previous = of_late.map_or(0, |(sequence, _)| sequence);
        Some(Batch {
            slot: Arc::clone(self),
            former_sender: None,
            sequence,
            previous,
            replays: Vec::new(),
            calls,
        })
    }

    /// The batch is done; true if there is a next one.
    pub(super) fn finish(&self) -> bool {
        let mut state = self.state.lock();
        state.busy = !state.waiting.is_empty();
        state.busy
    }
}

impl SlotState {
    fn forget_recent(&mut self, now: Instant) {
        let old = |batch: &Recent| now.duration_since(batch.heard_at) > RECENT;
        while self.recent.front().is_some_and(old)
            && let Some(batch) = self.recent.pop_front()
        {
            self.forgotten = batch.sequence;
        }
    }
}

/// Calls of one pool that travel together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) slot: Arc<Slot>,
    /// Of a process that has ended, whose batch this was.
    pub(super) former_sender: Option<[u8; 16]>,
    pub(super) sequence: u64,
    /// The batch that must have been applied before.
    pub(super) previous: u64,
    /// What goes before it.
    pub(super) replays: Vec<Replay>,
    pub(super) calls: Vec<Waiting>,
}
