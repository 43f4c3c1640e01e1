//! Calls that are repeated, contradict each other or come late; and what a ledger keeps of a pool that changes.

use quota_share::core::{
    admission::BlockReason,
    ledger::{Contradiction, Recorded},
    plan::DimensionKey,
    pool::{AllocationSpec, ModelCapSpec},
    units::{Amount, Cost, Timestamp, Unit},
};

use crate::model::{
    Call, ID_LIFE_MS, Rig, START, allocation, cost, dimension, dimension_spec, key, pool, tokens,
};

const COUNTED: Recorded = Recorded { duplicate: false, reservation_expired: false, unread: 0 };
const DUPLICATE: Recorded = Recorded { duplicate: true, reservation_expired: false, unread: 0 };
const LATE: Recorded = Recorded { duplicate: false, reservation_expired: true, unread: 0 };
const LATE_DUPLICATE: Recorded = Recorded { duplicate: true, reservation_expired: true, unread: 0 };

/// Makes the text of a reservation id that does not hold.
type MakeId<'a> = &'a dyn Fn(&mut Rig) -> String;

const MINUTE_MS: u64 = 60_000;
const MAX: u64 = Amount::MAX.steps();

fn hourly() -> DimensionKey {
    dimension(Unit::Tokens, "hourly")
}

fn a(steps: u64) -> Call {
    Call::new("a", tokens(steps))
}

fn b(steps: u64) -> Call {
    Call::new("b", tokens(steps))
}

/// Two keys that share 100 tokens an hour and borrow from each other all of it.
fn rig() -> Rig {
    rig_of(vec![allocation("a", 50.0, "burst"), allocation("b", 50.0, "burst")], Some(100.0))
}

fn rig_of(keys: Vec<AllocationSpec>, limit: Option<f64>) -> Rig {
    Rig::new(pool(keys), vec![dimension_spec(Unit::Tokens, "hourly", limit)], START)
}

/// `a` with a cap on the tokens of model `m`.
fn model_capped(value: f64, window: &str) -> AllocationSpec {
    let cap = ModelCapSpec {
        model: "m".to_owned(),
        value,
        unit: Unit::Tokens.name().to_owned(),
        window: window.to_owned(),
        ..Default::default()
    };
    AllocationSpec { model_caps: vec![cap], ..allocation("a", 50.0, "burst") }
}

#[test]
fn a_repeated_request_id_gets_the_same_reservation_and_holds_nothing_more() {
    let mut rig = rig();
    let (_, first) = rig.hold(&a(60), MINUTE_MS, "r").unwrap();
    let first = first.expect("a reservation");
    assert!(!first.repeated);
    assert_eq!(first.deadline, START.plus_ms(MINUTE_MS));
    rig.wait(10);
    // Another reserve_for is ignored; that 60 more do not fit does not matter.
    let (verdict, second) = rig.hold(&a(60), 7, "r").unwrap();
    let second = second.expect("a reservation");
    assert_eq!((second.id, second.deadline, second.repeated), (first.id, first.deadline, true));
    assert_eq!(verdict.findings[0].remaining, Some(40.0), "today's dimensions");
    assert_eq!(rig.total(hourly()), (0.0, 60.0));
}

#[test]
fn a_request_id_is_remembered_until_its_deadline_whatever_became_of_the_reservation() {
    enum Became {
        Open,
        Settled,
        Released,
    }
    for (what, became) in
        [("open", Became::Open), ("settled", Became::Settled), ("released", Became::Released)]
    {
        let mut rig = rig();
        let (_, first) = rig.hold(&a(10), MINUTE_MS, "r").unwrap();
        let first = first.expect("a reservation");
        match became {
            Became::Open => {}
            Became::Settled => assert_eq!(rig.record(&a(3), "", &first.id.to_string()), Ok(COUNTED)),
            Became::Released => assert_eq!(rig.ledger.release(first.id, None, rig.now), Ok(true)),
        }
        let before = rig.total(hourly());
        rig.wait(MINUTE_MS - 1);
        let (_, again) = rig.hold(&a(10), MINUTE_MS, "r").unwrap();
        assert_eq!(again.map(|again| (again.id, again.repeated)), Some((first.id, true)), "{what}");
        assert_eq!(rig.total(hourly()), before, "{what}");
        rig.wait(1);
        let (_, afresh) = rig.hold(&a(10), MINUTE_MS, "r").unwrap();
        let afresh = afresh.expect("a reservation");
        assert!(!afresh.repeated && afresh.id != first.id, "{what}");
        assert_eq!(afresh.deadline, rig.now.plus_ms(MINUTE_MS), "{what}");
        assert_eq!(rig.total(hourly()), (before.0, 10.0), "{what}");
    }
}

#[test]
fn a_request_id_for_something_else_is_a_contradiction_and_holds_nothing() {
    let mut rig = rig();
    rig.hold(&a(10), MINUTE_MS, "r").unwrap();
    let others = [
        ("another estimate", a(11)),
        ("an estimate in another unit", Call::new("a", cost(Unit::Usd, 10))),
        ("another key", b(10)),
        ("a model", a(10).model("m")),
    ];
    for (what, call) in others {
        assert_eq!(rig.hold(&call, MINUTE_MS, "r"), Err(Contradiction::RequestId), "{what}");
    }
    assert_eq!(rig.total(hourly()), (0.0, 10.0));
    rig.wait(MINUTE_MS);
    assert!(rig.hold(&a(11), MINUTE_MS, "r").is_ok(), "the id is free again at the deadline");
}

#[test]
fn a_block_is_not_remembered() {
    let mut rig = rig();
    let crowd = rig.must_hold(&b(95), MINUTE_MS);
    let (verdict, reserved) = rig.hold(&a(10), MINUTE_MS, "r").unwrap();
    assert_eq!((verdict.block(), reserved), (Some(BlockReason::GlobalSaturated), None));
    let size = rig.ledger.size();
    assert_eq!((size.open_reservations, size.remembered_ids), (1, 0), "a blocked request leaves nothing");
    assert_eq!(rig.ledger.release(crowd, None, rig.now), Ok(true));
    // With another estimate: there is nothing to contradict.
    let (_, reserved) = rig.hold(&a(20), MINUTE_MS, "r").unwrap();
    assert!(!reserved.expect("a reservation").repeated);
}

#[test]
fn a_reservation_of_nothing_is_one_all_the_same() {
    let mut rig = rig();
    let id = rig.must_hold(&a(0), MINUTE_MS).to_string();
    assert_eq!(rig.record(&a(5), "", &id), Ok(COUNTED));
    assert_eq!(rig.record(&a(5), "", &id), Ok(DUPLICATE));
    assert_eq!(rig.total(hourly()), (5.0, 0.0));
}

#[test]
fn a_settlement_gives_back_what_was_held_and_counts_the_cost_once() {
    let mut rig = rig();
    let id = rig.must_hold(&a(30), MINUTE_MS).to_string();
    assert_eq!(rig.record(&a(120), "", &id), Ok(COUNTED));
    assert_eq!(rig.total(hourly()), (120.0, 0.0), "a cost may be above the estimate and the limit");
    assert_eq!(rig.ask(&a(0)).findings[0].remaining, Some(0.0), "never negative");
    // answer | call
    let again = [
        (Ok(DUPLICATE), a(120)),                          // the same
        (Err(Contradiction::Settled), a(119)),            // another cost
        (Err(Contradiction::Settled), a(120).model("m")), // another model
        (Err(Contradiction::ForeignKey), b(120)),         // another key
    ];
    for (want, call) in again {
        assert_eq!(rig.record(&call, "", &id), want, "{call:?}");
    }
    assert_eq!(rig.total(hourly()), (120.0, 0.0));
}

#[test]
fn an_open_reservation_is_settled_and_released_by_its_own_key_only() {
    let mut rig = rig();
    let id = rig.must_hold(&a(30), MINUTE_MS);
    assert_eq!(rig.record(&b(30), "", &id.to_string()), Err(Contradiction::ForeignKey));
    assert_eq!(rig.ledger.release(id, Some(&key("b")), rig.now), Err(Contradiction::ForeignKey));
    assert_eq!(rig.total(hourly()), (0.0, 30.0));
    assert_eq!(rig.ledger.release(id, Some(&key("a")), rig.now), Ok(true));
    assert_eq!(rig.ledger.release(id, Some(&key("a")), rig.now), Ok(false), "once is enough");
    assert_eq!(rig.total(hourly()), (0.0, 0.0));
}

#[test]
fn a_reservation_stops_counting_at_its_deadline_and_a_late_cost_counts_once() {
    let mut rig = rig();
    let id = rig.must_hold(&a(30), MINUTE_MS).to_string();
    rig.wait(MINUTE_MS - 1);
    assert_eq!(rig.total(hourly()), (0.0, 30.0));
    rig.wait(1);
    assert_eq!(rig.total(hourly()), (0.0, 0.0));
    assert_eq!(rig.record(&a(7), "", &id), Ok(LATE));
    assert_eq!(rig.record(&a(7), "", &id), Ok(LATE_DUPLICATE));
    assert_eq!(rig.record(&a(8), "", &id), Err(Contradiction::Settled));
    assert_eq!(rig.total(hourly()), (7.0, 0.0));
}

#[test]
fn the_cost_of_an_id_that_does_not_hold_is_counted_once() {
    let released = |rig: &mut Rig| {
        let id = rig.must_hold(&a(30), MINUTE_MS);
        assert_eq!(rig.ledger.release(id, None, rig.now), Ok(true));
        id.to_string()
    };
    // The same random bits in a pool that was deleted.
    let of_another_life = |rig: &mut Rig| {
        let mut id = rig.must_hold(&a(0), MINUTE_MS);
        id.pool.0 += 1;
        id.to_string()
    };
    let unknown = |_: &mut Rig| "r1-00112233445566778899aabb".to_owned();
    let foreign = |_: &mut Rig| "made up by somebody".to_owned();
    let ids: [(&str, MakeId); 4] = [
        ("released", &released),
        ("of another life of the pool", &of_another_life),
        ("unknown", &unknown),
        ("not one of ours", &foreign),
    ];
    for (what, id) in ids {
        let mut rig = rig();
        let id = id(&mut rig);
        assert_eq!(rig.record(&a(7), "", &id), Ok(LATE), "{what}");
        assert_eq!(rig.record(&a(7), "", &id), Ok(LATE_DUPLICATE), "{what}");
        assert_eq!(rig.total(hourly()).0, 7.0, "{what}");
        // Remembered from then on.
        rig.wait(ID_LIFE_MS - 1);
        assert_eq!(rig.record(&a(7), "", &id), Ok(LATE_DUPLICATE), "{what}");
        rig.wait(1);
        assert_eq!(rig.record(&a(7), "", &id), Ok(LATE), "{what}");
    }
}

#[test]
fn an_idempotency_key_counts_once_for_exactly_its_life() {
    let mut rig = rig();
    assert_eq!(rig.record(&a(7), "i", ""), Ok(COUNTED));
    rig.wait(ID_LIFE_MS - 1);
    assert_eq!(rig.record(&a(7), "i", ""), Ok(DUPLICATE), "a duplicate does not prolong it");
    for call in [a(8), b(7), a(7).model("m")] {
        assert_eq!(rig.record(&call, "i", ""), Err(Contradiction::IdempotencyKey), "{call:?}");
    }
    assert_eq!(rig.total(hourly()).0, 7.0);
    rig.wait(1);
    assert_eq!(rig.record(&b(8), "i", ""), Ok(COUNTED), "forgotten");
    assert_eq!(rig.total(hourly()).0, 15.0);
}

#[test]
fn a_settled_id_lives_past_its_deadline_or_its_settling_whichever_is_later() {
    // settled after | remembered until, after the hold
    let rows = [
        (0, MINUTE_MS + ID_LIFE_MS),             // before the deadline: from the deadline
        (MINUTE_MS - 1, MINUTE_MS + ID_LIFE_MS), //
        (MINUTE_MS, MINUTE_MS + ID_LIFE_MS),     // at it
        (3 * MINUTE_MS, 3 * MINUTE_MS + ID_LIFE_MS), // late: from then on
    ];
    for (settled_ms, forgotten_ms) in rows {
        let mut rig = rig();
        let id = rig.must_hold(&a(0), MINUTE_MS).to_string();
        rig.wait(settled_ms);
        assert!(!rig.record(&a(7), "", &id).unwrap().duplicate);
        rig.now = START.plus_ms(forgotten_ms - 1);
        assert!(rig.record(&a(7), "", &id).unwrap().duplicate, "settled after {settled_ms}");
        rig.wait(1);
        assert_eq!(rig.record(&a(7), "", &id), Ok(LATE), "settled after {settled_ms}");
    }
}

#[test]
fn of_a_reservation_id_and_an_idempotency_key_a_match_of_either_is_a_duplicate() {
    let mut rig = rig();
    let first = rig.must_hold(&a(20), MINUTE_MS).to_string();
    let second = rig.must_hold(&a(20), MINUTE_MS).to_string();
    assert_eq!(rig.record(&a(7), "i", &first), Ok(COUNTED));
    // Both are remembered.
    assert_eq!(rig.record(&a(7), "i", ""), Ok(DUPLICATE));
    assert_eq!(rig.record(&a(7), "", &first), Ok(DUPLICATE));
    assert_eq!(rig.record(&a(7), "j", &first), Ok(DUPLICATE));
    assert_eq!(rig.total(hourly()), (7.0, 20.0));
    // An open hold that a duplicate names is given back all the same.
    assert_eq!(rig.record(&a(7), "i", &second), Ok(DUPLICATE));
    assert_eq!(rig.total(hourly()), (7.0, 0.0));
    // And both names of each of those calls are known from then on.
    assert_eq!(rig.record(&a(7), "j", ""), Ok(DUPLICATE));
    assert_eq!(rig.record(&a(7), "", &second), Ok(DUPLICATE));
    assert_eq!(rig.record(&a(8), "i", &second), Err(Contradiction::Settled));
}

#[test]
fn a_contradiction_changes_nothing() {
    let mut rig = rig();
    assert_eq!(rig.record(&a(7), "i", ""), Ok(COUNTED));
    let id = rig.must_hold(&a(20), MINUTE_MS).to_string();
    rig.ledger.take_changes();
    assert_eq!(rig.record(&a(8), "i", &id), Err(Contradiction::IdempotencyKey));
    assert_eq!(rig.record(&b(7), "", &id), Err(Contradiction::ForeignKey));
    assert!(rig.ledger.take_changes().is_empty());
    assert_eq!(rig.total(hourly()), (7.0, 20.0));
}

#[test]
fn a_retry_after_a_reset_does_not_count_again() {
    let mut rig = rig();
    let id = rig.must_hold(&a(20), MINUTE_MS).to_string();
    assert_eq!(rig.record(&a(5), "i", ""), Ok(COUNTED));
    assert_eq!(rig.record(&a(6), "", &id), Ok(COUNTED));
    rig.ledger.reset(None, None, rig.now);
    assert_eq!(rig.record(&a(5), "i", ""), Ok(DUPLICATE));
    assert_eq!(rig.record(&a(6), "", &id), Ok(DUPLICATE));
    assert_eq!(rig.total(hourly()), (0.0, 0.0));
}

#[test]
fn a_reset_of_one_key_comes_out_of_the_pools_total_and_leaves_reservations() {
    let mut rig = rig();
    rig.record(&a(5), "", "").unwrap();
    rig.record(&b(6), "", "").unwrap();
    rig.must_hold(&a(20), 3_600_000);
    // Into the next bucket, so that both are in use; what is held so far ends here.
    rig.wait(3_600_000);
    rig.record(&a(50), "", "").unwrap();
    rig.must_hold(&a(20), MINUTE_MS);
    assert_eq!(rig.total(hourly()), (61.0, 20.0));
    rig.ledger.reset(Some(&key("a")), None, rig.now);
    assert_eq!(rig.of_key("a", hourly()), (0.0, 20.0));
    assert_eq!(rig.of_key("b", hourly()), (6.0, 0.0));
    assert_eq!(rig.total(hourly()), (6.0, 20.0));
    rig.ledger.reset(None, None, rig.now);
    assert_eq!(rig.total(hourly()), (0.0, 20.0));
}

#[test]
fn a_reset_of_one_dimension_leaves_the_others_and_model_caps() {
    let daily = dimension(Unit::Tokens, "daily");
    let plan = vec![
        dimension_spec(Unit::Tokens, "hourly", Some(100.0)),
        dimension_spec(Unit::Tokens, "daily", Some(100.0)),
    ];
    let mut rig = Rig::new(pool(vec![model_capped(10.0, "hourly")]), plan, START);
    let used = a(4).model("m");
    rig.record(&used, "", "").unwrap();
    rig.ledger.reset(None, Some(hourly()), rig.now);
    assert_eq!((rig.total(hourly()).0, rig.total(daily).0), (0.0, 4.0));
    assert_eq!(rig.ask(&used).findings[2].remaining, Some(6.0), "the cap keeps its count");
    rig.ledger.reset(None, None, rig.now);
    assert_eq!((rig.total(hourly()).0, rig.total(daily).0), (0.0, 0.0));
    assert_eq!(rig.ask(&used).findings[2].remaining, Some(10.0), "without a dimension it is reset too");
}

#[test]
fn stored_sums_of_consumption_stop_at_the_ceiling() {
    let mut rig = rig_of(vec![allocation("a", 50.0, "hard"), allocation("b", 50.0, "hard")], None);
    rig.record(&a(MAX - 5), "", "").unwrap();
    rig.record(&b(7), "", "").unwrap();
    rig.record(&a(7), "", "").unwrap();
    assert_eq!(rig.total(hourly()).0, MAX as f64);
    // What did not fit is nobody's, so that keys sum to the pool and a reset leaves nothing.
    assert_eq!((rig.of_key("a", hourly()).0, rig.of_key("b", hourly()).0), ((MAX - 5) as f64, 5.0));
    rig.ledger.reset(Some(&key("a")), None, rig.now);
    assert_eq!(rig.total(hourly()).0, 5.0);
}

#[test]
fn stored_sums_of_reservations_stop_at_the_ceiling_and_each_gives_back_what_it_holds() {
    let keys = vec![model_capped(9e15, "hourly"), allocation("b", 50.0, "hard")];
    let mut rig = rig_of(keys, None);
    let first = rig.must_hold(&a(MAX - 5), MINUTE_MS);
    let second = rig.must_hold(&b(7), MINUTE_MS);
    let third = rig.must_hold(&b(7), MINUTE_MS);
    assert_eq!(rig.total(hourly()).1, MAX as f64);
    assert_eq!(rig.of_key("b", hourly()).1, 5.0);
    // Some of the estimate is held in one counter, all of it in the other.
    let capped = a(3).model("m");
    let fourth = rig.must_hold(&capped, MINUTE_MS);
    assert_eq!(rig.ask(&capped).findings[1].remaining, Some((MAX - 3) as f64));
    for (id, left) in [(first, 5), (third, 5), (second, 0), (fourth, 0)] {
        assert_eq!(rig.ledger.release(id, None, rig.now), Ok(true));
        assert_eq!(rig.total(hourly()).1, left as f64);
    }
    assert_eq!(rig.ask(&capped).findings[1].remaining, Some(MAX as f64));
}

#[test]
fn a_model_cap_counts_its_key_and_model_from_when_it_exists() {
    let mut rig = rig();
    let used = a(4).model("m");
    rig.record(&used, "", "").unwrap();
    let others = || vec![allocation("b", 50.0, "burst")];
    rig.update_pool(pool([vec![model_capped(10.0, "")], others()].concat()));
    assert_eq!(rig.ask(&used).findings[1].remaining, Some(10.0), "from when the cap exists");
    rig.record(&used, "", "").unwrap();
    rig.record(&a(40), "", "").unwrap(); // no model
    rig.record(&a(30).model("n"), "", "").unwrap(); // another model
    rig.record(&b(10).model("m"), "", "").unwrap(); // another key
    assert_eq!(rig.ask(&used).findings[1].remaining, Some(6.0));
    assert_eq!(rig.ask(&a(0).model("n")).findings.len(), 1, "another model has no cap");
    let verdict = rig.ask(&a(7).model("m"));
    assert_eq!(verdict.findings[1].block, Some(BlockReason::ModelCap));
    assert_eq!(rig.ask(&a(11).model("m")).findings[1].block, Some(BlockReason::ExceedsLimit));

    rig.update_pool(pool([vec![model_capped(20.0, "hourly")], others()].concat()));
    assert_eq!(rig.ask(&used).findings[1].remaining, Some(16.0), "a new value keeps the counter");
    rig.update_pool(pool([vec![model_capped(20.0, "daily")], others()].concat()));
    assert_eq!(rig.ask(&used).findings[1].remaining, Some(20.0), "a new window starts at 0");
}

#[test]
fn a_model_cap_binds_without_a_plan_and_holds_what_it_allows() {
    let mut rig = Rig::new(pool(vec![model_capped(10.0, "hourly")]), Vec::new(), START);
    let call = a(6).model("m");
    let id = rig.must_hold(&call, MINUTE_MS);
    let verdict = rig.ask(&call);
    assert_eq!(verdict.block(), Some(BlockReason::ModelCap));
    assert_eq!(verdict.allowed_after_ms, Some(MINUTE_MS));
    // The reservation gives back what it holds though the cap is gone and has come back.
    rig.update_pool(pool(vec![allocation("a", 50.0, "hard")]));
    assert_eq!(rig.ledger.release(id, None, rig.now), Ok(true));
    rig.update_pool(pool(vec![model_capped(10.0, "hourly")]));
    assert_eq!(rig.ask(&call).findings[0].remaining, Some(10.0));
}

#[test]
fn a_dimension_that_leaves_the_plan_and_returns_has_aged_as_if_it_had_stayed() {
    let daily = dimension(Unit::Tokens, "daily");
    let with = || vec![dimension_spec(Unit::Tokens, "hourly", Some(100.0))];
    let without = || vec![dimension_spec(Unit::Tokens, "daily", Some(1_000.0))];
    let mut rig = rig();
    let id = rig.must_hold(&a(20), 3_600_000);
    rig.record(&a(40), "", "").unwrap();
    rig.put_plan(without());
    rig.record(&b(9), "", "").unwrap();
    rig.wait(1_800_000);
    // Settling gives back what is held there, and counts in the dimensions of the day.
    assert_eq!(rig.record(&a(5), "", &id.to_string()), Ok(COUNTED));
    assert_eq!(rig.total(daily), (14.0, 0.0));
    rig.wait(3_600_000);
    rig.put_plan(with());
    assert_eq!(
        rig.total(hourly()),
        (20.0, 0.0),
        "half of the 40 has slid out; the rest was not counted here"
    );
    rig.wait(1_800_000);
    assert_eq!(rig.total(hourly()), (0.0, 0.0));
}

#[test]
fn editing_a_limit_loses_no_usage_and_a_key_that_left_stays_in_the_total() {
    let mut rig = rig();
    rig.record(&a(30), "", "").unwrap();
    rig.record(&b(40), "", "").unwrap();
    rig.put_plan(vec![dimension_spec(Unit::Tokens, "hourly", Some(80.0))]);
    rig.update_pool(pool(vec![allocation("a", 50.0, "burst")]));
    assert_eq!(rig.ask(&a(0)).findings[0].remaining, Some(10.0));
    assert_eq!(rig.of_key("b", hourly()).0, 40.0);
    rig.update_pool(pool(vec![allocation("b", 50.0, "burst")]));
    assert_eq!(rig.of_key("b", hourly()).0, 40.0, "a key that returns finds its own");
}

#[test]
fn a_clock_that_goes_back_counts_what_lies_ahead_in_the_current_bucket() {
    // back by | consumed then
    let rows = [
        (3_600_000, 45.0),      // an hour: time stands still; half of the previous bucket is left
        (3_600_001, 60.0),      // more: both buckets lie ahead or are the current one
        (7 * 86_400_000, 60.0), // far
    ];
    for (back_ms, consumed) in rows {
        let mut rig = rig_of(vec![allocation("a", 50.0, "hard")], None);
        rig.record(&a(30), "", "").unwrap();
        rig.wait(3_600_000 + 1_800_000);
        rig.record(&a(30), "", "").unwrap();
        let standing = rig.now;
        rig.now = Timestamp::from_unix_ms(rig.now.unix_ms() - back_ms);
        let usage = rig.usage();
        assert_eq!(rig.totals()[0].0, consumed, "back by {back_ms}");
        assert_eq!(usage.at, if back_ms > 3_600_000 { rig.now } else { standing });
        assert_eq!(rig.of_key("a", hourly()).0, consumed, "back by {back_ms}");
    }
}

#[test]
fn a_clock_that_goes_back_cuts_deadlines_to_an_hour_from_then() {
    let mut rig = rig();
    let short = rig.must_hold(&a(1), MINUTE_MS);
    let (_, long) = rig.hold(&a(2), 3_600_000, "r").unwrap();
    let long = long.expect("a reservation").id;
    rig.now = Timestamp::from_unix_ms(START.unix_ms() - 2 * 3_600_000);
    let cut = rig.now.plus_ms(3_600_000);
    assert_eq!(rig.total(hourly()), (0.0, 3.0));
    let open = rig.ledger.reservations(None, None, 10, rig.now);
    let deadlines: Vec<_> = open.iter().map(|(id, hold)| (*id, hold.deadline)).collect();
    assert_eq!(deadlines, [(short, cut), (long, cut)]);
    let (_, again) = rig.hold(&a(2), 5, "r").unwrap();
    assert_eq!(again.map(|again| (again.id, again.deadline)), Some((long, cut)), "its request id with it");
    rig.wait(3_600_000 - 1);
    assert_eq!(rig.total(hourly()), (0.0, 3.0));
    rig.wait(1);
    assert_eq!(rig.total(hourly()), (0.0, 0.0));
}

#[test]
fn a_clock_that_goes_back_revives_no_id_that_has_ended() {
    let mut rig = rig();
    rig.record(&a(3), "i", "").unwrap();
    rig.wait(ID_LIFE_MS - MINUTE_MS);
    rig.hold(&a(10), MINUTE_MS, "r").unwrap();
    rig.wait(MINUTE_MS);
    assert_eq!(rig.total(hourly()), (3.0, 0.0), "both ids end here");
    rig.now = Timestamp::from_unix_ms(START.unix_ms() - 2 * 3_600_000);
    let (_, reserved) = rig.hold(&a(10), MINUTE_MS, "r").unwrap();
    assert!(!reserved.expect("a reservation").repeated, "a reservation that holds nothing was named");
    assert_eq!(rig.record(&a(3), "i", ""), Ok(COUNTED));
    assert_eq!(rig.total(hourly()), (6.0, 10.0));
}

#[test]
fn compacting_changes_nothing_that_can_be_seen() {
    let mut rig = rig();
    rig.record(&a(30), "", "").unwrap();
    rig.wait(3_600_000);
    rig.must_hold(&b(5), 3_600_000);
    rig.wait(1_800_000);
    let before = rig.usage();
    rig.ledger.compact(rig.now);
    assert_eq!(rig.usage(), before);
    rig.wait(3_600_000);
    rig.ledger.compact(rig.now);
    assert_eq!(rig.total(hourly()), (0.0, 0.0));
    rig.record(&b(1), "", "").unwrap();
    assert_eq!(rig.total(hourly()), (1.0, 0.0));
}

#[test]
fn a_hold_is_made_in_every_dimension_or_in_none() {
    let plan = vec![
        dimension_spec(Unit::Tokens, "hourly", Some(100.0)),
        dimension_spec(Unit::Requests, "hourly", Some(1.0)),
    ];
    let requests = dimension(Unit::Requests, "hourly");
    let mut rig = Rig::new(pool(vec![allocation("a", 100.0, "hard")]), plan, START);
    let call = Call::new("a", Cost { requests: Amount::saturating(1), ..tokens(10) });
    rig.must_hold(&call, MINUTE_MS);
    let (verdict, reserved) = rig.hold(&call, MINUTE_MS, "").unwrap();
    assert_eq!((verdict.blocked_by, reserved), (Some(1), None));
    assert_eq!((rig.total(hourly()).1, rig.total(requests).1), (10.0, 1.0));
}
