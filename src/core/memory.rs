//! What a ledger remembers of calls, so that a repeated one is recognised: maps sliced by the time at which their
//! entries end, that expire whole.

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use super::{
    ids::{CallId, Fingerprint, ReservationId},
    units::Timestamp,
};

/// The span of ends that share one map. Few maps to look through, little kept beyond its time.
const SLICE_MS: u64 = 60_000;

/// A call whose cost was counted, or whose reservation was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordMemory {
    /// What a repeated call must agree with.
    pub fingerprint: Fingerprint,
    /// When it is forgotten.
    pub ends_at: Timestamp,
    /// Its reservation had expired or was unknown.
    pub late: bool,
}

/// A request id that made a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestMemory {
    /// What a repeated call must agree with.
    pub fingerprint: Fingerprint,
    /// The deadline of the reservation.
    pub ends_at: Timestamp,
    /// The reservation.
    pub reservation: ReservationId,
}

/// Something that is remembered until an instant.
pub trait Ends {
    /// From when on it is forgotten.
    fn ends_at(&self) -> Timestamp;
    /// Moves the end.
    fn end_at(&mut self, at: Timestamp);
}

macro_rules! ends {
    ($($memory:ty),*) => {$(
        impl Ends for $memory {
            fn ends_at(&self) -> Timestamp {
                self.ends_at
            }

            fn end_at(&mut self, at: Timestamp) {
                self.ends_at = at;
            }
        }
    )*};
}
ends!(RecordMemory, RequestMemory);

/// Memories by id, in maps by the time at which they end.
#[derive(Clone, Debug)]
pub struct Memories<T> {
    slices: Vec<(u64, HashMap<CallId, T>)>,
}

impl<T> Default for Memories<T> {
    fn default() -> Self {
        Self { slices: Vec::new() }
    }
}

impl<T: Ends> Memories<T> {
    /// What is remembered of `id` at `now`.
    pub fn get(&self, id: &CallId, now: Timestamp) -> Option<&T> {
        // An id may stand in an earlier map too, from a life that has ended.
        let mut found = self.slices.iter().rev().filter_map(|(_, slice)| slice.get(id));
        found.find(|memory| memory.ends_at() > now)
    }

    /// Remembers `memory` of `id`, of which nothing is remembered now, until it ends.
    pub fn insert(&mut self, id: CallId, memory: T) {
        let slice = memory.ends_at().unix_ms() / SLICE_MS;
        let at = self.slices.binary_search_by_key(&slice, |(slice, _)| *slice).unwrap_or_else(|at| {
            self.slices.insert(at, (slice, HashMap::new()));
            at
        });
        self.slices[at].1.insert(id, memory);
    }

    /// Forgets `id`.
    pub fn remove(&mut self, id: &CallId) {
        for (_, slice) in &mut self.slices {
            slice.remove(id);
        }
    }

    /// Drops the maps whose entries have all ended at `now`; returns how many entries went.
    pub fn expire(&mut self, now: Timestamp) -> usize {
        let oldest = now.unix_ms() / SLICE_MS;
        let ended = self.slices.iter().take_while(|(slice, _)| *slice < oldest).count();
        self.slices.drain(..ended).map(|(_, slice)| slice.len()).sum()
    }

    /// Ends everything by `latest`: the clock went back from `until`, and nothing may live longer than it was meant to.
    pub fn cut(&mut self, until: Timestamp, latest: Timestamp) {
        let all: Vec<_> = self.slices.drain(..).flat_map(|(_, slice)| slice).collect();
        // What has ended and not been dropped yet must not come back to life.
        for (id, mut memory) in all.into_iter().filter(|(_, memory)| memory.ends_at() > until) {
            memory.end_at(memory.ends_at().min(latest));
            self.insert(id, memory);
        }
    }

    /// How many ids are kept, those included that have ended and not been dropped.
    pub fn len(&self) -> usize {
        self.slices.iter().map(|(_, slice)| slice.len()).sum()
    }

    /// True if no id is kept.
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }
}
