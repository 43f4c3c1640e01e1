//! The log: the effects of calls in the order of their commits, until they are in the tables.
//!
//! A commit appends its effects as one row, which costs the same whichever counters they are on. What the log holds is
//! gathered for some seconds, merged, sorted, and written into the tables piece by piece along with later commits: a
//! counter that has changed a hundred times is written once, next to its neighbours, and a reservation that was made and
//! settled meanwhile not at all. The row of the service says how far this has come, in the same transactions, so that a
//! process that is killed at any moment is followed by one that goes on from there.

use std::time::{Duration, Instant};

use sqlx::{SqliteConnection, SqlitePool};

use super::{
    corrupt,
    rows::{Piece, RowWrite, Rows, write_rows},
    unavailable,
};
use crate::{
    core::{ids::PoolRevision, ledger::Change, units::Timestamp},
    store::StoreError,
};

/// Rows that are gathered at most before they are folded, whatever the time.
const GATHERED_MAX: usize = 200_000;
/// What a commit writes into the tables when the service stops: the bound on a stop is that of a disk.
const FINISHING_WEIGHT: usize = 20_000;
/// Entries that a commit deletes.
const DELETED_AT_ONCE: u64 = 64;
/// The encoding of entries, their first byte. It stands for three things, of which none may change without it: how a
/// [`Change`] is written, which rows it becomes, and their order, in which a fold that was cut off goes on.
const VERSION: u8 = 1;

/// The effects of one commit, by pool.
pub(super) type Effects<'a> = Vec<(PoolRevision, Vec<&'a Change>)>;

/// How the tables follow the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// How long effects are gathered: the tables are as far behind, and a start after a crash has as much to make up for.
    gather_time: Duration,
    /// What a commit writes into the tables at least, by [`RowWrite::weight`]; it is twice what it adds to the log, so that
    /// the tables catch up.
    piece_weight: usize,
}

impl Pace {
    /// Seconds behind, and about a millisecond more for a commit.
    pub(super) const USUAL: Pace = Pace { gather_time: Duration::from_secs(5), piece_weight: 250 };
}

/// Where a database's log is.
#[derive(Debug)]
pub(super) struct Log {
    pace: Pace,
    /// The newest entry.
    last: u64,
    /// What entries hold that are not being folded.
    gathered: Rows,
    /// When the oldest of them was appended.
    gathered_since: Option<Instant>,
    folding: Option<Fold>,
    marks: Marks,
    /// Entries up to this one are gone.
    deleted_to: u64,
}

/// Rows that are being written into the tables.
#[derive(Debug)]
struct Fold {
    /// The entry up to which they are.
    to: u64,
    rows: Vec<RowWrite>,
}

/// How far the tables are, as stored.
#[derive(Clone, Copy, Debug, Default, sqlx::FromRow)]
struct Marks {
    folded_to: i64,
    folding_to: i64,
    folding_rows: i64,
}

impl Log {
    /// Brings the tables up to date with the log that an earlier process left, and empties it.
    pub(super) async fn recover(connection: &SqlitePool, pace: Pace) -> Result<Log, StoreError> {
        let failed = unavailable("reading the log");
        let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await.map_err(&failed)?;
        let marks: Marks = sqlx::query_as("SELECT folded_to, folding_to, folding_rows FROM service")
            .fetch_one(&mut *transaction)
            .await
            .map_err(&failed)?;
        let (folding, _) = read(&mut transaction, marks.folded_to, marks.folding_to).await?;
        let (rest, last) = read(&mut transaction, marks.folding_to.max(marks.folded_to), i64::MAX).await?;
        let half_written = folding.in_order();
        let missing = half_written.get(marks.folding_rows as usize..).ok_or_else(|| {
            let expected =
                format!("at most {}, the rows of the entries that are being folded", half_written.len());
            corrupt("service.folding_rows", marks.folding_rows, expected)
        })?;
        write_all(missing, pace, &mut transaction).await.map_err(&failed)?;
        write_all(&rest.in_order(), pace, &mut transaction).await.map_err(&failed)?;
        let last = last.max(marks.folding_to).max(marks.folded_to);
        sqlx::query("DELETE FROM log").execute(&mut *transaction).await.map_err(&failed)?;
        let marks = Marks { folded_to: last, ..Marks::default() };
        sqlx::query("UPDATE service SET folded_to = ?1, folding_to = 0, folding_rows = 0")
            .bind(last)
            .execute(&mut *transaction)
            .await
            .map_err(&failed)?;
        transaction.commit().await.map_err(&failed)?;
        let last = last as u64;
        let (gathered, gathered_since, folding) = (Rows::default(), None, None);
        Ok(Log { pace, last, gathered, gathered_since, folding, marks, deleted_to: last })
    }

    /// Makes `effects` durable, and that the clock was seen at `seen`; brings the tables a piece further.
    pub(super) async fn commit(
        &mut self,
        connection: &SqlitePool,
        effects: &Effects<'_>,
        seen: Timestamp,
    ) -> Result<(), sqlx::Error> {
        self.start_folding(self.pace.gather_time);
        let added = effects.iter().map(|(_, changes)| changes.len()).sum::<usize>();
        let (piece, marks) = self.next_piece(self.pace.piece_weight.max(2 * added));
        let last = self.last + u64::from(!effects.is_empty());
        let entry = if effects.is_empty() { None } else { Some(encode(effects)?) };
        let delete_to = (marks.folded_to as u64).min(self.deleted_to + DELETED_AT_ONCE);
        let mut connection = connection.acquire().await?;
        let commit = piece
            .bind(sqlx::query(COMMIT))
            .bind(last as i64)
            .bind(entry)
            .bind(marks.folded_to)
            .bind(marks.folding_to)
            .bind(marks.folding_rows)
            .bind(seen.unix_ms() as i64)
            .bind(delete_to as i64);
        if let Err(error) = commit.execute(&mut *connection).await {
            // There is no transaction any more where SQLite has ended it by itself.
            let _ = sqlx::query("ROLLBACK").execute(&mut *connection).await;
            return Err(error);
        }
        (self.last, self.marks, self.deleted_to) = (last, marks, delete_to);
        if self.folding.as_ref().is_some_and(|fold| fold.to <= marks.folded_to as u64) {
            self.folding = None;
        }
        for (pool, changes) in effects {
            self.gathered.add(*pool, changes.iter().copied());
        }
        if !effects.is_empty() {
            self.gathered_since.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    /// How soon there is something to do although nothing is asked for; `None`: the tables are up to date.
    pub(super) fn due_in(&self) -> Option<Duration> {
        if self.folding.is_some() || self.deleted_to < self.marks.folded_to as u64 {
            return Some(Duration::ZERO);
        }
        self.gathered_since.map(|since| self.pace.gather_time.saturating_sub(since.elapsed()))
    }

    /// Brings the tables up to date, and empties the log.
    pub(super) async fn finish(
        &mut self,
        connection: &SqlitePool,
        seen: Timestamp,
    ) -> Result<(), sqlx::Error> {
        // Nobody waits for a commit any more.
        self.pace.piece_weight = self.pace.piece_weight.max(FINISHING_WEIGHT);
        while self.due_in().is_some() {
            self.start_folding(Duration::ZERO);
            self.commit(connection, &Vec::new(), seen).await?;
        }
        Ok(())
    }

    /// Takes what is gathered to be written, if nothing is being written and it has waited for `gather_time`.
    fn start_folding(&mut self, gather_time: Duration) {
        let old = self.gathered_since.is_some_and(|since| since.elapsed() >= gather_time);
        if self.folding.is_none() && (old || self.gathered.len() >= GATHERED_MAX) {
            self.gathered_since = None;
            let rows = std::mem::take(&mut self.gathered).in_order();
            self.folding = Some(Fold { to: self.last, rows });
        }
    }

    /// What is to be written into the tables next, and how far they are then.
    fn next_piece(&self, weight: usize) -> (Piece, Marks) {
        let Some(fold) = &self.folding else { return (Piece::default(), self.marks) };
        let rest = &fold.rows[self.marks.folding_rows as usize..];
        let piece = Piece::first_of(rest, weight);
        let to = fold.to as i64;
        let marks = if piece.len == rest.len() {
            Marks { folded_to: to, ..Marks::default() }
        } else {
            let folding_rows = self.marks.folding_rows + piece.len as i64;
            Marks { folding_to: to, folding_rows, ..self.marks }
        };
        (piece, marks)
    }
}

/// A whole commit as one text, so that it is one message to the thread of the database: each statement would wait for its
/// turn on a busy machine.
const COMMIT: &str = concat!(
    "BEGIN IMMEDIATE;",
    write_rows!(),
    "INSERT INTO log (seq, changes) SELECT $10, $11 WHERE $11 IS NOT NULL;
     UPDATE service SET folded_to = $12, folding_to = $13, folding_rows = $14, last_seen_ms = $15;
     DELETE FROM log WHERE seq <= $16;
     COMMIT;"
);

async fn write_all(
    mut rows: &[RowWrite],
    pace: Pace,
    connection: &mut SqliteConnection,
) -> Result<(), sqlx::Error> {
    while !rows.is_empty() {
        let piece = Piece::first_of(rows, pace.piece_weight);
        rows = &rows[piece.len..];
        piece.bind(sqlx::query(write_rows!())).execute(&mut *connection).await?;
    }
    Ok(())
}

fn encode(effects: &Effects<'_>) -> Result<Vec<u8>, sqlx::Error> {
    postcard::to_extend(effects, vec![VERSION]).map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

/// The entries after `after` and up to `to`, merged, and the last of them.
async fn read(connection: &mut SqliteConnection, after: i64, to: i64) -> Result<(Rows, i64), StoreError> {
    let failed = unavailable("reading the log");
    let select = sqlx::query_as("SELECT seq, changes FROM log WHERE seq > ?1 AND seq <= ?2 ORDER BY seq");
    let entries: Vec<(i64, Vec<u8>)> =
        select.bind(after).bind(to).fetch_all(connection).await.map_err(failed)?;
    let mut rows = Rows::default();
    for (seq, entry) in &entries {
        for (pool, changes) in decode(*seq, entry)? {
            rows.add(pool, &changes);
        }
    }
    Ok((rows, entries.last().map_or(0, |(seq, _)| *seq)))
}

fn decode(seq: i64, entry: &[u8]) -> Result<Vec<(PoolRevision, Vec<Change>)>, StoreError> {
    let what = || format!("log entry {seq}");
    match entry.split_first() {
        Some((&VERSION, changes)) => postcard::from_bytes(changes)
            .map_err(|error| corrupt(what(), changes, format!("changes of a pool ({error})"))),
        version => {
            let version = version.map(|(version, _)| version);
            Err(corrupt(
                what(),
                version,
                format!("version {VERSION}: start the version that wrote it once, and stop it with SIGTERM"),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::{BTreeMap, BTreeSet},
        sync::Arc,
    };

    use proptest::prelude::*;
    use sqlx::sqlite::SqlitePoolOptions;

    use super::*;
    use crate::{
        core::{
            account::{AccountChange, AccountKey, Head, Share, ShareChange},
            burn_rate::{BurnRate, Sample},
            charge::CounterKey,
            ids::{ApiKeyId, CallId, ConnectionId, Fingerprint},
            ledger::Hold,
            memory::RecordMemory,
            plan::DimensionKey,
            units::Unit,
            window::Window,
        },
        store::sqlite::{MIGRATIONS, load},
    };

    const POOL: PoolRevision = PoolRevision(7);
    const DIMENSION: DimensionKey = DimensionKey { unit: Unit::Tokens, window: Window::HOURLY };
    const NOW: Timestamp = Timestamp::from_unix_ms(1_782_864_000_000);
    /// Late in the text of a commit.
    const BREAK: &str =
        "CREATE TRIGGER sick BEFORE UPDATE ON service BEGIN SELECT RAISE(ABORT, 'the disk is sick'); END";
    /// Everything is due at once, and a piece is a row or two.
    const HASTY: Pace = Pace { gather_time: Duration::ZERO, piece_weight: 2 };

    #[derive(Clone, Debug)]
    enum Step {
        Commit(Vec<Op>),
        /// A commit of nothing but what the log has to do.
        Idle,
        /// A commit that the disk does not take.
        Fail(Vec<Op>),
        /// The process is killed, and another one starts.
        Kill,
    }

    #[derive(Clone, Debug)]
    enum Op {
        Consume(usize, u64),
        Reset(usize),
        Hold(u8),
        /// As when the clock goes back: freed, and held to another deadline.
        Move(u8),
        Free(u8),
        Sample,
        Remember(u8),
        /// A key gets another part of an account, or none.
        Part(usize, u64),
        /// Nothing is known of the account any more.
        Forget,
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..4usize, 1..9u64).prop_map(|(key, steps)| Op::Consume(key, steps)),
            1 => (0..4usize).prop_map(Op::Reset),
            3 => (0..6u8).prop_map(Op::Hold),
            1 => (0..6u8).prop_map(Op::Move),
            3 => (0..6u8).prop_map(Op::Free),
            1 => Just(Op::Sample),
            1 => any::<u8>().prop_map(Op::Remember),
            2 => (0..4usize, 0..3u64).prop_map(|(key, part)| Op::Part(key, part)),
            1 => Just(Op::Forget),
        ]
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => prop::collection::vec(any_op(), 1..6).prop_map(Step::Commit),
            4 => Just(Step::Idle),
            1 => Just(Step::Kill),
            1 => prop::collection::vec(any_op(), 1..6).prop_map(Step::Fail),
        ]
    }

    /// What the tables should add up to.
    #[derive(Clone, Debug, Default, PartialEq)]
    struct Truth {
        consumed: BTreeMap<String, i64>,
        open: BTreeMap<u8, Timestamp>,
        sampled: u64,
        remembered: BTreeSet<u8>,
        account: Option<u64>,
        parts: BTreeMap<String, u64>,
    }

    impl Truth {
        fn effects(&mut self, op: &Op) -> Vec<Change> {
            let name = |key: &usize| format!("key-{key}");
            match op {
                Op::Consume(key, steps) => self.consume(name(key), *steps as i64),
                Op::Reset(key) => {
                    let held = self.consumed.get(&name(key)).copied().unwrap_or_default();
                    self.consume(name(key), -held)
                }
                Op::Hold(id) if !self.open.contains_key(id) => self.hold(*id, NOW.plus_ms(60_000)),
                Op::Move(id) if self.open.contains_key(id) => {
                    let mut changes = self.free(*id);
                    changes.extend(self.hold(*id, NOW.plus_ms(30_000)));
                    changes
                }
                Op::Free(id) if self.open.contains_key(id) => self.free(*id),
                Op::Sample => {
                    self.sampled += 1;
                    let last = Some(Sample { at: NOW, cumulative: self.sampled });
                    let after = BurnRate { steps_per_second: None, last };
                    vec![Change::Sampled { dimension: DIMENSION, before: BurnRate::default(), after }]
                }
                Op::Remember(id) if self.remembered.insert(*id) => {
                    let memory = RecordMemory {
                        fingerprint: Fingerprint { key: 1, call: 2 },
                        ends_at: NOW.plus_ms(60_000 * u64::from(id % 3)),
                        late: false,
                    };
                    vec![Change::Record(CallId([*id; 16]), memory)]
                }
                Op::Part(key, part) => {
                    let before = self.parts.insert(name(key), *part).unwrap_or_default();
                    self.parts.retain(|_, part| *part > 0);
                    vec![self.account(vec![(name(key), before, *part)])]
                }
                Op::Forget => {
                    let parts = std::mem::take(&mut self.parts);
                    let change = self.account(parts.into_iter().map(|(key, part)| (key, part, 0)).collect());
                    self.account = None;
                    let Change::Account(mut change) = change else { unreachable!() };
                    change.after = None;
                    vec![Change::Account(change)]
                }
                Op::Hold(_) | Op::Move(_) | Op::Free(_) | Op::Remember(_) => Vec::new(),
            }
        }

        fn account(&mut self, shares: Vec<(String, u64, u64)>) -> Change {
            let parts = self.parts.values().sum();
            self.account = Some(parts);
            let shares = shares.into_iter().map(|(key, before, after)| ShareChange {
                key: ApiKeyId::parse("key", &key).unwrap(),
                before: Share::of(before),
                after: Share::of(after),
            });
            let connection = ConnectionId::parse("connection", "c").unwrap();
            Change::Account(Box::new(AccountChange {
                account: AccountKey { connection, dimension: DIMENSION },
                before: None,
                after: Some(Head { parts, ..Head::default() }),
                shares: shares.collect(),
                risen: 0,
            }))
        }

        fn consume(&mut self, key: String, delta: i64) -> Vec<Change> {
            *self.consumed.entry(key.clone()).or_default() += delta;
            self.consumed.retain(|_, held| *held > 0);
            let api_key = ApiKeyId::parse("key", &key).unwrap();
            let bucket = DIMENSION.window.bucket(NOW);
            vec![Change::Consumed { api_key, counter: CounterKey::from(DIMENSION), bucket, delta }]
        }

        fn hold(&mut self, id: u8, deadline: Timestamp) -> Vec<Change> {
            self.open.insert(id, deadline);
            vec![Change::Held([id; 12], Arc::new(held_until(deadline)))]
        }

        fn free(&mut self, id: u8) -> Vec<Change> {
            let deadline = self.open.remove(&id).unwrap();
            vec![Change::Freed([id; 12], Arc::new(held_until(deadline)))]
        }
    }

    fn held_until(deadline: Timestamp) -> Hold {
        Hold {
            api_key: ApiKeyId::parse("key", "key-0").unwrap(),
            connection: ConnectionId::parse("connection", "c").unwrap(),
            model: None,
            request_id: String::new(),
            deadline,
            amounts: [(CounterKey::from(DIMENSION), 3)].into_iter().collect(),
        }
    }

    async fn read_tables(connection: &SqlitePool) -> Truth {
        let mut found = Truth::default();
        let mut twice = None;
        load::read(connection, NOW, |_, change| match change {
            Change::Consumed { api_key, delta, .. } => {
                found.consumed.insert(api_key.to_string(), delta);
            }
            Change::Held(random, hold) => drop(found.open.insert(random[0], hold.deadline)),
            Change::Sampled { after, .. } => found.sampled = after.last.unwrap().cumulative,
            Change::Account(change) => {
                found.account = change.after.map(|head| head.parts).or(found.account);
                let shares = change.shares.into_iter();
                found.parts.extend(shares.map(|share| (share.key.to_string(), share.after.part)));
            }
            Change::Record(call, _) if !found.remembered.insert(call.0[0]) => twice = Some(call),
            _ => {}
        })
        .await
        .unwrap();
        assert_eq!(twice, None, "a call is in the tables once");
        found
    }

    async fn run(steps: &[Step]) {
        let one = SqlitePoolOptions::new().max_connections(1).idle_timeout(None).max_lifetime(None);
        let connection = one.connect("sqlite::memory:").await.unwrap();
        MIGRATIONS.run(&connection).await.unwrap();
        let mut log = Log::recover(&connection, HASTY).await.unwrap();
        let mut truth = Truth::default();
        for step in steps {
            let changes: Vec<Change> = match step {
                Step::Commit(ops) => ops.iter().flat_map(|op| truth.effects(op)).collect(),
                Step::Idle => Vec::new(),
                Step::Fail(ops) => {
                    let changes: Vec<Change> = ops.iter().flat_map(|op| truth.clone().effects(op)).collect();
                    sqlx::query(BREAK).execute(&connection).await.unwrap();
                    let effects = vec![(POOL, changes.iter().collect())];
                    assert!(log.commit(&connection, &effects, NOW).await.is_err());
                    sqlx::query("DROP TRIGGER sick").execute(&connection).await.unwrap();
                    continue;
                }
                Step::Kill => {
                    log = Log::recover(&connection, HASTY).await.unwrap();
                    assert_eq!(read_tables(&connection).await, truth);
                    continue;
                }
            };
            let effects = if changes.is_empty() { vec![] } else { vec![(POOL, changes.iter().collect())] };
            log.commit(&connection, &effects, NOW).await.unwrap();
        }
        log.finish(&connection, NOW).await.unwrap();
        assert_eq!(read_tables(&connection).await, truth);
        let left: i64 = sqlx::query_scalar("SELECT count(*) FROM log").fetch_one(&connection).await.unwrap();
        assert_eq!(left, 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// Wherever in its work a process is killed, the next one finds in the tables what was committed, once.
        #[test]
        fn the_tables_and_the_log_are_always_the_whole_truth(steps in prop::collection::vec(any_step(), 1..40)) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(run(&steps));
        }
    }
}
