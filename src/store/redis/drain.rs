//! Brings what the journal has kept to the script, in order: first the batches of former processes of which nobody knows
//! whether it has had them, under their own numbers.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::{
    batches::{Answer, Sender},
    health::Health,
    pools::Pools,
    stored::decode,
    ticket::Ticket,
    wire::{Call, Refused},
};
use crate::{
    core::{ids::PoolRevision, ledger::Recorded},
    store::{Deferred, Drained, Entry, Journal, LedgerError, StoreError},
};

/// How often it is looked whether there is something in the journal, and whether what could not be brought can be.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Most entries that are under way together.
const ENTRIES_MAX: usize = 1_024;

/// See the module.
#[derive(Debug)]
pub(super) struct Drain {
    pub(super) journal: Arc<dyn Journal>,
    pub(super) sender: Sender,
    pub(super) health: Arc<Health>,
    pub(super) pools: Arc<Pools>,
    pub(super) admits: Arc<AtomicBool>,
}

impl Drain {
    /// Goes on until `stop`. Returns its turn: whoever lets go of that leaves the journal to somebody else.
    pub(super) async fn run(self, stop: CancellationToken) -> Option<OwnedMutexGuard<()>> {
        let turn = tokio::select! {
            turn = self.journal.turn() => turn,
            () = stop.cancelled() => return None,
        };
        loop {
            let back = self.health.back.notified();
            let may_write = self.health.may_write() && self.admits.load(Ordering::Relaxed);
            if may_write && !self.journal.is_empty() {
                tokio::select! {
                    result = self.drain() => self.tell(&result),
                    () = stop.cancelled() => return Some(turn),
                }
            }
            tokio::select! {
                () = sleep(LOOK_INTERVAL) => {}
                () = back => {}
                () = stop.cancelled() => return Some(turn),
            }
        }
    }

    fn tell(&self, result: &Result<u64, StoreError>) {
        match result {
            Ok(brought @ 1..) => {
                tracing::info!(brought, left = self.journal.len(), "the journal was brought to Redis");
            }
            Ok(0) => {}
            Err(error) => {
                let error = error as &dyn std::error::Error;
                tracing::error!(error, "the journal cannot be read: what it keeps is not counted");
            }
        }
    }

    /// Brings what can be brought now; returns how many entries that were.
    async fn drain(&self) -> Result<u64, StoreError> {
        let (mut brought, mut left_out) = self.drain_former().await?;
        loop {
            let entries = self.journal.unsent(ENTRIES_MAX, &left_out).await?;
            if entries.is_empty() {
                return Ok(brought);
            }
            let mut under_way = Vec::with_capacity(entries.len());
            for entry in entries {
                match self.submit(&entry) {
                    Some(answer) => under_way.push((entry, answer)),
                    None => drop(left_out.insert(entry.pool)),
                }
            }
            for (entry, answer) in under_way {
                match answer.await.map(|answer| outcome(&entry.call, answer)) {
                    Ok(Ok(drained)) => {
                        self.journal.counts().drained(drained, &entry.call, self.health.now());
                        brought += 1;
                    }
                    Ok(Err(_)) | Err(_) => drop(left_out.insert(entry.pool)),
                }
            }
        }
    }

    /// Sends an entry with the next batch of its pool; `None`: that is out of reach.
    fn submit(&self, entry: &Entry) -> Option<oneshot::Receiver<Answer>> {
        let slot = self.pools.slot(entry.pool);
        if self.pools.are_out_of_reach(&slot) {
            return None;
        }
        let ticket = Arc::new(Ticket::new(Some(entry.id)));
        self.sender.submit(&slot, Call::deferred(entry.pool, &entry.call), None, Some(ticket)).ok()
    }

    /// Brings batches of former processes; returns how many entries that were, and the pools that have some left.
    async fn drain_former(&self) -> Result<(u64, BTreeSet<PoolRevision>), StoreError> {
        let (mut brought, mut left_out) = (0, BTreeSet::new());
        let entries = self.journal.sent_by_others(self.sender.name()).await?;
        for batch in entries.chunk_by(|a, b| (a.pool, a.batch) == (b.pool, b.batch)) {
            let Entry { pool, batch: Some(name), .. } = batch[0] else { continue };
            let slot = self.pools.slot(pool);
            if left_out.contains(&pool) || self.pools.are_out_of_reach(&slot) {
                left_out.insert(pool);
                continue;
            }
            let calls = batch.iter().map(|entry| (Call::deferred(pool, &entry.call), entry.id)).collect();
            match self.sender.send_former(&slot, name, calls).await {
                Ok(()) | Err(LedgerError::PoolRemoved) => {
                    let now = self.health.now();
                    batch
                        .iter()
                        .for_each(|entry| self.journal.counts().drained(Drained::Counted, &entry.call, now));
                    brought += batch.len() as u64;
                }
                Err(_) => drop(left_out.insert(pool)),
            }
        }
        Ok((brought, left_out))
    }
}

/// What has become of a call, if it has come to an end.
fn outcome(call: &Deferred, answer: Answer) -> Result<Drained, LedgerError> {
    let bytes = match answer {
        Err(LedgerError::PoolRemoved) => return Ok(Drained::PoolRemoved),
        answer => answer?,
    };
    let refused = match call {
        Deferred::Record(_) => {
            decode::<Result<Recorded, Refused>>("an answer", &bytes)?.map(|of| of.duplicate)
        }
        Deferred::Release { .. } => decode::<Result<bool, Refused>>("an answer", &bytes)?.map(|_| false),
    };
    Ok(match refused {
        Ok(false) => Drained::Counted,
        Ok(true) => Drained::Duplicate,
        Err(_) => Drained::Refused,
    })
}
