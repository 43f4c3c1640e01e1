//! Replicas are killed, Redis is killed, stopped and hung, connections are cut, and callers lose patience: what was
//! acknowledged is counted, once, and what was admitted fits.
//!
//! `tests/chaos` runs this with replicas, callers, faults, time and seed as one likes; the suite has a short form of it.
//!
//! | file      | what it is                                                                          |
//! |-----------|-------------------------------------------------------------------------------------|
//! | `setting` | what a run is asked for                                                             |
//! | `pools`   | the pools that callers use, and what each promises                                  |
//! | `faults`  | what goes wrong, drawn from the seed                                                |
//! | `caller`  | a router: it asks, holds, settles, releases, records, and sends again               |
//! | `watcher` | an operator, who looks at usage and reservations all the time                       |
//! | `book`    | what they know: sums that must be there, holds that must fit, promises that broke   |
//! | `run`     | a run from its start to the last look                                               |

mod book;
mod caller;
mod faults;
mod pools;
mod run;
mod setting;
mod watcher;

pub(crate) use book::Book;
pub(crate) use caller::{Caller, Habits};
pub(crate) use pools::{Kind, REQUESTS, SharedPool};
pub(crate) use run::{Course, drained, left_over, miscounted, sent_again};
pub(crate) use watcher::usage_of;

use crate::harness::redis_is_missing;
use faults::FaultKind;
use run::chaos;
use setting::Setting;

/// Long enough for some faults of each kind, and for some to meet.
const SHORT: Setting = Setting { replicas: 3, clients: 64, seconds: 12, seed: 1, faults: FaultKind::ALL };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twelve_seconds_of_faults_lose_nothing_and_count_nothing_twice() {
    if redis_is_missing() {
        return;
    }
    let report = chaos(SHORT).await;
    println!("{report}");
    assert!(report.broken.is_empty(), "{report}");
    let happened = report.faults.iter().all(|(_, times)| *times > 0);
    assert!(happened, "this seed is to have faults of every kind: {report}");
    assert!(report.book.journaled > 0, "nothing was recorded while Redis was away: {report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "tests/chaos says how long and with what"]
async fn as_asked() {
    let report = chaos(Setting::from_environment()).await;
    println!("{report}");
    assert!(report.broken.is_empty(), "{} promises were broken", report.broken.len());
}
