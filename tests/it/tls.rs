//! Encrypted connections: which certificates are believed, of servers and of callers, and what callers may by them.

use std::time::{Duration, Instant};

use quota_share::config::{ClientCertificates, TlsFiles};
use tonic::{Code, Status, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::harness::{
    Issued, PATIENCE, PemFiles, TestCa, TestProcess, TestRedis, TestServer, Token, TokensFile, call_raw,
    connect_tls, hard, pb, pool, redis_is_missing, run, text, told,
};

const ENFORCE: &str = "/quotashare.v1.QuotaShare/Enforce";
const LIST_POOLS: &str = "/quotashare.v1.PoolAdmin/ListPools";
const SPIFFE: &str = "spiffe://example.org/router";

/// Servers for `localhost`, callers, and the issuers that they believe.
struct World {
    server_ca: TestCa,
    client_ca: TestCa,
    files: PemFiles,
}

impl World {
    fn new() -> Self {
        let world = Self {
            server_ca: TestCa::new("of servers"),
            client_ca: TestCa::new("of clients"),
            files: PemFiles::new(),
        };
        world.files.write_issued(&world.server_ca.issue(&["localhost"]));
        world.files.write("client-ca", &world.client_ca.pem());
        world
    }

    fn tls(&self, client_certificates: Option<ClientCertificates>) -> TlsFiles {
        TlsFiles {
            cert: self.files.path("cert"),
            key: self.files.path("key"),
            client_ca: client_certificates.map(|_| self.files.path("client-ca")),
            client_certificates: client_certificates.unwrap_or(ClientCertificates::Required),
        }
    }

    async fn server(
        &self,
        of_clients: Option<ClientCertificates>,
        tokens: Option<&TokensFile>,
    ) -> TestServer {
        let mut server = TestServer::start_on_sqlite().await;
        let change = |config: &mut quota_share::config::Config| {
            config.tls = Some(self.tls(of_clients));
            config.auth_tokens_file = tokens.map(TokensFile::path);
        };
        server.restart_with(change).await;
        server
    }

    /// A call over a new connection.
    async fn call(
        &self,
        server: &TestServer,
        own: Option<&Issued>,
        path: &str,
        token: Option<&str>,
    ) -> Result<(), Code> {
        let channel = connect_tls(server.address(), &self.server_ca, own).await.map_err(|_| REFUSED)?;
        call_raw(channel, path, Vec::new(), token).await.map(|_| ()).or_else(|status| match status.code() {
            // An empty message is no request: it was let in.
            Code::InvalidArgument => Ok(()),
            code => Err(code),
        })
    }
}

/// What a client says of a connection that is not opened, at once or, where a certificate is missing, with the first call.
const REFUSED: Code = Code::Unknown;

#[track_caller]
fn is_no_connection(outcome: Result<(), Code>, whose: &str) {
    assert!(matches!(outcome, Err(REFUSED | Code::Unavailable | Code::Cancelled)), "{whose}: {outcome:?}");
}

async fn health(channel: Channel) -> Result<(), Status> {
    HealthClient::new(channel).check(HealthCheckRequest::default()).await.map(|_| ())
}

#[tokio::test]
async fn calls_are_served_to_those_who_believe_the_certificate_and_to_no_others() {
    let world = World::new();
    let server = world.server(None, None).await;
    assert_eq!(world.call(&server, None, ENFORCE, None).await, Ok(()));
    assert!(connect_tls(server.address(), &world.client_ca, None).await.is_err(), "another issuer");
    // Without encryption there is no answer.
    assert!(health(server.channel()).await.is_err());
}

#[tokio::test]
async fn a_new_certificate_is_used_without_a_restart_and_one_that_cannot_be_used_is_not() {
    let world = World::new();
    let (cert, key) = (world.files.path("cert"), world.files.path("key"));
    let vars = [("QUOTA_TLS_CERT_FILE", text(&cert)), ("QUOTA_TLS_KEY_FILE", text(&key))];
    let process = TestProcess::start_with(&vars).await;
    let old = connect_tls(process.address(), &world.server_ca, None).await.expect("it is believed");
    health(old.clone()).await.expect("it serves");

    // A key of another certificate: nothing changes.
    world.files.write("key", &world.server_ca.issue(&["localhost"]).key);
    let asked = Instant::now();
    while !process.log().contains("QUOTA_TLS_KEY_FILE: it does not go with the certificate") {
        assert!(asked.elapsed() < PATIENCE, "nothing is said: {}", process.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let believed =
        connect_tls(process.address(), &world.server_ca, None).await.expect("the old one is in force");
    health(believed).await.expect("it serves");

    let next_ca = TestCa::new("of servers, next year");
    world.files.write_issued(&next_ca.issue(&["localhost"]));
    let asked = Instant::now();
    let new = loop {
        match connect_tls(process.address(), &next_ca, None).await {
            Ok(channel) => break channel,
            Err(_) => assert!(asked.elapsed() < PATIENCE, "the new certificate is not used"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    health(new).await.expect("it serves");
    health(old).await.expect("open connections go on");
    assert!(connect_tls(process.address(), &world.server_ca, None).await.is_err(), "the old one is gone");
}

#[tokio::test]
async fn without_a_certificate_of_the_issuer_no_connection_is_opened() {
    let world = World::new();
    let token = Token::new("t", "admin").await;
    let of_router = format!("r router san:{SPIFFE}");
    let file = TokensFile::new(&[&token.line, &of_router, "ops admin san:ops.example"]);
    let server = world.server(Some(ClientCertificates::Required), Some(&file)).await;

    let (router, ops) =
        (world.client_ca.issue(&[SPIFFE]), world.client_ca.issue(&["x.example", "ops.example"]));
    let stranger = world.client_ca.issue(&["stranger.example"]);
    let denied = Err(Code::PermissionDenied);
    // whose certificate | token | method | outcome
    let cases = [
        ("router", &router, None, ENFORCE, Ok(())),
        ("router", &router, None, LIST_POOLS, denied),
        ("ops", &ops, None, LIST_POOLS, Ok(())),
        ("ops", &ops, None, ENFORCE, Ok(())),
        ("stranger", &stranger, None, ENFORCE, denied),
        // A token says more than the certificate.
        ("stranger", &stranger, Some(token.text.as_str()), LIST_POOLS, Ok(())),
        ("ops", &ops, Some("qs_unknown"), LIST_POOLS, Err(Code::Unauthenticated)),
    ];
    for (whose, own, token, path, want) in cases {
        assert_eq!(world.call(&server, Some(own), path, token).await, want, "{whose} calls {path}");
    }

    let foreign = TestCa::new("of somebody else").issue(&["ops.example"]);
    let expired = world.client_ca.issue_expired(&["ops.example"]);
    for (whose, own) in [("nobody", None), ("foreign", Some(&foreign)), ("expired", Some(&expired))] {
        is_no_connection(world.call(&server, own, LIST_POOLS, Some(&token.text)).await, whose);
        is_no_connection(world.call(&server, own, "/grpc.health.v1.Health/Check", None).await, whose);
    }
}

#[tokio::test]
async fn where_certificates_are_optional_a_token_will_do_and_a_wrong_certificate_will_not() {
    let world = World::new();
    let token = Token::new("t", "router").await;
    let file = TokensFile::new(&[&token.line, "ops admin san:ops.example"]);
    let server = world.server(Some(ClientCertificates::Optional), Some(&file)).await;
    let ops = world.client_ca.issue(&["ops.example"]);
    assert_eq!(world.call(&server, None, ENFORCE, Some(&token.text)).await, Ok(()));
    assert_eq!(world.call(&server, None, ENFORCE, None).await, Err(Code::Unauthenticated));
    assert_eq!(world.call(&server, Some(&ops), LIST_POOLS, None).await, Ok(()));
    let expired = world.client_ca.issue_expired(&["ops.example"]);
    is_no_connection(world.call(&server, Some(&expired), ENFORCE, Some(&token.text)).await, "expired");
}

#[tokio::test]
async fn roles_of_certificates_change_with_the_file() {
    let world = World::new();
    let mut file = TokensFile::new(&["ops admin san:ops.example"]);
    let server = world.server(Some(ClientCertificates::Required), Some(&file)).await;
    let ops = world.client_ca.issue(&["ops.example"]);
    let channel = connect_tls(server.address(), &world.server_ca, Some(&ops)).await.expect("it is believed");
    call_raw(channel.clone(), LIST_POOLS, Vec::new(), None).await.expect("an admin reads");
    file.write(&["ops router san:ops.example"]);
    let asked = Instant::now();
    // Also over the connection that is open.
    while call_raw(channel.clone(), LIST_POOLS, Vec::new(), None).await.is_ok() {
        assert!(asked.elapsed() < PATIENCE, "the role does not change");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn without_a_file_whoever_has_a_certificate_may_do_everything() {
    let world = World::new();
    let server = world.server(Some(ClientCertificates::Required), None).await;
    let own = world.client_ca.issue(&["any.example"]);
    for path in [ENFORCE, LIST_POOLS, "/quotashare.v1.PoolAdmin/CreatePool"] {
        assert_eq!(world.call(&server, Some(&own), path, None).await, Ok(()), "{path}");
    }
    is_no_connection(world.call(&server, None, ENFORCE, None).await, "nobody");
}

#[tokio::test]
async fn a_health_check_knows_the_server_by_its_certificate() {
    let world = World::new();
    let (cert, key) = (world.files.path("cert"), world.files.path("key"));
    let client_ca = world.files.path("client-ca");
    let tls = [("QUOTA_TLS_CERT_FILE", text(&cert)), ("QUOTA_TLS_KEY_FILE", text(&key))];
    let mut process = TestProcess::start_with(&tls).await;
    let check = async |address: String, more: &[(&str, &str)]| {
        let vars = [&[("QUOTA_LISTEN", address.as_str())], more].concat();
        run(&["healthcheck"], &vars).await
    };
    let ended = check(process.address().to_string(), &tls[..1]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "SERVING\n"), "{ended:?}");
    let other = world.files.write("other", &world.server_ca.issue(&["localhost"]).cert);
    let ended = check(process.address().to_string(), &[("QUOTA_TLS_CERT_FILE", text(&other))]).await;
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("another certificate"), "{ended:?}");
    assert_eq!(check(process.address().to_string(), &[]).await.code, Some(1), "not encrypted");

    process.restart_with(&[&tls[..], &[("QUOTA_TLS_CLIENT_CA_FILE", text(&client_ca))]].concat()).await;
    let ended = check(process.address().to_string(), &tls[..1]).await;
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("QUOTA_HEALTHCHECK_CERT_FILE"), "{ended:?}");
    let own = world.client_ca.issue(&["probe.example"]);
    let (own_cert, own_key) = (world.files.write("own", &own.cert), world.files.write("own-key", &own.key));
    let own =
        [("QUOTA_HEALTHCHECK_CERT_FILE", text(&own_cert)), ("QUOTA_HEALTHCHECK_KEY_FILE", text(&own_key))];
    let ended = check(process.address().to_string(), &[&tls[..1], &own].concat()).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "SERVING\n"), "{ended:?}");
}

#[tokio::test]
async fn files_that_cannot_be_used_are_all_named_and_nothing_of_them_is_shown() {
    let world = World::new();
    let (cert, key) = (world.files.path("cert"), world.files.path("key"));
    let other_key = world.files.write("other-key", &world.server_ca.issue(&["localhost"]).key);
    let nonsense = world.files.write("nonsense", "hidden");
    // variables | lines, each with its words
    type Vars<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Vars<'_>, &[&str]); 6] = [
        (&[("QUOTA_TLS_CERT_FILE", text(&cert))], &["QUOTA_TLS_KEY_FILE=\"\" is not valid"]),
        (
            &[("QUOTA_TLS_CLIENT_CA_FILE", text(&cert))],
            &["QUOTA_TLS_CERT_FILE=\"\" is not valid", "QUOTA_TLS_KEY_FILE=\"\" is not valid"],
        ),
        (
            &[("QUOTA_TLS_CERT_FILE", text(&cert)), ("QUOTA_TLS_KEY_FILE", text(&other_key))],
            &["does not go with the certificate"],
        ),
        (
            &[
                ("QUOTA_TLS_CERT_FILE", text(&nonsense)),
                ("QUOTA_TLS_KEY_FILE", text(&nonsense)),
                ("QUOTA_TLS_CLIENT_CA_FILE", text(&nonsense)),
            ],
            &["no certificate in PEM", "no private key in PEM", "no certificate in PEM"],
        ),
        (
            &[("QUOTA_TLS_CERT_FILE", "/nowhere/cert"), ("QUOTA_TLS_KEY_FILE", "/nowhere/key")],
            &["QUOTA_TLS_CERT_FILE=\"/nowhere/cert\"", "QUOTA_TLS_KEY_FILE=\"/nowhere/key\""],
        ),
        (
            &[
                ("QUOTA_TLS_CERT_FILE", text(&cert)),
                ("QUOTA_TLS_KEY_FILE", text(&key)),
                ("QUOTA_TLS_CLIENT_CA_FILE", text(&cert)),
                ("QUOTA_TLS_CLIENT_AUTH", "optional"),
            ],
            &["QUOTA_TLS_CLIENT_AUTH=\"optional\" is not valid"],
        ),
    ];
    for (vars, lines) in cases {
        let ended = run(&["check"], vars).await;
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), lines.len(), "{ended:?}");
        for (said, words) in ended.stderr.lines().zip(lines) {
            assert!(said.contains(words), "{words}: {ended:?}");
        }
        assert!(!format!("{ended:?}").contains("hidden"), "{ended:?}");
    }
}

/// Whoever trusts a private issuer names it in `SSL_CERT_FILE`; without it, its Redis is out of reach.
#[tokio::test]
async fn counters_are_kept_in_a_redis_whose_certificate_is_of_a_private_issuer() {
    if redis_is_missing() {
        return;
    }
    let world = World::new();
    let (cert, key) = (world.files.path("cert"), world.files.path("key"));
    let ca = world.files.write("ca", &world.server_ca.pem());
    let args = ["--tls-port", "0", "--tls-cert-file", text(&cert), "--tls-key-file", text(&key)];
    let args = [&args[..], &["--tls-ca-cert-file", text(&ca), "--tls-auth-clients", "no"]].concat();
    let redis = TestRedis::start_with(&args).await;
    let port = redis.listen_with_tls().await;
    let url = format!("rediss://localhost:{port}");
    let vars = [("QUOTA_STORE_DRIVER", "redis"), ("QUOTA_STORE_REDIS_URL", url.as_str())];
    let vars = [&vars[..], &[("QUOTA_STORE_TIMEOUT_MS", "60000")]].concat();
    let mut process = TestProcess::start_with(&[&vars[..], &[("SSL_CERT_FILE", text(&ca))]].concat()).await;
    process.until_counters_are_in_reach().await;
    process.create(pool("team", ["c1"], [hard("A", 50.0)]).with_provider("kimi")).await;
    let held = process.reserve("A", "c1", None).await;
    assert_ne!(held.reservation_id, "");
    process.restart_with(&vars).await;
    let status = told(process.settings().get_status(pb::GetStatusRequest {}).await);
    assert!(status.degraded, "an issuer that nobody named is not believed: {status:?}");
}
