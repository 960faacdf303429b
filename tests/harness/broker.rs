//! The broker from outside: what an operator sees, and what a careless publisher does.

use std::path::PathBuf;

use anyhow::Context as _;
use async_nats::{
    ConnectOptions, HeaderMap, ServerAddr,
    jetstream::{self, consumer::PullConsumer, message::PublishMessage, stream::Stream},
};
use futures_util::{StreamExt as _, TryStreamExt as _};
use serde_json::Value;

use crate::contract::{CONSUMER, ORDERS, PAYMENT_CONFIRMED};

/// A connection of our own, past all proxies.
#[derive(Debug, Clone)]
pub struct Broker {
    pub js: jetstream::Context,
}

/// A message of the stream.
#[derive(Debug, Clone)]
pub struct Stored {
    pub sequence: u64,
    pub message_id: Option<String>,
    pub traceparent: Option<String>,
    pub body: Vec<u8>,
}

impl Stored {
    /// The `CloudEvents` id, if it can be read.
    pub fn event_id(&self) -> Option<String> {
        let event: Value = serde_json::from_slice(&self.body).ok()?;
        event["id"].as_str().map(ToOwned::to_owned)
    }
}

impl Broker {
    /// To one or several servers, comma-separated, with the user and password of the first.
    pub async fn connect(url: &str) -> anyhow::Result<Self> {
        Self::connect_with(url, ConnectOptions::new()).await
    }

    /// The same with the certificate of a CA to trust.
    pub async fn connect_trusting(url: &str, ca: PathBuf) -> anyhow::Result<Self> {
        let options = ConnectOptions::new().add_root_certificates(ca).require_tls(true);
        Self::connect_with(url, options).await
    }

    async fn connect_with(url: &str, mut options: ConnectOptions) -> anyhow::Result<Self> {
        let servers = url.split(',').map(str::parse).collect::<Result<Vec<ServerAddr>, _>>()?;
        let first = servers.first().context("no server")?;
        if let (Some(user), Some(password)) = (first.username(), first.password()) {
            options = options.user_and_password(user.to_owned(), password.to_owned());
        }
        // Those that a cluster tells of are known only to its own network.
        let client = options.ignore_discovered_servers().connect(servers).await?;
        Ok(Self { js: jetstream::new(client) })
    }

    /// Publishes a payment past the outbox; true when the broker had the message id already.
    pub async fn publish(&self, body: &[u8], message_id: Option<&str>) -> anyhow::Result<bool> {
        self.publish_to(PAYMENT_CONFIRMED, body, message_id).await
    }

    /// The same, on any subject.
    pub async fn publish_to(
        &self,
        subject: &'static str,
        body: &[u8],
        message_id: Option<&str>,
    ) -> anyhow::Result<bool> {
        let mut headers = HeaderMap::new();
        if let Some(id) = message_id {
            headers.insert("Nats-Msg-Id", id);
        }
        self.publish_with(subject, headers, body).await
    }

    /// The same, with any headers.
    #[expect(
        clippy::disallowed_methods,
        reason = "the careless publisher that the guards are against"
    )]
    pub async fn publish_with(
        &self,
        subject: &'static str,
        headers: HeaderMap,
        body: &[u8],
    ) -> anyhow::Result<bool> {
        let message = PublishMessage::build().headers(headers).payload(body.to_vec().into());
        let ack = self.js.send_publish(subject, message).await?.await?;
        Ok(ack.duplicate)
    }

    pub async fn stream(&self) -> anyhow::Result<Stream> {
        self.js.get_stream(ORDERS).await.context("no stream")
    }

    /// How many messages the stream holds.
    pub async fn count(&self) -> anyhow::Result<u64> {
        Ok(self.stream().await?.cached_info().state.messages)
    }

    /// All messages of the stream, in its order.
    pub async fn messages(&self) -> anyhow::Result<Vec<Stored>> {
        let stream = self.stream().await?;
        let count = stream.cached_info().state.messages;
        if count == 0 {
            return Ok(Vec::new());
        }
        let config = jetstream::consumer::pull::OrderedConfig::default();
        let consumer = stream.create_consumer(config).await?;
        let messages = consumer.messages().await?.take(count as usize);
        messages
            .map_err(anyhow::Error::from)
            .and_then(async |message| {
                let info = message.info().map_err(|error| anyhow::anyhow!(error))?;
                let header =
                    |name: &str| Some(message.headers.as_ref()?.get(name)?.as_str().to_owned());
                Ok(Stored {
                    sequence: info.stream_sequence,
                    message_id: header("Nats-Msg-Id"),
                    traceparent: header("traceparent"),
                    body: message.payload.to_vec(),
                })
            })
            .try_collect()
            .await
    }

    /// The durable of fulfillment: what it has not delivered, and what nobody has acked.
    pub async fn consumer_backlog(&self) -> anyhow::Result<(u64, usize)> {
        self.backlog(ORDERS, CONSUMER).await
    }

    /// The same of any durable.
    pub async fn backlog(&self, stream: &str, durable: &str) -> anyhow::Result<(u64, usize)> {
        let durable: PullConsumer = self.js.get_consumer_from_stream(durable, stream).await?;
        let info = durable.cached_info();
        Ok((info.num_pending, info.num_ack_pending))
    }

    /// How many messages of the durable are acked or terminated, counted from the first.
    pub async fn acked(&self) -> anyhow::Result<u64> {
        let durable = self.durable().await?;
        let info = durable.cached_info();
        Ok(info.delivered.stream_sequence - info.num_ack_pending as u64)
    }

    /// The durable, as the server has it now.
    pub async fn durable(&self) -> anyhow::Result<PullConsumer> {
        Ok(self.js.get_consumer_from_stream(CONSUMER, ORDERS).await?)
    }
}
