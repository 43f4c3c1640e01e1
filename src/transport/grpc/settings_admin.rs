//! Settings that are stored: not there yet.

use tonic::{Request, Response, Status};

use super::{
    pb::{self, settings_admin_server::SettingsAdmin},
    status::not_built,
};

#[derive(Debug)]
pub(super) struct Api;

#[tonic::async_trait]
impl SettingsAdmin for Api {
    async fn get_settings(
        &self,
        _: Request<pb::GetSettingsRequest>,
    ) -> Result<Response<pb::GetSettingsResponse>, Status> {
        Err(not_built("stored settings"))
    }

    async fn update_settings(
        &self,
        _: Request<pb::UpdateSettingsRequest>,
    ) -> Result<Response<pb::UpdateSettingsResponse>, Status> {
        Err(not_built("stored settings"))
    }

    async fn get_status(
        &self,
        _: Request<pb::GetStatusRequest>,
    ) -> Result<Response<pb::GetStatusResponse>, Status> {
        Err(not_built("a status report"))
    }
}
