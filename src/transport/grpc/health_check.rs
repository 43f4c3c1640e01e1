//! Asking a running server how it is, as a container's probe does.

use std::{error::Error, io, net::SocketAddr, sync::Arc, time::Duration};

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tower::service_fn;

/// How long a server that is well takes at most to say so.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The server does not serve, or not everything.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServing {
    /// Nobody listens there, or it is too busy to answer.
    #[error("no answer from {address} (QUOTA_LISTEN): {reason}: start it with `quota-share serve`")]
    NoAnswer {
        /// Where it was asked.
        address: SocketAddr,
        /// What went wrong.
        reason: String,
    },
    /// The server has no such service.
    #[error(
        "{address} has no service {service:?}: leave --service away, or name one such as quotashare.v1.QuotaShare"
    )]
    NoSuchService {
        /// Where it was asked.
        address: SocketAddr,
        /// What for.
        service: String,
    },
    /// The server answered, and not with SERVING.
    #[error("{address} says {status} of {service:?}: its log says why")]
    Says {
        /// Where it was asked.
        address: SocketAddr,
        /// What for; empty: for all.
        service: String,
        /// What it said.
        status: &'static str,
    },
}

/// Asks the server at `address` whether it serves `service`, or everything if that is empty.
pub(crate) async fn check_health(
    address: SocketAddr,
    tls: Option<ClientConfig>,
    service: &str,
) -> Result<(), NotServing> {
    let no_answer = |reason: String| NotServing::NoAnswer { address, reason };
    let asked = tokio::time::timeout(TIMEOUT, ask(address, tls, service)).await;
    let answer = asked.map_err(|_| no_answer(format!("it took more than {} s", TIMEOUT.as_secs())))?;
    match answer {
        Ok(ServingStatus::Serving) => Ok(()),
        Ok(status) => {
            let status = status.as_str_name();
            Err(NotServing::Says { address, service: service.to_owned(), status })
        }
        Err(status) if status.code() == Code::NotFound => {
            Err(NotServing::NoSuchService { address, service: service.to_owned() })
        }
        Err(status) => Err(no_answer(status.message().to_owned())),
    }
}

async fn ask(address: SocketAddr, tls: Option<ClientConfig>, service: &str) -> Result<ServingStatus, Status> {
    // A certificate that is missing or not believed is told after the handshake, by closing the connection.
    let hint =
        if tls.is_some() { ": does it ask for certificates (QUOTA_HEALTHCHECK_CERT_FILE)?" } else { "" };
    let channel = connect(address, tls).await.map_err(|error| Status::unavailable(cause(&error)))?;
    let request = HealthCheckRequest { service: service.to_owned() };
    let answer = HealthClient::new(channel).check(request).await;
    let answer = answer.map_err(|status| match status.source() {
        Some(error) => Status::unavailable(cause(error) + hint),
        None => status,
    })?;
    Ok(answer.into_inner().status())
}

async fn connect(address: SocketAddr, tls: Option<ClientConfig>) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let Some(tls) = tls.map(Arc::new) else { return endpoint.connect().await };
    let connector = service_fn(move |_| {
        let connector = TlsConnector::from(Arc::clone(&tls));
        async move {
            let stream = TcpStream::connect(address).await?;
            let stream = connector.connect(address.ip().into(), stream).await?;
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    endpoint.connect_with_connector(connector).await
}

/// The first cause says most: "connection refused", not "transport error".
fn cause(mut error: &(dyn Error + 'static)) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
