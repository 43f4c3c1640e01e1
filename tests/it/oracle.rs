//! Cases with known right answers, a file for each subject.
//!
//! They are read from the directory that `QUOTA_ORACLE_DIR` names, else from `tests/data/oracle`.

use std::path::PathBuf;

use quota_share::core::{
    admission::{BlockReason, Finding, Used, judge},
    burn_rate::{BurnRate, Sample},
    charge::{Bounds, Terms},
    pool::Policy,
    units::{Timestamp, Unit},
    window::Window,
};
use serde_json::Value;

use crate::model::{Call, Rig, allocation, cost, dimension, dimension_spec, pool};

#[test]
fn the_rule_agrees_with_the_oracle_of_fair_shares() {
    every_case_of("fair_share.jsonl", fair_share);
}

#[test]
fn the_counters_agree_with_the_oracle_of_sliding_windows() {
    every_case_of("sliding_window.jsonl", |case| match text(&case["kind"]) {
        "formula" => formula(case),
        "sequence" => sequence(case),
        other => Err(format!("the kind {other:?} is not known")),
    });
}

#[test]
fn the_average_agrees_with_the_oracle_of_burn_rates() {
    every_case_of("burn_rate.jsonl", |case| match text(&case["kind"]) {
        "ema" => burn_rate(case),
        other => Err(format!("the kind {other:?} is not known")),
    });
}

/// Runs `check` on every line of `file`, and names all that fail.
fn every_case_of(file: &str, check: impl Fn(&Value) -> Result<(), String>) {
    let path = oracle_directory().join(file);
    let lines = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut cases = 0;
    let mut differ = Vec::new();
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let case: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        cases += 1;
        if let Err(difference) = check(&case) {
            differ.push(format!("{}: {difference}", text(&case["id"])));
        }
    }
    assert!(cases > 0, "{} has no case", path.display());
    assert!(differ.is_empty(), "{} of {cases} cases differ:\n{}", differ.len(), differ.join("\n"));
}

fn oracle_directory() -> PathBuf {
    match std::env::var_os("QUOTA_ORACLE_DIR") {
        Some(directory) => directory.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracle"),
    }
}

fn fair_share(case: &Value) -> Result<(), String> {
    let allocation = &case["allocation"];
    let terms = Terms {
        policy: Policy::from_name(text(&allocation["policy"])),
        exempt: false,
        threshold: number(&case["saturation_threshold"]),
    };
    let findings: Vec<Finding> = case["dimensions"]
        .as_array()
        .ok_or("no dimensions")?
        .iter()
        .map(|row| judge_row(row, allocation, &terms))
        .collect();
    let block = findings.iter().find_map(|finding| finding.block);
    let penalized = block.is_none() && findings.iter().any(|finding| finding.deprioritize);
    let (kind, reason) = match block {
        None => ("allow", "ok"),
        Some(BlockReason::CapAbsolute) => ("block", "cap-absolute"),
        Some(BlockReason::GlobalSaturated) => ("block", "global-saturated"),
        Some(BlockReason::FairShare) => ("block", "fair-share"),
        Some(other) => return Err(format!("{other:?} is no reason for an estimate of 0")),
    };
    let want = &case["expected"];
    let any_reason = case["reason_depends_on_dimension_order"].as_bool().unwrap_or(false);
    agree("kind", kind, text(&want["kind"]))?;
    if !any_reason {
        agree("reason", reason, text(&want["reason"]))?;
    }
    agree("penalized", penalized, want["penalized"].as_bool().ok_or("no penalized")?)
}

fn judge_row(row: &Value, allocation: &Value, terms: &Terms) -> Finding {
    let limit = number(&row["limit"]);
    let cap_applies = allocation["cap_unit"].as_str() == Some(text(&row["unit"]));
    let bounds = Bounds {
        per_connection: Some(limit),
        limit: Some(limit),
        cap: allocation["cap_value"].as_f64().filter(|_| cap_applies),
        fair_share: Some(number(&allocation["weight"]) * limit / 100.0),
        owner_reserve: 0.0,
    };
    let used = Used {
        key: number(&row["consumed_by_key"]),
        pool: number(&row["consumed_total"]),
        external: 0.0,
        connection_saturated: false,
        fraction: Some(number(&row["global_used_fraction"])),
    };
    judge(&bounds, false, 0.0, terms, &used)
}

fn formula(case: &Value) -> Result<(), String> {
    let window = window_of(case)?;
    let at = Timestamp::from_unix_ms(integer(&case["now_ms"]));
    let want = &case["expected"];
    let bucket = window.bucket(at);
    let start_ms = bucket * window.length_ms();
    agree("bucket_index", bucket, integer(&want["bucket_index"]))?;
    agree("bucket_start_ms", start_ms, integer(&want["bucket_start_ms"]))?;
    let elapsed_ms = at.unix_ms() - start_ms;
    agree("elapsed_ms", elapsed_ms, integer(&want["elapsed_ms"]))?;
    near("prev_weight", 1.0 - elapsed_ms as f64 / window.length_ms() as f64, &want["prev_weight"])?;
    let effective = window.estimate(at, number(&case["prev_bucket"]), number(&case["curr_bucket"]));
    near("effective", effective, &want["effective"])
}

/// Through a ledger, in the integer steps that it stores.
fn sequence(case: &Value) -> Result<(), String> {
    window_of(case)?;
    let unit = Unit::from_name(text(&case["unit"])).ok_or("an unknown unit")?;
    let window = text(&case["window"]);
    let steps = case["steps"].as_array().ok_or("no steps")?;
    let keys = vec![allocation("a", 50.0, "hard"), allocation("b", 50.0, "hard")];
    let mut rig = Rig::new(pool(keys), vec![dimension_spec(unit, window, None)], Timestamp::from_unix_ms(0));
    for (index, step) in steps.iter().enumerate() {
        rig.now = Timestamp::from_unix_ms(integer(&step["at_ms"]));
        let key = text(&step["key"]);
        match text(&step["op"]) {
            "record" => {
                let amount = unit.amount(number(&step["cost"])).ok_or("a cost that is out of range")?;
                let call = Call::new(key, cost(unit, amount.steps()));
                rig.record(&call, "", "").map_err(|error| error.to_string())?;
            }
            "read" => {
                let (total, _) = rig.total(dimension(unit, window));
                near(&format!("step {index}, pool"), unit.from_steps(total), &step["expected_pool_total"])?;
            }
            other => return Err(format!("step {index}: the op {other:?} is not known")),
        }
        let (effective, _) = rig.of_key(key, dimension(unit, window));
        near(&format!("step {index}, {key}"), unit.from_steps(effective), &step["expected_effective"])?;
    }
    Ok(())
}

/// Amounts with decimals are steps of a millionth: the average does not care which.
fn burn_rate(case: &Value) -> Result<(), String> {
    const STEPS: f64 = 1e6;
    let samples = case["samples"].as_array().expect("a list of samples").iter().map(|sample| Sample {
        at: Timestamp::from_unix_ms(integer(&sample["ts_ms"])),
        cumulative: (number(&sample["consumed"]) * STEPS).round() as u64,
    });
    let rate = samples.fold(BurnRate::default(), BurnRate::after);
    let expected = &case["expected"];
    let units_per_second = rate.steps_per_second.unwrap_or_default() / STEPS;
    near("units_per_second", units_per_second, &expected["units_per_second"])?;
    let remaining = case["remaining"].as_f64();
    let exhausted_in_ms = remaining.and_then(|remaining| rate.time_to_exhaustion_ms(remaining * STEPS));
    match (exhausted_in_ms, &expected["time_to_exhaustion_ms"]) {
        (None, Value::Null) => Ok(()),
        (Some(got), want @ Value::Number(_)) => near("time_to_exhaustion_ms", got, want),
        (got, want) => Err(format!("time_to_exhaustion_ms is {got:?}, not {want}")),
    }
}

fn window_of(case: &Value) -> Result<Window, String> {
    let window = Window::parse(text(&case["window"])).ok_or("an unknown window")?;
    agree("window_ms", window.length_ms(), integer(&case["window_ms"]))?;
    Ok(window)
}

fn agree<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Result<(), String> {
    if got == want { Ok(()) } else { Err(format!("{what} is {got:?}, not {want:?}")) }
}

fn near(what: &str, got: f64, want: &Value) -> Result<(), String> {
    // The oracle multiplies by 1 - elapsed / window, which loses digits where next to nothing is left of a bucket.
    const ROUNDING_OF_THE_ORACLE: f64 = 1e-12;
    let want = number(want);
    let close = (got - want).abs() <= (1e-9 * want.abs()).max(ROUNDING_OF_THE_ORACLE);
    if close { Ok(()) } else { Err(format!("{what} is {got}, not {want}")) }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn integer(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no whole number"))
}
