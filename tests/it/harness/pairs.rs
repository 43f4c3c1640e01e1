//! Redis servers that take over from each other: a master and its replica behind Sentinels, or several in a cluster.

use std::time::{Duration, Instant};

use futures::future::join_all;
use tempfile::TempDir;

use super::{TestCluster, TestRedis, process::PATIENCE};

const POLL: Duration = Duration::from_millis(20);
const SENTINELS: usize = 3;
const MASTERS: usize = 3;
/// When a replica that has not taken over by itself is ordered to.
const ORDERED_AFTER: Duration = Duration::from_secs(20);
/// When it is ordered again: it is given up after five seconds.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(8);
/// What the Sentinels call the master.
const SERVICE: &str = "quota";

/// Masters with a replica each, which takes over when its master is gone. They keep nothing but what they know of each
/// other. All end with the value.
#[derive(Debug)]
pub(crate) struct TestPairs {
    pairs: Vec<Pair>,
    watch: Watch,
}

#[derive(Debug)]
struct Pair {
    master: TestRedis,
    replica: TestRedis,
}

/// Who sees that a master is gone.
#[derive(Debug)]
enum Watch {
    Sentinels {
        sentinels: Vec<TestRedis>,
        /// They write their configuration.
        _folder: TempDir,
    },
    /// The masters themselves.
    Cluster,
}

impl TestPairs {
    /// One pair, watched by three Sentinels, to whom a master is gone after a second.
    pub(crate) async fn behind_sentinels() -> Self {
        let master = TestRedis::start().await;
        let replica_of = format!("127.0.0.1 {}", master.address().port());
        let replica =
            TestRedis::start_with(&["--replicaof", &replica_of, "--repl-diskless-sync-delay", "0"]).await;
        assert_eq!(master.cli(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]).await, "OK");
        let pair = Pair { master, replica };
        pair.until_in_step().await;
        let folder = TempDir::new().expect("a temporary folder");
        let sentinels = (0..SENTINELS).map(|n| sentinel(&folder, n, &replica_of));
        let sentinels = join_all(sentinels).await;
        let pairs = Self { pairs: vec![pair], watch: Watch::Sentinels { sentinels, _folder: folder } };
        pairs.until_watched().await;
        pairs
    }

    /// Three pairs that share all slots, in which a master is gone after a second and a half.
    pub(crate) async fn as_cluster() -> Self {
        let cluster = TestCluster::start_nodes(2 * MASTERS).await;
        for node in 0..MASTERS {
            let id = cluster.id(node).await;
            cluster.order(MASTERS + node, &["CLUSTER", "REPLICATE", &id]).await;
        }
        let mut masters = cluster.into_nodes();
        let replicas = masters.split_off(MASTERS);
        let pairs = masters.into_iter().zip(replicas).map(|(master, replica)| Pair { master, replica });
        let pairs = Self { pairs: pairs.collect(), watch: Watch::Cluster };
        for pair in &pairs.pairs {
            pair.until_in_step().await;
        }
        pairs.until_watched().await;
        pairs
    }

    /// As the service is told.
    pub(crate) fn url(&self) -> String {
        match &self.watch {
            Watch::Sentinels { sentinels, .. } => {
                format!("redis-sentinel://{}&sentinelServiceName={SERVICE}", hosts(sentinels.iter()))
            }
            Watch::Cluster => {
                format!("redis-cluster://{}", hosts(self.pairs.iter().map(|pair| &pair.master)))
            }
        }
    }

    /// The master that has `key`.
    pub(crate) async fn master_of(&self, key: &str) -> &TestRedis {
        &self.pairs[self.pair_of(key).await].master
    }

    /// Waits until the replica has all that the master of `key` has.
    pub(crate) async fn until_in_step(&self, key: &str) {
        self.pairs[self.pair_of(key).await].until_in_step().await;
    }

    /// From now on the replica of `key` learns nothing of what its master does, and does nothing itself.
    pub(crate) async fn cut_replication(&self, key: &str) {
        let pair = &self.pairs[self.pair_of(key).await];
        pair.replica.pause().await;
        assert_eq!(pair.master.cli(&["CLIENT", "KILL", "TYPE", "replica"]).await, "1");
    }

    /// SIGKILL of the master of `key`. Its replica is woken, if it was paused, and takes over after some seconds: waits
    /// until it has. The one that was killed does not come back.
    pub(crate) async fn kill_master(&mut self, key: &str) {
        let pair = self.pair_of(key).await;
        self.pairs[pair].master.kill();
        self.pairs[pair].replica.wake();
        self.until_promoted(pair, ORDERED_AFTER, "FORCE").await;
    }

    /// Has the replica of `key` take over while its master lives, and waits until that one is its replica. Sentinels let
    /// the former master go on for a while: what it is asked meanwhile is lost.
    pub(crate) async fn fail_over(&mut self, key: &str) {
        let pair = self.pair_of(key).await;
        self.until_promoted(pair, Duration::ZERO, "").await;
        let former = &self.pairs[pair].replica;
        until("the former master is a replica", async || is_in_role(former, "slave").await).await;
    }

    /// Waits until the replica of a pair has taken over. It is ordered to if it has not after a while, and again: on a busy
    /// machine an election or an order can come to nothing.
    async fn until_promoted(&mut self, pair: usize, ordered_after: Duration, how: &str) {
        let mut next_order = Instant::now() + ordered_after;
        until("the replica takes over", async || {
            if Instant::now() >= next_order {
                self.order_fail_over(pair, how).await;
                next_order = Instant::now() + GIVEN_UP_AFTER;
            }
            self.is_promoted(pair).await
        })
        .await;
        self.pairs[pair].swap();
    }

    /// Refused while one is under way.
    async fn order_fail_over(&self, pair: usize, how: &str) {
        match &self.watch {
            Watch::Sentinels { sentinels, .. } => sentinels[0].cli(&["SENTINEL", "FAILOVER", SERVICE]).await,
            Watch::Cluster => {
                let order = ["CLUSTER", "FAILOVER", how];
                self.pairs[pair].replica.cli(&order[..order.len() - usize::from(how.is_empty())]).await
            }
        };
    }

    async fn pair_of(&self, key: &str) -> usize {
        if matches!(self.watch, Watch::Sentinels { .. }) {
            return 0;
        }
        // Any master can tell.
        let slot = self.pairs[0].master.cli(&["CLUSTER", "KEYSLOT", key]).await;
        TestCluster::place_of(slot.parse().expect("a slot"))
    }

    /// Whether the replica of a pair is a master, and everybody says so who is asked for it.
    async fn is_promoted(&self, pair: usize) -> bool {
        let replica = &self.pairs[pair].replica;
        let mut is_known = is_in_role(replica, "master").await;
        if let Watch::Sentinels { sentinels, .. } = &self.watch {
            let port = replica.address().port().to_string();
            for sentinel in sentinels {
                let known = sentinel.cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE]).await;
                is_known &= known.lines().nth(1) == Some(&port);
            }
        }
        is_known
    }

    /// Waits until whoever watches knows all that there is to know.
    async fn until_watched(&self) {
        match &self.watch {
            Watch::Sentinels { sentinels, .. } => {
                for sentinel in sentinels {
                    until("a Sentinel knows the others and the replica", async || {
                        let known = sentinel.cli(&["SENTINEL", "MASTER", SERVICE]).await;
                        let all =
                            [format!("num-other-sentinels\n{}", SENTINELS - 1), "num-slaves\n1".to_owned()];
                        all.iter().all(|some| known.contains(some))
                    })
                    .await;
                }
            }
            Watch::Cluster => {
                for server in self.pairs.iter().flat_map(|pair| [&pair.master, &pair.replica]) {
                    until("a node knows all replicas", async || {
                        let nodes = server.cli(&["CLUSTER", "NODES"]).await;
                        nodes.lines().filter(|node| node.contains("slave")).count() == MASTERS
                    })
                    .await;
                }
            }
        }
    }
}

impl Pair {
    /// The replica has become the master.
    fn swap(&mut self) {
        std::mem::swap(&mut self.master, &mut self.replica);
    }

    /// Waits until the replica has all that the master has.
    async fn until_in_step(&self) {
        until("the replica has what its master has", async || {
            let told = self.master.cli(&["INFO", "replication"]).await;
            let value = |name: &str| {
                let line = told.lines().find_map(|line| line.trim_end().strip_prefix(name));
                line.map(str::to_owned)
            };
            let offset = value("master_repl_offset:").expect("a master says how far it is");
            let replica = value("slave0:").unwrap_or_default();
            replica.contains("state=online") && replica.contains(&format!("offset={offset},"))
        })
        .await;
    }
}

/// Sentinels have servers hang up on everybody when they change their role.
async fn is_in_role(server: &TestRedis, role: &str) -> bool {
    server.try_cli(&["ROLE"]).await.is_some_and(|told| told.starts_with(role))
}

async fn sentinel(folder: &TempDir, number: usize, master: &str) -> TestRedis {
    let path = folder.path().join(format!("{number}.conf"));
    let quorum = SENTINELS / 2 + 1;
    let configuration = format!(
        "sentinel monitor {SERVICE} {master} {quorum}\nsentinel down-after-milliseconds {SERVICE} 1000\n\
         sentinel failover-timeout {SERVICE} 3000\n"
    );
    std::fs::write(&path, configuration).expect("the folder takes files");
    let sentinel = TestRedis::start_with(&[&path.display().to_string(), "--sentinel"]).await;
    // They find each other sooner, and notice within a second that a former master still believes it is one, for which
    // they take up to 18 seconds otherwise. Older versions refuse.
    sentinel.cli(&["SENTINEL", "DEBUG", "PUBLISH-PERIOD", "100"]).await;
    sentinel.cli(&["SENTINEL", "DEBUG", "INFO-PERIOD", "1000"]).await;
    // One that finds itself slow does nothing for half a minute.
    sentinel.cli(&["SENTINEL", "DEBUG", "TILT-TRIGGER", "60000"]).await;
    sentinel
}

/// The first and the others, as URLs have them.
fn hosts<'a>(mut servers: impl Iterator<Item = &'a TestRedis>) -> String {
    let first = servers.next().expect("there is one").address();
    let others = servers.map(|server| format!("node={}", server.address())).collect::<Vec<_>>();
    format!("{first}?{}", others.join("&"))
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let asked = Instant::now();
    while !is_so().await {
        assert!(asked.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(POLL).await;
    }
}
