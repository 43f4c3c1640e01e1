//! A trace of requests to a language model: when each came, and how many tokens it had.

use std::time::Duration;

use jiff::civil::DateTime;

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// What a router that has counted the prompt expects of the answer.
const EXPECTED_ANSWER_TOKENS: u64 = 256;

/// How long a model takes before its first token, and for each token.
const FIRST_TOKEN: Duration = Duration::from_millis(500);
const EACH_TOKEN: Duration = Duration::from_millis(30);

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Since the first request of the trace.
    pub(crate) at: Duration,
    pub(crate) prompt_tokens: u64,
    pub(crate) generated_tokens: u64,
}

impl Request {
    /// The tokens that it is known to have had once it is answered.
    pub(crate) fn cost(&self) -> u64 {
        self.prompt_tokens + self.generated_tokens
    }

    /// The tokens that a router reserves for it.
    pub(crate) fn estimate(&self) -> u64 {
        self.prompt_tokens + EXPECTED_ANSWER_TOKENS
    }

    /// How long its answer takes.
    pub(crate) fn service_time(&self) -> Duration {
        FIRST_TOKEN + EACH_TOKEN.mul_f64(self.generated_tokens as f64)
    }
}

/// The requests of a CSV file, in the order of their arrival. A mistake names its line.
pub(crate) fn parse(text: &str) -> Result<Vec<Request>, String> {
    let mut lines = text.lines().zip(1..);
    if lines.next().is_none_or(|(header, _)| header != HEADER) {
        return Err(format!("line 1: not the header {HEADER:?}"));
    }
    let mut requests: Vec<Request> = Vec::new();
    let mut first = None;
    for (line, number) in lines {
        let (arrival, prompt_tokens, generated_tokens) =
            fields(line).map_err(|mistake| format!("line {number}: {mistake}"))?;
        let since_first = arrival.duration_since(*first.get_or_insert(arrival));
        let at = Duration::try_from(since_first)
            .ok()
            .filter(|at| requests.last().is_none_or(|last| last.at <= *at))
            .ok_or_else(|| format!("line {number}: comes before the line above it"))?;
        requests.push(Request { at, prompt_tokens, generated_tokens });
    }
    if requests.is_empty() { Err("no line after the header".to_owned()) } else { Ok(requests) }
}

fn fields(line: &str) -> Result<(DateTime, u64, u64), String> {
    let [arrival, prompt, generated] = line.split(',').collect::<Vec<_>>()[..] else {
        return Err(format!("{line:?} is not of three fields: {HEADER}"));
    };
    let arrival = arrival
        .parse()
        .map_err(|_| format!("{arrival:?} is not a time such as 2023-11-16 18:17:03.9799600"))?;
    Ok((arrival, tokens(prompt)?, tokens(generated)?))
}

fn tokens(field: &str) -> Result<u64, String> {
    let tokens: u32 = field.parse().map_err(|_| format!("{field:?} is not a number of tokens"))?;
    Ok(tokens.into())
}
