//! What is looked at whenever a connection was made, and now and then: the clock, the layout, and whether keys may be
//! evicted.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{sync::broadcast, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    client::{Client, Command, Failure, bytes_of},
    health::Health,
    keys::{LAYOUT, LAYOUT_KEY},
    reach::Reach,
    reads::instant_of,
};

const TIMEOUT: Duration = Duration::from_secs(1);
/// How long until a look that failed is taken again.
const PAUSE: Duration = Duration::from_millis(200);
/// How often somebody may have configured something else, or a newer version may have come, without a new connection.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// How long the first connection may take before its absence is something to tell.
const FIRST_CONNECTION_TIMEOUT: Duration = Duration::from_millis(500);

/// Looks at Redis after every connection and now and then, until `stop`. Call when the first connection is still to come.
pub(super) fn run(
    client: Client,
    health: Arc<Health>,
    reach: Arc<Reach>,
    stop: CancellationToken,
    looked: impl Fn() + Send,
) -> impl Future<Output = ()> + Send {
    let connected = client.connected();
    async move { keep_looking(connected, &client, &health, &reach, &stop, looked).await }
}

async fn keep_looking<T: Clone>(
    mut connected: broadcast::Receiver<T>,
    client: &Client,
    health: &Health,
    reach: &Reach,
    stop: &CancellationToken,
    looked: impl Fn(),
) {
    tokio::select! {
        _ = connected.recv() => {}
        () = sleep(FIRST_CONNECTION_TIMEOUT) => {}
        () = stop.cancelled() => return,
    }
    loop {
        while let Err(failure) = look(client, health).await {
            health.fails(reach, &failure);
            tokio::select! {
                () = sleep(PAUSE) => {}
                () = stop.cancelled() => return,
            }
        }
        health.writes(reach);
        looked();
        loop {
            tokio::select! {
                next = connected.recv() => match next {
                    Err(broadcast::error::RecvError::Closed) => return,
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => break,
                },
                () = sleep(LOOK_INTERVAL) => {}
                () = stop.cancelled() => return,
            }
            // Whether it can be reached is for others to find out.
            let _ = look_again(client, health).await;
        }
    }
}

/// Hears why no connection is made, until `stop`: a server that lets nobody in is not asked anything that it could refuse.
pub(super) fn hear(
    client: &Client,
    health: Arc<Health>,
    reach: Arc<Reach>,
    stop: CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let mut errors = client.errors();
    let is_clustered = client.is_clustered();
    async move {
        loop {
            let heard = tokio::select! {
                heard = errors.recv() => heard,
                () = stop.cancelled() => return,
            };
            match heard.map(|(error, _)| Failure::from(error)) {
                // Of a cluster, this is one node of many.
                Ok(failure) if failure.is_final() && !is_clustered => health.fails(&reach, &failure),
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }
}

async fn look(client: &Client, health: &Health) -> Result<(), Failure> {
    if let Some(now) = instant_of(client.call(command("TIME", &[]), TIMEOUT).await?) {
        health.clock_said(now);
    }
    let layout = layout(client).await?;
    // Written each time: whether it can be is to be found out.
    if layout.is_none_or(|layout| layout <= LAYOUT) {
        client.call(command("SET", &[LAYOUT_KEY, &LAYOUT.to_string()]), TIMEOUT).await?;
    }
    health.met_layout(layout.unwrap_or(LAYOUT));
    look_at_policy(client, health).await
}

async fn look_again(client: &Client, health: &Health) -> Result<(), Failure> {
    if let Some(layout) = layout(client).await? {
        health.met_layout(layout);
    }
    look_at_policy(client, health).await
}

async fn layout(client: &Client) -> Result<Option<u32>, Failure> {
    let layout = bytes_of(client.call(command("GET", &[LAYOUT_KEY]), TIMEOUT).await?);
    Ok(layout.and_then(|layout| std::str::from_utf8(&layout).ok()?.parse().ok()))
}

async fn look_at_policy(client: &Client, health: &Health) -> Result<(), Failure> {
    let mut evicting = None;
    for answer in client.on_every_node(&command("INFO", &["memory"]), TIMEOUT).await {
        evicting = evicting.or(policy(&answer.map(bytes_of)?.unwrap_or_default()));
    }
    health.evicts(evicting);
    Ok(())
}

fn command(name: &'static str, args: &[&str]) -> Command {
    let args = args.iter().map(|arg| Bytes::copy_from_slice(arg.as_bytes())).collect();
    Command { name, key: Bytes::from_static(LAYOUT_KEY.as_bytes()), args }
}

/// The policy by which keys are evicted, if they are.
fn policy(info: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(info);
    let line = text.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"))?;
    Some(line.trim()).filter(|policy| *policy != "noeviction").map(str::to_owned)
}
