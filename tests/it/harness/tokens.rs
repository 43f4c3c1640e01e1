//! A file of who may call, and tokens in it.

use std::{fs, path::PathBuf};

use tempfile::TempDir;

use super::run;

/// A token that `quota-share token new` has made, and the line that lets its owner in.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) line: String,
}

impl Token {
    /// A new one.
    pub(crate) async fn new(name: &str, role: &str) -> Self {
        let ended = run(&["token", "new", "--name", name, "--role", role], &[]).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let lines: Vec<&str> = ended.stdout.lines().filter(|line| !line.is_empty()).collect();
        let [token, comment, line] = lines[..] else { panic!("{ended:?}") };
        assert!(comment.starts_with('#'), "{ended:?}");
        Self { text: token.to_owned(), line: line.to_owned() }
    }
}

/// A file for `QUOTA_AUTH_TOKENS_FILE`, in a folder of its own, as Kubernetes mounts a secret: the file is a link into a
/// folder that is a link, which is swapped.
#[derive(Debug)]
pub(crate) struct TokensFile {
    folder: TempDir,
    version: usize,
}

impl TokensFile {
    pub(crate) fn new(lines: &[&str]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let mut file = Self { folder, version: 0 };
        file.write(lines);
        std::os::unix::fs::symlink("..data/tokens", file.path()).expect("a link");
        file
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("tokens")
    }

    /// Swaps what the file holds for `lines`, at once.
    pub(crate) fn write(&mut self, lines: &[&str]) {
        self.version += 1;
        let version = format!("..version-{}", self.version);
        let folder = self.folder.path();
        fs::create_dir(folder.join(&version)).expect("a folder");
        fs::write(folder.join(&version).join("tokens"), lines.join("\n")).expect("a file");
        std::os::unix::fs::symlink(version, folder.join("..new")).expect("a link");
        fs::rename(folder.join("..new"), folder.join("..data")).expect("links can be swapped");
    }
}
