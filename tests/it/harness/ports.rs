//! Ports for servers that have to come back on the one that they had.

use std::sync::{
    LazyLock,
    atomic::{AtomicU16, Ordering},
};

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
