//! The plan of each connection.

use tonic::{Request, Response, Status};

use super::{
    answers::plan,
    author::author,
    convert::{plan_spec, revision},
    page::Page,
    pb::{self, plan_admin_server::PlanAdmin},
    status::{invalid, of_admin},
};
use crate::{
    core::{
        catalog,
        directory::PlanInForce,
        ids::{ConnectionId, Faults},
        plan::check_provider,
    },
    service::Service,
};

#[derive(Debug)]
pub(super) struct Api(pub(super) Service);

#[tonic::async_trait]
impl PlanAdmin for Api {
    async fn get_plan(
        &self,
        request: Request<pb::GetPlanRequest>,
    ) -> Result<Response<pb::GetPlanResponse>, Status> {
        let pb::GetPlanRequest { connection_id, provider } = request.into_inner();
        let mut faults = Faults::default();
        let connection = faults.take(ConnectionId::parse("connection_id", &connection_id));
        faults.take(check_provider("provider", &provider));
        let Some(connection) = connection.filter(|_| faults.is_empty()) else {
            return Err(invalid(faults.into_vec()));
        };
        let in_force = self.0.directory().plan_in_force(&connection, &provider);
        Ok(Response::new(pb::GetPlanResponse { plan: Some(plan(&in_force)) }))
    }

    async fn list_plans(
        &self,
        request: Request<pb::ListPlansRequest>,
    ) -> Result<Response<pb::ListPlansResponse>, Status> {
        let pb::ListPlansRequest { page_size, page_token } = request.into_inner();
        let mut faults = Faults::default();
        let page = Page::read(page_size, &page_token, &["plans"], &mut faults);
        let after = page.after_text(&mut faults);
        if !faults.is_empty() {
            return Err(invalid(faults.into_vec()));
        }
        let directory = self.0.directory();
        let mut entries = directory.plans_after(after.as_deref());
        let shown: Vec<_> = entries.by_ref().take(page.size).collect();
        let next = entries.next().and(shown.last());
        let next = next.map(|last| page.token_after(last.plan.connection.as_str().as_bytes()));
        let plans = shown.into_iter().map(|entry| plan(&PlanInForce::from(&**entry))).collect();
        Ok(Response::new(pb::ListPlansResponse { plans, next_page_token: next.unwrap_or_default() }))
    }

    async fn put_plan(
        &self,
        request: Request<pb::PutPlanRequest>,
    ) -> Result<Response<pb::PutPlanResponse>, Status> {
        let author = author(&request);
        let (spec, revision) = plan_spec(request.into_inner().plan).map_err(invalid)?;
        let (stored, warnings) = self.0.put_plan(author, spec, revision).await.map_err(of_admin)?;
        Ok(Response::new(pb::PutPlanResponse { plan: Some(plan(&stored)), warnings }))
    }

    async fn delete_plan(
        &self,
        request: Request<pb::DeletePlanRequest>,
    ) -> Result<Response<pb::DeletePlanResponse>, Status> {
        let author = author(&request);
        let request = request.into_inner();
        let mut faults = Faults::default();
        let connection = faults.take(ConnectionId::parse("connection_id", &request.connection_id));
        let revision = faults.take(revision("revision", request.revision));
        let (Some(connection), Some(revision)) = (connection, revision) else {
            return Err(invalid(faults.into_vec()));
        };
        let in_force = self.0.delete_plan(author, connection, revision).await.map_err(of_admin)?;
        Ok(Response::new(pb::DeletePlanResponse { plan: Some(plan(&in_force)) }))
    }

    async fn list_catalog(
        &self,
        _: Request<pb::ListCatalogRequest>,
    ) -> Result<Response<pb::ListCatalogResponse>, Status> {
        let entries = catalog::entries()
            .map(|(provider, dimensions)| plan(&PlanInForce::of_catalog(provider, dimensions)));
        Ok(Response::new(pb::ListCatalogResponse { plans: entries.collect() }))
    }
}
