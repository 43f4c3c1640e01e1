//! Who is let in: the files of callers and certificates, and where may be listened with them.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

use super::{Args, Vars};
use crate::transport::{auth::Callers, tls};

/// Whether callers need a certificate of `QUOTA_TLS_CLIENT_CA_FILE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Nobody connects without one.
    Required,
    /// A token will do.
    Optional,
}

impl TlsFiles {
    /// The file that `variable` names.
    fn path(&self, variable: &str) -> &Path {
        match (variable, &self.client_ca) {
            ("QUOTA_TLS_KEY_FILE", _) => &self.key,
            ("QUOTA_TLS_CLIENT_CA_FILE", Some(client_ca)) => client_ca,
            _ => &self.cert,
        }
    }
}

impl FromStr for ClientCertificates {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "required" => Ok(Self::Required),
            "optional" => Ok(Self::Optional),
            _ => Err(()),
        }
    }
}

/// What connections are encrypted with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `QUOTA_TLS_CERT_FILE`
    pub cert: PathBuf,
    /// `QUOTA_TLS_KEY_FILE`
    pub key: PathBuf,
    /// `QUOTA_TLS_CLIENT_CA_FILE`
    pub client_ca: Option<PathBuf>,
    /// `QUOTA_TLS_CLIENT_AUTH`, of use where there is a `client_ca`
    pub client_certificates: ClientCertificates,
}

/// What was found of callers and certificates.
pub(super) struct Doors {
    pub(super) tls: Option<TlsFiles>,
    pub(super) auth_tokens_file: Option<PathBuf>,
    pub(super) warnings: Vec<String>,
}

impl Vars {
    /// Checks who is let in, and that nobody is by accident.
    pub(super) fn doors(
        &mut self,
        args: &Args,
        listen: SocketAddr,
        http_listen: Option<SocketAddr>,
        insecure: bool,
    ) -> Doors {
        let (tls, auth_tokens_file) = (self.tls(args), file(&args.quota_auth_tokens_file));
        let client_ca = tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        let optional = |tls: &TlsFiles| tls.client_certificates == ClientCertificates::Optional;
        if client_ca && tls.as_ref().is_some_and(optional) && auth_tokens_file.is_none() {
            let accepted = "required: without QUOTA_AUTH_TOKENS_FILE there are no tokens";
            self.refuse("QUOTA_TLS_CLIENT_AUTH", "optional", accepted);
        }
        let names_certificates = auth_tokens_file.as_deref().is_some_and(|file| self.callers(file));
        self.addresses(listen, http_listen, insecure || client_ca || auth_tokens_file.is_some());
        let (elsewhere, tokens) = (!listen.ip().is_loopback(), auth_tokens_file.is_some());
        // holds | is told
        let warnings = [
            (
                tokens && tls.is_none() && elsewhere,
                "tokens are sent without encryption, for everybody on the way to read: set QUOTA_TLS_CERT_FILE and \
                 QUOTA_TLS_KEY_FILE",
            ),
            (
                names_certificates && !client_ca,
                "QUOTA_AUTH_TOKENS_FILE names certificates, which nobody is asked for: set QUOTA_TLS_CLIENT_CA_FILE",
            ),
            (
                client_ca && !tokens,
                "whoever has a certificate of QUOTA_TLS_CLIENT_CA_FILE may do everything: set QUOTA_AUTH_TOKENS_FILE \
                 to give out roles",
            ),
            (
                elsewhere && !tokens && !client_ca,
                "QUOTA_INSECURE=true: whoever reaches QUOTA_LISTEN may do everything",
            ),
        ];
        let warnings = warnings.into_iter().filter(|(holds, _)| *holds);
        Doors { tls, auth_tokens_file, warnings: warnings.map(|(_, told)| told.to_owned()).collect() }
    }

    /// The files of TLS, which are read to see whether they can be used.
    fn tls(&mut self, args: &Args) -> Option<TlsFiles> {
        let accepted = "required or optional";
        let client_certificates =
            self.read("QUOTA_TLS_CLIENT_AUTH", &args.quota_tls_client_auth, "required", accepted);
        let client_ca = file(&args.quota_tls_client_ca_file);
        let (cert, key) = match (file(&args.quota_tls_cert_file), file(&args.quota_tls_key_file)) {
            (Some(cert), Some(key)) => (cert, key),
            (None, None) if client_ca.is_none() => return None,
            (cert, key) => {
                let together = "a file in PEM: QUOTA_TLS_CERT_FILE and QUOTA_TLS_KEY_FILE are set together, also for \
                                QUOTA_TLS_CLIENT_CA_FILE";
                for (variable, missing) in
                    [("QUOTA_TLS_CERT_FILE", cert.is_none()), ("QUOTA_TLS_KEY_FILE", key.is_none())]
                {
                    if missing {
                        self.refuse(variable, "", together);
                    }
                }
                return None;
            }
        };
        let tls = TlsFiles { cert, key, client_ca, client_certificates };
        if let Err(faults) = tls::read(&tls).and_then(|content| tls::build(&tls, &content)) {
            for tls::TlsFault { variable, fault } in faults {
                self.refuse_file(variable, tls.path(variable), &fault);
            }
        }
        Some(tls)
    }

    /// Whether the file of callers names certificates.
    fn callers(&mut self, file: &Path) -> bool {
        match Callers::read(file) {
            Ok(callers) => callers.name_certificates(),
            Err(faults) => {
                faults.iter().for_each(|fault| self.refuse_file("QUOTA_AUTH_TOKENS_FILE", file, fault));
                false
            }
        }
    }

    fn refuse_file(&mut self, variable: &'static str, path: &Path, fault: &str) {
        self.refuse(variable, &path.display().to_string(), &format!("a file that can be used: {fault}"));
    }

    /// Nobody but this machine is served by accident.
    fn addresses(&mut self, listen: SocketAddr, http_listen: Option<SocketAddr>, allowed: bool) {
        for (variable, address) in [("QUOTA_LISTEN", Some(listen)), ("QUOTA_HTTP_LISTEN", http_listen)] {
            if let Some(address) = address.filter(|address| !address.ip().is_loopback() && !allowed) {
                let accepted = "a loopback address such as 127.0.0.1:50051, or set QUOTA_AUTH_TOKENS_FILE or \
                                QUOTA_TLS_CLIENT_CA_FILE, so that callers are authenticated. To serve everybody who can \
                                reach the address, set QUOTA_INSECURE=true";
                self.refuse(variable, &address.to_string(), accepted);
            }
        }
    }
}

/// The file that a variable names, if any.
fn file(given: &Option<String>) -> Option<PathBuf> {
    given.as_deref().filter(|path| !path.is_empty()).map(PathBuf::from)
}
