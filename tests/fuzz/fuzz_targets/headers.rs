//! Whatever headers come: no panic, figures and ends in range, no value in what is ignored, and the same reading in
//! any order.

#![no_main]

use libfuzzer_sys::fuzz_target;
use quota_share::core::{
    headers::{HeaderSignal, Reset, read},
    units::Timestamp,
};

const REFILL_AHEAD_MAX_MS: u64 = 366 * 86_400_000;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    let at = Timestamp::from_unix_ms(first.parse().unwrap_or(1_782_864_000_000));
    let headers: Vec<_> = rest.split('\n').filter_map(|line| line.split_once(':')).collect();

    let reading = read(headers.iter().copied(), at);
    reading.signals.iter().for_each(|signal| check(signal, at));
    assert!(reading.signals.is_sorted_by(|a, b| a.dimension < b.dimension));
    assert!(reading.ignored.is_sorted_by(|a, b| a.header < b.header));
    for ignored in &reading.ignored {
        assert!(ignored.header.len() <= 80);
        assert!(headers.iter().any(|(name, _)| name.to_ascii_lowercase() == ignored.header));
        // What is written in the program is no value.
        let _: &'static str = ignored.why;
    }
    assert_eq!(read(headers.iter().rev().copied(), at), reading);
});

fn check(signal: &HeaderSignal, at: Timestamp) {
    assert!((0.0..=1.5).contains(&signal.fraction), "{signal:?}");
    let window_ms = signal.dimension.window.length_ms();
    let (end, ahead_max_ms) = match signal.reset {
        Reset::Unknown => return,
        Reset::WindowEnd(end) => (end, window_ms + window_ms / 20),
        Reset::Refill(end) => (end, REFILL_AHEAD_MAX_MS),
    };
    assert!(end > at && end.ms_since(at) <= ahead_max_ms, "{signal:?} at {at:?}");
}
