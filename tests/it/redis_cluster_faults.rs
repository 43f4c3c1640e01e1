//! The driver redis on a cluster: its pools are everywhere, its slots move, and its masters fail by themselves.

use quota_share::store::Ledger;

use crate::{
    harness::{TestCluster, redis_is_missing},
    redis_team::{COUNTED, HOUR_MS, Team, a, b, reached, standing, until},
};

/// The slot of a pool, and the master that had it at the start.
async fn place_of(cluster: &TestCluster, team: &Team) -> (u16, usize) {
    let slot = cluster.cli(0, &["CLUSTER", "KEYSLOT", &team.hash()]).await.parse::<u16>().expect("a slot");
    (slot, (0..3).rfind(|node| 16_384 * node / 3 <= usize::from(slot)).expect("some node"))
}

#[tokio::test]
async fn pools_are_on_every_master_of_a_cluster() {
    if redis_is_missing() {
        return;
    }
    let cluster = TestCluster::shared().await;
    let ledger = reached(&cluster.url(), standing()).await;
    let mut pools_of = [0; 3];
    for _ in 0..40 {
        let mut team = Team::usual(&ledger, 1e9);
        team.must_record(&a(1)).await;
        let (_, node) = place_of(cluster, &team).await;
        assert_eq!(cluster.cli(node, &["EXISTS", &team.hash()]).await, "1");
        pools_of[node] += 1;
    }
    assert!(pools_of.iter().all(|pools| *pools > 0), "{pools_of:?}");
}

#[tokio::test]
async fn a_slot_that_moves_under_load_loses_nothing_and_counts_nothing_twice() {
    if redis_is_missing() {
        return;
    }
    let cluster = TestCluster::start().await;
    let ledger = reached(&cluster.url(), standing()).await;
    let team = Team::usual(&ledger, 1e9);
    let (slot, from) = place_of(&cluster, &team).await;
    let calling = (0..4).map(|caller| {
        let mut team = team.clone();
        tokio::spawn(async move {
            for turn in 0..150_u64 {
                team.rig.skip_names(1_000 * (caller + 1));
                let key = if turn % 2 == 0 { format!("{caller} {turn}") } else { String::new() };
                assert_eq!(team.record(&a(1), &key, "").await.expect("there is time"), COUNTED);
                let held = team.must_hold(&b(1), HOUR_MS).await;
                team.check(&a(1)).await.expect("there is time");
                assert_eq!(team.record(&b(2), "", &held.to_string()).await.expect("there is time"), COUNTED);
            }
        })
    });
    let calling: Vec<_> = calling.collect();
    until("they have begun", async || team.total().await.0 > 20.0).await;
    for (from, to) in [(from, (from + 1) % 3), ((from + 1) % 3, (from + 2) % 3)] {
        cluster.move_slot(slot, from, to).await;
    }
    for caller in calling {
        caller.await.expect("every call is answered");
    }
    assert_eq!((team.total().await, team.usage().await.open_reservations), ((1_800.0, 0.0), 0));
    assert_eq!(ledger.condition().vanished_pools, 0);
}

#[tokio::test]
async fn a_master_that_dies_while_it_is_given_a_slot_takes_no_other_along() {
    if redis_is_missing() {
        return;
    }
    let mut cluster = TestCluster::start().await;
    for node in cluster.nodes() {
        assert_eq!(node.cli(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await, "OK");
    }
    let ledger = reached(&cluster.url(), standing()).await;
    let mut team = Team::usual(&ledger, 1e9);
    team.must_record(&a(1)).await;
    let (slot, from) = place_of(&cluster, &team).await;
    let (to, slot) = ((from + 1) % 3, slot.to_string());
    let [from_id, to_id] =
        [cluster.cli(from, &["CLUSTER", "MYID"]).await, cluster.cli(to, &["CLUSTER", "MYID"]).await];
    assert_eq!(cluster.cli(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await, "OK");
    assert_eq!(cluster.cli(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await, "OK");
    // Of a pool that has no key there, the old master sends everybody to the new one.
    for key in cluster.cli(from, &["--scan"]).await.lines().filter(|key| key.starts_with(&team.hash())) {
        assert_eq!(cluster.cli(from, &["DEL", key]).await, "1");
    }
    cluster.nodes_mut()[to].kill();
    let mut calling = team.clone();
    let calling = tokio::spawn(async move { calling.record(&a(1), "", "").await });
    until("it has been tried", async || !crate::redis_team::failing(&ledger).is_empty()).await;
    let third = (from + 2) % 3;
    until("the others know that it is gone", async || {
        cluster.cli(third, &["CLUSTER", "NODES"]).await.contains("fail ")
    })
    .await;
    assert_eq!(cluster.cli(from, &["CLUSTER", "SETSLOT", &slot, "STABLE"]).await, "OK");
    cluster.nodes_mut()[to].restart().await;
    assert_eq!(calling.await.expect("no panic").expect("there is time"), COUNTED);
}
