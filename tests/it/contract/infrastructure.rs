//! Health, reflection and the catalogue.

use prost::Message;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::{v1, v1alpha};

use crate::harness::{TestServer, pb, told};

const SERVICES: [&str; 4] = [
    "quotashare.v1.PlanAdmin",
    "quotashare.v1.PoolAdmin",
    "quotashare.v1.QuotaShare",
    "quotashare.v1.SettingsAdmin",
];

#[tokio::test]
async fn health_is_told_for_each_service_and_for_all() {
    let server = TestServer::start().await;
    for service in SERVICES.into_iter().chain([""]) {
        let request = HealthCheckRequest { service: service.to_owned() };
        let health = told(server.health().check(request).await);
        assert_eq!(health.status(), ServingStatus::Serving, "{service:?}");
    }
    let request = HealthCheckRequest { service: "quotashare.v1.Nothing".to_owned() };
    assert_eq!(server.health().check(request).await.expect_err("unknown").code(), Code::NotFound);
}

/// Asks both versions of reflection, which differ in nothing but their name.
macro_rules! ask_reflection {
    ($version:ident, $server:expr, $question:ident($text:expr) => $answer:ident) => {{
        use $version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::$question($text.to_owned())),
        };
        let mut client = ServerReflectionClient::new($server.channel());
        let mut answers = told(client.server_reflection_info(tokio_stream::once(request)).await);
        let answer = answers.next().await.expect("an answer").expect("reflection is served");
        match answer.message_response {
            Some(MessageResponse::$answer(answer)) => answer,
            other => panic!("{other:?}"),
        }
    }};
}

#[tokio::test]
async fn reflection_lists_every_service_in_both_of_its_versions() {
    let server = TestServer::start().await;
    let listed = [
        ask_reflection!(v1, server, ListServices("") => ListServicesResponse)
            .service
            .into_iter()
            .map(|service| service.name)
            .collect::<Vec<_>>(),
        ask_reflection!(v1alpha, server, ListServices("") => ListServicesResponse)
            .service
            .into_iter()
            .map(|service| service.name)
            .collect(),
    ];
    for listed in listed {
        for service in SERVICES.into_iter().chain(["grpc.health.v1.Health"]) {
            assert!(listed.iter().any(|name| name == service), "{service} in {listed:?}");
        }
    }
}

/// So that generic clients print the details of an error instead of bytes.
#[tokio::test]
async fn reflection_describes_the_details_of_errors() {
    let server = TestServer::start().await;
    for symbol in ["google.rpc.BadRequest", "google.rpc.ErrorInfo", "quotashare.v1.Pool"] {
        let files = ask_reflection!(v1, server, FileContainingSymbol(symbol) => FileDescriptorResponse);
        let files = files
            .file_descriptor_proto
            .iter()
            .map(|bytes| prost_types::FileDescriptorProto::decode(&bytes[..]).expect("a descriptor"));
        let described = files.flat_map(|file| {
            file.message_type.into_iter().map(move |message| {
                format!("{}.{}", file.package.clone().unwrap_or_default(), message.name())
            })
        });
        assert!(described.collect::<Vec<_>>().iter().any(|name| name == symbol), "{symbol}");
    }
}

#[tokio::test]
async fn the_catalogue_can_be_listed() {
    let server = TestServer::start().await;
    let plans = told(server.plans().list_catalog(pb::ListCatalogRequest {}).await).plans;
    assert!(plans.is_sorted_by_key(|plan| &plan.provider));
    let kimi = plans.iter().find(|plan| plan.provider == "kimi").expect("kimi is in it");
    assert_eq!(kimi.limits(), [("requests/hourly".to_owned(), Some(1_500.0))]);
    assert_eq!(
        (kimi.source(), kimi.revision, kimi.connection_id.as_str()),
        (pb::plan::Source::Catalog, 0, "")
    );
}
