//! The edge of the service: what is decided of a call before it is looked at. Who makes it, whether there is room for
//! it, and whether anybody still waits for its answer.

use std::{
    array,
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, timeout_at};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, Request, Response, header::AUTHORIZATION},
};
use tower::Service;

use super::{
    methods::{self, Method, Share},
    status,
};
use crate::transport::auth::{Authentication, CertificateNames};

/// Calls of people and their programs that are in flight at once. None takes long.
const ADMINISTRATION_MAX: usize = 256;
/// Streams of usage: one for each open page of a dashboard.
const WATCHING_MAX: usize = 1_024;
/// Probes in flight at once.
const HEALTH_MAX: usize = 1_024;
/// Streams that do nothing until something changes: one for each connection of clients that check health.
const HEALTH_WATCHING_MAX: usize = 16_384;
const SHARES: usize = 5;
/// How long a call may take until its answer begins, whatever its caller says: a message that never comes must not keep a
/// place for ever. Several times what the slowest call takes.
const CALL_TIME_MAX: Duration = Duration::from_secs(120);

/// How many calls are in flight, and how many may be.
#[derive(Debug)]
pub(super) struct Room {
    calls: [AtomicUsize; SHARES],
    decisions_max: usize,
}

impl Room {
    /// Room for `decisions_max` decisions and records, and for a fixed number of others.
    pub(super) fn new(decisions_max: usize) -> Self {
        Self { calls: array::from_fn(|_| AtomicUsize::new(0)), decisions_max }
    }

    fn max(&self, share: Share) -> usize {
        match share {
            Share::Decisions => self.decisions_max,
            Share::Administration => ADMINISTRATION_MAX,
            Share::Watching => WATCHING_MAX,
            Share::Health => HEALTH_MAX,
            Share::HealthWatching => HEALTH_WATCHING_MAX,
        }
    }

    fn calls(&self, share: Share) -> &AtomicUsize {
        &self.calls[share as usize]
    }
}

/// A place in the [`Room`], until it is dropped.
#[derive(Debug)]
struct Place {
    rules: Arc<Rules>,
    share: Share,
}

impl Place {
    fn take(rules: &Arc<Rules>, share: Share) -> Result<Self, Status> {
        let taken = rules.room.calls(share).fetch_add(1, Relaxed);
        let place = Self { rules: Arc::clone(rules), share };
        let max = rules.room.max(share);
        if taken < max { Ok(place) } else { Err(status::overloaded(share == Share::Decisions, max)) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.rules.room.calls(self.share).fetch_sub(1, Relaxed);
    }
}

/// What holds for all connections. Each thread has its own, so that threads do not wait for each other to count
/// references.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) authentication: Arc<Authentication>,
    pub(super) room: Arc<Room>,
}

/// The calls of one connection, let in by the rules.
#[derive(Clone)]
pub(super) struct Edge<S> {
    pub(super) inner: S,
    pub(super) rules: Arc<Rules>,
    /// With which the connection was opened.
    pub(super) certificate: CertificateNames,
}

impl<S> Edge<S> {
    fn let_in<B>(&self, method: &Method, request: &mut Request<B>) -> Result<Place, Status> {
        let authorization = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes());
        let admitted = self.rules.authentication.admit(method.access, authorization, &self.certificate);
        let caller = admitted.map_err(|refused| status::not_admitted(method, refused))?;
        if let Some(caller) = caller {
            request.extensions_mut().insert(caller);
        }
        Place::take(&self.rules, method.share)
    }
}

impl<S, B> Service<Request<B>> for Edge<S>
where
    S: Service<Request<B>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Held>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let method = methods::of_path(request.uri().path());
        let place = match self.let_in(method, &mut request) {
            Ok(place) => place,
            Err(refused) => return Box::pin(async move { Ok(Held::refusal(refused)) }),
        };
        let deadline = Instant::now() + time_limit(request.headers());
        let answer = self.inner.call(request);
        Box::pin(async move {
            match in_time(deadline, answer).await {
                Ok(answer) => answer.map(|response| response.map(|body| Held { body, _place: Some(place) })),
                Err(late) => Ok(Held::refusal(status::late(late))),
            }
        })
    }
}

/// How far a call had come when its deadline passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    /// It was not started.
    Before,
    /// It was not answered.
    Meanwhile,
}

/// The output of `answer`, which is not started when `deadline` has passed: since it was accepted, a call may have waited
/// for its turn.
async fn in_time<F: Future>(deadline: Instant, answer: F) -> Result<F::Output, Late> {
    if Instant::now() >= deadline {
        return Err(Late::Before);
    }
    timeout_at(deadline, answer).await.map_err(|_| Late::Meanwhile)
}

/// How long a call may take until its answer begins.
fn time_limit(headers: &HeaderMap) -> Duration {
    timeout(headers).map_or(CALL_TIME_MAX, |timeout| timeout.min(CALL_TIME_MAX))
}

/// How long the caller waits, by the header `grpc-timeout`: up to eight digits and a unit. Anything else is no deadline.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3_600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// The body of an answer, which keeps its call's place until the caller has taken all of it.
pub(super) struct Held {
    body: Body,
    _place: Option<Place>,
}

impl Held {
    fn refusal(status: Status) -> Response<Held> {
        status.into_http().map(|body| Held { body, _place: None })
    }
}

impl http_body::Body for Held {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[test]
    fn a_deadline_is_read_as_grpc_defines_it() {
        let cases = [
            ("1H", Some(Duration::from_secs(3_600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("99999999m", Some(Duration::from_millis(99_999_999))),
            ("5u", Some(Duration::from_micros(5))),
            ("0n", Some(Duration::ZERO)),
            ("100000000n", None),
            ("+1S", None),
            ("1", None),
            ("S", None),
            ("", None),
            ("1s", None),
        ];
        for (text, want) in cases {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            assert_eq!(timeout(&headers), want, "{text:?}");
        }
        let mut headers = HeaderMap::new();
        assert_eq!((timeout(&headers), time_limit(&headers)), (None, CALL_TIME_MAX));
        for (text, limit) in [("50m", Duration::from_millis(50)), ("1H", CALL_TIME_MAX)] {
            headers.insert("grpc-timeout", text.parse().unwrap());
            assert_eq!(time_limit(&headers), limit);
        }
    }

    #[tokio::test]
    async fn what_is_late_is_not_started_and_what_lasts_is_ended() {
        let now = Instant::now();
        let started = async { panic!("it was started") };
        assert_eq!(
            in_time::<Pin<Box<dyn Future<Output = ()>>>>(now, Box::pin(started)).await,
            Err(Late::Before)
        );
        assert_eq!(in_time(now + Duration::from_secs(3_600), async { 1 }).await, Ok(1));
        assert!(in_time(Instant::now() + Duration::from_millis(5), pending::<()>()).await.is_err());
    }

    #[test]
    fn a_full_share_leaves_the_others_alone() {
        let rules = Rules { authentication: Arc::new(Authentication::Off), room: Arc::new(Room::new(2)) };
        let rules = Arc::new(rules);
        let mut places: Vec<_> =
            (0..2).map(|_| Place::take(&rules, Share::Decisions).expect("there is room")).collect();
        for _ in 0..3 {
            let refused = Place::take(&rules, Share::Decisions).expect_err("there is no room");
            assert_eq!(refused.code(), tonic::Code::Unavailable);
        }
        for share in [Share::Administration, Share::Watching, Share::Health, Share::HealthWatching] {
            assert!(Place::take(&rules, share).is_ok(), "{share:?}");
        }
        places.pop();
        assert!(Place::take(&rules, Share::Decisions).is_ok());
    }
}
