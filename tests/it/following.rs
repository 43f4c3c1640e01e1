//! How replicas follow what they share, where the store answers at once: what passes is the time between their looks.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures::future::join_all;
use parking_lot::Mutex;
use quota_share::{
    core::{
        directory::{Change, Directory, Documents},
        document::{DocumentName, Head},
        ids::PoolId,
        settings::{SettingsUpdate, StoreDriver},
    },
    service::{AdminError, Service, Standing},
    store::{ReplicaNote, SharedDirectory, StoreError},
};
use tokio::task::JoinHandle;

use crate::{
    harness::{PATIENCE, T0},
    taking_over::{HeldLedger, Log, Stores, a_pool, author, service_of, to_redis, unavailable},
};

/// The configuration that replicas share, in memory.
#[derive(Debug, Default)]
struct MemoryShared(Mutex<State>);

/// What becomes of a write that is not answered.
#[derive(Clone, Copy, Debug)]
enum Lost {
    Answer,
    Write,
}

#[derive(Debug, Default)]
struct State {
    lost: Option<Lost>,
    is_unreadable: bool,
    admits: bool,
    head: Option<Head>,
    documents: Documents,
    writes: BTreeMap<u64, String>,
}

impl MemoryShared {
    /// As a Redis that was flushed.
    fn empty(&self) {
        *self.0.lock() = State::default();
    }

    /// Does not answer the next write.
    fn lose(&self, what: Lost) {
        self.0.lock().lost = Some(what);
    }
}

#[async_trait]
impl SharedDirectory for MemoryShared {
    async fn head(&self) -> Result<Option<Head>, StoreError> {
        let state = self.0.lock();
        if state.is_unreadable {
            let (what, found, expected) = ("a head".to_owned(), "text".to_owned(), "a head".to_owned());
            return Err(StoreError::Corrupt { store: "the test", what, found, expected });
        }
        Ok(state.head.clone())
    }

    async fn write_at(&self, revision: u64) -> Result<Option<String>, StoreError> {
        Ok(self.0.lock().writes.get(&revision).cloned())
    }

    async fn after(&self, revision: u64) -> Result<(Option<Head>, Documents), StoreError> {
        let state = self.0.lock();
        let later = state.documents.iter().filter(|(_, of)| of.revision > revision);
        Ok((state.head.clone(), later.map(|(name, of)| (name.clone(), of.clone())).collect()))
    }

    async fn commit(
        &self,
        before: Option<&Head>,
        next: &Head,
        documents: &Documents,
    ) -> Result<bool, StoreError> {
        let mut state = self.0.lock();
        let lost = state.lost.take();
        if matches!(lost, Some(Lost::Write)) {
            return Err(unavailable());
        }
        if state.head.as_ref() != before {
            return Ok(false);
        }
        state.head = Some(next.clone());
        state.documents.extend(documents.clone());
        state.writes.insert(next.revision, next.write.clone());
        if lost.is_some() { Err(unavailable()) } else { Ok(true) }
    }

    async fn forget(&self, _: &[(DocumentName, u64)]) -> Result<(), StoreError> {
        unreachable!()
    }

    async fn say(&self, _: &ReplicaNote) -> Result<(), StoreError> {
        Ok(())
    }

    async fn leave(&self, _: &str) -> Result<(), StoreError> {
        Ok(())
    }

    async fn replicas(&self) -> Result<Vec<ReplicaNote>, StoreError> {
        Ok(Vec::new())
    }

    fn admit(&self, is_right: bool) {
        self.0.lock().admits = is_right;
    }
}

/// A replica with nothing of its own, which follows what is shared there until it is dropped.
struct Replica {
    ledger: Arc<HeldLedger>,
    service: Service,
    following: JoinHandle<()>,
}

fn service_on(shared: &Arc<MemoryShared>, directory: Directory) -> Service {
    let ledger = HeldLedger::sharing(Arc::clone(shared) as _);
    service_of(directory, &ledger, &Stores::with(&ledger))
}

impl Replica {
    fn on(shared: &Arc<MemoryShared>) -> Self {
        let ledger = HeldLedger::sharing(Arc::clone(shared) as _);
        let service = service_of(Directory::default(), &ledger, &Stores::with(&ledger));
        let following = tokio::spawn(service.clone().follow());
        Self { ledger, service, following }
    }

    fn has(&self, pool: &str) -> bool {
        self.service.pool(&PoolId::parse("", pool).expect("an id")).is_ok()
    }

    async fn until(&self, so: impl Fn(&Self) -> bool) {
        let asked = Instant::now();
        while !so(self) {
            assert!(asked.elapsed() < PATIENCE, "{:?}", self.service.standing());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.following.abort();
    }
}

fn is_current(replica: &Replica) -> bool {
    replica.service.standing() == Standing::Current
}

#[tokio::test]
async fn what_one_replica_writes_another_decides_by_within_a_second() {
    let shared: Arc<MemoryShared> = Arc::default();
    let (one, other) = (Replica::on(&shared), Replica::on(&shared));
    other.until(is_current).await;
    // A look may come at once, or last of all: in the mean it takes half of the time between two.
    const ROUNDS: u32 = 6;
    let mut took = Duration::ZERO;
    for n in 0..ROUNDS {
        let id = format!("p{n}");
        one.service.create_pool(author(), a_pool(&id, &format!("c{n}"))).await.expect("the pool is valid");
        let written = Instant::now();
        other.until(|of| of.has(&id)).await;
        took += written.elapsed();
    }
    assert!(took / ROUNDS < Duration::from_secs(1), "{ROUNDS} writes in {took:?}");
}

/// One that has nothing must not start another configuration there, which nobody who has one would take over.
#[tokio::test]
async fn a_store_that_was_emptied_is_filled_by_whoever_has_a_configuration_before_a_new_one_is_started() {
    // At whatever instant between two looks.
    join_all((0..500).step_by(50).map(empty_after)).await;
}

async fn empty_after(wait_ms: u64) {
    let shared: Arc<MemoryShared> = Arc::default();
    let one = Replica::on(&shared);
    one.until(is_current).await;
    one.service.create_pool(author(), a_pool("p", "c1")).await.expect("the pool is valid");
    tokio::time::sleep(Duration::from_millis(wait_ms)).await;
    shared.empty();
    let fresh = Replica::on(&shared);
    fresh.until(|of| of.service.standing() != Standing::Unseen(None)).await;
    assert!(fresh.has("p") && is_current(&fresh), "{:?}", fresh.service.standing());
    assert_eq!(one.service.directory().head(), fresh.service.directory().head());
}

#[tokio::test]
async fn a_head_that_cannot_be_read_lets_nobody_in_and_keeps_nobody_out() {
    let shared: Arc<MemoryShared> = Arc::default();
    let (one, stranger) = (
        service_on(&shared, Directory::default().of_lineage("one".to_owned())),
        service_on(&shared, Directory::default().of_lineage("another".to_owned())),
    );
    let looked = async |of: &Service, is_unreadable: bool| {
        shared.0.lock().is_unreadable = is_unreadable;
        of.follow_once().await;
        (of.standing(), shared.0.lock().admits)
    };
    assert_eq!(looked(&one, false).await, (Standing::Current, true));
    let unread = looked(&one, true).await;
    assert!(matches!(unread, (Standing::Behind(_), true)), "{unread:?}");

    let restarted = service_on(&shared, Directory::default().of_lineage("one".to_owned()));
    let unread = looked(&restarted, true).await;
    assert!(matches!(unread, (Standing::Unseen(Some(_)), false)), "{unread:?}");
    assert_eq!(looked(&restarted, false).await, (Standing::Current, true));

    let seen = looked(&stranger, false).await;
    assert!(matches!(seen, (Standing::Foreign { .. }, false)), "{seen:?}");
    assert_eq!(looked(&stranger, true).await, seen);
}

#[tokio::test]
async fn a_write_whose_answer_was_lost_is_answered_by_what_has_become_of_it() {
    let log = Log::start();
    let shared: Arc<MemoryShared> = Arc::default();
    let one = Replica::on(&shared);
    one.until(is_current).await;
    shared.lose(Lost::Answer);
    let written = one.service.create_pool(author(), a_pool("there", "c1")).await;
    assert!(written.is_ok() && one.has("there"), "{written:?}");
    let said = log.lines("CreatePool");
    assert!(said.len() == 1 && said[0].contains("changed") && !said[0].contains("perhaps"), "{said:?}");

    shared.lose(Lost::Write);
    let refused = one.service.create_pool(author(), a_pool("nowhere", "c2")).await;
    assert!(matches!(refused, Err(AdminError::Store(_))), "{refused:?}");
    assert!(!one.has("nowhere"));
    let said = log.lines("CreatePool");
    assert!(said.len() == 2 && said[1].contains("perhaps changed: there was no answer"), "{said:?}");
    assert!(said[1].contains("pool:nowhere") && said[1].contains("alice"), "{said:?}");
    assert_eq!(shared.head().await.expect("it answers"), one.service.directory().head());
}

#[tokio::test]
async fn what_a_follower_has_counted_of_a_pool_goes_with_it() {
    let shared: Arc<MemoryShared> = Arc::default();
    let (one, other) = (Replica::on(&shared), Replica::on(&shared));
    other.until(is_current).await;
    let created = one.service.create_pool(author(), a_pool("p", "c1")).await.expect("the pool is valid");
    other.until(|of| of.has("p")).await;
    let id = PoolId::parse("", "p").expect("an id");
    one.service.delete_pool(author(), id, 0).await.expect("it is there");
    other.until(|of| !of.has("p")).await;
    other.until(|of| !of.ledger.removed().is_empty()).await;
    let ended = [created.history.created_revision];
    assert_eq!((one.ledger.removed(), other.ledger.removed()), (ended.to_vec(), ended.to_vec()));
}

/// Should it die in between, it has to know that what is there is its own.
#[tokio::test]
async fn a_configuration_has_its_name_on_disk_before_others_see_it() {
    let shared: Arc<MemoryShared> = Arc::default();
    let ledger = HeldLedger::sharing(Arc::clone(&shared) as _);
    let created = Directory::default().apply(Change::CreatePool(a_pool("p", "c1")), T0);
    let directory = created.expect("the pool is valid").expect("a pool is written").next;
    let stores = Stores::with(&ledger);
    let service = service_of(directory, &ledger, &stores);
    stores.fill_up();
    service.follow_once().await;
    assert_eq!(shared.head().await.expect("it answers"), None);
}

#[tokio::test]
async fn a_driver_that_was_opened_for_a_write_that_is_lost_is_closed_again() {
    let shared: Arc<MemoryShared> = Arc::default();
    let (ledger, next) =
        (HeldLedger::sharing(Arc::clone(&shared) as _), HeldLedger::sharing(shared.clone() as _));
    let service = service_of(Directory::default(), &ledger, &Stores::with(&next));
    service.follow_once().await;
    shared.lose(Lost::Write);
    let update = SettingsUpdate { saturation_threshold: Some(0.6), ..to_redis() };
    let refused = service.update_settings(author(), update).await;
    assert!(matches!(refused, Err(AdminError::Store(_))), "{refused:?}");
    assert_eq!((service.driver(), next.is_closed(), ledger.is_closed()), (StoreDriver::Sqlite, true, false));
}

/// Calls come to another store of counters only when it is known whose configuration is there.
#[tokio::test]
async fn a_store_that_is_switched_to_is_looked_at_before_anybody_calls_it() {
    for is_failing in [false, true] {
        let shared: Arc<MemoryShared> = Arc::default();
        service_on(&shared, Directory::default().of_lineage("theirs".to_owned())).follow_once().await;
        let (ledger, next) = (HeldLedger::new(0), HeldLedger::sharing(Arc::clone(&shared) as _));
        let ours = Directory::default().of_lineage("ours".to_owned());
        let service = service_of(ours, &ledger, &Stores::with(&next));
        if is_failing {
            next.fail();
        }
        service.update_settings(author(), to_redis()).await.expect("it is stored");
        let standing = service.standing();
        if is_failing {
            assert_eq!(standing, Standing::Unseen(None));
        } else {
            assert!(matches!(standing, Standing::Foreign { .. }), "{standing:?}");
            assert!(service.refuses());
        }
    }
}
