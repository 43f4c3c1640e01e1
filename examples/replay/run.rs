//! The replay itself: each request is asked when it came, whatever has become of those before it.

use std::{sync::Arc, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tonic::{Status, transport::Channel};

use crate::{
    pb::{
        self, enforce_response::Decision, plan_admin_client::PlanAdminClient,
        pool_admin_client::PoolAdminClient, quota_share_client::QuotaShareClient,
    },
    setting::Setting,
    tally::Tally,
    trace::Request,
};

/// A replay against one server.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) channel: Channel,
    pub(crate) setting: Arc<Setting>,
    pub(crate) speed: f64,
}

/// A request's key and cost, and what was answered.
type Answered = (usize, u64, pb::EnforceResponse);

impl Run {
    /// Makes pool and plan, and counts into `tally` what each request, with the index of its key, was answered.
    pub(crate) async fn whole(
        &self,
        requests: Vec<(Request, usize)>,
        mut tally: Tally,
    ) -> Result<Tally, String> {
        let server_ms = self.set_up().await.map_err(|status| refused("the setting", &status))?;
        self.wait_for_a_window(server_ms).await;
        let bar = progress(requests.len());
        let start = Instant::now();
        let mut running = JoinSet::new();
        for (request, key) in requests {
            sleep_until(start + request.at.div_f64(self.speed)).await;
            running.spawn(self.clone().one(request, key));
            while let Some(done) = running.try_join_next() {
                count(done, &mut tally, &bar)?;
            }
        }
        while let Some(done) = running.join_next().await {
            count(done, &mut tally, &bar)?;
        }
        bar.finish_and_clear();
        Ok(tally)
    }

    /// The server's time when the pool was made, in milliseconds.
    async fn set_up(&self) -> Result<u64, Status> {
        PlanAdminClient::new(self.channel.clone()).put_plan(self.setting.plan()).await?;
        let created = PoolAdminClient::new(self.channel.clone()).create_pool(self.setting.pool()).await?;
        let at = created.into_inner().pool.and_then(|pool| pool.created_at).unwrap_or_default();
        Ok((at.seconds * 1_000 + i64::from(at.nanos) / 1_000_000) as u64)
    }

    /// Until the server's next bucket begins, so that replays of one trace can be compared.
    async fn wait_for_a_window(&self, server_ms: u64) {
        let window_ms = self.setting.window.as_millis() as u64;
        let wait = Duration::from_millis(window_ms - server_ms % window_ms);
        eprintln!("the next window begins in {:.1} s", wait.as_secs_f64());
        sleep(wait).await;
    }

    /// Asks, and settles after the time that the answer takes.
    async fn one(self, request: Request, key: usize) -> Result<Answered, String> {
        let mut client = QuotaShareClient::new(self.channel.clone());
        let asked = client.enforce(self.setting.ask(key, &request)).await;
        let answer = asked.map_err(|status| refused("Enforce", &status))?.into_inner();
        if answer.decision() == Decision::Allow {
            if answer.reservation_id.is_empty() {
                return Err("the pool of the replay is gone: somebody has deleted it".to_owned());
            }
            sleep(request.service_time().div_f64(self.speed)).await;
            let settled = self.setting.settle(key, &request, answer.reservation_id.clone());
            let settled = client.record_consumption(settled).await;
            settled.map_err(|status| refused("RecordConsumption", &status))?;
        }
        Ok((key, request.cost(), answer))
    }

    /// Deletes pool and plan, as far as they are there.
    pub(crate) async fn clean_up(&self) {
        let id = &self.setting.id;
        let pool = pb::DeletePoolRequest { pool_id: id.clone(), revision: 0 };
        let plan = pb::DeletePlanRequest { connection_id: id.clone(), revision: 0 };
        let deleted = PoolAdminClient::new(self.channel.clone()).delete_pool(pool).await.map(drop);
        let deleted =
            deleted.and(PlanAdminClient::new(self.channel.clone()).delete_plan(plan).await.map(drop));
        if let Err(status) = deleted {
            eprintln!("pool and plan {id:?} are left behind: {}", status.message());
        }
    }
}

fn refused(what: &str, status: &Status) -> String {
    format!("{what} was answered with {:?}: {}", status.code(), status.message())
}

fn count(
    done: Result<Result<Answered, String>, tokio::task::JoinError>,
    tally: &mut Tally,
    bar: &ProgressBar,
) -> Result<(), String> {
    let (key, tokens, answer) = done.map_err(|error| error.to_string())??;
    tally.count(key, tokens, &answer);
    bar.inc(1);
    Ok(())
}

fn progress(requests: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed_precise} [{wide_bar}] {pos}/{len} requests")
        .expect("the template is valid");
    ProgressBar::new(requests as u64).with_style(style)
}
