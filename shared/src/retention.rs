//! Rows that have served their time: deleted in small batches, by one replica at a time.
//!
//! Guarantees: what still waits, or waits for a person, is never deleted; no batch holds its locks for
//! longer than it takes, and the pauses between them leave most of the time to others; a backlog of any
//! size is worked off. Assumes that the business key outlives the inbox row, because an event that is
//! delivered again after that is new to the inbox. Without it both tables grow for ever.

use std::time::Duration;

use anyhow::Context as _;
use sqlx::{Connection as _, PgPool};
use time::OffsetDateTime;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{inbox, outbox, telemetry::Causes};

/// Rows of one statement: some milliseconds of work.
const BATCH: i64 = 1000;

/// The pause after a batch, in times of what it took. So nobody else waits for us more than one time in
/// ten, however fast the machine is.
const PAUSE: u32 = 9;

/// How often it is looked for old rows, at least.
const LOOK: Duration = Duration::from_secs(600);

/// The advisory lock of whoever deletes ("retained").
const LOCK: i64 = i64::from_be_bytes(*b"retained");

/// What is kept in one database, and for how long.
#[derive(Debug, Clone)]
pub struct Retention {
    /// The database.
    pub pool: PgPool,
    /// How long published rows of the outbox stay: what a broker that lost data is filled again from.
    pub outbox: Duration,
    /// How long rows of the inbox stay. None: this service has none.
    pub inbox: Option<Duration>,
}

/// A batch that was deleted.
#[derive(Debug, Clone, Copy)]
pub struct Deleted {
    /// How many rows.
    pub count: i64,
    /// The age of the youngest: where the next batch begins.
    pub up_to: Option<OffsetDateTime>,
}

/// What one [`Retention::sweep`] deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Published rows of the outbox.
    pub outbox: i64,
    /// Rows of the inbox.
    pub inbox: i64,
}

impl Retention {
    /// Deletes until told to stop.
    ///
    /// # Errors
    /// Never of its own accord: whatever fails is tried again at the next look.
    pub async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let look = LOOK.min(self.outbox);
        while !stop.is_cancelled() {
            match self.sweep(&stop).await {
                Ok(Some(swept)) if swept != Swept::default() => {
                    info!(outbox = swept.outbox, inbox = swept.inbox, "old rows deleted");
                }
                Ok(_) => {}
                Err(error) => warn!("old rows stay for now: {}", Causes(&error)),
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = sleep(look) => {}
            }
        }
        Ok(())
    }

    /// Deletes everything that is old enough now. None if another replica is at it.
    ///
    /// # Errors
    /// When the database cannot be asked. What was deleted before that is.
    pub async fn sweep(&self, stop: &CancellationToken) -> anyhow::Result<Option<Swept>> {
        // Never back to the pool: the lock and the setting end with the connection, whatever happens.
        let mut connection = self.pool.acquire().await?.detach();
        let ours = sqlx::query_scalar!(r#"select pg_try_advisory_lock($1) as "ours!""#, LOCK);
        if !ours.fetch_one(&mut connection).await? {
            return Ok(None);
        }
        // What a crash undoes is deleted once more.
        sqlx::query("set synchronous_commit = off").execute(&mut connection).await?;
        let mut swept = Swept::default();
        let mut after = None;
        loop {
            let begun = Instant::now();
            let deleted =
                outbox::delete_published(&mut connection, self.outbox, after, BATCH).await?;
            swept.outbox += deleted.count;
            if deleted.count == 0 || pause(begun, stop).await.is_none() {
                break;
            }
            after = deleted.up_to;
        }
        after = None;
        while let Some(keep) = self.inbox {
            let begun = Instant::now();
            let deleted = inbox::delete_old(&mut connection, keep, after, BATCH).await?;
            swept.inbox += deleted.count;
            if deleted.count == 0 || pause(begun, stop).await.is_none() {
                break;
            }
            after = deleted.up_to;
        }
        connection.close().await.context("cannot close the connection")?;
        Ok(Some(swept))
    }
}

/// None: told to stop.
async fn pause(begun: Instant, stop: &CancellationToken) -> Option<()> {
    tokio::select! {
        () = stop.cancelled() => None,
        () = sleep(begun.elapsed() * PAUSE) => Some(()),
    }
}
