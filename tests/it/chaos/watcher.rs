//! An operator, who looks at usage and reservations all the time, at one replica or another.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{pools::SharedPool, run::Course};
use crate::harness::{Client, pb, unix_ms};

const REST: Duration = Duration::from_millis(40);

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) looks: u64,
    /// The most that was consumed and reserved at once, by pool.
    pub(super) most_used: BTreeMap<String, f64>,
    /// What was consumed at the last look, by pool and dimension: it never falls.
    consumed: BTreeMap<(String, &'static str), f64>,
    pub(super) broken: Vec<String>,
}

/// Looks until the run is over.
pub(super) async fn watch(replicas: Vec<Client>, pools: Vec<SharedPool>, course: Course, seed: u64) -> Seen {
    let mut random = StdRng::seed_from_u64(seed);
    let mut seen = Seen::default();
    while !course.is_over() {
        course.pause(REST).await;
        let replica = random.random_range(0..replicas.len());
        let pool = &pools[random.random_range(0..pools.len())];
        if let Some(usage) = usage_of(&replicas[replica], pool).await {
            seen.looks += 1;
            seen.look_at(pool, &usage, &format!("{:.3?}, replica {replica}", course.elapsed()));
        }
        let at = course.elapsed();
        let overdue = overdue(&replicas[replica], pool).await;
        seen.broken.extend(overdue.map(|overdue| format!("{at:.3?}, replica {replica}: {overdue}")));
    }
    seen
}

impl Seen {
    fn look_at(&mut self, pool: &SharedPool, usage: &pb::PoolUsage, place: &str) {
        for name in pool.dimensions() {
            let now = usage.dimension(name);
            let last = self.consumed.insert((pool.id.clone(), name), now.consumed).unwrap_or(0.0);
            if now.consumed < last {
                let (id, now) = (&pool.id, now.consumed);
                self.broken.push(format!("{place}: {name} in {id} fell from {last} to {now}"));
            }
            let most = self.most_used.entry(pool.id.clone()).or_default();
            *most = most.max(now.consumed + now.reserved);
        }
    }
}

/// The usage of a pool with all its keys; `None` where it cannot be had from the counters now.
pub(crate) async fn usage_of(replica: &Client, pool: &SharedPool) -> Option<pb::PoolUsage> {
    let request =
        pb::GetPoolUsageRequest { pool_id: pool.id.clone(), page_size: 1_000, ..Default::default() };
    let usage = replica.pools().get_pool_usage(request).await.ok()?.into_inner().usage?;
    (!usage.degraded).then_some(usage)
}

/// A reservation that is there after its deadline, if one is shown. Redis' clock is this machine's.
pub(super) async fn overdue(replica: &Client, pool: &SharedPool) -> Option<String> {
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970").as_millis() as u64;
    let request =
        pb::ListReservationsRequest { pool_id: pool.id.clone(), page_size: 1_000, ..Default::default() };
    let listed = replica.pools().list_reservations(request).await.ok()?.into_inner().reservations;
    let overdue = listed.iter().find(|reservation| unix_ms(&reservation.expires_at) <= now_ms)?;
    let late_ms = now_ms - unix_ms(&overdue.expires_at);
    Some(format!("{:?} in {} is there {late_ms} ms after its deadline", overdue.reservation_id, pool.id))
}
