//! Settings that are stored, and how this replica is.

use tonic::{Request, Response, Status};

use super::{
    answers,
    author::author,
    convert::settings_update,
    pb::{self, settings_admin_server::SettingsAdmin},
    status::{invalid, of_admin},
};
use crate::service::Service;

#[derive(Debug)]
pub(super) struct Api(pub(super) Service);

#[tonic::async_trait]
impl SettingsAdmin for Api {
    async fn get_settings(
        &self,
        _: Request<pb::GetSettingsRequest>,
    ) -> Result<Response<pb::GetSettingsResponse>, Status> {
        let (stored, effective) = answers::settings(&self.0.settings_view());
        Ok(Response::new(pb::GetSettingsResponse { stored: Some(stored), effective: Some(effective) }))
    }

    async fn update_settings(
        &self,
        request: Request<pb::UpdateSettingsRequest>,
    ) -> Result<Response<pb::UpdateSettingsResponse>, Status> {
        let author = author(&request);
        let update = settings_update(request.into_inner()).map_err(invalid)?;
        let (view, warnings) = self.0.update_settings(author, update).await.map_err(of_admin)?;
        let (_, effective) = answers::settings(&view);
        Ok(Response::new(pb::UpdateSettingsResponse { effective: Some(effective), warnings }))
    }

    async fn get_status(
        &self,
        _: Request<pb::GetStatusRequest>,
    ) -> Result<Response<pb::GetStatusResponse>, Status> {
        Ok(Response::new(answers::status(self.0.status().await)))
    }
}
