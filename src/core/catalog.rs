//! The plans that the service knows by provider, without being told.

use super::{
    plan::{Dimension, DimensionKey},
    units::Unit::{self, Percent, Requests, Tokens, Usd},
    window::Window,
};

/// Unit, window and limit for each connection; `None`: the provider has the limit and does not publish it.
type Row = (Unit, &'static str, Option<f64>);

const PERCENT_5H_WEEKLY: &[Row] = &[(Percent, "5h", Some(100.0)), (Percent, "weekly", Some(100.0))];
const PERCENT_5H_WEEKLY_MONTHLY: &[Row] =
    &[(Percent, "5h", Some(100.0)), (Percent, "weekly", Some(100.0)), (Percent, "monthly", Some(100.0))];
const TOKENS_5H_WEEKLY_UNKNOWN: &[Row] = &[(Tokens, "5h", None), (Tokens, "weekly", None)];

/// By provider's name. A provider that is not here has no plan until one is put.
const CATALOG: &[(&str, &[Row])] = &[
    ("alibaba", &[(Requests, "monthly", Some(90_000.0))]),
    ("bailian", PERCENT_5H_WEEKLY_MONTHLY),
    ("bailian-coding-plan", PERCENT_5H_WEEKLY_MONTHLY),
    ("claude", PERCENT_5H_WEEKLY),
    ("codex", PERCENT_5H_WEEKLY),
    ("deepseek", &[(Usd, "monthly", None)]),
    ("glm", TOKENS_5H_WEEKLY_UNKNOWN),
    (
        "grok-cli",
        &[
            (Requests, "daily", Some(864.0)),
            (Requests, "weekly", Some(6_048.0)),
            (Tokens, "daily", Some(18e6)),
            (Tokens, "weekly", Some(126e6)),
        ],
    ),
    ("kimi", &[(Requests, "hourly", Some(1_500.0))]),
    ("kimi-coding", TOKENS_5H_WEEKLY_UNKNOWN),
    ("minimax", TOKENS_5H_WEEKLY_UNKNOWN),
    ("xiaomi-mimo", &[(Tokens, "monthly", Some(4.1e9))]),
];

/// The dimensions of `provider`'s plan, or `None` if it is not in the catalogue.
pub fn dimensions_of(provider: &str) -> Option<Vec<Dimension>> {
    let (_, rows) = CATALOG.iter().find(|(name, _)| *name == provider)?;
    Some(rows.iter().filter_map(dimension).collect())
}

/// Every provider of the catalogue with its dimensions, by name.
pub fn entries() -> impl Iterator<Item = (&'static str, Vec<Dimension>)> {
    CATALOG.iter().map(|(provider, rows)| (*provider, rows.iter().filter_map(dimension).collect()))
}

fn dimension(&(unit, window, limit): &Row) -> Option<Dimension> {
    Window::parse(window).map(|window| Dimension { key: DimensionKey { unit, window }, limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_catalogue_reads_as_a_dimension() {
        assert!(CATALOG.is_sorted_by_key(|(provider, _)| provider));
        for (provider, rows) in CATALOG {
            assert_eq!(dimensions_of(provider).unwrap().len(), rows.len(), "{provider}");
        }
        assert_eq!(dimensions_of("openai"), None);
    }
}
