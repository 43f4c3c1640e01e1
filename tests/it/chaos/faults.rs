//! What goes wrong, drawn from the seed: each process and each connection has troubles of its own, and some meet.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{run::Course, setting::Setting};
use crate::harness::{Proxy, TestRedis, TestReplica};

/// The longest that anything is away, where there is time for it.
const AWAY_MS_MAX: u64 = 5_000;
/// The longest that all is well with Redis.
const LONGEST_QUIET_MS: u64 = 6_000;

/// A family of faults, as an option names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// A replica ends, killed or told to, and comes back to what it has written.
    Kill,
    /// Redis ends, killed or told to, and comes back with what it has written.
    Restart,
    /// A connection between a replica and Redis breaks, is refused, or loses answers.
    Cut,
    /// Redis, or one connection to it, stands still.
    Hang,
}

impl FaultKind {
    pub(super) const COUNT: usize = 4;
    pub(super) const EACH: [Self; Self::COUNT] = [Self::Kill, Self::Restart, Self::Cut, Self::Hang];
    pub(super) const ALL: [bool; Self::COUNT] = [true; Self::COUNT];

    pub(super) fn name(self) -> &'static str {
        match self {
            FaultKind::Kill => "kill",
            FaultKind::Restart => "restart",
            FaultKind::Cut => "cut",
            FaultKind::Hang => "hang",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    ReplicaKilled,
    ReplicaToldToEnd,
    RedisKilled,
    RedisToldToEnd,
    RedisStopped,
    LineCut,
    LineRefused,
    AnswersLost,
    LineSwallows,
    LineHangs,
}

impl Fault {
    // Most are killed: that is harder.
    const OF_REPLICA: [Self; 3] = [Self::ReplicaKilled, Self::ReplicaKilled, Self::ReplicaToldToEnd];
    const OF_REDIS: [Self; 3] = [Self::RedisKilled, Self::RedisToldToEnd, Self::RedisStopped];
    const OF_LINE: [Self; 5] =
        [Self::LineCut, Self::LineRefused, Self::AnswersLost, Self::LineSwallows, Self::LineHangs];

    fn kind(self) -> FaultKind {
        match self {
            Fault::ReplicaKilled | Fault::ReplicaToldToEnd => FaultKind::Kill,
            Fault::RedisKilled | Fault::RedisToldToEnd => FaultKind::Restart,
            Fault::LineCut | Fault::LineRefused | Fault::AnswersLost => FaultKind::Cut,
            Fault::RedisStopped | Fault::LineSwallows | Fault::LineHangs => FaultKind::Hang,
        }
    }
}

/// A fault that was, for the report.
#[derive(Clone, Debug)]
pub(super) struct Happened {
    pub(super) kind: FaultKind,
    /// Since the run began.
    pub(super) at: Duration,
    pub(super) what: String,
}

/// The troubles of one thing, drawn as they come.
#[derive(Debug)]
struct Troubles {
    random: StdRng,
    possible: Vec<Fault>,
    quiet_ms_max: u64,
    away_ms_max: u64,
    happened: Vec<Happened>,
}

impl Troubles {
    /// Those of the thing with this number: no two have the same.
    fn new(setting: &Setting, number: usize, possible: &[Fault]) -> Self {
        let run_ms = setting.seconds * 1_000;
        // There are several of everything else, and all of it together would hardly ever work.
        let rarely = if number == 0 { 1 } else { 2 };
        let random = StdRng::seed_from_u64(setting.seed.wrapping_mul(1_000).wrapping_add(number as u64));
        let asked = |fault: &Fault| setting.faults[fault.kind() as usize];
        Self {
            random,
            possible: possible.iter().copied().filter(asked).collect(),
            quiet_ms_max: rarely * (run_ms / 4).min(LONGEST_QUIET_MS),
            away_ms_max: (run_ms / 6).min(AWAY_MS_MAX),
            happened: Vec::new(),
        }
    }

    /// Waits until something goes wrong; `None`: the run is over. Returns for how long, too.
    async fn next(&mut self, course: &Course, whom: &str) -> Option<(Fault, Duration)> {
        if self.possible.is_empty() {
            course.pause(Duration::MAX).await;
        }
        let quiet_ms = self.random.random_range(self.quiet_ms_max / 4..=self.quiet_ms_max);
        course.pause(Duration::from_millis(quiet_ms)).await;
        if course.is_over() {
            return None;
        }
        let fault = self.possible[self.random.random_range(0..self.possible.len())];
        let away = Duration::from_millis(self.random.random_range(1..=self.away_ms_max));
        let what = format!("{whom}: {fault:?}, {away:?}");
        self.happened.push(Happened { kind: fault.kind(), at: course.elapsed(), what });
        Some((fault, away))
    }
}

/// Ends a replica now and then. Returns it as it is when the run is over: it runs.
pub(super) async fn trouble_replica(
    mut replica: TestReplica,
    number: usize,
    setting: Setting,
    course: Course,
) -> (TestReplica, Vec<Happened>) {
    let mut troubles = Troubles::new(&setting, 1 + 2 * number, &Fault::OF_REPLICA);
    while let Some((fault, away)) = troubles.next(&course, &format!("replica {number}")).await {
        match fault {
            Fault::ReplicaToldToEnd => replica.stop().await,
            _ => replica.kill(),
        }
        course.pause(away / 3).await;
        replica.restart().await;
    }
    (replica, troubles.happened)
}

/// Ends and stops Redis now and then.
pub(super) async fn trouble_redis(
    mut redis: TestRedis,
    setting: Setting,
    course: Course,
) -> (TestRedis, Vec<Happened>) {
    let mut troubles = Troubles::new(&setting, 0, &Fault::OF_REDIS);
    while let Some((fault, away)) = troubles.next(&course, "Redis").await {
        match fault {
            Fault::RedisStopped => {
                redis.pause().await;
                course.pause(away).await;
                redis.wake();
            }
            Fault::RedisToldToEnd => {
                redis.stop().await;
                course.pause(away / 3).await;
                redis.restart().await;
            }
            _ => {
                redis.kill();
                course.pause(away / 3).await;
                redis.restart().await;
            }
        }
    }
    (redis, troubles.happened)
}

/// Has one replica's connections to Redis break, stand still or lose what comes back.
pub(super) async fn trouble_line(
    mut line: Proxy,
    number: usize,
    setting: Setting,
    course: Course,
) -> (Proxy, Vec<Happened>) {
    let mut troubles = Troubles::new(&setting, 2 + 2 * number, &Fault::OF_LINE);
    while let Some((fault, away)) = troubles.next(&course, &format!("line of replica {number}")).await {
        match fault {
            Fault::LineRefused => {
                line.refuse(true).await;
                line.cut().await;
                course.pause(away).await;
                line.refuse(false).await;
            }
            Fault::AnswersLost => line.lose_next_answers(1 + away.as_millis() as u64 % 5),
            Fault::LineSwallows => {
                line.swallow(true);
                course.pause(away).await;
                // No connection goes on of which a part was lost: no network does that.
                line.refuse(true).await;
                line.cut().await;
                line.swallow(false);
                line.refuse(false).await;
            }
            Fault::LineHangs => {
                line.hang(true);
                course.pause(away).await;
                line.hang(false);
            }
            _ => line.cut().await,
        }
    }
    // What was still to be lost is not.
    line.lose_next_answers(0);
    (line, troubles.happened)
}
