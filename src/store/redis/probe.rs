//! Whether what is out of reach is back, and which replicas are there.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use fred::types::Value;
use tokio::{task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    client::{Client, Command, Failure, sha_of},
    health::Health,
    keys::{PROBE_KEY, REPLICAS_KEY, probe_of},
    reach::Reach,
    slot::Slot,
};

/// How often what is out of reach is probed.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// How long a probe waits for its answer.
const PROBE_TIMEOUT: Duration = Duration::from_millis(250);
/// Most probes at once.
const PROBES_MAX: usize = 64;
/// As records are written: by a script, which needs memory and a server that may be written to.
const PROBE: &str = "return redis.call('SET', KEYS[1], '', 'PX', 60000)";

/// How often a replica says that it is there.
const BEAT_INTERVAL: Duration = Duration::from_secs(1);
const BEAT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long it is there after it has said so, by Redis' clock.
const ALIVE_MS: u64 = 5_000;
/// How long it is kept who was there last.
const REPLICAS_LIFE_MS: &str = "60000";

/// Probes what is out of reach, until `stop`.
pub(super) async fn probe(
    client: Client,
    health: Arc<Health>,
    reach: Arc<Reach>,
    pools: impl Fn() -> Vec<Arc<Slot>> + Send,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = sleep(PROBE_INTERVAL) => {}
            () = stop.cancelled() => return,
        }
        // Before anything was ever reached, there is more to look at.
        if !health.may_write() {
            continue;
        }
        if reach.is_degraded() {
            probe_one(&client, &health, &reach, Bytes::from_static(PROBE_KEY.as_bytes())).await;
        } else if client.is_clustered() {
            let degraded = pools().into_iter().filter(|slot| slot.reach.is_degraded()).take(PROBES_MAX);
            let mut probes = JoinSet::new();
            for slot in degraded {
                let (client, health) = (client.clone(), Arc::clone(&health));
                let probe =
                    async move { probe_one(&client, &health, &slot.reach, probe_of(slot.pool)).await };
                probes.spawn(probe);
            }
            probes.join_all().await;
        }
    }
}

async fn probe_one(client: &Client, health: &Health, reach: &Reach, key: Bytes) {
    let call = |name, script: Bytes| {
        let args = vec![script, Bytes::from_static(b"1"), key.clone()];
        client.call(Command { name, key: key.clone(), args }, PROBE_TIMEOUT)
    };
    let mut answer = call("EVALSHA", sha_of(PROBE)).await;
    if answer.as_ref().is_err_and(Failure::is_no_script) {
        answer = call("EVAL", Bytes::from_static(PROBE.as_bytes())).await;
    }
    match answer {
        Ok(_) => health.writes(reach),
        Err(failure) => health.fails(reach, &failure),
    }
}

/// Says that `sender` is there, once it is known to be in the right place, and finds out how many are, until `stop`.
pub(super) async fn beat(
    client: Client,
    health: Arc<Health>,
    (reach, admits): (Arc<Reach>, Arc<AtomicBool>),
    sender: [u8; 16],
    live: Arc<AtomicU64>,
    stop: CancellationToken,
) {
    let mut steady_since = Instant::now();
    loop {
        let is_in_reach = health.may_write() && !reach.is_degraded() && admits.load(Ordering::Relaxed);
        let beaten =
            if is_in_reach { beat_once(&client, &health, sender).await } else { Err(Failure::NotSent) };
        match &beaten {
            Ok(count) => {
                // After an outage, whoever is back first sees nobody: the others may be back in a moment.
                let is_steady = steady_since.elapsed() >= Duration::from_millis(ALIVE_MS);
                let least = if is_steady { 1 } else { live.load(Ordering::Relaxed) };
                live.store(least.max(*count), Ordering::Relaxed);
            }
            Err(failure) => {
                steady_since = Instant::now();
                // Nobody else may ask for anything. Of a cluster, this is one node of many.
                if is_in_reach && !client.is_clustered() {
                    health.unanswered(&reach, failure, BEAT_TIMEOUT);
                }
            }
        }
        let pause = if beaten.is_ok() { BEAT_INTERVAL } else { PROBE_INTERVAL };
        tokio::select! {
            () = sleep(pause) => {}
            () = stop.cancelled() => break,
        }
    }
    if health.may_write() {
        // Where it cannot be said, the others find out.
        let _ = client.call(replicas("ZREM", &[&sender]), BEAT_TIMEOUT).await;
    }
}

async fn beat_once(client: &Client, health: &Health, sender: [u8; 16]) -> Result<u64, Failure> {
    let now_ms = health.now().unix_ms();
    let (now, oldest) = (now_ms.to_string(), now_ms.saturating_sub(ALIVE_MS).to_string());
    let commands = vec![
        replicas("ZADD", &[now.as_bytes(), &sender]),
        replicas("ZREMRANGEBYSCORE", &[b"-inf", oldest.as_bytes()]),
        replicas("PEXPIRE", &[REPLICAS_LIFE_MS.as_bytes()]),
        replicas("ZCARD", &[]),
    ];
    let mut answers = client.pipeline(commands, BEAT_TIMEOUT).await?.into_iter();
    match answers.next_back() {
        Some(Ok(Value::Integer(count))) => Ok(u64::try_from(count).unwrap_or_default()),
        Some(Err(failure)) => Err(failure),
        _ => Ok(1),
    }
}

fn replicas(name: &'static str, args: &[&[u8]]) -> Command {
    let key = Bytes::from_static(REPLICAS_KEY.as_bytes());
    let args = args.iter().map(|arg| Bytes::copy_from_slice(arg));
    Command { name, key: key.clone(), args: [key].into_iter().chain(args).collect() }
}
