//! Everything that an operator can set, read once at start.

mod doors;

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::Parser;

use self::doors::Doors;
pub use self::doors::{ClientCertificates, TlsFiles};
pub use crate::core::settings::Secret;
use crate::{
    core::{
        ledger::ID_LIFE_MS_MAX,
        pool::fraction_hint,
        settings::{RETENTION_DAYS_MAX, StoreDriver, StoredSettings},
    },
    store::{Configured, redis::RedisUrl},
};

/// The variables as they were given, not yet checked. Each can be set as a flag or, by the same name, in the
/// environment; the flag wins. An empty value is as good as none.
#[derive(Clone, Debug, Default, Parser)]
pub struct Args {
    /// Where gRPC is served, as IP:PORT; port 0 picks a free one [default: 127.0.0.1:50051]
    #[arg(long, env = "QUOTA_LISTEN", value_name = "IP:PORT", hide_env_values = true)]
    pub quota_listen: Option<String>,
    /// Where /metrics, /livez and /readyz are served over HTTP, as IP:PORT, or "off" [default: 127.0.0.1:9090]
    #[arg(long, env = "QUOTA_HTTP_LISTEN", value_name = "IP:PORT", hide_env_values = true)]
    pub quota_http_listen: Option<String>,
    /// Listen beyond this machine although nobody is authenticated: true or false [default: false]
    #[arg(long, env = "QUOTA_INSECURE", value_name = "BOOL", hide_env_values = true)]
    pub quota_insecure: Option<String>,
    /// Who may call and what: a file with a line NAME ROLE SHA256 or NAME ROLE san:NAME for each; read again when it changes
    #[arg(long, env = "QUOTA_AUTH_TOKENS_FILE", value_name = "FILE", hide_env_values = true)]
    pub quota_auth_tokens_file: Option<String>,
    /// The server's certificate and those of its issuers, in PEM: connections use TLS then; read again when it changes
    #[arg(long, env = "QUOTA_TLS_CERT_FILE", value_name = "FILE", hide_env_values = true)]
    pub quota_tls_cert_file: Option<String>,
    /// The private key of QUOTA_TLS_CERT_FILE, in PEM
    #[arg(long, env = "QUOTA_TLS_KEY_FILE", value_name = "FILE", hide_env_values = true)]
    pub quota_tls_key_file: Option<String>,
    /// Who issues the certificates of callers, in PEM: nobody connects without one then
    #[arg(long, env = "QUOTA_TLS_CLIENT_CA_FILE", value_name = "FILE", hide_env_values = true)]
    pub quota_tls_client_ca_file: Option<String>,
    /// Whether a caller without a certificate may use a token: required (it may not) or optional [default: required]
    #[arg(long, env = "QUOTA_TLS_CLIENT_AUTH", value_name = "WORD", hide_env_values = true)]
    pub quota_tls_client_auth: Option<String>,
    /// Describe the service to grpcurl and the like: true or false [default: true]
    #[arg(long, env = "QUOTA_REFLECTION", value_name = "BOOL", hide_env_values = true)]
    pub quota_reflection: Option<String>,
    /// How many decisions and records are worked on at once; more are refused: 1 to 1000000 [default: 10000]
    #[arg(long, env = "QUOTA_MAX_CALLS_IN_FLIGHT", value_name = "NUMBER", hide_env_values = true)]
    pub quota_max_calls_in_flight: Option<String>,
    /// After how long a connection is closed, give or take a tenth: 1 to 86400 [default: 600]
    #[arg(long, env = "QUOTA_MAX_CONNECTION_AGE_SECONDS", value_name = "SECONDS", hide_env_values = true)]
    pub quota_max_connection_age_seconds: Option<String>,
    /// The folder of the service's data; made if it is missing [default: ./data]
    #[arg(long, env = "DATA_DIR", value_name = "FOLDER", hide_env_values = true)]
    pub data_dir: Option<String>,
    /// Where counters live: sqlite, or redis, which replicas share [default: sqlite]
    #[arg(long, env = "QUOTA_STORE_DRIVER", value_name = "DRIVER", hide_env_values = true)]
    pub quota_store_driver: Option<String>,
    /// The Redis that replicas share, for the driver redis; it may carry a password and is never shown
    #[arg(long, env = "QUOTA_STORE_REDIS_URL", value_name = "URL", hide_env_values = true)]
    pub quota_store_redis_url: Option<Secret>,
    /// The longest that an Enforce waits for the shared counters, in milliseconds: 1 to 60000 [default: 50]
    #[arg(long, env = "QUOTA_STORE_TIMEOUT_MS", value_name = "MS", hide_env_values = true)]
    pub quota_store_timeout_ms: Option<String>,
    /// Fraction of its limit from which a pool is in strict mode, unless it has its own: 0 to 1 [default: 0.5]
    #[arg(long, env = "QUOTA_SATURATION_THRESHOLD", value_name = "FRACTION", hide_env_values = true)]
    pub quota_saturation_threshold: Option<String>,
    /// What the score of a SOFT key past its share is multiplied by in strict mode: 0 to 1 [default: 0.7]
    #[arg(long, env = "QUOTA_SOFT_DEPRIORITIZE_FACTOR", value_name = "FACTOR", hide_env_values = true)]
    pub quota_soft_deprioritize_factor: Option<String>,
    /// How many days rows of consumption are kept in the database, for whoever reads it: 1 to 3660 [default: 14]
    #[arg(long, env = "QUOTA_CONSUMPTION_RETENTION_DAYS", value_name = "DAYS", hide_env_values = true)]
    pub quota_consumption_retention_days: Option<String>,
    /// How long a provider's figure without an end is believed: 1 to 86400 [default: 30]
    #[arg(long, env = "QUOTA_SIGNAL_TTL_SECONDS", value_name = "SECONDS", hide_env_values = true)]
    pub quota_signal_ttl_seconds: Option<String>,
    /// How long idempotency keys and settled reservations are remembered: 1 to 86400 [default: 600]
    #[arg(long, env = "QUOTA_ID_LIFE_SECONDS", value_name = "SECONDS", hide_env_values = true)]
    pub quota_id_life_seconds: Option<String>,
    /// After SIGTERM, how long to go on serving while health says NOT_SERVING, so that load balancers notice: 0 to 300
    /// [default: 0]
    #[arg(long, env = "QUOTA_SHUTDOWN_DELAY_SECONDS", value_name = "SECONDS", hide_env_values = true)]
    pub quota_shutdown_delay_seconds: Option<String>,
    /// As OpenTelemetry defines it, like the other variables of that name
    #[arg(skip)]
    pub otel: OtelVars,
}

/// The variables of OpenTelemetry that decide what is exported. All others are read by its libraries.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // The fields are named as the variables are.
pub struct OtelVars {
    pub otel_sdk_disabled: String,
    pub otel_exporter_otlp_endpoint: String,
    pub otel_exporter_otlp_traces_endpoint: String,
    pub otel_exporter_otlp_metrics_endpoint: String,
    pub otel_exporter_otlp_protocol: String,
    pub otel_traces_exporter: String,
    pub otel_metrics_exporter: String,
}

impl OtelVars {
    /// Reads the environment.
    pub fn from_env() -> Self {
        let var = |name| std::env::var(name).unwrap_or_default();
        Self {
            otel_sdk_disabled: var("OTEL_SDK_DISABLED"),
            otel_exporter_otlp_endpoint: var("OTEL_EXPORTER_OTLP_ENDPOINT"),
            otel_exporter_otlp_traces_endpoint: var("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
            otel_exporter_otlp_metrics_endpoint: var("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"),
            otel_exporter_otlp_protocol: var("OTEL_EXPORTER_OTLP_PROTOCOL"),
            otel_traces_exporter: var("OTEL_TRACES_EXPORTER"),
            otel_metrics_exporter: var("OTEL_METRICS_EXPORTER"),
        }
    }
}

/// What is exported to a collector over OTLP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Otlp {
    /// A span for each call.
    pub traces: bool,
    /// All metrics.
    pub metrics: bool,
}

/// A configuration that can be run.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `QUOTA_LISTEN`
    pub listen: SocketAddr,
    /// `QUOTA_HTTP_LISTEN`; `None`: nowhere
    pub http_listen: Option<SocketAddr>,
    /// From the variables of OpenTelemetry
    pub otlp: Otlp,
    /// `QUOTA_INSECURE`
    pub insecure: bool,
    /// `QUOTA_AUTH_TOKENS_FILE`
    pub auth_tokens_file: Option<PathBuf>,
    /// `QUOTA_TLS_*`; `None`: connections are not encrypted
    pub tls: Option<TlsFiles>,
    /// `QUOTA_REFLECTION`
    pub reflection: bool,
    /// `QUOTA_MAX_CALLS_IN_FLIGHT`, at least 1
    pub max_calls_in_flight: u32,
    /// `QUOTA_MAX_CONNECTION_AGE_SECONDS`, at least 1
    pub max_connection_age_seconds: u32,
    /// `DATA_DIR`
    pub data_dir: PathBuf,
    /// `QUOTA_STORE_DRIVER`, unless an administrator has stored another
    pub store_driver: StoreDriver,
    /// `QUOTA_STORE_REDIS_URL`, unless an administrator has stored another
    pub redis_url: Option<RedisUrl>,
    /// `QUOTA_STORE_REDIS_URL` is set and cannot be read, which is as good as not set
    pub redis_url_unreadable: bool,
    /// `QUOTA_STORE_TIMEOUT_MS`, at least 1
    pub store_timeout_ms: u32,
    /// `QUOTA_SATURATION_THRESHOLD`, 0 to 1
    pub saturation_threshold: f64,
    /// `QUOTA_SOFT_DEPRIORITIZE_FACTOR`, 0 to 1
    pub soft_deprioritize_factor: f64,
    /// `QUOTA_CONSUMPTION_RETENTION_DAYS`, at least 1
    pub consumption_retention_days: u32,
    /// `QUOTA_SIGNAL_TTL_SECONDS`, at least 1
    pub signal_ttl_seconds: u32,
    /// `QUOTA_ID_LIFE_SECONDS`, at least 1
    pub id_life_seconds: u32,
    /// `QUOTA_SHUTDOWN_DELAY_SECONDS`
    pub shutdown_delay_seconds: u32,
    /// What is not as it was asked for, and what is done instead.
    pub warnings: Vec<String>,
}

/// A variable that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={given:?} is not valid: set it to {accepted}")]
pub struct InvalidVariable {
    /// Its name in the environment.
    pub variable: &'static str,
    /// Its value.
    pub given: String,
    /// What is accepted.
    pub accepted: String,
}

/// Every variable that cannot be used, one a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidConfig(pub Vec<InvalidVariable>);

impl fmt::Display for InvalidConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for InvalidConfig {}

impl Config {
    /// Checks `args`, every mistake at once.
    pub fn check(args: &Args) -> Result<Config, InvalidConfig> {
        let mut vars = Vars::default();
        let listen: SocketAddr = vars.read("QUOTA_LISTEN", &args.quota_listen, "127.0.0.1:50051", SOCKET);
        let insecure: bool = vars.read("QUOTA_INSECURE", &args.quota_insecure, "false", "true or false");
        let http_listen = match args.quota_http_listen.as_deref() {
            Some("off") => None,
            _ => {
                Some(vars.read("QUOTA_HTTP_LISTEN", &args.quota_http_listen, "127.0.0.1:9090", SOCKET_OR_OFF))
            }
        };
        let redis_url_given = args.quota_store_redis_url.as_ref().filter(|url| !url.reveal().is_empty());
        let redis_url = redis_url_given.and_then(|url| RedisUrl::parse(url.reveal()).ok());
        let config = Config {
            listen,
            http_listen,
            otlp: vars.otlp(&args.otel),
            insecure,
            auth_tokens_file: None,
            tls: None,
            reflection: vars.read("QUOTA_REFLECTION", &args.quota_reflection, "true", "true or false"),
            max_calls_in_flight: vars.whole(
                "QUOTA_MAX_CALLS_IN_FLIGHT",
                &args.quota_max_calls_in_flight,
                "10000",
                CALLS_IN_FLIGHT_MAX,
            ),
            max_connection_age_seconds: vars.whole(
                "QUOTA_MAX_CONNECTION_AGE_SECONDS",
                &args.quota_max_connection_age_seconds,
                "600",
                CONNECTION_AGE_SECONDS_MAX,
            ),
            data_dir: vars.read("DATA_DIR", &args.data_dir, "./data", "a folder"),
            store_driver: StoreDriver::Sqlite,
            redis_url_unreadable: redis_url_given.is_some() && redis_url.is_none(),
            redis_url,
            store_timeout_ms: vars.whole(
                "QUOTA_STORE_TIMEOUT_MS",
                &args.quota_store_timeout_ms,
                "50",
                STORE_TIMEOUT_MS_MAX,
            ),
            saturation_threshold: vars.fraction(
                "QUOTA_SATURATION_THRESHOLD",
                &args.quota_saturation_threshold,
                "0.5",
            ),
            soft_deprioritize_factor: vars.fraction(
                "QUOTA_SOFT_DEPRIORITIZE_FACTOR",
                &args.quota_soft_deprioritize_factor,
                "0.7",
            ),
            consumption_retention_days: vars.whole(
                "QUOTA_CONSUMPTION_RETENTION_DAYS",
                &args.quota_consumption_retention_days,
                "14",
                RETENTION_DAYS_MAX,
            ),
            signal_ttl_seconds: vars.whole(
                "QUOTA_SIGNAL_TTL_SECONDS",
                &args.quota_signal_ttl_seconds,
                "30",
                SIGNAL_TTL_SECONDS_MAX,
            ),
            shutdown_delay_seconds: vars.read_if(
                "QUOTA_SHUTDOWN_DELAY_SECONDS",
                &args.quota_shutdown_delay_seconds,
                "0",
                |seconds| *seconds <= SHUTDOWN_DELAY_SECONDS_MAX,
                |_| format!("a whole number from 0 to {SHUTDOWN_DELAY_SECONDS_MAX}"),
            ),
            id_life_seconds: vars.whole(
                "QUOTA_ID_LIFE_SECONDS",
                &args.quota_id_life_seconds,
                "600",
                (ID_LIFE_MS_MAX / 1_000) as u32,
            ),
            warnings: Vec::new(),
        };
        let (store_driver, mut warnings) = store_driver(args);
        let Doors { tls, auth_tokens_file, warnings: of_doors } =
            vars.doors(args, listen, http_listen, insecure);
        warnings.extend(of_doors);
        if vars.refused.is_empty() {
            Ok(Config { store_driver, warnings, tls, auth_tokens_file, ..config })
        } else {
            Err(InvalidConfig(vars.refused))
        }
    }
}

impl Config {
    /// Where counters live, unless something else is stored.
    pub fn store(&self) -> Configured {
        Configured {
            driver: self.store_driver,
            redis_url: self.redis_url.clone(),
            redis_url_unreadable: self.redis_url_unreadable,
        }
    }

    /// The longest that an enforcement waits for shared counters.
    pub fn store_timeout(&self) -> Duration {
        Duration::from_millis(self.store_timeout_ms.into())
    }

    /// How long the service goes on after it was told to stop.
    pub fn shutdown_delay(&self) -> Duration {
        Duration::from_secs(self.shutdown_delay_seconds.into())
    }

    /// When a connection is closed, give or take a tenth.
    pub fn connection_age_max(&self) -> Duration {
        Duration::from_secs(self.max_connection_age_seconds.into())
    }

    /// What is not as it was asked for while `stored` is stored, and what is done instead.
    pub fn warnings_with(&self, stored: &StoredSettings) -> Vec<String> {
        let store = self.store();
        self.warnings.iter().cloned().chain(store.warning(&store.choose(stored))).collect()
    }

    /// Every variable with its value, one a line, secrets masked. A field that is added has to be shown here.
    pub fn in_force(&self) -> String {
        let Config {
            listen,
            http_listen,
            otlp: Otlp { traces, metrics },
            insecure,
            auth_tokens_file,
            tls,
            reflection,
            max_calls_in_flight,
            max_connection_age_seconds,
            data_dir,
            store_driver: _,
            redis_url,
            redis_url_unreadable: _,
            store_timeout_ms,
            saturation_threshold,
            soft_deprioritize_factor,
            consumption_retention_days,
            signal_ttl_seconds,
            id_life_seconds,
            shutdown_delay_seconds,
            warnings: _,
        } = self;
        let store_driver = self.store().choose(&StoredSettings::default()).place.driver().name();
        let http_listen = http_listen.map_or_else(|| "off".to_owned(), |address| address.to_string());
        let exported = |exported: bool| if exported { "exported" } else { "not exported" };
        let redis_url = if redis_url.is_some() { "***" } else { "" };
        let path = |path: Option<&PathBuf>| path.map_or_else(String::new, |path| path.display().to_string());
        let client_auth = match tls.as_ref().map(|tls| tls.client_certificates) {
            Some(ClientCertificates::Optional) => "optional",
            Some(ClientCertificates::Required) | None => "required",
        };
        let variables = [
            ("QUOTA_LISTEN", listen.to_string()),
            ("QUOTA_HTTP_LISTEN", http_listen),
            ("QUOTA_INSECURE", insecure.to_string()),
            ("QUOTA_AUTH_TOKENS_FILE", path(auth_tokens_file.as_ref())),
            ("QUOTA_TLS_CERT_FILE", path(tls.as_ref().map(|tls| &tls.cert))),
            ("QUOTA_TLS_KEY_FILE", path(tls.as_ref().map(|tls| &tls.key))),
            ("QUOTA_TLS_CLIENT_CA_FILE", path(tls.as_ref().and_then(|tls| tls.client_ca.as_ref()))),
            ("QUOTA_TLS_CLIENT_AUTH", client_auth.to_owned()),
            ("QUOTA_REFLECTION", reflection.to_string()),
            ("QUOTA_MAX_CALLS_IN_FLIGHT", max_calls_in_flight.to_string()),
            ("QUOTA_MAX_CONNECTION_AGE_SECONDS", max_connection_age_seconds.to_string()),
            ("DATA_DIR", data_dir.display().to_string()),
            ("QUOTA_STORE_DRIVER", store_driver.to_owned()),
            ("QUOTA_STORE_REDIS_URL", redis_url.to_owned()),
            ("QUOTA_STORE_TIMEOUT_MS", store_timeout_ms.to_string()),
            ("QUOTA_SATURATION_THRESHOLD", saturation_threshold.to_string()),
            ("QUOTA_SOFT_DEPRIORITIZE_FACTOR", soft_deprioritize_factor.to_string()),
            ("QUOTA_CONSUMPTION_RETENTION_DAYS", consumption_retention_days.to_string()),
            ("QUOTA_SIGNAL_TTL_SECONDS", signal_ttl_seconds.to_string()),
            ("QUOTA_ID_LIFE_SECONDS", id_life_seconds.to_string()),
            ("QUOTA_SHUTDOWN_DELAY_SECONDS", shutdown_delay_seconds.to_string()),
        ];
        let lines = variables.iter().map(|(variable, value)| format!("{variable}={value}\n"));
        let (traces, metrics) = (exported(*traces), exported(*metrics));
        lines.collect::<String>() + &format!("# OTLP: traces are {traces}, metrics are {metrics}\n")
    }
}

/// More would be more than a process has memory for.
const CALLS_IN_FLIGHT_MAX: u32 = 1_000_000;
/// A connection that is a day old keeps what was rotated since.
const CONNECTION_AGE_SECONDS_MAX: u32 = 86_400;
/// The driver that was asked for. An unknown one is warned of: it must not stop what may be a router's only guard.
fn store_driver(args: &Args) -> (StoreDriver, Vec<String>) {
    match args.quota_store_driver.as_deref().unwrap_or_default() {
        "" | "sqlite" => (StoreDriver::Sqlite, Vec::new()),
        "redis" => (StoreDriver::Redis, Vec::new()),
        other => {
            let warning = format!("QUOTA_STORE_DRIVER={other:?} is not a known driver: using sqlite");
            (StoreDriver::Sqlite, vec![warning])
        }
    }
}

/// A figure that is a day old says nothing of now.
const SIGNAL_TTL_SECONDS_MAX: u32 = 86_400;
/// A router has given up long before.
const STORE_TIMEOUT_MS_MAX: u32 = 60_000;
/// Who waits for the end of a process has killed it long before.
const SHUTDOWN_DELAY_SECONDS_MAX: u32 = 300;
const SOCKET: &str = "an address and a port, such as 127.0.0.1:50051";
const SOCKET_OR_OFF: &str = "an address and a port, such as 127.0.0.1:9090, or off";

/// Reads variables and collects the mistakes in them.
#[derive(Default)]
struct Vars {
    refused: Vec<InvalidVariable>,
}

impl Vars {
    fn refuse(&mut self, variable: &'static str, given: &str, accepted: &str) {
        let (given, accepted) = (given.to_owned(), accepted.to_owned());
        self.refused.push(InvalidVariable { variable, given, accepted });
    }

    /// The value of `variable`. Where it is refused, the default stands in for it until all are checked.
    fn read_if<T: FromStr>(
        &mut self,
        variable: &'static str,
        given: &Option<String>,
        default: &str,
        valid: impl Fn(&T) -> bool,
        accepted: impl Fn(Option<&T>) -> String,
    ) -> T {
        let given = given.as_deref().filter(|text| !text.is_empty()).unwrap_or(default);
        let parsed = given.parse::<T>().ok();
        match parsed {
            Some(value) if valid(&value) => value,
            refused => {
                self.refuse(variable, given, &accepted(refused.as_ref()));
                let Ok(value) = default.parse() else {
                    unreachable!("{variable}'s default {default} is valid")
                };
                value
            }
        }
    }

    fn read<T: FromStr>(
        &mut self,
        variable: &'static str,
        given: &Option<String>,
        default: &str,
        accepted: &str,
    ) -> T {
        self.read_if(variable, given, default, |_| true, |_| accepted.to_owned())
    }

    /// Each signal is exported where an endpoint for it is set, unless its exporter is `none`.
    fn otlp(&mut self, otel: &OtelVars) -> Otlp {
        let endpoint = !otel.otel_exporter_otlp_endpoint.is_empty();
        let enabled = !otel.otel_sdk_disabled.eq_ignore_ascii_case("true");
        let exported =
            |own: &str, exporter: &str| enabled && exporter != "none" && (endpoint || !own.is_empty());
        let otlp = Otlp {
            traces: exported(&otel.otel_exporter_otlp_traces_endpoint, &otel.otel_traces_exporter),
            metrics: exported(&otel.otel_exporter_otlp_metrics_endpoint, &otel.otel_metrics_exporter),
        };
        let protocol = &otel.otel_exporter_otlp_protocol;
        if otlp != Otlp::default() && !matches!(protocol.as_str(), "" | "grpc") {
            self.refuse("OTEL_EXPORTER_OTLP_PROTOCOL", protocol, "grpc, the only protocol of this version");
        }
        otlp
    }

    fn fraction(&mut self, variable: &'static str, given: &Option<String>, default: &str) -> f64 {
        let accepted =
            |given: Option<&f64>| fraction_hint("a fraction from 0 to 1", given.copied().unwrap_or_default());
        self.read_if(variable, given, default, |value| (0.0..=1.0).contains(value), accepted)
    }

    fn whole(&mut self, variable: &'static str, given: &Option<String>, default: &str, max: u32) -> u32 {
        let accepted = |_: Option<&u32>| format!("a whole number from 1 to {max}");
        self.read_if(variable, given, default, |value| (1..=max).contains(value), accepted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(vars: &[(&str, &str)]) -> Result<Config, String> {
        let flags =
            vars.iter().map(|(name, value)| format!("--{}={value}", name.to_lowercase().replace('_', "-")));
        let args = Args::try_parse_from(std::iter::once("quota-share".to_owned()).chain(flags)).unwrap();
        Config::check(&args).map_err(|errors| errors.to_string())
    }

    #[test]
    fn nothing_set_is_a_configuration() {
        let config = check(&[]).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:50051");
        assert_eq!(config.data_dir, PathBuf::from("./data"));
        assert_eq!((config.saturation_threshold, config.soft_deprioritize_factor), (0.5, 0.7));
        assert_eq!((config.consumption_retention_days, config.id_life_seconds), (14, 600));
        assert_eq!(check(&[("QUOTA_LISTEN", ""), ("DATA_DIR", "")]).unwrap(), config);
    }

    #[test]
    fn one_start_reports_every_mistake() {
        let errors = check(&[
            ("QUOTA_LISTEN", "localhost"),
            ("QUOTA_SATURATION_THRESHOLD", "50"),
            ("QUOTA_SOFT_DEPRIORITIZE_FACTOR", "NaN"),
            ("QUOTA_CONSUMPTION_RETENTION_DAYS", "0"),
            ("QUOTA_ID_LIFE_SECONDS", "1.5"),
            ("QUOTA_STORE_TIMEOUT_MS", "60001"),
            ("QUOTA_INSECURE", "yes"),
        ]);
        assert_eq!(
            errors.unwrap_err(),
            "QUOTA_LISTEN=\"localhost\" is not valid: set it to an address and a port, such as 127.0.0.1:50051\n\
             QUOTA_INSECURE=\"yes\" is not valid: set it to true or false\n\
             QUOTA_STORE_TIMEOUT_MS=\"60001\" is not valid: set it to a whole number from 1 to 60000\n\
             QUOTA_SATURATION_THRESHOLD=\"50\" is not valid: set it to a fraction from 0 to 1 (did you mean 0.5?)\n\
             QUOTA_SOFT_DEPRIORITIZE_FACTOR=\"NaN\" is not valid: set it to a fraction from 0 to 1\n\
             QUOTA_CONSUMPTION_RETENTION_DAYS=\"0\" is not valid: set it to a whole number from 1 to 3660\n\
             QUOTA_ID_LIFE_SECONDS=\"1.5\" is not valid: set it to a whole number from 1 to 86400",
        );
    }

    #[test]
    fn an_unknown_driver_is_named_and_sqlite_is_used() {
        let config = check(&[("QUOTA_STORE_DRIVER", "mongo")]).unwrap();
        assert_eq!(config.warnings, ["QUOTA_STORE_DRIVER=\"mongo\" is not a known driver: using sqlite"]);
    }

    #[test]
    fn a_redis_url_is_kept_as_one_or_told_of_and_shown_nowhere() {
        // driver | URL | is kept | driver in force | warnings
        let cases = [
            ("redis", "redis://:hidden@host", true, "redis", 0),
            ("redis", "mongo://:hidden@host", false, "sqlite", 1),
            ("redis", "", false, "sqlite", 1),
            ("sqlite", "redis://:hidden@host", true, "sqlite", 0),
            ("sqlite", ":hidden@", false, "sqlite", 1),
            ("", "", false, "sqlite", 0),
        ];
        for case @ (driver, url, kept, in_force, warnings) in cases {
            let config = check(&[("QUOTA_STORE_DRIVER", driver), ("QUOTA_STORE_REDIS_URL", url)]).unwrap();
            assert_eq!(config.redis_url.is_some(), kept, "{case:?}");
            let told = config.warnings_with(&StoredSettings::default());
            assert_eq!(told.len(), warnings, "{case:?}: {told:?}");
            assert!(told.iter().all(|told| told.contains("QUOTA_STORE_REDIS_URL")), "{case:?}: {told:?}");
            let shown = format!("{config:?}\n{}\n{told:?}", config.in_force());
            assert!(!shown.contains("hidden"), "{case:?}: {shown}");
            assert!(shown.contains(&format!("QUOTA_STORE_DRIVER={in_force}\n")), "{case:?}: {shown}");
        }
        assert_eq!(check(&[]).unwrap().store_timeout(), Duration::from_millis(50));
    }

    #[test]
    fn nobody_listens_to_the_world_by_accident() {
        let error = check(&[("QUOTA_LISTEN", "0.0.0.0:50051")]).unwrap_err();
        assert!(error.contains("QUOTA_INSECURE=true"), "{error}");
        assert!(check(&[("QUOTA_LISTEN", "0.0.0.0:50051"), ("QUOTA_INSECURE", "true")]).is_ok());
        assert!(check(&[("QUOTA_LISTEN", "[::1]:50051")]).is_ok());
    }
}
