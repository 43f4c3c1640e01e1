//! May this key use this connection now?

use std::sync::Arc;

use arc_swap::Guard;

use super::{
    LOOKS_MAX, Service, explain, is_gone,
    local_shares::{Effects, Local},
};
use crate::{
    core::{
        admission::{Reading, Reserved, Verdict},
        charge::Charge,
        directory::PoolEntry,
        ids::{ApiKeyId, ConnectionId, Fingerprint, Model},
        ledger::HoldRequest,
        pool::Enforcement,
        units::Cost,
    },
    store::LedgerError,
};

/// The question.
#[derive(Clone, Debug)]
pub struct EnforceCall {
    /// Who asks.
    pub api_key: ApiKeyId,
    /// Which connection is to serve the request.
    pub connection: ConnectionId,
    /// For which model.
    pub model: Option<Model>,
    /// What the request is expected to cost.
    pub estimate: Cost,
    /// Hold the estimate; `None`: check only.
    pub reserve: Option<Reserve>,
}

/// How to hold an estimate.
#[derive(Clone, Debug)]
pub struct Reserve {
    /// How long, in ms: 1 to an hour.
    pub for_ms: u64,
    /// The caller's name for the attempt; may be empty.
    pub request_id: String,
}

/// The answer.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Revision of the configuration that was used.
    pub config_revision: u64,
    /// What the score of a deprioritised candidate is multiplied by.
    pub soft_factor: f64,
    /// What was found for the call.
    pub found: Found,
}

/// Who answers.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "one lives at a time, and the large one is the usual one")]
pub enum Found {
    /// No pool lists both key and connection, so there is nothing to enforce.
    NoPool,
    /// The pool, by its counters.
    Decided(Decided),
    /// The pool, without its counters.
    Degraded(Degraded),
}

/// The answer of a pool.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The pool.
    pub entry: Arc<PoolEntry>,
    /// What was asked of its counters.
    pub charge: Charge,
    /// What they held before this request.
    pub reading: Reading,
    /// What the rule says, whether or not it binds.
    pub verdict: Verdict,
    /// What was held.
    pub reserved: Option<Reserved>,
    /// One sentence for the router's client; empty unless blocked or deprioritised.
    pub message: String,
}

impl Decided {
    /// The verdict blocks, and the pool means it. A reservation that was made before stands.
    pub fn is_blocked(&self) -> bool {
        self.verdict.block().is_some() && !self.charge.shadow && !self.is_repeated()
    }

    /// An earlier call with the same request id was allowed.
    pub fn is_repeated(&self) -> bool {
        self.reserved.is_some_and(|reserved| reserved.repeated)
    }
}

/// The answer of a pool whose shared counters could not be reached in time: that of its failure mode.
#[derive(Clone, Debug)]
pub struct Degraded {
    /// The pool.
    pub entry: Arc<PoolEntry>,
    /// One sentence, if the failure mode blocks, whether or not that binds.
    pub refusal: Option<String>,
    /// One sentence for the router's client about what is answered.
    pub message: String,
}

impl Degraded {
    /// No reading of counters tells what an exempt key may do, so it does not wait for one either.
    fn new(entry: &Arc<PoolEntry>, charge: &Charge, local: impl FnOnce() -> Local) -> Self {
        let refusal = explain::refusal_by_failure_mode(&entry.pool, charge, local);
        let message = match &refusal {
            Some(refusal) if !charge.shadow => refusal.clone(),
            _ => explain::allowed_unread(&entry.pool, charge),
        };
        Self { entry: Arc::clone(entry), refusal, message }
    }

    /// The failure mode blocks, and the pool means it.
    pub fn is_blocked(&self) -> bool {
        self.refusal.is_some() && !self.is_shadow()
    }

    /// The pool allows everything and shows what it would have decided.
    pub fn is_shadow(&self) -> bool {
        self.entry.pool.enforcement == Enforcement::Shadow
    }
}

impl Service {
    /// Decides, and holds the estimate if that is asked for and the answer is to allow.
    pub async fn enforce(&self, call: EnforceCall) -> Result<Decision, LedgerError> {
        let mut looks = 1;
        loop {
            let revision = self.directory().revision();
            let decision = self.decide(&call, Effects::Wanted).await;
            if !is_gone(&decision) || looks == LOOKS_MAX {
                if let Ok(decision) = &decision {
                    self.count(&call, decision);
                }
                return decision;
            }
            self.follow_past(revision).await;
            looks += 1;
        }
    }

    fn count(&self, call: &EnforceCall, decision: &Decision) {
        match &decision.found {
            Found::Decided(decided) => self.0.counts.decided(decided),
            Found::Degraded(degraded) => self.0.counts.degraded(degraded, self.0.clock.now()),
            Found::NoPool => self.count_no_pool(&call.connection),
        }
    }

    /// What [`enforce`](Service::enforce) would answer, without any effect.
    pub async fn preview(&self, call: EnforceCall) -> Result<Decision, LedgerError> {
        self.decide(&EnforceCall { reserve: None, ..call }, Effects::None).await
    }

    async fn decide(&self, call: &EnforceCall, effects: Effects) -> Result<Decision, LedgerError> {
        let (directory, ledger) = match call.reserve {
            None => (self.0.directory.load(), self.ledger_now()),
            // A hold waits for the disk, and a thread has few guards that cost nothing.
            Some(_) => (Guard::from_inner(self.0.directory.load_full()), Guard::from_inner(self.ledger())),
        };
        if !self.decides() {
            return Err(LedgerError::NoConfiguration);
        }
        let config_revision = directory.revision();
        let Some((entry, allocation)) = directory.find(&call.api_key, &call.connection) else {
            return Ok(Decision { config_revision, soft_factor: 1.0, found: Found::NoPool });
        };
        let settings = self.settings_at(&directory);
        let charge = Charge::new(
            entry,
            allocation,
            &call.connection,
            call.model.as_ref(),
            &call.estimate,
            settings.saturation_threshold,
        );
        let answer = match &call.reserve {
            None => ledger.check(&charge).await.map(|reading| (reading, None)),
            Some(reserve) => {
                let enforced = ledger.enforce(&charge, hold_request(call, reserve)).await;
                enforced.map(|enforced| (enforced.reading, enforced.reserved))
            }
        };
        let found = match answer {
            Ok((reading, reserved)) => {
                self.0.local_shares.heard(entry, &charge, &reading, reserved, &***ledger);
                let verdict = Verdict::of(&charge, &reading);
                let message = explain::message(&entry.pool, &charge, &reading, &verdict);
                let entry = Arc::clone(entry);
                Found::Decided(Decided { entry, charge, reading, verdict, reserved, message })
            }
            Err(LedgerError::Unreachable(_)) => {
                let local = || self.0.local_shares.decide(&charge, &***ledger, effects);
                Found::Degraded(Degraded::new(entry, &charge, local))
            }
            Err(error) => return Err(error),
        };
        Ok(Decision { config_revision, soft_factor: settings.soft_deprioritize_factor, found })
    }
}

fn hold_request(call: &EnforceCall, reserve: &Reserve) -> HoldRequest {
    let model = call.model.as_ref().map_or("", Model::as_str);
    HoldRequest {
        random: rand::random(),
        connection: call.connection.clone(),
        model: call.model.clone(),
        reserve_for_ms: reserve.for_ms,
        request_id: reserve.request_id.clone(),
        fingerprint: Fingerprint::of(&call.api_key, model, &call.estimate),
    }
}
