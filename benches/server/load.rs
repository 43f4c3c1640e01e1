//! A closed loop: so many calls in flight, each followed by the next as soon as it is answered.

use std::{
    fmt,
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use clap::ValueEnum;
use hdrhistogram::Histogram;
use tokio::{runtime, task::LocalSet};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

use crate::{
    Failure, KEYS,
    pb::quota_share_client::QuotaShareClient,
    setting::{check, record, reserve},
    target::Target,
};

/// As many routers, each with a connection of its own, share the calls in flight.
const CONNECTIONS_MAX: usize = 8;
/// The client's threads: one for each of the two cores that the figures are meant for.
const THREADS: usize = 2;
/// Names calls that are to be counted once.
static FRESH: AtomicU64 = AtomicU64::new(0);

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Calls {
    /// Enforce without a reservation.
    Check,
    /// Enforce with a reservation and a request id, then the record that settles it: two calls.
    ReserveAndSettle,
    /// RecordConsumption with a fresh idempotency key.
    Record,
}

impl Calls {
    pub(crate) const ALL: [Calls; 3] = [Calls::Check, Calls::ReserveAndSettle, Calls::Record];
}

/// What to do to a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) calls: Calls,
    pub(crate) in_flight: usize,
    pub(crate) time: Duration,
}

/// What a server did.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Of single calls, in microseconds.
    waits: Histogram<u64>,
    elapsed: Duration,
    /// Of the server, for each call, those included that were made to warm up.
    cpu: Duration,
    calls: u64,
}

impl Measured {
    fn new() -> Self {
        let waits = Histogram::new(3).expect("three digits are supported");
        Self { waits, elapsed: Duration::ZERO, cpu: Duration::ZERO, calls: 0 }
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.waits.len() as f64 / self.elapsed.as_secs_f64()
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |quantile| self.waits.value_at_quantile(quantile) as f64 / 1_000.0;
        let cpu_us = self.cpu.as_secs_f64() * 1e6 / self.calls as f64;
        write!(f, "{:.0}/s ({:.2} ms, p99 {:.2}; {cpu_us:.1} us)", self.per_second(), ms(0.5), ms(0.99))
    }
}

impl Load {
    /// Runs it on as many threads as the client has, and adds up what they saw.
    pub(crate) fn run(&self, target: &Target) -> Result<Measured, Failure> {
        let cpu_before = target.cpu_time()?;
        let threads = THREADS.min(self.in_flight);
        let started: Vec<_> = (0..threads)
            .map(|thread| {
                let load = Load { in_flight: share(self.in_flight, threads, thread), ..*self };
                let connections = share(CONNECTIONS_MAX.min(self.in_flight), threads, thread);
                let address = target.address();
                std::thread::spawn(move || load.run_here(address, connections))
            })
            .collect();
        let mut all = Measured::new();
        for thread in started {
            let seen = thread.join().map_err(|_| "a client's thread has panicked")??;
            all.waits.add(&seen.waits)?;
            all.elapsed = all.elapsed.max(seen.elapsed);
            all.calls += seen.calls;
        }
        all.cpu = target.cpu_time()? - cpu_before;
        Ok(all)
    }

    fn run_here(&self, address: SocketAddr, connections: usize) -> Result<Measured, Failure> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        LocalSet::new().block_on(&runtime, async {
            let mut clients = Vec::new();
            for _ in 0..connections {
                let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
                clients.push(QuotaShareClient::new(endpoint.connect().await?));
            }
            let from = Instant::now() + self.time / 4;
            let loops = (0..self.in_flight).map(|index| {
                let client = clients[index % connections].clone();
                tokio::task::spawn_local(self.repeat(client, from))
            });
            let mut seen = Measured { elapsed: self.time, ..Measured::new() };
            for ended in loops.collect::<Vec<_>>() {
                let (waits, calls) = ended.await??;
                seen.waits.add(&waits)?;
                seen.calls += calls;
            }
            Ok(seen)
        })
    }

    /// The waits of calls that are made from `from` on and answered before the end, and how many calls there were in all.
    fn repeat(
        &self,
        mut client: QuotaShareClient<Channel>,
        from: Instant,
    ) -> impl Future<Output = Result<(Histogram<u64>, u64), Failure>> + 'static {
        let (calls, until) = (self.calls, from + self.time);
        async move {
            let (mut waits, mut made) = (Measured::new().waits, 0);
            loop {
                for (began, ended) in one(&mut client, calls).await?.into_iter().flatten() {
                    made += 1;
                    if ended >= until {
                        return Ok((waits, made));
                    }
                    if began >= from {
                        waits.record((ended - began).as_micros() as u64)?;
                    }
                }
            }
        }
    }
}

/// How much of `whole` falls to `part` of `parts`.
fn share(whole: usize, parts: usize, part: usize) -> usize {
    whole / parts + usize::from(part < whole % parts)
}

/// When each call was made and answered: one or two.
async fn one(
    client: &mut QuotaShareClient<Channel>,
    calls: Calls,
) -> Result<[Option<(Instant, Instant)>; 2], Status> {
    let fresh = FRESH.fetch_add(1, Ordering::Relaxed);
    // Every key comes by, neighbours far apart.
    let key = (fresh as usize).wrapping_mul(48_271) % KEYS;
    let began = Instant::now();
    let settled = match calls {
        Calls::Check => client.enforce(check(key)).await.map(|_| None)?,
        Calls::Record => {
            client.record_consumption(record(key, format!("{fresh:032x}"))).await.map(|_| None)?
        }
        Calls::ReserveAndSettle => {
            let answer = client.enforce(reserve(key, format!("{fresh:032x}"))).await?.into_inner();
            if answer.reservation_id.is_empty() {
                return Err(Status::internal(format!("nothing was held: {}", answer.message)));
            }
            let held = Instant::now();
            let mut settle = record(key, String::new());
            settle.reservation_id = answer.reservation_id;
            client.record_consumption(settle).await?;
            Some((held, Instant::now()))
        }
    };
    let answered = settled.map_or_else(Instant::now, |(held, _)| held);
    Ok([Some((began, answered)), settled])
}
