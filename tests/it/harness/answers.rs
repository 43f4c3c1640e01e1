//! What a server said, in a form that a test compares; what every answer promises is checked on the way.

use std::collections::HashMap;

use tonic::{Code, Response, Status};
use tonic_types::StatusExt;

use super::pb::{
    self,
    dimension::Unit,
    dimension_status::{Mode, Reason},
    enforce_response::Decision,
};

/// A decision, in short.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    Allow,
    /// Allowed, with this factor on the candidate's score.
    Deprioritize(f64),
    Block {
        reason: Reason,
        /// The dimension, such as `tokens/daily`.
        by: String,
        /// `None`: no wait helps.
        retry_after_ms: Option<u64>,
    },
}

/// A refusal for this reason, by a dimension such as `tokens/daily`.
pub(crate) fn blocked(reason: Reason, by: &str, retry_after_ms: impl Into<Option<u64>>) -> Verdict {
    Verdict::Block { reason, by: by.to_owned(), retry_after_ms: retry_after_ms.into() }
}

impl pb::EnforceResponse {
    /// The decision. Panics where parts of the answer contradict one another.
    #[track_caller]
    pub(crate) fn verdict(&self) -> Verdict {
        assert!(!self.degraded, "this server's counters are its own: {self:?}");
        self.dimensions.iter().for_each(pb::DimensionStatus::check);
        match self.decision() {
            Decision::Allow => self.check_allow(),
            Decision::Block => self.check_block(),
            Decision::Unspecified => panic!("an answer without a decision: {self:?}"),
        }
    }

    #[track_caller]
    fn check_allow(&self) -> Verdict {
        assert_eq!((&self.blocked_by, &self.retry_after), (&None, &None), "{self:?}");
        let reasons = [Reason::Ok, Reason::NoPool, Reason::NoPlan];
        assert!(reasons.contains(&self.reason()), "{self:?}");
        if !self.deprioritize {
            assert_eq!((self.message.as_str(), self.score_factor), ("", 1.0), "{self:?}");
            return Verdict::Allow;
        }
        assert_ne!(self.message, "", "{self:?}");
        Verdict::Deprioritize(self.score_factor)
    }

    #[track_caller]
    fn check_block(&self) -> Verdict {
        let by = self.blocked_by.as_ref().expect("a refusal says what it is by");
        let status = |status: &&pb::DimensionStatus| {
            (status.unit, &status.window, &status.model) == (by.unit, &by.window, &by.model)
        };
        let status = self.dimensions.iter().find(status).expect("the dimension is among those shown");
        assert_eq!((status.reason(), &status.retry_after), (self.reason(), &self.retry_after), "{self:?}");
        assert_ne!(self.message, "", "a refusal can be passed on: {self:?}");
        assert_eq!((self.deprioritize, self.score_factor), (false, 1.0), "{self:?}");
        assert_eq!(self.reservation_id, "", "nothing is held for what is blocked: {self:?}");
        assert_eq!(self.shadow, None, "{self:?}");
        let retry_after_ms = self.retry_after.as_ref().map(millis);
        assert_ne!(retry_after_ms, Some(0), "{self:?}");
        blocked(self.reason(), &name_of(by.unit(), &by.window, &by.model), retry_after_ms)
    }

    /// The numbers of one dimension, such as `tokens/daily`, or of a model cap, such as `tokens/daily of large`.
    #[track_caller]
    pub(crate) fn dimension(&self, name: &str) -> &pb::DimensionStatus {
        let named =
            |status: &&pb::DimensionStatus| name_of(status.unit(), &status.window, &status.model) == name;
        self.dimensions.iter().find(named).unwrap_or_else(|| panic!("no {name} in {self:?}"))
    }
}

impl pb::DimensionStatus {
    fn check(&self) {
        let numbers = [
            Some(self.key_consumed),
            Some(self.key_reserved),
            Some(self.pool_consumed),
            Some(self.pool_reserved),
            Some(self.external),
            Some(self.estimate),
            self.limit,
            self.fair_share,
            self.cap,
            self.used_fraction,
            self.key_remaining,
        ];
        assert!(numbers.iter().flatten().all(|n| n.is_finite() && *n >= 0.0), "{self:?}");
        assert_eq!(self.limit.is_none(), self.mode() == Mode::Unspecified, "{self:?}");
    }
}

impl pb::PoolUsage {
    /// Itself. Panics where its parts contradict one another.
    #[track_caller]
    pub(crate) fn checked(self) -> Self {
        let keys = |usage: &pb::DimensionUsage| -> Vec<String> {
            usage.keys.iter().map(|key| key.api_key_id.clone()).collect()
        };
        for usage in &self.dimensions {
            assert_eq!(keys(usage), keys(&self.dimensions[0]), "every dimension lists the same keys");
            assert!(usage.keys.is_sorted_by_key(|key| &key.api_key_id), "keys come by name: {usage:?}");
            for key in &usage.keys {
                assert_eq!(key.borrowing, key.over_fair_share.is_some_and(|over| over > 0.0), "{key:?}");
                assert_eq!(key.over_fair_share.is_some(), key.fair_share.is_some(), "{key:?}");
                if let (Some(over), Some(share)) = (key.over_fair_share, key.fair_share) {
                    let (used, scale) = (key.consumed + key.reserved, key.consumed.max(share).max(1.0));
                    assert!((used - share - over).abs() <= 1e-12 * scale, "{key:?}");
                }
            }
            let rate = usage.burn_rate.as_ref().map(|rate| rate.units_per_second);
            let numbers = usage.keys.iter().flat_map(|key| [Some(key.consumed), Some(key.reserved)]);
            let totals = [Some(usage.consumed), Some(usage.reserved), usage.used_fraction, rate];
            let mut numbers = numbers.chain(totals).flatten();
            assert!(numbers.all(|n| n.is_finite() && n >= 0.0), "{usage:?}");
        }
        self
    }

    /// The usage of one dimension, such as `tokens/daily`.
    #[track_caller]
    pub(crate) fn dimension(&self, name: &str) -> &pb::DimensionUsage {
        let named = |usage: &&pb::DimensionUsage| name_of(usage.unit(), &usage.window, "") == name;
        self.dimensions.iter().find(named).unwrap_or_else(|| panic!("no {name} in {self:?}"))
    }
}

impl pb::DimensionUsage {
    #[track_caller]
    pub(crate) fn key(&self, key: &str) -> &pb::KeyUsage {
        let named = |usage: &&pb::KeyUsage| usage.api_key_id == key;
        self.keys.iter().find(named).unwrap_or_else(|| panic!("no {key} in {self:?}"))
    }
}

impl pb::Plan {
    /// The dimensions by name, with their limits.
    pub(crate) fn limits(&self) -> Vec<(String, Option<f64>)> {
        let named = |d: &pb::Dimension| (name_of(d.unit(), &d.window, ""), d.limit);
        self.dimensions.iter().map(named).collect()
    }
}

fn name_of(unit: Unit, window: &str, model: &str) -> String {
    let unit = unit.as_str_name().to_lowercase();
    if model.is_empty() { format!("{unit}/{window}") } else { format!("{unit}/{window} of {model}") }
}

/// A whole number of milliseconds, as all durations are that the service says.
#[track_caller]
pub(crate) fn millis(duration: &prost_types::Duration) -> u64 {
    assert_eq!(duration.nanos % 1_000_000, 0, "{duration:?} is not a whole number of milliseconds");
    let ms = duration.seconds * 1_000 + i64::from(duration.nanos) / 1_000_000;
    u64::try_from(ms).expect("not negative")
}

/// Milliseconds since the epoch.
#[track_caller]
pub(crate) fn unix_ms(at: &Option<prost_types::Timestamp>) -> u64 {
    let at = at.as_ref().expect("an instant");
    let ms = at.seconds * 1_000 + i64::from(at.nanos) / 1_000_000;
    u64::try_from(ms).expect("after the epoch")
}

/// A call that was refused, and what it said for itself.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) code: Code,
    pub(crate) message: String,
    /// Of the BadRequest: the fields, by their path in the request.
    pub(crate) fields: Vec<String>,
    /// Of the ErrorInfo; empty without one.
    pub(crate) reason: String,
    /// The answer says when to call again.
    pub(crate) has_retry_info: bool,
    /// Of the ErrorInfo.
    pub(crate) metadata: HashMap<String, String>,
}

/// What a call was refused with. Panics if it was not.
#[track_caller]
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<Response<T>, Status>) -> Refusal {
    let status = result.expect_err("this call is to be refused");
    let details = status.get_error_details();
    let violations = details.bad_request().map(|bad| bad.field_violations.clone()).unwrap_or_default();
    assert_ne!(status.message(), "", "{status:?}");
    assert!(violations.iter().all(|violation| !violation.description.is_empty()), "{violations:?}");
    assert!(
        status.code() != Code::InvalidArgument || !violations.is_empty(),
        "INVALID_ARGUMENT names no field: {status:?}"
    );
    Refusal {
        code: status.code(),
        message: status.message().to_owned(),
        fields: violations.into_iter().map(|violation| violation.field).collect(),
        reason: details.error_info().map(|info| info.reason.clone()).unwrap_or_default(),
        has_retry_info: details.retry_info().is_some_and(|info| info.retry_delay.is_some()),
        metadata: details.error_info().map(|info| info.metadata.clone()).unwrap_or_default(),
    }
}

impl Refusal {
    /// Panics unless this is INVALID_ARGUMENT for exactly these fields.
    #[track_caller]
    pub(crate) fn names(&self, fields: &[&str]) {
        assert_eq!(self.code, Code::InvalidArgument, "{self:?}");
        assert_eq!(self.fields, fields, "{self:?}");
    }
}
