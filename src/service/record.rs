//! What a request cost, and what becomes of its reservation.

use super::{LOOKS_MAX, ResponseHeaders, Service, is_gone, switch::InUse};
use crate::{
    core::{
        charge::counts,
        directory::{Directory, PoolEntry},
        ids::{ApiKeyId, CallId, ConnectionId, Fingerprint, Model, PoolId, ReservationId},
        ledger::{Consumption, ReservationState, Settlement},
        units::Cost,
    },
    store::{Kept, LedgerError},
};

/// What is reported.
#[derive(Clone, Debug)]
pub struct RecordCall {
    /// Whose request it was.
    pub api_key: ApiKeyId,
    /// Which connection served it.
    pub connection: ConnectionId,
    /// Which model.
    pub model: Option<Model>,
    /// What it cost.
    pub cost: Cost,
    /// The reservation to settle, as the caller wrote it; may be empty.
    pub reservation_id: String,
    /// The caller's name for the attempt; may be empty.
    pub idempotency_key: String,
    /// What the provider's response said.
    pub headers: ResponseHeaders,
}

/// What became of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordOutcome {
    /// The cost was counted by an earlier call.
    pub duplicate: bool,
    /// The reservation had expired or was unknown; the cost was counted all the same.
    pub reservation_expired: bool,
    /// The journal has it: it is counted when the shared counters are back.
    pub journaled: bool,
    /// Where it was counted; `None`: nowhere.
    pub pool: Option<PoolId>,
}

impl Service {
    /// Counts a cost once, and settles its reservation.
    pub async fn record(&self, call: RecordCall) -> Result<RecordOutcome, LedgerError> {
        let mut looks = 1;
        loop {
            let directory = self.0.directory.load_full();
            let outcome = self.record_in(&directory, &call).await;
            if !is_gone(&outcome) || looks == LOOKS_MAX {
                return outcome;
            }
            self.follow_past(directory.revision()).await;
            looks += 1;
        }
    }

    /// Gives a reservation back without any cost; false if it is not open.
    pub async fn release(
        &self,
        reservation_id: &str,
        api_key: Option<&ApiKeyId>,
    ) -> Result<Kept<bool>, LedgerError> {
        match ReservationId::parse(reservation_id) {
            Some(_) if !self.decides() => Err(LedgerError::NoConfiguration),
            Some(id) => self.ledger().release(id, api_key).await,
            None => Ok(Kept::Done(false)),
        }
    }

    async fn record_in(
        &self,
        directory: &Directory,
        call: &RecordCall,
    ) -> Result<RecordOutcome, LedgerError> {
        if !self.decides() {
            return Err(LedgerError::NoConfiguration);
        }
        let ledger = self.ledger();
        let consumption = self.consumption(call);
        // The pool whose ledger holds the reservation, if that is not simply the pool to count in.
        let settles = consumption.reservation;
        let holder = settles.and_then(|settles| directory.pool_of_life(settles.id?.pool));
        let target = directory.find(&call.api_key, &call.connection).map(|(entry, _)| entry);
        if let Some(entry) = target {
            self.matched(entry);
        }
        match (target, holder, settles) {
            (Some(target), Some(holder), Some(settles))
                if holder.history.created_revision != target.history.created_revision =>
            {
                self.record_across(&ledger, [target, holder], call, consumption, settles).await
            }
            (Some(target), _, _) => self.count_in(&ledger, target, call, consumption).await,
            // The key or the connection has left since; the id says where the request was let in.
            (None, Some(holder), _) => self.count_in(&ledger, holder, call, consumption).await,
            (None, None, _) => Ok(RecordOutcome::default()),
        }
    }

    /// The connection has moved to another pool since the reservation was made: the cost is counted there, then the
    /// hold is given back where it is. Should this replica die between the two, the deadline repairs it.
    async fn record_across(
        &self,
        ledger: &InUse,
        [target, holder]: [&PoolEntry; 2],
        call: &RecordCall,
        consumption: Consumption,
        settles: Settlement,
    ) -> Result<RecordOutcome, LedgerError> {
        let life = holder.history.created_revision;
        let state = match ledger.reservation(life, &consumption, settles).await {
            Err(LedgerError::PoolRemoved) => ReservationState::Unknown,
            // It was made here, and most that are settled are open.
            Err(LedgerError::Unreachable(_)) => ReservationState::Open,
            state => state?,
        };
        match state {
            ReservationState::Settled => self.count_in(ledger, holder, call, consumption).await,
            ReservationState::Unknown => self.count_in(ledger, target, call, consumption).await,
            ReservationState::Open => {
                let reservation = Some(Settlement { held_elsewhere: true, ..settles });
                let there = Consumption { reservation, ..consumption.clone() };
                let outcome = self.count_in(ledger, target, call, there).await?;
                let nothing = Consumption { idempotency: None, ..consumption };
                match ledger.record(life, &nothing).await {
                    Err(LedgerError::PoolRemoved) => Ok(outcome),
                    given_back => given_back.map(|_| outcome),
                }
            }
        }
    }

    async fn count_in(
        &self,
        ledger: &InUse,
        entry: &PoolEntry,
        call: &RecordCall,
        consumption: Consumption,
    ) -> Result<RecordOutcome, LedgerError> {
        let allocation = entry.pool.allocation(call.api_key.as_str());
        let counts = counts(entry, allocation, call.model.as_ref(), &call.cost);
        let connection =
            Some(&call.connection).filter(|connection| entry.pool.connections.contains(connection));
        let (observations, unreadable) = match connection {
            Some(_) => self.observations(ledger, entry, &call.headers),
            None => (Vec::new(), 0),
        };
        let figures = observations.len();
        let connection = connection.cloned();
        let consumption = Consumption { counts, connection, observations, ..consumption };
        let life = entry.history.created_revision;
        let pool = Some(entry.pool.id.clone());
        let Kept::Done(recorded) = ledger.record(life, &consumption).await? else {
            self.0.local_shares.recorded(life, &call.api_key, &consumption.counts, &**ledger);
            return Ok(RecordOutcome { journaled: true, pool, ..RecordOutcome::default() });
        };
        if figures + unreadable > 0 {
            self.0.counts.signals(figures - recorded.unread, unreadable + recorded.unread);
        }
        Ok(RecordOutcome {
            duplicate: recorded.duplicate,
            reservation_expired: recorded.reservation_expired,
            journaled: false,
            pool,
        })
    }

    /// What `call` says, before it is known which counters it means.
    fn consumption(&self, call: &RecordCall) -> Consumption {
        let named = |text: &str| !text.is_empty();
        let reservation = named(&call.reservation_id).then(|| Settlement {
            call: CallId::of_reservation_id(&call.reservation_id),
            id: ReservationId::parse(&call.reservation_id),
            held_elsewhere: false,
        });
        let idempotency = named(&call.idempotency_key)
            .then(|| CallId::of_idempotency_key(&call.connection, &call.idempotency_key));
        let model = call.model.as_ref().map_or("", Model::as_str);
        Consumption {
            api_key: call.api_key.clone(),
            connection: None,
            cost: call.cost,
            observations: Vec::new(),
            counts: Default::default(),
            reservation,
            idempotency,
            fingerprint: Fingerprint::of(&call.api_key, model, &call.cost),
            id_life_ms: self.0.start.id_life_ms,
            recorded_at: None,
        }
    }
}
