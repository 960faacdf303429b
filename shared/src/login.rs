//! Where NATS is, and how a service logs in and knows the server.

use std::{fs, path::PathBuf, str::FromStr};

use anyhow::{Context as _, ensure};
use async_nats::{ConnectOptions, ServerAddr};
use clap::Args;
use percent_encoding::percent_decode_str;

use crate::tls;

/// Where the servers are, and how to log in.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// One or several NATS servers, comma-separated, for example `nats://127.0.0.1:4222`
    #[arg(long, env, hide_env_values = true, default_value = "nats://127.0.0.1:4222")]
    pub nats_url: ServerAddresses,

    /// A file with the user's JWT and seed, for example /etc/nats/orders.creds
    #[arg(long, env, conflicts_with = "nats_nkey_seed_file")]
    pub nats_credentials_file: Option<PathBuf>,

    /// A file with the seed of the user's nkey, for example /etc/nats/orders.seed
    #[arg(long, env)]
    pub nats_nkey_seed_file: Option<PathBuf>,

    /// A file with the certificates of the only CA to trust, for example /etc/nats/ca.pem
    #[arg(long, env)]
    pub nats_ca_file: Option<PathBuf>,
}

impl Settings {
    /// The options that follow from the settings. `untrusted` is called with the reason when a
    /// server's certificate is not accepted.
    ///
    /// # Errors
    /// When a file cannot be read, or holds something else.
    pub(crate) async fn options(
        &self,
        untrusted: impl Fn(&rustls::Error) + Send + Sync + 'static,
    ) -> anyhow::Result<ConnectOptions> {
        let ca = self.nats_ca_file.as_deref();
        let options = ConnectOptions::new()
            .tls_client_config(tls::telling_client(ca, untrusted).context("NATS_CA_FILE")?)
            // Whoever names a CA does not want to talk in the clear, whatever the URL says.
            .require_tls(ca.is_some());
        if let Some(file) = &self.nats_credentials_file {
            let read = options.credentials_file(file).await;
            return read.with_context(|| {
                format!("NATS_CREDENTIALS_FILE: {} holds no credentials", file.display())
            });
        }
        if let Some(file) = &self.nats_nkey_seed_file {
            let seed = fs::read_to_string(file).with_context(|| {
                format!("NATS_NKEY_SEED_FILE: {} cannot be read", file.display())
            })?;
            let seed = seed.trim();
            ensure!(
                seed.starts_with("SU"),
                "NATS_NKEY_SEED_FILE: {} holds no seed of a user, which begins with SU",
                file.display()
            );
            return Ok(options.nkey(seed.to_owned()));
        }
        Ok(self.nats_url.log_in(options))
    }
}

/// One or several server addresses, with one user and password for all. `Debug` shows only hosts.
#[derive(Clone)]
pub struct ServerAddresses(pub(crate) Vec<ServerAddr>);

impl FromStr for ServerAddresses {
    type Err = &'static str;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        list.split(',')
            .map(|address| match address.trim() {
                "" => Err("an address is empty"),
                address => address.parse().map_err(|_| "an address cannot be read"),
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl ServerAddresses {
    /// The options with the user and password, or the token, of the first address that has one:
    /// async-nats itself ignores them (0.51, `connector.rs`).
    fn log_in(&self, options: ConnectOptions) -> ConnectOptions {
        let plain = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let first =
            self.0.iter().find_map(|address| Some((address.username()?, address.password())));
        match first {
            Some((user, Some(password))) => options.user_and_password(plain(user), plain(password)),
            Some((token, None)) => options.token(plain(token)),
            None => options,
        }
    }
}

impl std::fmt::Debug for ServerAddresses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|a| format!("{}:{}", a.host(), a.port()))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_as_a_list_and_keep_their_password_to_themselves() {
        let two: ServerAddresses = "nats://user:secret@one:4222, tls://two:4443".parse().unwrap();
        assert_eq!(format!("{two:?}"), r#"["one:4222", "two:4443"]"#);
        for bad in ["", "nats://one:4222,", "nats://one:notaport"] {
            assert!(bad.parse::<ServerAddresses>().is_err(), "{bad}");
        }
    }
}
