//! Ports for servers that have to come back on the one that they had.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
};

use super::process::STARTING;

/// Below the ports that the system hands out itself: while a server is down, no connection and no other test gets its
/// port by chance, not even a client that tries to reach it. 10,000 above are the ports of the cluster's bus.
const FIRST: u16 = 12_000;
const COUNT: u16 = 8_000;

/// How often another port is tried before something else must be wrong.
pub(super) const ATTEMPTS_MAX: usize = 100;

/// A port that this process has not used and that is probably free: whoever fails to listen there takes the next one.
/// Starts anywhere, so that test runs beside each other seldom meet.
pub(super) fn candidate() -> u16 {
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(rand::random_range(0..COUNT)));
    let next = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| Some((next + 1) % COUNT));
    FIRST + next.expect("there is always a next one")
}

/// An address where nobody listened a moment ago.
pub(super) async fn free() -> SocketAddr {
    // A process that is being started would have a copy of the listener.
    let _nobody_starts = STARTING.read().await;
    let addresses = (0..ATTEMPTS_MAX).map(|_| SocketAddr::from((Ipv4Addr::LOCALHOST, candidate())));
    let mut free = addresses.filter(|address| TcpListener::bind(address).is_ok());
    free.next().expect("there is a free port")
}
