//! What a provider says of an account in the headers of a response.
//!
//! Headers that give one figure together are a *source*. The table of sources is all that is known of providers, and
//! names alone tell where a header belongs:
//!
//! | headers                                 | dimension              | figure, and its end                              |
//! |-----------------------------------------|------------------------|--------------------------------------------------|
//! | `x-codex-{primary,secondary}-*`         | percent/5h or weekly   | per cent; ends in so many seconds                |
//! | `anthropic-ratelimit-unified-{5h,7d}-*` | percent/5h or weekly   | a fraction or a refusal; epoch seconds, RFC 3339 |
//! | `anthropic-ratelimit-{requests,..}-*`   | requests or tokens/1m  | what remains of a limit; RFC 3339                |
//! | `x-ratelimit-*-{requests,tokens}`       | requests or tokens/1m  | what remains of a limit; `6m0s`, RFC 3339        |
//!
//! Headers come from outside and may say anything. A header of a source is believed as it stands, or ignored and named;
//! nothing is clamped into its range. An end that can't be believed leaves its figure without one, an end that has
//! passed takes its figure along, and an end without a figure says nothing. Other headers are passed over.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};

use super::{
    plan::DimensionKey,
    units::{
        Timestamp,
        Unit::{self, Percent, Requests, Tokens},
    },
    window::Window,
};

/// The highest fraction that is believed: accounts go past a limit by what is in flight, not by half of it.
pub const FRACTION_MAX: f64 = 1.5;
/// No figure and no time needs more.
const VALUE_BYTES_MAX: usize = 256;
/// How far ahead the end of `window` may be: its length, and a twentieth of it, since ends wander.
const fn end_ahead_max_ms(window: Window) -> u64 {
    window.length_ms() + window.length_ms() / 20
}

/// What headers say of one dimension of an account.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeaderSignal {
    /// The unit and window that the figure speaks for; it speaks for no other.
    pub dimension: DimensionKey,
    /// The used fraction of the account's limit: 0 to 1.5, 1 is full.
    pub fraction: f64,
    /// When the figure ends.
    pub reset: Reset,
}

/// When a figure ends: always after the response that it came with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reset {
    /// Not said, or not believed.
    Unknown,
    /// The end of the provider's window: it anchors one. At most 1.05 times the window's length ahead.
    WindowEnd(Timestamp),
    /// When a bucket is full again: it ends the figure and anchors nothing. At most 366 days ahead.
    Refill(Timestamp),
}

impl Reset {
    /// What an `end` means that was named at `observed_at` without saying of what: of the window if it can be, else of the
    /// figure alone.
    pub fn of(window: Window, observed_at: Timestamp, end: Timestamp) -> Reset {
        if end.ms_since(observed_at) <= end_ahead_max_ms(window) {
            Reset::WindowEnd(end)
        } else {
            Reset::Refill(end)
        }
    }

    /// The end, where it is known.
    pub const fn end(self) -> Option<Timestamp> {
        match self {
            Reset::Unknown => None,
            Reset::WindowEnd(end) | Reset::Refill(end) => Some(end),
        }
    }
}

/// A header that speaks of utilisation and isn't believed. Its value is no part of this: values may be secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// Its name in lower case, at most 80 bytes. A missing header is told by the name of one that came without it.
    pub header: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.header, self.why)
    }
}

/// What the headers of one response say; the same in whatever order they came.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeaderReading {
    /// By dimension, one for each: of several figures the highest, of equal ones the one that ends later.
    pub signals: Vec<HeaderSignal>,
    /// By header, one for each.
    pub ignored: Vec<Ignored>,
}

/// Reads `headers`, names with values, of the response that came at `observed_at`.
///
/// The case of names and white space around values don't matter. Ends are whole milliseconds, rounded to the nearest.
pub fn read<'a>(
    headers: impl IntoIterator<Item = (&'a str, &'a str)>,
    observed_at: Timestamp,
) -> HeaderReading {
    let mut groups = SOURCES.each_ref().map(Group::of);
    for (name, value) in headers {
        for group in &mut groups {
            group.offer(name, value);
        }
    }
    let mut findings = Findings::default();
    for group in &groups {
        findings.add(group, observed_at);
    }
    let ignored = findings.ignored.into_iter().map(|(header, why)| Ignored { header, why });
    HeaderReading { signals: findings.signals.into_values().collect(), ignored: ignored.collect() }
}

/// Headers that give one figure together.
struct Source {
    /// Their names; `*` stands for a part of the family.
    names: &'static str,
    family: &'static Family,
    unit: Unit,
    /// More than one where the headers say which.
    windows: &'static [&'static str],
}

/// What sources of one shape have in common.
struct Family {
    /// What each [`Part`] is called, in its order.
    parts: [&'static str; 3],
    figure: fn(&Group<'_>, &mut Findings) -> Result<Option<Figure>, Fault>,
    /// Notations of the end; the first that fits holds.
    times: &'static [fn(&str, Timestamp) -> Option<Timestamp>],
    reset: fn(Timestamp) -> Reset,
}

/// The role of a header in its source.
#[derive(Clone, Copy)]
enum Part {
    Figure,
    /// What the figure is read with.
    Beside,
    End,
}

/// A window, and the used fraction of the limit in it.
type Figure = (Window, f64);

/// A header that was given, and what is wrong with it.
struct Fault(Part, &'static str);

const CODEX: Family = Family {
    parts: ["used-percent", "window-minutes", "reset-after-seconds"],
    figure: percent_by_minutes,
    times: &[seconds_after],
    reset: Reset::WindowEnd,
};
const UNIFIED: Family = Family {
    parts: ["utilization", "status", "reset"],
    figure: fraction_or_refusal,
    times: &[epoch_seconds, rfc_3339],
    reset: Reset::WindowEnd,
};
const ANTHROPIC: Family = Family {
    parts: ["remaining", "limit", "reset"],
    figure: remaining_of_limit,
    times: &[rfc_3339],
    reset: Reset::Refill,
};
const OPENAI: Family = Family { times: &[duration_after, rfc_3339], ..ANTHROPIC };

static SOURCES: [Source; 10] = [
    Source { names: "x-codex-primary-*", family: &CODEX, unit: Percent, windows: &["5h", "weekly"] },
    Source { names: "x-codex-secondary-*", family: &CODEX, unit: Percent, windows: &["5h", "weekly"] },
    Source { names: "anthropic-ratelimit-unified-5h-*", family: &UNIFIED, unit: Percent, windows: &["5h"] },
    Source {
        names: "anthropic-ratelimit-unified-7d-*",
        family: &UNIFIED,
        unit: Percent,
        windows: &["weekly"],
    },
    Source { names: "anthropic-ratelimit-requests-*", family: &ANTHROPIC, unit: Requests, windows: &["1m"] },
    Source { names: "anthropic-ratelimit-tokens-*", family: &ANTHROPIC, unit: Tokens, windows: &["1m"] },
    Source {
        names: "anthropic-ratelimit-input-tokens-*",
        family: &ANTHROPIC,
        unit: Tokens,
        windows: &["1m"],
    },
    Source {
        names: "anthropic-ratelimit-output-tokens-*",
        family: &ANTHROPIC,
        unit: Tokens,
        windows: &["1m"],
    },
    Source { names: "x-ratelimit-*-requests", family: &OPENAI, unit: Requests, windows: &["1m"] },
    Source { names: "x-ratelimit-*-tokens", family: &OPENAI, unit: Tokens, windows: &["1m"] },
];

impl Source {
    fn windows(&self) -> impl Iterator<Item = Window> {
        self.windows.iter().filter_map(|name| Window::parse(name))
    }
}

/// What was given of one source.
struct Group<'a> {
    source: &'static Source,
    /// What stands before and after the part in the source's names.
    around: (&'static str, &'static str),
    /// The different values of each part.
    given: [BTreeSet<&'a str>; 3],
}

impl<'a> Group<'a> {
    const PARTS: [Part; 3] = [Part::Figure, Part::Beside, Part::End];

    fn of(source: &'static Source) -> Self {
        let around = source.names.split_once('*').unwrap_or((source.names, ""));
        Group { source, around, given: Default::default() }
    }

    /// Takes a header in if it is one of the source's.
    fn offer(&mut self, name: &str, value: &'a str) {
        if let Some(part) = self.part(name) {
            self.given[part as usize].insert(value.trim_ascii());
        }
    }

    fn part(&self, name: &str) -> Option<Part> {
        let (before, rest) = name.split_at_checked(self.around.0.len())?;
        let (part, after) = rest.split_at_checked(rest.len().checked_sub(self.around.1.len())?)?;
        let ours = before.eq_ignore_ascii_case(self.around.0) && after.eq_ignore_ascii_case(self.around.1);
        let mut parts = Self::PARTS.into_iter().filter(|_| ours);
        parts.find(|role| part.eq_ignore_ascii_case(self.source.family.parts[*role as usize]))
    }

    fn text(&self, part: Part) -> Result<Option<&'a str>, Fault> {
        let given = &self.given[part as usize];
        match given.first() {
            Some(_) if given.len() > 1 => Err(Fault(part, "given more than once with different values")),
            Some(text) if text.len() > VALUE_BYTES_MAX => Err(Fault(part, "longer than 256 bytes")),
            text => Ok(text.copied()),
        }
    }

    fn number(&self, part: Part) -> Result<Option<f64>, Fault> {
        let read = |text| number(text).ok_or(Fault(part, "not a plain decimal number"));
        self.text(part)?.map(read).transpose()
    }

    /// The figure and what is beside it; neither is read alone.
    fn pair(&self) -> Result<Option<(f64, f64)>, Fault> {
        let alone = |part| Err(Fault(part, "read with another header, which is missing"));
        match (self.number(Part::Figure)?, self.number(Part::Beside)?) {
            (None, None) => Ok(None),
            (Some(figure), Some(beside)) => Ok(Some((figure, beside))),
            (Some(_), None) => alone(Part::Figure),
            (None, Some(_)) => alone(Part::Beside),
        }
    }

    /// When the figure ends, which may have been before the response.
    fn reset(&self, window: Window, observed_at: Timestamp) -> Result<Reset, Fault> {
        let family = self.source.family;
        let Some(text) = self.text(Part::End)? else { return Ok(Reset::Unknown) };
        let end = family.times.iter().find_map(|read| read(text, observed_at));
        let reset = end.map(family.reset).ok_or(Fault(Part::End, "not a time in a known format"))?;
        let ahead_max_ms = match reset {
            Reset::Refill(_) => Window::LONGEST_MS,
            _ => end_ahead_max_ms(window),
        };
        match reset.end() {
            Some(end) if end.ms_since(observed_at) > ahead_max_ms => Err(Fault(Part::End, "too far ahead")),
            _ => Ok(reset),
        }
    }
}

fn percent_by_minutes(group: &Group<'_>, _: &mut Findings) -> Result<Option<Figure>, Fault> {
    let Some((percent, minutes)) = group.pair()? else { return Ok(None) };
    let mut windows = group.source.windows();
    let window = windows.find(|window| window.length_ms() as f64 == minutes * 60_000.0);
    let window = window.ok_or(Fault(Part::Beside, "not the minutes of a known window"))?;
    Ok(Some((window, believable(percent / 100.0)?)))
}

/// The account is refused where the header beside the figure says so, whatever became of the figure.
fn fraction_or_refusal(group: &Group<'_>, findings: &mut Findings) -> Result<Option<Figure>, Fault> {
    let said = group.number(Part::Figure).and_then(|said| said.map(believable).transpose());
    let refused = matches!(group.text(Part::Beside), Ok(Some("rejected"))).then_some(1.0);
    let fraction = findings.hear(group, said).flatten().into_iter().chain(refused).reduce(f64::max);
    Ok(group.source.windows().next().zip(fraction))
}

fn remaining_of_limit(group: &Group<'_>, _: &mut Findings) -> Result<Option<Figure>, Fault> {
    let Some((remaining, limit)) = group.pair()? else { return Ok(None) };
    if limit == 0.0 {
        return Err(Fault(Part::Beside, "a limit of nothing"));
    }
    if remaining > limit {
        return Err(Fault(Part::Figure, "more than the limit"));
    }
    Ok(group.source.windows().next().zip(Some((limit - remaining) / limit)))
}

fn believable(fraction: f64) -> Result<f64, Fault> {
    let nonsense = Fault(Part::Figure, "above one and a half times the limit");
    if fraction <= FRACTION_MAX { Ok(fraction) } else { Err(nonsense) }
}

/// What has been read so far.
#[derive(Default)]
struct Findings {
    signals: BTreeMap<DimensionKey, HeaderSignal>,
    ignored: BTreeMap<String, &'static str>,
}

impl Findings {
    fn add(&mut self, group: &Group<'_>, observed_at: Timestamp) {
        for part in Group::PARTS {
            self.hear(group, group.text(part));
        }
        let figure = (group.source.family.figure)(group, self);
        let Some((window, fraction)) = self.hear(group, figure).flatten() else { return };
        let reset = self.hear(group, group.reset(window, observed_at)).unwrap_or(Reset::Unknown);
        if reset.end().is_some_and(|end| end <= observed_at) {
            self.ignore(group, Fault(Part::End, "not after the response: its figure has ended"));
            return;
        }
        let dimension = DimensionKey { unit: group.source.unit, window };
        self.keep(HeaderSignal { dimension, fraction, reset });
    }

    /// The value, or `None` and one more header ignored.
    fn hear<T>(&mut self, group: &Group<'_>, heard: Result<T, Fault>) -> Option<T> {
        heard.map_err(|fault| self.ignore(group, fault)).ok()
    }

    /// Names a header once, for the first fault found in it.
    fn ignore(&mut self, group: &Group<'_>, Fault(part, why): Fault) {
        let header = group.source.names.replace('*', group.source.family.parts[part as usize]);
        self.ignored.entry(header).or_insert(why);
    }

    fn keep(&mut self, signal: HeaderSignal) {
        let rank = |signal: &HeaderSignal| (signal.fraction, signal.reset.end());
        let kept = self.signals.entry(signal.dimension).or_insert(signal);
        if rank(&signal) > rank(kept) {
            *kept = signal;
        }
    }
}

/// Digits, an optional fraction, an optional exponent: no sign, and no other notation of Rust's parser.
fn number(text: &str) -> Option<f64> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, "0"));
    let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    let plain = [whole, fraction, exponent].into_iter().all(digits);
    text.parse().ok().filter(|value: &f64| plain && value.is_finite())
}

fn seconds_after(text: &str, observed_at: Timestamp) -> Option<Timestamp> {
    Some(observed_at.plus_ms(whole(number(text)? * 1_000.0)))
}

fn epoch_seconds(text: &str, _: Timestamp) -> Option<Timestamp> {
    Some(Timestamp::from_unix_ms(whole(number(text)? * 1_000.0)))
}

/// Rounded; what is past the range of times is the end of it.
fn whole(ms: f64) -> u64 {
    ms.round() as u64
}

/// What is before the epoch is the epoch: no response is older.
fn rfc_3339(text: &str, _: Timestamp) -> Option<Timestamp> {
    const MS_NS: i128 = 1_000_000;
    let ns = text.parse::<jiff::Timestamp>().ok()?.as_nanosecond();
    let ms = (ns + MS_NS / 2).div_euclid(MS_NS);
    Some(Timestamp::from_unix_ms(u64::try_from(ms).unwrap_or(0)))
}

/// `1h30m15s`, `2m59.56s`, `250ms`: from the largest unit to the smallest, each at most once.
fn duration_after(text: &str, observed_at: Timestamp) -> Option<Timestamp> {
    let mut units = [("h", 3_600_000.0), ("m", 60_000.0), ("s", 1_000.0), ("ms", 1.0)].into_iter();
    let (mut rest, mut ms) = (text, 0.0);
    loop {
        let (amount, after) = rest.split_at(rest.find(|c: char| c.is_ascii_alphabetic())?);
        let (unit, after) = after.split_at(after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len()));
        // Units that were passed over are gone.
        let (_, unit_ms) = units.find(|(name, _)| *name == unit)?;
        ms += number(amount)? * unit_ms;
        if after.is_empty() {
            return Some(observed_at.plus_ms(whole(ms)));
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_of_the_table_has_windows_and_short_names_that_no_other_row_has() {
        for source in &SOURCES {
            assert_eq!(source.windows().count(), source.windows.len(), "{}", source.names);
            for part in source.family.parts {
                let name = source.names.replace('*', part);
                assert!(name.len() <= 80 && name == name.to_ascii_lowercase(), "{name}");
                let owners = SOURCES.iter().filter(|other| Group::of(other).part(&name).is_some());
                assert_eq!(owners.count(), 1, "{name}");
            }
        }
    }
}
