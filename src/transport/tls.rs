//! TLS of the server: its certificate, and which certificates of callers it believes.
//!
//! There is one provider of cryptography, ring: with two of them in a program, libraries that ask for the default one
//! panic.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
};
use webpki::EndEntityCert;

use super::files;
use crate::config::{ClientCertificates, TlsFiles};

/// gRPC is HTTP/2 and nothing else.
const PROTOCOL: &[u8] = b"h2";
const CERT_FILE: &str = "QUOTA_TLS_CERT_FILE";
const KEY_FILE: &str = "QUOTA_TLS_KEY_FILE";
const CLIENT_CA_FILE: &str = "QUOTA_TLS_CLIENT_CA_FILE";

/// What new connections are opened with: changes when the files do.
pub(crate) type SharedTls = Arc<ArcSwap<ServerConfig>>;

/// A file that cannot be used, by the variable that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TlsFault {
    pub(crate) variable: &'static str,
    pub(crate) fault: String,
}

/// Makes ring what libraries use that ask for no provider by name. Repeating it does nothing.
pub(crate) fn install_provider() {
    // There is one already where this was called before.
    let _ = ring::default_provider().install_default();
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// What the files of `tls` hold, in the order in which [`build`] takes it.
pub(crate) fn read(tls: &TlsFiles) -> Result<Vec<Vec<u8>>, Vec<TlsFault>> {
    let variables = [CERT_FILE, KEY_FILE, CLIENT_CA_FILE];
    let (mut content, mut faults) = (Vec::new(), Vec::new());
    for (variable, path) in variables.into_iter().zip(paths(tls)) {
        match files::read(&path) {
            Ok(bytes) => content.push(bytes),
            Err(fault) => faults.push(TlsFault { variable, fault }),
        }
    }
    if faults.is_empty() { Ok(content) } else { Err(faults) }
}

/// The files of `tls` that there are.
pub(crate) fn paths(tls: &TlsFiles) -> Vec<PathBuf> {
    [&tls.cert, &tls.key].into_iter().chain(&tls.client_ca).cloned().collect()
}

/// What connections are opened with, from what the files of `tls` hold.
pub(crate) fn build(tls: &TlsFiles, content: &[Vec<u8>]) -> Result<ServerConfig, Vec<TlsFault>> {
    let [cert, key, client_ca @ ..] = content else { return Err(Vec::new()) };
    let mut faults = Vec::new();
    let mut keep = |variable, fault| faults.push(TlsFault { variable, fault });
    let chain = chain(cert).map_err(|fault| keep(CERT_FILE, fault)).ok();
    let key = private_key(key).map_err(|fault| keep(KEY_FILE, fault)).ok();
    let verifier = match client_ca.first() {
        Some(ca) => verifier(ca, tls.client_certificates).map_err(|fault| keep(CLIENT_CA_FILE, fault)).ok(),
        None => Some(WebPkiClientVerifier::no_client_auth()),
    };
    let (Some(chain), Some(key), Some(verifier)) = (chain, key, verifier) else { return Err(faults) };
    config(chain, key, verifier)
}

fn config(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    verifier: Arc<dyn ClientCertVerifier>,
) -> Result<ServerConfig, Vec<TlsFault>> {
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let config = builder
        .map(|builder| builder.with_client_cert_verifier(verifier))
        .and_then(|builder| builder.with_single_cert(chain, key));
    let mut config = config.map_err(|error| {
        let fault = format!("it does not go with the certificate of {CERT_FILE}: {error}");
        vec![TlsFault { variable: KEY_FILE, fault }]
    })?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    // A session that is taken up again would let in whoever had a certificate that has expired since.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// A certificate and those of its issuers.
fn chain(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain = certificates(pem)?;
    match chain.first().map(EndEntityCert::try_from) {
        Some(Ok(_)) => Ok(chain),
        _ => Err("its first certificate cannot be read".to_owned()),
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(|_| "its PEM is damaged".to_owned())?;
    if certificates.is_empty() { Err("it has no certificate in PEM".to_owned()) } else { Ok(certificates) }
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    // What stands there instead is not told.
    PrivateKeyDer::from_pem_slice(pem)
        .map_err(|_| "it has no private key in PEM (PKCS#8, PKCS#1 or SEC1)".to_owned())
}

fn verifier(ca: &[u8], certificates_of: ClientCertificates) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(ca)? {
        roots
            .add(certificate)
            .map_err(|error| format!("it has a certificate that is none of an issuer: {error}"))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
    let builder = match certificates_of {
        ClientCertificates::Required => builder,
        ClientCertificates::Optional => builder.allow_unauthenticated(),
    };
    builder.build().map_err(|error| error.to_string())
}

/// The DNS names and URIs that `certificate` was issued for.
pub(crate) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    let names = certificate.valid_uri_names().chain(certificate.valid_dns_names());
    names.map(str::to_owned).collect()
}

/// A caller's side of TLS to a server whose certificate is the first one in the file at `server`, whatever its name:
/// for whoever is on the same machine and has the server's own configuration. `own` are the files of the caller's
/// certificate and key.
pub(crate) fn client_config(server: &Path, own: Option<(&Path, &Path)>) -> Result<ClientConfig, String> {
    let expected = read_with(server, chain)?.swap_remove(0);
    let provider = provider();
    let builder =
        ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?;
    let builder =
        builder.dangerous().with_custom_certificate_verifier(Arc::new(Pinned { expected, provider }));
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(read_with(cert, chain)?, read_with(key, private_key)?)
            .map_err(|error| format!("{} does not go with {}: {error}", key.display(), cert.display()))?,
    };
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(config)
}

fn read_with<T>(path: &Path, parse: impl FnOnce(&[u8]) -> Result<T, String>) -> Result<T, String> {
    let content = files::read(path).and_then(|content| parse(&content));
    content.map_err(|fault| format!("{} cannot be used: {fault}", path.display()))
}

/// Believes one certificate, whose key the server has to have.
#[derive(Debug)]
struct Pinned {
    expected: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if *end_entity == self.expected {
            return Ok(ServerCertVerified::assertion());
        }
        Err(Error::General(format!("the server has another certificate than the one in {CERT_FILE}")))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
