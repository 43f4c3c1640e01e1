//! What response headers say: by tables of what providers send and what they don't, and whatever comes.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

use proptest::{prelude::*, sample::select, test_runner::TestCaseError};
use quota_share::core::{
    headers::{HeaderReading, HeaderSignal, Reset, read},
    units::{Timestamp, Unit},
};

use crate::cases::for_all;

/// 2026-07-01T00:00:00Z, when the responses came.
const T0_MS: u64 = 1_782_864_000_000;
const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

const NOT_A_NUMBER: &str = "not a plain decimal number";
const NOT_ONE_VALUE: &str = "given more than once with different values";
const TOO_LONG: &str = "longer than 256 bytes";
const ALONE: &str = "read with another header, which is missing";
const NO_WINDOW: &str = "not the minutes of a known window";
const ABOVE_MAX: &str = "above one and a half times the limit";
const NO_LIMIT: &str = "a limit of nothing";
const ABOVE_LIMIT: &str = "more than the limit";
const NOT_A_TIME: &str = "not a time in a known format";
const TOO_FAR: &str = "too far ahead";
const ENDED: &str = "not after the response: its figure has ended";
const WHYS: &[&str] = &[
    NOT_A_NUMBER,
    NOT_ONE_VALUE,
    TOO_LONG,
    ALONE,
    NO_WINDOW,
    ABOVE_MAX,
    NO_LIMIT,
    ABOVE_LIMIT,
    NOT_A_TIME,
    TOO_FAR,
    ENDED,
];

type Headers<'a> = &'a [(&'a str, &'a str)];
/// Headers | what they say | what is ignored, and why.
type Row<'a> = (Headers<'a>, &'a [&'a str], &'a [(&'a str, &'a str)]);

fn check(rows: &[Row<'_>]) {
    for (headers, signals, ignored) in rows {
        let reading = read(headers.iter().copied(), Timestamp::from_unix_ms(T0_MS));
        let got: Vec<String> = reading.signals.iter().map(shown).collect();
        assert_eq!(got, *signals, "{headers:?}");
        let got: Vec<(&str, &str)> = reading.ignored.iter().map(|i| (i.header.as_str(), i.why)).collect();
        assert_eq!(got, *ignored, "{headers:?}");
    }
}

/// Such as `percent/5h 0.42 ends +1000`, in ms after the response.
fn shown(signal: &HeaderSignal) -> String {
    let end = match signal.reset {
        Reset::Unknown => "open".to_owned(),
        Reset::WindowEnd(end) => format!("ends +{}", end.unix_ms() - T0_MS),
        Reset::Refill(end) => format!("refills +{}", end.unix_ms() - T0_MS),
    };
    format!("{} {} {end}", signal.dimension, signal.fraction)
}

#[test]
fn codex_windows_are_told_by_their_minutes_and_not_by_their_slot() {
    let used = "x-codex-primary-used-percent";
    let minutes = "x-codex-primary-window-minutes";
    let reset = "x-codex-primary-reset-after-seconds";
    check(&[
        (
            &[
                (used, "42"),
                (minutes, "300"),
                (reset, "7200"),
                ("x-codex-secondary-used-percent", "7.5"),
                ("x-codex-secondary-window-minutes", "10080"),
                ("x-codex-secondary-reset-after-seconds", "604800"),
                ("x-codex-plan-type", "pro"),
                ("x-codex-credits-has-credits", "False"),
                ("x-codex-primary-over-secondary-limit-percent", "0"),
                ("x-codex-primary-reset-at", "1782871200"),
                ("x-codex-bengalfox-primary-used-percent", "99"),
                ("x-codex-tertiary-used-percent", "99"),
                ("date", "Wed, 01 Jul 2026 00:00:00 GMT"),
                ("content-type", "text/event-stream"),
            ],
            &["percent/5h 0.42 ends +7200000", "percent/weekly 0.075 ends +604800000"],
            &[],
        ),
        // Swapped: the minutes decide.
        (&[(used, "100"), (minutes, "10080")], &["percent/weekly 1 open"], &[]),
        (
            &[
                (used, "20"),
                (minutes, "10080"),
                ("x-codex-secondary-used-percent", "30"),
                ("x-codex-secondary-window-minutes", "300"),
            ],
            &["percent/5h 0.3 open", "percent/weekly 0.2 open"],
            &[],
        ),
        // Both slots speak of one window: the fuller one holds, of equal ones the one that ends later.
        (
            &[
                (used, "20"),
                (minutes, "300"),
                (reset, "60"),
                ("x-codex-secondary-used-percent", "30"),
                ("x-codex-secondary-window-minutes", "300"),
            ],
            &["percent/5h 0.3 open"],
            &[],
        ),
        (
            &[
                (used, "30"),
                (minutes, "300"),
                (reset, "60"),
                ("x-codex-secondary-used-percent", "30"),
                ("x-codex-secondary-window-minutes", "300"),
                ("x-codex-secondary-reset-after-seconds", "61"),
            ],
            &["percent/5h 0.3 ends +61000"],
            &[],
        ),
        // A slot that isn't used, and slots of which something is missing.
        (&[(used, "0"), (minutes, "0"), (reset, "0")], &[], &[(minutes, NO_WINDOW)]),
        (&[(used, "5"), (minutes, "1440"), (reset, "60")], &[], &[(minutes, NO_WINDOW)]),
        (&[(used, "5"), (minutes, "five hours")], &[], &[(minutes, NOT_A_NUMBER)]),
        (&[(used, "5"), (reset, "60")], &[], &[(used, ALONE)]),
        (&[(minutes, "300"), (reset, "60")], &[], &[(minutes, ALONE)]),
        (&[(reset, "60")], &[], &[]),
        // Full, past full, and nonsense.
        (&[(used, "100.5"), (minutes, "300")], &["percent/5h 1.005 open"], &[]),
        (&[(used, "150"), (minutes, "300")], &["percent/5h 1.5 open"], &[]),
        (&[(used, "150.1"), (minutes, "300")], &[], &[(used, ABOVE_MAX)]),
        (&[(used, "1e308"), (minutes, "300")], &[], &[(used, ABOVE_MAX)]),
    ]);
}

#[test]
fn the_end_of_a_window_is_believed_within_the_window_and_a_twentieth() {
    let used = ("x-codex-primary-used-percent", "50");
    let hours = ("x-codex-primary-window-minutes", "300");
    let reset = "x-codex-primary-reset-after-seconds";
    let week = ("x-codex-primary-window-minutes", "10080");
    check(&[
        (&[used, hours, (reset, "1.5")], &["percent/5h 0.5 ends +1500"], &[]),
        (&[used, hours, (reset, "0.0015")], &["percent/5h 0.5 ends +2"], &[]),
        (&[used, hours, (reset, "0.0004")], &[], &[(reset, ENDED)]),
        (&[used, hours, (reset, "0")], &[], &[(reset, ENDED)]),
        (&[used, hours, (reset, "18900")], &["percent/5h 0.5 ends +18900000"], &[]),
        (&[used, hours, (reset, "18900.001")], &["percent/5h 0.5 open"], &[(reset, TOO_FAR)]),
        (&[used, week, (reset, "635040")], &["percent/weekly 0.5 ends +635040000"], &[]),
        (&[used, week, (reset, "635041")], &["percent/weekly 0.5 open"], &[(reset, TOO_FAR)]),
        (&[used, hours, (reset, "1e300")], &["percent/5h 0.5 open"], &[(reset, TOO_FAR)]),
        (&[used, hours, (reset, "1e999")], &["percent/5h 0.5 open"], &[(reset, NOT_A_TIME)]),
        (&[used, hours, (reset, "-60")], &["percent/5h 0.5 open"], &[(reset, NOT_A_TIME)]),
        (&[used, hours, (reset, "2h")], &["percent/5h 0.5 open"], &[(reset, NOT_A_TIME)]),
        (&[used, hours, (reset, "")], &["percent/5h 0.5 open"], &[(reset, NOT_A_TIME)]),
        // The fuller slot's window has ended: the other one is left.
        (
            &[
                ("x-codex-secondary-used-percent", "90"),
                ("x-codex-secondary-window-minutes", "300"),
                ("x-codex-secondary-reset-after-seconds", "0"),
                used,
                hours,
            ],
            &["percent/5h 0.5 open"],
            &[("x-codex-secondary-reset-after-seconds", ENDED)],
        ),
    ]);
}

#[test]
fn anthropics_unified_windows_are_fractions_and_a_refused_account_is_full() {
    let used = "anthropic-ratelimit-unified-5h-utilization";
    let reset = "anthropic-ratelimit-unified-5h-reset";
    let status = "anthropic-ratelimit-unified-5h-status";
    check(&[
        (
            &[
                ("anthropic-ratelimit-unified-status", "allowed"),
                ("anthropic-ratelimit-unified-5h-status", "allowed"),
                ("anthropic-ratelimit-unified-5h-reset", "1782874800"),
                ("anthropic-ratelimit-unified-5h-utilization", "0.42"),
                ("anthropic-ratelimit-unified-7d-status", "allowed_warning"),
                ("anthropic-ratelimit-unified-7d-reset", "1783116000"),
                ("anthropic-ratelimit-unified-7d-utilization", "0.91"),
                ("anthropic-ratelimit-unified-7d_opus-utilization", "0.99"),
                ("anthropic-ratelimit-unified-representative-claim", "five_hour"),
                ("anthropic-ratelimit-unified-fallback-percentage", "0.5"),
                ("anthropic-ratelimit-unified-reset", "1782874800"),
                ("anthropic-ratelimit-unified-overage-status", "rejected"),
            ],
            &["percent/5h 0.42 ends +10800000", "percent/weekly 0.91 ends +252000000"],
            &[],
        ),
        // Both notations of the end, with offsets, rounded to the millisecond.
        (&[(used, "0.3"), (reset, "2026-07-01T02:30:00Z")], &["percent/5h 0.3 ends +9000000"], &[]),
        (&[(used, "0.3"), (reset, "2026-07-01T04:30:00+02:00")], &["percent/5h 0.3 ends +9000000"], &[]),
        (&[(used, "0.3"), (reset, "2026-06-30T19:30:00.0006-05:00")], &["percent/5h 0.3 ends +1800001"], &[]),
        (&[(used, "0.3"), (reset, "1782864000.25")], &["percent/5h 0.3 ends +250"], &[]),
        (&[(used, "0.3"), (reset, "1.7828676e9")], &["percent/5h 0.3 ends +3600000"], &[]),
        // Ends that have passed, are too far ahead (milliseconds taken for seconds), or are none.
        (&[(used, "0.3"), (reset, "1782864000")], &[], &[(reset, ENDED)]),
        (&[(used, "0.3"), (reset, "2026-06-30T23:59:59Z")], &[], &[(reset, ENDED)]),
        (&[(used, "0.3"), (reset, "1900-01-01T00:00:00Z")], &[], &[(reset, ENDED)]),
        (&[(used, "0.3"), (reset, "0")], &[], &[(reset, ENDED)]),
        (&[(used, "0.3"), (reset, "1782882900")], &["percent/5h 0.3 ends +18900000"], &[]),
        (&[(used, "0.3"), (reset, "1782882900.001")], &["percent/5h 0.3 open"], &[(reset, TOO_FAR)]),
        (&[(used, "0.3"), (reset, "1782874800000")], &["percent/5h 0.3 open"], &[(reset, TOO_FAR)]),
        (&[(used, "0.3"), (reset, "9999-12-30T22:00:00Z")], &["percent/5h 0.3 open"], &[(reset, TOO_FAR)]),
        (&[(used, "0.3"), (reset, "2026-07-01T02:30:00")], &["percent/5h 0.3 open"], &[(reset, NOT_A_TIME)]),
        (&[(used, "0.3"), (reset, "2026-02-30T00:00:00Z")], &["percent/5h 0.3 open"], &[(reset, NOT_A_TIME)]),
        (&[(used, "0.3"), (reset, "2h30m")], &["percent/5h 0.3 open"], &[(reset, NOT_A_TIME)]),
        // Only a refusal says something.
        (&[(used, "0.3"), (status, "rejected")], &["percent/5h 1 open"], &[]),
        (&[(used, "1.04"), (status, "rejected")], &["percent/5h 1.04 open"], &[]),
        (&[(status, "rejected"), (reset, "1782867600")], &["percent/5h 1 ends +3600000"], &[]),
        (&[(status, "rejected"), (reset, "1782860000")], &[], &[(reset, ENDED)]),
        (&[(used, "much"), (status, "rejected")], &["percent/5h 1 open"], &[(used, NOT_A_NUMBER)]),
        (&[(used, "30"), (status, "rejected")], &["percent/5h 1 open"], &[(used, ABOVE_MAX)]),
        (&[(used, "0.3"), (status, "on fire")], &["percent/5h 0.3 open"], &[]),
        (&[(status, "allowed")], &[], &[]),
        (&[(status, "allowed"), (reset, "1782867600")], &[], &[]),
        // A per cent where a fraction belongs.
        (&[(used, "1.5")], &["percent/5h 1.5 open"], &[]),
        (&[(used, "1.51")], &[], &[(used, ABOVE_MAX)]),
        (&[(used, "42"), (reset, "1782867600")], &[], &[(used, ABOVE_MAX)]),
    ]);
}

#[test]
fn what_remains_of_a_limit_is_a_figure_for_one_minute() {
    let limit = "x-ratelimit-limit-tokens";
    let remaining = "x-ratelimit-remaining-tokens";
    check(&[
        (
            &[
                ("x-ratelimit-limit-requests", "500"),
                ("x-ratelimit-remaining-requests", "499"),
                ("x-ratelimit-reset-requests", "120ms"),
                (limit, "30000"),
                (remaining, "24000"),
                ("x-ratelimit-reset-tokens", "12s"),
                ("x-ratelimit-limit-images", "5"),
                ("x-ratelimit-limit", "5"),
                ("x-ratelimit-requests", "5"),
                ("x-ratelimit-used-requests", "5"),
            ],
            &["requests/1m 0.002 refills +120", "tokens/1m 0.2 refills +12000"],
            &[],
        ),
        // All of Anthropic's token limits speak of one dimension: the fullest holds, with its own end.
        (
            &[
                ("anthropic-ratelimit-requests-limit", "50"),
                ("anthropic-ratelimit-requests-remaining", "49"),
                ("anthropic-ratelimit-requests-reset", "2026-07-01T00:00:01Z"),
                ("anthropic-ratelimit-tokens-limit", "80000"),
                ("anthropic-ratelimit-tokens-remaining", "72000"),
                ("anthropic-ratelimit-tokens-reset", "2026-07-01T02:00:04+02:00"),
                ("anthropic-ratelimit-input-tokens-limit", "40000"),
                ("anthropic-ratelimit-input-tokens-remaining", "30000"),
                ("anthropic-ratelimit-input-tokens-reset", "2026-07-01T00:00:02Z"),
                ("anthropic-ratelimit-output-tokens-limit", "8000"),
                ("anthropic-ratelimit-output-tokens-remaining", "8000"),
                ("anthropic-ratelimit-output-tokens-reset", "2026-07-01T00:00:03Z"),
                ("anthropic-ratelimit-requests-used", "1"),
                ("retry-after", "20"),
            ],
            &["requests/1m 0.02 refills +1000", "tokens/1m 0.25 refills +2000"],
            &[],
        ),
        (&[(limit, "1000"), (remaining, "0")], &["tokens/1m 1 open"], &[]),
        (&[(limit, "1000"), (remaining, "1000")], &["tokens/1m 0 open"], &[]),
        (&[(limit, "1e3"), (remaining, "250.0")], &["tokens/1m 0.75 open"], &[]),
        (&[(limit, "5e-324"), (remaining, "0")], &["tokens/1m 1 open"], &[]),
        (&[(limit, "1.7e308"), (remaining, "0")], &["tokens/1m 1 open"], &[]),
        // No scale, or none that fits.
        (&[(limit, "1000"), (remaining, "1001")], &[], &[(remaining, ABOVE_LIMIT)]),
        (&[(limit, "0"), (remaining, "0")], &[], &[(limit, NO_LIMIT)]),
        (&[(limit, "0"), (remaining, "5")], &[], &[(limit, NO_LIMIT)]),
        (&[(limit, "1e-400"), (remaining, "0")], &[], &[(limit, NO_LIMIT)]),
        (&[(limit, "1000")], &[], &[(limit, ALONE)]),
        (&[(remaining, "100"), ("x-ratelimit-reset-tokens", "1s")], &[], &[(remaining, ALONE)]),
        (&[("x-ratelimit-reset-tokens", "1s")], &[], &[]),
        (&[(limit, "many"), (remaining, "100")], &[], &[(limit, NOT_A_NUMBER)]),
        (&[(limit, "1000"), (remaining, "-1")], &[], &[(remaining, NOT_A_NUMBER)]),
        (&[(limit, "-1000"), (remaining, "1")], &[], &[(limit, NOT_A_NUMBER)]),
        // The halves of different limits are no whole.
        (
            &[(limit, "1000"), ("x-ratelimit-remaining-requests", "10")],
            &[],
            &[(limit, ALONE), ("x-ratelimit-remaining-requests", ALONE)],
        ),
        // What is wrong with one limit is no matter to another.
        (
            &[
                (limit, "1000"),
                (remaining, "100"),
                ("anthropic-ratelimit-tokens-limit", "10"),
                ("anthropic-ratelimit-tokens-remaining", "11"),
            ],
            &["tokens/1m 0.9 open"],
            &[("anthropic-ratelimit-tokens-remaining", ABOVE_LIMIT)],
        ),
    ]);
}

#[test]
fn a_bucket_is_full_again_after_a_duration_or_at_a_time() {
    let (year, more) = ("8784h", "8784h1ms");
    // reset | ms after the response, or why it is ignored
    let cases: &[(&str, Result<u64, &str>)] = &[
        ("6m0s", Ok(360_000)),
        ("1h30m15s", Ok(5_415_000)),
        ("1.5s", Ok(1_500)),
        ("250ms", Ok(250)),
        ("2m59.56s", Ok(179_560)),
        ("1h2m3s4ms", Ok(3_723_004)),
        ("1h4ms", Ok(3_600_004)),
        ("90m", Ok(5_400_000)),
        ("8.64s", Ok(8_640)),
        ("1.4999ms", Ok(1)),
        ("0.5ms", Ok(1)),
        ("0h0m0.001s", Ok(1)),
        ("2026-07-01T00:00:30Z", Ok(30_000)),
        ("2026-07-01T00:00:30.0004Z", Ok(30_000)),
        ("2026-07-01T01:00:30+01:00", Ok(30_000)),
        (year, Ok(366 * DAY_MS)),
        ("2027-07-02T00:00:00Z", Ok(366 * DAY_MS)),
        (more, Err(TOO_FAR)),
        ("2027-07-02T00:00:00.001Z", Err(TOO_FAR)),
        ("99999999999999999999999999h", Err(TOO_FAR)),
        ("0s", Err(ENDED)),
        ("0h0m0s0ms", Err(ENDED)),
        ("0.4ms", Err(ENDED)),
        ("2026-07-01T00:00:00Z", Err(ENDED)),
        ("2026-06-30T23:59:59Z", Err(ENDED)),
        ("60", Err(NOT_A_TIME)),
        ("1782864060", Err(NOT_A_TIME)),
        ("", Err(NOT_A_TIME)),
        ("s", Err(NOT_A_TIME)),
        ("ms", Err(NOT_A_TIME)),
        ("1s1s", Err(NOT_A_TIME)),
        ("1s1m", Err(NOT_A_TIME)),
        ("1ms1s", Err(NOT_A_TIME)),
        ("1h1h", Err(NOT_A_TIME)),
        ("1m30", Err(NOT_A_TIME)),
        ("1d", Err(NOT_A_TIME)),
        ("1us", Err(NOT_A_TIME)),
        ("1\u{b5}s", Err(NOT_A_TIME)),
        ("1S", Err(NOT_A_TIME)),
        ("1 s", Err(NOT_A_TIME)),
        ("1m 30s", Err(NOT_A_TIME)),
        ("-1s", Err(NOT_A_TIME)),
        ("+1s", Err(NOT_A_TIME)),
        ("1m-5s", Err(NOT_A_TIME)),
        (".5s", Err(NOT_A_TIME)),
        ("5.s", Err(NOT_A_TIME)),
        ("1.2.3s", Err(NOT_A_TIME)),
        ("1e3s", Err(NOT_A_TIME)),
        ("1,5s", Err(NOT_A_TIME)),
        ("infs", Err(NOT_A_TIME)),
        ("\u{661}s", Err(NOT_A_TIME)),
        ("1s\u{e9}", Err(NOT_A_TIME)),
        ("soon", Err(NOT_A_TIME)),
    ];
    let reset = "x-ratelimit-reset-requests";
    let limit = [("x-ratelimit-limit-requests", "4"), ("x-ratelimit-remaining-requests", "3")];
    for &(given, want) in cases {
        let headers = [limit[0], limit[1], (reset, given)];
        let refills = format!("requests/1m 0.25 refills +{}", want.unwrap_or_default());
        match want {
            Ok(_) => check(&[(&headers, &[refills.as_str()], &[])]),
            Err(ENDED) => check(&[(&headers, &[], &[(reset, ENDED)])]),
            Err(why) => check(&[(&headers, &["requests/1m 0.25 open"], &[(reset, why)])]),
        }
    }
}

#[test]
fn anthropics_buckets_know_no_durations() {
    let reset = "anthropic-ratelimit-requests-reset";
    let limit =
        [("anthropic-ratelimit-requests-limit", "4"), ("anthropic-ratelimit-requests-remaining", "3")];
    for given in ["1s", "1782864060", "60"] {
        let headers = [limit[0], limit[1], (reset, given)];
        check(&[(&headers, &["requests/1m 0.25 open"], &[(reset, NOT_A_TIME)])]);
    }
    check(&[
        (&[limit[0], limit[1], (reset, "2026-06-30T23:59:59.999Z")], &[], &[(reset, ENDED)]),
        (&[limit[0], limit[1], (reset, "2026-07-01T00:00:00.001Z")], &["requests/1m 0.25 refills +1"], &[]),
    ]);
}

#[test]
fn numbers_are_plain_decimals() {
    let used = "anthropic-ratelimit-unified-7d-utilization";
    let long = format!("0.{}", "3".repeat(254));
    let numbers: &[(&str, &str)] = &[
        ("0", "0"),
        ("00.50", "0.5"),
        ("1", "1"),
        ("5e-05", "0.00005"),
        ("5E-1", "0.5"),
        ("0.05e1", "0.5"),
        ("0.05e+1", "0.5"),
        ("0e999", "0"),
        ("1e-999", "0"),
        (" \t0.5\r\n ", "0.5"),
        (&long, "0.3333333333333333"),
    ];
    for (given, fraction) in numbers {
        let want = format!("percent/weekly {fraction} open");
        check(&[(&[(used, given)], &[&want], &[])]);
    }
    let others = [
        "", " ", ".", ".5", "5.", "-0", "-0.5", "+0.5", "0x1", "1_0", "1,5", "0,5", "50%", "NaN", "nan",
        "inf", "Infinity", "-inf", "e", "1e", "e1", "1e+", "1e1.0", "1e1e1", "1.0.0", "1 0", "1e999",
        "\u{661}", "½", "\u{a0}1", "null", "0.5;q=1", "0.5, 0.6", "0\0",
    ];
    for given in others {
        check(&[(&[(used, given)], &[], &[(used, NOT_A_NUMBER)])]);
    }
}

#[test]
fn a_header_given_twice_is_believed_if_it_says_the_same() {
    let used = "anthropic-ratelimit-unified-5h-utilization";
    let reset = "anthropic-ratelimit-unified-5h-reset";
    let status = "anthropic-ratelimit-unified-5h-status";
    check(&[
        (
            &[
                ("Anthropic-RateLimit-Unified-5h-Utilization", "0.5"),
                ("ANTHROPIC-RATELIMIT-UNIFIED-5H-RESET", "1782867600"),
            ],
            &["percent/5h 0.5 ends +3600000"],
            &[],
        ),
        (
            &[("Anthropic-Ratelimit-Unified-5H-utilization", "0.5"), (used, " 0.5 ")],
            &["percent/5h 0.5 open"],
            &[],
        ),
        (
            &[(used, "0.5"), ("Anthropic-Ratelimit-Unified-5h-Utilization", "0.6")],
            &[],
            &[(used, NOT_ONE_VALUE)],
        ),
        // Equal numbers, different texts.
        (&[(used, "0.5"), (used, "0.50")], &[], &[(used, NOT_ONE_VALUE)]),
        // Two that agree don't outvote a third.
        (&[(used, "0.5"), (used, "0.6"), (used, "0.5")], &[], &[(used, NOT_ONE_VALUE)]),
        (
            &[(used, "0.5"), (reset, "1782867600"), ("anthropic-ratelimit-unified-5h-RESET", "1782867601")],
            &["percent/5h 0.5 open"],
            &[(reset, NOT_ONE_VALUE)],
        ),
        (
            &[(used, "0.5"), (status, "rejected"), (status, "allowed")],
            &["percent/5h 0.5 open"],
            &[(status, NOT_ONE_VALUE)],
        ),
        (
            &[(used, "0.5"), (used, "0.6"), (status, "rejected")],
            &["percent/5h 1 open"],
            &[(used, NOT_ONE_VALUE)],
        ),
        // Each is named, though one alone would have spoilt the figure.
        (
            &[
                ("x-ratelimit-limit-tokens", "1"),
                ("X-ratelimit-limit-tokens", "2"),
                ("x-ratelimit-remaining-tokens", "1"),
                ("X-ratelimit-remaining-tokens", "2"),
                ("x-ratelimit-reset-tokens", "1s"),
                ("X-ratelimit-reset-tokens", "2s"),
            ],
            &[],
            &[
                ("x-ratelimit-limit-tokens", NOT_ONE_VALUE),
                ("x-ratelimit-remaining-tokens", NOT_ONE_VALUE),
                ("x-ratelimit-reset-tokens", NOT_ONE_VALUE),
            ],
        ),
    ]);
}

#[test]
fn long_values_and_strange_names_do_no_harm() {
    let used = "x-codex-primary-used-percent";
    let minutes = ("x-codex-primary-window-minutes", "300");
    let reset = "x-codex-primary-reset-after-seconds";
    let (longest, too_long) = ("0".repeat(256), "0".repeat(257));
    let (huge, accents) = ("9".repeat(10_000), "é".repeat(10_000));
    let padded = format!("{}50{}", " ".repeat(10_000), " ".repeat(10_000));
    let huge_name = "x-codex-primary-".repeat(1_000);
    check(&[
        (&[(used, &longest), minutes], &["percent/5h 0 open"], &[]),
        (&[(used, &too_long), minutes], &[], &[(used, TOO_LONG)]),
        (&[(used, &huge), minutes], &[], &[(used, TOO_LONG)]),
        (&[(used, &accents), minutes], &[], &[(used, TOO_LONG)]),
        (&[(used, &padded), minutes], &["percent/5h 0.5 open"], &[]),
        (&[(used, "50"), minutes, (reset, &huge)], &["percent/5h 0.5 open"], &[(reset, TOO_LONG)]),
        (
            &[("anthropic-ratelimit-unified-5h-status", &huge)],
            &[],
            &[("anthropic-ratelimit-unified-5h-status", TOO_LONG)],
        ),
        // Names that are almost those of a source.
        (
            &[
                ("", "1"),
                ("*", "1"),
                ("x-codex-primary-*", "1"),
                ("x-codex-primary-", "1"),
                ("x-codex-primary-used-percent ", "1"),
                (" x-codex-primary-used-percent", "1"),
                ("x-codex-primary-used-percents", "1"),
                ("x-codex-primary-used_percent", "1"),
                ("x-ratelimit-requests", "1"),
                ("x-ratelimit--requests", "1"),
                ("x-ratelimit-limit-tokens-tokens", "1"),
                ("x-ratelimit-remaining-to\u{212a}ens", "1"), // a Kelvin sign
                ("é-ratelimit-limit-requests", "1"),
                ("x-ratelimit-é", "1"),
                (&huge_name, &huge),
                (&accents, &accents),
            ],
            &[],
            &[],
        ),
    ]);
}

#[test]
fn what_is_ignored_is_named_without_its_value() {
    let secret = "sk-live-51H8xQq2eZvKYlo2C";
    let headers: Pairs = SOURCES.iter().flat_map(names).map(|name| (name, secret.to_owned())).collect();
    let reading = read_pairs(&headers, Timestamp::from_unix_ms(T0_MS));
    assert_eq!(reading.signals, []);
    assert!(reading.ignored.len() >= 10, "{:?}", reading.ignored);
    assert!(!format!("{reading:?}").contains("51H8"), "{reading:?}");
    assert_eq!(
        reading.ignored[0].to_string(),
        "anthropic-ratelimit-input-tokens-remaining: not a plain decimal number"
    );
}

#[test]
fn any_time_of_the_response_is_survived() {
    let headers = [
        ("x-codex-primary-used-percent", "50"),
        ("x-codex-primary-window-minutes", "300"),
        ("x-codex-primary-reset-after-seconds", "60"),
        ("x-ratelimit-limit-tokens", "4"),
        ("x-ratelimit-remaining-tokens", "2"),
        ("x-ratelimit-reset-tokens", "1m"),
    ];
    // The last instant has no later one.
    for (at, signals) in [(0, 2), (u64::MAX - 1, 2), (u64::MAX, 0)] {
        let reading = read(headers, Timestamp::from_unix_ms(at));
        assert_eq!((reading.signals.len(), reading.ignored.len()), (signals, 2 - signals), "at {at}");
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Percent,
    Fraction,
    Remaining,
}

use Kind::{Fraction, Percent, Remaining};

/// What stands before and after the part in the names of headers that give one figure together.
const SOURCES: &[(Kind, &str, &str)] = &[
    (Percent, "x-codex-primary-", ""),
    (Percent, "x-codex-secondary-", ""),
    (Fraction, "anthropic-ratelimit-unified-5h-", ""),
    (Fraction, "anthropic-ratelimit-unified-7d-", ""),
    (Remaining, "anthropic-ratelimit-requests-", ""),
    (Remaining, "anthropic-ratelimit-tokens-", ""),
    (Remaining, "anthropic-ratelimit-input-tokens-", ""),
    (Remaining, "anthropic-ratelimit-output-tokens-", ""),
    (Remaining, "x-ratelimit-", "-requests"),
    (Remaining, "x-ratelimit-", "-tokens"),
];

/// The figure's header, the one beside it, and the one of its end.
fn names(&(kind, before, after): &(Kind, &str, &str)) -> [String; 3] {
    let parts = match kind {
        Percent => ["used-percent", "window-minutes", "reset-after-seconds"],
        Fraction => ["utilization", "status", "reset"],
        Remaining => ["remaining", "limit", "reset"],
    };
    parts.map(|part| format!("{before}{part}{after}"))
}

type Pairs = Vec<(String, String)>;

fn read_pairs(headers: &[(String, String)], at: Timestamp) -> HeaderReading {
    read(headers.iter().map(|(name, value)| (name.as_str(), value.as_str())), at)
}

#[test]
fn whatever_comes_what_is_said_is_in_range_and_what_is_ignored_tells_no_value() {
    let seen = RefCell::new(BTreeMap::<String, u32>::new());
    for_all(6_000, (any_headers(), any_time()), |(headers, at)| {
        let reading = read_pairs(&headers, at);
        for signal in &reading.signals {
            check_signal(signal, at)?;
        }
        prop_assert!(reading.signals.is_sorted_by(|a, b| a.dimension < b.dimension));
        let given: BTreeSet<String> = headers.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
        for ignored in &reading.ignored {
            prop_assert!(ignored.header.len() <= 80 && given.contains(&ignored.header), "{ignored}");
            prop_assert!(WHYS.contains(&ignored.why), "{ignored}");
        }
        prop_assert!(reading.ignored.is_sorted_by(|a, b| a.header < b.header));
        let resets = reading.signals.iter().map(|signal| match signal.reset {
            Reset::Unknown => "open",
            Reset::WindowEnd(_) => "a window's end",
            Reset::Refill(_) => "a refill",
        });
        for met in resets.chain(reading.ignored.iter().map(|ignored| ignored.why)) {
            *seen.borrow_mut().entry(met.to_owned()).or_default() += 1;
        }
        Ok(())
    });
    // A generator that doesn't come by what is interesting finds nothing.
    for met in ["open", "a window's end", "a refill"].iter().chain(WHYS) {
        let times = seen.borrow().get(*met).copied().unwrap_or_default();
        assert!(times >= 50, "{met:?} was met {times} times");
    }
}

fn check_signal(signal: &HeaderSignal, at: Timestamp) -> Result<(), TestCaseError> {
    let window_ms = signal.dimension.window.length_ms();
    prop_assert!((0.0..=1.5).contains(&signal.fraction), "{signal:?}");
    prop_assert!(signal.reset.end().is_none_or(|end| end > at), "{signal:?}");
    let ahead_max_ms = match signal.reset {
        Reset::Unknown => return Ok(()),
        Reset::WindowEnd(_) => {
            prop_assert_eq!(signal.dimension.unit, Unit::Percent);
            window_ms + window_ms / 20
        }
        Reset::Refill(_) => {
            prop_assert_eq!(window_ms, 60_000);
            366 * DAY_MS
        }
    };
    prop_assert!(signal.reset.end().is_some_and(|end| end.ms_since(at) <= ahead_max_ms), "{signal:?}");
    Ok(())
}

/// Nor on their case, on white space around values, on being repeated, or on headers of others.
#[test]
fn a_reading_does_not_depend_on_the_order_of_the_headers() {
    let shuffled =
        any_headers().prop_flat_map(|headers| (Just(headers.clone()), Just(headers).prop_shuffle()));
    for_all(3_000, (shuffled, any_time(), any::<u64>()), |((headers, shuffled), at, mask)| {
        let want = read_pairs(&headers, at);
        prop_assert_eq!(&read_pairs(&shuffled, at), &want);
        let disguised =
            shuffled.iter().map(|(name, value)| (in_case(name, mask), format!("\t {value} \r\n")));
        let foreign = ("x-request-id".to_owned(), "1".to_owned());
        let disguised: Pairs = disguised.chain([foreign]).chain(headers).collect();
        prop_assert_eq!(&read_pairs(&disguised, at), &want);
        Ok(())
    });
}

/// All headers of some sources, of which some are left out, repeated or followed by strangers.
fn any_headers() -> impl Strategy<Value = Pairs> {
    let groups = prop::collection::vec(any_group(), 0..5).prop_map(|groups| groups.concat());
    let others = prop::collection::vec(("[a-zA-Z*é -]{0,12}", any_text()), 0..3);
    (groups, others).prop_map(|(groups, others)| [groups, others].concat())
}

fn any_group() -> impl Strategy<Value = Pairs> {
    select(SOURCES).prop_flat_map(|source| {
        let [figure, beside, end] = names(&source);
        let (figures, besides) = match source.0 {
            Percent => (any_percent().boxed(), select(&["300", "300", "10080", "60", "0"]).boxed()),
            Fraction => (any_fraction().boxed(), select(&["allowed", "allowed_warning", "rejected"]).boxed()),
            Remaining => (any_small().boxed(), select(&["1000", "500", "2e2", "0"]).boxed()),
        };
        let besides = besides.prop_map(str::to_owned);
        (any_header(figure, figures), any_header(beside, besides), any_header(end, any_end()))
            .prop_map(|(figure, beside, end)| [figure, beside, end].concat())
    })
}

/// Mostly one of this name, now and then none, or two that agree or don't.
fn any_header(
    name: String,
    fitting: impl Strategy<Value = String> + 'static,
) -> impl Strategy<Value = Pairs> {
    let value = prop_oneof![20 => fitting, 1 => any_text(), 1 => any_number(), 1 => any_end()].boxed();
    let values = prop_oneof![
        16 => prop::collection::vec(value.clone(), 1),
        1 => Just(Vec::new()),
        1 => prop::collection::vec(value.clone(), 2..4),
        1 => value.prop_map(|value| vec![value; 2]),
    ];
    (values, any::<u64>()).prop_map(move |(values, mask)| {
        let spelt = |n: usize| in_case(&name, mask.rotate_left(n as u32));
        values.into_iter().enumerate().map(|(n, value)| (spelt(n), value)).collect()
    })
}

/// `name` with the letters in capitals whose bit is set.
fn in_case(name: &str, mask: u64) -> String {
    let capital = |(at, c): (usize, char)| {
        if mask >> (at % 64) & 1 == 1 { c.to_ascii_uppercase() } else { c.to_ascii_lowercase() }
    };
    name.chars().enumerate().map(capital).collect()
}

fn any_percent() -> impl Strategy<Value = String> {
    prop_oneof![8 => (0..160u32).prop_map(|n| n.to_string()), 2 => (0.0..160.0f64).prop_map(|n| n.to_string())]
}

fn any_fraction() -> impl Strategy<Value = String> {
    prop_oneof![8 => 0.0..1.1f64, 1 => 1.4..1.6f64].prop_map(|n| n.to_string())
}

fn any_small() -> impl Strategy<Value = String> {
    (0..1_200u32).prop_map(|n| n.to_string())
}

/// Numbers, and what is almost one.
fn any_number() -> impl Strategy<Value = String> {
    prop_oneof![
        "[+-]?[0-9]{0,4}(\\.[0-9]{0,4})?([eE][+-]?[0-9]{0,3})?",
        any::<f64>().prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|n| format!("{n:e}")),
        select(&["inf", "NaN", "0x10", "1_000", "50%", "1e999", "\u{661}"]).prop_map(str::to_owned),
    ]
}

/// Ends around the response's time in all notations, and what is almost one.
fn any_end() -> impl Strategy<Value = String> {
    let t0_ms = T0_MS as i64;
    let offset_ms = prop_oneof![-5_000..5_000i64, 0..20_000_000i64, -9 * t0_ms..t0_ms * 9];
    let hours = -25..26i8;
    let epoch = offset_ms.clone().prop_map(move |ms| ((t0_ms + ms) as f64 / 1_000.0).to_string());
    let rfc_3339 = (offset_ms, hours).prop_map(move |(ms, hours)| {
        let time = jiff::Timestamp::from_millisecond(t0_ms + ms).unwrap_or(jiff::Timestamp::MIN);
        time.display_with_offset(jiff::tz::offset(hours)).to_string()
    });
    prop_oneof![
        3 => (0..20_000_000u64).prop_map(|ms| (ms as f64 / 1_000.0).to_string()),
        3 => epoch,
        3 => rfc_3339,
        3 => "[0-9]h[0-9]{1,2}m[0-9]s",
        3 => "[0-9]{1,2}(\\.[0-9]{1,5})?(s|ms)",
        1 => "([0-9]{0,9}(\\.[0-9]{1,3})?(h|m|s|ms|d)){0,5}",
        1 => "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]{1,12})?(Z|[+-][0-9]{2}:[0-9]{2})?",
    ]
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![4 => any::<String>(), 1 => "[0-9]{250,300}", 1 => "\\PC{0,400}", 1 => "[ \t\r\n]{0,4}"]
}

fn any_time() -> impl Strategy<Value = Timestamp> {
    let around = T0_MS - HOUR_MS..T0_MS + HOUR_MS;
    prop_oneof![8 => Just(T0_MS), 4 => around, 1 => any::<u64>(), 1 => Just(0), 1 => Just(u64::MAX)]
        .prop_map(Timestamp::from_unix_ms)
}
