//! The one writer: commits what all pools have gathered while the commit before was under way.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sqlx::SqlitePool;
use tokio::sync::{mpsc, watch};

use super::{
    ledger::{Commit, Order, Shared, Slot, Waiting},
    log::{Effects, Log},
    unavailable,
};
use crate::{
    core::{
        ids::PoolRevision,
        ledger::{CLOCK_STEP_MS, Change},
        units::Timestamp,
    },
    store::StoreError,
};

/// Most pools whose changes share a commit: bounds the time that one commit takes.
const POOLS_PER_COMMIT_MAX: usize = 4_096;

/// How often a failing disk is asked whether it is back.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Commits until it is told to stop and everything that was asked for before is durable.
pub(super) async fn run(
    shared: Arc<Shared>,
    connection: SqlitePool,
    mut log: Log,
    mut orders: mpsc::UnboundedReceiver<Order>,
    mut last_seen: Timestamp,
    committed: impl Fn(Commit),
) {
    let mut received = Vec::new();
    // What every pool has moved after the clock went back. It is carried by the commit that says so: at the next start,
    // what lies ahead of the time last seen is left over.
    let mut moved = Vec::new();
    let mut failing = shared.disk.follow();
    loop {
        // What is known already is not told again.
        failing.mark_unchanged();
        if !receive(&mut orders, &mut received, pause(&shared, &log), &mut failing).await {
            break;
        }
        let mut batch = Vec::with_capacity(received.len());
        for order in received.drain(..) {
            let Order::Commit(slot) = order else {
                // What was sent before is still received; nothing more can be sent.
                orders.close();
                continue;
            };
            let waiting = slot.start_commit();
            batch.push((slot, waiting));
        }
        let now = shared.clock.now();
        if last_seen.ms_since(now) > CLOCK_STEP_MS {
            let all = shared.slots().into_iter().map(|slot| (slot.pool, slot.step_back(now)));
            moved.extend(all.filter(|(_, changes)| !changes.is_empty()));
        }
        let seen = stand_still(last_seen, now);
        let started = Instant::now();
        let effects = effects(&batch, &moved);
        let result = log.commit(&connection, &effects, seen).await.map_err(unavailable("committing"));
        let (elapsed, succeeded) = (started.elapsed(), result.is_ok());
        let calls: u64 = batch.iter().map(|(_, waiting)| waiting.len() as u64).sum();
        if calls > 0 {
            committed(Commit { calls, elapsed, succeeded });
        }
        if result.is_ok() {
            last_seen = seen;
            moved.clear();
        }
        shared.disk.tell(&result);
        for (slot, waiting) in batch {
            let undone = finish(&shared, &slot, waiting, &result);
            if !moved.is_empty() {
                moved.push((slot.pool, unmoved(&undone, now)));
            }
        }
    }
    if let Err(error) = log.finish(&connection, last_seen).await {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(error, "the tables are behind the log: the next start brings them up to date");
    }
}

/// What is done to each pool, in the order in which it was done.
fn effects<'a>(
    batch: &'a [(Arc<Slot>, Vec<Waiting>)],
    moved: &'a [(PoolRevision, Vec<Change>)],
) -> Effects<'a> {
    let waiting = batch.iter().map(|(slot, waiting)| {
        (slot.pool, waiting.iter().flat_map(|call| &call.changes).collect::<Vec<_>>())
    });
    let moved = moved.iter().map(|(pool, changes)| (*pool, changes.iter().collect()));
    waiting.chain(moved).filter(|(_, changes)| !changes.is_empty()).collect()
}

/// How long to wait for orders: while the disk is failing it is asked whether it is back, and the log has a time of its
/// own.
fn pause(shared: &Shared, log: &Log) -> Option<Duration> {
    if shared.disk.is_failing() { Some(PROBE_INTERVAL) } else { log.due_in() }
}

/// Waits for orders; false if there will be none. After `pause`, and when somebody else has found the disk sick or well, an
/// empty list comes by: a commit of nothing but the time and what the log has to do.
async fn receive(
    orders: &mut mpsc::UnboundedReceiver<Order>,
    into: &mut Vec<Order>,
    pause: Option<Duration>,
    failing: &mut watch::Receiver<Option<StoreError>>,
) -> bool {
    let paused = async {
        match pause {
            Some(pause) => tokio::time::sleep(pause).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        count = orders.recv_many(into, POOLS_PER_COMMIT_MAX) => count > 0,
        () = paused => true,
        _ = failing.changed() => true,
    }
}

/// The clock as the ledgers take it: back only by a step that is believed.
fn stand_still(last_seen: Timestamp, clock: Timestamp) -> Timestamp {
    if last_seen.ms_since(clock) > CLOCK_STEP_MS { clock } else { last_seen.max(clock) }
}

/// What undoes the moves of effects that were moved with everything else when the clock went back to `now`, and that are
/// undone now.
fn unmoved(undone: &[Change], now: Timestamp) -> Vec<Change> {
    let mut changes = Vec::new();
    for change in undone {
        match change {
            Change::Consumed { api_key, counter, bucket, delta }
                if *bucket > counter.dimension.window.bucket(now) =>
            {
                let present = counter.dimension.window.bucket(now);
                for (bucket, delta) in [(*bucket, *delta), (present, -delta)] {
                    let (api_key, counter) = (api_key.clone(), counter.clone());
                    changes.push(Change::Consumed { api_key, counter, bucket, delta });
                }
            }
            Change::Held(random, hold) => changes.push(Change::Freed(*random, Arc::clone(hold))),
            _ => {}
        }
    }
    changes
}

/// Answers the calls of a commit. If it failed, their effects are undone, and all that was done on top of them; returns
/// what was.
fn finish(
    shared: &Shared,
    slot: &Slot,
    waiting: Vec<Waiting>,
    result: &Result<(), StoreError>,
) -> Vec<Change> {
    let mut answered = waiting;
    let mut undone = Vec::new();
    {
        let mut state = slot.state.lock();
        state.committing = false;
        if result.is_err() {
            answered.append(&mut state.waiting);
            undone.extend(answered.iter_mut().flat_map(|call| std::mem::take(&mut call.changes)));
            // Looks let time pass too: what ended is not in any call yet.
            undone.extend(state.ledger.take_changes());
            if !state.removed {
                state.ledger.revert(undone.clone());
                shared.account(&mut state);
            }
        }
    }
    for call in answered {
        // A caller that has hung up has its effect all the same.
        let _ = call.answer.send(result.clone());
    }
    undone
}
