//! The command line: what can be asked of the program, and what it says and exits with.

use std::{
    fmt,
    fs::File,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
    sync::Arc,
};

use clap::{Parser, Subcommand};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    app::{self, Adopted},
    clock::SystemClock,
    config::{Args, Config, InvalidConfig, OtelVars},
    core::{
        directory::ChangeRefused,
        ids::InvalidField,
        import::{Import, document, legacy, omniroute},
        settings::StoredSettings,
    },
    service::Imported,
    store::{
        DirectoryStore,
        sqlite::{SqliteDirectory, is_database, read_omniroute},
    },
    telemetry::Tracing,
    transport::{
        auth::{CallerName, NewToken, Role},
        grpc::check_health,
        tls::client_config,
    },
};

/// The largest document that is read: several times the export of a store that is full.
const DOCUMENT_BYTES_MAX: u64 = 1 << 30;
/// What can be imported, besides a database.
const FORMS: &str = "what `quota-share export` prints, the JSON array of an OmniRoute dashboard or the storage.sqlite of \
                     an OmniRoute installation";
/// The exit code when the configuration is not valid.
const INVALID_CONFIGURATION: u8 = 2;

/// Shares the quota of upstream LLM accounts fairly among API keys, over gRPC
#[derive(Debug, Parser)]
#[command(name = "quota-share", version, max_term_width = 110, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: Args,
}

#[derive(Debug, Subcommand)]
#[command(disable_help_subcommand = true)]
enum Command {
    #[command(about = "Serve until SIGTERM or SIGINT: what is done without a command", long_about = None)]
    Serve(Args),
    #[command(
        about = "Check the configuration: print what is in force, or every mistake",
        long_about = None,
        after_help = CHECK_HELP
    )]
    Check(Args),
    /// Take over pools from a file into a store without pools
    #[command(after_help = IMPORT_HELP)]
    Import {
        /// What to read
        file: PathBuf,
        #[command(flatten)]
        data: DataDir,
    },
    /// Print all pools, plans and settings as JSON, also while the service runs
    #[command(after_help = EXPORT_HELP)]
    Export {
        #[command(flatten)]
        data: DataDir,
    },
    #[command(
        about = "Take over the configuration of the Redis that is configured, and set the one here aside",
        long_about = None,
        after_help = ADOPT_HELP
    )]
    Adopt {
        /// Leave records that wait for another Redis to the file that is set aside: they are counted nowhere
        #[arg(long)]
        set_journal_aside: bool,
        #[command(flatten)]
        args: Args,
    },
    /// Ask a running service on this machine whether it serves
    #[command(after_help = HEALTHCHECK_HELP)]
    Healthcheck(HealthcheckArgs),
    /// Make a token by which a caller is known
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
}

#[derive(Debug, clap::Args)]
struct HealthcheckArgs {
    /// Only this service, such as quotashare.v1.QuotaShare [default: all of them]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    service: String,
    /// Where gRPC is served, as IP:PORT [default: 127.0.0.1:50051]
    #[arg(long, env = "QUOTA_LISTEN", value_name = "IP:PORT", hide_env_values = true)]
    quota_listen: Option<String>,
    /// The service's certificate, if it has one: it has to be this one
    #[arg(long, env = "QUOTA_TLS_CERT_FILE", value_name = "FILE", hide_env_values = true)]
    quota_tls_cert_file: Option<String>,
    /// A certificate to show, where the service asks for one
    #[arg(long, env = "QUOTA_HEALTHCHECK_CERT_FILE", value_name = "FILE", hide_env_values = true)]
    quota_healthcheck_cert_file: Option<String>,
    /// The private key of QUOTA_HEALTHCHECK_CERT_FILE
    #[arg(long, env = "QUOTA_HEALTHCHECK_KEY_FILE", value_name = "FILE", hide_env_values = true)]
    quota_healthcheck_key_file: Option<String>,
}

#[derive(Debug, Subcommand)]
#[command(disable_help_subcommand = true)]
enum TokenCommand {
    /// Print a new token, which is kept nowhere, and its line for QUOTA_AUTH_TOKENS_FILE
    #[command(after_help = TOKEN_HELP)]
    New {
        /// Whose it is, as audit lines name its owner
        #[arg(long)]
        name: String,
        /// What its owner may do: router, viewer or admin
        #[arg(long)]
        role: String,
    },
}

const TOKEN_HELP: &str = "\
Give the token to its owner, who sends it as the metadata `authorization: Bearer TOKEN`, and append the line to the
file that QUOTA_AUTH_TOKENS_FILE names; a running service reads it within seconds. A name may have several tokens: to
replace one, add the new line, wait until the new token is in use, and remove the old line.";

const CHECK_HELP: &str = "\
Exits with 0, or with 2 after naming every mistake, also those in the files that are named. Secrets are masked. Nothing
is started and no data looked at: settings that are stored (SettingsAdmin) win over those printed.";

const IMPORT_HELP: &str = "\
All of FILE is taken over or nothing, and nothing where there are pools already. What had to be changed to make it fit
is told on standard error. FILE is one of:
  - what `quota-share export` printed
  - the JSON array that the OmniRoute dashboard kept under \"omniroute:quota-share:pools\"
  - the storage.sqlite of an OmniRoute installation: it is only read, and may be in use

The data directory must not be in use: while the service runs the import is refused, naming its process. A running
service takes the dashboard's array by the call quotashare.v1.PoolAdmin/ImportPools.";

const EXPORT_HELP: &str = "\
`quota-share import` takes it back; each pool in it can be given to CreatePool, each plan to PutPlan. It is the
configuration of one moment, without counters and without the choice of a driver, which belongs to each replica.";

const ADOPT_HELP: &str = "\
For a replica that found another configuration in its Redis than its own and therefore decides nothing. Pools, plans and
settings of the Redis take the place of those here; the replica keeps its id, and its stored driver and URL. The former
storage.sqlite is kept under a name with a time stamp, never deleted. In the Redis nothing is changed.

The data directory must not be in use. Nothing is done while records wait in the journal, unless --set-journal-aside is
given.";

const HEALTHCHECK_HELP: &str = "\
For the probes of containers: asks grpc.health.v1 and exits with 0 if the answer is SERVING and comes within 2 seconds,
else with 1. With the service's own variables in its environment it needs no others, unless the service asks for
certificates.";

#[derive(Debug, clap::Args)]
struct DataDir {
    /// The folder of the service's data [default: ./data]
    #[arg(long, env = "DATA_DIR", value_name = "FOLDER", hide_env_values = true)]
    data_dir: Option<String>,
}

type Failure = Box<dyn std::error::Error>;

impl Cli {
    /// Does what was asked for; says on standard error what went wrong.
    pub async fn run(self) -> ExitCode {
        let checks = matches!(self.command, Some(Command::Check(_)));
        let done = match self.command.unwrap_or(Command::Serve(self.serve)) {
            Command::Serve(args) => serve(&with_otel(args)).await,
            Command::Check(args) => check(&with_otel(args)),
            Command::Import { file, data } => import(&file, data).await,
            Command::Export { data } => export(data).await,
            Command::Adopt { set_journal_aside, args } => adopt(&with_otel(args), set_journal_aside).await,
            Command::Healthcheck(args) => healthcheck(args).await,
            Command::Token { command: TokenCommand::New { name, role } } => new_token(&name, &role),
        };
        match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                tell(format_args!("{failure}"));
                let invalid = checks || failure.is::<InvalidConfig>();
                if invalid { ExitCode::from(INVALID_CONFIGURATION) } else { ExitCode::FAILURE }
            }
        }
    }
}

fn with_otel(args: Args) -> Args {
    Args { otel: OtelVars::from_env(), ..args }
}

/// Serves until SIGTERM or SIGINT.
async fn serve(args: &Args) -> Result<(), Failure> {
    let config = Config::check(args)?;
    let tracing = Tracing::start(&config.otlp)?;
    allow_open_files();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let running = app::start(config, Arc::new(SystemClock)).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    running.stop().await;
    tracing.stop().await;
    Ok(())
}

/// Each connection is an open file, of which a process may often have no more than 1,024 unless it asks.
fn allow_open_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(%error, "the process may not have as many files open as it could");
    }
}

fn check(args: &Args) -> Result<(), Failure> {
    let config = Config::check(args)?;
    let warnings = config.warnings_with(&StoredSettings::default());
    warnings.iter().for_each(|warning| tell(format_args!("warning: {warning}")));
    print(&config.in_force())
}

async fn import(file: &Path, data: DataDir) -> Result<(), Failure> {
    let config = data.config()?;
    let import = read(file).await?;
    let Imported { pools, plans, settings, skipped, warnings } =
        app::import(&config, Arc::new(SystemClock), import).await?;
    warnings.iter().for_each(|warning| tell(format_args!("warning: {warning}")));
    let folder = config.data_dir.display();
    if skipped {
        return print(&format!("skipped: {folder} has pools already, nothing was changed\n"));
    }
    let (pools, plans) = (count(pools.len(), "pool"), count(plans, "plan"));
    let settings = if settings { "the settings" } else { "no settings" };
    print(&format!("imported {pools}, {plans} and {settings} into {folder}\n"))
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// Reads a file of any form that is taken.
async fn read(file: &Path) -> Result<Import, Failure> {
    let unreadable = |error: io::Error| format!("{} cannot be read: {error}", file.display());
    let invalid = |faults| Failure::from(ChangeRefused::Invalid(faults));
    if is_database(file).map_err(unreadable)? {
        let installation = read_omniroute(file).await?;
        return omniroute::read(&installation).map_err(invalid);
    }
    let mut bytes = Vec::new();
    let mut opened = File::open(file).map_err(unreadable)?.take(DOCUMENT_BYTES_MAX + 1);
    opened.read_to_end(&mut bytes).map_err(unreadable)?;
    let root = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(format!("{root} is too large: use one of up to {DOCUMENT_BYTES_MAX} bytes").into());
    }
    match serde_json::from_slice(&bytes) {
        Ok(Value::Array(entries)) => legacy::from_entries(&root, &entries).map_err(invalid),
        Ok(Value::Object(fields)) => document::read(&root, fields).map_err(invalid),
        Ok(other) => {
            let fault = InvalidField::new(root, format_args!("{other}"), FORMS);
            Err(invalid(vec![fault]))
        }
        Err(error) => Err(format!("{root} is no JSON and no SQLite database ({error}): use {FORMS}").into()),
    }
}

async fn export(data: DataDir) -> Result<(), Failure> {
    let config = data.config()?;
    let directory = SqliteDirectory::read_only(&config.data_dir).await?.load().await?;
    print(&document::write(&directory))
}

async fn adopt(args: &Args, set_journal_aside: bool) -> Result<(), Failure> {
    let config = Config::check(args)?;
    let Adopted { lineage, revision, pools, set_aside } =
        app::adopt(&config, Arc::new(SystemClock), set_journal_aside).await?;
    let Some(set_aside) = set_aside else {
        return print(&format!(
            "nothing to do: the configuration here is {lineage} already, that of the Redis\n"
        ));
    };
    let pools = count(pools, "pool");
    print(&format!("took over the configuration {lineage}: {pools}, revision {revision}\n"))?;
    print(&format!("what was here is kept in {}\n", set_aside.display()))
}

async fn healthcheck(args: HealthcheckArgs) -> Result<(), Failure> {
    let set = |path: Option<String>| path.filter(|path| !path.is_empty()).map(PathBuf::from);
    // Where it listens is the server's to answer for.
    let quota_insecure = Some("true".to_owned());
    let config = Config::check(&Args { quota_listen: args.quota_listen, quota_insecure, ..Args::default() })?;
    let (cert, key) = (set(args.quota_healthcheck_cert_file), set(args.quota_healthcheck_key_file));
    let own = match (&cert, &key) {
        (Some(cert), Some(key)) => Some((cert.as_path(), key.as_path())),
        (None, None) => None,
        _ => return Err("QUOTA_HEALTHCHECK_CERT_FILE and QUOTA_HEALTHCHECK_KEY_FILE are set together".into()),
    };
    let tls = set(args.quota_tls_cert_file).map(|server| client_config(&server, own)).transpose()?;
    check_health(reachable(config.listen), tls, &args.service).await?;
    print("SERVING\n")
}

fn new_token(name: &str, role: &str) -> Result<(), Failure> {
    let refused = |option: &str, given: &str, accepted: &str| -> Failure {
        format!("--{option} {given:?} is not valid: use {accepted}").into()
    };
    let name = CallerName::from_str(name).map_err(|accepted| refused("name", name, accepted))?;
    let role = Role::from_str(role).map_err(|accepted| refused("role", role, accepted))?;
    let NewToken { token, line } = NewToken::of(rand::random(), &name, role);
    print(&format!("{token}\n\n# the line for QUOTA_AUTH_TOKENS_FILE:\n{line}\n"))
}

/// A server that listens on every address is asked on this machine's own.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

impl DataDir {
    /// The defaults of everything else, which reading and writing documents does not depend on.
    fn config(self) -> Result<Config, InvalidConfig> {
        Config::check(&Args { data_dir: self.data_dir, ..Args::default() })
    }
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("standard output cannot be written: {error}").into())
}

/// Says something on standard error; if nobody can hear it, the exit code still tells.
fn tell(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{text}");
}
