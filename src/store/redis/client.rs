//! The connection to Redis: the one file that knows fred.
//!
//! fred is told never to repeat a command that was in flight and never to wait without a bound. Commands are awaited in
//! tasks that live on when a caller hangs up: a future of fred's that is dropped leaves its command in the queue.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use fred::{
    clients,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, EventInterface},
    types::{
        ClusterHash, CustomCommand, Value,
        config::{
            Config, ConnectionConfig, Options, PerformanceConfig, ReconnectPolicy, Server, TcpConfig,
            UnresponsiveConfig,
        },
    },
};
use sha1::{Digest, Sha1};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use super::RedisUrl;

/// How long fred tries to connect, and how long its own commands take.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// Redirections that one command follows while slots move.
const REDIRECTIONS_MAX: u32 = 3;
/// Commands that wait for a connection.
const COMMANDS_WAITING_MAX: usize = 10_000;
const RECONNECT_MIN_MS: u32 = 50;
const RECONNECT_MAX_MS: u32 = 500;

/// What fred says of a command that it would have to keep until there is a connection, and of no other.
const NOT_CONNECTED: &str = "Connection closed unexpectedly.";
/// Words by which Redis begins to say that it has not done what it was asked.
const REFUSALS: [&str; 17] = [
    "ASK",
    "BUSY",
    "CLUSTERDOWN",
    "ERR",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "MOVED",
    "NOAUTH",
    "NOPERM",
    "NOREPLICAS",
    "NOSCRIPT",
    "OOM",
    "READONLY",
    "TRYAGAIN",
    "WRONGPASS",
    "WRONGTYPE",
];
/// Those of them that pass.
const PASSING: [&str; 8] =
    ["ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MOVED", "READONLY", "TRYAGAIN"];

/// Those by which it refuses what a script was about to write.
const REFUSALS_IN_SCRIPT: [&str; 5] = ["MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY"];

/// Those that are said to everybody, and not of one key or slot.
const OUT_OF_REACH: [&str; 11] = [
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOAUTH",
    "NOPERM",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "WRONGPASS",
];

/// By which a Redis that has seen `script` knows it.
pub(super) fn sha_of(script: &str) -> Bytes {
    Sha1::digest(script).iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
}

/// Why there is no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Failure {
    /// Redis refused, and has done nothing.
    #[error("{text}")]
    Refused {
        /// The first word of `text`.
        word: String,
        /// What Redis said.
        text: String,
    },
    /// There is no connection: it was not sent.
    #[error("there is no connection to it")]
    NotSent,
    /// The connection failed or the time was up: whether the command was done is not known.
    #[error("{0}")]
    Unknown(Arc<Error>),
}

impl Failure {
    /// Redis would let the script write nothing, which it told as `text`; `None`: the script has failed by itself.
    pub(super) fn of_script(text: &str) -> Option<Self> {
        // Older versions put the place in the script before it.
        let mut words = text.split([' ', '-']).take(5);
        let word = words.find(|word| REFUSALS_IN_SCRIPT.contains(word))?;
        Some(Failure::Refused { word: word.to_owned(), text: text.to_owned() })
    }

    /// A script has failed, which it told as `text`.
    pub(super) fn said(text: String) -> Self {
        Self::of_script(&text).unwrap_or(Failure::Refused { word: "ERR".to_owned(), text })
    }

    /// Redis does not know the script.
    pub(super) fn is_no_script(&self) -> bool {
        matches!(self, Failure::Refused { word, .. } if word == "NOSCRIPT")
    }

    /// It is known that nothing was done, and asking again will not help.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Failure::Refused { word, .. } if !PASSING.contains(&word.as_str()))
    }

    /// Redis is fine, but for what it holds under one key.
    pub(super) fn is_of_one_key(&self) -> bool {
        matches!(self, Failure::Refused { word, .. } if word == "WRONGTYPE")
    }

    /// What is asked next will fail as well: time-outs are counted before that is supposed.
    pub(super) fn is_out_of_reach(&self) -> bool {
        match self {
            Failure::Refused { word, .. } => OUT_OF_REACH.contains(&word.as_str()),
            Failure::NotSent => true,
            Failure::Unknown(error) => *error.kind() != ErrorKind::Timeout,
        }
    }

    /// There was no answer in time.
    pub(super) fn is_timeout(&self) -> bool {
        matches!(self, Failure::Unknown(error) if *error.kind() == ErrorKind::Timeout)
    }

    /// The command may have been done.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self, Failure::Unknown(_))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if *error.kind() == ErrorKind::Canceled && error.details() == NOT_CONNECTED {
            return Failure::NotSent;
        }
        let local = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::IO | ErrorKind::Canceled);
        let word = error.details().split_whitespace().next().unwrap_or_default();
        if !local && REFUSALS.contains(&word) {
            return Failure::Refused { word: word.to_owned(), text: error.details().to_owned() };
        }
        Failure::Unknown(Arc::new(error))
    }
}

/// A command for the node that has a slot.
#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) name: &'static str,
    /// Whose slot; ignored where there is one node.
    pub(super) key: Bytes,
    pub(super) args: Vec<Bytes>,
}

/// Connections to a Redis, however many nodes it has.
#[derive(Clone)]
pub(super) struct Client(clients::Client, CancellationToken);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Starts to connect, and goes on trying whenever a connection breaks. Call within a Tokio runtime.
    pub(super) fn start(url: &RedisUrl) -> Result<Self, Error> {
        let config = Config { fail_fast: false, ..url.config()? };
        let performance =
            PerformanceConfig { default_command_timeout: CONNECT_TIMEOUT, ..Default::default() };
        let connection = ConnectionConfig {
            connection_timeout: CONNECT_TIMEOUT,
            internal_command_timeout: CONNECT_TIMEOUT,
            max_command_attempts: 1,
            max_redirections: REDIRECTIONS_MAX,
            max_command_buffer_len: COMMANDS_WAITING_MAX,
            unresponsive: UnresponsiveConfig {
                max_timeout: Some(2 * CONNECT_TIMEOUT),
                interval: CONNECT_TIMEOUT / 2,
            },
            reconnect_on_auth_error: true,
            tcp: TcpConfig { nodelay: Some(true), ..Default::default() },
            ..Default::default()
        };
        let policy = ReconnectPolicy::new_exponential(0, RECONNECT_MIN_MS, RECONNECT_MAX_MS, 2);
        let client = clients::Client::new(config, Some(performance), Some(connection), Some(policy));
        let stop = CancellationToken::new();
        tokio::spawn(stay_connected(client.clone(), stop.clone()));
        Ok(Self(client, stop))
    }

    /// Tells of every connection that was made.
    pub(super) fn connected(&self) -> broadcast::Receiver<Server> {
        self.0.reconnect_rx()
    }

    /// Tells why connections ended, or could not be made.
    pub(super) fn errors(&self) -> broadcast::Receiver<(Error, Option<Server>)> {
        self.0.error_rx()
    }

    /// Pools are spread over several nodes.
    pub(super) fn is_clustered(&self) -> bool {
        self.0.is_clustered()
    }

    /// One command and its answer.
    pub(super) async fn call(&self, command: Command, timeout: Duration) -> Result<Value, Failure> {
        let (custom, args) = custom(command);
        Ok(self.0.with_options(&options(timeout)).custom(custom, args).await?)
    }

    /// Commands that go out together, and an answer for each, which may be that its key is none of ours.
    pub(super) async fn pipeline(
        &self,
        commands: Vec<Command>,
        timeout: Duration,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let asked = commands.len();
        let pipeline = self.0.pipeline().with_options(&options(timeout));
        for command in commands {
            let (custom, args) = custom(command);
            let () = pipeline.custom(custom, args).await?;
        }
        let answers =
            pipeline.try_all::<Value>().await.into_iter().map(|answer| answer.map_err(Failure::from));
        let answers = answers.map(|answer| match answer {
            Err(failure) if !failure.is_of_one_key() => Err(failure),
            answer => Ok(answer),
        });
        let answers: Vec<_> = answers.collect::<Result<_, _>>()?;
        if answers.len() != asked {
            let text = format!("{} answers to {asked} questions", answers.len());
            return Err(Failure::Unknown(Arc::new(Error::new(ErrorKind::Protocol, text))));
        }
        Ok(answers)
    }

    /// The same command on every node that keeps something.
    pub(super) async fn on_every_node(
        &self,
        command: &Command,
        timeout: Duration,
    ) -> Vec<Result<Value, Failure>> {
        let nodes = if self.is_clustered() {
            self.0.active_connections().into_iter().map(Some).collect()
        } else {
            vec![None]
        };
        let mut answers = Vec::new();
        for cluster_node in nodes {
            let (custom, args) = custom(command.clone());
            let options = Options { cluster_node, ..options(timeout) };
            answers.push(self.0.with_options(&options).custom(custom, args).await.map_err(Failure::from));
        }
        answers
    }

    /// Lets go of all connections.
    pub(super) async fn quit(&self) {
        self.1.cancel();
        // A connection that is gone needs no farewell.
        let _ = self.0.quit().await;
    }
}

/// fred's task ends where it finds no way on, as when it is redirected to a node that is gone: another one takes over.
async fn stay_connected(client: clients::Client, stop: CancellationToken) {
    while !stop.is_cancelled() {
        // Why it has ended is told to whoever asks for something.
        let _ = client.connect().await;
        tokio::select! {
            () = tokio::time::sleep(CONNECT_TIMEOUT) => {}
            () = stop.cancelled() => {}
        }
    }
}

fn custom(command: Command) -> (CustomCommand, Vec<Value>) {
    let Command { name, key, args } = command;
    let custom = CustomCommand::new_static(name, ClusterHash::from(&*key), false);
    (custom, args.into_iter().map(Value::Bytes).collect())
}

fn options(timeout: Duration) -> Options {
    Options {
        // Each redirection counts as one.
        max_attempts: Some(1 + REDIRECTIONS_MAX),
        max_redirections: Some(REDIRECTIONS_MAX),
        timeout: Some(timeout),
        fail_fast: true,
        ..Default::default()
    }
}

/// The bytes of a string; `None` for everything else.
pub(super) fn bytes_of(value: Value) -> Option<Bytes> {
    match value {
        Value::Bytes(bytes) => Some(bytes),
        Value::String(text) => Some(text.into_inner()),
        _ => None,
    }
}

/// The entries of an array; none for everything else.
pub(super) fn entries_of(value: Value) -> Vec<Value> {
    match value {
        Value::Array(entries) => entries,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_command_without_an_answer_is_told() {
        // what fred says | in short
        let cases = [
            (ErrorKind::Canceled, "Connection closed unexpectedly.", "not sent"),
            (ErrorKind::Canceled, "Canceled.", "unknown"),
            (ErrorKind::Timeout, "Request timed out.", "unknown"),
            (ErrorKind::IO, "Connection reset by peer (os error 104)", "unknown"),
            (ErrorKind::Unknown, "NOSCRIPT No matching script. Please use EVAL.", "no script"),
            (ErrorKind::Unknown, "LOADING Redis is loading the dataset in memory", "passing"),
            (ErrorKind::Unknown, "OOM command not allowed when used memory > 'maxmemory'.", "final"),
            (ErrorKind::Auth, "NOPERM User q has no permissions to run the 'eval' command", "final"),
        ];
        for (kind, details, want) in cases {
            let failure = Failure::from(Error::new(kind, details));
            let got = match &failure {
                Failure::NotSent => "not sent",
                _ if failure.is_unknown() => "unknown",
                _ if failure.is_no_script() => "no script",
                _ if failure.is_final() => "final",
                Failure::Refused { .. } | Failure::Unknown(_) => "passing",
            };
            assert_eq!(got, want, "{details}");
        }
    }
}
