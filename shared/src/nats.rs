//! The connection to NATS: made once per process, watched, and closed with bounds.
//!
//! Guarantees: [`Nats::settle`] tells the truth about acks, and [`Nats::close`] loses none that was
//! sent; what the server denies is told by readiness, because the client only sees a time-out.
//! Assumes nothing about the server being there: a service starts and takes payments without it.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use async_nats::{
    Client, Event, Message, ServerError,
    connection::State,
    jetstream::{self, AckKind},
};
use tokio::{sync::watch, time::timeout};
use tracing::{info, warn};

use crate::login::Settings;

/// How long a request, a publish acknowledgement or an API call may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Each of the two steps of closing, see [`Nats::close`].
const CLOSE_STEP: Duration = Duration::from_secs(3);

/// How long readiness tells of a denial. Longer than any of our operations waits before it is tried
/// again, so a permission that is missing is told of all the time.
const DENIAL_STANDS: Duration = Duration::from_secs(60);

/// The process's one connection and its one JetStream context. Cheap to clone.
#[derive(Clone)]
pub struct Nats {
    client: Client,
    /// Every context has a limit of acks in flight and a task of its own, hence one for all.
    js: jetstream::Context,
    news: watch::Receiver<News>,
}

/// What the client told of the connection.
#[derive(Default)]
struct News {
    closed: bool,
    /// Why there is no connection.
    trouble: Option<String>,
    /// The same about a certificate, until the client says that it could not connect, and no more.
    untrusted: Option<String>,
    /// What the server denied last.
    denied: Option<(Instant, String)>,
}

impl News {
    fn note(&mut self, event: &Event) {
        match event {
            // With another password, or after a change on the server, other permissions.
            Event::Connected => *self = Self::default(),
            Event::Closed => self.closed = true,
            Event::ServerError(ServerError::Other(text))
                if text.to_lowercase().starts_with("permissions violation") =>
            {
                self.denied = Some((Instant::now(), text.clone()));
            }
            Event::ServerError(error) => self.trouble = Some(error.to_string()),
            Event::ClientError(error) => {
                self.trouble = self.untrusted.take().or_else(|| Some(error.to_string()));
            }
            Event::Disconnected
            | Event::LameDuckMode
            | Event::Draining
            | Event::SlowConsumer(_) => {}
        }
    }
}

/// Connects in the background and keeps trying; [`Nats::connected`] tells how it stands. Replies
/// come to subjects below `_INBOX_{user}`, which the permissions of others leave out: below the
/// default, `_INBOX`, everybody could read everybody's replies.
///
/// # Errors
/// When the settings themselves are unusable. A server that is away is not an error.
pub async fn connect(settings: &Settings, user: &str, name: &str) -> anyhow::Result<Nats> {
    let (tell, news) = watch::channel(News::default());
    // The client says "IO error" to that, and no more (async-nats 0.51, `connector.rs`).
    let tell_why = tell.clone();
    let untrusted = move |error: &rustls::Error| {
        let why = format!("the server is not trusted, check NATS_CA_FILE and NATS_URL: {error}");
        warn!("nats: {why}");
        tell_why.send_modify(|news| news.untrusted = Some(why));
    };
    let client = settings
        .options(untrusted)
        .await?
        .name(name)
        .custom_inbox_prefix(format!("_INBOX_{user}"))
        // A cluster tells its addresses as it sees them itself: behind a proxy or in a container
        // network they lead nowhere, and no certificate is made for them. NATS_URL names them all.
        .ignore_discovered_servers()
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
            tell.send_modify(|news| news.note(&event));
            std::future::ready(())
        })
        .connect(settings.nats_url.0.as_slice())
        .await
        .context("cannot start the NATS client")?;
    let js =
        jetstream::context::ContextBuilder::new().timeout(REQUEST_TIMEOUT).build(client.clone());
    Ok(Nats { client, js, news })
}

impl Nats {
    /// Whether there is a connection now. Ask before work that needs one: what is sent without one
    /// waits in a queue and goes out long after the caller gave up on it.
    pub fn connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Counts connections. Another number than before means that the server may have been another one
    /// in between, or the same without what it had.
    pub fn connection(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }

    /// Readiness: there is a connection.
    ///
    /// # Errors
    /// When there is none.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.connected() {
            return Ok(());
        }
        match &self.news.borrow().trouble {
            Some(trouble) => bail!("not connected, trying again: {trouble}"),
            None => bail!("not connected, trying again"),
        }
    }

    /// Readiness: the server has denied us nothing of late. To the one who was denied it, a publish, a
    /// request or an ack merely times out; only this tells the subject.
    ///
    /// # Errors
    /// What was denied, for a minute, or until the next connection.
    pub fn check_permissions(&self) -> anyhow::Result<()> {
        match &self.news.borrow().denied {
            Some((at, what)) if at.elapsed() < DENIAL_STANDS => {
                bail!(
                    "{what} ({:.0?} ago); see this user's permissions on the server",
                    at.elapsed()
                )
            }
            _ => Ok(()),
        }
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
        if timeout(limit, connected).await.is_err() {
            self.check().with_context(|| format!("no connection to NATS within {limit:?}"))?;
        }
        Ok(())
    }

    /// The JetStream context.
    pub fn jetstream(&self) -> &jetstream::Context {
        &self.js
    }

    /// Acks, naks or terminates deliveries of one consumer, and waits until the server says it knows.
    ///
    /// The server takes what comes on one connection in its order, so its word about the last one is
    /// its word about all: half the messages of asking for each. By request, not by `double_ack()`:
    /// that one takes the "no responders" of a deleted consumer for a confirmation (async-nats 0.51,
    /// `jetstream/message.rs`).
    ///
    /// # Errors
    /// Some may be delivered again, which the inbox absorbs.
    #[expect(clippy::disallowed_methods, reason = "the one place that answers to a delivery")]
    pub async fn settle<'a>(
        &self,
        deliveries: impl IntoIterator<Item = (&'a Message, AckKind)>,
    ) -> anyhow::Result<()> {
        let answers = deliveries.into_iter().filter_map(|(m, kind)| Some((m.reply.clone()?, kind)));
        let mut answers: Vec<_> = answers.collect();
        let Some((last, kind)) = answers.pop() else { return Ok(()) };
        for (reply, kind) in answers {
            self.client.publish(reply, kind.into()).await?;
        }
        self.client.request(last, kind.into()).await?;
        Ok(())
    }

    /// Sends what is buffered, then closes. At most six seconds, whatever the server does.
    pub async fn close(&self) {
        // `flush` never returns while disconnected, and `drain` returns before anything is drained
        // (async-nats 0.51): hence the limits, and the wait for the event.
        if timeout(CLOSE_STEP, self.client.flush()).await.is_err() {
            warn!("nats: not everything could be sent before closing");
        }
        if self.client.drain().await.is_ok() {
            let mut news = self.news.clone();
            if timeout(CLOSE_STEP, news.wait_for(|news| news.closed)).await.is_err() {
                warn!("nats: the connection did not close in time");
            }
        }
    }
}
