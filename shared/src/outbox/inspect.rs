//! What a person asks of an outbox, and the one thing that only a person may decide.

use futures_util::Stream;
use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

/// How an outbox stands.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Rows to be published.
    pub pending: i64,
    /// Those among them whose last attempt failed, and who wait for the next.
    pub retrying: i64,
    /// Rows that a person has to look at.
    pub parked: i64,
    /// Rows the broker has acknowledged.
    pub published: i64,
    /// Since when the oldest pending row has been waiting, in seconds.
    pub oldest_pending_seconds: Option<f64>,
    /// The highest place in the stream that was acknowledged.
    pub last_place: Option<i64>,
    /// Whether a relay is at work just now.
    pub relaying: bool,
}

/// Counts. Reads the whole table, which is for people, not for probes.
///
/// # Errors
/// When the database cannot be asked.
pub async fn status(pool: &PgPool) -> sqlx::Result<Status> {
    sqlx::query_as!(
        Status,
        r#"select count(*) filter (where published_at is null and parked_at is null) as "pending!",
                  count(*) filter (where published_at is null and retry_at > now()) as "retrying!",
                  count(parked_at) as "parked!",
                  count(published_at) as "published!",
                  extract(epoch from now() - min(created_at)
                      filter (where published_at is null and parked_at is null))::float8
                      as oldest_pending_seconds,
                  max(stream_seq) as last_place,
                  (select expires_at > now() from relay_lease) as "relaying!"
           from outbox"#,
    )
    .fetch_one(pool)
    .await
}

/// A row that is not published.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// Its event.
    pub event_id: Uuid,
    /// What the event is about.
    pub aggregate_id: String,
    /// Where it goes.
    pub subject: String,
    /// When it was written.
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// Attempts so far.
    pub attempts: i32,
    /// When it was parked, if it was.
    #[serde(with = "time::serde::rfc3339::option")]
    pub parked_at: Option<OffsetDateTime>,
    /// What the last attempt came to.
    pub last_error: Option<String>,
}

/// Rows that are not published, oldest first; or only those that are parked.
pub fn waiting(pool: &PgPool, only_parked: bool) -> impl Stream<Item = sqlx::Result<Waiting>> {
    sqlx::query_as!(
        Waiting,
        "select event_id, aggregate_id, subject, created_at, attempts, parked_at, last_error
         from outbox
         where published_at is null and (parked_at is not null or not $1)
         order by seq",
        only_parked,
    )
    .fetch(pool)
}

/// Has a parked row tried again. False if there is none with this id.
///
/// # Errors
/// When the database cannot be asked.
pub async fn unpark(pool: &PgPool, event_id: Uuid) -> sqlx::Result<bool> {
    let unparked = sqlx::query!(
        "update outbox set parked_at = null where event_id = $1 and parked_at is not null",
        event_id,
    );
    Ok(unparked.execute(pool).await?.rows_affected() == 1)
}
