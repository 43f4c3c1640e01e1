//! Asking a running server how it is, as a container's probe does.

use std::{error::Error, net::SocketAddr, time::Duration};

use tonic::{Code, Status, transport::Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

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
pub(crate) async fn check_health(address: SocketAddr, service: &str) -> Result<(), NotServing> {
    let no_answer = |reason: String| NotServing::NoAnswer { address, reason };
    let asked = tokio::time::timeout(TIMEOUT, ask(address, service)).await;
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

async fn ask(address: SocketAddr, service: &str) -> Result<ServingStatus, Status> {
    let unavailable = |error: tonic::transport::Error| {
        // The first cause says most: "connection refused", not "transport error".
        let mut cause: &dyn Error = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        Status::unavailable(cause.to_string())
    };
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(unavailable)?;
    let mut client = HealthClient::new(endpoint.connect().await.map_err(unavailable)?);
    let request = HealthCheckRequest { service: service.to_owned() };
    Ok(client.check(request).await?.into_inner().status())
}
