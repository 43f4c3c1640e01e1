//! Real traffic: traces of two language model services, shared by ten keys in a pool with half of what they ask.
//!
//! Time is the trace's own: the clock is moved from each arrival and settlement to the next, so that a replay depends on no
//! machine's speed. `QUOTA_TRACES_DIR` names a directory with the whole traces, to be replayed instead of short pieces.

#[path = "../../examples/replay/setting.rs"]
mod setting;
#[path = "../../examples/replay/tally.rs"]
mod tally;
#[path = "../../examples/replay/trace.rs"]
mod trace;

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;

use self::{
    pb::{
        allocation::Policy,
        dimension_status::{Mode, Reason},
    },
    setting::{Demand, Key, Setting, windows},
    tally::Tally,
    trace::Request,
};
use crate::harness::{T0, TestServer, pb, told};

const CODE: &str = "azure_llm_2023_code.csv";
const CONVERSATION: &str = "azure_llm_2023_conv.csv";

const KEYS: usize = 10;
const SEED: u64 = 1;

/// In each replay, so that windows slide.
const WINDOWS: u32 = 5;

/// The first requests of a trace, up to so many, or all of the whole trace.
fn trace(name: &str, requests_max: usize) -> Arc<[Request]> {
    let (folder, requests_max) = match env::var_os("QUOTA_TRACES_DIR") {
        Some(folder) => (PathBuf::from(folder), usize::MAX),
        None => (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces"), requests_max),
    };
    let path = folder.join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut requests = trace::parse(&text).unwrap_or_else(|mistake| panic!("{}: {mistake}", path.display()));
    requests.truncate(requests_max);
    requests.into()
}

/// Ten keys of equal weight, and a limit of half of what they ask in a window; and how many windows that is.
fn half_of_the_demand(requests: &[Request], policy: Policy) -> (Setting, f64) {
    let length = requests.last().expect("a trace").at;
    let window = Duration::from_secs((length / WINDOWS).as_secs());
    let windows = windows(length, window);
    let demand: u64 = requests.iter().map(Request::cost).sum();
    let key = |n| Key { name: format!("key-{n:02}"), weight: 100.0 / KEYS as f64, policy };
    let keys = (1..=KEYS).map(key).collect();
    let limit = (demand as f64 / windows / 2.0) as u64;
    (Setting { id: "replay".to_owned(), keys, limit, window }, windows)
}

async fn replayed(requests: Arc<[Request]>, demand: Demand, policy: Policy) -> Tally {
    let mut replay = Replay::start(requests, policy).await;
    let keys = demand.assign(replay.requests.len(), KEYS, SEED);
    for (n, key) in keys.into_iter().enumerate() {
        replay.settle_until(replay.requests[n].at).await;
        replay.ask(n, key).await;
    }
    println!("{demand:?}\n{}\n", replay.tally);
    replay.tally
}

/// A replay under way, which checks every answer.
struct Replay {
    server: TestServer,
    /// When it begins, which is at the edge of a bucket, in milliseconds after [`T0`].
    start: u64,
    requests: Arc<[Request]>,
    setting: Setting,
    open: BinaryHeap<Reverse<Open>>,
    counted: Counted,
    tally: Tally,
}

/// A request under way; the first to end is the least.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Open {
    end: Duration,
    request: usize,
    key: usize,
    reservation: String,
}

impl Replay {
    async fn start(requests: Arc<[Request]>, policy: Policy) -> Self {
        let (setting, windows) = half_of_the_demand(&requests, policy);
        let server = TestServer::start().await;
        told(server.plans().put_plan(setting.plan()).await);
        told(server.pools().create_pool(setting.pool()).await);
        let window_ms = ms(setting.window);
        Self {
            server,
            start: window_ms - T0.unix_ms() % window_ms,
            requests,
            open: BinaryHeap::new(),
            counted: Counted { window_ms, bucket: 0, keys: Default::default() },
            tally: Tally::new(&setting, windows),
            setting,
        }
    }

    fn move_to(&mut self, at: Duration) {
        self.server.at(self.start + ms(at));
        self.counted.move_to(ms(at));
    }

    /// What ends until then is settled, each at its end.
    async fn settle_until(&mut self, now: Duration) {
        while self.open.peek().is_some_and(|Reverse(open)| open.end <= now) {
            let Reverse(open) = self.open.pop().expect("one was there");
            self.move_to(open.end);
            let request = &self.requests[open.request];
            let settled = self.setting.settle(open.key, request, open.reservation);
            let answer = told(self.server.quota().record_consumption(settled).await);
            assert!(!answer.duplicate && !answer.reservation_expired, "{answer:?}");
            self.counted.settle(open.key, request);
        }
    }

    async fn ask(&mut self, n: usize, key: usize) {
        let requests = Arc::clone(&self.requests);
        let request = &requests[n];
        self.move_to(request.at);
        let answer = told(self.server.quota().enforce(self.setting.ask(key, request)).await);
        answer.verdict();
        let [status] = &answer.dimensions[..] else { panic!("one dimension: {answer:?}") };
        self.counted.check(key, ms(request.at), status);
        check_rule(status, self.setting.keys[key].policy);
        self.tally.count(key, request.cost(), &answer);
        if answer.reservation_id.is_empty() {
            return;
        }
        self.counted.hold(key, request);
        let end = request.at + request.service_time();
        self.open.push(Reverse(Open { end, request: n, key, reservation: answer.reservation_id }));
    }
}

/// Nobody is blocked by the pool while it has room for the estimate, nor by a share that has, and nobody is admitted without.
#[track_caller]
fn check_rule(status: &pb::DimensionStatus, policy: Policy) {
    let limit = status.limit.expect("the plan has one");
    let share = status.fair_share.expect("of the limit");
    let pool_fits = status.pool_consumed + status.pool_reserved + status.estimate <= limit;
    let key_fits = status.key_consumed + status.key_reserved + status.estimate <= share;
    let held_to_share = policy == Policy::Hard && status.mode() == Mode::Strict;
    let expected = match (pool_fits, key_fits) {
        (false, _) => Reason::GlobalSaturated,
        (true, false) if held_to_share => Reason::FairShare,
        (true, _) => Reason::Ok,
    };
    assert_eq!(status.reason(), expected, "{status:?}");
}

/// What the service is to have counted: a second account, kept from the trace alone, in milliseconds since its start.
struct Counted {
    window_ms: u64,
    bucket: u64,
    keys: [Part; KEYS],
}

/// One key's tokens.
#[derive(Default)]
struct Part {
    previous: u64,
    current: u64,
    reserved: u64,
}

impl Counted {
    fn move_to(&mut self, now: u64) {
        let bucket = now / self.window_ms;
        for part in &mut self.keys {
            (part.previous, part.current) = match bucket - self.bucket {
                0 => (part.previous, part.current),
                1 => (part.current, 0),
                _ => (0, 0),
            };
        }
        self.bucket = bucket;
    }

    fn hold(&mut self, key: usize, request: &Request) {
        self.keys[key].reserved += request.estimate();
    }

    fn settle(&mut self, key: usize, request: &Request) {
        self.keys[key].reserved -= request.estimate();
        self.keys[key].current += request.cost();
    }

    #[track_caller]
    fn check(&self, key: usize, now: u64, status: &pb::DimensionStatus) {
        let in_view = 1.0 - (now % self.window_ms) as f64 / self.window_ms as f64;
        let consumed = |part: &Part| part.previous as f64 * in_view + part.current as f64;
        let expected = [
            consumed(&self.keys[key]),
            self.keys[key].reserved as f64,
            self.keys.iter().map(consumed).sum(),
            self.keys.iter().map(|part| part.reserved as f64).sum(),
        ];
        let said = [status.key_consumed, status.key_reserved, status.pool_consumed, status.pool_reserved];
        let agree = said.iter().zip(expected).all(|(said, expected)| (said - expected).abs() < 1e-3);
        assert!(agree, "{expected:?} expected of {status:?}");
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).expect("not an age")
}

/// The policies side by side.
async fn by_policy<const N: usize>(
    requests: &Arc<[Request]>,
    demand: Demand,
    policies: [Policy; N],
) -> [Tally; N] {
    let replays = policies.map(|policy| tokio::spawn(replayed(Arc::clone(requests), demand, policy)));
    let tallies: Vec<_> =
        join_all(replays).await.into_iter().map(|tally| tally.expect("every answer is right")).collect();
    tallies.try_into().expect("one for each policy")
}

/// HARD holds every key to its share. SOFT and BURST do not: there it is only as even as what the keys ask.
async fn is_shared_evenly(name: &str, requests_max: usize) {
    let requests = trace(name, requests_max);
    let policies = [Policy::Hard, Policy::Soft, Policy::Burst];
    let [hard, soft, burst] = by_policy(&requests, Demand::RoundRobin, policies).await;
    for tally in [&hard, &soft, &burst] {
        assert!(tally.jain() >= 0.99, "{tally}");
        // Not exactly 1: a request may cost more than its estimate.
        assert!(tally.utilisation() < 1.01, "{tally}");
    }
    let admitted = |tally: &Tally| tally.keys.iter().map(|answers| answers.admitted).collect::<Vec<_>>();
    assert_eq!(admitted(&soft), admitted(&burst), "a lower rank is not a refusal");
    assert!(soft.total().deprioritized > 0 && burst.total().deprioritized == 0, "{soft}\n{burst}");
    assert!(hard.utilisation() < burst.utilisation(), "{hard}\n{burst}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_ask_evenly_share_a_trace_of_code_evenly() {
    is_shared_evenly(CODE, 3_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_ask_evenly_share_a_trace_of_conversations_evenly() {
    is_shared_evenly(CONVERSATION, 2_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_hard_keeps_for_keys_that_ask_little_burst_gives_to_those_that_ask_much() {
    let requests = trace(CONVERSATION, 1_500);
    let [hard, burst] = by_policy(&requests, Demand::Zipf, [Policy::Hard, Policy::Burst]).await;
    let demand: u64 = requests.iter().map(Request::cost).sum();
    let share = demand / 2 / KEYS as u64;
    let keys = || hard.keys.iter().zip(&burst.keys);
    let small: Vec<_> = keys().filter(|(hard, _)| hard.asked.tokens < share).collect();
    assert!(small.len() >= 3, "{hard}");
    for (hard, burst) in small {
        assert!(hard.admitted.tokens > burst.admitted.tokens, "{hard:?} {burst:?}");
    }
    assert!(hard.of_fair_share()[0] < burst.of_fair_share()[0] / 2.0, "{hard}\n{burst}");
    assert!(hard.jain() > burst.jain(), "{hard}\n{burst}");
    assert!(hard.utilisation() < burst.utilisation(), "{hard}\n{burst}");
}

#[test]
fn a_line_that_cannot_be_read_is_named() {
    let header = "TIMESTAMP,ContextTokens,GeneratedTokens";
    let first = "2023-11-16 18:17:03.9799600,4808,10";
    let mistake = |lines: &[&str]| trace::parse(&lines.join("\r\n")).expect_err("it cannot be read");
    assert_eq!(mistake(&[]), format!("line 1: not the header {header:?}"));
    assert_eq!(mistake(&[header]), "no line after the header");
    assert_eq!(
        mistake(&[header, first, "2023-11-16 18:17:04,1"]),
        format!("line 3: \"2023-11-16 18:17:04,1\" is not of three fields: {header}"),
    );
    assert_eq!(
        mistake(&[header, "yesterday,1,2"]),
        "line 2: \"yesterday\" is not a time such as 2023-11-16 18:17:03.9799600",
    );
    assert_eq!(
        mistake(&[header, first, "2023-11-16 18:17:04,-1,2"]),
        "line 3: \"-1\" is not a number of tokens"
    );
    assert_eq!(
        mistake(&[header, first, "2023-11-16 18:17:03,1,2"]),
        "line 3: comes before the line above it"
    );
}
