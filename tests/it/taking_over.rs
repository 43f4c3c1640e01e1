//! Another ledger takes over: in which order, and what becomes of calls that are under way. Of ledgers that do nothing, so
//! that each step can be held.

use std::{
    cell::RefCell,
    io,
    sync::{
        Arc, Once,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use quota_share::{
    clock::{Clock, ManualClock},
    core::{
        account::{Observation, Unread},
        admission::{Counters as Counted, Reading},
        charge::{Charge, PerCheck},
        directory::{Change, Directory, Write},
        ids::{ApiKeyId, ConnectionId, PoolId, PoolRevision, ReservationId},
        ledger::{
            Consumption, Enforced, Hold, HoldRequest, Recorded, ReservationState, Settlement, UsageReading,
        },
        plan::DimensionKey,
        pool::{AllocationSpec, PoolSpec},
        settings::{Secret, Settings, SettingsUpdate, StoreDriver},
        units::{Cost, Timestamp},
    },
    service::{AdminError, Author, Counters, Decision, EnforceCall, Found, Service, Start},
    store::{
        Condition, Configured, DirectoryStore, Kept, Ledger, LedgerError, OpenLedger, Place,
        ReservationPlace, SharedDirectory, StoreError,
    },
};
use tokio::{sync::Semaphore, time::timeout};
use tracing_subscriber::{Layer, filter::Targets, layer::SubscriberExt};

use crate::{
    harness::{T0, UNREACHABLE},
    memory_journal::MemoryJournal,
    redis_team::until,
};

thread_local! {
    static SAID: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Audit lines of the tasks of this thread, from its start on.
pub(crate) struct Log;

impl Log {
    pub(crate) fn start() -> Self {
        static ONE_FOR_ALL_THREADS: Once = Once::new();
        ONE_FOR_ALL_THREADS.call_once(|| {
            // One that only a thread has is not asked for lines that another thread was the first to come to.
            let audit = Targets::new().with_target("quota_share::audit", tracing::Level::INFO);
            let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| Log);
            let subscriber = tracing_subscriber::registry().with(lines.with_filter(audit));
            tracing::subscriber::set_global_default(subscriber).expect("nobody else has set one");
        });
        SAID.take();
        Self
    }

    /// Lines of changes that were made by `method`.
    pub(crate) fn lines(&self, method: &str) -> Vec<String> {
        let text = SAID.with_borrow(|said| String::from_utf8(said.clone())).expect("it is text");
        text.lines().filter(|line| line.contains(method)).map(str::to_owned).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        SAID.with_borrow_mut(|said| said.extend_from_slice(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const SOON: Duration = Duration::from_millis(20);

pub(crate) fn unavailable() -> StoreError {
    let source = Arc::new(io::Error::other("on purpose"));
    StoreError::Unavailable { store: "the test", doing: "anything", source }
}

/// Answers checks and resets as it is let, and lets pools be removed; is asked nothing else.
#[derive(Debug)]
pub(crate) struct HeldLedger {
    asked: AtomicUsize,
    may_answer: Semaphore,
    closed: AtomicBool,
    is_failing: AtomicBool,
    removed: Mutex<Vec<PoolRevision>>,
    shared: Option<Arc<dyn SharedDirectory>>,
}

impl HeldLedger {
    pub(crate) fn new(answers: usize) -> Arc<Self> {
        Arc::new(Self::with(answers, None))
    }

    fn with(answers: usize, shared: Option<Arc<dyn SharedDirectory>>) -> Self {
        Self {
            asked: AtomicUsize::new(0),
            may_answer: Semaphore::new(answers),
            closed: AtomicBool::new(false),
            is_failing: AtomicBool::new(false),
            removed: Mutex::default(),
            shared,
        }
    }

    /// In a store where replicas share their configuration.
    pub(crate) fn sharing(shared: Arc<dyn SharedDirectory>) -> Arc<Self> {
        Arc::new(Self::with(0, Some(shared)))
    }

    /// Lives of pools of which nothing is kept any more.
    pub(crate) fn removed(&self) -> Vec<PoolRevision> {
        self.removed.lock().clone()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Nothing can be written there.
    pub(crate) fn fail(&self) {
        self.is_failing.store(true, SeqCst);
    }

    fn seen(&self) -> (usize, bool) {
        (self.asked.load(SeqCst), self.closed.load(SeqCst))
    }
}

#[async_trait]
impl Ledger for HeldLedger {
    async fn check(&self, _: &Charge) -> Result<Reading, LedgerError> {
        assert!(!self.closed.load(SeqCst), "a call comes to a ledger that was closed");
        self.asked.fetch_add(1, SeqCst);
        self.may_answer.acquire().await.expect("it stays open").forget();
        assert!(!self.closed.load(SeqCst), "closed under a call");
        Err(LedgerError::Unreachable(unavailable()))
    }

    async fn enforce(&self, _: &Charge, _: HoldRequest) -> Result<Enforced, LedgerError> {
        unreachable!()
    }

    async fn record(&self, _: PoolRevision, _: &Consumption) -> Result<Kept<Recorded>, LedgerError> {
        unreachable!()
    }

    async fn release(&self, _: ReservationId, _: Option<&ApiKeyId>) -> Result<Kept<bool>, LedgerError> {
        unreachable!()
    }

    async fn reservation(
        &self,
        _: PoolRevision,
        _: &Consumption,
        _: Settlement,
    ) -> Result<ReservationState, LedgerError> {
        unreachable!()
    }

    async fn report(
        &self,
        _: PoolRevision,
        _: &ConnectionId,
        _: &[Observation],
    ) -> Result<Vec<Result<(), Unread>>, LedgerError> {
        unreachable!()
    }

    async fn usage(
        &self,
        _: PoolRevision,
        _: &[DimensionKey],
        _: &[ConnectionId],
        _: bool,
    ) -> Result<UsageReading, LedgerError> {
        unreachable!()
    }

    async fn totals(
        &self,
        _: PoolRevision,
        _: &[DimensionKey],
        _: &[ConnectionId],
    ) -> Result<(Timestamp, PerCheck<Counted>), LedgerError> {
        unreachable!()
    }

    async fn reservations(
        &self,
        _: PoolRevision,
        _: Option<ReservationPlace>,
        _: Option<&ApiKeyId>,
        _: usize,
    ) -> Result<Vec<(ReservationId, Arc<Hold>)>, LedgerError> {
        unreachable!()
    }

    async fn reset(
        &self,
        _: PoolRevision,
        _: Option<&ApiKeyId>,
        _: Option<DimensionKey>,
    ) -> Result<(), LedgerError> {
        self.asked.fetch_add(1, SeqCst);
        self.may_answer.acquire().await.expect("it stays open").forget();
        Ok(())
    }

    async fn remove(&self, life: PoolRevision) -> Result<(), LedgerError> {
        self.removed.lock().push(life);
        Ok(())
    }

    fn directory(&self) -> Option<Arc<dyn SharedDirectory>> {
        self.shared.clone()
    }

    fn condition(&self) -> Condition {
        Condition { failing: self.is_failing.load(SeqCst).then(unavailable), ..Condition::default() }
    }

    fn now(&self) -> Result<Timestamp, LedgerError> {
        Ok(T0)
    }

    async fn close(&self) {
        self.closed.store(true, SeqCst);
    }
}

/// A store of documents and an opener of one other ledger, either of which may fail.
#[derive(Debug)]
pub(crate) struct Stores {
    redis: Arc<HeldLedger>,
    opens: AtomicBool,
    commits: AtomicBool,
}

#[async_trait]
impl OpenLedger for Stores {
    async fn open(&self, place: &Place, _: &Directory) -> Result<Arc<dyn Ledger>, StoreError> {
        assert_eq!(place.driver(), StoreDriver::Redis);
        if self.opens.load(SeqCst) { Ok(self.redis.clone()) } else { Err(unavailable()) }
    }
}

#[async_trait]
impl DirectoryStore for Stores {
    fn failing(&self) -> Option<StoreError> {
        None
    }

    async fn commit(&self, _: u64, _: &Directory, _: &[Write]) -> Result<(), StoreError> {
        if self.commits.load(SeqCst) { Ok(()) } else { Err(unavailable()) }
    }

    async fn load(&self) -> Result<Directory, StoreError> {
        unreachable!()
    }
}

impl Stores {
    /// That take all documents, and open `ledger`.
    pub(crate) fn with(ledger: &Arc<HeldLedger>) -> Arc<Self> {
        let (opens, commits) = (AtomicBool::new(true), AtomicBool::new(true));
        Arc::new(Self { redis: Arc::clone(ledger), opens, commits })
    }

    /// From now on no document is taken.
    pub(crate) fn fill_up(&self) {
        self.commits.store(false, SeqCst);
    }
}

pub(crate) fn a_pool(id: &str, connection: &str) -> PoolSpec {
    let allocation = AllocationSpec { api_key_id: "A".to_owned(), weight: 100.0, ..Default::default() };
    PoolSpec {
        pool_id: id.to_owned(),
        name: id.to_owned(),
        connection_ids: vec![connection.to_owned()],
        allocations: vec![allocation],
        ..Default::default()
    }
}

/// A service on the ledger `sqlite`, with one pool.
fn service_on(sqlite: &Arc<HeldLedger>, stores: &Arc<Stores>) -> Service {
    let created = Directory::default().apply(Change::CreatePool(a_pool("p", "c1")), T0);
    let created = created.expect("the pool is valid").expect("a pool is written");
    service_of(created.next, sqlite, stores)
}

/// A service on `ledger`, as it starts from `directory`.
pub(crate) fn service_of(directory: Directory, ledger: &Arc<HeldLedger>, stores: &Arc<Stores>) -> Service {
    let journal = Arc::new(MemoryJournal::default());
    let (ledger, drivers) = (ledger.clone(), stores.clone());
    let counters = Counters { place: Place::Sqlite, ledger, drivers, journal };
    let start = Start {
        replica_id: "replica".to_owned(),
        settings: Settings {
            saturation_threshold: 0.5,
            soft_deprioritize_factor: 0.7,
            consumption_retention_days: 14,
        },
        id_life_ms: 1,
        signal_ttl_ms: 1,
        store: Configured { driver: StoreDriver::Sqlite, redis_url: None, redis_url_unreadable: false },
    };
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new(T0));
    Service::new(directory, stores.clone(), counters, clock, start)
}

async fn ask(service: Service) -> Decision {
    let call = EnforceCall {
        api_key: ApiKeyId::parse("", "A").expect("a key"),
        connection: ConnectionId::parse("", "c1").expect("a connection"),
        model: None,
        estimate: Cost::default(),
        reserve: None,
    };
    service.enforce(call).await.expect("an answer, though without counters")
}

pub(crate) fn author() -> Author {
    Author { name: "alice".into(), role: None }
}

pub(crate) fn to_redis() -> SettingsUpdate {
    let redis_url = Some(Secret::from(UNREACHABLE.to_owned()));
    SettingsUpdate { store_driver: Some(StoreDriver::Redis), redis_url, ..Default::default() }
}

#[tokio::test]
async fn calls_finish_on_the_ledger_that_they_began_on_and_then_it_is_closed() {
    let (sqlite, redis) = (HeldLedger::new(0), HeldLedger::new(1));
    let (opens, commits) = (AtomicBool::new(true), AtomicBool::new(true));
    let stores = Arc::new(Stores { redis: redis.clone(), opens, commits });
    let service = service_on(&sqlite, &stores);
    // More than a thread has guards that cost nothing.
    let mut early: Vec<_> = (0..20).map(|_| tokio::spawn(ask(service.clone()))).collect();
    while sqlite.seen().0 < early.len() {
        tokio::task::yield_now().await;
    }
    let switch = tokio::spawn({
        let service = service.clone();
        async move { service.update_settings(author(), to_redis()).await }
    });
    while service.driver() == StoreDriver::Sqlite {
        tokio::task::yield_now().await;
    }

    assert!(matches!(ask(service.clone()).await.found, Found::Degraded(_)));
    assert_eq!(redis.seen(), (1, false), "a new call goes to the new ledger while old ones wait");
    sqlite.may_answer.add_permits(early.len() - 1);
    let last = early.pop().expect("the last one waits");
    for call in early {
        call.await.expect("answered by an open ledger");
    }
    tokio::time::sleep(SOON).await;
    assert!(!sqlite.seen().1 && !switch.is_finished(), "one call is under way");
    sqlite.may_answer.add_permits(1);
    last.await.expect("answered by an open ledger");
    let view = switch.await.expect("no panic").expect("the setting is stored").0;
    assert_eq!(
        (view.store_driver, sqlite.seen(), redis.seen()),
        (StoreDriver::Redis, (20, true), (1, false))
    );
}

#[tokio::test]
async fn what_cannot_be_opened_or_stored_takes_nothing_over() {
    // the other ledger opens, the setting is stored | the other ledger was closed again
    for (opens, commits, closed) in [(false, true, false), (true, false, true)] {
        let (sqlite, redis) = (HeldLedger::new(1), HeldLedger::new(0));
        let (opens, commits) = (AtomicBool::new(opens), AtomicBool::new(commits));
        let stores = Arc::new(Stores { redis: redis.clone(), opens, commits });
        let service = service_on(&sqlite, &stores);
        let before = service.directory().revision();
        let refused = service.update_settings(author(), to_redis()).await;
        assert!(matches!(refused, Err(AdminError::Store(_))), "{refused:?}");
        assert_eq!((service.directory().revision(), service.driver()), (before, StoreDriver::Sqlite));
        ask(service.clone()).await;
        assert_eq!((sqlite.seen(), redis.seen()), ((1, false), (0, closed)));
    }
}

/// A reset whose caller hangs up is made, and said.
#[tokio::test]
async fn a_reset_outlives_its_caller() {
    let log = Log::start();
    let ledger = HeldLedger::new(0);
    let service = service_on(&ledger, &Stores::with(&ledger));
    let pool = PoolId::parse("", "p").expect("an id");
    let hung_up = timeout(SOON, service.reset_usage(author(), &pool, None, None)).await;
    assert!(hung_up.is_err() && ledger.seen().0 == 1, "{hung_up:?}");
    assert_eq!(log.lines("ResetUsage"), [""; 0]);
    ledger.may_answer.add_permits(1);
    until("it is said", async || !log.lines("ResetUsage").is_empty()).await;
    let said = log.lines("ResetUsage");
    assert!(said.len() == 1 && said[0].contains("changed") && said[0].contains("alice"), "{said:?}");
}

/// Whoever asks for the change may hang up: it is made all the same.
#[tokio::test]
async fn a_change_of_driver_outlives_its_caller() {
    let (sqlite, redis) = (HeldLedger::new(0), HeldLedger::new(0));
    let (opens, commits) = (AtomicBool::new(true), AtomicBool::new(true));
    let service = service_on(&sqlite, &Arc::new(Stores { redis, opens, commits }));
    let call = tokio::spawn(ask(service.clone()));
    while sqlite.seen().0 == 0 {
        tokio::task::yield_now().await;
    }
    let hung_up = timeout(SOON, service.update_settings(author(), to_redis())).await;
    assert!(hung_up.is_err(), "a call is under way");
    sqlite.may_answer.add_permits(1);
    call.await.expect("answered by an open ledger");
    service.finish_changes().await;
    assert_eq!((service.driver(), sqlite.seen().1), (StoreDriver::Redis, true));
}
