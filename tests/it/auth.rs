//! Who may call what, by tokens; what they did is said.

use std::time::{Duration, Instant};

use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::{Code, Request, metadata::MetadataMap};
use tonic_types::StatusExt;

use crate::harness::{
    Client, PATIENCE, TestProcess, TestServer, Token, TokensFile, ask, call_raw, dimension, failed_start,
    hard, paths_of, pb, pool, refusal, run, told,
};

const ROLES: [&str; 3] = ["router", "viewer", "admin"];
const GET_STATUS: &str = "/quotashare.v1.SettingsAdmin/GetStatus";

/// A server that knows a token of each role.
async fn guarded_server() -> (TestServer, TokensFile, Vec<Token>) {
    let mut tokens = Vec::new();
    for role in ROLES {
        tokens.push(Token::new(&format!("the-{role}"), role).await);
    }
    let file = TokensFile::new(&tokens.iter().map(|token| token.line.as_str()).collect::<Vec<_>>());
    let mut server = TestServer::start_on_sqlite().await;
    server.restart_with(|config| config.auth_tokens_file = Some(file.path())).await;
    (server, file, tokens)
}

/// Whether a call is let in; whatever it is answered with then.
async fn is_let_in(client: &Client, path: &str, token: Option<&str>) -> Result<(), Code> {
    match call_raw(client.channel(), path, Vec::new(), token).await {
        Err(status) if matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied) => {
            let details = status.get_error_details();
            let info = details.error_info().expect("what is missing is told in details");
            assert_eq!(info.domain, "quotashare.v1");
            assert!(path.ends_with(&info.metadata["method"]), "{status:?}");
            assert!(status.message().contains(&info.metadata["needs"]), "{status:?}");
            Err(status.code())
        }
        _ => Ok(()),
    }
}

/// The paths of all methods of the contract.
fn contract() -> Vec<String> {
    let descriptors = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
    paths_of(FileDescriptorSet::decode(&descriptors[..]).expect("a descriptor set"))
}

/// Who may call a method, told from its name alone.
fn expected(path: &str) -> &'static [&'static str] {
    let (service, verb) = path.rsplit_once('/').expect("a service and a method");
    let reads = ["Get", "List", "Watch", "Preview"].iter().any(|read| verb.starts_with(read));
    match service.rsplit_once('.').expect("a package").1 {
        "QuotaShare" => &["router", "admin"],
        _ if reads => &["viewer", "admin"],
        _ => &["admin"],
    }
}

#[tokio::test]
async fn every_method_lets_in_who_has_its_role_and_nobody_else() {
    let (server, _file, tokens) = guarded_server().await;
    let paths = contract();
    assert!(paths.len() >= 25, "{paths:?}");
    for path in &paths {
        for (role, token) in ROLES.iter().zip(&tokens) {
            let want = if expected(path).contains(role) { Ok(()) } else { Err(Code::PermissionDenied) };
            assert_eq!(is_let_in(&server, path, Some(&token.text)).await, want, "{role} calls {path}");
        }
        for nobody in [None, Some("qs_unknown")] {
            let outcome = is_let_in(&server, path, nobody).await;
            assert_eq!(outcome, Err(Code::Unauthenticated), "{nobody:?} calls {path}");
        }
    }
}

#[tokio::test]
async fn health_is_open_and_reflection_is_for_whoever_has_a_role() {
    let (mut server, _file, tokens) = guarded_server().await;
    assert!(server.is_serving().await);
    let watch = "/grpc.health.v1.Health/Watch";
    assert_eq!(is_let_in(&server, watch, None).await, Ok(()));
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        for token in &tokens {
            assert_eq!(is_let_in(&server, &path, Some(&token.text)).await, Ok(()));
        }
        assert_eq!(is_let_in(&server, &path, None).await, Err(Code::Unauthenticated));
    }
    server.restart_with(|config| config.reflection = false).await;
    let path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let status = call_raw(server.channel(), path, Vec::new(), Some(&tokens[2].text)).await;
    assert_eq!(status.expect_err("it is turned off").code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_refusal_says_what_is_missing() {
    let (server, _file, tokens) = guarded_server().await;
    // authorization | code | reason | words
    let router = format!("Bearer {}", tokens[0].text);
    let cases = [
        ("", Code::Unauthenticated, "CREDENTIALS_MISSING", "needs the role admin: send the metadata"),
        (
            "Basic dXNlcjpoaWRkZW4=",
            Code::Unauthenticated,
            "CREDENTIALS_MALFORMED",
            "authorization: Bearer TOKEN",
        ),
        ("Bearer hidden", Code::Unauthenticated, "TOKEN_UNKNOWN", "the token is not known"),
        (&router, Code::PermissionDenied, "ROLE_NOT_ENOUGH", "the-router has the role router"),
    ];
    for (authorization, code, reason, words) in cases {
        let mut request = Request::new(pb::CreatePoolRequest::default());
        if !authorization.is_empty() {
            request.metadata_mut().insert("authorization", authorization.parse().expect("a value"));
        }
        let refused = refusal(server.pools().create_pool(request).await);
        assert_eq!((refused.code, refused.reason.as_str()), (code, reason), "{refused:?}");
        assert!(refused.message.contains(words), "{refused:?}");
        assert!(!format!("{refused:?}").contains("hidden"), "{refused:?}");
        assert_eq!(refused.metadata["needs"], "the role admin");
    }
    let (_, metrics) = server.page("/metrics").await;
    let counted =
        |code: &str| metrics.lines().any(|line| line.contains("rpc_duration") && line.contains(code));
    assert!(counted("UNAUTHENTICATED") && counted("PERMISSION_DENIED"), "{metrics}");
}

/// Waits until a call with `token` ends as it is to.
async fn until(client: &Client, token: &str, want: Result<(), Code>) {
    let asked = Instant::now();
    while is_let_in(client, GET_STATUS, Some(token)).await != want {
        assert!(asked.elapsed() < PATIENCE, "a token is not {want:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn tokens_change_without_a_restart_and_a_file_that_cannot_be_used_changes_nothing() {
    let [old, new] = [Token::new("ops", "viewer").await, Token::new("ops", "viewer").await];
    let mut file = TokensFile::new(&[&old.line]);
    let path = file.path().display().to_string();
    let process = TestProcess::start_with(&[("QUOTA_AUTH_TOKENS_FILE", &path)]).await;
    until(&process, &new.text, Err(Code::Unauthenticated)).await;
    // Both, while callers change over; then the new one alone.
    file.write(&[&old.line, "# a comment", &new.line]);
    until(&process, &new.text, Ok(())).await;
    until(&process, &old.text, Ok(())).await;
    file.write(&[&new.line]);
    until(&process, &old.text, Err(Code::Unauthenticated)).await;

    file.write(&[&old.line, "", &old.text]);
    let asked = Instant::now();
    while !process.log().contains("line 3: it has 1 words") {
        assert!(asked.elapsed() < PATIENCE, "nothing is said: {}", process.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until(&process, &new.text, Ok(())).await;
    until(&process, &old.text, Err(Code::Unauthenticated)).await;
    std::fs::remove_file(file.path()).expect("it can be removed");
    while !process.log().contains("it cannot be read") {
        assert!(asked.elapsed() < 2 * PATIENCE, "nothing is said: {}", process.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until(&process, &new.text, Ok(())).await;
    let log = process.log();
    assert_eq!(log.matches("line 3: it has 1 words").count(), 1, "{log}");
    assert!(!log.contains(&old.text) && !log.contains(&new.text), "{log}");
}

#[tokio::test]
async fn a_start_with_a_file_that_cannot_be_used_names_every_mistake() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = TokensFile::new(&["one hidden", "two hidden hidden hidden"]);
    let path = file.path().display().to_string();
    let vars = [("QUOTA_AUTH_TOKENS_FILE", path.as_str()), ("QUOTA_MAX_CALLS_IN_FLIGHT", "0")];
    let (code, log) = failed_start(folder.path(), &vars).await;
    assert_eq!(code, Some(2));
    for words in ["line 1: it has 2 words", "line 2: it has 4 words", "QUOTA_MAX_CALLS_IN_FLIGHT=\"0\""] {
        assert!(log.contains(words), "{words}: {log}");
    }
    assert!(!log.contains("hidden"), "{log}");
    let ended = run(&["check"], &[("QUOTA_AUTH_TOKENS_FILE", "/nowhere/tokens")]).await;
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("QUOTA_AUTH_TOKENS_FILE=\"/nowhere/tokens\""), "{ended:?}");
}

#[tokio::test]
async fn a_new_token_is_refused_for_a_name_or_role_that_is_none() {
    for (args, words) in [
        (["--name", "a b", "--role", "admin"], "--name \"a b\" is not valid: use 1 to 64 printable"),
        (["--name", "a", "--role", "root"], "--role \"root\" is not valid: use router, viewer or admin"),
    ] {
        let ended = run(&[&["token", "new"][..], &args].concat(), &[]).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
        assert!(ended.stderr.contains(words), "{ended:?}");
    }
    let [one, other] = [Token::new("a", "admin").await, Token::new("a", "admin").await];
    assert_ne!(one.text, other.text);
}

#[tokio::test]
async fn beyond_this_machine_nobody_is_served_without_being_asked_who_they_are() {
    let token = Token::new("a", "admin").await;
    let file = TokensFile::new(&[&token.line]);
    let path = file.path().display().to_string();
    let everywhere = [("QUOTA_LISTEN", "0.0.0.0:0"), ("QUOTA_HTTP_LISTEN", "0.0.0.0:0")];
    let ended = run(&["check"], &everywhere).await;
    assert_eq!((ended.code, ended.stderr.lines().count()), (Some(2), 2), "{ended:?}");
    assert!(ended.stderr.contains("QUOTA_AUTH_TOKENS_FILE") && ended.stderr.contains("QUOTA_INSECURE=true"));
    let guarded = [&everywhere[..], &[("QUOTA_AUTH_TOKENS_FILE", &path)]].concat();
    let ended = run(&["check"], &guarded).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("warning: tokens are sent without encryption"), "{ended:?}");
    let ended = run(&["check"], &[("QUOTA_AUTH_TOKENS_FILE", path.as_str())]).await;
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (Some(0), ""),
        "on this machine there is nothing to warn of"
    );
    let insecure = [&everywhere[..], &[("QUOTA_INSECURE", "true")]].concat();
    let ended = run(&["check"], &insecure).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("may do everything"), "{ended:?}");
}

/// Sends `token` with each call.
fn with_token(metadata: &mut MetadataMap, token: &Token) {
    metadata.insert("authorization", format!("Bearer {}", token.text).parse().expect("a header's value"));
}

/// Of each audit line of a log: who, method, what, from which revision, to which, and what has changed.
fn audited(log: &str) -> Vec<[String; 7]> {
    let lines = log.lines().filter(|line| line.contains("quota_share::audit"));
    let told = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        ["who", "method", "what", "from_revision", "revision", "from", "to"].map(|name| {
            match line.get(name) {
                None => String::new(),
                Some(serde_json::Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
            }
        })
    };
    lines.map(told).collect()
}

#[tokio::test]
async fn every_change_is_said_even_where_nobody_is_asked_who_they_are() {
    let mut process = TestProcess::start().await;
    let legacy_json =
        r#"[{"connectionId": "c9", "accountLabel": "Old", "provider": "kimi", "allocations": []}]"#;
    let import = pb::ImportPoolsRequest { legacy_json: legacy_json.to_owned() };
    let imported = told(process.pools().import_pools(import.clone()).await).pools;
    told(process.pools().import_pools(import).await);
    process.create(pool("p", ["c1"], [hard("A", 50.0)]).with_provider("kimi")).await;
    process.update(pool("p", ["c1"], [hard("A", 60.0)]).with_provider("kimi")).await;
    process.put_allocation("p", hard("B", 10.0)).await;
    process.delete_allocation("p", "B").await;
    process.delete_allocation("p", "B").await;
    process.put_plan("c1", [dimension("tokens/hourly", 100.0)]).await;
    process.delete_plan("c1").await;
    process.reset("p").await;
    process
        .update_settings(pb::Settings { saturation_threshold: Some(0.6), ..Default::default() }, &[])
        .await;
    process.update_settings(pb::Settings::default(), &["saturation_threshold"]).await;
    process.delete_pool("p").await;
    process.end_with(nix::sys::signal::Signal::SIGTERM).await;

    let log = process.log();
    let lines = audited(&log);
    let imported = format!("pool:{}", imported[0].pool_id);
    let want = [
        ("ImportPools", imported.as_str(), "", "1"),
        ("CreatePool", "pool:p", "", "2"),
        ("UpdatePool", "pool:p", "2", "3"),
        ("PutAllocation", "pool:p", "3", "4"),
        ("DeleteAllocation", "pool:p", "4", "5"),
        ("PutPlan", "plan:c1", "", "6"),
        ("DeletePlan", "plan:c1", "6", "7"),
        ("ResetUsage", "usage in pool:p", "", "7"),
        ("UpdateSettings", "settings", "", "8"),
        ("UpdateSettings", "settings", "8", "9"),
        ("DeletePool", "pool:p", "5", "10"),
    ];
    let want =
        want.map(|(method, what, from, to)| ["nobody was asked", method, what, from, to].map(str::to_owned));
    let heads: Vec<&[String]> = lines.iter().map(|line| &line[..5]).collect();
    assert_eq!(heads, want, "{log}");
    let changed = |line: usize| [&lines[line][5], &lines[line][6]];
    assert_eq!(changed(2), [r#"{"allocations.A.weight":50.0}"#, r#"{"allocations.A.weight":60.0}"#]);
    assert_eq!(
        changed(5),
        [
            "{}",
            r#"{"connection_id":"c1","dimensions.tokens/hourly.limit":100.0,"dimensions.tokens/hourly.unit":"tokens","dimensions.tokens/hourly.window":"hourly"}"#
        ]
    );
    assert_eq!(changed(9), [r#"{"saturation_threshold":0.6}"#, "{}"]);
    for path in contract().iter().filter(|path| expected(path) == ["admin"]) {
        assert!(
            lines.iter().any(|[_, method, ..]| path.ends_with(&format!("/{method}"))),
            "{path} is not said"
        );
    }
}

#[tokio::test]
async fn each_change_is_said_with_who_made_it() {
    let (admin, router) = (Token::new("alice", "admin").await, Token::new("r", "router").await);
    let file = TokensFile::new(&[&admin.line, &router.line]);
    let path = file.path().display().to_string();
    let mut process = TestProcess::start_with(&[("QUOTA_AUTH_TOKENS_FILE", &path)]).await;
    let (channel, with) = (process.channel(), |token: Token| {
        move |mut request: Request<()>| {
            with_token(request.metadata_mut(), &token);
            Ok(request)
        }
    });
    let mut pools =
        pb::pool_admin_client::PoolAdminClient::with_interceptor(channel.clone(), with(admin.clone()));
    let mut settings = pb::settings_admin_client::SettingsAdminClient::with_interceptor(
        channel.clone(),
        with(admin.clone()),
    );
    let mut quota = pb::quota_share_client::QuotaShareClient::with_interceptor(channel, with(router));

    let team = pool("team", ["c1"], [hard("A", 50.0)]);
    let created = told(pools.create_pool(pb::CreatePoolRequest { pool: Some(team.clone()) }).await).pool;
    let revision = created.expect("a pool").revision;
    told(quota.enforce(ask("A", "c1", None)).await);
    // Refused, or without an effect: nothing has changed.
    refusal(pools.create_pool(pb::CreatePoolRequest { pool: Some(team) }).await);
    let delete = |id: &str, revision| pb::DeletePoolRequest { pool_id: id.to_owned(), revision };
    told(pools.delete_pool(delete("nothing", 0)).await);
    let redis_url = "redis://user:hidden@127.0.0.1:1".to_owned();
    let update = pb::Settings { redis_url, ..Default::default() };
    told(settings.update_settings(pb::UpdateSettingsRequest { settings: Some(update), clear: vec![] }).await);
    told(pools.delete_pool(delete("team", revision)).await);
    process.end_with(nix::sys::signal::Signal::SIGTERM).await;

    let log = process.log();
    let want = [
        ["alice", "CreatePool", "pool:team", "", "1"],
        ["alice", "UpdateSettings", "settings", "", "2"],
        ["alice", "DeletePool", "pool:team", "1", "3"],
    ];
    let lines = audited(&log);
    let heads: Vec<&[String]> = lines.iter().map(|line| &line[..5]).collect();
    assert_eq!(heads, want, "{log}");
    assert_eq!(lines[1][5..], ["{}", r#"{"redis_url":"***"}"#]);
    assert!(!log.contains("hidden") && !log.contains(&admin.text), "{log}");
}
