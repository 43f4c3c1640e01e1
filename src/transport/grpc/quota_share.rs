//! The decision plane: what a router calls around every upstream request.

use tonic::{Request, Response, Status};

use super::{
    answers::{decision, signals},
    convert::{self, enforce, record},
    convert_signals,
    observe::record_decision,
    pb::{self, quota_share_server::QuotaShare},
    status::{invalid, of_admin, of_ledger, of_record},
};
use crate::{service::Service, store::Kept};

#[derive(Debug)]
pub(super) struct Api(pub(super) Service);

#[tonic::async_trait]
impl QuotaShare for Api {
    async fn enforce(
        &self,
        request: Request<pb::EnforceRequest>,
    ) -> Result<Response<pb::EnforceResponse>, Status> {
        let call = enforce("", request.into_inner()).map_err(invalid)?;
        let answer = self.0.enforce(call).await.map_err(of_ledger)?;
        let response = decision(answer);
        record_decision(&response);
        Ok(Response::new(response))
    }

    async fn record_consumption(
        &self,
        request: Request<pb::RecordConsumptionRequest>,
    ) -> Result<Response<pb::RecordConsumptionResponse>, Status> {
        let call = record(request.into_inner()).map_err(invalid)?;
        let outcome = self.0.record(call).await.map_err(of_record)?;
        Ok(Response::new(pb::RecordConsumptionResponse {
            duplicate: outcome.duplicate,
            reservation_expired: outcome.reservation_expired,
            journaled: outcome.journaled,
            pool_id: outcome.pool.map(|pool| pool.to_string()).unwrap_or_default(),
        }))
    }

    async fn release_reservation(
        &self,
        request: Request<pb::ReleaseReservationRequest>,
    ) -> Result<Response<pb::ReleaseReservationResponse>, Status> {
        let (reservation_id, api_key) = convert::release(request.into_inner()).map_err(invalid)?;
        let released = self.0.release(&reservation_id, api_key.as_ref()).await.map_err(of_ledger)?;
        Ok(Response::new(match released {
            Kept::Done(released) => pb::ReleaseReservationResponse { released, journaled: false },
            Kept::Journaled => pb::ReleaseReservationResponse { released: false, journaled: true },
        }))
    }

    async fn report_signals(
        &self,
        request: Request<pb::ReportSignalsRequest>,
    ) -> Result<Response<pb::ReportSignalsResponse>, Status> {
        let call = convert_signals::report(request.into_inner()).map_err(invalid)?;
        let outcome = self.0.report_signals(&call).await.map_err(of_admin)?;
        Ok(Response::new(signals(outcome)))
    }
}
