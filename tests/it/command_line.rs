//! What the program can be asked on the command line, and what it answers.

use tempfile::TempDir;

use crate::harness::{TestProcess, run};

/// What is said of each command: a change of it is a change for whoever uses it.
#[tokio::test]
async fn each_command_explains_itself() {
    let cases: &[(&[&str], &str)] = &[
        (&["--help"], include_str!("../data/help/quota-share.txt")),
        (&["serve", "--help"], include_str!("../data/help/serve.txt")),
        (&["check", "--help"], include_str!("../data/help/check.txt")),
        (&["import", "--help"], include_str!("../data/help/import.txt")),
        (&["export", "--help"], include_str!("../data/help/export.txt")),
        (&["adopt", "--help"], include_str!("../data/help/adopt.txt")),
        (&["healthcheck", "--help"], include_str!("../data/help/healthcheck.txt")),
        (&["token", "--help"], include_str!("../data/help/token.txt")),
        (&["token", "new", "--help"], include_str!("../data/help/token-new.txt")),
    ];
    for (args, want) in cases {
        let ended = run(args, &[]).await;
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{args:?}");
        assert_eq!(ended.stdout, *want, "{args:?}: if it is meant, put it into tests/data/help");
    }
}

#[tokio::test]
async fn check_prints_what_is_in_force_and_no_secret() {
    let ended = run(
        &["check", "--quota-saturation-threshold", "0.75"],
        &[
            ("QUOTA_SATURATION_THRESHOLD", "0.25"),
            ("DATA_DIR", "/nowhere"),
            ("QUOTA_STORE_REDIS_URL", "redis://user:hidden@host"),
            ("QUOTA_STORE_DRIVER", "mongo"),
            ("QUOTA_HTTP_LISTEN", "off"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://user:hidden@host"),
        ],
    )
    .await;
    let want = "QUOTA_LISTEN=127.0.0.1:50051\n\
                QUOTA_HTTP_LISTEN=off\n\
                QUOTA_INSECURE=false\n\
                QUOTA_AUTH_TOKENS_FILE=\n\
                QUOTA_TLS_CERT_FILE=\n\
                QUOTA_TLS_KEY_FILE=\n\
                QUOTA_TLS_CLIENT_CA_FILE=\n\
                QUOTA_TLS_CLIENT_AUTH=required\n\
                QUOTA_REFLECTION=true\n\
                QUOTA_MAX_CALLS_IN_FLIGHT=10000\n\
                QUOTA_MAX_CONNECTION_AGE_SECONDS=600\n\
                DATA_DIR=/nowhere\n\
                QUOTA_STORE_DRIVER=sqlite\n\
                QUOTA_STORE_REDIS_URL=***\n\
                QUOTA_STORE_TIMEOUT_MS=50\n\
                QUOTA_SATURATION_THRESHOLD=0.75\n\
                QUOTA_SOFT_DEPRIORITIZE_FACTOR=0.7\n\
                QUOTA_CONSUMPTION_RETENTION_DAYS=14\n\
                QUOTA_SIGNAL_TTL_SECONDS=30\n\
                QUOTA_ID_LIFE_SECONDS=600\n\
                QUOTA_SHUTDOWN_DELAY_SECONDS=0\n\
                # OTLP: traces are exported, metrics are not exported\n";
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), want));
    let warning = "warning: QUOTA_STORE_DRIVER=\"mongo\" is not a known driver: using sqlite\n";
    assert_eq!(ended.stderr, warning);
}

#[tokio::test]
async fn check_names_every_mistake_as_a_start_would() {
    let mistakes =
        [("QUOTA_LISTEN", "localhost"), ("QUOTA_SATURATION_THRESHOLD", "50"), ("DATA_DIR", "/nowhere")];
    for args in [&["check"][..], &["serve"], &[]] {
        let ended = run(args, &mistakes).await;
        let want = "QUOTA_LISTEN=\"localhost\" is not valid: set it to an address and a port, such as 127.0.0.1:50051\n\
                    QUOTA_SATURATION_THRESHOLD=\"50\" is not valid: set it to a fraction from 0 to 1 (did you mean 0.5?)\n";
        assert_eq!(
            (ended.code, ended.stdout.as_str(), ended.stderr.as_str()),
            (Some(2), "", want),
            "{args:?}"
        );
    }
    let ended = run(&["check"], &[("QUOTA_STORE_DRIVER", "redis")]).await;
    assert_eq!(ended.code, Some(0));
    assert!(
        ended.stderr.contains("QUOTA_STORE_REDIS_URL, which is not set: using sqlite"),
        "{}",
        ended.stderr
    );
    // URL | driver and URL that are printed | what is warned of
    for (url, printed, warning) in [
        ("redis://user:hidden@host", "QUOTA_STORE_DRIVER=redis\nQUOTA_STORE_REDIS_URL=***\n", ""),
        (
            "mongo://user:hidden@host",
            "QUOTA_STORE_DRIVER=sqlite\nQUOTA_STORE_REDIS_URL=\n",
            "QUOTA_STORE_REDIS_URL cannot: using sqlite",
        ),
    ] {
        let redis = [("QUOTA_STORE_DRIVER", "redis"), ("QUOTA_STORE_REDIS_URL", url)];
        let ended = run(&["check"], &redis).await;
        assert!(ended.code == Some(0) && ended.stdout.contains(printed), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), usize::from(!warning.is_empty()), "{ended:?}");
        assert!(ended.stderr.contains(warning), "{ended:?}");
        assert!(!format!("{ended:?}").contains("hidden"), "{ended:?}");
    }
}

#[tokio::test]
async fn a_health_check_tells_a_server_that_serves_from_one_that_does_not() {
    let mut process = TestProcess::start().await;
    let listen = process.address().to_string();
    let everywhere = format!("0.0.0.0:{}", process.address().port());
    // arguments | where it is asked | exit code | words
    let cases: &[(&[&str], &str, i32, &str)] = &[
        (&["healthcheck"], &listen, 0, "SERVING"),
        (&["healthcheck", "--service", "quotashare.v1.QuotaShare"], &listen, 0, "SERVING"),
        // A server that listens everywhere is asked on this machine.
        (&["healthcheck"], &everywhere, 0, "SERVING"),
        (&["healthcheck", "--quota-listen", &listen], "127.0.0.1:1", 0, "SERVING"),
        (&["healthcheck", "--service", "Nothing"], &listen, 1, "has no service \"Nothing\""),
        (&["healthcheck"], "nowhere", 2, "QUOTA_LISTEN=\"nowhere\" is not valid"),
    ];
    for (args, listen, code, words) in cases {
        let ended = run(args, &[("QUOTA_LISTEN", listen)]).await;
        assert_eq!(ended.code, Some(*code), "{args:?}: {ended:?}");
        assert!(format!("{}{}", ended.stdout, ended.stderr).contains(words), "{args:?}: {ended:?}");
    }
    process.kill();
    let ended = run(&["healthcheck"], &[("QUOTA_LISTEN", &listen)]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
    assert!(ended.stderr.contains(&listen) && ended.stderr.contains("quota-share serve"), "{}", ended.stderr);

    // Something listens, accepts, and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = silent.local_addr().expect("an address").to_string();
    let ended = run(&["healthcheck"], &[("QUOTA_LISTEN", &address)]).await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("more than 2 s"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_server_is_started_with_and_without_its_command() {
    for args in [&[][..], &["serve"]] {
        let folder = TempDir::new().expect("a temporary folder");
        let data = folder.path().display().to_string();
        let args: Vec<&str> = args.iter().copied().chain(["--data-dir", &data]).collect();
        let process = TestProcess::start_as(&args, &[]).await;
        assert!(folder.path().join("storage.sqlite").exists(), "{args:?}: {}", process.log());
    }
}

#[tokio::test]
async fn nothing_is_exported_from_where_nothing_is() {
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data").display().to_string();
    let ended = run(&["export"], &[("DATA_DIR", &data)]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
    assert!(ended.stderr.contains("there is no storage.sqlite") && ended.stderr.contains("DATA_DIR"));
    assert!(!folder.path().join("data").exists(), "nothing is made");
}
