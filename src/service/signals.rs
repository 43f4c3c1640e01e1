//! What providers say of their accounts, reported on purpose or read from responses.

use super::{AdminError, LOOKS_MAX, Service, switch::InUse};
use crate::{
    core::{
        account::Observation,
        directory::{ChangeRefused, PoolEntry},
        headers::{self, HeaderReading, HeaderSignal, Reset},
        ids::{ConnectionId, Faults},
        plan::DimensionKey,
        units::Timestamp,
        window::Window,
    },
    store::LedgerError,
};

/// What is reported of one connection.
#[derive(Clone, Debug)]
pub struct SignalsCall {
    /// Whose account.
    pub connection: ConnectionId,
    /// Figures.
    pub utilizations: Vec<Utilization>,
    /// And headers of a response.
    pub headers: ResponseHeaders,
}

/// A provider's figure, as it was reported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Utilization {
    /// What it speaks of.
    pub dimension: DimensionKey,
    /// The used fraction, 0 to 1.5.
    pub fraction: f64,
    /// When the window ends.
    pub resets_at: Option<Timestamp>,
    /// When it was true; now if absent.
    pub observed_at: Option<Timestamp>,
}

/// Headers of a provider's response, in no order.
#[derive(Clone, Default)]
pub struct ResponseHeaders {
    /// Names and values.
    pub headers: Vec<(String, String)>,
    /// How long ago they came, in ms, where that is known.
    pub age_ms: Option<u64>,
}

/// Values may be secrets.
impl std::fmt::Debug for ResponseHeaders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} headers", self.headers.len())
    }
}

/// What became of a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SignalsOutcome {
    /// What was taken over.
    pub accepted: Vec<Utilization>,
    /// Header or dimension, and why.
    pub ignored: Vec<String>,
}

impl Service {
    /// Takes over what a provider says.
    ///
    /// # Errors
    /// Names each figure that cannot be; nothing is taken over then.
    pub async fn report_signals(&self, call: &SignalsCall) -> Result<SignalsOutcome, AdminError> {
        let mut looks = 1;
        loop {
            let outcome = self.report_once(call).await;
            let gone = matches!(outcome, Err(AdminError::Ledger(LedgerError::PoolRemoved)));
            if !gone || looks == LOOKS_MAX {
                return outcome;
            }
            looks += 1;
        }
    }

    async fn report_once(&self, call: &SignalsCall) -> Result<SignalsOutcome, AdminError> {
        let ledger = self.ledger();
        let now = ledger.now()?;
        let mut outcome = SignalsOutcome::default();
        let mut seen = reported(&call.utilizations, now)?;
        let read = call.headers.read(now);
        seen.extend(read.signals.iter().map(|signal| call.headers.seen(signal, now)));
        outcome.ignored.extend(read.ignored.iter().map(ToString::to_string));

        let directory = self.0.directory.load_full();
        let entry = directory.pool_of(&call.connection);
        let meant = |seen: &Seen| entry.is_some_and(|entry| has_dimension(entry, seen.said.dimension));
        let (meant, unknown): (Vec<Seen>, Vec<Seen>) = seen.into_iter().partition(meant);
        let why =
            if entry.is_some() { "the plan has no such dimension" } else { "the connection is in no pool" };
        outcome.ignored.extend(unknown.iter().map(|seen| format!("{}: {why}", seen.said.dimension)));
        if let Some(entry) = entry.filter(|_| !meant.is_empty()) {
            let observations: Vec<_> =
                meant.iter().map(|seen| self.observation(entry, seen, Source::REPORT)).collect();
            let pool = entry.history.created_revision;
            let taken = ledger.report(pool, &call.connection, &observations).await?;
            for (Seen { said, .. }, taken) in meant.into_iter().zip(taken) {
                match taken {
                    Ok(()) => outcome.accepted.push(said),
                    Err(why) => outcome.ignored.push(format!("{}: {why}", said.dimension)),
                }
            }
        }
        self.0.counts.signals(outcome.accepted.len(), outcome.ignored.len());
        Ok(outcome)
    }

    /// What the headers that came with a record say of the dimensions of `entry`'s plan, and how many could not be read.
    pub(super) fn observations(
        &self,
        ledger: &InUse,
        entry: &PoolEntry,
        headers: &ResponseHeaders,
    ) -> (Vec<Observation>, usize) {
        // What was true at an instant that cannot be told means nothing.
        let now = match ledger.now() {
            Ok(now) if !headers.headers.is_empty() => now,
            _ => return (Vec::new(), headers.headers.len()),
        };
        let source = Source { believed: false, age_known: headers.age_ms.is_some() };
        let HeaderReading { signals, ignored } = headers.read(now);
        let seen = signals.into_iter().map(|signal| headers.seen(&signal, now));
        let seen = seen.filter(|seen| has_dimension(entry, seen.said.dimension));
        (seen.map(|seen| self.observation(entry, &seen, source)).collect(), ignored.len())
    }

    fn observation(&self, entry: &PoolEntry, seen: &Seen, source: Source) -> Observation {
        let Seen { said, observed_at, reset } = *seen;
        Observation {
            dimension: said.dimension,
            fraction: said.fraction,
            observed_at,
            reset,
            life_ms: self.0.start.signal_ttl_ms,
            believed: source.believed,
            age_known: source.age_known,
            alone: entry.pool.connections.len() == 1,
        }
    }
}

/// A figure, when it was true, and what its end means.
#[derive(Clone, Copy)]
struct Seen {
    said: Utilization,
    observed_at: Timestamp,
    reset: Reset,
}

/// How a figure came.
#[derive(Clone, Copy)]
struct Source {
    believed: bool,
    age_known: bool,
}

impl Source {
    const REPORT: Source = Source { believed: true, age_known: true };
}

impl ResponseHeaders {
    fn observed_at(&self, now: Timestamp) -> Timestamp {
        Timestamp::from_unix_ms(now.unix_ms().saturating_sub(self.age_ms.unwrap_or_default()))
    }

    fn read(&self, now: Timestamp) -> HeaderReading {
        let headers = self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        headers::read(headers, self.observed_at(now))
    }

    fn seen(&self, signal: &HeaderSignal, now: Timestamp) -> Seen {
        let HeaderSignal { dimension, fraction, reset } = *signal;
        let observed_at = self.observed_at(now);
        let (resets_at, observed) = (reset.end(), Some(observed_at));
        let said = Utilization { dimension, fraction, resets_at, observed_at: observed };
        Seen { said, observed_at, reset }
    }
}

fn has_dimension(entry: &PoolEntry, dimension: DimensionKey) -> bool {
    entry.dimensions().iter().any(|of| of.key == dimension)
}

fn reported(utilizations: &[Utilization], now: Timestamp) -> Result<Vec<Seen>, ChangeRefused> {
    let mut faults = Faults::default();
    let mut all = Vec::new();
    for (index, said) in utilizations.iter().enumerate() {
        let observed_at = said.observed_at.unwrap_or(now).min(now);
        let possible = |end: Timestamp| (1..=Window::LONGEST_MS).contains(&end.ms_since(observed_at));
        if let Some(end) = said.resets_at.filter(|end| !possible(*end)) {
            let accepted = "an instant after observed_at, by up to 366 days";
            let given = format!("{} ms since 1970", end.unix_ms());
            faults.add(format!("utilizations[{index}].resets_at"), given, accepted);
        }
        let window = said.dimension.window;
        let reset = said.resets_at.map_or(Reset::Unknown, |end| Reset::of(window, observed_at, end));
        all.push(Seen { said: Utilization { observed_at: Some(observed_at), ..*said }, observed_at, reset });
    }
    if faults.is_empty() { Ok(all) } else { Err(ChangeRefused::Invalid(faults.into_vec())) }
}
