//! Calls on their way to the script: what arrives for a pool while a batch of it is under way is the next batch.
//!
//! A batch has a number. One whose answer was lost is sent again under its number until Redis has said what became of it:
//! the script gives the answers that it gave. So a pool has one batch under way, and batches of pools that one node has
//! travel together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use fred::types::Value;
use sha1::{Digest, Sha1};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::{
    STORE,
    client::{Client, Command, Failure, bytes_of, entries_of},
    health::Health,
    slot::{Batch, Counted, Slot, Waiting},
    wire::{self, Call, Header},
};
use crate::store::{LedgerError, StoreError};

/// The script, as Redis gets it.
pub(super) const SCRIPT: &str = concat!(
    include_str!("lua/rule.lua"),
    include_str!("lua/account.lua"),
    include_str!("lua/ledger.lua"),
    include_str!("lua/accounts.lua"),
    include_str!("lua/upkeep.lua"),
    include_str!("lua/calls.lua"),
    include_str!("lua/batch.lua"),
);

/// Most calls of all pools that travel together, to bound how long a script runs.
const MESSAGE_CALLS_MAX: usize = 256;
/// Messages to one node that are under way together: enough to keep a distant Redis at work, few enough that calls meet.
const MESSAGES_UNDER_WAY_MAX: usize = 4;
/// Pools of a cluster that have a message under way together.
const CLUSTER_MESSAGES_MAX: usize = 1_024;
/// How long the first attempt of a batch waits for its answer; each further one twice as long.
const ATTEMPT_MIN: Duration = Duration::from_millis(200);
const ATTEMPT_MAX: Duration = Duration::from_secs(5);
/// How long it takes from a failed attempt to the next.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);

pub(super) type Answer = Result<Bytes, LedgerError>;

impl Batch {
    fn answer_all(self, sender: &Sender, answer: impl Fn() -> Answer) {
        for call in self.calls {
            // A caller that has hung up hears nothing.
            let _ = call.answer.map(|waiting| waiting.send(answer()));
        }
        sender.finish(&self.slot);
    }
}

/// Sends the calls of all pools.
#[derive(Clone, Debug)]
pub(super) struct Sender(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Client,
    health: Arc<Health>,
    /// Names this process: its replica, and its start.
    name: [u8; 16],
    script_sha: Bytes,
    clock: Arc<dyn crate::clock::Clock>,
    ready: mpsc::UnboundedSender<Arc<Slot>>,
    unanswered: Arc<AtomicU64>,
    /// Everybody who waits for an answer has a clone.
    callers: Arc<()>,
    stop: CancellationToken,
}

impl Sender {
    /// Starts to send. Call within the Tokio runtime that lasts as long.
    pub(super) fn start(
        client: Client,
        health: Arc<Health>,
        name: [u8; 16],
        clock: Arc<dyn crate::clock::Clock>,
    ) -> Self {
        let (ready, receiver) = mpsc::unbounded_channel();
        let script_sha =
            Sha1::digest(SCRIPT).iter().map(|byte| format!("{byte:02x}")).collect::<String>().into();
        let stop = CancellationToken::new();
        let sender = Self(Arc::new(Inner {
            client,
            health,
            name,
            script_sha,
            clock,
            ready,
            unanswered: Arc::default(),
            callers: Arc::default(),
            stop,
        }));
        tokio::spawn(sender.clone().run(receiver));
        sender
    }

    /// Ends all that is under way.
    pub(super) fn stop(&self) {
        self.0.stop.cancel();
    }

    /// Tells of [`stop`](Self::stop).
    pub(super) fn stopping(&self) -> CancellationToken {
        self.0.stop.clone()
    }

    /// To be kept by whoever waits for an answer.
    pub(super) fn caller(&self) -> Arc<()> {
        Arc::clone(&self.0.callers)
    }

    /// Somebody waits for an answer.
    pub(super) fn has_callers(&self) -> bool {
        Arc::strong_count(&self.0.callers) > 1
    }

    /// Calls are waiting or under way.
    pub(super) fn is_busy(&self) -> bool {
        self.0.unanswered.load(Ordering::Relaxed) > 0
    }

    /// Sends a call with the next batch of its pool.
    pub(super) fn submit(
        &self,
        slot: &Arc<Slot>,
        call: Call,
        makes: Option<[u8; 12]>,
    ) -> Result<oneshot::Receiver<Answer>, LedgerError> {
        let (answer, receiver) = oneshot::channel();
        self.push(slot, call, Some(answer), makes)?;
        Ok(receiver)
    }

    /// The same where nobody waits for the answer.
    pub(super) fn submit_unheard(&self, slot: &Arc<Slot>, call: Call) -> Result<(), LedgerError> {
        self.push(slot, call, None, None)
    }

    fn push(
        &self,
        slot: &Arc<Slot>,
        call: Call,
        answer: Option<oneshot::Sender<Answer>>,
        makes: Option<[u8; 12]>,
    ) -> Result<(), LedgerError> {
        if self.0.stop.is_cancelled() {
            return Err(LedgerError::Unreachable(stopped()));
        }
        let waiting = Waiting { call, answer, makes, _counted: Counted::new(&self.0.unanswered) };
        if slot.push(waiting)? {
            self.announce(slot);
        }
        Ok(())
    }

    fn announce(&self, slot: &Arc<Slot>) {
        // It ends with the sender alone.
        let _ = self.0.ready.send(Arc::clone(slot));
    }

    fn finish(&self, slot: &Arc<Slot>) {
        if slot.finish() {
            self.announce(slot);
        }
    }

    async fn run(self, mut ready: mpsc::UnboundedReceiver<Arc<Slot>>) {
        let clustered = self.0.client.is_clustered();
        let under_way = if clustered { CLUSTER_MESSAGES_MAX } else { MESSAGES_UNDER_WAY_MAX };
        let under_way = Arc::new(Semaphore::new(under_way));
        loop {
            let Ok(permit) = Arc::clone(&under_way).acquire_owned().await else { return };
            let first = tokio::select! {
                slot = ready.recv() => slot,
                () = self.0.stop.cancelled() => None,
            };
            let Some(first) = first else { return };
            let mut batches: Vec<Batch> = first.next_batch(MESSAGE_CALLS_MAX).into_iter().collect();
            let mut calls: usize = batches.iter().map(|batch| batch.calls.len()).sum();
            while !clustered
                && calls < MESSAGE_CALLS_MAX
                && let Ok(slot) = ready.try_recv()
            {
                if let Some(batch) = slot.next_batch(MESSAGE_CALLS_MAX - calls) {
                    calls += batch.calls.len();
                    batches.push(batch);
                }
            }
            if !batches.is_empty() {
                tokio::spawn(self.clone().send(batches, permit));
            }
        }
    }

    /// Sends batches until it is known what became of them.
    async fn send(self, mut batches: Vec<Batch>, _under_way: OwnedSemaphorePermit) {
        let mut command = self.command(&batches);
        let (mut timeout, mut pause, mut uncertain) = (ATTEMPT_MIN, PAUSE_MIN, false);
        loop {
            let result = tokio::select! {
                result = self.0.client.call(command.clone(), timeout) => result,
                () = self.0.stop.cancelled() => return self.give_up(batches, &stopped()),
            };
            let failure = match result {
                Ok(replies) => {
                    let Some((refused, failure)) = self.distribute(batches, replies) else {
                        return;
                    };
                    batches = refused;
                    command = self.command(&batches);
                    failure
                }
                Err(failure) if failure.is_no_script() => {
                    // EVAL leaves the script in the cache of the node that had lost it.
                    command = Command { name: "EVAL", args: self.args(SCRIPT.into(), &batches), ..command };
                    continue;
                }
                Err(failure) => failure,
            };
            self.0.health.fails(&failure);
            uncertain |= failure.is_unknown();
            if failure.is_final() && !uncertain {
                return self.give_up(batches, &failed(failure));
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = self.0.stop.cancelled() => return self.give_up(batches, &stopped()),
            }
            if !uncertain {
                batches = self.wanted(batches);
                if batches.is_empty() {
                    return;
                }
                command = self.command(&batches);
            }
            (timeout, pause) = ((2 * timeout).min(ATTEMPT_MAX), (2 * pause).min(PAUSE_MAX));
        }
    }

    /// What of batches that Redis has not got is still waited for.
    fn wanted(&self, mut batches: Vec<Batch>) -> Vec<Batch> {
        batches.retain_mut(|batch| {
            batch.calls.retain(Waiting::is_wanted);
            if batch.calls.is_empty() {
                self.finish(&batch.slot);
            }
            !batch.calls.is_empty()
        });
        batches
    }

    fn command(&self, batches: &[Batch]) -> Command {
        let key = batches[0].slot.hash();
        Command { name: "EVALSHA", key, args: self.args(self.0.script_sha.clone(), batches) }
    }

    fn args(&self, script: Bytes, batches: &[Batch]) -> Vec<Bytes> {
        let keys = batches.iter().flat_map(|batch| batch.slot.keys.iter().cloned());
        let messages = batches.iter().map(|batch| {
            let calls = batch.calls.iter().map(|waiting| &waiting.call);
            Bytes::from(wire::batch(&self.0.name, batch.sequence, calls))
        });
        let count = (batches.len() * 7).to_string().into();
        [script, count].into_iter().chain(keys).chain([now_for(&*self.0.clock)]).chain(messages).collect()
    }

    fn give_up(&self, batches: Vec<Batch>, error: &StoreError) {
        for batch in batches {
            batch.answer_all(self, || Err(LedgerError::Unreachable(error.clone())));
        }
    }

    /// Answers what was done; returns what Redis has refused to write, and why.
    fn distribute(&self, batches: Vec<Batch>, replies: Value) -> Option<(Vec<Batch>, Failure)> {
        let mut replies = entries_of(replies).into_iter();
        let (mut refused, mut why) = (Vec::new(), None);
        for batch in batches {
            let mut reply = entries_of(replies.next().unwrap_or(Value::Null)).into_iter();
            let header = reply.next().and_then(bytes_of);
            match header {
                Some(header) => self.distribute_one(batch, &header, reply.filter_map(bytes_of).collect()),
                None => {
                    let said = reply.next().and_then(bytes_of).unwrap_or_default();
                    let said = String::from_utf8_lossy(&said);
                    if let Some(failure) = Failure::of_script(&said) {
                        refused.push(batch);
                        why = Some(failure);
                        continue;
                    }
                    self.0.health.answers();
                    let error = broken(&said);
                    tracing::error!(pool = batch.slot.pool.0, %error, "a batch failed in Redis");
                    batch.answer_all(self, || Err(error.clone().into()));
                }
            }
        }
        why.map(|why| (refused, why))
    }

    fn distribute_one(&self, batch: Batch, header: &[u8], answers: Vec<Bytes>) {
        self.0.health.answers();
        if rmp_serde::from_slice::<&str>(header).is_ok_and(|header| header == "removed") {
            batch.slot.remove();
            return batch.answer_all(self, || Err(LedgerError::PoolRemoved));
        }
        let header = match rmp_serde::from_slice::<Header>(header) {
            Ok(header) => header,
            Err(error) => {
                let error = broken(&error.to_string());
                return batch.answer_all(self, || Err(error.clone().into()));
            }
        };
        if answers.len() != batch.calls.len() {
            let error = broken("an answer of another number of calls");
            return batch.answer_all(self, || Err(error.clone().into()));
        }
        self.0.health.heard(&batch.slot, &header);
        batch.slot.heard(header);
        for (call, answer) in batch.calls.into_iter().zip(answers) {
            // A caller that has hung up hears nothing.
            let _ = call.answer.map(|waiting| waiting.send(Ok(answer)));
        }
        self.finish(&batch.slot);
    }
}

/// What the script gets as its clock: nothing, so that it asks Redis', unless a test has another.
pub(super) fn now_for(clock: &dyn crate::clock::Clock) -> Bytes {
    clock.injected().map_or_else(Bytes::new, |now| now.unix_ms().to_string().into())
}

pub(super) fn failed(failure: Failure) -> StoreError {
    StoreError::Unavailable { store: STORE, doing: "deciding", source: Arc::new(failure) }
}

pub(super) fn broken(said: &str) -> StoreError {
    let source = Arc::new(std::io::Error::other(said.to_owned()));
    StoreError::Unavailable { store: STORE, doing: "deciding", source }
}

pub(super) fn stopped() -> StoreError {
    broken("the service is stopping")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{ManualClock, SystemClock};

    #[test]
    fn a_released_service_leaves_the_time_to_redis() {
        assert_eq!(now_for(&SystemClock), "");
        assert_eq!(now_for(&ManualClock::new(crate::core::units::Timestamp::from_unix_ms(17))), "17");
    }
}
