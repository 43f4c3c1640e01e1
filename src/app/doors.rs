//! Who is let in, and with which certificate: from the files that the configuration names, as they are now.

use std::{path::PathBuf, pin::Pin, sync::Arc};

use arc_swap::ArcSwap;
use tokio::task::JoinHandle;

use crate::{
    config::{Config, InvalidConfig, InvalidVariable, TlsFiles},
    transport::{
        auth::{Authentication, Callers},
        files::{self, Followed},
        grpc::Doors,
        tls::{self, SharedTls, TlsFault},
    },
};

/// Files that are looked at from now on.
pub(super) struct Following(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Following {
    pub(super) fn start(self) -> JoinHandle<()> {
        tokio::spawn(self.0)
    }
}

/// The server's edge as `config` has it, and what keeps it up to date with its files.
pub(super) fn doors(config: &Config) -> Result<(Doors, Vec<Following>), InvalidConfig> {
    let mut following = Vec::new();
    let tls = config.tls.as_ref().map(|files| encrypted(files, &mut following)).transpose()?;
    let client_ca = config.tls.as_ref().is_some_and(|files| files.client_ca.is_some());
    let authentication = match &config.auth_tokens_file {
        Some(file) => callers(file.clone(), &mut following)?,
        None if client_ca => Arc::new(Authentication::Certificates),
        None => Arc::new(Authentication::Off),
    };
    let doors = Doors {
        authentication,
        tls,
        reflection: config.reflection,
        calls_in_flight_max: config.max_calls_in_flight as usize,
        connection_age_max: config.connection_age_max(),
    };
    Ok((doors, following))
}

fn callers(path: PathBuf, following: &mut Vec<Following>) -> Result<Arc<Authentication>, InvalidConfig> {
    const VARIABLE: &str = "QUOTA_AUTH_TOKENS_FILE";
    let refused = |fault: &String| changed(VARIABLE, fault);
    let content = files::read(&path).map_err(|fault| InvalidConfig(vec![refused(&fault)]))?;
    let callers =
        Callers::parse(&content).map_err(|faults| InvalidConfig(faults.iter().map(refused).collect()))?;
    let authentication = Arc::new(Authentication::Callers(ArcSwap::from_pointee(callers)));
    let followed = Followed { variables: VARIABLE, paths: vec![path], content: vec![content] };
    let kept = Arc::clone(&authentication);
    following.push(Following(Box::pin(followed.follow(move |content| {
        let callers = Callers::parse(content.first().map_or(&[], Vec::as_slice));
        let callers = callers.map_err(|faults| faults.join("; "))?;
        if let Authentication::Callers(shared) = &*kept {
            shared.store(Arc::new(callers));
        }
        Ok(())
    }))));
    Ok(authentication)
}

fn encrypted(files: &TlsFiles, following: &mut Vec<Following>) -> Result<SharedTls, InvalidConfig> {
    let refused = |faults: Vec<TlsFault>| {
        InvalidConfig(faults.iter().map(|fault| changed(fault.variable, &fault.fault)).collect())
    };
    let content = tls::read(files).map_err(refused)?;
    let shared = Arc::new(ArcSwap::from_pointee(tls::build(files, &content).map_err(refused)?));
    let followed = Followed { variables: "QUOTA_TLS_*_FILE", paths: tls::paths(files), content };
    let (kept, files) = (Arc::clone(&shared), files.clone());
    following.push(Following(Box::pin(followed.follow(move |content| {
        let config = tls::build(&files, content).map_err(|faults| {
            let faults = faults.iter().map(|TlsFault { variable, fault }| format!("{variable}: {fault}"));
            faults.collect::<Vec<_>>().join("; ")
        })?;
        kept.store(Arc::new(config));
        Ok(())
    }))));
    Ok(shared)
}

/// What was found wrong although the configuration had been checked.
fn changed(variable: &'static str, fault: &str) -> InvalidVariable {
    let accepted = format!("a file that can be used: {fault}");
    InvalidVariable { variable, given: "what was just read".to_owned(), accepted }
}
