//! Settings that are stored, and how this replica is.

use tonic::{Request, Response, Status};

use super::{
    answers,
    convert::settings_update,
    pb::{self, settings_admin_server::SettingsAdmin},
    status::{invalid, not_built, of_admin},
};
use crate::{
    core::{ids::InvalidField, settings::StoreDriver},
    service::Service,
};

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
        let request = request.into_inner();
        let has_url = request.settings.as_ref().is_some_and(|settings| !settings.redis_url.is_empty());
        let update = settings_update(request).map_err(invalid)?;
        match (update.store_driver, has_url) {
            (Some(StoreDriver::Redis), false) => {
                let accepted = "the URL of a Redis, together with store_driver REDIS";
                return Err(invalid(vec![InvalidField::new("settings.redis_url", "", accepted)]));
            }
            (Some(StoreDriver::Redis), true) | (_, true) => return Err(not_built("the driver redis")),
            (Some(StoreDriver::Sqlite) | None, false) => {}
        }
        let view = self.0.update_settings(update).await.map_err(of_admin)?;
        let (_, effective) = answers::settings(&view);
        Ok(Response::new(pb::UpdateSettingsResponse { effective: Some(effective), warnings: Vec::new() }))
    }

    async fn get_status(
        &self,
        _: Request<pb::GetStatusRequest>,
    ) -> Result<Response<pb::GetStatusResponse>, Status> {
        Ok(Response::new(answers::status(self.0.status())))
    }
}
