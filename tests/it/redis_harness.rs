//! The harness does what it says: Redis servers and clusters of a test's own, and connections that fail at will.

use std::{
    cell::Cell,
    io::{ErrorKind, Write},
    net::SocketAddr,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use fred::{
    interfaces::ClientLike,
    types::{Builder, config::Config},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::timeout,
};

use crate::harness::{PATIENCE, Proxy, TestCluster, TestPairs, TestRedis, end_of, redis_is_missing};

/// One connection that speaks Redis' protocol, as bare as it gets: a request is a line, an answer is one, too.
#[derive(Debug)]
struct Bare(BufReader<TcpStream>);

impl Bare {
    async fn to(address: SocketAddr) -> Self {
        Self(BufReader::new(TcpStream::connect(address).await.expect("connections are accepted")))
    }

    async fn send(&mut self, request: &str) {
        let line = format!("{request}\r\n");
        self.0.write_all(line.as_bytes()).await.expect("the connection is there");
    }

    /// The next line; `None` if the connection is closed instead.
    async fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = timeout(PATIENCE, self.0.read_line(&mut line)).await.expect("an answer or an end");
        let is_there = read.is_ok_and(|bytes| bytes > 0);
        is_there.then(|| line.trim_end().to_owned())
    }

    async fn ask(&mut self, request: &str) -> Option<String> {
        self.send(request).await;
        self.line().await
    }

    /// Whether nothing has come. It is for the caller to know that nothing can.
    fn is_silent(&self) -> bool {
        let nothing = self.0.get_ref().try_read(&mut [0; 1]);
        self.0.buffer().is_empty() && nothing.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

fn some(answer: &str) -> Option<String> {
    Some(answer.to_owned())
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let asked = Instant::now();
    while !is_so() {
        assert!(asked.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn is_there(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

async fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect(address).await.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

#[tokio::test]
async fn a_server_ends_with_its_value_and_leaves_nothing() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let (address, pid, folder) = (redis.address(), redis.pid(), redis.folder().to_owned());
    assert_eq!(Bare::to(address).await.ask("SET k v").await, some("+OK"));
    assert_eq!(redis.cli(&["GET", "k"]).await, "v");
    assert_eq!(redis.cli(&["CONFIG", "GET", "save"]).await, "save");
    assert_eq!(redis.cli(&["CONFIG", "GET", "appendonly"]).await, "appendonly\nno");
    assert!(is_there(pid));
    drop(redis);
    assert!(!is_there(pid) && !folder.exists());
    assert!(is_refused(address).await);
}

#[tokio::test]
async fn a_paused_server_ends_with_its_value_as_well() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let pid = redis.pid();
    redis.pause().await;
    drop(redis);
    assert!(!is_there(pid));
}

const KILLED: &str = "QUOTA_TESTS_KILLED";

#[tokio::test]
async fn nothing_is_left_of_the_servers_of_a_test_process_that_is_killed() {
    if redis_is_missing() {
        return;
    }
    if std::env::var_os(KILLED).is_some() {
        let redis = TestRedis::shared().await;
        println!("\nleft: {} {}", redis.pid(), redis.folder().display());
        std::io::stdout().flush().expect("somebody reads it");
        kill(Pid::this(), Signal::SIGKILL).expect("one may kill oneself");
    }
    let name = "redis_harness::nothing_is_left_of_the_servers_of_a_test_process_that_is_killed";
    let mut again = Command::new(std::env::current_exe().expect("this binary"));
    again.args(["--exact", name, "--nocapture"]).env(KILLED, "1");
    let output = end_of(&mut again).await.stdout;
    let left = output.lines().find_map(|line| line.strip_prefix("left: ")).expect("a server was started");
    let (pid, folder) = left.split_once(' ').expect("a process and a folder");
    let pid = pid.parse().expect("a number");
    until("the server ends", || !is_there(pid)).await;
    until("its folder goes", || !Path::new(folder).exists()).await;
}

#[tokio::test]
async fn a_server_gets_its_arguments() {
    if redis_is_missing() {
        return;
    }
    let redis =
        TestRedis::start_with(&["--requirepass", "secret", "--maxmemory-policy", "allkeys-lru"]).await;
    let mut bare = Bare::to(redis.address()).await;
    assert_eq!(bare.ask("GET k").await, some("-NOAUTH Authentication required."));
    assert_eq!(bare.ask("AUTH secret").await, some("+OK"));
    assert_eq!(redis.cli(&["GET", "k"]).await, "NOAUTH Authentication required.");
    let policy = ["--no-auth-warning", "-a", "secret", "CONFIG", "GET", "maxmemory-policy"];
    assert_eq!(redis.cli(&policy).await, "maxmemory-policy\nallkeys-lru");
}

#[tokio::test]
async fn a_server_that_was_stopped_or_killed_comes_back_on_its_port_with_what_it_kept() {
    if redis_is_missing() {
        return;
    }
    for (args, kept) in [(&["--appendonly", "yes"] as &[&str], "v"), (&[], "")] {
        let mut redis = TestRedis::start_with(args).await;
        let (address, pid) = (redis.address(), redis.pid());
        assert_eq!(Bare::to(address).await.ask("SET killed v").await, some("+OK"));
        redis.kill();
        assert!(!is_there(pid));
        assert!(is_refused(address).await);
        redis.restart().await;
        assert_eq!(redis.address(), address);
        assert_eq!(redis.cli(&["GET", "killed"]).await, kept);

        let mut bare = Bare::to(address).await;
        assert_eq!(bare.ask("SET stopped v").await, some("+OK"));
        let pid = redis.pid();
        redis.stop().await;
        assert!(!is_there(pid));
        assert_eq!(bare.line().await, None, "connections are closed");
        redis.restart().await;
        assert_eq!(redis.cli(&["GET", "stopped"]).await, kept);
    }
}

#[tokio::test]
async fn a_paused_server_does_when_it_wakes_what_it_was_asked_meanwhile() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::start().await;
    let mut early = Bare::to(redis.address()).await;
    assert_eq!(early.ask("INCR n").await, some(":1"));
    redis.pause().await;
    let mut late = Bare::to(redis.address()).await;
    early.send("INCR n").await;
    late.send("PING").await;
    assert!(early.is_silent() && late.is_silent());
    redis.wake();
    assert_eq!(early.line().await, some(":2"));
    assert_eq!(late.line().await, some("+PONG"));
}

#[tokio::test]
async fn there_is_one_shared_server_and_one_shared_cluster() {
    if redis_is_missing() {
        return;
    }
    let (one, other) = tokio::join!(TestRedis::shared(), TestRedis::shared());
    assert_eq!(one.pid(), other.pid());
    let (one, other) = tokio::join!(TestCluster::shared(), TestCluster::shared());
    assert_eq!(one.nodes()[0].pid(), other.nodes()[0].pid());
}

#[tokio::test]
async fn fred_understands_each_url() {
    if redis_is_missing() {
        return;
    }
    let (redis, cluster) = (TestRedis::shared().await, TestCluster::shared().await);
    let proxy = Proxy::to(redis.address()).await;
    for url in [redis.url(), redis.socket_url(), proxy.url(), cluster.url()] {
        let config = Config::from_url(&url).expect("a URL that fred knows");
        let client = Builder::from_config(config).build().expect("the configuration is valid");
        let connected = timeout(PATIENCE, client.init()).await.expect("fred says whether it worked");
        connected.unwrap_or_else(|error| panic!("{url}: {error}"));
        let pong: String = client.ping(None).await.unwrap_or_else(|error| panic!("{url}: {error}"));
        assert_eq!(pong, "PONG");
        client.quit().await.expect("it is connected");
    }
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn each_node_of_a_cluster_serves_its_slots_and_points_to_the_others() {
    if redis_is_missing() {
        return;
    }
    let cluster = TestCluster::shared().await;
    for (key, slot, owner) in [("b", 3300, 0), ("c", 7365, 1), ("a", 15495, 2)] {
        for (node, asked) in cluster.nodes().iter().enumerate() {
            let moved = format!("-MOVED {slot} {}", cluster.nodes()[owner].address());
            let want = if node == owner { "+OK" } else { moved.as_str() };
            let answer = Bare::to(asked.address()).await.ask(&format!("SET {key} v")).await;
            assert_eq!(answer, some(want), "{key} at node {node}");
        }
        for node in 0..3 {
            assert_eq!(cluster.cli(node, &["-c", "GET", key]).await, "v");
        }
    }
}

#[tokio::test]
async fn a_slot_moves_with_its_keys_while_clients_go_on() {
    if redis_is_missing() {
        return;
    }
    const KEYS: usize = 250;
    let cluster = TestCluster::start().await;
    let slot = cluster.cli(0, &["CLUSTER", "KEYSLOT", "{b}"]).await.parse().expect("a number");
    let mut owner = Bare::to(cluster.nodes()[0].address()).await;
    for key in 0..KEYS {
        assert_eq!(owner.ask(&format!("SET {{b}}{key} v{key}")).await, some("+OK"));
    }
    let (counted, is_moved) = (Cell::new(0), Cell::new(false));
    let count = async || {
        counted.set(counted.get() + 1);
        assert_eq!(cluster.cli(1, &["-c", "INCR", "{b}n"]).await, counted.get().to_string());
    };
    count().await;
    let moving = async {
        cluster.move_slot(slot, 0, 2).await;
        is_moved.set(true);
    };
    let going_on = async {
        while !is_moved.get() {
            count().await;
        }
    };
    tokio::join!(moving, going_on);
    assert!(counted.get() > 1);
    let new = cluster.nodes()[2].address();
    assert_eq!(owner.ask("GET {b}0").await, Some(format!("-MOVED {slot} {new}")));
    assert_eq!(cluster.cli(2, &["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]).await, "251");
    assert_eq!(cluster.cli(2, &["GET", "{b}249"]).await, "v249");
    assert_eq!(cluster.cli(2, &["GET", "{b}n"]).await, counted.get().to_string());
}

#[tokio::test]
async fn a_node_that_was_killed_takes_its_place_again() {
    if redis_is_missing() {
        return;
    }
    let mut cluster = TestCluster::start().await;
    let address = cluster.nodes()[2].address();
    cluster.nodes_mut()[2].kill();
    assert!(is_refused(address).await);
    cluster.nodes_mut()[2].restart().await;
    cluster.until_it_is_whole().await;
    assert_eq!(cluster.cli(2, &["SET", "a", "v"]).await, "OK");
    assert_eq!(cluster.cli(0, &["-c", "GET", "a"]).await, "v");
}

#[tokio::test]
async fn a_proxy_passes_everything_on_and_counts_it() {
    if redis_is_missing() {
        return;
    }
    let mut redis = TestRedis::start().await;
    let proxy = Proxy::to(redis.address()).await;
    let mut bare = Bare::to(proxy.address()).await;
    let counted = || (proxy.requests("INCR"), proxy.requests("QUIT"));
    assert_eq!(counted(), (0, 0));
    for n in 1..=3 {
        assert_eq!(bare.ask("INCR n").await, Some(format!(":{n}")));
    }
    let long = "x".repeat(1_000_000);
    assert_eq!(bare.ask(&format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n{long}")).await, some("+OK"));
    assert_eq!(bare.ask("GET k").await, some("$1000000"));
    assert_eq!(bare.line().await, Some(long));
    let answers = proxy.answers();
    assert!(answers > 5 && counted() == (3, 0), "{answers} {:?}", counted());
    assert_eq!(bare.ask("QUIT").await, some("+OK"));
    assert_eq!(bare.line().await, None, "the server's end is passed on");
    assert_eq!((counted(), proxy.answers()), ((3, 1), answers + 1));
    assert_eq!(proxy.connections(), 1);

    redis.kill();
    assert_eq!(Bare::to(proxy.address()).await.line().await, None, "nobody is behind it");
    redis.restart().await;
    assert_eq!(Bare::to(proxy.address()).await.ask("INCR n").await, some(":1"));
    assert_eq!(proxy.connections(), 3);
    let address = proxy.address();
    drop(proxy);
    // The listener goes with its task, which the runtime ends.
    let asked = Instant::now();
    while !is_refused(address).await {
        assert!(asked.elapsed() < PATIENCE, "the proxy goes on");
    }
}

#[tokio::test]
async fn a_proxy_delays_both_directions() {
    if redis_is_missing() {
        return;
    }
    let proxy = Proxy::to(TestRedis::shared().await.address()).await;
    let mut bare = Bare::to(proxy.address()).await;
    let delay = Duration::from_millis(40);
    proxy.delay(delay);
    let asked = Instant::now();
    bare.send("ECHO a").await;
    bare.send("ECHO b").await;
    for want in ["$1", "a", "$1", "b"] {
        assert_eq!(bare.line().await, some(want));
    }
    assert!(asked.elapsed() >= 2 * delay);
    proxy.delay(Duration::ZERO);
    assert_eq!(bare.ask("PING").await, some("+PONG"));
}

#[tokio::test]
async fn a_proxy_cuts_what_is_there_and_takes_new_connections() {
    if redis_is_missing() {
        return;
    }
    let proxy = Proxy::to(TestRedis::shared().await.address()).await;
    let mut two = [Bare::to(proxy.address()).await, Bare::to(proxy.address()).await];
    for bare in &mut two {
        assert_eq!(bare.ask("PING").await, some("+PONG"));
    }
    proxy.cut().await;
    for bare in &mut two {
        assert_eq!(bare.line().await, None);
    }
    assert_eq!(Bare::to(proxy.address()).await.ask("PING").await, some("+PONG"));
    assert_eq!(proxy.connections(), 3);
}

#[tokio::test]
async fn a_proxy_refuses_new_connections_and_keeps_those_that_are_there() {
    if redis_is_missing() {
        return;
    }
    let mut proxy = Proxy::to(TestRedis::shared().await.address()).await;
    let mut early = Bare::to(proxy.address()).await;
    assert_eq!(early.ask("PING").await, some("+PONG"));
    proxy.refuse(true).await;
    assert!(is_refused(proxy.address()).await);
    assert_eq!(early.ask("PING").await, some("+PONG"));
    proxy.refuse(false).await;
    assert_eq!(Bare::to(proxy.address()).await.ask("PING").await, some("+PONG"));
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test]
async fn a_proxy_loses_answers_to_requests_that_arrive() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let mut bare = Bare::to(proxy.address()).await;
    proxy.swallow(true);
    bare.send("INCR swallowed").await;
    until("the server answers", || proxy.answers() == 1).await;
    assert_eq!(redis.cli(&["GET", "swallowed"]).await, "1");
    proxy.swallow(false);
    assert_eq!(bare.ask("PING").await, some("+PONG"));
}

#[tokio::test]
async fn a_proxy_hangs_in_both_directions_and_then_passes_on_what_came() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let mut bare = Bare::to(proxy.address()).await;
    let mut subscriber = Bare::to(proxy.address()).await;
    subscriber.send("SUBSCRIBE hung").await;
    for want in ["*3", "$9", "subscribe", "$4", "hung", ":1"] {
        assert_eq!(subscriber.line().await, some(want));
    }
    proxy.hang(true);
    let sent = proxy.requests("INCR");
    bare.send("INCR hung").await;
    until("the request is at the proxy", || proxy.requests("INCR") > sent).await;
    assert_eq!(redis.cli(&["INCR", "hung"]).await, "1", "the other one has not arrived");
    assert_eq!(redis.cli(&["PUBLISH", "hung", "news"]).await, "1");
    until("the answer is at the proxy", || proxy.answers() == 2).await;
    let mut late = Bare::to(proxy.address()).await;
    late.send("PING").await;
    assert!(bare.is_silent() && subscriber.is_silent() && late.is_silent());
    proxy.hang(false);
    assert_eq!(bare.line().await, some(":2"));
    for want in ["*3", "$7", "message", "$4", "hung", "$4", "news"] {
        assert_eq!(subscriber.line().await, some(want));
    }
    assert_eq!(late.line().await, some("+PONG"));
}

#[tokio::test]
async fn a_proxy_cuts_a_connection_after_a_request_and_before_its_answer() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let mut bare = Bare::to(proxy.address()).await;
    proxy.cut_after_requests(2);
    assert_eq!(bare.ask("INCR cut").await, some(":1"));
    assert_eq!(bare.ask("INCR cut").await, None);
    assert_eq!(redis.cli(&["GET", "cut"]).await, "2", "done before the client learned anything");
    assert_eq!(Bare::to(proxy.address()).await.ask("INCR cut").await, some(":3"));
}

#[tokio::test]
async fn a_proxy_loses_as_many_answers_as_it_is_told() {
    if redis_is_missing() {
        return;
    }
    let redis = TestRedis::shared().await;
    let proxy = Proxy::to(redis.address()).await;
    let mut open = Bare::to(proxy.address()).await;
    proxy.lose_next_answers(2);
    assert_eq!(open.ask("INCR lost").await, None);
    assert_eq!(Bare::to(proxy.address()).await.ask("INCR lost").await, None);
    assert_eq!(Bare::to(proxy.address()).await.ask("INCR lost").await, some(":3"));
}

#[tokio::test]
async fn a_replica_that_was_cut_off_takes_over_without_what_it_has_not_seen() {
    if redis_is_missing() {
        return;
    }
    for mut pairs in [TestPairs::behind_sentinels().await, TestPairs::as_cluster().await] {
        let former = pairs.master_of("{k}").await.address();
        assert_eq!(pairs.master_of("{k}").await.cli(&["SET", "{k}", "seen"]).await, "OK");
        pairs.until_in_step("{k}").await;
        pairs.cut_replication("{k}").await;
        assert_eq!(pairs.master_of("{k}").await.cli(&["SET", "{k}", "unseen"]).await, "OK");
        pairs.kill_master("{k}").await;
        let master = pairs.master_of("{k}").await;
        assert_ne!(master.address(), former);
        assert_eq!(master.cli(&["GET", "{k}"]).await, "seen");
    }
}

#[tokio::test]
async fn a_master_that_is_to_give_way_lives_on_as_a_replica() {
    if redis_is_missing() {
        return;
    }
    for mut pairs in [TestPairs::behind_sentinels().await, TestPairs::as_cluster().await] {
        let former = pairs.master_of("{k}").await.address();
        pairs.fail_over("{k}").await;
        let master = pairs.master_of("{k}").await;
        assert_ne!(master.address(), former);
        assert_eq!(master.cli(&["SET", "{k}", "v"]).await, "OK");
        let role = Bare::to(former).await.ask("ROLE").await;
        assert_eq!(role, some("*5"), "a replica says five things of itself, a master three");
    }
}
