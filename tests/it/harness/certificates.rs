//! Issuers of certificates, and what they issue.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType, date_time_ymd,
};
use tempfile::TempDir;
use tonic::transport::{self, Channel, ClientTlsConfig, Endpoint, Identity};

/// An issuer that somebody believes.
pub(crate) struct TestCa {
    certificate: Certificate,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub(crate) struct Issued {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl TestCa {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn pem(&self) -> String {
        self.certificate.pem()
    }

    /// A certificate for these DNS names and URIs, that holds for long.
    pub(crate) fn issue(&self, names: &[&str]) -> Issued {
        self.issue_until(names, 2100)
    }

    /// A certificate that has expired.
    pub(crate) fn issue_expired(&self, names: &[&str]) -> Issued {
        self.issue_until(names, 2020)
    }

    fn issue_until(&self, names: &[&str], year: i32) -> Issued {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.subject_alt_names = names
            .iter()
            .map(|&name| match name.contains("://") {
                true => SanType::URI(name.try_into().expect("a URI")),
                false => SanType::DnsName(name.try_into().expect("a DNS name")),
            })
            .collect();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Issued { cert: certificate.pem(), key: key.serialize_pem() }
    }
}

/// Files in a folder of their own.
#[derive(Debug)]
pub(crate) struct PemFiles(TempDir);

impl PemFiles {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().expect("a temporary folder"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file, at once, whatever was there before; returns where it is.
    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        let new = path.with_extension("new");
        fs::write(&new, content).expect("a file");
        fs::rename(new, &path).expect("files can be replaced");
        path
    }

    /// Writes the files `cert` and `key`; returns where they are.
    pub(crate) fn write_issued(&self, issued: &Issued) -> (PathBuf, PathBuf) {
        (self.write("cert", &issued.cert), self.write("key", &issued.key))
    }
}

/// Where a file is, as variables name it.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}

/// A connection to a server for `localhost` whose certificate `ca` has issued, with a certificate of the caller's own.
pub(crate) async fn connect_tls(
    address: SocketAddr,
    ca: &TestCa,
    own: Option<&Issued>,
) -> Result<Channel, transport::Error> {
    let config = ClientTlsConfig::new()
        .domain_name("localhost")
        .ca_certificate(transport::Certificate::from_pem(ca.pem()));
    let config = match own {
        Some(own) => config.identity(Identity::from_pem(&own.cert, &own.key)),
        None => config,
    };
    Endpoint::from_shared(format!("https://{address}")).expect("a URI").tls_config(config)?.connect().await
}
