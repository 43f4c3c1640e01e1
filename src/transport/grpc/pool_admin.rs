//! Pools, their allocations and their usage.

use std::time::Duration;

use prost::Message;
use tokio::{sync::mpsc, time::MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, codegen::BoxStream};

use super::{
    answers::{self, decision, plan, pool, timestamp},
    author::author,
    convert::{self, allocation_spec, pool_spec, revision},
    page::{PAGE_BYTES_MAX, Page, invalid_token},
    pb::{self, pool_admin_server::PoolAdmin},
    status::{draining, invalid, of_admin, of_ledger},
};
use crate::{
    core::{
        directory::PoolEntry,
        ids::{ApiKeyId, Faults, InvalidField, PoolId},
        import::legacy,
        units::Timestamp,
    },
    service::{Imported, Service, UsageCall},
    store::ReservationPlace,
};

/// How often usage is sent to a watcher who names no interval.
const WATCH_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Api {
    pub(super) service: Service,
    /// Cancelled when the server drains: streams end with it.
    pub(super) stop: CancellationToken,
}

#[tonic::async_trait]
impl PoolAdmin for Api {
    async fn create_pool(
        &self,
        request: Request<pb::CreatePoolRequest>,
    ) -> Result<Response<pb::CreatePoolResponse>, Status> {
        let author = author(&request);
        // Output-only fields and the revision of a pool that is given back are ignored.
        let (spec, _) = pool_spec(request.into_inner().pool.map(|pool| pb::Pool { revision: 0, ..pool }))
            .map_err(invalid)?;
        let entry = self.service.create_pool(author, spec).await.map_err(of_admin)?;
        let (pool, warnings) = (Some(pool(&entry)), entry.warnings());
        Ok(Response::new(pb::CreatePoolResponse { pool, warnings }))
    }

    async fn get_pool(
        &self,
        request: Request<pb::GetPoolRequest>,
    ) -> Result<Response<pb::GetPoolResponse>, Status> {
        let id = pool_id(&request.into_inner().pool_id)?;
        let view = self.service.pool(&id).map_err(of_admin)?;
        Ok(Response::new(pb::GetPoolResponse {
            pool: Some(pool(&view.entry)),
            plan: Some(plan(&view.entry.plan)),
            last_matched_at: view.last_matched.map(timestamp),
        }))
    }

    async fn list_pools(
        &self,
        request: Request<pb::ListPoolsRequest>,
    ) -> Result<Response<pb::ListPoolsResponse>, Status> {
        let pb::ListPoolsRequest { page_size, page_token, connection_id, api_key_id, group } =
            request.into_inner();
        let mut faults = Faults::default();
        let filter = ["pools", &connection_id, &api_key_id, &group];
        let page = Page::read(page_size, &page_token, &filter, &mut faults);
        let after = page.after_text(&mut faults);
        if !faults.is_empty() {
            return Err(invalid(faults.into_vec()));
        }
        let wanted = |entry: &PoolEntry| {
            let connections = &entry.pool.connections;
            (connection_id.is_empty() || connections.iter().any(|other| other.as_str() == connection_id))
                && (api_key_id.is_empty() || entry.pool.allocation(&api_key_id).is_some())
                && (group.is_empty() || entry.pool.group == group)
        };
        let directory = self.service.directory();
        let mut bytes = 0;
        let mut response = pb::ListPoolsResponse::default();
        for entry in directory.pools_after(after.as_deref()).filter(|entry| wanted(entry)) {
            if let Some(last) = response.pools.last()
                && (response.pools.len() == page.size || bytes >= PAGE_BYTES_MAX)
            {
                response.next_page_token = page.token_after(last.pool_id.as_bytes());
                break;
            }
            let pool = pool(entry);
            bytes += pool.encoded_len();
            response.pools.push(pool);
        }
        Ok(Response::new(response))
    }

    async fn update_pool(
        &self,
        request: Request<pb::UpdatePoolRequest>,
    ) -> Result<Response<pb::UpdatePoolResponse>, Status> {
        let author = author(&request);
        let (spec, revision) = pool_spec(request.into_inner().pool).map_err(invalid)?;
        let entry = self.service.update_pool(author, spec, revision).await.map_err(of_admin)?;
        let (pool, warnings) = (Some(pool(&entry)), entry.warnings());
        Ok(Response::new(pb::UpdatePoolResponse { pool, warnings }))
    }

    async fn delete_pool(
        &self,
        request: Request<pb::DeletePoolRequest>,
    ) -> Result<Response<pb::DeletePoolResponse>, Status> {
        let author = author(&request);
        let pb::DeletePoolRequest { pool_id: id, revision: given } = request.into_inner();
        let (id, revision) = named_pool(&id, given)?;
        let deleted = self.service.delete_pool(author, id, revision).await.map_err(of_admin)?;
        Ok(Response::new(pb::DeletePoolResponse { deleted }))
    }

    async fn put_allocation(
        &self,
        request: Request<pb::PutAllocationRequest>,
    ) -> Result<Response<pb::PutAllocationResponse>, Status> {
        let author = author(&request);
        let pb::PutAllocationRequest { pool_id: id, allocation, revision: given } = request.into_inner();
        let (id, revision) = named_pool(&id, given)?;
        let allocation = allocation_spec(allocation).map_err(invalid)?;
        let entry = self.service.put_allocation(author, id, allocation, revision).await.map_err(of_admin)?;
        let (pool, warnings) = (Some(pool(&entry)), entry.warnings());
        Ok(Response::new(pb::PutAllocationResponse { pool, warnings }))
    }

    async fn delete_allocation(
        &self,
        request: Request<pb::DeleteAllocationRequest>,
    ) -> Result<Response<pb::DeleteAllocationResponse>, Status> {
        let author = author(&request);
        let pb::DeleteAllocationRequest { pool_id: id, api_key_id, revision: given } = request.into_inner();
        let (id, revision) = named_pool(&id, given)?;
        let api_key = ApiKeyId::parse("api_key_id", &api_key_id).map_err(|fault| invalid(vec![fault]))?;
        let (entry, deleted) =
            self.service.delete_allocation(author, id, api_key, revision).await.map_err(of_admin)?;
        Ok(Response::new(pb::DeleteAllocationResponse { pool: Some(pool(&entry)), deleted }))
    }

    async fn get_pool_usage(
        &self,
        request: Request<pb::GetPoolUsageRequest>,
    ) -> Result<Response<pb::GetPoolUsageResponse>, Status> {
        let mut faults = Faults::default();
        let Some(UsagePage { call, page }) = UsagePage::read(request.into_inner(), &mut faults) else {
            return Err(invalid(faults.into_vec()));
        };
        let view = self.service.pool_usage(&call).await.map_err(of_admin)?;
        let (usage, shown, more) = answers::usage(&view);
        let next = shown.filter(|_| more).map(|last| page.token_after(last.as_bytes()));
        Ok(Response::new(pb::GetPoolUsageResponse {
            usage: Some(usage),
            next_page_token: next.unwrap_or_default(),
        }))
    }

    async fn watch_pool_usage(
        &self,
        request: Request<pb::WatchPoolUsageRequest>,
    ) -> Result<Response<BoxStream<pb::WatchPoolUsageResponse>>, Status> {
        let pb::WatchPoolUsageRequest { pool_id, interval, api_key_ids, page_size, with_samples } =
            request.into_inner();
        let mut faults = Faults::default();
        let interval = interval.map_or(Some(WATCH_INTERVAL), |wire| faults.take(watch_interval(&wire)));
        let call = pb::GetPoolUsageRequest {
            pool_id,
            api_key_ids,
            page_size,
            page_token: String::new(),
            with_samples,
        };
        let read = UsagePage::read(call, &mut faults);
        let (Some(interval), Some(page)) = (interval, read) else { return Err(invalid(faults.into_vec())) };
        // Refused now, rather than by the first answer of the stream.
        self.service.pool(&page.call.pool).map_err(of_admin)?;
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(watch(self.service.clone(), page.call, interval, sender, self.stop.clone()));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type WatchPoolUsageStream = BoxStream<pb::WatchPoolUsageResponse>;

    async fn list_reservations(
        &self,
        request: Request<pb::ListReservationsRequest>,
    ) -> Result<Response<pb::ListReservationsResponse>, Status> {
        let pb::ListReservationsRequest { pool_id, api_key_id, page_size, page_token } = request.into_inner();
        let mut faults = Faults::default();
        let filter = ["reservations", &pool_id, &api_key_id];
        let page = Page::read(page_size, &page_token, &filter, &mut faults);
        let after = page.after.as_deref().and_then(|place| faults.take(read_place(place)));
        let pool = faults.take(PoolId::parse("pool_id", &pool_id));
        let api_key = convert::optional_key(&api_key_id, &mut faults);
        let Some(pool) = pool.filter(|_| faults.is_empty()) else { return Err(invalid(faults.into_vec())) };
        let found =
            self.service.reservations(&pool, api_key.as_ref(), after, page.size).await.map_err(of_admin)?;
        let last = found.reservations.last().filter(|_| found.more);
        let next = last.map(|(id, hold)| page.token_after(&write_place((hold.deadline, id.random))));
        Ok(Response::new(pb::ListReservationsResponse {
            reservations: found
                .reservations
                .iter()
                .map(|(id, hold)| answers::reservation(*id, hold))
                .collect(),
            next_page_token: next.unwrap_or_default(),
        }))
    }

    async fn preview_decision(
        &self,
        request: Request<pb::PreviewDecisionRequest>,
    ) -> Result<Response<pb::PreviewDecisionResponse>, Status> {
        let request = request.into_inner().request.unwrap_or_default();
        let call = convert::enforce("request.", request).map_err(invalid)?;
        let answer = self.service.preview(call).await.map_err(of_ledger)?;
        let response = Some(decision(answer));
        Ok(Response::new(pb::PreviewDecisionResponse { response }))
    }

    async fn reset_usage(
        &self,
        request: Request<pb::ResetUsageRequest>,
    ) -> Result<Response<pb::ResetUsageResponse>, Status> {
        let author = author(&request);
        let pb::ResetUsageRequest { pool_id, api_key_id, unit, window } = request.into_inner();
        let mut faults = Faults::default();
        let pool = faults.take(PoolId::parse("pool_id", &pool_id));
        let api_key = convert::optional_key(&api_key_id, &mut faults);
        let dimension = convert::optional_dimension(unit, &window, &mut faults);
        let Some(pool) = pool.filter(|_| faults.is_empty()) else { return Err(invalid(faults.into_vec())) };
        self.service.reset_usage(author, &pool, api_key.as_ref(), dimension).await.map_err(of_admin)?;
        Ok(Response::new(pb::ResetUsageResponse {}))
    }

    async fn import_pools(
        &self,
        request: Request<pb::ImportPoolsRequest>,
    ) -> Result<Response<pb::ImportPoolsResponse>, Status> {
        let author = author(&request);
        let import = legacy::read("legacy_json", &request.into_inner().legacy_json).map_err(invalid)?;
        let Imported { pools: entries, mut warnings, skipped, .. } =
            self.service.import(author, import).await.map_err(of_admin)?;
        let mut bytes = 0;
        let shown = entries.iter().map(|entry| pool(entry)).take_while(|pool| {
            bytes += pool.encoded_len();
            bytes <= PAGE_BYTES_MAX
        });
        let pools: Vec<pb::Pool> = shown.collect();
        if pools.len() < entries.len() {
            let more = entries.len() - pools.len();
            warnings.push(format!("{more} more pools were imported: ListPools lists all"));
        }
        Ok(Response::new(pb::ImportPoolsResponse { pools, skipped, warnings }))
    }
}

/// A page of a pool's usage, and where it stands in the listing.
struct UsagePage {
    call: UsageCall,
    page: Page,
}

impl UsagePage {
    /// `None` if there are faults, these or earlier ones.
    fn read(request: pb::GetPoolUsageRequest, faults: &mut Faults) -> Option<UsagePage> {
        let pb::GetPoolUsageRequest { pool_id, api_key_ids, page_size, page_token, with_samples } = request;
        let mut filter = vec!["usage", &pool_id];
        filter.extend(api_key_ids.iter().map(String::as_str));
        let page = Page::read(page_size, &page_token, &filter, faults);
        let after = page.after_text(faults);
        let pool = faults.take(PoolId::parse("pool_id", &pool_id));
        let keys = (0..).zip(&api_key_ids).filter_map(|(index, key): (usize, _)| {
            faults.take(ApiKeyId::parse(&format!("api_key_ids[{index}]"), key))
        });
        let api_keys = keys.collect();
        let pool = pool.filter(|_| faults.is_empty())?;
        Some(UsagePage { call: UsageCall { pool, api_keys, after, count: page.size, with_samples }, page })
    }
}

fn watch_interval(wire: &prost_types::Duration) -> Result<Duration, InvalidField> {
    let ms = convert::duration_ms(wire).filter(|ms| (1_000..=3_600_000).contains(ms));
    let ms = ms.ok_or_else(|| {
        InvalidField::new("interval", convert::seconds(wire), "a duration from 1s to 3600s")
    })?;
    Ok(Duration::from_millis(ms))
}

/// Sends a pool's usage now and at every interval, until the caller ends it, the pool is gone or the server drains.
async fn watch(
    service: Service,
    call: UsageCall,
    interval: Duration,
    sender: mpsc::Sender<Result<pb::WatchPoolUsageResponse, Status>>,
    stop: CancellationToken,
) {
    let mut interval = tokio::time::interval(interval);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            () = sender.closed() => return,
            () = stop.cancelled() => {
                // A caller that has gone meanwhile needs no answer.
                let _ = sender.send(Err(draining())).await;
                return;
            }
        }
        let answer = service.pool_usage(&call).await.map_err(of_admin).map(|view| {
            let (usage, ..) = answers::usage(&view);
            pb::WatchPoolUsageResponse { usage: Some(usage) }
        });
        let ended = answer.is_err();
        if sender.send(answer).await.is_err() || ended {
            return;
        }
    }
}

fn pool_id(given: &str) -> Result<PoolId, Status> {
    PoolId::parse("pool_id", given).map_err(|fault| invalid(vec![fault]))
}

/// A pool's id and its revision as the caller knows it.
fn named_pool(id: &str, given: i64) -> Result<(PoolId, u64), Status> {
    let mut faults = Faults::default();
    let id = faults.take(PoolId::parse("pool_id", id));
    let revision = faults.take(revision("revision", given));
    match (id, revision) {
        (Some(id), Some(revision)) => Ok((id, revision)),
        _ => Err(invalid(faults.into_vec())),
    }
}

fn write_place((deadline, random): ReservationPlace) -> Vec<u8> {
    [&deadline.unix_ms().to_le_bytes()[..], &random[..]].concat()
}

fn read_place(place: &[u8]) -> Result<ReservationPlace, InvalidField> {
    let (deadline, random) = place.split_first_chunk().ok_or_else(invalid_token)?;
    let random = random.try_into().map_err(|_| invalid_token())?;
    Ok((Timestamp::from_unix_ms(u64::from_le_bytes(*deadline)), random))
}
