//! Settings that are stored, and how this replica is.

use tonic::{Request, Response, Status};

use super::{
    answers,
    audit::Audit,
    convert::settings_update,
    pb::{self, settings_admin_server::SettingsAdmin},
    status::{invalid, of_admin},
};
use crate::{core::settings::SettingsUpdate, service::Service};

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
        let audit = Audit::of(&request, "UpdateSettings");
        let update = settings_update(request.into_inner()).map_err(invalid)?;
        let what = named(&update);
        let (view, warnings) = self.0.update_settings(update).await.map_err(of_admin)?;
        audit.changed(what, 0, self.0.directory().revision());
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

/// The settings that are stored or forgotten, without their values: one of them is a secret.
fn named(update: &SettingsUpdate) -> String {
    let SettingsUpdate {
        store_driver,
        redis_url,
        saturation_threshold,
        soft_deprioritize_factor,
        consumption_retention_days,
        clear,
    } = update;
    let stored = [
        ("store_driver", store_driver.is_some()),
        ("redis_url", redis_url.is_some()),
        ("saturation_threshold", saturation_threshold.is_some()),
        ("soft_deprioritize_factor", soft_deprioritize_factor.is_some()),
        ("consumption_retention_days", consumption_retention_days.is_some()),
    ];
    let stored = stored.into_iter().filter(|(_, given)| *given).map(|(name, _)| format!("+{name}"));
    let cleared = clear.iter().map(|name| format!("-{name}"));
    format!("settings {}", stored.chain(cleared).collect::<Vec<_>>().join(" "))
}
