//! Moving in and out: what becomes of pools of other programs, and of this one's own configuration.

use std::{collections::BTreeMap, fs, path::Path};

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use serde_json::{Value, json};
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tempfile::TempDir;
use tonic::Code;

use crate::harness::{
    Client, Ended, TestProcess, TestServer, UNREACHABLE, dimension, exempt, hard, pb, pool, refusal, run,
    tokens, told,
};

/// What a key in a provider's row would look like: it must turn up nowhere.
const SECRET: &str = "sk-do-not-read-me";

async fn import(client: &Client, legacy_json: &str) -> pb::ImportPoolsResponse {
    let request = pb::ImportPoolsRequest { legacy_json: legacy_json.to_owned() };
    told(client.pools().import_pools(request).await)
}

/// `key weight policy` of each allocation.
fn shares(pool: &pb::Pool) -> Vec<String> {
    let share = |a: &pb::Allocation| format!("{} {} {}", a.api_key_id, a.weight, a.policy().as_str_name());
    pool.allocations.iter().map(share).collect()
}

fn by_connection(pools: Vec<pb::Pool>) -> BTreeMap<String, pb::Pool> {
    pools.into_iter().map(|pool| (pool.connection_ids[0].clone(), pool)).collect()
}

#[track_caller]
fn assert_warned(warnings: &[String], words: &[&str]) {
    let warned = warnings.iter().any(|warning| words.iter().all(|word| warning.contains(word)));
    assert!(warned, "no warning has {words:?}: {warnings:#?}");
}

fn dashboard() -> Value {
    json!([
        {"connectionId": "c1", "provider": "kimi", "accountLabel": "Team", "window": "5h", "policy": "soft",
         "allocations": [{"apiKeyId": "a", "percent": 70}, {"apiKeyId": "b", "percent": 90}]},
        {"connectionId": "c2", "provider": "kimi", "policy": "burst",
         "allocations": [{"apiKeyId": "a", "percent": 170}, {"apiKeyId": "b", "percent": -3},
                         {"apiKeyId": "", "percent": 9}, {"percent": 9}, {"apiKeyId": "a", "percent": 5}]},
        {"connectionId": "c1", "provider": "glm", "policy": "hard",
         "allocations": [{"apiKeyId": "z", "percent": 1}]},
        {"connectionId": "connection-three", "policy": "fierce",
         "allocations": [{"apiKeyId": "a", "percent": "25"}, {"apiKeyId": "b", "percent": "NaN"}]},
        {"connectionId": "c4", "accountLabel": "  ", "provider": 7, "allocations": {"a": 1}},
        {"connectionId": "            x", "accountLabel": "\u{0}\n"},
    ])
}

#[tokio::test]
async fn the_dashboards_pools_are_taken_over_and_every_oddity_is_told() {
    let server = TestServer::start_on_sqlite().await;
    let answer = import(&server, &dashboard().to_string()).await;
    assert!(!answer.skipped);
    let pools = by_connection(answer.pools.clone());
    assert_eq!(pools.len(), 5);
    assert_eq!(by_connection(server.list_pools().await), pools);

    // connection | name | provider | allocations
    let cases: &[(&str, &str, &str, &[&str])] = &[
        ("c1", "Team", "kimi", &["a 43.75 SOFT", "b 56.25 SOFT"]),
        ("c2", "kimi", "kimi", &["a 100 BURST", "b 0 BURST"]),
        ("connection-three", "connection-t", "", &["a 25 HARD", "b 0 HARD"]),
        ("c4", "c4", "", &[]),
        ("            x", "Migrated pool", "", &[]),
    ];
    for (connection, name, provider, want) in cases {
        let pool = &pools[*connection];
        assert_eq!((pool.name.as_str(), pool.provider.as_str()), (*name, *provider), "{connection}");
        assert_eq!(shares(pool), *want, "{connection}");
    }
    for words in [
        &["legacy_json[0]", "add up to 160", "scaled to 100"][..],
        &["legacy_json[1]", "no name", "kimi"],
        &["legacy_json[1].allocations[0]", "170 per cent become 100"],
        &["legacy_json[1].allocations[1]", "-3 per cent become 0"],
        &["legacy_json[1].allocations[2]", "names no key"],
        &["legacy_json[1].allocations[3]", "names no key"],
        &["legacy_json[1].allocations[4]", "key a is in the pool already"],
        &["legacy_json[2]", "becomes one with legacy_json[0]", "c1"],
        &["legacy_json[3]: ", "fierce", "HARD"],
        &["legacy_json[3].allocations[1]", "no percentage"],
        &["legacy_json[4]", "no list of allocations"],
        &["legacy_json[5]", "Migrated pool"],
        &["connection-t", "no plan"],
    ] {
        assert_warned(&answer.warnings, words);
    }
    assert_eq!(server.enforce("a", "c1", None).await.dimension("requests/hourly").limit, Some(1_500.0));

    let again = import(&server, &dashboard().to_string()).await;
    assert_eq!((again.skipped, again.pools, again.warnings), (true, vec![], vec![]));
    assert_eq!(by_connection(server.list_pools().await), pools);
}

#[tokio::test]
async fn pools_that_were_imported_are_there_after_a_restart_each_with_counters_of_its_own() {
    let mut server = TestServer::start_on_sqlite().await;
    let two = json!([
        {"connectionId": "c1", "provider": "kimi", "allocations": [{"apiKeyId": "a", "percent": 50}]},
        {"connectionId": "c2", "provider": "kimi", "allocations": [{"apiKeyId": "a", "percent": 50}]},
    ]);
    let pools = by_connection(import(&server, &two.to_string()).await.pools);
    server.record("a", "c1", tokens(5)).await;
    server.restart().await;
    assert_eq!(by_connection(server.list_pools().await), pools);
    assert_eq!(server.used(&pools["c1"].pool_id, "requests/hourly").await, (1.0, 0.0));
    assert_eq!(server.used(&pools["c2"].pool_id, "requests/hourly").await, (0.0, 0.0));
    // The store goes on from the revision that the import left.
    server.create(pool("p", ["c3"], [hard("a", 1.0)])).await;
    server.restart().await;
    assert_eq!(server.list_pools().await.len(), 3);
}

#[tokio::test]
async fn an_entry_without_a_connection_is_named_and_nothing_is_imported() {
    let server = TestServer::start_on_sqlite().await;
    let good = json!({"connectionId": "c1", "allocations": []});
    let long = "x".repeat(257);
    for bad in [
        json!({"provider": "kimi", "accountLabel": "Team"}),
        json!({"connectionId": ""}),
        json!({"connectionId": "  "}),
        json!({"connectionId": null}),
        json!({"connectionId": 5}),
        json!({"connectionId": ["c2"]}),
        json!({"connectionId": "tab\there"}),
        json!({ "connectionId": long }),
        json!("c2"),
        json!(null),
        json!([]),
    ] {
        let request = pb::ImportPoolsRequest { legacy_json: json!([good, bad]).to_string() };
        let refused = refusal(server.pools().import_pools(request).await);
        refused.names(&["legacy_json[1].connectionId"]);
        let content: String = bad.to_string().chars().take(80).collect();
        assert!(refused.message.contains(&content), "{content}: {}", refused.message);
    }
    for text in
        ["", "null", "{}", "7", "[", "[1e999]", "\"[]\"", &"[".repeat(100_000), &"[{\"a\":".repeat(50_000)]
    {
        let request = pb::ImportPoolsRequest { legacy_json: text.to_owned() };
        refusal(server.pools().import_pools(request).await).names(&["legacy_json"]);
    }
    assert_eq!(server.list_pools().await, []);
    let empty = import(&server, "[]").await;
    assert_eq!((empty.skipped, empty.pools), (false, vec![]));
    let status = told(server.settings().get_status(pb::GetStatusRequest {}).await);
    assert_eq!(status.config_revision, 0, "nothing was written");
    server.create(pool("p", ["c9"], [])).await;
    assert!(import(&server, "[]").await.skipped);
}

/// The usual bound of one message is 4 MB.
#[tokio::test]
async fn four_megabytes_are_taken_over_or_refused_in_words() {
    let server = TestServer::start_on_sqlite().await;
    let (label, key) = ("N".repeat(120), "a".repeat(120));
    let entry = |index: usize| {
        json!({"connectionId": format!("c{index}"), "accountLabel": label,
        "policy": "hard", "allocations": [{"apiKeyId": key, "percent": 50}]})
    };
    let large = Value::from((0..11_500).map(entry).collect::<Vec<_>>()).to_string();
    assert!((3_600_000..4_190_000).contains(&large.len()), "{}", large.len());
    let answer = import(&server, &large).await;
    assert_warned(&answer.warnings, &["more pools were imported", "ListPools"]);
    assert_warned(&answer.warnings, &["more warnings"]);
    assert_eq!(server.list_pools().await.len(), 11_500);

    let server = TestServer::start_on_sqlite().await;
    let nothing = format!("[{}1]", "1,".repeat(2_000_000));
    let request = pb::ImportPoolsRequest { legacy_json: nothing };
    assert_eq!(refusal(server.pools().import_pools(request).await).code, Code::InvalidArgument);
    let keys: Vec<Value> =
        (0..12_000).map(|key| json!({"apiKeyId": key.to_string(), "percent": 1})).collect();
    let answer = import(&server, &json!([{"connectionId": "c1", "allocations": keys}]).to_string()).await;
    assert_eq!(answer.pools[0].allocations.len(), 10_000);
    assert_warned(&answer.warnings, &["allocations[10000]", "at most 10000"]);
}

fn any_value() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        prop::sample::select(vec!["", " ", "c1", "kimi", "soft", "HARD", "NaN", "-inf", "1e400", "\u{0}"]),
        prop::sample::select(vec!["100.00000001", "ÄÖ", "\u{202e}", "c1\n"]),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-200..200i64).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        text.prop_map(Value::from),
        "\\PC{0,300}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 8, |inner| {
        let names = vec!["apiKeyId", "percent", "connectionId", "unit", "window", "limit", "x"];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::btree_map(prop::sample::select(names), inner, 0..6).prop_map(|fields| fields
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

/// Each field mostly something like what belongs there.
fn any_entry() -> impl Strategy<Value = Value> {
    let allocation = prop_oneof![
        6 => (any_value(), any_value()).prop_map(|(key, percent)| json!({"apiKeyId": key, "percent": percent})),
        6 => ("[a-d]", -20.0..150.0).prop_map(|(key, percent)| json!({"apiKeyId": key, "percent": percent})),
        1 => any_value(),
    ];
    let allocations = prop_oneof![
        9 => prop::collection::vec(allocation, 0..12).prop_map(Value::from),
        1 => any_value(),
    ];
    ("c[0-9]", any_value(), any_value(), any_value(), allocations).prop_map(
        |(connection, provider, label, policy, allocations)| {
            json!({"connectionId": connection, "provider": provider, "accountLabel": label, "policy": policy,
                   "allocations": allocations})
        },
    )
}

/// Only an entry without a connection fails an import: whatever else is in it, what comes out is valid.
#[test]
fn whatever_is_in_entries_with_a_connection_they_become_valid_pools() {
    use quota_share::core::{
        directory::{Change, Directory},
        import::legacy,
        units::Timestamp,
    };
    let config = Config { cases: 400, failure_persistence: None, ..Config::default() };
    let entries = prop::collection::vec(any_entry(), 1..8);
    let result = TestRunner::new(config).run(&entries, |entries| {
        let mut import = legacy::from_entries("legacy_json", &entries).expect("each has a connection");
        for (index, pool) in import.pools.iter_mut().enumerate() {
            pool.pool_id = format!("p{index}");
        }
        let applied = Directory::default().apply(Change::Import(import), Timestamp::from_unix_ms(0));
        prop_assert!(matches!(applied, Ok(Some(_))), "{:?}", applied.err());
        Ok(())
    });
    result.expect("every import is taken");
}

// ---- the database of an OmniRoute installation ----

const REQUIRED: &str = "
    CREATE TABLE quota_pools (id TEXT PRIMARY KEY, connection_id TEXT, name TEXT, group_id TEXT);
    CREATE TABLE quota_allocations (pool_id TEXT, api_key_id TEXT, weight REAL, cap_value REAL, cap_unit TEXT,
        policy TEXT);
    INSERT INTO quota_pools VALUES ('p1', 'c1', 'One', 'g1'), ('P 2', 'c2', NULL, NULL), ('p3', 'c1', 'Three', NULL);
    INSERT INTO quota_allocations VALUES
        ('p1', 'a', 60, 1000, 'tokens', 'soft'), ('p1', 'b', 80, NULL, NULL, 'burst'),
        ('P 2', 'a', 30, 5, 'bananas', 'weird'), ('P 2', NULL, 30, NULL, NULL, 'hard'),
        ('P 2', 'b', 9e999, NULL, NULL, 'hard'), ('P 2', 'c', 'much', NULL, NULL, 'hard'),
        ('p3', 'z', 10, NULL, NULL, 'hard');";

const OPTIONAL: &str = "
    CREATE TABLE quota_pool_connections (pool_id TEXT, connection_id TEXT);
    CREATE TABLE quota_groups (id TEXT, name TEXT);
    CREATE TABLE quota_allocation_model_caps (pool_id TEXT, api_key_id TEXT, model TEXT, cap_value REAL, cap_unit TEXT);
    CREATE TABLE provider_plans (connection_id TEXT, provider TEXT, dimensions_json TEXT, source TEXT);
    CREATE TABLE provider_connections (id TEXT, provider TEXT, api_key TEXT, access_token BLOB);
    INSERT INTO quota_pool_connections VALUES ('p1', 'c1'), ('p1', 'c5'), ('P 2', 'c5');
    INSERT INTO quota_groups VALUES ('g1', 'Blue');
    INSERT INTO quota_allocation_model_caps VALUES ('p1', 'a', 'large', 50, 'requests');
    INSERT INTO provider_plans VALUES
        ('c1', 'glm', '[{\"unit\": \"tokens\", \"window\": \"5h\", \"limit\": 0},
                        {\"unit\": \"tokens\", \"window\": \"weekly\", \"limit\": 2.220446049250313e-16},
                        {\"unit\": \"requests\", \"window\": \"daily\", \"limit\": 500},
                        {\"unit\": \"bananas\", \"window\": \"daily\", \"limit\": 5}]', 'manual'),
        ('c2', 'kimi', '[{\"unit\": \"requests\", \"window\": \"hourly\", \"limit\": 1500}]', 'auto'),
        ('c8', 'kimi', 'no json', 'manual'),
        ('c9', 'kimi', '[]', 'manual');
    INSERT INTO provider_connections VALUES ('c1', 'glm', 'sk-do-not-read-me', x'ff00'), ('c2', 'kimi', NULL, NULL);";

async fn database(path: &Path, statements: &[&str]) {
    let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
    let mut connection = SqliteConnection::connect_with(&options).await.expect("a database");
    for statements in statements {
        sqlx::raw_sql(sqlx::AssertSqlSafe(*statements)).execute(&mut connection).await.expect("a schema");
    }
    connection.close().await.expect("written");
}

/// `quota-share import FILE` into `folder`/data, and what is there then.
async fn import_file(folder: &Path, file: &Path) -> Ended {
    run(&["import", &file.display().to_string()], &[("DATA_DIR", &data_dir(folder))]).await
}

fn data_dir(folder: &Path) -> String {
    folder.join("data").display().to_string()
}

async fn export(folder: &Path) -> String {
    let ended = run(&["export"], &[("DATA_DIR", &data_dir(folder))]).await;
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    ended.stdout
}

async fn exported(folder: &Path) -> Value {
    serde_json::from_str(&export(folder).await).expect("an export is JSON")
}

#[tokio::test]
async fn an_installation_is_taken_over_with_members_groups_caps_and_plans() {
    let folder = TempDir::new().expect("a temporary folder");
    let file = folder.path().join("storage.sqlite");
    database(&file, &["PRAGMA journal_mode = WAL", REQUIRED, OPTIONAL]).await;
    let before = fs::read(&file).expect("the database");
    let ended = import_file(folder.path(), &file).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.starts_with("imported 2 pools, 1 plan and no settings into "), "{}", ended.stdout);

    let document = exported(folder.path()).await;
    let pools: BTreeMap<&str, &Value> = document["pools"]
        .as_array()
        .expect("pools")
        .iter()
        .map(|pool| (pool["connection_ids"][0].as_str().expect("a connection"), pool))
        .collect();
    let one = pools["c1"];
    assert_eq!(
        (&one["pool_id"], &one["name"], &one["group"], &one["provider"], &one["connection_ids"]),
        (&json!("p1"), &json!("One"), &json!("Blue"), &json!("glm"), &json!(["c1", "c5"]))
    );
    assert_eq!(
        one["allocations"][0],
        json!({
            "api_key_id": "a", "weight": 42.857142, "policy": "SOFT", "exempt": false,
            "cap": {"value": 1000.0, "unit": "TOKENS", "window": ""},
            "model_caps": [{"model": "large", "value": 50.0, "unit": "REQUESTS", "window": "hourly"}],
        })
    );
    let two = pools["c2"];
    assert_eq!((&two["name"], &two["connection_ids"]), (&json!("kimi"), &json!(["c2"])));
    let weights: Vec<&Value> =
        two["allocations"].as_array().expect("a list").iter().map(|share| &share["weight"]).collect();
    assert_eq!(weights, [&json!(23.076923), &json!(76.923076), &json!(0.0)]);
    let plans = json!([{"connection_id": "c1", "provider": "glm", "dimensions": [
        {"unit": "TOKENS", "window": "5h"}, {"unit": "TOKENS", "window": "weekly"},
        {"unit": "REQUESTS", "window": "daily", "limit": 500.0},
    ]}]);
    assert_eq!(document["plans"], plans, "that of c2 is the catalogue's");

    let warnings: Vec<String> = ended.stderr.lines().map(str::to_owned).collect();
    for words in [
        &["quota_pools[0]", "add up to 140"][..],
        &["quota_pools[1]", "another id", "P 2"],
        &["quota_pools[1]", "c5 stays with quota_pools[0]"],
        &["quota_pools[2]", "becomes one with quota_pools[0]"],
        &["quota_pools[1].allocations[0]", "bananas"],
        &["quota_pools[1].allocations[0]", "weird", "HARD"],
        &["quota_pools[1].allocations[1]", "names no key"],
        &["quota_pools[1].allocations[2]", "inf per cent become 100"],
        &["quota_pools[1].allocations[3]", "no percentage"],
        &["provider_plans[0].dimensions[3]", "bananas/daily"],
        &["provider_plans[2]", "no JSON array"],
        &["provider_plans[3]", "1 to 16 dimensions"],
    ] {
        assert_warned(&warnings, words);
    }
    assert!(!format!("{ended:?}{document}").contains(SECRET));
    let stored = fs::read(folder.path().join("data/storage.sqlite")).expect("the store");
    assert!(!stored.windows(SECRET.len()).any(|bytes| bytes == SECRET.as_bytes()));

    assert_eq!(fs::read(&file).expect("the database"), before, "it is only read");
    let left: Vec<_> =
        fs::read_dir(folder.path()).expect("the folder").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 2, "no file is left beside it: {left:?}");

    let again = import_file(folder.path(), &file).await;
    assert_eq!((again.code, again.stderr.as_str()), (Some(0), ""));
    assert!(again.stdout.starts_with("skipped: "), "{}", again.stdout);
    assert_eq!(exported(folder.path()).await, document);
}

#[tokio::test]
async fn an_installation_without_the_later_tables_is_taken_over_while_it_runs() {
    let folder = TempDir::new().expect("a temporary folder");
    let file = folder.path().join("storage.sqlite");
    database(&file, &["PRAGMA journal_mode = WAL", REQUIRED]).await;
    // As long as somebody has it open, what was written last is in its log.
    let options = SqliteConnectOptions::new().filename(&file);
    let mut running = SqliteConnection::connect_with(&options).await.expect("a database");
    let last = "INSERT INTO quota_pools VALUES ('p4', 'c4', 'Four', 'g1')";
    sqlx::query(last).execute(&mut running).await.expect("a pool");
    let ended = import_file(folder.path(), &file).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.starts_with("imported 3 pools, 0 plans and no settings"), "{}", ended.stdout);
    let document = exported(folder.path()).await;
    let four = document["pools"].as_array().expect("pools").iter().find(|pool| pool["pool_id"] == "p4");
    assert_eq!(four.expect("the last pool")["group"], "g1");
}

#[tokio::test]
async fn a_pool_without_a_connection_fails_the_import_of_an_installation() {
    let folder = TempDir::new().expect("a temporary folder");
    let file = folder.path().join("storage.sqlite");
    let bad = "INSERT INTO quota_pools VALUES ('p7', NULL, 'Seven', NULL)";
    database(&file, &[REQUIRED, OPTIONAL, bad]).await;
    let ended = import_file(folder.path(), &file).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
    for word in ["quota_pools[3].connection_id", "\"p7\"", "\"Seven\"", "use a pool with a connection"] {
        assert!(ended.stderr.contains(word), "{word}: {}", ended.stderr);
    }
    assert!(!folder.path().join("data/storage.sqlite").exists(), "nothing was begun");
}

#[tokio::test]
async fn what_is_none_of_the_forms_is_refused_in_words() {
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    database(&path("other.sqlite"), &["CREATE TABLE t (x)"]).await;
    fs::write(path("half.sqlite"), b"SQLite format 3\0 and then nothing like it").expect("a file");
    fs::write(path("text.json"), "pools: []").expect("a file");
    fs::write(path("number.json"), "7").expect("a file");
    fs::write(path("binary.json"), [0xff; 64]).expect("a file");
    let misspelt =
        r#"{"pools": [{"pool_id": "p", "name": "P", "connection_ids": ["c"], "owner_reserv": 0.5}]}"#;
    fs::write(path("misspelt.json"), misspelt).expect("a file");
    let unknown =
        r#"{"plans": [{"connection_id": "c", "dimensions": [{"unit": "tokens", "window": "5h"}]}]}"#;
    fs::write(path("unknown.json"), unknown).expect("a file");
    fs::write(path("later.json"), r#"{"version": 2, "pools": []}"#).expect("a file");
    fs::write(path("typed.json"), r#"{"pools": [{"pool_id": 7}, 5]}"#).expect("a file");
    let invalid =
        r#"{"pools": [{"pool_id": "p", "name": "P", "connection_ids": ["c"], "owner_reserve": 20}]}"#;
    fs::write(path("invalid.json"), invalid).expect("a file");
    // file | words of the refusal
    let cases: &[(&str, &[&str])] = &[
        ("other.sqlite", &["quota_pools", "quota-share export"]),
        ("half.sqlite", &["half.sqlite"]),
        ("missing.json", &["missing.json", "No such file"]),
        ("text.json", &["text.json", "no JSON", "quota-share export"]),
        ("number.json", &["number.json", "7 is not valid"]),
        ("binary.json", &["binary.json", "no JSON"]),
        ("misspelt.json", &["misspelt.json.pools[0].owner_reserv", "0.5", "misspelt?"]),
        ("unknown.json", &["unknown.json.plans[0].dimensions[0].unit", "\"tokens\"", "PERCENT, REQUESTS"]),
        ("later.json", &["later.json.version", "2 is not valid"]),
        ("typed.json", &["typed.json.pools[0]", "invalid type", "typed.json.pools[1]"]),
        ("invalid.json", &["pools[0].owner_reserve", "did you mean 0.2?"]),
    ];
    for (file, words) in cases {
        let ended = import_file(folder.path(), &path(file)).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{file}");
        for word in *words {
            assert!(ended.stderr.contains(word), "{file}: {word}: {}", ended.stderr);
        }
    }
}

// ---- what this service exports ----

/// A process with one of everything that can be configured.
async fn process_with_everything() -> TestProcess {
    let process = TestProcess::start().await;
    let first = pb::Pool {
        saturation_threshold: Some(0.7),
        owner_reserve: 0.1,
        group: "Blue".to_owned(),
        failure_mode: pb::pool::FailureMode::FailLocal.into(),
        ..pool(
            "first",
            ["c1", "c2"],
            [
                hard("a", 33.333333).capped(5.5, pb::dimension::Unit::Usd),
                crate::harness::soft("b \"quoted\" ü", 12.5).capped_for("large", "tokens/daily", 1e6),
                crate::harness::burst("c", 0.000001),
                exempt("d"),
            ],
        )
    };
    process.create(first.in_shadow()).await;
    process.create(pool("second", ["c3"], []).with_provider("kimi")).await;
    process.put_plan("c1", [dimension("usd/90s", 0.1), crate::harness::unlimited("percent/5h")]).await;
    process.put_plan("elsewhere", [dimension("tokens/monthly", 4.1e9)]).await;
    let settings = pb::Settings {
        saturation_threshold: Some(0.6),
        consumption_retention_days: Some(20),
        store_driver: pb::settings::StoreDriver::Sqlite.into(),
        redis_url: UNREACHABLE.to_owned(),
        ..Default::default()
    };
    process.update_settings(settings, &[]).await;
    process
}

#[tokio::test]
async fn an_export_of_a_running_service_imports_to_the_same_store() {
    let mut process = process_with_everything().await;
    let data = process.data_dir().display().to_string();
    let exported = run(&["export"], &[("DATA_DIR", &data)]).await;
    assert_eq!((exported.code, exported.stderr.as_str()), (Some(0), ""));
    assert!(!exported.stdout.contains("hidden") && !exported.stdout.contains("redis"), "{}", exported.stdout);

    let folder = TempDir::new().expect("a temporary folder");
    let file = folder.path().join("export.json");
    fs::write(&file, &exported.stdout).expect("a file");
    let refused = run(&["import", &file.display().to_string()], &[("DATA_DIR", &data)]).await;
    assert_eq!(refused.code, Some(1));
    let holder = format!("is in use by the process {}: stop it", process.pid());
    assert!(refused.stderr.contains(&holder), "{}", refused.stderr);

    let ended = import_file(folder.path(), &file).await;
    assert!(ended.stdout.starts_with("imported 2 pools, 2 plans and the settings"), "{ended:?}");
    assert_eq!(export(folder.path()).await, exported.stdout);

    let pools = process.list_pools().await;
    let stored = told(process.settings().get_settings(pb::GetSettingsRequest {}).await).stored;
    let mut expected = stored.expect("settings are stored");
    (expected.store_driver, expected.redis_url_configured) = (0, false);
    process.kill();
    let copy = TestProcess::start_on(&folder.path().join("data")).await;
    let plain = |pool: pb::Pool| pb::Pool { revision: 0, created_at: None, updated_at: None, ..pool };
    let of_copy: Vec<pb::Pool> = copy.list_pools().await.into_iter().map(plain).collect();
    assert_eq!(of_copy, pools.into_iter().map(plain).collect::<Vec<_>>());
    let stored = told(copy.settings().get_settings(pb::GetSettingsRequest {}).await).stored;
    assert_eq!(stored, Some(expected), "all but the driver and its URL");
}

#[tokio::test]
async fn a_driver_and_its_url_are_not_taken_over() {
    let folder = TempDir::new().expect("a temporary folder");
    let file = folder.path().join("document.json");
    let settings = json!({"store_driver": "redis", "redis_url": "redis://user:hidden@host", "saturation_threshold": 0.6});
    fs::write(&file, json!({"version": 1, "settings": settings}).to_string()).expect("a file");
    let ended = import_file(folder.path(), &file).await;
    assert!(ended.stdout.starts_with("imported 0 pools, 0 plans and the settings"), "{ended:?}");
    for name in ["store_driver", "redis_url"] {
        assert!(ended.stderr.contains(&format!("settings.{name} is not taken over")), "{}", ended.stderr);
    }
    assert!(!ended.stderr.contains("hidden"), "{}", ended.stderr);
    let copy = TestProcess::start_on(&folder.path().join("data")).await;
    let stored = told(copy.settings().get_settings(pb::GetSettingsRequest {}).await).stored;
    let expected = pb::Settings { saturation_threshold: Some(0.6), ..Default::default() };
    assert_eq!(stored, Some(expected));
}

/// As grpcurl reads it: by the JSON mapping of the contract's messages.
#[tokio::test]
async fn exported_pools_and_plans_can_be_given_to_the_service_one_by_one() {
    let process = process_with_everything().await;
    let exported = run(&["export"], &[("DATA_DIR", &process.data_dir().display().to_string())]).await;
    let document: Value = serde_json::from_str(&exported.stdout).expect("an export is JSON");
    let contract = DescriptorPool::decode(&include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"))[..])
        .expect("the contract");
    let read = |message: &str, json: &Value| {
        let message = contract.get_message_by_name(message).expect("a message of the contract");
        DynamicMessage::deserialize(message, json).expect("a message in JSON").encode_to_vec()
    };
    let server = TestServer::start_on_sqlite().await;
    for pool in document["pools"].as_array().expect("pools") {
        let bytes = read("quotashare.v1.Pool", pool);
        server.create(pb::Pool::decode(&bytes[..]).expect("a pool")).await;
    }
    for plan in document["plans"].as_array().expect("plans") {
        let bytes = read("quotashare.v1.Plan", plan);
        let plan = pb::Plan::decode(&bytes[..]).expect("a plan");
        told(server.plans().put_plan(pb::PutPlanRequest { plan: Some(plan) }).await);
    }
    let plain = |pool: pb::Pool| pb::Pool { revision: 0, created_at: None, updated_at: None, ..pool };
    let copies: Vec<pb::Pool> = server.list_pools().await.into_iter().map(plain).collect();
    assert_eq!(copies, process.list_pools().await.into_iter().map(plain).collect::<Vec<_>>());
    assert_eq!(server.list_plans().await.len(), 2);
}
