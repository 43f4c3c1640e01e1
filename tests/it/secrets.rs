//! What is secret is told by nothing that the program says, whatever goes wrong and however much is logged.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::{Request, Status};

use crate::harness::{
    PATIENCE, PemFiles, TestCa, TestProcess, TestRedis, Token, TokensFile, ask, call_raw, connect_tls, hard,
    pb, pool, redis_is_missing, requests, run, spent, text,
};

/// Every secret of this test has it in it, but for tokens and keys.
const HIDDEN: &str = "hIdDeN";

/// GET of a page, whole.
async fn page(log: &str, path: &str) -> String {
    let (_, rest) = log.split_once("\"http\":\"").expect("the pages are served");
    let (address, _) = rest.split_once('"').expect("a text ends");
    let mut stream = TcpStream::connect(address).await.expect("the pages are served");
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {HIDDEN}\r\nAuthorization: {HIDDEN}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it answers");
    answer
}

/// All that a call was answered, be it a refusal.
fn told<T: std::fmt::Debug>(said: &mut String, answer: Result<T, Status>) {
    said.push_str(&match answer {
        Ok(answer) => format!("{answer:?}\n"),
        Err(status) => format!("{status:?} {}\n", String::from_utf8_lossy(status.details())),
    });
}

#[tokio::test]
async fn no_token_password_or_header_is_in_logs_errors_metrics_or_what_commands_print() {
    if redis_is_missing() {
        return;
    }
    let password = format!("{HIDDEN}-redis");
    let redis = TestRedis::start_with(&["--requirepass", &password]).await;
    let (admin, router) = (Token::new("alice", "admin").await, Token::new("r", "router").await);
    let mut tokens = TokensFile::new(&[&admin.line, &router.line]);
    let (ca, files) = (TestCa::new("of servers"), PemFiles::new());
    let issued = ca.issue(&["localhost"]);
    let (cert, key) = files.write_issued(&issued);
    let tokens_path = tokens.path();
    let url = format!("redis://:{password}@{}", redis.address());
    let headers = format!("authorization={HIDDEN}-otlp");
    let vars = [
        ("QUOTA_AUTH_TOKENS_FILE", text(&tokens_path)),
        ("QUOTA_TLS_CERT_FILE", text(&cert)),
        ("QUOTA_TLS_KEY_FILE", text(&key)),
        ("QUOTA_STORE_DRIVER", "redis"),
        ("QUOTA_STORE_REDIS_URL", &url),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", &headers),
        ("RUST_LOG", "trace"),
    ];
    let mut process = TestProcess::start_with(&vars).await;
    let channel = connect_tls(process.address(), &ca, None).await.expect("it is believed");
    let with = |text: String| {
        move |mut request: Request<()>| {
            let authorization = format!("Bearer {text}").parse().expect("a value");
            request.metadata_mut().insert("authorization", authorization);
            request.metadata_mut().insert("x-other", HIDDEN.parse().expect("a value"));
            Ok(request)
        }
    };
    let (as_admin, as_router) = (with(admin.text.clone()), with(router.text.clone()));
    let mut pools =
        pb::pool_admin_client::PoolAdminClient::with_interceptor(channel.clone(), as_admin.clone());
    let mut settings =
        pb::settings_admin_client::SettingsAdminClient::with_interceptor(channel.clone(), as_admin);
    let mut quota = pb::quota_share_client::QuotaShareClient::with_interceptor(channel.clone(), as_router);
    let mut said = format!("{:?}", run(&["check"], &vars).await);

    let team = pool("team", ["c1"], [hard("A", 50.0)]).with_provider("kimi");
    told(&mut said, pools.create_pool(pb::CreatePoolRequest { pool: Some(team.clone()) }).await);
    told(&mut said, pools.create_pool(pb::CreatePoolRequest { pool: Some(team) }).await);
    told(&mut said, quota.enforce(ask("A", "c1", requests(1))).await);
    told(&mut said, quota.enforce(ask("", "c1", None)).await);
    let mut record = spent("A", "c1", requests(1));
    for (name, value) in
        [("x-api-key", HIDDEN), ("x-codex-primary-used-percent", HIDDEN), ("set-cookie", HIDDEN)]
    {
        record.provider_headers.insert(name.to_owned(), value.to_owned());
    }
    let provider_headers = record.provider_headers.clone();
    told(&mut said, quota.record_consumption(record).await);
    let signals =
        pb::ReportSignalsRequest { connection_id: "c1".to_owned(), provider_headers, ..Default::default() };
    told(&mut said, quota.report_signals(signals).await);
    // A wrong role, no token, unknown ones, and one in the wrong form.
    told(&mut said, quota.clone().enforce(ask("A", "c1", None)).await);
    for path in ["/quotashare.v1.PoolAdmin/ListPools", "/quotashare.v1.Nothing/Nothing"] {
        for token in [Some(router.text.as_str()), None, Some(HIDDEN), Some("")] {
            told(&mut said, call_raw(channel.clone(), path, b"\xff\xff".to_vec(), token).await);
        }
    }
    // Other passwords, for this Redis and for none, and what is no URL.
    for redis_url in [
        format!("redis://:{HIDDEN}-wrong@{}", redis.address()),
        format!("redis://user:{HIDDEN}-nowhere@127.0.0.1:1"),
        format!("mongo://user:{HIDDEN}@127.0.0.1:1"),
        format!(":{HIDDEN}@:::"),
    ] {
        let update = pb::Settings { redis_url, ..Default::default() };
        told(
            &mut said,
            settings
                .update_settings(pb::UpdateSettingsRequest { settings: Some(update), clear: vec![] })
                .await,
        );
        told(&mut said, quota.enforce(ask("A", "c1", requests(1))).await);
        told(&mut said, settings.get_settings(pb::GetSettingsRequest {}).await);
        told(&mut said, settings.get_status(pb::GetStatusRequest {}).await);
    }
    // Tokens and keys where they do not belong.
    tokens.write(&[&admin.text, &format!("x admin {}", admin.text), &format!("{HIDDEN} {HIDDEN} {HIDDEN}")]);
    files.write("key", &format!("{}{HIDDEN}", issued.key.replace("PRIVATE", "SECRET")));
    let asked = Instant::now();
    for words in ["QUOTA_AUTH_TOKENS_FILE cannot be used", "QUOTA_TLS_*_FILE cannot be used"] {
        while !process.log().contains(words) {
            assert!(asked.elapsed() < PATIENCE, "nothing is said of it: {words}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for path in ["/metrics", "/readyz", "/nothing"] {
        said.push_str(&page(&process.log(), path).await);
    }
    let data = text(process.data_dir()).to_owned();
    process.end_with(Signal::SIGTERM).await;
    said.push_str(&process.log());
    for command in ["check", "export", "serve"] {
        let vars = [&vars[..], &[("DATA_DIR", data.as_str()), ("QUOTA_LISTEN", "nowhere")]].concat();
        said.push_str(&format!("{:?}", run(&[command], &vars).await));
    }

    let hash = |token: &Token| token.line.split(' ').next_back().expect("a hash").to_owned();
    let key_line = issued.key.lines().nth(1).expect("a key is several lines").to_owned();
    let secrets =
        [HIDDEN.to_owned(), admin.text.clone(), router.text.clone(), hash(&admin), hash(&router), key_line];
    for (number, secret) in secrets.iter().enumerate() {
        let shown = said.lines().find(|line| line.contains(secret));
        assert!(shown.is_none(), "secret {number} is shown: {}", shown.unwrap_or_default());
    }
    for expected in
        ["TOKEN_UNKNOWN", "CREDENTIALS_MISSING", "ROLE_NOT_ENOUGH", "quota_share_build_info", "DATA_DIR="]
    {
        assert!(said.contains(expected), "the test has not come as far as {expected}");
    }
}
