//! The connection to NATS: made once per process, watched, and closed with bounds.
//!
//! Guarantees: [`Nats::settle`] tells the truth about acks, and [`Nats::close`] loses none that was
//! sent. Assumes nothing about the server being there: a service starts and takes payments without
//! it, and readiness says so.

use std::{str::FromStr, time::Duration};

use anyhow::{Context as _, ensure};
use async_nats::{
    Client, ConnectOptions, Event, RequestError, ServerAddr,
    connection::State,
    jetstream::{self, AckKind, Message},
};
use percent_encoding::percent_decode_str;
use tokio::{sync::watch, time::timeout};
use tracing::{info, warn};

/// How long a request, a publish acknowledgement or an API call may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Each of the two steps of closing, see [`Nats::close`].
const CLOSE_STEP: Duration = Duration::from_secs(3);

/// One or several server addresses, with one user and password for all. `Debug` shows only hosts.
#[derive(Clone)]
pub struct ServerAddresses(Vec<ServerAddr>);

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

/// The process's one connection and its one JetStream context. Cheap to clone.
#[derive(Clone)]
pub struct Nats {
    client: Client,
    /// Every context has a limit of acks in flight and a task of its own, hence one for all.
    js: jetstream::Context,
    closed: watch::Receiver<bool>,
}

/// Connects in the background and keeps trying; [`Nats::connected`] tells how it stands.
///
/// # Errors
/// When the options themselves are unusable. A server that is away is not an error.
pub async fn connect(servers: &ServerAddresses, name: &str) -> anyhow::Result<Nats> {
    let (closed, closed_seen) = watch::channel(false);
    let client = servers
        .log_in(ConnectOptions::new())
        .name(name)
        // A dead peer is noticed after three pings: 30 s instead of the default's 3 minutes.
        .ping_interval(Duration::from_secs(10))
        .request_timeout(Some(REQUEST_TIMEOUT))
        .retry_on_initial_connect()
        // The default has no jitter, so all clients of a restarted server come back as one.
        .reconnect_delay_callback(|attempt| {
            let attempt = attempt.try_into().unwrap_or(u32::MAX);
            crate::backoff::delay(attempt, Duration::from_millis(50), Duration::from_secs(2))
        })
        .event_callback(move |event| {
            // Must stay quick: events wait in a short queue and are dropped when it is full.
            match &event {
                Event::Connected | Event::Draining | Event::Closed => info!("nats: {event}"),
                Event::Disconnected
                | Event::LameDuckMode
                | Event::SlowConsumer(_)
                | Event::ServerError(_)
                | Event::ClientError(_) => warn!("nats: {event}"),
            }
            if event == Event::Closed {
                closed.send_replace(true);
            }
            std::future::ready(())
        })
        .connect(servers.0.as_slice())
        .await
        .context("cannot start the NATS client")?;
    let js =
        jetstream::context::ContextBuilder::new().timeout(REQUEST_TIMEOUT).build(client.clone());
    Ok(Nats { client, js, closed: closed_seen })
}

impl Nats {
    /// Whether there is a connection now. Ask before work that needs one: what is sent without one
    /// waits in a queue and goes out long after the caller gave up on it.
    pub fn connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Readiness: there is a connection.
    ///
    /// # Errors
    /// When there is none.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(self.connected(), "not connected; trying again in the background");
        Ok(())
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// When there is none after `limit`.
    pub async fn wait_connected(&self, limit: Duration) -> anyhow::Result<()> {
        let connected = async {
            let mut look = tokio::time::interval(Duration::from_millis(20));
            while !self.connected() {
                look.tick().await;
            }
        };
        timeout(limit, connected)
            .await
            .with_context(|| format!("no connection to NATS within {limit:?}; check NATS_URL"))
    }

    /// The JetStream context.
    pub fn jetstream(&self) -> &jetstream::Context {
        &self.js
    }

    /// Acks, naks or terminates a delivery, and waits until the server says it knows.
    ///
    /// By request, not by `double_ack()`: that one takes the "no responders" of a deleted consumer
    /// for a confirmation (async-nats 0.51, `jetstream/message.rs`).
    ///
    /// # Errors
    /// The message will be delivered again, which the inbox absorbs.
    pub async fn settle(&self, message: &Message, kind: AckKind) -> Result<(), RequestError> {
        let Some(reply) = message.reply.clone() else { return Ok(()) };
        self.client.request(reply, kind.into()).await.map(|_| ())
    }

    /// Sends what is buffered, then closes. At most six seconds, whatever the server does.
    pub async fn close(&self) {
        // `flush` never returns while disconnected, and `drain` returns before anything is drained
        // (async-nats 0.51): hence the limits, and the wait for the event.
        if timeout(CLOSE_STEP, self.client.flush()).await.is_err() {
            warn!("nats: not everything could be sent before closing");
        }
        if self.client.drain().await.is_ok() {
            let mut closed = self.closed.clone();
            if timeout(CLOSE_STEP, closed.wait_for(|closed| *closed)).await.is_err() {
                warn!("nats: the connection did not close in time");
            }
        }
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
