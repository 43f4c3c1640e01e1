//! An hour of a Codex account: streams of a second to ten minutes, whose headers were read at their start and are told at
//! their end, by two routers; figures in whole per cents; ends that wander; an owner who uses the account aside.

use proptest::prelude::*;
use quota_share::core::{
    account::Observation,
    headers::Reset,
    units::{Timestamp, Unit},
};

use crate::{
    cases::for_all,
    model::{Call, Rig, START, allocation, dimension, dimension_spec, pool, tokens},
};

const HOUR_MS: u64 = 3_600_000;
const KEYS: [&str; 3] = ["a", "b", "c"];
/// A per cent of the account is as many tokens.
const TOKENS_PER_CENT: f64 = 1e6;
/// The provider's window began a while ago.
const WINDOW_END: Timestamp = START.plus_ms(4 * HOUR_MS);

/// A request, from its first header to its last token.
#[derive(Clone, Debug)]
struct Stream {
    key: usize,
    start_ms: u64,
    length_ms: u64,
    /// Of the account, counted by the provider when it ends.
    per_cent: f64,
    /// How far the end that its headers name is off.
    wander_ms: i64,
}

#[derive(Clone, Debug)]
enum Event {
    Start(usize),
    End(usize),
    /// The owner uses so much aside.
    Owner(f64),
}

fn any_stream() -> impl Strategy<Value = Stream> {
    let length_ms = prop_oneof![3 => 1_000..60_000u64, 1 => 60_000..600_000u64];
    let per_cent = (1..=500u32).prop_map(|thousandths| f64::from(thousandths) / 1e3);
    (0..KEYS.len(), 0..HOUR_MS, length_ms, per_cent, -3_000..=3_000i64).prop_map(
        |(key, start_ms, length_ms, per_cent, wander_ms)| Stream {
            key,
            start_ms,
            length_ms,
            per_cent,
            wander_ms,
        },
    )
}

/// The provider, and what the service is told of it.
struct Hour {
    rig: Rig,
    streams: Vec<Stream>,
    /// What the provider says at the start of each stream.
    figures: Vec<f64>,
    /// What each key has really used, and the owner.
    used: [f64; KEYS.len()],
    owner: f64,
}

impl Hour {
    fn new(streams: Vec<Stream>) -> Self {
        let keys = KEYS.map(|key| allocation(key, 100.0 / 3.0, "hard"));
        let plan = vec![dimension_spec(Unit::Percent, "5h", Some(100.0))];
        let figures = vec![0.0; streams.len()];
        let rig = Rig::new(pool(keys.into()), plan, START);
        Self { rig, streams, figures, used: [0.0; KEYS.len()], owner: 0.0 }
    }

    /// All that happens, in its order.
    fn events(&self, owner: &[(u64, f64)]) -> Vec<(u64, Event)> {
        let mut events: Vec<(u64, Event)> = Vec::new();
        for (index, stream) in self.streams.iter().enumerate() {
            events.push((stream.start_ms, Event::Start(index)));
            events.push((stream.start_ms + stream.length_ms, Event::End(index)));
        }
        events.extend(owner.iter().map(|(at, per_cent)| (*at, Event::Owner(*per_cent))));
        events.sort_by_key(|(at, _)| *at);
        events
    }

    fn happen(&mut self, at_ms: u64, event: &Event) {
        self.rig.now = START.plus_ms(at_ms);
        match *event {
            Event::Owner(per_cent) => self.owner += per_cent,
            // Whole per cents, rounded down.
            Event::Start(index) => self.figures[index] = (self.used.iter().sum::<f64>() + self.owner).floor(),
            Event::End(index) => self.end(index),
        }
    }

    fn end(&mut self, index: usize) {
        let Stream { key, start_ms, per_cent, wander_ms, .. } = self.streams[index];
        self.used[key] += per_cent;
        let end = Timestamp::from_unix_ms(WINDOW_END.unix_ms().saturating_add_signed(wander_ms));
        self.rig.observations = vec![Observation {
            dimension: dimension(Unit::Percent, "5h"),
            fraction: self.figures[index] / 100.0,
            observed_at: START.plus_ms(start_ms),
            reset: Reset::WindowEnd(end),
            life_ms: 30_000,
            believed: false,
            age_known: true,
            alone: true,
        }];
        let cost = tokens((per_cent * TOKENS_PER_CENT) as u64);
        self.rig.record(&Call::new(KEYS[key], cost), "", "").expect("nothing to contradict");
    }

    /// What is known: the figure, what is external, and each key's part, in per cents.
    fn known(&mut self) -> (f64, f64, [f64; KEYS.len()]) {
        let of = dimension(Unit::Percent, "5h");
        let parts = KEYS.map(|key| self.rig.of_key(key, of).0 / 1e6);
        let usage = self.rig.usage();
        let account = usage.accounts[0].first();
        account.map_or((0.0, 0.0, parts), |account| {
            (account.fraction * 100.0, account.external as f64 / 1e6, parts)
        })
    }

    /// What streams that are under way, or have ended since the last stream started, will have used.
    fn in_flight(&self, at_ms: u64) -> f64 {
        let seen = self.streams.iter().map(|stream| (stream.start_ms, stream.start_ms + stream.length_ms));
        let last_figure = seen.filter(|(_, end)| *end <= at_ms).map(|(start, _)| start).max().unwrap_or(0);
        let out =
            |stream: &&Stream| stream.start_ms <= at_ms && stream.start_ms + stream.length_ms > last_figure;
        self.streams.iter().filter(out).map(|stream| stream.per_cent).sum()
    }
}

fn any_hour() -> impl Strategy<Value = Vec<Stream>> {
    prop::collection::vec(any_stream(), 20..150)
}

#[test]
fn parts_and_external_are_the_figure_and_nothing_resets_it() {
    let owner = prop::collection::vec((0..HOUR_MS, (1..2_000u32).prop_map(|n| f64::from(n) / 1e3)), 0..20);
    for_all(200, (any_hour(), owner), |(streams, owner)| {
        let mut hour = Hour::new(streams);
        let mut before = 0.0;
        for (at_ms, event) in hour.events(&owner) {
            hour.happen(at_ms, &event);
            let (figure, external, parts) = hour.known();
            let sum = external + parts.iter().sum::<f64>();
            prop_assert!((figure - sum).abs() < 1e-9, "{parts:?} and {external} of {figure}");
            prop_assert!(figure >= before, "{figure} after {before} at {at_ms}");
            before = figure;
        }
        Ok(())
    });
}

#[test]
fn while_the_owner_is_idle_each_part_is_near_the_truth() {
    for_all(300, any_hour(), |streams| {
        let mut hour = Hour::new(streams);
        for (at_ms, event) in hour.events(&[]) {
            hour.happen(at_ms, &event);
            let (_, _, parts) = hour.known();
            let bound = 2.0 + hour.in_flight(at_ms);
            for (key, (part, used)) in parts.iter().zip(hour.used).enumerate() {
                let off = (part - used).abs();
                prop_assert!(off <= bound, "{}: {part} of {used}, off by {off} with {bound}", KEYS[key]);
            }
        }
        Ok(())
    });
}
