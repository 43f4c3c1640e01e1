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
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::{
    STORE,
    client::{Client, Command, Failure, bytes_of, entries_of, sha_of},
    health::Health,
    slot::{Batch, Counted, Lost, Slot, Waiting},
    ticket::{Stage, Ticket},
    wire::{self, Call, Header},
};
use crate::store::{BatchName, EntryId, Journal, LedgerError, StoreError};

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
const ATTEMPT_MAX: Duration = Duration::from_secs(1);
/// How long it takes from a failed attempt to the next.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(200);
/// Until what could not be written to the journal is tried again.
const JOURNAL_PAUSE: Duration = Duration::from_millis(200);

pub(super) type Answer = Result<Bytes, LedgerError>;

impl Batch {
    fn answer_all(self, sender: &Sender, answer: impl Fn() -> Answer) {
        for call in self.calls {
            // A caller that has hung up hears nothing.
            let _ = call.answer.map(|waiting| waiting.send(answer()));
        }
        if self.former_sender.is_none() {
            sender.finish(&self.slot);
        }
    }

    fn name(&self, own: [u8; 16]) -> BatchName {
        BatchName { sender: self.former_sender.unwrap_or(own), sequence: self.sequence }
    }

    /// The script has had it, or never will; returns the entries of the journal to be seen to.
    fn end(&self, stage: Stage) -> Vec<EntryId> {
        self.calls.iter().filter_map(|call| call.end(stage)).collect()
    }
}

/// What the script says of one batch.
#[derive(Debug)]
struct Reply {
    header: Bytes,
    answers: Vec<Bytes>,
}

impl Reply {
    /// What is in `value`, or why the batch has failed.
    fn of(value: Value) -> Result<Self, String> {
        let mut entries = entries_of(value).into_iter();
        if let Some(header) = entries.next().and_then(bytes_of) {
            return Ok(Self { header, answers: entries.filter_map(bytes_of).collect() });
        }
        let said = entries.next().and_then(bytes_of).unwrap_or_default();
        Err(String::from_utf8_lossy(&said).into_owned())
    }
}

/// What is left of batches that Redis has answered.
#[derive(Debug, Default)]
struct Left {
    batches: Vec<Batch>,
    /// Why Redis would not write them.
    failure: Option<Failure>,
}

/// Sends the calls of all pools.
#[derive(Clone, Debug)]
pub(super) struct Sender(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Client,
    health: Arc<Health>,
    journal: Arc<dyn Journal>,
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
        journal: Arc<dyn Journal>,
        name: [u8; 16],
        clock: Arc<dyn crate::clock::Clock>,
    ) -> Self {
        let (ready, receiver) = mpsc::unbounded_channel();
        let script_sha = sha_of(SCRIPT);
        let stop = CancellationToken::new();
        let sender = Self(Arc::new(Inner {
            client,
            health,
            journal,
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

    /// Names this process among senders.
    pub(super) fn name(&self) -> [u8; 16] {
        self.0.name
    }

    /// Sends a call with the next batch of its pool.
    pub(super) fn submit(
        &self,
        slot: &Arc<Slot>,
        call: Call,
        makes: Option<[u8; 12]>,
        ticket: Option<Arc<Ticket>>,
    ) -> Result<oneshot::Receiver<Answer>, LedgerError> {
        let (answer, receiver) = oneshot::channel();
        self.push(slot, self.waiting(call, Some(answer), makes, ticket))?;
        Ok(receiver)
    }

    /// The same where nobody waits for the answer.
    pub(super) fn submit_unheard(&self, slot: &Arc<Slot>, call: Call) -> Result<(), LedgerError> {
        self.push(slot, self.waiting(call, None, None, None))
    }

    /// Sends a batch of a process that has ended, as far as the journal has kept it. The answer says whether the script has
    /// had it by now.
    pub(super) async fn send_former(
        &self,
        slot: &Arc<Slot>,
        name: BatchName,
        calls: Vec<(Call, EntryId)>,
    ) -> Result<(), LedgerError> {
        let mut answers = Vec::new();
        let calls = calls.into_iter().map(|(call, entry)| {
            let (answer, receiver) = oneshot::channel();
            answers.push(receiver);
            self.waiting(call, Some(answer), None, Some(Arc::new(Ticket::new(Some(entry)))))
        });
        let calls = calls.collect();
        let BatchName { sender, sequence } = name;
        let batch = Batch {
            slot: Arc::clone(slot),
            former_sender: Some(sender),
            sequence,
            previous: 0,
            replays: Vec::new(),
            calls,
        };
        tokio::spawn(self.clone().send(vec![batch], None));
        for answer in answers {
            answer.await.unwrap_or_else(|_| Err(LedgerError::Unreachable(stopped())))?;
        }
        Ok(())
    }

    fn waiting(
        &self,
        call: Call,
        answer: Option<oneshot::Sender<Answer>>,
        makes: Option<[u8; 12]>,
        ticket: Option<Arc<Ticket>>,
    ) -> Waiting {
        Waiting { call, answer, makes, ticket, _counted: Counted::new(&self.0.unanswered) }
    }

    fn push(&self, slot: &Arc<Slot>, waiting: Waiting) -> Result<(), LedgerError> {
        if self.0.stop.is_cancelled() {
            return Err(LedgerError::Unreachable(stopped()));
        }
        self.0.health.check_layout()?;
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
                tokio::spawn(self.clone().send(batches, Some(permit)));
            }
        }
    }

    /// Sends batches until it is known what became of them.
    async fn send(self, batches: Vec<Batch>, _under_way: Option<OwnedSemaphorePermit>) {
        let Some(mut batches) = self.assign(batches).await else { return };
        let sent_at = self.0.health.now();
        let mut command = self.command(&batches);
        let (mut timeout, mut pause, mut uncertain) = (ATTEMPT_MIN, PAUSE_MIN, false);
        loop {
            let result = tokio::select! {
                result = self.0.client.call(command.clone(), timeout) => result,
                () = self.0.stop.cancelled() => return,
            };
            let failure = match result {
                Ok(replies) => {
                    let left = self.distribute(batches, replies).await;
                    batches = left.batches;
                    if batches.is_empty() {
                        return;
                    }
                    command = self.command(&batches);
                    let Some(failure) = left.failure else { continue };
                    failure
                }
                Err(failure) if failure.is_no_script() => {
                    // EVAL leaves the script in the cache of the node that had lost it.
                    command = Command { name: "EVAL", args: self.args(SCRIPT.into(), &batches), ..command };
                    continue;
                }
                Err(failure) => failure,
            };
            let back = self.0.health.back.notified();
            self.fails(&batches, &failure, timeout);
            uncertain |= failure.is_unknown();
            if failure.is_final() && !uncertain {
                return self.give_up(batches, &failed(failure)).await;
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = back => {}
                () = self.0.stop.cancelled() => return,
            }
            if !uncertain {
                batches = self.wanted(batches);
                if batches.is_empty() {
                    return;
                }
            }
            // An outage may lie between this attempt and the last.
            batches
                .iter_mut()
                .flat_map(|batch| &mut batch.calls)
                .for_each(|waiting| waiting.call.date(sent_at));
            command = self.command(&batches);
            (timeout, pause) = ((2 * timeout).min(ATTEMPT_MAX), (2 * pause).min(PAUSE_MAX));
        }
    }

    /// Says to the journal which batches carry what it has, before they do. `None`: it cannot be said, and nothing is sent.
    async fn assign(&self, batches: Vec<Batch>) -> Option<Vec<Batch>> {
        let own = batches.iter().filter(|batch| batch.former_sender.is_none());
        let carried = own.flat_map(|batch| {
            let name = Some(batch.name(self.0.name));
            batch.calls.iter().filter_map(Waiting::entry).map(move |entry| (entry, name))
        });
        let carried: Vec<_> = carried.collect();
        if !carried.is_empty()
            && let Err(error) = self.0.journal.assign(carried).await
        {
            for batch in batches {
                batch.end(Stage::NotDone);
                batch.answer_all(self, || Err(LedgerError::Unreachable(error.clone())));
            }
            return None;
        }
        Some(batches)
    }

    fn fails(&self, batches: &[Batch], failure: &Failure, waited: Duration) {
        for batch in batches {
            self.0.health.unanswered(&batch.slot.reach, failure, waited);
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
        let (mut keys, mut messages) = (Vec::new(), Vec::new());
        for batch in batches {
            let name = batch.name(self.0.name);
            for replay in &batch.replays {
                keys.extend(batch.slot.keys.iter().cloned());
                let name = BatchName { sequence: replay.sequence, ..name };
                messages.push(Bytes::from(wire::batch(name, 0, replay.calls.iter())));
            }
            keys.extend(batch.slot.keys.iter().cloned());
            let calls = batch.calls.iter().map(|waiting| &waiting.call);
            messages.push(Bytes::from(wire::batch(name, batch.previous, calls)));
        }
        let count = keys.len().to_string().into();
        [script, count].into_iter().chain(keys).chain([now_for(&*self.0.clock)]).chain(messages).collect()
    }

    /// It is known that Redis has not had `batches`, and they are not sent again.
    async fn give_up(&self, batches: Vec<Batch>, error: &StoreError) {
        for batch in batches {
            if batch.former_sender.is_none() && !self.withdraw_entries(batch.end(Stage::NotDone)).await {
                return;
            }
            batch.answer_all(self, || Err(LedgerError::Unreachable(error.clone())));
        }
    }

    /// Says to the journal that no batch has carried `entries`: later batches would be taken for a sign that one has. False
    /// if the service stops before.
    async fn withdraw_entries(&self, entries: Vec<EntryId>) -> bool {
        let none: Vec<_> = entries.into_iter().map(|entry| (entry, None)).collect();
        while !none.is_empty() && self.0.journal.assign(none.clone()).await.is_err() {
            tokio::select! {
                () = sleep(JOURNAL_PAUSE) => {}
                () = self.0.stop.cancelled() => return false,
            }
        }
        true
    }

    /// Drops what has reached the store from the journal, as soon as it can be written. Should the service stop before, the
    /// script says at the next start that it was there.
    pub(super) fn remove_entries(&self, entries: Vec<EntryId>) {
        if !entries.is_empty() {
            tokio::spawn(self.clone().remove_in_the_end(entries));
        }
    }

    async fn remove_in_the_end(self, entries: Vec<EntryId>) {
        while self.0.journal.remove(entries.clone()).await.is_err() {
            tokio::select! {
                () = sleep(JOURNAL_PAUSE) => {}
                () = self.0.stop.cancelled() => return,
            }
        }
    }

    /// Answers what was done; returns what has to be sent again.
    async fn distribute(&self, batches: Vec<Batch>, replies: Value) -> Left {
        let mut replies = entries_of(replies).into_iter();
        let mut left = Left::default();
        for mut batch in batches {
            for _ in batch.replays.drain(..) {
                // Whoever has called has had an answer.
                let reply = replies.next().map(Reply::of);
                left.failure = left.failure.or(reply.and_then(|reply| reply.err()).map(Failure::said));
            }
            let said = match Reply::of(replies.next().unwrap_or(Value::Null)) {
                Ok(Reply { header, answers }) => {
                    left.batches.extend(self.distribute_one(batch, &header, answers));
                    continue;
                }
                Err(said) => said,
            };
            if let Some(failure) = Failure::of_script(&said) {
                left.failure = Some(failure);
                left.batches.push(batch);
                continue;
            }
            let error = broken(&said);
            batch.slot.fails(&error);
            self.give_up(vec![batch], &error).await;
        }
        left
    }

    /// Answers what was done of one batch; returns it if it has to be sent again.
    fn distribute_one(&self, mut batch: Batch, header: &[u8], answers: Vec<Bytes>) -> Option<Batch> {
        self.0.health.writes(&batch.slot.reach);
        match rmp_serde::from_slice::<&str>(header) {
            Ok("removed") => {
                batch.slot.remove();
                self.remove_entries(batch.end(Stage::Done));
                batch.answer_all(self, || Err(LedgerError::PoolRemoved));
                return None;
            }
            Ok("behind") => {
                let done = answers.first().and_then(|done| rmp_serde::from_slice(done).ok()).unwrap_or(0);
                let Lost { replays, missing_batches, holds } = batch.slot.lost(done);
                self.0.health.lost(&batch.slot, replays.len() as u64, missing_batches, holds);
                batch.previous = replays.last().map_or(done, |replay| replay.sequence);
                batch.replays = replays;
                return Some(batch);
            }
            _ => {}
        }
        let is_former = batch.former_sender.is_some();
        let header = rmp_serde::from_slice::<Header>(header).map_err(|error| broken(&error.to_string()));
        let header = header.and_then(|header| match answers.len() {
            count if is_former || count == batch.calls.len() => Ok(header),
            _ => Err(broken("an answer of another number of calls")),
        });
        let header = match header {
            Ok(header) => header,
            Err(error) => {
                batch.answer_all(self, || Err(error.clone().into()));
                return None;
            }
        };
        self.remove_entries(batch.end(Stage::Done));
        self.0.health.heard(&batch.slot, &header);
        if is_former {
            batch.answer_all(self, || Ok(Bytes::new()));
            return None;
        }
        let (calls, callers): (Vec<Call>, Vec<_>) =
            batch.calls.into_iter().map(|waiting| (waiting.call, (waiting.answer, waiting._counted))).unzip();
        // Before anybody is told: whoever is may look at once.
        batch.slot.heard(batch.sequence, header, calls);
        for ((caller, _counted), answer) in callers.into_iter().zip(answers) {
            // A caller that has hung up hears nothing.
            let _ = caller.map(|caller| caller.send(Ok(answer)));
        }
        self.finish(&batch.slot);
        None
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
