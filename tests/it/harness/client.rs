//! One caller's connection: a call is one line, and a refusal is a panic.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::{
    Response, Status,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use super::{
    pb::{
        self, plan_admin_client::PlanAdminClient, pool_admin_client::PoolAdminClient,
        quota_share_client::QuotaShareClient, settings_admin_client::SettingsAdminClient,
    },
    process::PATIENCE,
    requests::{ask, spent},
};

/// A connection to a server. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    address: SocketAddr,
    channel: Channel,
}

/// The URL of a Redis where none listens, with a password that must not be seen anywhere.
pub(crate) const UNREACHABLE: &str = "redis://user:hidden@127.0.0.1:1";

/// The answer of a call that was not refused.
#[track_caller]
pub(crate) fn told<T>(result: Result<Response<T>, Status>) -> T {
    match result {
        Ok(response) => response.into_inner(),
        Err(status) => panic!("refused with {:?}: {}", status.code(), status.message()),
    }
}

/// GET of one of the pages for probes and Prometheus: the status line's code and the body.
pub(super) async fn page(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("the server accepts connections");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("the server reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("the server answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line");
    (code, body.to_owned())
}

impl Client {
    /// A connection that is made with the first call, and anew whenever it was lost.
    pub(crate) fn lazy(address: SocketAddr) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address is a URI");
        Self { address, channel: endpoint.connect_lazy() }
    }

    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address is a URI");
        let channel = endpoint.connect().await.expect("the server accepts connections");
        Self { address, channel }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(crate) fn quota(&self) -> QuotaShareClient<Channel> {
        QuotaShareClient::new(self.channel())
    }

    pub(crate) fn pools(&self) -> PoolAdminClient<Channel> {
        PoolAdminClient::new(self.channel())
    }

    pub(crate) fn plans(&self) -> PlanAdminClient<Channel> {
        PlanAdminClient::new(self.channel())
    }

    pub(crate) fn settings(&self) -> SettingsAdminClient<Channel> {
        SettingsAdminClient::new(self.channel())
    }

    pub(crate) fn health(&self) -> HealthClient<Channel> {
        HealthClient::new(self.channel())
    }

    /// Asks without holding anything.
    pub(crate) async fn enforce(
        &self,
        key: &str,
        connection: &str,
        estimate: impl Into<Option<pb::Cost>>,
    ) -> pb::EnforceResponse {
        told(self.quota().enforce(ask(key, connection, estimate)).await)
    }

    /// Asks, and holds the estimate for a minute.
    pub(crate) async fn reserve(
        &self,
        key: &str,
        connection: &str,
        estimate: impl Into<Option<pb::Cost>>,
    ) -> pb::EnforceResponse {
        let request = ask(key, connection, estimate).holding(Duration::from_secs(60));
        told(self.quota().enforce(request).await)
    }

    pub(crate) async fn preview(&self, request: pb::EnforceRequest) -> pb::EnforceResponse {
        let request = pb::PreviewDecisionRequest { request: Some(request) };
        told(self.pools().preview_decision(request).await).response.expect("a preview is an answer")
    }

    /// Counts a cost that nothing was held for.
    pub(crate) async fn record(
        &self,
        key: &str,
        connection: &str,
        cost: pb::Cost,
    ) -> pb::RecordConsumptionResponse {
        told(self.quota().record_consumption(spent(key, connection, cost)).await)
    }

    /// Counts a cost and gives back what was held for it.
    pub(crate) async fn settle(
        &self,
        key: &str,
        connection: &str,
        reservation: &str,
        cost: pb::Cost,
    ) -> pb::RecordConsumptionResponse {
        told(self.quota().record_consumption(spent(key, connection, cost).settling(reservation)).await)
    }

    /// Tells what a provider says of `connection`; all of it is taken over.
    pub(crate) async fn report(&self, connection: &str, utilizations: impl Into<Vec<pb::Utilization>>) {
        let utilizations: Vec<_> = utilizations.into();
        let figures = utilizations.len();
        let outcome = self.report_some(connection, utilizations).await;
        assert_eq!((outcome.accepted.len(), outcome.ignored), (figures, Vec::<String>::new()));
    }

    /// Tells what a provider says of `connection`.
    pub(crate) async fn report_some(
        &self,
        connection: &str,
        utilizations: impl Into<Vec<pb::Utilization>>,
    ) -> pb::ReportSignalsResponse {
        let connection_id = connection.to_owned();
        let utilizations = utilizations.into();
        let request = pb::ReportSignalsRequest { connection_id, utilizations, ..Default::default() };
        told(self.quota().report_signals(request).await)
    }

    /// Tells the headers of a provider's response.
    pub(crate) async fn report_headers(
        &self,
        connection: &str,
        headers: impl IntoIterator<Item = (&'static str, &'static str)>,
    ) -> pb::ReportSignalsResponse {
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let provider_headers = headers.into_iter().map(own).collect();
        let connection_id = connection.to_owned();
        let request = pb::ReportSignalsRequest { connection_id, provider_headers, ..Default::default() };
        told(self.quota().report_signals(request).await)
    }

    /// Waits until health says `want`: the server finds out by itself, within a second or so.
    pub(crate) async fn until_health_is(&self, want: ServingStatus) {
        let check = HealthCheckRequest::default;
        while told(self.health().check(check()).await).status() != want {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Stores settings and forgets others.
    pub(crate) async fn update_settings(
        &self,
        settings: pb::Settings,
        clear: &[&str],
    ) -> pb::UpdateSettingsResponse {
        let clear = clear.iter().map(|name| (*name).to_owned()).collect();
        let request = pb::UpdateSettingsRequest { settings: Some(settings), clear };
        told(self.settings().update_settings(request).await)
    }

    /// Has the counters kept by SQLite, or by a Redis that nobody can reach.
    pub(crate) async fn switch_to(&self, driver: pb::settings::StoreDriver) {
        let redis_url = match driver {
            pb::settings::StoreDriver::Redis => UNREACHABLE.to_owned(),
            _ => String::new(),
        };
        let settings = pb::Settings { store_driver: driver.into(), redis_url, ..Default::default() };
        let effective = self.update_settings(settings, &[]).await.effective.expect("what is in force");
        assert_eq!(effective.store_driver(), driver);
    }

    /// What health says of the whole server.
    pub(crate) async fn is_serving(&self) -> bool {
        let health = told(self.health().check(HealthCheckRequest::default()).await);
        health.status() == ServingStatus::Serving
    }

    /// What the service says of itself.
    pub(crate) async fn status(&self) -> pb::GetStatusResponse {
        told(self.settings().get_status(pb::GetStatusRequest {}).await)
    }

    /// Waits until decisions are made from counters.
    pub(crate) async fn until_counters_are_in_reach(&self) {
        let asked = Instant::now();
        loop {
            let status = self.status().await;
            if !status.degraded {
                return;
            }
            assert!(asked.elapsed() < PATIENCE, "the counters stay out of reach: {status:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until it decides by the configuration that `other` has now.
    pub(crate) async fn until_it_follows(&self, other: &Client) {
        let wanted = other.status().await.config_revision;
        let asked = Instant::now();
        loop {
            let status = self.status().await;
            if status.config_revision >= wanted {
                return;
            }
            assert!(asked.elapsed() < PATIENCE, "it stays behind revision {wanted}: {status:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until everything that was kept has reached the counters.
    pub(crate) async fn until_the_journal_is_empty(&self) {
        let asked = Instant::now();
        loop {
            let status = self.status().await;
            if status.journal_length == 0 {
                return;
            }
            assert!(asked.elapsed() < PATIENCE, "the journal keeps something: {status:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// What each key has used in a dimension, by name, and what was used outside.
    pub(crate) async fn parts(&self, pool: &str, dimension: &str) -> (Vec<(String, f64)>, f64) {
        let usage = self.usage(pool).await;
        let usage = usage.dimension(dimension);
        let keys = usage.keys.iter().filter(|key| key.consumed > 0.0);
        (keys.map(|key| (key.api_key_id.clone(), key.consumed)).collect(), usage.external)
    }

    /// Gives back what was held; false if nothing was.
    pub(crate) async fn release(&self, reservation: &str) -> bool {
        let request = pb::ReleaseReservationRequest {
            reservation_id: reservation.to_owned(),
            api_key_id: String::new(),
        };
        told(self.quota().release_reservation(request).await).released
    }

    pub(crate) async fn create(&self, pool: pb::Pool) -> pb::Pool {
        let request = pb::CreatePoolRequest { pool: Some(pool) };
        told(self.pools().create_pool(request).await).pool.expect("the pool that was created")
    }

    pub(crate) async fn update(&self, pool: pb::Pool) -> pb::Pool {
        let request = pb::UpdatePoolRequest { pool: Some(pool) };
        told(self.pools().update_pool(request).await).pool.expect("the pool that was written")
    }

    pub(crate) async fn delete_pool(&self, pool: &str) -> bool {
        let request = pb::DeletePoolRequest { pool_id: pool.to_owned(), revision: 0 };
        told(self.pools().delete_pool(request).await).deleted
    }

    pub(crate) async fn put_allocation(&self, pool: &str, allocation: pb::Allocation) -> pb::Pool {
        let request =
            pb::PutAllocationRequest { pool_id: pool.to_owned(), allocation: Some(allocation), revision: 0 };
        told(self.pools().put_allocation(request).await).pool.expect("the pool that was written")
    }

    pub(crate) async fn delete_allocation(&self, pool: &str, key: &str) -> bool {
        let request =
            pb::DeleteAllocationRequest { pool_id: pool.to_owned(), api_key_id: key.to_owned(), revision: 0 };
        told(self.pools().delete_allocation(request).await).deleted
    }

    pub(crate) async fn get_pool(&self, pool: &str) -> pb::GetPoolResponse {
        told(self.pools().get_pool(pb::GetPoolRequest { pool_id: pool.to_owned() }).await)
    }

    pub(crate) async fn list_pools(&self) -> Vec<pb::Pool> {
        let mut pools = Vec::new();
        let mut request = pb::ListPoolsRequest { page_size: 1_000, ..Default::default() };
        loop {
            let page = told(self.pools().list_pools(request.clone()).await);
            pools.extend(page.pools);
            if page.next_page_token.is_empty() {
                return pools;
            }
            request.page_token = page.next_page_token;
        }
    }

    pub(crate) async fn list_plans(&self) -> Vec<pb::Plan> {
        let request = pb::ListPlansRequest { page_size: 1_000, ..Default::default() };
        let page = told(self.plans().list_plans(request).await);
        assert_eq!(page.next_page_token, "", "tests store fewer plans than fit on a page");
        page.plans
    }

    pub(crate) async fn put_plan(
        &self,
        connection: &str,
        dimensions: impl Into<Vec<pb::Dimension>>,
    ) -> pb::Plan {
        told(self.plans().put_plan(pb::PutPlanRequest::of(connection, dimensions)).await)
            .plan
            .expect("the plan that was stored")
    }

    /// The plan in force.
    pub(crate) async fn get_plan(&self, connection: &str, provider: &str) -> pb::Plan {
        let request =
            pb::GetPlanRequest { connection_id: connection.to_owned(), provider: provider.to_owned() };
        told(self.plans().get_plan(request).await).plan.expect("a plan, be it an empty one")
    }

    /// The plan that is in force afterwards.
    pub(crate) async fn delete_plan(&self, connection: &str) -> pb::Plan {
        let request = pb::DeletePlanRequest { connection_id: connection.to_owned(), revision: 0 };
        told(self.plans().delete_plan(request).await).plan.expect("a plan, be it an empty one")
    }

    /// The first thousand keys' usage, which must be all.
    pub(crate) async fn usage(&self, pool: &str) -> pb::PoolUsage {
        let request =
            pb::GetPoolUsageRequest { pool_id: pool.to_owned(), page_size: 1_000, ..Default::default() };
        let page = told(self.pools().get_pool_usage(request).await);
        assert_eq!(page.next_page_token, "", "this pool's keys do not fit on a page");
        page.usage.expect("the usage of the pool").checked()
    }

    /// What the pool has `(consumed, reserved)` in a dimension such as `tokens/hourly`.
    pub(crate) async fn used(&self, pool: &str, dimension: &str) -> (f64, f64) {
        let usage = self.usage(pool).await;
        let usage = usage.dimension(dimension);
        (usage.consumed, usage.reserved)
    }

    /// What is held in the pool, the oldest deadline first; a thousand at most, which must be all.
    pub(crate) async fn reservations(&self, pool: &str) -> Vec<pb::Reservation> {
        let request =
            pb::ListReservationsRequest { pool_id: pool.to_owned(), page_size: 1_000, ..Default::default() };
        let page = told(self.pools().list_reservations(request).await);
        assert_eq!(page.next_page_token, "", "this pool's reservations do not fit on a page");
        page.reservations
    }

    /// Sets everything that the pool has consumed to zero.
    pub(crate) async fn reset(&self, pool: &str) {
        let request = pb::ResetUsageRequest { pool_id: pool.to_owned(), ..Default::default() };
        told(self.pools().reset_usage(request).await);
    }
}
