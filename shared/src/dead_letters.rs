//! Where a message goes that cannot be applied: stored whole, then terminated. Never dropped.
//!
//! Guarantees: the row is committed before the broker is told to forget the message, and a crash in
//! between stores it once (unique by stream sequence). Without it a poison message is redelivered
//! for ever, or is gone.

pub mod settle;

use async_nats::{HeaderMap, Message, jetstream};
use clap::ValueEnum;
use serde_json::{Map, Value};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{database::storable, events::DecodeError};

/// Why a message was given up. The names are those of the column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Reason {
    /// The body is no event of a shape we can read.
    Undecodable,
    /// A type, or a version of one, that we have no code for.
    UnknownType,
    /// Another payment than the one already dispatched under this transaction or for this order.
    TransactionConflict,
    /// Handling failed too often.
    DeliveryLimit,
    /// Understood, and refused for good: by the carrier, by the receiver of notices, or because it
    /// is about an order that does not exist.
    Rejected,
}

impl Reason {
    /// The name in the database, in logs and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::UnknownType => "unknown_type",
            Self::TransactionConflict => "transaction_conflict",
            Self::DeliveryLimit => "delivery_limit",
            Self::Rejected => "rejected",
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
pub struct Stored {
    reason: Reason,
    error: String,
}

impl Stored {
    /// Why it was given up.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// The same, in detail.
    pub fn error(&self) -> &str {
        &self.error
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
    /// The connection it came on, the only one on which it may be settled.
    pub connection: u64,
    /// The message itself, with its bytes, headers and reply subject. A dead letter that is tried again
    /// has nobody to reply to.
    pub message: Message,
}

impl Origin {
    /// Reads the delivery's place from its reply subject. None for a message that did not come from
    /// a JetStream consumer.
    pub fn of(message: jetstream::Message, connection: u64) -> Option<Self> {
        let info = message.info().ok()?;
        Some(Self {
            consumer: info.consumer.to_owned(),
            stream: info.stream.to_owned(),
            stream_seq: info.stream_sequence,
            deliveries: info.delivered,
            connection,
            message: message.message,
        })
    }
}

/// What is kept.
#[derive(Debug)]
pub struct Letter<'a> {
    /// Who gives up: a durable, or a worker that acts on an event later.
    pub consumer: &'a str,
    /// The stream of the event.
    pub stream: &'a str,
    /// The event's place there.
    pub stream_seq: u64,
    /// The event's subject.
    pub subject: &'a str,
    /// Names to lists of values.
    pub headers: Value,
    /// What could not be handled, as it was.
    pub body: &'a [u8],
    /// How often it was tried.
    pub deliveries: i64,
}

impl<'a> From<&'a Origin> for Letter<'a> {
    fn from(origin: &'a Origin) -> Self {
        Self {
            consumer: &origin.consumer,
            stream: &origin.stream,
            stream_seq: origin.stream_seq,
            subject: &origin.message.subject,
            headers: headers(origin.message.headers.as_ref()),
            body: &origin.message.payload,
            deliveries: origin.deliveries,
        }
    }
}

/// Stores a message in the caller's transaction. Storing it again changes nothing.
///
/// # Errors
/// When the database refuses; then the message must not be terminated.
pub async fn store(
    tx: &mut PgConnection,
    origin: &Origin,
    reason: Reason,
    error: &str,
) -> sqlx::Result<Stored> {
    keep(tx, &origin.into(), reason, error).await?;
    Ok(Stored { reason, error: error.to_owned() })
}

/// The same, for something that is not in the hands of a consumer any more.
///
/// # Errors
/// When the database refuses.
pub async fn keep(
    tx: &mut PgConnection,
    letter: &Letter<'_>,
    reason: Reason,
    error: &str,
) -> sqlx::Result<()> {
    if insert(tx, letter, reason, error).await? {
        return Ok(());
    }
    // Its place is taken, as a rule by itself: delivered again. But streams that are made anew count
    // from 1 again, and what a person had settled may be refused once more. Then the older letter
    // steps aside, because neither may be dropped.
    let stepped_aside = sqlx::query!(
        "update dead_letters set stream = stream || ' before ' || clock_timestamp()
         where consumer = $1 and stream = $2 and stream_seq = $3
           and (resolved_at is not null or body <> $4 or subject <> $5)",
        letter.consumer,
        letter.stream,
        letter.stream_seq.cast_signed(),
        letter.body,
        storable(letter.subject),
    )
    .execute(&mut *tx)
    .await?;
    if stepped_aside.rows_affected() > 0 {
        insert(tx, letter, reason, error).await?;
    }
    Ok(())
}

/// False when the place is taken.
async fn insert(
    tx: &mut PgConnection,
    letter: &Letter<'_>,
    reason: Reason,
    error: &str,
) -> sqlx::Result<bool> {
    let inserted = sqlx::query!(
        "insert into dead_letters (dead_letter_id, consumer, stream, stream_seq, subject, reason, error,
                                   headers, body, deliveries)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
         on conflict on constraint one_dead_letter_per_message do nothing",
        Uuid::now_v7(),
        letter.consumer,
        letter.stream,
        letter.stream_seq.cast_signed(),
        storable(letter.subject),
        reason.as_str(),
        storable(error),
        letter.headers,
        letter.body,
        letter.deliveries,
    );
    Ok(inserted.execute(tx).await?.rows_affected() == 1)
}

fn headers(headers: Option<&HeaderMap>) -> Value {
    let mut object = Map::new();
    for (name, values) in headers.into_iter().flat_map(HeaderMap::iter) {
        let values = values.iter().map(|value| storable(value.as_str()).into()).collect();
        object.insert(storable(name.as_ref()), Value::Array(values));
    }
    Value::Object(object)
}
