//! The process is killed, or told to end: what was acknowledged is there when it comes back, and nothing else is invented.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use futures::future::join_all;
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::task::JoinHandle;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use crate::harness::{
    Client, TestProcess, Verdict, ask, dimension, failed_start, hard, pb, pool, spent, tokens, told, unix_ms,
};

/// The machine's clock runs here, so the window is one whose bucket does not end during a test.
const WINDOW: &str = "tokens/366d";
const CALLERS: usize = 8;
const LONG: Duration = Duration::from_secs(3_600);

/// A call that changes counters, as it was sent; sent again, it is the same call.
#[derive(Clone, Debug)]
enum Call {
    Record(pb::RecordConsumptionRequest),
    Reserve(pb::EnforceRequest),
    Release(String),
}

/// What the callers know of the counters.
#[derive(Debug, Default)]
struct Known {
    /// Tokens of records that were acknowledged.
    consumed: i64,
    /// Reservations that were acknowledged and are open.
    open: HashSet<String>,
    /// Reservations that were acknowledged and that were settled or released since, which was acknowledged too.
    closed: HashSet<String>,
    /// Calls that were not acknowledged.
    pending: Vec<Call>,
    /// How many there have been.
    unacknowledged: usize,
}

impl Known {
    fn merge(&mut self, other: Known) {
        self.consumed += other.consumed;
        self.open.extend(other.open);
        self.closed.extend(other.closed);
        self.pending.extend(other.pending);
        self.unacknowledged += other.unacknowledged;
    }

    /// Sends `call` and notes what came of it; false if it was not acknowledged.
    async fn send(&mut self, client: &Client, call: Call) -> bool {
        let acknowledged = match &call {
            Call::Record(record) => self.record(client, record).await,
            Call::Reserve(request) => match client.quota().enforce(request.clone()).await {
                Ok(answer) => self.open.insert(answer.into_inner().reservation_id),
                Err(_) => false,
            },
            Call::Release(reservation) => self.release(client, reservation).await,
        };
        if !acknowledged {
            self.unacknowledged += 1;
            self.pending.push(call);
        }
        acknowledged
    }

    async fn record(&mut self, client: &Client, record: &pb::RecordConsumptionRequest) -> bool {
        let acknowledged = client.quota().record_consumption(record.clone()).await.is_ok();
        if acknowledged {
            self.consumed += tokens_of(record);
            self.close(&record.reservation_id);
        }
        acknowledged
    }

    async fn release(&mut self, client: &Client, reservation: &str) -> bool {
        let request = pb::ReleaseReservationRequest {
            reservation_id: reservation.to_owned(),
            api_key_id: "A".to_owned(),
        };
        let acknowledged = client.quota().release_reservation(request).await.is_ok();
        if acknowledged {
            self.close(reservation);
        }
        acknowledged
    }

    fn close(&mut self, reservation: &str) {
        if self.open.remove(reservation) {
            self.closed.insert(reservation.to_owned());
        }
    }

    /// Tokens of records that may or may not have been counted.
    fn consumed_perhaps(&self) -> i64 {
        let records = self.pending.iter().map(|call| match call {
            Call::Record(record) => tokens_of(record),
            Call::Reserve(_) | Call::Release(_) => 0,
        });
        records.sum()
    }

    /// True if a call that was not acknowledged may have ended this reservation.
    fn may_be_closed(&self, reservation: &str) -> bool {
        self.pending.iter().any(|call| match call {
            Call::Record(record) => record.reservation_id == reservation,
            Call::Release(id) => id == reservation,
            Call::Reserve(_) => false,
        })
    }
}

fn tokens_of(record: &pb::RecordConsumptionRequest) -> i64 {
    record.cost.as_ref().and_then(|cost| cost.tokens).unwrap_or_default()
}

/// Records, reserves, settles and releases until the process is gone.
async fn load(client: Client, caller: String) -> Known {
    let mut known = Known::default();
    for n in 0.. {
        let id = format!("{caller}-{n}");
        let record = Call::Record(spent("A", "c1", tokens(1 + n % 5)).once(&id));
        let reserve = Call::Reserve(ask("A", "c1", tokens(10)).holding(LONG).named(&id));
        if !known.send(&client, record).await || !known.send(&client, reserve).await {
            return known;
        }
        let Some(reservation) = known.open.iter().next().cloned() else { continue };
        let call = match n % 3 {
            0 => Call::Record(spent("A", "c1", tokens(7)).settling(&reservation)),
            1 => Call::Release(reservation),
            _ => continue,
        };
        if !known.send(&client, call).await {
            return known;
        }
    }
    known
}

/// Starts [`CALLERS`], each on a connection of its own.
async fn start_load(process: &TestProcess, name: &str) -> Vec<JoinHandle<Known>> {
    let clients = join_all((0..CALLERS).map(|_| Client::connect(process.address()))).await;
    let callers = clients.into_iter().enumerate();
    callers.map(|(n, client)| tokio::spawn(load(client, format!("{name}-{n}")))).collect()
}

/// What all callers know when the process is gone.
async fn end_load(callers: Vec<JoinHandle<Known>>) -> Known {
    let mut known = Known::default();
    for caller in join_all(callers).await {
        known.merge(caller.expect("callers end when the process does"));
    }
    known
}

/// Changes the pool, which is at `revision`, until the process is gone; the last revision that was acknowledged.
async fn administrate(client: Client, revision: i64) -> i64 {
    let mut acknowledged = revision;
    loop {
        let allocation = Some(hard("B", f64::from(acknowledged as u32 % 50)));
        let request = pb::PutAllocationRequest { pool_id: "p".to_owned(), allocation, revision: 0 };
        match client.pools().put_allocation(request).await {
            Ok(written) => acknowledged = written.into_inner().pool.expect("the pool").revision,
            Err(_) => return acknowledged,
        }
    }
}

/// Every reservation that is open, page by page.
async fn open_reservations(client: &Client) -> HashSet<String> {
    let mut open = HashSet::new();
    let mut request =
        pb::ListReservationsRequest { pool_id: "p".to_owned(), page_size: 1_000, ..Default::default() };
    loop {
        let page = told(client.pools().list_reservations(request.clone()).await);
        open.extend(page.reservations.into_iter().map(|reservation| reservation.reservation_id));
        if page.next_page_token.is_empty() {
            return open;
        }
        request.page_token = page.next_page_token;
    }
}

async fn process_with_a_pool() -> TestProcess {
    let process = TestProcess::start().await;
    process.put_plan("c1", [dimension(WINDOW, 9e15)]).await;
    process.create(pool("p", ["c1"], [hard("A", 50.0), hard("B", 50.0)])).await;
    process
}

#[tokio::test]
async fn fifty_kills_lose_nothing_that_was_acknowledged_and_invent_nothing() {
    kills_lose_nothing(50, 50..150).await;
}

/// Effects are written into the tables after five seconds of gathering, piece by piece.
#[tokio::test]
async fn kills_amidst_the_writing_of_the_tables_lose_and_invent_nothing() {
    kills_lose_nothing(3, 5_000..5_200).await;
}

/// Kills the process under load, so many ms after it has started.
async fn kills_lose_nothing(kills: usize, after_ms: std::ops::Range<u64>) {
    let mut random = StdRng::seed_from_u64(0x6b69_6c6c);
    let mut process = process_with_a_pool().await;
    let mut known = Known::default();
    for kill in 0..kills {
        let before = process.get_pool("p").await.pool.expect("the pool").revision;
        let administrator = tokio::spawn(administrate(process.clone(), before));
        let callers = start_load(&process, &kill.to_string()).await;
        tokio::time::sleep(Duration::from_millis(random.random_range(after_ms.clone()))).await;
        process.kill();
        known.merge(end_load(callers).await);
        let written = administrator.await.expect("it ends when the process does");
        process.restart().await;

        let revision = process.get_pool("p").await.pool.expect("the pool").revision;
        assert!(revision == written || revision == written + 1, "kill {kill}: {revision} after {written}");
        assert_what_was_acknowledged(&process, &known, kill).await;
        for call in std::mem::take(&mut known.pending) {
            assert!(known.send(&process, call.clone()).await, "kill {kill}: {call:?} is refused");
        }
        assert_eq!(
            process.used("p", WINDOW).await.0,
            known.consumed as f64,
            "kill {kill}: after the retries"
        );
        assert_eq!(open_reservations(&process).await, known.open, "kill {kill}: after the retries");
    }
    let calls = (known.consumed > 0, !known.closed.is_empty(), known.unacknowledged > kills);
    assert_eq!(calls, (true, true, true), "there was a load, and kills came amidst it");
    let revision = process.get_pool("p").await.pool.expect("the pool").revision;
    assert!(revision > kills as i64, "there were changes: {revision}");

    for reservation in std::mem::take(&mut known.open) {
        assert!(process.release(&reservation).await, "{reservation} was still held");
    }
    assert_eq!(process.used("p", WINDOW).await, (known.consumed as f64, 0.0));
}

async fn assert_what_was_acknowledged(process: &TestProcess, known: &Known, kill: usize) {
    let (consumed, reserved) = process.used("p", WINDOW).await;
    let (least, most) = (known.consumed, known.consumed + known.consumed_perhaps());
    assert!((least as f64..=most as f64).contains(&consumed), "kill {kill}: {consumed} of {least} to {most}");
    let open = open_reservations(process).await;
    assert_eq!(reserved, 10.0 * open.len() as f64, "kill {kill}");
    for reservation in &known.open {
        let there = open.contains(reservation) || known.may_be_closed(reservation);
        assert!(there, "kill {kill}: {reservation} is lost");
    }
    assert!(open.is_disjoint(&known.closed), "kill {kill}: a reservation came back");
}

#[tokio::test]
async fn a_reservation_whose_holder_died_with_the_process_is_gone_at_its_deadline() {
    let mut process = process_with_a_pool().await;
    let ask = ask("A", "c1", tokens(10)).holding(Duration::from_millis(1_500));
    let held = told(process.quota().enforce(ask).await);
    let long = process.reserve("A", "c1", tokens(5)).await;

    process.kill_and_restart().await;
    let (now, deadline) = (now_ms(), unix_ms(&held.reservation_expires_at));
    let (_, reserved) = process.used("p", WINDOW).await;
    assert!(reserved == 15.0 || now_ms() >= deadline, "{reserved} is held");
    tokio::time::sleep(Duration::from_millis(deadline.saturating_sub(now) + 1)).await;
    assert_eq!(process.used("p", WINDOW).await, (0.0, 5.0));
    assert!(process.release(&long.reservation_id).await);
}

fn now_ms() -> u64 {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since_epoch.expect("a clock after 1970").as_millis() as u64
}

#[tokio::test]
async fn a_second_process_on_the_same_data_is_refused_and_the_holder_is_named() {
    let mut process = process_with_a_pool().await;
    let (code, log) = failed_start(process.data_dir(), &[]).await;
    assert!(code.is_some_and(|code| code != 0), "{log}");
    assert!(log.contains(&process.pid().to_string()), "{log}");
    assert_eq!(process.enforce("A", "c1", None).await.verdict(), Verdict::Allow, "the holder goes on");

    process.kill_and_restart().await;
    assert_eq!(
        process.enforce("A", "c1", None).await.verdict(),
        Verdict::Allow,
        "a dead holder holds nothing"
    );
}

/// A stream that its client never ends must not keep the process.
#[tokio::test]
async fn told_to_end_a_process_ends_well_and_soon_though_somebody_watches_its_health() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut process = process_with_a_pool().await;
        let watch = HealthCheckRequest { service: String::new() };
        let mut watched = told(process.health().watch(watch).await);
        let first = watched.message().await.expect("a health").expect("a health");
        assert_eq!(first.status(), ServingStatus::Serving);
        process.record("A", "c1", tokens(7)).await;

        let ((code, took), last) = tokio::join!(process.end_with(signal), watched.message());
        let last = last.expect("a health").expect("a health");
        assert_eq!(last.status(), ServingStatus::NotServing, "{signal}");
        assert_eq!(code, Some(0), "{signal}: {}", process.log());
        assert!(took < Duration::from_secs(20), "{signal}: {took:?}");
        process.restart().await;
        assert_eq!(process.used("p", WINDOW).await, (7.0, 0.0), "{signal}");
    }
}

#[tokio::test]
async fn told_to_end_under_load_a_process_keeps_what_it_acknowledged() {
    let mut process = process_with_a_pool().await;
    let callers = start_load(&process, "load").await;
    let started = Instant::now();
    while process.used("p", WINDOW).await.0 < 100.0 {
        assert!(started.elapsed() < Duration::from_secs(60), "no load");
    }
    let (code, _) = process.end_with(Signal::SIGTERM).await;
    assert_eq!(code, Some(0), "{}", process.log());
    let known = end_load(callers).await;
    process.restart().await;
    assert_what_was_acknowledged(&process, &known, 0).await;
}
