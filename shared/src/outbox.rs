//! Events waiting to be published, written in the transaction that makes them true.
//!
//! Guarantees: an event exists if and only if the change it announces was committed. Assumes that
//! the caller holds a lock on the aggregate while it enqueues, so that rows of one aggregate are
//! numbered in the order of their commits. Without it a crash between database and broker loses the
//! event, or announces what never happened.

pub mod inspect;

use std::time::Duration;

use serde::Serialize;
use sqlx::{PgConnection, PgPool, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    events::{Event, EventId},
    retention::Deleted,
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
    /// Publishing order.
    pub seq: i64,
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

/// The next rows to publish behind `after`, oldest first; 0 is the start.
///
/// Whoever goes on from where they were passes by what others commit late, and has to come back for
/// it. But nobody walks through what has just been marked, which stays in the index until a vacuum.
///
/// # Errors
/// When the database cannot be asked.
pub async fn pending(pool: &PgPool, after: i64, limit: i64) -> sqlx::Result<Vec<Row>> {
    sqlx::query_as!(
        Row,
        r#"with held as (
               -- The few rows that wait for their retry, or for a person. Nothing of the same
               -- aggregate may overtake them; what stands before them may go.
               select aggregate_id, min(seq) as seq
               from outbox
               where parked_at is not null or retry_at > now()
               group by aggregate_id
           )
           select event_id as "event_id: EventId", seq, aggregate_id, subject,
                  payload::text as "payload!", traceparent, attempts
           from outbox
           where published_at is null and seq > $2
             and not exists (select from held
                             where held.aggregate_id = outbox.aggregate_id and held.seq <= outbox.seq)
           order by seq
           limit $1"#,
        limit,
        after,
    )
    .fetch_all(pool)
    .await
}

/// A row the broker has acknowledged, and the place it gave the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Which row.
    pub event_id: EventId,
    /// The message's sequence in the stream.
    pub stream_seq: u64,
}

/// Marks rows as published, if `holder` still has the lease. Returns how many: fewer than given means
/// that another relay was at work too, which costs duplicates and nothing else.
///
/// # Errors
/// When the database cannot be asked. The rows are then published again.
pub async fn mark_published(
    pool: &PgPool,
    holder: Uuid,
    published: &[Published],
) -> sqlx::Result<u64> {
    let event_ids: Vec<Uuid> = published.iter().map(|row| row.event_id.get()).collect();
    let stream_seqs: Vec<i64> = published.iter().map(|row| row.stream_seq.cast_signed()).collect();
    let marked = sqlx::query!(
        "with ours as (
             -- Whoever has the lease now has looked into the stream after us. If we slept since our
             -- rows were acknowledged, they may be gone again, and nobody would look for them. The
             -- lock makes the next holder wait for this statement, and see these rows.
             select from relay_lease where holder = $3 for share
         )
         update outbox
         set published_at = now(), stream_seq = acknowledged.stream_seq, attempts = attempts + 1,
             retry_at = null
         from ours, unnest($1::uuid[], $2::bigint[]) as acknowledged (event_id, stream_seq)
         where outbox.event_id = acknowledged.event_id
           -- Not published, in words that no index but the primary key fits: of the one with all that
           -- waits, a plan made while that was little would read the whole for each batch.
           and outbox.stream_seq is null",
        &event_ids,
        &stream_seqs,
        holder,
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
         where outbox.event_id = failed.event_id and outbox.stream_seq is null",
        &event_ids,
        &errors,
        &retry_after as &[Option<f64>],
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// A published row, and where it was put.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    /// Which row.
    pub event_id: EventId,
    /// The message's sequence in the stream.
    pub stream_seq: i64,
    /// When the row was marked.
    #[serde(with = "time::serde::rfc3339")]
    pub published_at: OffsetDateTime,
}

/// Rows published since `since`, or as long ago as the stream keeps them, from the last one back, or
/// from before `before`.
///
/// # Errors
/// When the database cannot be asked.
pub async fn places(
    pool: &PgPool,
    since: Option<OffsetDateTime>,
    before: Option<Place>,
    limit: i64,
) -> sqlx::Result<Vec<Place>> {
    let (published_at, stream_seq) = before.map(|row| (row.published_at, row.stream_seq)).unzip();
    sqlx::query_as!(
        Place,
        r#"select event_id as "event_id: EventId", stream_seq as "stream_seq!",
                  published_at as "published_at!"
           from outbox
           -- Older ones the stream may have let go of. An hour, because the clock is another.
           where published_at >= coalesce($1, now() - make_interval(secs => $2) + interval '1 hour')
             and ($3::timestamptz is null or (published_at, stream_seq) < ($3, $4::bigint))
           order by published_at desc, stream_seq desc
           limit $5"#,
        since,
        topology::MAX_AGE.as_secs_f64(),
        published_at,
        stream_seq,
        limit,
    )
    .fetch_all(pool)
    .await
}

/// Takes back that rows were published, and says why: they wait again, before everything that is newer.
/// Returns how many; one that was published anew meanwhile is not among them.
///
/// # Errors
/// When the database cannot be asked.
pub async fn unpublish(pool: &PgPool, lost: &[Place], why: &str) -> sqlx::Result<u64> {
    let event_ids: Vec<Uuid> = lost.iter().map(|row| row.event_id.get()).collect();
    let stream_seqs: Vec<i64> = lost.iter().map(|row| row.stream_seq).collect();
    let unpublished = sqlx::query!(
        "update outbox
         set published_at = null, stream_seq = null, last_error = $3
         from unnest($1::uuid[], $2::bigint[]) as lost (event_id, stream_seq)
         where outbox.event_id = lost.event_id and outbox.stream_seq = lost.stream_seq",
        &event_ids,
        &stream_seqs,
        why,
    )
    .execute(pool)
    .await?;
    Ok(unpublished.rows_affected())
}

/// Deletes rows that were published longer than `keep` ago, oldest first; from `after` on, if that is
/// given. One that was taken back stays.
///
/// # Errors
/// When the database cannot be asked.
pub async fn delete_published(
    connection: &mut PgConnection,
    keep: Duration,
    after: Option<OffsetDateTime>,
    limit: i64,
) -> sqlx::Result<Deleted> {
    sqlx::query_as!(
        Deleted,
        r#"with old as (
               select event_id, published_at
               from outbox
               where published_at < now() - make_interval(secs => $1)
                 -- Whoever begins at the beginning walks through all that was deleted since the last vacuum.
                 and published_at >= coalesce($2::timestamptz, '-infinity')
               order by published_at
               limit $3
           ), deleted as (
               delete from outbox using old
               where outbox.event_id = old.event_id and outbox.published_at is not null
           )
           select count(*) as "count!", max(published_at) as up_to from old"#,
        keep.as_secs_f64(),
        after,
        limit,
    )
    .fetch_one(connection)
    .await
}
