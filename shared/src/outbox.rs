//! Events waiting to be published, written in the transaction that makes them true.
//!
//! Guarantees: an event exists if and only if the change it announces was committed. Assumes that
//! the caller holds a lock on the aggregate while it enqueues, so that rows of one aggregate are
//! numbered in the order of their commits. Without it a crash between database and broker loses the
//! event, or announces what never happened.

use serde::Serialize;
use sqlx::{PgConnection, PgPool, types::Json};
use uuid::Uuid;

use crate::{
    events::{Event, EventId},
    telemetry::TraceParent,
    topology,
};

/// The largest event text that is accepted, in bytes: half of what the stream takes, because
/// `jsonb` gives it back with a space behind every colon and comma, and the headers count too.
pub const MAX_PAYLOAD: usize = topology::MAX_MESSAGE_SIZE as usize / 2;

/// Why an event was not written. The caller's transaction must be given up.
#[derive(Debug, thiserror::Error)]
pub enum EnqueueError {
    /// It could never be published, so it is refused where somebody can still act on it.
    #[error("the event has {0} bytes, at most {MAX_PAYLOAD} can be published")]
    TooLarge(usize),
    /// A payload that has no JSON form.
    #[error("the event cannot be written as JSON")]
    Encode(#[source] serde_json::Error),
    /// The insert failed.
    #[error("the outbox row cannot be written")]
    Database(#[from] sqlx::Error),
}

/// Writes `event` in the caller's transaction. Three outcomes: commit, and it will be published;
/// rollback, and it never was; before that, nobody sees it.
///
/// # Errors
/// See [`EnqueueError`].
pub async fn enqueue<D: Serialize>(
    tx: &mut PgConnection,
    event: &Event<D>,
    traceparent: &TraceParent,
) -> Result<(), EnqueueError> {
    let payload = serde_json::value::to_raw_value(event).map_err(EnqueueError::Encode)?;
    if payload.get().len() > MAX_PAYLOAD {
        return Err(EnqueueError::TooLarge(payload.get().len()));
    }
    sqlx::query!(
        "insert into outbox (event_id, aggregate_id, subject, payload, traceparent)
         values ($1, $2, $3, $4, $5)",
        event.id.get(),
        event.subject.as_str(),
        event.nats_subject,
        Json(payload) as _,
        traceparent.as_str(),
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// A row on its way to the broker.
#[derive(Debug, Clone)]
pub struct Row {
    /// Becomes the message id.
    pub event_id: EventId,
    /// Rows with the same one are published one after another.
    pub aggregate_id: String,
    /// Where to.
    pub subject: String,
    /// The body.
    pub payload: String,
    /// The trace of the request that caused the event.
    pub traceparent: Option<String>,
    /// Attempts so far.
    pub attempts: i32,
}

/// The next rows to publish, oldest first.
///
/// # Errors
/// When the database cannot be asked.
pub async fn pending(pool: &PgPool, limit: i64) -> sqlx::Result<Vec<Row>> {
    sqlx::query_as!(
        Row,
        r#"with held as (
               -- The few rows that wait for their retry, or for a person. Nothing of the same
               -- aggregate may overtake them; what stands before them may go.
               select aggregate_id, min(seq) as seq
               from outbox
               where published_at is null and (parked_at is not null or retry_at > now())
               group by aggregate_id
           )
           select event_id as "event_id: EventId", aggregate_id, subject, payload::text as "payload!",
                  traceparent, attempts
           from outbox
           where published_at is null
             and not exists (select from held
                             where held.aggregate_id = outbox.aggregate_id and held.seq <= outbox.seq)
           order by seq
           limit $1"#,
        limit,
    )
    .fetch_all(pool)
    .await
}

/// A row the broker has acknowledged, and the place it gave the message.
#[derive(Debug, Clone, Copy)]
pub struct Published {
    /// Which row.
    pub event_id: EventId,
    /// The message's sequence in the stream.
    pub stream_seq: u64,
}

/// Marks rows as published. Returns how many were not yet: fewer than given means that another
/// relay was at work too, which costs duplicates and nothing else.
///
/// # Errors
/// When the database cannot be asked. The rows are then published again.
pub async fn mark_published(pool: &PgPool, published: &[Published]) -> sqlx::Result<u64> {
    let event_ids: Vec<Uuid> = published.iter().map(|row| row.event_id.get()).collect();
    let stream_seqs: Vec<i64> = published.iter().map(|row| row.stream_seq.cast_signed()).collect();
    let marked = sqlx::query!(
        "update outbox
         set published_at = now(), stream_seq = acknowledged.stream_seq, attempts = attempts + 1,
             retry_at = null
         from unnest($1::uuid[], $2::bigint[]) as acknowledged (event_id, stream_seq)
         where outbox.event_id = acknowledged.event_id and outbox.published_at is null",
        &event_ids,
        &stream_seqs,
    )
    .execute(pool)
    .await?;
    Ok(marked.rows_affected())
}

/// A row that could not be published.
#[derive(Debug, Clone)]
pub struct Failed {
    /// Which row.
    pub event_id: EventId,
    /// What the broker or the client said.
    pub error: String,
    /// Seconds until it is tried again; none: a person has to look at it.
    pub retry_after: Option<f64>,
}

/// Notes failed attempts, and when to try again.
///
/// # Errors
/// When the database cannot be asked. The rows are then tried again at once.
pub async fn mark_failed(pool: &PgPool, failed: &[Failed]) -> sqlx::Result<()> {
    let event_ids: Vec<Uuid> = failed.iter().map(|row| row.event_id.get()).collect();
    let errors: Vec<String> = failed.iter().map(|row| row.error.clone()).collect();
    let retry_after: Vec<Option<f64>> = failed.iter().map(|row| row.retry_after).collect();
    sqlx::query!(
        "update outbox
         set attempts = attempts + 1, last_error = failed.error,
             retry_at = now() + make_interval(secs => failed.retry_after),
             parked_at = case when failed.retry_after is null then now() end
         from unnest($1::uuid[], $2::text[], $3::float8[]) as failed (event_id, error, retry_after)
         where outbox.event_id = failed.event_id and outbox.published_at is null",
        &event_ids,
        &errors,
        &retry_after as &[Option<f64>],
    )
    .execute(pool)
    .await?;
    Ok(())
}
