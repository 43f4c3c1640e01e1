//! What has become of a call that goes to the journal if it takes too long.

use parking_lot::Mutex;

use crate::store::EntryId;

/// Follows one call on its way to the script, and the entry that the journal has of it.
#[derive(Debug)]
pub(super) struct Ticket(Mutex<State>);

#[derive(Debug)]
struct State {
    stage: Stage,
    entry: Option<EntryId>,
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It waits to be sent.
    Waiting,
    /// It will not be sent.
    Withdrawn,
    /// It is in the sender's batch of this number.
    UnderWay(u64),
    /// The script has had it.
    Done,
    /// It is known that the script has not had it.
    NotDone,
}

impl Ticket {
    /// Of a call that waits, and is in the journal if there is an `entry`.
    pub(super) fn new(entry: Option<EntryId>) -> Self {
        Self(Mutex::new(State { stage: Stage::Waiting, entry }))
    }

    /// The call goes with batch `sequence`; false if it is withdrawn.
    pub(super) fn send(&self, sequence: u64) -> bool {
        let mut state = self.0.lock();
        if state.stage == Stage::Withdrawn {
            return false;
        }
        state.stage = Stage::UnderWay(sequence);
        true
    }

    /// Takes the call back if it has not been sent; how far it has come.
    pub(super) fn withdraw(&self) -> Stage {
        let mut state = self.0.lock();
        if state.stage == Stage::Waiting {
            state.stage = Stage::Withdrawn;
        }
        state.stage
    }

    /// The journal has the call as `entry`: who learns its end sees to that as well, unless it has come already.
    pub(super) fn keep(&self, entry: EntryId) -> Stage {
        let mut state = self.0.lock();
        if matches!(state.stage, Stage::UnderWay(_)) {
            state.entry = Some(entry);
        }
        state.stage
    }

    /// What the journal has of it.
    pub(super) fn entry(&self) -> Option<EntryId> {
        self.0.lock().entry
    }

    /// The end has come; returns the entry to be seen to.
    pub(super) fn end(&self, stage: Stage) -> Option<EntryId> {
        let mut state = self.0.lock();
        state.stage = stage;
        state.entry.take()
    }
}
