//! Which events are new: the row that makes an effect happen once per event id.
//!
//! Guarantees: of any number of transactions that claim the same event for the same consumer, one
//! gets it, and only if it commits. Assumes that the effect is in the same transaction as the claim.
//! Without it every redelivery (a lost ack, a crash after commit, a relay that published twice) is
//! applied again.

use std::{collections::HashSet, time::Duration};

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{events::EventId, retention::Deleted};

/// Claims `event_ids` for `consumer` and returns those that nobody had claimed before.
///
/// A concurrent claim of the same id is waited for: if its transaction rolls back, ours gets it.
///
/// # Errors
/// When the database refuses; the transaction is then of no more use.
pub async fn claim(
    tx: &mut PgConnection,
    consumer: &str,
    event_ids: impl IntoIterator<Item = EventId>,
) -> sqlx::Result<HashSet<EventId>> {
    let event_ids: Vec<Uuid> = event_ids.into_iter().map(EventId::get).collect();
    let fresh = sqlx::query_scalar!(
        r#"insert into processed_events (consumer, event_id)
           select $1, event_id from unnest($2::uuid[]) as delivered (event_id)
           -- in one order everywhere, so that two batches with common ids cannot deadlock
           order by event_id
           on conflict on constraint one_claim_per_event do nothing
           returning event_id"#,
        consumer,
        &event_ids,
    )
    .fetch_all(tx)
    .await?;
    Ok(fresh.into_iter().map(EventId::from).collect())
}

/// Gives a claim back within the transaction that made them: the event was not applied after all,
/// and whoever replays it later must not be told that it was.
///
/// # Errors
/// When the database refuses; the transaction is then of no more use.
pub async fn unclaim(tx: &mut PgConnection, consumer: &str, event_id: EventId) -> sqlx::Result<()> {
    sqlx::query!(
        "delete from processed_events where consumer = $1 and event_id = $2",
        consumer,
        event_id.get(),
    )
    .execute(tx)
    .await
    .map(|_| ())
}

/// Deletes claims that were made longer than `keep` ago, oldest first; from `after` on, if that is given.
///
/// # Errors
/// When the database cannot be asked.
pub async fn delete_old(
    connection: &mut PgConnection,
    keep: Duration,
    after: Option<OffsetDateTime>,
    limit: i64,
) -> sqlx::Result<Deleted> {
    sqlx::query_as!(
        Deleted,
        r#"with old as (
               select consumer, event_id, processed_at
               from processed_events
               where processed_at < now() - make_interval(secs => $1)
                 -- Whoever begins at the beginning walks through all that was deleted since the last vacuum.
                 and processed_at >= coalesce($2::timestamptz, '-infinity')
               order by processed_at
               limit $3
           ), deleted as (
               delete from processed_events using old
               where processed_events.consumer = old.consumer
                 and processed_events.event_id = old.event_id
           )
           select count(*) as "count!", max(processed_at) as up_to from old"#,
        keep.as_secs_f64(),
        after,
        limit,
    )
    .fetch_one(connection)
    .await
}
