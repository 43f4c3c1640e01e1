//! What holds of the rule and of a ledger whatever happens.

use std::collections::BTreeMap;

use proptest::{prelude::*, sample::select, test_runner::TestCaseError};
use quota_share::core::{
    admission::{BlockReason, Finding, Verdict},
    charge::{Charge, CounterKey},
    ids::ApiKeyId,
    ledger::{CLOCK_STEP_MS, Change, PoolLedger, RESERVE_MS_MAX},
    units::{Amount, Cost, Timestamp, Unit},
    window::Window,
};

use crate::{
    cases::{
        Case, MIXED, Player, SHORT, Step, any_call, any_case, any_cost, any_history, any_weights, for_all,
    },
    model::{Call, Rig, START, allocation, dimension_spec, pool, tokens},
};

const CASES: u32 = 500;
const WEEK_MS: u64 = 7 * 86_400_000;

#[test]
fn more_consumption_never_turns_block_into_allow() {
    for_all(CASES, (any_case(SHORT), any_call(), any_cost()), |(case, more, cost)| {
        let mut player = case.played();
        let question = player.question(&case);
        let before = player.rig.ask(&question);
        let more = Call { cost: Cost { percent: Amount::ZERO, ..cost }, ..more };
        player.rig.record(&more, "", "").expect("no id to contradict");
        let after = player.rig.ask(&question);
        for (index, finding) in before.findings.iter().enumerate() {
            let freed = finding.block.is_some() && after.findings[index].block.is_none();
            prop_assert!(!freed, "check {index}: {finding:?}, then {:?}", after.findings[index]);
        }
        Ok(())
    });
}

#[test]
fn time_alone_never_turns_allow_into_block() {
    let waits = prop::collection::vec(1..20_000u64, 40);
    for_all(CASES, (any_case(SHORT), waits), |(case, mut waits)| {
        let mut player = case.played();
        let question = player.question(&case);
        let start = player.rig.now;
        let mut before = player.rig.ask(&question);
        waits.sort_unstable();
        for wait_ms in waits {
            player.rig.now = start.plus_ms(wait_ms);
            let after = player.rig.ask(&question);
            for (index, finding) in before.findings.iter().enumerate() {
                let lost = finding.block.is_none() && after.findings[index].block.is_some();
                prop_assert!(!lost, "check {index} after {wait_ms} ms: {:?}", after.findings[index]);
            }
            before = after;
        }
        Ok(())
    });
}

/// Amounts whose product with the length of a window needs rounding.
#[test]
fn the_edge_of_a_bucket_never_turns_allow_into_block_however_large_the_amounts() {
    let amounts = (1..=Amount::MAX.steps() / 2, 0..1_000u64);
    for_all(2_000, (amounts, select(MIXED)), |((consumed, estimate), window)| {
        let limit = (consumed + estimate) as f64;
        let keys = vec![allocation("a", 100.0, "hard")];
        let length_ms = Window::parse(window).expect("a window").length_ms();
        let plan = vec![dimension_spec(Unit::Tokens, window, Some(limit))];
        let mut rig = Rig::new(pool(keys), plan, START);
        rig.record(&Call::new("a", tokens(consumed)), "", "").expect("no id to contradict");
        let question = Call::new("a", tokens(estimate.max(1)));
        rig.wait(length_ms - 1);
        let before = rig.ask(&question).block();
        rig.wait(1);
        let after = rig.ask(&question).block();
        prop_assert!(before.is_some() || after.is_none(), "{after:?} at the edge");
        Ok(())
    });
}

#[test]
fn soft_never_gives_fair_share() {
    for_all(CASES, any_case(SHORT), |mut case| {
        set_policies(&mut case, &["soft"]);
        let mut player = case.played();
        for call in everybody(&player, &case) {
            let findings = player.rig.ask(&call).findings;
            prop_assert!(findings.iter().all(|finding| finding.block != Some(BlockReason::FairShare)));
        }
        Ok(())
    });
}

#[test]
fn a_soft_or_burst_verdict_depends_on_weights_only_for_deprioritize() {
    /// All that is not about the share itself.
    fn but_for_the_share(verdict: &Verdict) -> Verdict {
        let findings = verdict.findings.iter();
        let findings =
            findings.map(|finding| Finding { deprioritize: false, borrowing: false, ..*finding }).collect();
        Verdict { findings, ..verdict.clone() }
    }
    for_all(CASES, (any_case(SHORT), any_weights(4)), |(mut case, weights)| {
        set_policies(&mut case, &["soft", "burst"]);
        let mut other = case.clone();
        for (own, weight) in other.pool.allocations.iter_mut().zip(weights) {
            own.weight = weight;
        }
        let (mut one, mut two) = (case.played(), other.played());
        for call in everybody(&one, &case) {
            let (one, two) = (one.rig.ask(&call), two.rig.ask(&call));
            prop_assert_eq!(but_for_the_share(&one), but_for_the_share(&two));
        }
        Ok(())
    });
}

#[test]
fn keys_sum_to_the_pool() {
    for_all(CASES, (any_case(MIXED), 0..4_000u64), |(case, wait_ms)| {
        let mut player = case.played();
        player.rig.wait(wait_ms);
        keys_sum_to_total(&mut player.rig)
    });
}

#[test]
fn keys_sum_to_the_pool_after_the_clock_went_back() {
    for_all(CASES, any_clock_step(), |(case, forth_ms, more, back_ms)| {
        let mut player = case.played();
        player.rig.wait(forth_ms);
        player.play(&more);
        player.rig.now = Timestamp::from_unix_ms(player.rig.now.unix_ms() - back_ms);
        keys_sum_to_total(&mut player.rig)
    });
}

#[test]
fn a_blocked_request_is_blocked_until_retry_after_and_allowed_at_it() {
    for_all(CASES, any_case(MIXED), |case| {
        let mut player = case.played();
        let question = player.question(&case);
        let verdict = player.rig.ask(&question);
        match verdict.allowed_after_ms {
            Some(wait_ms) => {
                prop_assert!(wait_ms >= 1);
                prop_assert!(player.rig.ask_after(&question, wait_ms - 1).block().is_some());
                prop_assert_eq!(player.rig.ask_after(&question, wait_ms).block(), None);
            }
            None => {
                let long = player.rig.ask_after(&question, 2 * WEEK_MS + RESERVE_MS_MAX);
                prop_assert_eq!(long.block().is_some(), verdict.block().is_some());
            }
        }
        Ok(())
    });
}

#[test]
fn what_remains_is_the_largest_estimate_that_would_be_allowed_now() {
    for_all(CASES, any_case(MIXED), |case| {
        let mut player = case.played();
        for call in everybody(&player, &case) {
            let reading = player.rig.reading(&call);
            let charge = player.rig.charge(&call);
            let remaining: Vec<_> =
                charge.findings(&reading).iter().map(|finding| finding.remaining).collect();
            let blocks = |index: usize, steps: u64| {
                let mut other: Charge = charge.clone();
                other.checks[index].estimate = Amount::saturating(steps);
                other.findings(&reading)[index].block
            };
            for (index, remaining) in remaining.into_iter().enumerate() {
                let most = remaining.map_or(Amount::MAX.steps(), |steps| steps.floor() as u64);
                // Where nothing at all is left, not even a request that costs nothing is allowed.
                if remaining != Some(0.0) {
                    prop_assert_eq!(blocks(index, most), None, "{} of {:?}", most, remaining);
                }
                if remaining.is_some() {
                    prop_assert!(blocks(index, most + 1).is_some(), "{most} + 1 of {remaining:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_hold_that_is_released_leaves_no_trace_in_the_counters() {
    for_all(CASES, (any_case(MIXED), 1..RESERVE_MS_MAX), |(case, reserve_for_ms)| {
        let mut player = case.played();
        let question = player.question(&case);
        let before = player.snapshot();
        let (verdict, reserved) = player.rig.hold(&question, reserve_for_ms, "").expect("no request id");
        prop_assert_eq!(reserved.is_some(), verdict.block().is_none());
        if let Some(reserved) = reserved {
            let held = player.rig.usage();
            prop_assert_eq!(held.open_reservations as u64, player.rig.ledger.size().open_reservations);
            prop_assert_eq!(player.rig.ledger.release(reserved.id, None, player.rig.now), Ok(true));
        }
        prop_assert_eq!(player.snapshot(), before);
        Ok(())
    });
}

#[test]
fn reverting_what_was_done_restores_every_reading_and_every_answer_to_come() {
    let strategy = (any_case(MIXED), any_history(), any_history());
    for_all(CASES, strategy, |(case, undone, next)| {
        let mut untouched = case.played();
        let mut player = untouched.clone();
        player.rig.ledger.take_changes();
        player.play(&undone);
        untouched.rig.now = player.rig.now;
        let changes = player.rig.ledger.take_changes();
        player.rig.ledger.revert(changes);
        player.made.clone_from(&untouched.made);
        prop_assert_eq!(player.snapshot(), untouched.snapshot());
        // Reservations are named in the order in which they are made.
        player.rig.skip_names_of(&untouched.rig);
        prop_assert_eq!(player.play(&next), untouched.play(&next));
        prop_assert_eq!(player.snapshot(), untouched.snapshot());
        Ok(())
    });
}

#[test]
fn a_ledger_that_is_restored_from_its_changes_reads_and_answers_alike() {
    for_all(CASES, (any_case(MIXED), 0..2_000u64, any_history()), |(case, wait_ms, next)| {
        let mut player = case.played();
        player.rig.wait(wait_ms);
        let before = player.counted();
        let mut restored = restored(&mut player);
        prop_assert_eq!(restored.counted(), before);
        prop_assert_eq!(restored.play(&next), player.play(&next));
        prop_assert_eq!(restored.counted(), player.counted());
        Ok(())
    });
}

#[test]
fn a_ledger_that_is_restored_after_the_clock_went_back_reads_alike() {
    for_all(CASES, (any_case(MIXED), CLOCK_STEP_MS + 1..WEEK_MS), |(case, back_ms)| {
        let mut player = case.played();
        player.rig.now = Timestamp::from_unix_ms(player.rig.now.unix_ms() - back_ms);
        let before = player.counted();
        prop_assert_eq!(restored(&mut player).counted(), before);
        Ok(())
    });
}

#[test]
fn while_the_clock_is_back_by_no_more_than_an_hour_time_stands_still() {
    for_all(CASES, (any_case(MIXED), 0..=CLOCK_STEP_MS, any_history()), |(case, back_ms, next)| {
        let mut player = case.played();
        player.snapshot();
        let mut stepped = player.clone();
        stepped.rig.now = Timestamp::from_unix_ms(player.rig.now.unix_ms() - back_ms);
        prop_assert_eq!(stepped.snapshot(), player.snapshot());
        let standing = |steps: &[Step]| -> Vec<Step> {
            steps.iter().map(|step| Step { wait_ms: 0, ..step.clone() }).collect()
        };
        prop_assert_eq!(stepped.play(&standing(&next)), player.play(&standing(&next)));
        prop_assert_eq!(stepped.snapshot(), player.snapshot());
        Ok(())
    });
}

#[test]
fn a_clock_that_goes_back_further_is_believed_and_loses_nothing_that_is_held() {
    for_all(CASES, (any_case(MIXED), CLOCK_STEP_MS + 1..WEEK_MS), |(case, back_ms)| {
        let mut player = case.played();
        let open = player.rig.usage();
        let (consumed, reserved): (Vec<f64>, Vec<f64>) = player.rig.totals().into_iter().unzip();
        player.rig.now = Timestamp::from_unix_ms(player.rig.now.unix_ms() - back_ms);
        let after = player.rig.usage();
        prop_assert_eq!(after.at, player.rig.now);
        prop_assert_eq!(after.open_reservations, open.open_reservations);
        let (seen, kept): (Vec<f64>, Vec<f64>) = player.rig.totals().into_iter().unzip();
        prop_assert_eq!(kept, reserved);
        // What was recorded just before is in view, none of it faded further than before.
        for (consumed, seen) in consumed.iter().zip(&seen) {
            prop_assert!(seen >= consumed, "{seen} of {consumed}");
        }
        player.rig.wait(RESERVE_MS_MAX);
        prop_assert_eq!(player.rig.usage().open_reservations, 0);
        Ok(())
    });
}

/// A pool with a history, a wait, more history, and a step back of more than an hour.
fn any_clock_step() -> impl Strategy<Value = (Case, u64, Vec<Step>, u64)> {
    let hour_ms = CLOCK_STEP_MS;
    let forth_ms = prop_oneof![1 => Just(0), 3 => 0..20 * hour_ms];
    let back_ms = prop_oneof![3 => hour_ms + 1..21 * hour_ms, 1 => hour_ms + 1..WEEK_MS];
    (any_case(MIXED), forth_ms, any_history(), back_ms)
}

fn set_policies(case: &mut Case, policies: &[&str]) {
    for (index, own) in case.pool.allocations.iter_mut().enumerate() {
        own.policy = policies[index % policies.len()].to_owned();
    }
}

/// The case's question, by every key of the pool.
fn everybody(player: &Player, case: &Case) -> Vec<Call> {
    let entry = player.rig.entry();
    let keys = entry.pool.allocations.iter();
    keys.map(|own| Call { key: own.api_key.to_string(), ..case.question.clone() }).collect()
}

fn keys_sum_to_total(rig: &mut Rig) -> Result<(), TestCaseError> {
    let usage = rig.usage();
    for (index, (consumed, reserved)) in rig.totals().into_iter().enumerate() {
        let of_keys =
            |part: fn(&(f64, f64)) -> f64| usage.keys.values().map(|seen| part(&seen[index])).sum::<f64>();
        let sum = of_keys(|seen| seen.0);
        prop_assert!((sum - consumed).abs() <= 1e-9 * consumed.abs(), "keys {sum}, pool {consumed}");
        prop_assert_eq!(of_keys(|seen| seen.1), reserved);
    }
    Ok(())
}

/// The same pool with a ledger that knows only what was made durable.
fn restored(player: &mut Player) -> Player {
    let revision = player.rig.entry().history.created_revision;
    let mut ledger = PoolLedger::new(revision, player.rig.now);
    let mut consumed: BTreeMap<(u64, ApiKeyId, CounterKey), i64> = BTreeMap::new();
    let mut open = BTreeMap::new();
    let mut others = Vec::new();
    for change in player.rig.ledger.take_changes() {
        match change {
            Change::Consumed { api_key, counter, bucket, delta } => {
                *consumed.entry((bucket, api_key, counter)).or_default() += delta;
            }
            Change::Held(random, hold) => drop(open.insert(random, hold)),
            Change::Freed(random, _) => drop(open.remove(&random)),
            remembered => others.push(remembered),
        }
    }
    for ((bucket, api_key, counter), delta) in consumed {
        ledger.restore(Change::Consumed { api_key, counter, bucket, delta });
    }
    for (random, hold) in open {
        ledger.restore(Change::Held(random, hold));
    }
    for change in others {
        ledger.restore(change);
    }
    let mut other = player.clone();
    other.rig.ledger = ledger;
    other
}
