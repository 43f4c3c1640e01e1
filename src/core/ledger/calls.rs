//! What a ledger is asked, what it answers, and the effects that it has.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::core::{
    account::{AccountChange, Observation},
    admission::{Counters, Reading, Reserved},
    burn_rate::{BurnRate, Sample},
    charge::{CounterKey, PerCheck},
    ids::{ApiKeyId, CallId, ConnectionId, Fingerprint, Model, ReservationId},
    memory::{RecordMemory, RequestMemory},
    plan::DimensionKey,
    units::{Amount, Cost, Timestamp, Unit},
};

/// The longest life of a reservation.
pub const RESERVE_MS_MAX: u64 = 3_600_000;
/// The longest that an id is remembered past its call or its reservation's deadline.
pub const ID_LIFE_MS_MAX: u64 = 86_400_000;
/// A clock that steps back by more than this is believed; until then time stands still.
pub const CLOCK_STEP_MS: u64 = 3_600_000;

/// What a request in flight holds. Settling and releasing undo exactly this, whatever the pool is by then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hold {
    /// Who holds it.
    pub api_key: ApiKeyId,
    /// Which connection was to serve the request.
    pub connection: ConnectionId,
    /// For which model, if one was named.
    pub model: Option<Model>,
    /// The caller's name for the attempt; may be empty.
    pub request_id: String,
    /// When it stops counting.
    pub deadline: Timestamp,
    /// What is held on each counter, in steps; above 0.
    pub amounts: SmallVec<[(CounterKey, u64); 2]>,
}

impl Hold {
    /// What is held in each unit.
    pub fn cost(&self) -> Cost {
        let of = |unit: Unit| {
            let steps =
                self.amounts.iter().filter(|(key, _)| key.dimension.unit == unit).map(|(_, steps)| *steps);
            Amount::saturating(steps.max().unwrap_or(0))
        };
        Cost {
            requests: of(Unit::Requests),
            tokens: of(Unit::Tokens),
            usd: of(Unit::Usd),
            percent: of(Unit::Percent),
        }
    }

    pub(super) fn on(&self, counter: &CounterKey) -> u64 {
        self.amounts.iter().find(|(key, _)| key == counter).map_or(0, |(_, steps)| *steps)
    }
}

/// A wish to hold what a charge would use.
#[derive(Clone, Debug)]
pub struct HoldRequest {
    /// Drawn at random by the caller: the reservation's name in its pool.
    pub random: [u8; 12],
    /// Which connection is to serve the request.
    pub connection: ConnectionId,
    /// For which model.
    pub model: Option<Model>,
    /// How long, in ms: 1 to [`RESERVE_MS_MAX`].
    pub reserve_for_ms: u64,
    /// The caller's name for the attempt; may be empty.
    pub request_id: String,
    /// What a repeated call must agree with.
    pub fingerprint: Fingerprint,
}

/// What a decision read and what it held.
#[derive(Clone, Debug, PartialEq)]
pub struct Enforced {
    /// Before this request.
    pub reading: Reading,
    /// What was held, or found by its request id.
    pub reserved: Option<Reserved>,
}

/// A cost to count, once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Consumption {
    /// Whose.
    pub api_key: ApiKeyId,
    /// Which connection served the request, if the pool has it.
    pub connection: Option<ConnectionId>,
    /// What it cost.
    pub cost: Cost,
    /// What the provider said of the connection's account in its response.
    pub observations: Vec<Observation>,
    /// Which counters, and how much of each.
    pub counts: PerCheck<(CounterKey, Amount)>,
    /// The reservation that it settles.
    pub reservation: Option<Settlement>,
    /// The caller's name for the attempt.
    pub idempotency: Option<CallId>,
    /// What a repeated call must agree with.
    pub fingerprint: Fingerprint,
    /// How long ids are remembered, in ms.
    pub id_life_ms: u64,
    /// When it was recorded, if that was before it comes to the ledger: it counts in the bucket of that time, and not at
    /// all where that has aged out or lies before the window of a provider began.
    pub recorded_at: Option<Timestamp>,
}

/// Which reservation a cost settles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settlement {
    /// What is remembered of it.
    pub call: CallId,
    /// Its name, if it is one of ours.
    pub id: Option<ReservationId>,
    /// It is open in the ledger of another pool, which gives it back afterwards.
    pub held_elsewhere: bool,
}

/// How a cost was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Recorded {
    /// It was counted by an earlier call.
    pub duplicate: bool,
    /// Its reservation had expired or was unknown.
    pub reservation_expired: bool,
    /// Figures that came with it and were not taken.
    pub unread: usize,
}

/// A call that contradicts an earlier one. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Contradiction {
    /// The request id made a reservation for another key, model or estimate.
    #[error("request_id was used before with another key, model or estimate")]
    RequestId,
    /// The idempotency key counted another cost.
    #[error("idempotency_key was used before with another key, model or cost")]
    IdempotencyKey,
    /// The reservation was settled with another cost.
    #[error("reservation_id was settled before with another model or cost")]
    Settled,
    /// The reservation is another key's.
    #[error("reservation_id belongs to another key")]
    ForeignKey,
}

/// What is known of a reservation id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum ReservationState {
    /// It holds.
    Open,
    /// Its cost was counted.
    Settled,
    /// Neither: it never was, has expired or was released.
    Unknown,
}

/// One effect on a ledger. Effects are made durable in their order, or reverted newest first.
///
/// Stores keep them as they are serialized: what is added comes last, and what changes is another format.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Change {
    /// What is recorded in a bucket differs by `delta` steps.
    Consumed {
        /// Whose.
        api_key: ApiKeyId,
        /// On which counter.
        counter: CounterKey,
        /// In which bucket.
        bucket: u64,
        /// By how much.
        delta: i64,
    },
    /// A reservation was made.
    Held([u8; 12], Arc<Hold>),
    /// A reservation was settled, released or has expired.
    Freed([u8; 12], Arc<Hold>),
    /// A sample was taken of a dimension's consumption.
    Sampled {
        /// Of which dimension.
        dimension: DimensionKey,
        /// The rate before. For undoing, and not kept.
        #[serde(skip)]
        before: BurnRate,
        /// The rate after.
        after: BurnRate,
    },
    /// A counted call is remembered.
    Record(CallId, RecordMemory),
    /// A request id is remembered.
    Request(CallId, RequestMemory),
    /// What is known of an account differs.
    Account(Box<AccountChange>),
}

/// What usage shows: for each asked dimension, recorded and held, in steps.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageReading {
    /// When it was read, by the ledger's clock.
    pub at: Timestamp,
    /// Of the pool, by dimension.
    pub totals: PerCheck<Counters>,
    /// What providers have said, by dimension and in the order of the pool's connections.
    pub accounts: PerCheck<Vec<AccountUsage>>,
    /// Of the pool, by dimension: how fast it is consumed.
    pub rates: PerCheck<BurnRate>,
    /// Of the pool, by dimension: the samples since the process started, the oldest first; empty unless asked for.
    pub samples: PerCheck<Vec<Sample>>,
    /// Of each key with something in any of the dimensions.
    pub keys: BTreeMap<ApiKeyId, PerCheck<(f64, f64)>>,
    /// How many reservations are open.
    pub open_reservations: usize,
    /// The first deadline among them.
    pub oldest_deadline: Option<Timestamp>,
}

/// What usage shows of one account.
#[derive(Clone, Debug, PartialEq)]
pub struct AccountUsage {
    /// Whose account.
    pub connection: ConnectionId,
    /// The used fraction of its limit, by the provider.
    pub fraction: f64,
    /// When the figure ends, if the provider has said so.
    pub ends_at: Option<Timestamp>,
    /// When it was true.
    pub observed_at: Timestamp,
    /// It is believed now.
    pub fresh: bool,
    /// PERCENT: what nobody here explains, in steps.
    pub external: u64,
    /// What the keys have used of it: attributed, or counted in the provider's window.
    pub parts: u64,
}

/// How much a ledger keeps, and what has ended in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Reservations that hold something.
    pub open_reservations: u64,
    /// Ids that are remembered.
    pub remembered_ids: u64,
    /// Reservations that have ended since the ledger was made.
    pub ended: Ended,
}

/// Reservations that have ended, by how. One whose end could not be made durable and was reverted is counted all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Their cost was counted.
    pub settled: u64,
    /// They were given back.
    pub released: u64,
    /// Their deadline came.
    pub expired: u64,
}
