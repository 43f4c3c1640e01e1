//! Files that are read again when they change: certificates, and who may call.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::{MissedTickBehavior, interval};

/// How often files are looked at. Their content is compared: a time or size that stays the same says nothing where a
/// folder is swapped for another one, as Kubernetes does it.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The largest file that is read: many times a chain of certificates or a thousand lines.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What the file at `path` holds, or why it cannot be read.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let unreadable = |error: std::io::Error| format!("it cannot be read: {error}");
    let file = File::open(path).map_err(unreadable)?;
    // A pipe would keep whoever reads it waiting.
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err("it is no file".to_owned());
    }
    let mut content = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content).map_err(unreadable)?;
    if content.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("it is larger than {FILE_BYTES_MAX} bytes"));
    }
    Ok(content)
}

/// Files, and what they held when they were last of use.
pub(crate) struct Followed {
    /// What sets where they are.
    pub(crate) variables: &'static str,
    pub(crate) paths: Vec<PathBuf>,
    /// What has been taken over already.
    pub(crate) content: Vec<Vec<u8>>,
}

impl Followed {
    /// Gives `take` what the files hold whenever that has changed. What it refuses, or cannot be read, is said once,
    /// and what was taken over before stays in force. Ends never.
    ///
    /// Files that belong together are not written at once, so a fault has to last for two looks to be said.
    pub(crate) async fn follow(mut self, mut take: impl FnMut(&[Vec<u8>]) -> Result<(), String>) {
        let mut looks = interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut faults = Faults::default();
        loop {
            looks.tick().await;
            let content = match self.read().await {
                Ok(content) if content == self.content => {
                    faults.over();
                    continue;
                }
                read => read,
            };
            match content.and_then(|content| take(&content).map(|()| content)) {
                Ok(content) => {
                    self.content = content;
                    faults.over();
                    tracing::info!("{} changed: what was read is in force", self.variables);
                }
                Err(fault) if faults.lasts(&fault) => {
                    tracing::warn!(
                        "{} cannot be used, what it held before stays in force: {fault}",
                        self.variables
                    );
                }
                Err(_) => {}
            }
        }
    }

    async fn read(&self) -> Result<Vec<Vec<u8>>, String> {
        let paths = self.paths.clone();
        let read = tokio::task::spawn_blocking(move || {
            let content =
                paths.iter().map(|path| read(path).map_err(|fault| format!("{}: {fault}", path.display())));
            content.collect()
        });
        read.await.unwrap_or_else(|error| Err(error.to_string()))
    }
}

/// What is wrong now, and whether that was said.
#[derive(Default)]
struct Faults {
    seen: Option<String>,
    said: bool,
}

impl Faults {
    fn over(&mut self) {
        *self = Self::default();
    }

    /// It was there at the last look, and has not been said.
    fn lasts(&mut self, fault: &str) -> bool {
        if self.seen.as_deref() == Some(fault) {
            return !std::mem::replace(&mut self.said, true);
        }
        *self = Self { seen: Some(fault.to_owned()), said: false };
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_said_once_and_only_if_it_lasts() {
        let mut faults = Faults::default();
        let said = ["a", "a", "a", "b", "b", "c"].map(|fault| faults.lasts(fault));
        assert_eq!(said, [false, true, false, false, true, false]);
        faults.over();
        assert_eq!([faults.lasts("c"), faults.lasts("c")], [false, true]);
    }

    #[test]
    fn what_is_no_file_of_a_bearable_size_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        std::fs::write(&path, vec![0; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(read(&path).unwrap_err().contains("larger than"));
        assert!(read(folder.path()).unwrap_err().contains("no file"));
        assert!(read(&folder.path().join("nothing")).unwrap_err().contains("cannot be read"));
    }
}
