//! A router: it asks, holds, settles, releases and records, and sends again what nobody answered, with the same ids,
//! to whichever replica.

use std::{error::Error, ops::RangeInclusive, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tonic::{Code, Response, Status, transport::Channel};

use super::{
    book::{Book, Certain},
    pools::{Kind, SharedPool, key_of},
    run::Course,
};
use crate::harness::{
    Client, PATIENCE, ask,
    pb::{
        self, dimension_status::Reason, enforce_response::Decision, pool::FailureMode,
        quota_share_client::QuotaShareClient,
    },
    spent, tokens,
};

/// One of so many calls is given up by its caller soon, and sent again.
const HANGS_UP_ONE_OF: u32 = 25;
const HANGS_UP_AFTER_MS: RangeInclusive<u64> = 1..=30;
/// What nobody answers within this time hangs, on however slow a machine.
const HANGS: Duration = Duration::from_secs(30);
/// How long each pool without room is used.
const TIGHT_SPAN: Duration = Duration::from_secs(3);

/// How callers behave.
#[derive(Clone, Debug)]
pub(crate) struct Habits {
    pub(crate) roomy: Vec<SharedPool>,
    /// Used by every third caller, one after the other.
    pub(crate) tight: Vec<SharedPool>,
    pub(crate) life_ms: RangeInclusive<u64>,
    /// Between two calls, on average.
    pub(crate) rest_ms: u64,
    /// What Redis has answered it keeps, whatever happens.
    pub(crate) redis_keeps: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Caller {
    number: usize,
    key: String,
    random: StdRng,
    doors: Vec<QuotaShareClient<Channel>>,
    course: Course,
    habits: Habits,
    book: Book,
    calls: u64,
}

/// An answer, and how it came about. Instants are since the run began.
#[derive(Debug)]
struct Answered<T> {
    answer: T,
    replica: usize,
    attempts: u32,
    /// The attempt that was answered.
    sent: Duration,
    at: Duration,
}

/// Something that is held, as far as its caller knows.
#[derive(Clone, Debug)]
struct Hold {
    id: String,
    tokens: i64,
    since: Duration,
    /// It is there at least until then, unless it is settled or released.
    until: Duration,
    /// Nobody but this caller can end it: it was made by the call that was answered with it.
    certain: bool,
}

impl Caller {
    /// The caller with this number, with a connection of its own to each replica.
    pub(crate) fn new(
        number: usize,
        replicas: &[Client],
        course: &Course,
        habits: &Habits,
        seed: u64,
    ) -> Self {
        Self {
            number,
            key: key_of(number),
            random: StdRng::seed_from_u64(seed.wrapping_mul(1_000_003).wrapping_add(number as u64)),
            doors: replicas.iter().map(|client| Client::lazy(client.address()).quota()).collect(),
            course: course.clone(),
            habits: habits.clone(),
            book: Book::default(),
            calls: 0,
        }
    }

    /// Calls until the run is over, and then until everything is acknowledged.
    pub(crate) async fn call(mut self) -> Book {
        while !self.course.is_over() {
            let pool = self.pool();
            match self.random.random_range(0..4) {
                0 if pool.kind == Kind::Roomy => self.record_at_once(&pool).await,
                _ => self.attempt(&pool).await,
            }
            self.rest().await;
        }
        self.book
    }

    fn pool(&mut self) -> SharedPool {
        let Habits { roomy, tight, .. } = &self.habits;
        if self.number.is_multiple_of(3) && !tight.is_empty() {
            let turn = self.course.elapsed().as_millis() / TIGHT_SPAN.as_millis();
            return tight[(turn as usize).min(tight.len() - 1)].clone();
        }
        roomy[self.random.random_range(0..roomy.len())].clone()
    }

    async fn rest(&mut self) {
        let rest_ms = self.random.random_range(0..=2 * self.habits.rest_ms);
        self.course.pause(Duration::from_millis(rest_ms)).await;
    }

    fn next_id(&mut self) -> String {
        self.calls += 1;
        format!("{}-{}", self.number, self.calls)
    }

    fn expect(&mut self, is_so: bool, broken: impl FnOnce() -> String) {
        if !is_so {
            let at = self.course.elapsed();
            self.book.broken.push(format!("{at:.3?}, caller {}: {}", self.number, broken()));
        }
    }

    /// Notes an attempt that was made at `sent`.
    fn note(&mut self, replica: usize, sent: Duration, call: &str, outcome: &str) {
        let at = self.course.elapsed();
        let took_ms = (at - sent).as_millis();
        let line = format!("caller {} to replica {replica}: {call}: {took_ms} ms: {outcome}", self.number);
        self.book.calls.push((at, line));
    }

    /// Sends a call to one replica after another until one answers. `None`: it was refused, or nobody answered though
    /// everything was healed; both are promises broken.
    async fn send<T, Answer>(
        &mut self,
        call: &str,
        send: impl Fn(QuotaShareClient<Channel>) -> Answer,
    ) -> Option<Answered<T>>
    where
        Answer: Future<Output = Result<Response<T>, Status>>,
    {
        for attempts in 1.. {
            let replica = self.random.random_range(0..self.doors.len());
            let hangs_up = self.random.random_ratio(1, HANGS_UP_ONE_OF);
            let patience = match hangs_up {
                true => Duration::from_millis(self.random.random_range(HANGS_UP_AFTER_MS)),
                false => HANGS,
            };
            let sent = self.course.elapsed();
            let why = match tokio::time::timeout(patience, send(self.doors[replica].clone())).await {
                Ok(Ok(response)) => {
                    let (answer, at) = (response.into_inner(), self.course.elapsed());
                    return Some(Answered { answer, replica, attempts, sent, at });
                }
                Ok(Err(status)) if is_to_be_sent_again(&status) => {
                    format!("{:?}: {}", status.code(), status.message())
                }
                Ok(Err(status)) => {
                    self.expect(false, || format!("{call} was refused by replica {replica}: {status:?}"));
                    return None;
                }
                Err(_) if hangs_up => "hung up".to_owned(),
                Err(_) => {
                    self.expect(false, || format!("{call} hung at replica {replica} for {patience:?}"));
                    "no answer".to_owned()
                }
            };
            self.note(replica, sent, call, &why);
            *self.book.retries.entry(why).or_default() += 1;
            if self.course.healed_since() > PATIENCE {
                self.expect(false, || format!("{call} is not answered though everything is healed"));
                return None;
            }
            let pause_ms = self.random.random_range(5..=50);
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        }
        None
    }

    /// Records something that nothing was held for.
    async fn record_at_once(&mut self, pool: &SharedPool) {
        let (connection, cost) = (self.connection(pool), self.cost());
        let record = spent(&self.key, connection, cost).once(&self.next_id());
        self.record(pool, record, None).await;
    }

    fn connection<'a>(&mut self, pool: &'a SharedPool) -> &'a str {
        &pool.connections[self.random.random_range(0..pool.connections.len())]
    }

    fn cost(&mut self) -> pb::Cost {
        let (tokens, usd_nanos) =
            (self.random.random_range(0..=1_000), self.random.random_range(0..=5_000_000));
        let requests = self.random.random_bool(0.2).then(|| self.random.random_range(0..=3));
        pb::Cost { requests, tokens: Some(tokens), usd: Some(f64::from(usd_nanos) / 1e9), percent: None }
    }

    /// Has `record` acknowledged. It settles `hold`, if there is one.
    async fn record(&mut self, pool: &SharedPool, record: pb::RecordConsumptionRequest, hold: Option<&Hold>) {
        let named = (record.idempotency_key.as_str(), record.reservation_id.as_str());
        let call = format!("record {named:?} of {:?} in {}", record.cost.unwrap_or_default(), pool.id);
        let sending = record.clone();
        let answered = self.send(&call, |mut door| {
            let record = sending.clone();
            async move { door.record_consumption(record).await }
        });
        let Some(answered) = answered.await else { return };
        let pb::RecordConsumptionResponse { duplicate, reservation_expired, journaled, pool_id } =
            answered.answer.clone();
        self.note(answered.replica, answered.sent, &call, &format!("{:?}", answered.answer));
        self.book.records_us.saturating_record((answered.at - answered.sent).as_micros() as u64);
        self.expect(pool_id == pool.id, || format!("{call} was counted in {pool_id:?}"));
        let once = answered.attempts == 1;
        self.expect(!(once && duplicate), || format!("{call} was sent once and is a duplicate"));
        let held = hold.is_some_and(|hold| self.surely_held(hold, &answered));
        let lost = held && once && !journaled && reservation_expired;
        self.expect(!lost, || format!("{call}: its reservation is gone before its time"));
        self.book.counted(&pool.id, &record, journaled);
        self.book.settled += u64::from(hold.is_some());
        if matches!(pool.kind, Kind::Tight(_)) {
            let was_held = hold.is_some() && !duplicate && !reservation_expired && !journaled;
            self.spent_in_tight(
                pool,
                record.cost.and_then(|cost| cost.tokens).unwrap_or(0),
                was_held,
                answered.at,
            );
        }
    }

    fn spent_in_tight(&mut self, pool: &SharedPool, tokens: i64, was_held: bool, at: Duration) {
        if was_held {
            self.is_certain(pool, tokens, at, Duration::MAX);
        } else {
            *self.book.perhaps_late.entry(pool.id.clone()).or_default() += tokens;
        }
    }

    fn is_certain(&mut self, pool: &SharedPool, tokens: i64, from: Duration, until: Duration) {
        let us = |since: Duration| u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
        let span = Certain { tokens, from_us: us(from), until_us: us(until) };
        self.book.certain.entry(pool.id.clone()).or_default().push(span);
    }

    /// Whether a hold was there when a call that ends it, or asks for it, was carried out.
    fn surely_held<T>(&self, hold: &Hold, answered: &Answered<T>) -> bool {
        self.habits.redis_keeps && hold.certain && answered.at < hold.until
    }

    /// Asks for room and, if there is some, uses it.
    async fn attempt(&mut self, pool: &SharedPool) {
        let is_tight = matches!(pool.kind, Kind::Tight(_));
        let estimate = self.random.random_range(10..=100);
        let life = Duration::from_millis(self.random.random_range(self.habits.life_ms.clone()));
        let connection = self.connection(pool);
        let mut request = ask(&self.key, connection, tokens(estimate)).holding(life);
        if is_tight || self.random.random_bool(0.5) {
            request = request.named(&self.next_id());
        }
        let Some(asked) = self.ask(pool, &request).await else { return };
        if asked.answer.degraded {
            if asked.answer.decision() == Decision::Allow {
                self.record_at_once(pool).await;
            }
            return;
        }
        if asked.answer.decision() != Decision::Allow {
            self.book.blocked += 1;
            return;
        }
        self.book.held += 1;
        let hold = Hold {
            id: asked.answer.reservation_id.clone(),
            tokens: estimate,
            since: asked.at,
            until: asked.sent + life,
            certain: !asked.answer.repeated_request,
        };
        if !request.request_id.is_empty() && self.random.random_ratio(1, 10) {
            self.ask_again(pool, &request, &hold).await;
        }
        self.use_up(pool, &request.connection_id, hold, life).await;
    }

    async fn ask(
        &mut self,
        pool: &SharedPool,
        request: &pb::EnforceRequest,
    ) -> Option<Answered<pb::EnforceResponse>> {
        let call = format!(
            "enforce {:?} of {:?} in {}",
            request.request_id,
            request.estimated_cost.unwrap_or_default(),
            pool.id
        );
        let asked = self.send(&call, |mut door| {
            let request = request.clone();
            async move { door.enforce(request).await }
        });
        let asked = asked.await?;
        let answer = &asked.answer;
        let outcome = format!(
            "{:?} {:?} {:?}{}{}",
            answer.decision(),
            answer.reason(),
            answer.reservation_id,
            if answer.repeated_request { " repeated" } else { "" },
            if answer.degraded { " degraded" } else { "" },
        );
        self.note(asked.replica, asked.sent, &call, &outcome);
        self.book.decisions_us.saturating_record((asked.at - asked.sent).as_micros() as u64);
        if answer.degraded {
            self.book.degraded(asked.replica, asked.at);
        }
        self.book.repeated += u64::from(answer.repeated_request);
        let why_not = why_not(pool, answer);
        self.expect(why_not.is_none(), || format!("{call}: {}: {outcome}", why_not.unwrap_or_default()));
        Some(asked)
    }

    /// The same attempt once more: it gets what it has.
    async fn ask_again(&mut self, pool: &SharedPool, request: &pb::EnforceRequest, hold: &Hold) {
        let Some(again) = self.ask(pool, request).await else { return };
        let is_same = again.answer.repeated_request && again.answer.reservation_id == hold.id;
        let is_wrong = !again.answer.degraded && self.surely_held(hold, &again) && !is_same;
        self.expect(!is_wrong, || {
            format!("{:?} was asked again and has not {:?}", request.request_id, hold.id)
        });
    }

    /// Works for a while, and settles, releases or forgets what is held.
    async fn use_up(&mut self, pool: &SharedPool, connection: &str, hold: Hold, life: Duration) {
        let is_slow = self.random.random_ratio(1, 15);
        let share = self.random.random_range(if is_slow { 0.9..1.2 } else { 0.0..0.1 });
        self.course.pause(life.mul_f64(share)).await;
        let ends = self.course.elapsed();
        let way = self.random.random_range(0..10);
        match (way, pool.kind) {
            (0, _) => {}
            (1..=3, _) | (4..=6, Kind::Tight(_)) => self.release(pool, &hold).await,
            _ => self.settle(pool, connection, &hold).await,
        }
        let until = if way == 0 { hold.until } else { ends.min(hold.until) };
        if matches!(pool.kind, Kind::Tight(_)) && hold.certain {
            self.is_certain(pool, hold.tokens, hold.since, until);
        }
    }

    async fn settle(&mut self, pool: &SharedPool, connection: &str, hold: &Hold) {
        let cost = match pool.kind {
            Kind::Roomy => self.cost(),
            Kind::Tight(_) => tokens(self.random.random_range(0..=hold.tokens / 4)),
        };
        let mut record = spent(&self.key, connection, cost).settling(&hold.id);
        if self.random.random_ratio(1, 8) {
            record = record.once(&self.next_id());
        }
        self.record(pool, record, Some(hold)).await;
    }

    async fn release(&mut self, pool: &SharedPool, hold: &Hold) {
        let call = format!("release {:?} in {}", hold.id, pool.id);
        let release =
            pb::ReleaseReservationRequest { reservation_id: hold.id.clone(), api_key_id: self.key.clone() };
        let answered = self.send(&call, |mut door| {
            let release = release.clone();
            async move { door.release_reservation(release).await }
        });
        let Some(answered) = answered.await else { return };
        self.note(answered.replica, answered.sent, &call, &format!("{:?}", answered.answer));
        let pb::ReleaseReservationResponse { released, journaled } = answered.answer;
        let is_lost = answered.attempts == 1 && !journaled && !released && self.surely_held(hold, &answered);
        self.expect(!is_lost, || format!("{call}: it is gone before its time"));
        self.book.released += 1;
    }
}

/// Whether a failure says that the same call can be made again: the service says so by UNAVAILABLE, and whatever has not
/// been said by the service, but found out on the way to it, is as if nothing had been said.
fn is_to_be_sent_again(status: &Status) -> bool {
    status.code() == Code::Unavailable || status.source().is_some()
}

/// What is wrong with a decision.
fn why_not(pool: &SharedPool, answer: &pb::EnforceResponse) -> Option<&'static str> {
    let is_allowed = answer.decision() == Decision::Allow;
    if answer.pool_id != pool.id {
        return Some("it is of another pool");
    }
    if answer.degraded {
        return match pool.failure_mode {
            _ if !answer.reservation_id.is_empty() => Some("nothing can be held without Redis"),
            FailureMode::FailLocal => None,
            _ if answer.reason() != Reason::StoreUnavailable => Some("the failure mode decides"),
            FailureMode::FailClosed if is_allowed => Some("it is to block"),
            FailureMode::FailOpen if !is_allowed => Some("it is to allow"),
            _ => None,
        };
    }
    match pool.kind {
        _ if is_allowed == answer.reservation_id.is_empty() => {
            Some("what is allowed is held, and nothing else")
        }
        Kind::Roomy if !is_allowed => Some("there is room"),
        Kind::Tight(_) if !is_allowed && answer.reason() != Reason::GlobalSaturated => {
            Some("only the limit of all binds here")
        }
        _ => None,
    }
}
