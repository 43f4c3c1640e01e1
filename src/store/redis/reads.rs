//! Reads without a script: what arrives while reads are under way goes out together, Redis' clock with it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use fred::types::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::{
    batches::{broken, failed, stopped},
    client::{Client, Command, bytes_of, entries_of},
    health::Health,
    keys::{REMOVED, STATE},
    slot::Slot,
};
use crate::{
    clock::Clock,
    core::{ids::PoolRevision, units::Timestamp},
    store::LedgerError,
};

/// Most reads that go out together.
const READS_MAX: usize = 512;
/// Most reads that wait.
const WAITING_MAX: usize = 20_000;
/// Messages of reads that are under way together.
const MESSAGES_UNDER_WAY_MAX: usize = 4;
/// The same in a cluster, where each pool has its own.
const CLUSTER_MESSAGES_MAX: usize = 1_024;
/// How long Redis has to answer at least; whoever asked may wait for less.
const TIMEOUT_MIN: Duration = Duration::from_millis(500);

/// Fields of a pool's hash, and when they were read.
#[derive(Debug)]
pub(super) struct Fields {
    /// By Redis' clock.
    pub(super) at: Timestamp,
    /// In the order in which they were asked for.
    pub(super) values: Vec<Option<Bytes>>,
}

#[derive(Debug)]
struct Read {
    slot: Arc<Slot>,
    fields: Vec<Bytes>,
    answer: oneshot::Sender<Result<Fields, LedgerError>>,
}

/// Sends the reads of all pools.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    queue: mpsc::Sender<Read>,
    link: Link,
}

impl Reader {
    /// Starts to read, until it is dropped. Call within the Tokio runtime that lasts as long.
    pub(super) fn start(
        client: Client,
        health: Arc<Health>,
        clock: Arc<dyn Clock>,
        budget: Duration,
    ) -> Self {
        let (queue, receiver) = mpsc::channel(WAITING_MAX);
        let link = Link { client, health, clock, timeout: budget.max(TIMEOUT_MIN) };
        tokio::spawn(run(link.clone(), receiver));
        Self { queue, link }
    }

    /// Reads all fields of a pool's hash, and Redis' clock; `None`: the pool is removed.
    pub(super) async fn read_all(
        &self,
        slot: &Slot,
        budget: Duration,
    ) -> Result<Option<(Timestamp, Vec<(Bytes, Bytes)>)>, LedgerError> {
        let (link, reach) = (self.link.clone(), Arc::clone(&slot.reach));
        let key = slot.hash();
        let all = Command { name: "HGETALL", key: key.clone(), args: vec![key.clone()] };
        let mark = Command { name: "GET", key: key.clone(), args: vec![slot.mark()] };
        let time = Command { name: "TIME", key, args: Vec::new() };
        // A task of its own: it must not be dropped with the caller.
        let reading = tokio::spawn(async move {
            let answers = link.client.pipeline(vec![time, all, mark], budget).await;
            answers.inspect_err(|failure| link.health.fails(&reach, failure)).map_err(failed)
        });
        let answers = reading.await.unwrap_or_else(|_| Err(stopped())).map_err(LedgerError::Unreachable)?;
        let answers = answers.into_iter().collect::<Result<Vec<Value>, _>>();
        let answers = answers
            .map_err(failed)
            .inspect_err(|error| slot.fails(error))
            .map_err(LedgerError::Unreachable)?;
        // There are as many answers as questions.
        let mut answers = answers.into_iter();
        let said = answers.next().and_then(instant_of);
        let at = self.link.clock.injected().or(said).unwrap_or_default();
        let mut values = answers.next().map(entries_of).into_iter().flatten().filter_map(bytes_of);
        let pairs: Vec<_> = std::iter::from_fn(|| Some((values.next()?, values.next()?))).collect();
        let mark = answers.next().and_then(bytes_of);
        let is_removed = pairs.is_empty() && mark.is_some_and(|mark| mark == REMOVED);
        Ok(if is_removed { None } else { Some((at, pairs)) })
    }

    /// Reads fields of a pool's hash in one step; the first is its state.
    pub(super) async fn read(&self, slot: &Arc<Slot>, fields: Vec<Bytes>) -> Result<Fields, LedgerError> {
        let (answer, receiver) = oneshot::channel();
        let read = Read { slot: Arc::clone(slot), fields, answer };
        // The pool's failure mode decides.
        let full = |_| LedgerError::Unreachable(broken("too many reads wait for it"));
        self.queue.try_send(read).map_err(full)?;
        receiver.await.unwrap_or_else(|_| Err(LedgerError::Unreachable(stopped())))
    }
}

/// What a message of reads needs.
#[derive(Clone, Debug)]
struct Link {
    client: Client,
    health: Arc<Health>,
    clock: Arc<dyn Clock>,
    timeout: Duration,
}

/// Reads of one pool in one command: the state once, and then the other fields of each.
#[derive(Debug)]
struct Group {
    slot: Arc<Slot>,
    reads: Vec<Read>,
}

async fn run(link: Link, mut queue: mpsc::Receiver<Read>) {
    let clustered = link.client.is_clustered();
    let under_way = if clustered { CLUSTER_MESSAGES_MAX } else { MESSAGES_UNDER_WAY_MAX };
    let under_way = Arc::new(Semaphore::new(under_way));
    let mut reads = Vec::with_capacity(READS_MAX);
    loop {
        let Ok(permit) = Arc::clone(&under_way).acquire_owned().await else { return };
        if queue.recv_many(&mut reads, READS_MAX).await == 0 {
            return;
        }
        let groups = grouped(reads.drain(..).filter(|read| !read.answer.is_closed()));
        if !clustered {
            tokio::spawn(link.clone().send(groups, permit));
            continue;
        }
        // A node that is slow must not keep the pools of others waiting.
        drop(permit);
        for group in groups {
            let Ok(permit) = Arc::clone(&under_way).acquire_owned().await else { return };
            tokio::spawn(link.clone().send(vec![group], permit));
        }
    }
}

fn grouped(reads: impl Iterator<Item = Read>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut places: HashMap<PoolRevision, usize> = HashMap::new();
    for read in reads {
        let place = *places.entry(read.slot.pool).or_insert_with(|| {
            groups.push(Group { slot: Arc::clone(&read.slot), reads: Vec::new() });
            groups.len() - 1
        });
        groups[place].reads.push(read);
    }
    groups
}

impl Link {
    async fn send(self, groups: Vec<Group>, _under_way: OwnedSemaphorePermit) {
        let Some(first) = groups.first() else { return };
        let time = Command { name: "TIME", key: first.slot.hash(), args: Vec::new() };
        let hashes = groups.iter().map(Group::command);
        match self.client.pipeline([time].into_iter().chain(hashes).collect(), self.timeout).await {
            Ok(answers) => {
                groups.iter().for_each(|group| group.slot.reach.answered());
                let mut answers = answers.into_iter();
                let said = answers.next().and_then(Result::ok).and_then(instant_of);
                if let Some(at) = said {
                    self.health.clock_said(at);
                }
                let at = self.clock.injected().or(said).unwrap_or_default();
                for (group, answer) in groups.into_iter().zip(answers) {
                    match answer {
                        Ok(values) => group.answer(at, entries_of(values)),
                        Err(failure) => {
                            let error = failed(failure);
                            group.slot.fails(&error);
                            group.fail(&LedgerError::Unreachable(error));
                        }
                    }
                }
            }
            Err(failure) => {
                groups.iter().for_each(|group| self.health.fails(&group.slot.reach, &failure));
                let error = LedgerError::Unreachable(failed(failure));
                groups.into_iter().for_each(|group| group.fail(&error));
            }
        }
    }
}

impl Group {
    fn command(&self) -> Command {
        let key = self.slot.hash();
        let others = self.reads.iter().flat_map(|read| read.fields.iter().skip(1).cloned());
        let args = [key.clone(), Bytes::from_static(STATE)].into_iter().chain(others).collect();
        Command { name: "HMGET", key, args }
    }

    fn fail(self, error: &LedgerError) {
        for read in self.reads {
            // Whoever has hung up hears nothing.
            let _ = read.answer.send(Err(error.clone()));
        }
    }

    fn answer(self, at: Timestamp, values: Vec<Value>) {
        let mut values = values.into_iter().map(bytes_of);
        let state = values.next().flatten();
        for read in self.reads {
            let others = values.by_ref().take(read.fields.len() - 1);
            let values = [state.clone()].into_iter().chain(others).collect();
            // Whoever has hung up hears nothing.
            let _ = read.answer.send(Ok(Fields { at, values }));
        }
    }
}

/// The instant in an answer of TIME.
pub(super) fn instant_of(answer: Value) -> Option<Timestamp> {
    let parts = entries_of(answer)
        .into_iter()
        .map(|part| std::str::from_utf8(&bytes_of(part)?).ok()?.parse::<u64>().ok());
    let [seconds, micros] = parts.collect::<Option<Vec<u64>>>()?[..] else { return None };
    Some(Timestamp::from_unix_ms(seconds * 1_000 + micros / 1_000))
}
