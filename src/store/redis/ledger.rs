//! The counters of all pools in Redis.

use std::sync::Arc;

use async_trait::async_trait;

use super::RedisOptions;
use crate::{
    core::{
        account::{Observation, Unread},
        admission::{Counters, Reading},
        charge::{Charge, PerCheck},
        ids::{ApiKeyId, ConnectionId, PoolRevision, ReservationId},
        ledger::{
            Consumption, Enforced, Hold, HoldRequest, Recorded, ReservationState, Settlement, UsageReading,
        },
        plan::DimensionKey,
        units::Timestamp,
    },
    store::{Condition, Ledger, LedgerError, ReservationPlace, StoreError},
};

/// Counters of all pools in Redis.
#[derive(Debug)]
pub struct RedisLedger {
    options: RedisOptions,
}

impl RedisLedger {
    /// Starts to connect; calls are answered with [`LedgerError::Unreachable`] until that has succeeded. Call within the
    /// Tokio runtime that lasts as long.
    pub async fn start(options: RedisOptions) -> Result<Self, StoreError> {
        Ok(Self { options })
    }

    fn missing<T>(&self) -> Result<T, LedgerError> {
        let source = Arc::new(std::io::Error::other("not built yet"));
        Err(LedgerError::Unreachable(StoreError::Unavailable { store: "Redis", doing: "anything", source }))
    }
}

#[async_trait]
impl Ledger for RedisLedger {
    async fn check(&self, _: &Charge) -> Result<Reading, LedgerError> {
        self.missing()
    }

    async fn enforce(&self, _: &Charge, _: HoldRequest) -> Result<Enforced, LedgerError> {
        self.missing()
    }

    async fn record(&self, _: PoolRevision, _: &Consumption) -> Result<Recorded, LedgerError> {
        self.missing()
    }

    async fn release(&self, _: ReservationId, _: Option<&ApiKeyId>) -> Result<bool, LedgerError> {
        self.missing()
    }

    async fn reservation(
        &self,
        _: PoolRevision,
        _: &Consumption,
        _: Settlement,
    ) -> Result<ReservationState, LedgerError> {
        self.missing()
    }

    async fn report(
        &self,
        _: PoolRevision,
        _: &ConnectionId,
        _: &[Observation],
    ) -> Result<Vec<Result<(), Unread>>, LedgerError> {
        self.missing()
    }

    async fn usage(
        &self,
        _: PoolRevision,
        _: &[DimensionKey],
        _: &[ConnectionId],
        _: bool,
    ) -> Result<UsageReading, LedgerError> {
        self.missing()
    }

    async fn totals(
        &self,
        _: PoolRevision,
        _: &[DimensionKey],
        _: &[ConnectionId],
    ) -> Result<(Timestamp, PerCheck<Counters>), LedgerError> {
        self.missing()
    }

    async fn reservations(
        &self,
        _: PoolRevision,
        _: Option<ReservationPlace>,
        _: Option<&ApiKeyId>,
        _: usize,
    ) -> Result<Vec<(ReservationId, Arc<Hold>)>, LedgerError> {
        self.missing()
    }

    async fn reset(
        &self,
        _: PoolRevision,
        _: Option<&ApiKeyId>,
        _: Option<DimensionKey>,
    ) -> Result<(), LedgerError> {
        self.missing()
    }

    async fn remove(&self, _: PoolRevision) -> Result<(), LedgerError> {
        self.missing()
    }

    fn condition(&self) -> Condition {
        Condition::default()
    }

    fn now(&self) -> Timestamp {
        self.options.clock.now()
    }

    async fn close(&self) {}
}
