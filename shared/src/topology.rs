//! Streams and consumers as data: `setup` upserts them, `serve` compares and never changes them.
//!
//! A service that creates streams at start needs the right to, races its replicas, and silently
//! keeps whatever was there before (nats-server#8491, #5526). So one command owns the topology, and
//! a difference is a failed readiness check that names the field.

use std::{fmt::Debug, time::Duration};

use anyhow::Context as _;
use async_nats::jetstream::{
    self,
    consumer::{AckPolicy, DeliverPolicy, IntoConsumerConfig as _, pull},
    kv,
    stream::{self, DiscardPolicy, RetentionPolicy, StorageType},
};

use crate::{
    events::{ORDER_DISPATCHED_SUBJECT, PAYMENT_CONFIRMED_SUBJECT},
    nats::Nats,
};

/// The stream of orders-service.
pub const ORDERS: &str = "ORDERS";
/// The stream of fulfillment-service.
pub const FULFILLMENT: &str = "FULFILLMENT";
/// The bucket of the claims of the notifications.
pub const NOTICES: &str = "notices";

/// How long the broker remembers a message id. It absorbs a relay that crashed between publish and
/// mark; whatever comes later is the inbox's to absorb. Costs memory per id, so not longer.
pub const DUPLICATE_WINDOW: Duration = Duration::from_secs(30 * 60);

/// How long a consumer may be away before events are lost to it.
pub const MAX_AGE: Duration = Duration::from_secs(14 * 24 * 3600);

/// The largest message, headers included. [`crate::outbox::MAX_PAYLOAD`] keeps events well below.
pub const MAX_MESSAGE_SIZE: i32 = 256 * 1024;

/// How long a delivery may be in hand before it is delivered again. A batch takes milliseconds, so
/// this is the price of a crash, not of slowness.
pub const ACK_WAIT: Duration = Duration::from_secs(30);

/// A stream and the durable consumers on it.
pub struct Wanted {
    /// The stream.
    pub stream: stream::Config,
    /// Its consumers.
    pub consumers: Vec<pull::Config>,
}

/// Everything the pair has in JetStream, but for the bucket [`NOTICES`].
pub fn wanted(replicas: usize) -> [Wanted; 2] {
    [
        Wanted {
            stream: stream_config(ORDERS, "orders.>", replicas),
            consumers: vec![consumer_config("fulfillment", PAYMENT_CONFIRMED_SUBJECT)],
        },
        Wanted {
            stream: stream_config(FULFILLMENT, "fulfillment.>", replicas),
            consumers: ["orders", "notifications"]
                .map(|name| consumer_config(name, ORDER_DISPATCHED_SUBJECT))
                .into(),
        },
    ]
}

fn stream_config(name: &str, subjects: &str, replicas: usize) -> stream::Config {
    stream::Config {
        name: name.to_owned(),
        subjects: vec![subjects.to_owned()],
        storage: StorageType::File,
        // Limits, not interest or work queue: an event stays after it was acked, so a new consumer
        // can read back, and a restart of the server does not forget which ids it has seen.
        retention: RetentionPolicy::Limits,
        // A full stream refuses new messages: the outbox is the buffer. `Old` would delete events
        // that the relay was told are safe and that no consumer has seen.
        discard: DiscardPolicy::New,
        max_age: MAX_AGE,
        max_bytes: 2 * 1024 * 1024 * 1024,
        max_message_size: MAX_MESSAGE_SIZE,
        duplicate_window: DUPLICATE_WINDOW,
        // Stated because `true` would make every publish time out although it was stored.
        no_ack: false,
        deny_delete: true,
        allow_direct: true,
        num_replicas: replicas,
        max_messages: -1,
        max_messages_per_subject: -1,
        max_consumers: -1,
        ..Default::default()
    }
}

fn consumer_config(name: &str, filter: &str) -> pull::Config {
    pull::Config {
        durable_name: Some(name.to_owned()),
        filter_subject: filter.to_owned(),
        deliver_policy: DeliverPolicy::All,
        ack_policy: AckPolicy::Explicit,
        ack_wait: ACK_WAIT,
        // The server would drop a message silently after its last delivery; the consumer counts
        // deliveries itself and keeps what it gives up (see `consumer`).
        max_deliver: -1,
        // Adds up with delayed naks to times nobody asked for (quarkus-nats#490).
        backoff: Vec::new(),
        // Messages that wait for their delayed nak count too, so far more than replicas × batch.
        max_ack_pending: 20_000,
        ..Default::default()
    }
}

fn bucket_config(replicas: usize) -> kv::Config {
    kv::Config {
        bucket: NOTICES.to_owned(),
        history: 1,
        // Allows a time to live per key; the marker of an expired one is kept as long as this.
        limit_markers: Some(Duration::from_secs(60)),
        num_replicas: replicas,
        ..Default::default()
    }
}

/// Creates what is missing and changes what differs. Idempotent, and safe when several run at once.
///
/// # Errors
/// When the server cannot be asked, or refuses: some fields of a stream (storage, retention) can
/// never change.
pub async fn upsert(js: &jetstream::Context, replicas: usize) -> anyhow::Result<()> {
    for Wanted { stream, consumers } in wanted(replicas) {
        let name = stream.name.clone();
        js.create_or_update_stream(stream)
            .await
            .with_context(|| format!("cannot create or update stream {name}"))?;
        for consumer in consumers {
            let durable = consumer.durable_name.clone().unwrap_or_default();
            js.create_consumer_on_stream(consumer, name.as_str())
                .await
                .with_context(|| format!("cannot create or update consumer {name}/{durable}"))?;
        }
    }
    js.create_or_update_key_value(bucket_config(replicas))
        .await
        .with_context(|| format!("cannot create or update bucket {NOTICES}"))?;
    Ok(())
}

/// A field of the running topology that is not as wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{asset}: {field} is {found}, wanted {wanted}; run `setup`")]
pub struct Drift {
    asset: String,
    field: &'static str,
    wanted: String,
    found: String,
}

fn differ<T: PartialEq + Debug>(
    asset: &str,
    field: &'static str,
    wanted: &T,
    found: &T,
) -> Result<(), Drift> {
    if wanted == found {
        return Ok(());
    }
    Err(Drift {
        asset: asset.to_owned(),
        field,
        wanted: format!("{wanted:?}"),
        found: format!("{found:?}"),
    })
}

/// Compares what the guarantees of a stream rest on. Replicas are left out: whoever runs the
/// cluster may change them under way.
///
/// # Errors
/// The first field that differs.
pub fn compare_stream(name: &str, found: &stream::Config) -> Result<(), Drift> {
    let wanted = wanted(1)
        .into_iter()
        .map(|wanted| wanted.stream)
        .find(|stream| stream.name == name)
        .expect("only streams of this module are asked for");
    let asset = format!("stream {name}");
    differ(&asset, "subjects", &wanted.subjects, &found.subjects)?;
    differ(&asset, "storage", &wanted.storage, &found.storage)?;
    differ(&asset, "retention", &wanted.retention, &found.retention)?;
    differ(&asset, "discard", &wanted.discard, &found.discard)?;
    differ(&asset, "max_age", &wanted.max_age, &found.max_age)?;
    differ(&asset, "max_bytes", &wanted.max_bytes, &found.max_bytes)?;
    differ(&asset, "max_messages", &wanted.max_messages, &found.max_messages)?;
    differ(
        &asset,
        "max_messages_per_subject",
        &wanted.max_messages_per_subject,
        &found.max_messages_per_subject,
    )?;
    differ(&asset, "max_message_size", &wanted.max_message_size, &found.max_message_size)?;
    differ(&asset, "duplicate_window", &wanted.duplicate_window, &found.duplicate_window)?;
    differ(&asset, "no_ack", &wanted.no_ack, &found.no_ack)?;
    differ(&asset, "sealed", &wanted.sealed, &found.sealed)
}

/// Readiness: the stream `name` is there, and as wanted.
///
/// # Errors
/// When it is not, or cannot be asked for.
pub async fn check_stream(nats: &Nats, name: &str) -> anyhow::Result<()> {
    nats.check()?;
    let stream = nats.jetstream().get_stream(name).await;
    let stream =
        stream.with_context(|| format!("stream {name} cannot be asked for; run `setup`"))?;
    Ok(compare_stream(name, &stream.cached_info().config)?)
}

/// Readiness: the bucket [`NOTICES`] is there, and its keys may have a time to live.
///
/// # Errors
/// When it is not, or cannot be asked for.
pub async fn check_bucket(nats: &Nats) -> anyhow::Result<()> {
    nats.check()?;
    let stream = nats.jetstream().get_stream(format!("KV_{NOTICES}")).await;
    let stream =
        stream.with_context(|| format!("bucket {NOTICES} cannot be asked for; run `setup`"))?;
    let found = &stream.cached_info().config;
    let asset = format!("bucket {NOTICES}");
    let wanted = bucket_config(1);
    differ(&asset, "allow_message_ttl", &true, &found.allow_message_ttl)?;
    differ(&asset, "limit_markers", &wanted.limit_markers, &found.subject_delete_marker_ttl)?;
    Ok(differ(&asset, "history", &wanted.history, &found.max_messages_per_subject)?)
}

/// Compares what the guarantees of a consumer rest on.
///
/// # Errors
/// The first field that differs.
pub fn compare_consumer(
    stream: &str,
    name: &str,
    found: &jetstream::consumer::Config,
) -> Result<(), Drift> {
    let wanted = wanted(1)
        .into_iter()
        .filter(|wanted| wanted.stream.name == stream)
        .flat_map(|wanted| wanted.consumers)
        .find(|consumer| consumer.durable_name.as_deref() == Some(name))
        .expect("only consumers of this module are asked for")
        .into_consumer_config();
    let asset = format!("consumer {stream}/{name}");
    differ(&asset, "filter_subject", &wanted.filter_subject, &found.filter_subject)?;
    differ(&asset, "filter_subjects", &wanted.filter_subjects, &found.filter_subjects)?;
    differ(&asset, "deliver_subject", &wanted.deliver_subject, &found.deliver_subject)?;
    differ(&asset, "deliver_policy", &wanted.deliver_policy, &found.deliver_policy)?;
    differ(&asset, "ack_policy", &wanted.ack_policy, &found.ack_policy)?;
    differ(&asset, "ack_wait", &wanted.ack_wait, &found.ack_wait)?;
    differ(&asset, "max_deliver", &wanted.max_deliver, &found.max_deliver)?;
    differ(&asset, "backoff", &wanted.backoff, &found.backoff)?;
    differ(&asset, "max_ack_pending", &wanted.max_ack_pending, &found.max_ack_pending)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of these settings has lost somebody's events; the reasons are beside the settings.
    #[test]
    fn no_setting_can_lose_an_event_silently() {
        for Wanted { stream, consumers } in wanted(1) {
            assert_eq!(stream.storage, StorageType::File);
            assert_eq!(stream.discard, DiscardPolicy::New);
            assert_eq!(stream.retention, RetentionPolicy::Limits);
            assert!(!stream.no_ack);
            assert!(stream.max_bytes > 0 && stream.max_age > Duration::ZERO);
            assert!(stream.duplicate_window < stream.max_age);
            for consumer in consumers {
                assert_eq!(consumer.ack_policy, AckPolicy::Explicit);
                assert_eq!(consumer.max_deliver, -1);
                assert!(consumer.backoff.is_empty());
                assert!(!consumer.filter_subject.is_empty());
            }
        }
    }

    #[test]
    fn drift_names_field_wanted_and_found() {
        let mut found = stream_config(ORDERS, "orders.>", 3);
        assert_eq!(compare_stream(ORDERS, &found), Ok(()), "replicas are not drift");
        found.duplicate_window = Duration::from_secs(120);
        assert_eq!(
            compare_stream(ORDERS, &found).unwrap_err().to_string(),
            "stream ORDERS: duplicate_window is 120s, wanted 1800s; run `setup`"
        );
    }
}
