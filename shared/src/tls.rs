//! TLS towards others: one provider, and whom to trust.

use std::{path::Path, sync::Arc};

use anyhow::{Context as _, ensure};
use rustls::{
    ClientConfig, ConfigBuilder, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    WantsVerifier,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
};

/// The provider is named, not left to be found: which one is found depends on what else is in the
/// tree, and with two of them rustls panics at the first handshake (`deny.toml` forbids the second).
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn builder() -> anyhow::Result<ConfigBuilder<ClientConfig, WantsVerifier>> {
    ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .context("the TLS provider lacks what TLS needs")
}

/// Trusts Mozilla's root certificates: those of the machine are missing in a slim container.
///
/// # Errors
/// When TLS cannot be set up.
pub fn client() -> anyhow::Result<ClientConfig> {
    Ok(builder()?.with_root_certificates(roots(None)?).with_no_client_auth())
}

/// Trusts the certificates in the PEM file `ca` and no others, or, without it, like [`client`]. Calls
/// `refused` with the reason when a server is not trusted, for callers whose library keeps it.
///
/// # Errors
/// When the file cannot be read, or holds no certificate.
pub fn telling_client(
    ca: Option<&Path>,
    refused: impl Fn(&Error) + Send + Sync + 'static,
) -> anyhow::Result<ClientConfig> {
    let roots = Arc::new(roots(ca)?);
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
        .build()
        .context("the certificates cannot be used")?;
    Ok(builder()?
        // What is dangerous is a verifier that leaves something out. This one leaves it all to
        // rustls' own.
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Telling { verifier, refused }))
        .with_no_client_auth())
}

fn roots(ca: Option<&Path>) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = ca else {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        return Ok(roots);
    };
    let unreadable = || format!("{} cannot be read", file.display());
    for certificate in CertificateDer::pem_file_iter(file).with_context(unreadable)? {
        roots.add(certificate.with_context(unreadable)?).with_context(unreadable)?;
    }
    ensure!(!roots.is_empty(), "{} holds no certificate", file.display());
    Ok(roots)
}

/// rustls' own verifier, and who wants to know why it says no.
struct Telling<F> {
    verifier: Arc<WebPkiServerVerifier>,
    refused: F,
}

impl<F> std::fmt::Debug for Telling<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.verifier.fmt(f)
    }
}

impl<F: Fn(&Error) + Send + Sync> ServerCertVerifier for Telling<F> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verifier
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            .inspect_err(&self.refused)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
