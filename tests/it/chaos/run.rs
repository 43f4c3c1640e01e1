//! A run, from its start to the last look.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use futures::future::{join_all, try_join_all};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{
    book::{Book, most_certain},
    caller::{Caller, Habits},
    faults::{FaultKind, Happened, trouble_line, trouble_redis, trouble_replica},
    pools::{Kind, SharedPool},
    setting::Setting,
    watcher::{Seen, overdue, usage_of, watch},
};
use crate::harness::{Client, PATIENCE, Proxy, TestRedis, TestReplica, told};

/// What an `Enforce` may wait, in ms: more than the default, since all of this shares one machine.
const TIMEOUT_MS: &str = "150";
/// Of each pool without room; see [`Habits::tight`].
const TIGHT_SECONDS: u64 = 3;
/// The longest life of a reservation, in ms.
const LIFE_MS_MAX: u64 = 5_000;
const POLL: Duration = Duration::from_millis(20);
/// Of one that begins, ends, and takes turns with others.
const WARNINGS_OF_A_FAULT_MAX: usize = 4;
/// How many broken promises are shown; all are kept.
const SHOWN_MAX: usize = 20;

/// The time of a run, shared by all who take part.
#[derive(Clone, Debug)]
pub(crate) struct Course(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    began: Instant,
    over: CancellationToken,
    healed: OnceLock<Instant>,
}

impl Course {
    /// Begins now.
    pub(crate) fn begin() -> Self {
        let inner = Inner { began: Instant::now(), over: CancellationToken::new(), healed: OnceLock::new() };
        Self(Arc::new(inner))
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.0.began.elapsed()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.over.is_cancelled()
    }

    /// Callers begin nothing new from now on, and faults are healed.
    pub(crate) fn end(&self) {
        self.0.over.cancel();
    }

    /// No fault is left.
    pub(crate) fn heal(&self) {
        self.0.healed.get_or_init(Instant::now);
    }

    /// How long ago everything was healed; 0 before.
    pub(crate) fn healed_since(&self) -> Duration {
        self.0.healed.get().map_or(Duration::ZERO, Instant::elapsed)
    }

    /// So long, or until the run is over.
    pub(crate) async fn pause(&self, length: Duration) {
        // Its time may be up already, and none is left to wait.
        let _ = tokio::time::timeout(length, self.0.over.cancelled()).await;
    }
}

/// What a run has shown.
#[derive(Clone, Debug)]
pub(super) struct Report {
    setting: Setting,
    pub(super) book: Book,
    pub(super) faults: Vec<(&'static str, usize)>,
    looks: u64,
    /// The most that was certainly admitted to a pool without room, and the most that was shown as used.
    fullest: (i64, f64),
    drained_in: Duration,
    warnings: Vec<usize>,
    /// Promises that were broken, in words.
    pub(super) broken: Vec<String>,
    /// Where what is needed to see why is kept, if one was.
    kept: Option<PathBuf>,
}

/// Those who take part and have to be there at the end.
#[derive(Debug)]
struct Stage {
    redis: TestRedis,
    lines: Vec<Proxy>,
    replicas: Vec<TestReplica>,
}

impl Stage {
    /// One Redis that writes before it answers, and replicas with `pools`, each on a line of its own.
    async fn set_up(setting: &Setting, pools: &[SharedPool]) -> Self {
        let redis = TestRedis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await;
        let lines = join_all((0..setting.replicas).map(|_| Proxy::to(redis.address()))).await;
        let urls: Vec<_> = lines.iter().map(Proxy::url).collect();
        let replicas = TestReplica::start_team(&urls, TIMEOUT_MS, async |writer| {
            for pool in pools {
                pool.create(writer, setting.clients).await;
            }
        });
        let replicas = replicas.await;
        Self { redis, lines, replicas }
    }

    fn clients(&self) -> Vec<Client> {
        self.replicas.iter().map(TestReplica::client).collect()
    }

    /// Lets things go wrong until the run is over. Returns when everything is healed.
    async fn suffer(self, setting: Setting, course: Course) -> (Self, Vec<Happened>) {
        let Self { redis, lines, replicas } = self;
        let redis = tokio::spawn(trouble_redis(redis, setting, course.clone()));
        let lines: Vec<_> = numbered(lines)
            .map(|(n, line)| tokio::spawn(trouble_line(line, n, setting, course.clone())))
            .collect();
        let replicas: Vec<_> = numbered(replicas)
            .map(|(n, replica)| tokio::spawn(trouble_replica(replica, n, setting, course.clone())))
            .collect();
        let (redis, mut happened) = redis.await.expect("Redis starts again");
        let (lines, of_lines): (Vec<_>, Vec<_>) = joined(lines).await.into_iter().unzip();
        let (replicas, of_replicas): (Vec<_>, Vec<_>) = joined(replicas).await.into_iter().unzip();
        happened.extend(of_lines.into_iter().chain(of_replicas).flatten());
        happened.sort_by_key(|fault| fault.at);
        (Self { redis, lines, replicas }, happened)
    }
}

fn numbered<T>(things: Vec<T>) -> impl Iterator<Item = (usize, T)> {
    things.into_iter().enumerate()
}

async fn joined<T>(tasks: Vec<JoinHandle<T>>) -> Vec<T> {
    try_join_all(tasks).await.expect("nobody who takes part panics")
}

/// A run from its start to the last look.
pub(super) async fn chaos(setting: Setting) -> Report {
    let (roomy, tight) = (SharedPool::roomy(), SharedPool::tight(setting.seconds.div_ceil(TIGHT_SECONDS)));
    let pools = [roomy.clone(), tight.clone()].concat();
    let stage = Stage::set_up(&setting, &pools).await;
    let clients = stage.clients();
    let habits = Habits { roomy, tight, life_ms: 1_000..=LIFE_MS_MAX, rest_ms: 25, redis_keeps: true };

    let course = Course::begin();
    let caller = |number| Caller::new(number, &clients, &course, &habits, setting.seed);
    let callers: Vec<_> = (0..setting.clients).map(|number| tokio::spawn(caller(number).call())).collect();
    let watcher = tokio::spawn(watch(clients.clone(), pools.clone(), course.clone(), setting.seed));
    let suffering = tokio::spawn(stage.suffer(setting, course.clone()));
    course.pause(Duration::from_secs(setting.seconds)).await;
    course.end();
    let (stage, happened) = suffering.await.expect("everything comes back");
    course.heal();
    let mut book = Book::default();
    joined(callers).await.into_iter().for_each(|other| book.merge(other));
    let seen = watcher.await.expect("looking does not panic");

    let (drained_in, not_drained) = drained(&stage.replicas).await;
    let mut broken = [std::mem::take(&mut book.broken), seen.broken.clone(), not_drained].concat();
    broken.extend(miscounted(&clients, &pools, &book).await);
    broken.extend(overbooked(&pools, &book, &seen));
    broken.extend(sent_again(&clients, &book).await);
    broken.extend(left_over(&clients, &pools).await);
    broken
        .extend(miscounted(&clients, &pools, &book).await.into_iter().map(|of| format!("in the end, {of}")));
    let warnings: Vec<_> = stage.replicas.iter().map(|replica| warnings_in(&replica.log())).collect();
    broken.extend(talkative(&warnings, happened.len()));
    let kept = (!broken.is_empty()).then(|| keep(&setting, &stage, &happened, &book, &broken));
    let count = |kind: FaultKind| happened.iter().filter(|fault| fault.kind == kind).count();
    Report {
        setting,
        faults: FaultKind::EACH.map(|kind| (kind.name(), count(kind))).into(),
        looks: seen.looks,
        fullest: fullest(&book, &seen),
        drained_in,
        warnings,
        book,
        broken,
        kept,
    }
}

/// Waits until every replica reaches Redis and has nothing in its journal; how long that took, and what is left of it.
pub(crate) async fn drained(replicas: &[TestReplica]) -> (Duration, Vec<String>) {
    let asked = Instant::now();
    let mut broken = Vec::new();
    for (number, replica) in replicas.iter().enumerate() {
        loop {
            let entries = replica.journal_entries().await;
            let degraded = replica.client().status().await.degraded;
            if entries == 0 && !degraded {
                break;
            }
            if asked.elapsed() > PATIENCE {
                broken.push(format!(
                    "replica {number} has {entries} entries in its journal, degraded: {degraded}"
                ));
                break;
            }
            tokio::time::sleep(POLL).await;
        }
    }
    (asked.elapsed(), broken)
}

/// Where usage is not exactly the sum of what was acknowledged: on any replica, of any pool, key and unit.
pub(crate) async fn miscounted(replicas: &[Client], pools: &[SharedPool], book: &Book) -> Vec<String> {
    let mut broken = Vec::new();
    for (number, replica) in replicas.iter().enumerate() {
        for pool in pools {
            let Some(usage) = usage_of(replica, pool).await else {
                broken.push(format!("replica {number} does not tell the usage of {}", pool.id));
                continue;
            };
            for name in pool.dimensions() {
                let usage = usage.dimension(name);
                let sum = |key: &str| book.consumed.get(&(pool.id.clone(), key.to_owned())).copied();
                let keys = usage.keys.iter().map(|key| {
                    (key.api_key_id.as_str(), key.consumed, sum(&key.api_key_id).unwrap_or_default())
                });
                let all = [("all keys", usage.consumed, book.total(&pool.id))];
                for (whose, shown, sum) in keys.chain(all) {
                    let want = sum.shown_in(name);
                    // Half a step of the smallest unit.
                    if (shown - want).abs() >= 0.5e-9 {
                        let id = &pool.id;
                        broken.push(format!(
                            "replica {number}: {whose} has {shown} {name} in {id}, and {want} was acknowledged"
                        ));
                    }
                }
            }
        }
    }
    broken
}

/// Pools without room in which more was admitted than fits: as callers know it, and as it was shown.
fn overbooked(pools: &[SharedPool], book: &Book, seen: &Seen) -> Vec<String> {
    let mut broken = Vec::new();
    for pool in pools {
        let Kind::Tight(limit) = pool.kind else { continue };
        let (certain, at_us) = most_certain(book.certain.get(&pool.id).map_or(&[], Vec::as_slice));
        if certain > i64::from(limit) {
            let at = Duration::from_micros(at_us);
            broken.push(format!("{at:.3?}: {certain} tokens were admitted in {}, of {limit}", pool.id));
        }
        let late = book.perhaps_late.get(&pool.id).copied().unwrap_or(0);
        let shown = seen.most_used.get(&pool.id).copied().unwrap_or(0.0);
        if shown > f64::from(limit) + late as f64 {
            let id = &pool.id;
            broken.push(format!(
                "{shown} tokens were shown as used in {id}, of {limit} and at most {late} recorded late"
            ));
        }
    }
    broken
}

fn fullest(book: &Book, seen: &Seen) -> (i64, f64) {
    let certain = book.certain.values().map(|spans| most_certain(spans).0).max();
    let tight = seen.most_used.iter().filter(|(pool, _)| book.certain.contains_key(*pool));
    (certain.unwrap_or(0), tight.map(|(_, used)| *used).fold(0.0, f64::max))
}

/// Records that were acknowledged and are not known when they are sent once more.
pub(crate) async fn sent_again(replicas: &[Client], book: &Book) -> Vec<String> {
    let mut broken = Vec::new();
    for (record, replica) in book.samples.iter().zip(replicas.iter().cycle()) {
        let again = told(replica.quota().record_consumption(record.clone()).await);
        if !again.duplicate {
            broken.push(format!("acknowledged before, and no duplicate: {record:?}: {again:?}"));
        }
    }
    broken
}

/// Reservations that do not end, or not in time, when nobody calls any more.
pub(crate) async fn left_over(replicas: &[Client], pools: &[SharedPool]) -> Vec<String> {
    let mut broken = Vec::new();
    let asked = Instant::now();
    for (number, replica) in replicas.iter().enumerate() {
        for pool in pools {
            loop {
                broken.extend(
                    overdue(replica, pool).await.map(|overdue| format!("replica {number}: {overdue}")),
                );
                let Some(usage) = usage_of(replica, pool).await else { break };
                let reserved = usage.dimensions.iter().map(|dimension| dimension.reserved).sum::<f64>();
                if usage.open_reservations == 0 && reserved == 0.0 {
                    break;
                }
                if asked.elapsed() > PATIENCE || !broken.is_empty() {
                    let (id, open) = (&pool.id, usage.open_reservations);
                    broken.push(format!(
                        "replica {number}: {reserved} in {open} reservations of {id} do not end"
                    ));
                    break;
                }
                tokio::time::sleep(POLL).await;
            }
        }
    }
    broken
}

/// Replicas that have warned of more than what happened: it is said once when something begins or ends.
fn talkative(warnings: &[usize], faults: usize) -> Vec<String> {
    let most = WARNINGS_OF_A_FAULT_MAX * (faults + 1);
    let too_many = warnings.iter().enumerate().filter(|(_, count)| **count > most);
    too_many
        .map(|(number, count)| format!("replica {number} gave {count} warnings in {faults} faults"))
        .collect()
}

/// The service's own, not those of its libraries.
fn warnings_in(log: &str) -> usize {
    let is_own =
        |line: &&str| line.contains(r#""level":"WARN""#) && line.contains(r#""target":"quota_share"#);
    log.lines().filter(is_own).count()
}

/// Keeps what is needed to see why a promise was broken; returns where.
fn keep(setting: &Setting, stage: &Stage, faults: &[Happened], book: &Book, broken: &[String]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("chaos-{}", setting.seed));
    // What was kept of a former run with this seed, if there was one.
    let _ = std::fs::remove_dir_all(&folder);
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text);
    let lines = |lines: &[String]| lines.join("\n") + "\n";
    let mut calls = book.calls.clone();
    calls.extend(faults.iter().map(|fault| (fault.at, format!("FAULT {}", fault.what))));
    calls.sort();
    let calls: Vec<_> = calls.iter().map(|(at, call)| format!("{:9.4} {call}", at.as_secs_f64())).collect();
    let kept = std::fs::create_dir_all(&folder)
        .and_then(|()| write("broken", lines(broken)))
        .and_then(|()| write("calls", lines(&calls)))
        .and_then(|()| copy_all(stage.redis.folder(), &folder.join("redis")));
    let mut kept = vec![kept];
    for (number, replica) in stage.replicas.iter().enumerate() {
        kept.push(write(&format!("replica-{number}.log"), replica.log()));
        kept.push(copy_all(replica.data_dir(), &folder.join(format!("replica-{number}"))));
    }
    if let Some(error) = kept.into_iter().find_map(Result::err) {
        println!("not everything could be kept in {}: {error}", folder.display());
    }
    folder
}

/// Copies a folder's files and folders, and nothing else that is there.
fn copy_all(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_all(&entry.path(), &to.join(entry.file_name()))?;
        } else if kind.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, book, .. } = self;
        writeln!(
            f,
            "seed {}: {} replicas, {} clients, {} s",
            setting.seed, setting.replicas, setting.clients, setting.seconds
        )?;
        let faults: Vec<_> = self.faults.iter().map(|(name, times)| format!("{name} {times}")).collect();
        writeln!(f, "  faults         {}", faults.join(", "))?;
        writeln!(f, "  acknowledged   {} records, {} of them journaled", book.acknowledged, book.journaled)?;
        writeln!(
            f,
            "  reservations   {} held, {} settled, {} released; {} blocked, {} repeated",
            book.held, book.settled, book.released, book.blocked, book.repeated
        )?;
        let (certain, shown) = self.fullest;
        writeln!(
            f,
            "  without room   {certain} tokens certainly admitted to one pool, {shown} shown as used"
        )?;
        for (replica, warnings) in self.warnings.iter().enumerate() {
            let (answers, seconds) =
                (book.degraded.get(&replica).copied().unwrap_or(0), book.degraded_seconds(replica));
            writeln!(
                f,
                "  replica {replica}      {answers} degraded answers, in {seconds:.1} s; {warnings} warnings"
            )?;
        }
        for (what, times) in [("decisions", &book.decisions_us), ("records", &book.records_us)] {
            let [half, most, all] = [0.5, 0.99, 1.0].map(|share| times.value_at_quantile(share) as f64 / 1e3);
            writeln!(f, "  {what:<14} median {half:.1} ms, 99 % {most:.1} ms, slowest {all:.1} ms")?;
        }
        writeln!(f, "  retries        {}", book.retries.values().sum::<u64>())?;
        for (why, times) in grouped(&book.retries) {
            writeln!(f, "    {times:>8} x {why}")?;
        }
        writeln!(f, "  healed         drained in {:.2?}; {} looks at usage", self.drained_in, self.looks)?;
        writeln!(f, "  broken         {}", self.broken.len())?;
        for broken in self.broken.iter().take(SHOWN_MAX) {
            writeln!(f, "    {broken}")?;
        }
        if let Some(folder) = &self.kept {
            writeln!(f, "  again          tests/chaos {}", setting.options())?;
            writeln!(f, "  to see why     {}", folder.display())?;
        }
        Ok(())
    }
}

/// Reasons by their code: texts differ by what they name.
fn grouped(retries: &BTreeMap<String, u64>) -> BTreeMap<&str, u64> {
    let mut grouped = BTreeMap::new();
    for (why, times) in retries {
        *grouped.entry(why.split(':').next().unwrap_or(why)).or_default() += times;
    }
    grouped
}
