//! What goes to the script and comes back, and what Redis keeps, as MessagePack.
//!
//! Structs are arrays in the order of their fields: `lua/*.lua` reads and writes them by position.

use rmp::encode;
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_bytes::ByteArray;

use crate::{
    core::{
        account::{Head, Observation, Share},
        admission::{Counter, Reading},
        burn_rate::{BurnRate, Sample, Sampler},
        charge::Charge,
        ids::{ApiKeyId, CallId, ConnectionId, Fingerprint, Model, PoolRevision, ReservationId},
        ledger::{Consumption, Contradiction, DimensionPart, HoldRequest, KeyPart, Settlement},
        plan::DimensionKey,
        pool::ModelCapKey,
        units::{Timestamp, Unit},
        window::{SlidingCounter, Window},
    },
    store::{BatchName, Deferred},
};

type Random = ByteArray<12>;

/// A call of the script: its name, and what it is given, in the order in which `lua/calls.lua` takes it.
#[derive(Clone, Debug)]
pub(super) struct Call {
    bytes: Vec<u8>,
    kind: Kind,
}

/// What is done with a call that a fail-over may have lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A cost that is recorded when it comes: it is sent again with the time at which it came.
    Record,
    /// Sent again as it is.
    Dated,
    /// Not sent again: what it held is lost.
    Hold,
    /// Not sent again: nothing is lost.
    Look,
}

impl Call {
    fn new(name: &str, arguments: u32) -> Self {
        let mut bytes = Vec::with_capacity(256);
        // Writing to memory does not fail.
        let _ = encode::write_array_len(&mut bytes, 1 + arguments);
        Self { bytes, kind: Kind::Look }.with(&name)
    }

    fn of_kind(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// It makes a hold, or may.
    pub(super) fn holds(&self) -> bool {
        self.kind == Kind::Hold
    }

    /// What is sent to a store that has lost the effect which this had at `at`; `None`: nothing.
    pub(super) fn again(mut self, at: Timestamp) -> Option<Self> {
        self.date(at);
        match self.kind {
            Kind::Record | Kind::Dated => Some(self),
            Kind::Hold | Kind::Look => None,
        }
    }

    /// A cost that is recorded when it comes is recorded at `at` instead, whenever it comes.
    pub(super) fn date(&mut self, at: Timestamp) {
        if self.kind == Kind::Record {
            // Its last argument is the time at which it was recorded, which is not told where it is now.
            self.bytes.pop();
            // Only what has no known length cannot be written.
            let _ = rmp_serde::encode::write(&mut self.bytes, &at);
            self.kind = Kind::Dated;
        }
    }

    fn with(mut self, argument: &impl Serialize) -> Self {
        // Only what has no known length cannot be written.
        let _ = rmp_serde::encode::write(&mut self.bytes, argument);
        self
    }

    /// Bytes as a string: the script's reader knows no other kind.
    fn with_bytes(mut self, bytes: Option<&[u8]>) -> Self {
        match bytes {
            Some(bytes) => write_bytes(&mut self.bytes, bytes),
            None => return self.with(&()),
        }
        self
    }

    pub(super) fn check(charge: &Charge) -> Self {
        Self::new("check", 1).with(charge)
    }

    /// Nothing is held after `not_after`, by Redis' clock.
    pub(super) fn enforce(charge: &Charge, wish: &HoldRequest, not_after: Option<Timestamp>) -> Self {
        let request = Self::request_of(wish);
        Self::new("enforce", 9)
            .with(charge)
            .with_bytes(Some(&wish.random))
            .with(&wish.connection)
            .with(&wish.model)
            .with(&wish.reserve_for_ms)
            .with_bytes(request.as_ref().map(|call| &call.0[..]))
            .with(&wish.request_id)
            .with_bytes(Some(&packed(wish.fingerprint)))
            .with(&not_after)
            .of_kind(Kind::Hold)
    }

    pub(super) fn record(pool: PoolRevision, consumption: &Consumption) -> Self {
        let settles = consumption.reservation;
        let random = own(pool, settles.and_then(|settles| settles.id));
        Self::new("record", 12)
            .with(&consumption.api_key)
            .with(&consumption.connection)
            .with(&consumption.cost)
            .with(&consumption.observations)
            .with(&consumption.counts)
            .with_bytes(settles.as_ref().map(|settles| &settles.call.0[..]))
            .with_bytes(random.as_ref().map(|random| &random[..]))
            .with(&settles.is_some_and(|settles| settles.held_elsewhere))
            .with_bytes(consumption.idempotency.as_ref().map(|call| &call.0[..]))
            .with_bytes(Some(&packed(consumption.fingerprint)))
            .with(&consumption.id_life_ms)
            .with(&consumption.recorded_at)
            .of_kind(if consumption.recorded_at.is_none() { Kind::Record } else { Kind::Dated })
    }

    pub(super) fn release(random: [u8; 12], api_key: Option<&ApiKeyId>) -> Self {
        Self::new("release", 2).with_bytes(Some(&random)).with(&api_key).of_kind(Kind::Dated)
    }

    /// Gives back what a call that nobody has heard of may hold, and forgets its request.
    pub(super) fn take_back(random: [u8; 12], request: Option<CallId>) -> Self {
        Self::new("release", 3)
            .with_bytes(Some(&random))
            .with(&())
            .with_bytes(request.as_ref().map(|call| &call.0[..]))
            .of_kind(Kind::Dated)
    }

    /// Nothing, so that a batch finds out whether the store has lost something.
    pub(super) fn nothing() -> Self {
        Self::new("nothing", 0)
    }

    /// A call that was kept for `pool`.
    pub(super) fn deferred(pool: PoolRevision, call: &Deferred) -> Self {
        match call {
            Deferred::Record(consumption) => Self::record(pool, consumption),
            Deferred::Release { random, api_key } => Self::release(*random, api_key.as_ref()),
        }
    }

    /// What a wish's request id is remembered by.
    pub(super) fn request_of(wish: &HoldRequest) -> Option<CallId> {
        let request = Some(wish.request_id.as_str()).filter(|id| !id.is_empty());
        request.map(|id| CallId::of_request_id(&wish.connection, id))
    }

    pub(super) fn reservation(pool: PoolRevision, consumption: &Consumption, settles: Settlement) -> Self {
        Self::new("reservation", 4)
            .with(&consumption.api_key)
            .with_bytes(Some(&packed(consumption.fingerprint)))
            .with_bytes(Some(&settles.call.0))
            .with_bytes(own(pool, settles.id).as_ref().map(|random| &random[..]))
    }

    pub(super) fn report(connection: &ConnectionId, seen: &[Observation]) -> Self {
        Self::new("report", 2).with(connection).with(&seen)
    }

    pub(super) fn reset(api_key: Option<&ApiKeyId>, dimension: Option<DimensionKey>) -> Self {
        Self::new("reset", 2).with(&api_key).with(&dimension)
    }

    pub(super) fn remove() -> Self {
        Self::new("remove", 0)
    }
}

/// Twelve bytes, of which the first four are of the key alone: a script knows no whole numbers of 64 bits.
fn packed(fingerprint: Fingerprint) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&fingerprint.key.to_le_bytes());
    bytes[4..].copy_from_slice(&fingerprint.call.to_le_bytes());
    bytes
}

/// The name of a reservation in `pool`; none of another pool's.
fn own(pool: PoolRevision, id: Option<ReservationId>) -> Option<[u8; 12]> {
    id.filter(|id| id.pool == pool).map(|id| id.random)
}

fn write_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    // Names are short, and writing to memory does not fail.
    let _ = encode::write_str_len(to, bytes.len() as u32);
    to.extend(bytes);
}

/// `{sender, sequence, calls, previous}`: the sender's batch `previous` must have been applied before.
pub(super) fn batch<'a>(
    name: BatchName,
    previous: u64,
    calls: impl ExactSizeIterator<Item = &'a Call>,
) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1_024);
    // Writing to memory does not fail.
    let _ = encode::write_array_len(&mut bytes, 4);
    write_bytes(&mut bytes, &name.sender);
    let _ = encode::write_uint(&mut bytes, name.sequence);
    let _ = encode::write_array_len(&mut bytes, calls.len() as u32);
    calls.for_each(|call| bytes.extend(&call.bytes));
    let _ = encode::write_uint(&mut bytes, previous);
    bytes
}

/// Why a call has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Refused {
    RequestId,
    IdempotencyKey,
    Settled,
    ForeignKey,
    /// It came after its deadline.
    Late,
}

impl Refused {
    pub(super) fn contradiction(self) -> Option<Contradiction> {
        match self {
            Refused::RequestId => Some(Contradiction::RequestId),
            Refused::IdempotencyKey => Some(Contradiction::IdempotencyKey),
            Refused::Settled => Some(Contradiction::Settled),
            Refused::ForeignKey => Some(Contradiction::ForeignKey),
            Refused::Late => None,
        }
    }
}

/// What an enforcement read, and what it holds: name, deadline, whether an earlier call made it.
pub(super) type EnforceAnswer = (Reading, Option<(Random, Timestamp, bool)>);

/// What comes with every batch.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Header {
    /// Redis' clock.
    pub(super) clock: Timestamp,
    /// When the pool's counters were begun.
    pub(super) born: Timestamp,
    /// Until when they are kept if nothing more happens.
    pub(super) expires_at: Timestamp,
    /// The batch had been applied before.
    pub(super) repeated: bool,
    /// There should have been counters, and there were none.
    pub(super) vanished: bool,
    /// The clock went back so far that it was believed.
    pub(super) stepped_back: bool,
    pub(super) open_reservations: u64,
    pub(super) remembered_ids: u64,
    pub(super) settled: u64,
    pub(super) released: u64,
    pub(super) expired: u64,
}

/// What Redis keeps of a pool as a whole.
#[derive(Debug, Deserialize)]
pub(super) struct State {
    pub(super) now: Timestamp,
    pub(super) born: Timestamp,
    dimensions: Vec<Dimension>,
    /// The first deadline of an open reservation; 0: none is open.
    pub(super) next_deadline: Timestamp,
    _next_window_end: Timestamp,
    accounts_made: u32,
    _generations: IgnoredAny,
    pub(super) open_reservations: u64,
    _expires_at: Timestamp,
    _lives_until: Timestamp,
    _compact_at: Timestamp,
}

#[derive(Debug, Deserialize)]
struct Dimension {
    unit: Unit,
    window: Window,
    total: Counter,
    cumulative: u64,
    rate: Option<f64>,
    sampled_at: Option<Timestamp>,
    sampled: Option<u64>,
}

/// What Redis keeps of a key.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Key {
    counters: Vec<Counter>,
    models: Vec<(Model, Unit, Window, Counter)>,
    shares: Vec<(u32, u64, SlidingCounter, IgnoredAny)>,
}

impl State {
    /// Something was ever known of an account.
    pub(super) fn has_accounts(&self) -> bool {
        self.accounts_made > 0
    }

    /// The dimensions, with the samples that `samples_of` gives for each.
    pub(super) fn dimensions(
        &self,
        samples_of: impl Fn(DimensionKey) -> Vec<Sample>,
    ) -> impl Iterator<Item = DimensionPart> {
        self.dimensions.iter().map(move |of| {
            let key = DimensionKey { unit: of.unit, window: of.window };
            let last = of.sampled_at.zip(of.sampled).map(|(at, cumulative)| Sample { at, cumulative });
            let rate = BurnRate { steps_per_second: of.rate, last };
            DimensionPart { key, total: of.total, sampler: Sampler::of(rate, of.cumulative, samples_of(key)) }
        })
    }
}

impl Key {
    /// What it has on the account of this number.
    pub(super) fn share(&self, number: u32) -> Option<Share> {
        let (_, part, slid, _) = self.shares.iter().find(|share| share.0 == number)?;
        let mut own = Share::of(*part);
        own.slid = *slid;
        Some(own)
    }

    pub(super) fn into_part(self, key: ApiKeyId) -> KeyPart {
        let models = self.models.into_iter().map(|(model, unit, window, counter)| {
            (ModelCapKey { model, dimension: DimensionKey { unit, window } }, counter)
        });
        KeyPart { key, dimensions: self.counters, models: models.collect() }
    }
}

/// What Redis keeps of an account: its number, and what is known of it as a whole.
pub(super) type StoredAccount = (u32, Head);

/// Samples of a dimension, the oldest first.
pub(super) type Samples = Vec<Sample>;
