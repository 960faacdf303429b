//! Where a message goes that cannot be applied: stored whole, then terminated. Never dropped.
//!
//! Guarantees: the row is committed before the broker is told to forget the message, and a crash in
//! between stores it once (unique by stream sequence). Without it a poison message is redelivered
//! for ever, or is gone.

use async_nats::{HeaderMap, jetstream::Message};
use serde_json::{Map, Value};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::events::DecodeError;

/// Why a message was given up. The names are those of the column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The body is no event of a shape we can read.
    Undecodable,
    /// A type, or a version of one, that we have no code for.
    UnknownType,
    /// Another payment than the one already dispatched under this transaction or for this order.
    TransactionConflict,
    /// Handling failed too often.
    DeliveryLimit,
}

impl Reason {
    /// The name in the database, in logs and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::UnknownType => "unknown_type",
            Self::TransactionConflict => "transaction_conflict",
            Self::DeliveryLimit => "delivery_limit",
        }
    }
}

impl From<&DecodeError> for Reason {
    fn from(error: &DecodeError) -> Self {
        match error {
            DecodeError::Undecodable(_) | DecodeError::SpecVersion(_) => Self::Undecodable,
            DecodeError::UnknownType(_) => Self::UnknownType,
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Proof that a message was written to the dead letters. Only [`store`] makes one, so no handler
/// can have a message terminated that is kept nowhere.
#[derive(Debug)]
#[must_use = "a stored message still has to be terminated"]
pub struct Stored(Reason);

impl Stored {
    /// Why it was given up.
    pub fn reason(&self) -> Reason {
        self.0
    }
}

/// A message as it was delivered: where it stands in the stream, and how often it was tried.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The durable that delivered it.
    pub consumer: String,
    /// The stream it is in.
    pub stream: String,
    /// Its place there: the identity of the message, whatever it contains.
    pub stream_seq: u64,
    /// Counts from 1. May restart lower when a broker crashed: a hint, not an account.
    pub deliveries: i64,
    /// The broker's message, with its bytes, headers and reply subject.
    pub message: Message,
}

impl Origin {
    /// Reads the delivery's place from its reply subject. None for a message that did not come from
    /// a JetStream consumer.
    pub fn of(message: Message) -> Option<Self> {
        let info = message.info().ok()?;
        Some(Self {
            consumer: info.consumer.to_owned(),
            stream: info.stream.to_owned(),
            stream_seq: info.stream_sequence,
            deliveries: info.delivered,
            message,
        })
    }
}

/// Stores the message in the caller's transaction. Storing it again changes nothing.
///
/// # Errors
/// When the database refuses; then the message must not be terminated.
pub async fn store(
    tx: &mut PgConnection,
    origin: &Origin,
    reason: Reason,
    error: &str,
) -> sqlx::Result<Stored> {
    sqlx::query!(
        "insert into dead_letters (dead_letter_id, consumer, stream, stream_seq, subject, reason, error,
                                   headers, body, deliveries)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
         on conflict on constraint one_dead_letter_per_message do nothing",
        Uuid::now_v7(),
        origin.consumer,
        origin.stream,
        origin.stream_seq.cast_signed(),
        storable(&origin.message.subject),
        reason.as_str(),
        storable(error),
        headers(origin.message.headers.as_ref()),
        &origin.message.payload[..],
        origin.deliveries,
    )
    .execute(tx)
    .await?;
    Ok(Stored(reason))
}

/// PostgreSQL's `text` and `jsonb` hold every character but NUL, and a message nobody can parse may
/// carry one anywhere. The bytes of the body are kept as they are.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn headers(headers: Option<&HeaderMap>) -> Value {
    let mut object = Map::new();
    for (name, values) in headers.into_iter().flat_map(HeaderMap::iter) {
        let values = values.iter().map(|value| storable(value.as_str()).into()).collect();
        object.insert(storable(name.as_ref()), Value::Array(values));
    }
    Value::Object(object)
}
