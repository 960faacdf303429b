//! Dead letters in the hands of a person: listed, read, settled, or tried again in vain.

use async_nats::{HeaderMap, HeaderName, HeaderValue, Message};
use futures_util::Stream;
use serde::Serialize;
use serde_json::Value;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Origin, Reason};
use crate::database::storable;

/// A dead letter without its body, as it is listed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// Its name in the commands.
    pub dead_letter_id: Uuid,
    /// Who gave up.
    pub consumer: String,
    /// Why.
    pub reason: String,
    /// The same, in detail: of the last attempt.
    pub error: String,
    /// Where the message was.
    pub stream: String,
    /// Its place there.
    pub stream_seq: i64,
    /// Its subject.
    pub subject: String,
    /// How many bytes it has.
    pub body_bytes: i32,
    /// How often it was tried before it was set aside, and since.
    pub deliveries: i64,
    /// See `deliveries`.
    pub replays: i32,
    /// When it was set aside.
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// When it was settled, how, and by whom.
    #[serde(with = "time::serde::rfc3339::option")]
    pub resolved_at: Option<OffsetDateTime>,
    /// See `resolved_at`.
    pub resolution: Option<String>,
    /// See `resolved_at`.
    pub resolved_by: Option<String>,
}

/// The letters that wait for a person, or also those that are settled; of one reason, or of any.
/// Oldest first.
pub fn list(
    pool: &PgPool,
    settled_too: bool,
    reason: Option<Reason>,
) -> impl Stream<Item = sqlx::Result<Listed>> {
    sqlx::query_as!(
        Listed,
        r#"select dead_letter_id, consumer, reason, error, stream, stream_seq, subject,
                  octet_length(body) as "body_bytes!", deliveries, replays, created_at, resolved_at,
                  resolution, resolved_by
           from dead_letters
           where (resolved_at is null or $1) and ($2::text is null or reason = $2)
           order by created_at, dead_letter_id"#,
        settled_too,
        reason.map(Reason::as_str),
    )
    .fetch(pool)
}

/// What was kept of one.
#[derive(Debug)]
pub struct Kept {
    /// Its name in the commands.
    pub dead_letter_id: Uuid,
    /// The message, as it was delivered.
    pub origin: Origin,
    /// Its headers as they were kept: names to lists of values.
    pub headers: Value,
    /// How it was settled, if it was.
    pub resolution: Option<String>,
}

/// Reads one.
///
/// # Errors
/// When the database cannot be asked.
pub async fn get(pool: &PgPool, dead_letter_id: Uuid) -> sqlx::Result<Option<Kept>> {
    let row = sqlx::query!(
        "select consumer, stream, stream_seq, subject, headers, body, deliveries, resolution
         from dead_letters
         where dead_letter_id = $1",
        dead_letter_id,
    );
    Ok(row.fetch_optional(pool).await?.map(|row| Kept {
        dead_letter_id,
        resolution: row.resolution,
        origin: Origin {
            consumer: row.consumer,
            stream: row.stream,
            stream_seq: row.stream_seq.cast_unsigned(),
            deliveries: row.deliveries,
            // None: there is nothing to settle.
            connection: 0,
            message: Message {
                subject: row.subject.into(),
                reply: None,
                length: row.body.len(),
                payload: row.body.into(),
                headers: Some(header_map(&row.headers)),
                status: None,
                description: None,
            },
        },
        headers: row.headers,
    }))
}

/// As far as they can be headers.
fn header_map(object: &Value) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, values) in object.as_object().into_iter().flatten() {
        for value in values.as_array().into_iter().flatten().filter_map(Value::as_str) {
            if let (Ok(name), Ok(value)) =
                (name.parse::<HeaderName>(), value.parse::<HeaderValue>())
            {
                headers.append(name, value);
            }
        }
    }
    headers
}

/// Settles a letter. False if it was settled before.
///
/// # Errors
/// When the database refuses.
pub async fn resolve(
    tx: &mut PgConnection,
    dead_letter_id: Uuid,
    resolution: &str,
    by: &str,
) -> sqlx::Result<bool> {
    let resolved = sqlx::query!(
        "update dead_letters set resolved_at = now(), resolution = $2, resolved_by = $3
         where dead_letter_id = $1 and resolved_at is null",
        dead_letter_id,
        storable(resolution),
        storable(by),
    );
    Ok(resolved.execute(tx).await?.rows_affected() == 1)
}

/// Notes that a letter was tried again in vain, and why; it stays.
///
/// # Errors
/// When the database refuses.
pub async fn note_replay(
    pool: &PgPool,
    dead_letter_id: Uuid,
    reason: Option<Reason>,
    error: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update dead_letters
         set replays = replays + 1, reason = coalesce($2, reason), error = $3
         where dead_letter_id = $1 and resolved_at is null",
        dead_letter_id,
        reason.map(Reason::as_str),
        storable(error),
    )
    .execute(pool)
    .await
    .map(|_| ())
}
