//! Certificates for TLS.
use crate::plain::plain;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A certificate with its key, and optionally the authorities of client certificates.
#[derive(Clone)]
pub struct TlsIdentity(pub(super) Arc<ServerConfig>);

impl TlsIdentity {
    /// Reads PEM files: the server's certificate chain, its key, and the authorities of client
    /// certificates. Without authorities any client may connect.
    ///
    /// # Errors
    /// One line that names the file and says what is wrong with it.
    pub fn load(
        certificate: &Path,
        key: &Path,
        client_ca: Option<&Path>,
    ) -> Result<TlsIdentity, String> {
        let chain = certificates(certificate)?;
        let private = PrivateKeyDer::from_pem_file(key)
            .map_err(|e| at(key, "the file has no private key in PEM format", e))?;
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for root in certificates(path)? {
                    roots.add(root).map_err(|e| {
                        at(path, "a certificate in the file is not that of an authority", e)
                    })?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(
                    verifier.build().map_err(|e| at(path, "the certificates can't be used", e))?,
                )
            }
        };
        let config = builder.with_single_cert(chain, private);
        let config = config.map_err(|e| {
            at(certificate, &format!("the certificate does not match the key {}", key.display()), e)
        })?;
        Ok(TlsIdentity(Arc::new(config)))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match all {
        Ok(all) if all.is_empty() => {
            Err(format!("{}: the file has no certificate in PEM format", path.display()))
        }
        Ok(all) => Ok(all),
        Err(e) => Err(at(path, "the file has no certificate in PEM format", e)),
    }
}

fn at(path: &Path, what: &str, why: impl fmt::Display) -> String {
    format!("{}: {what}: {}", path.display(), plain(why))
}
