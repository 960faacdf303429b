//! From the outbox to the broker: the only place in the workspace that publishes an event.
//!
//! Guarantees: a row is marked only after the broker has acknowledged it, so every committed event
//! is published at least once; events of one aggregate reach the stream in the order of their
//! commits. Assumes nothing about being alone: the lease ([`crate::lease`]) only saves work. No
//! transaction is open while the network is waited for.
//!
//! Throughput comes from publishing up to a batch at once, order from publishing at most one of an
//! aggregate at a time: the batch goes out in waves, and an aggregate whose row failed sits out the
//! rest of them.

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_nats::{
    HeaderMap,
    jetstream::{context::PublishError, message::PublishMessage},
};
use futures_util::future::join_all;
use sqlx::PgPool;
use tokio::{sync::Notify, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};
use uuid::Uuid;

use crate::{
    backoff, events, lease,
    lifecycle::Health,
    nats::Nats,
    outbox::{self, Failed, Published, Row},
    publish_error::{Failure, classify},
    telemetry::TRACEPARENT,
};

const RETRY_BASE: Duration = Duration::from_millis(100);
/// Also the longest that a row waits once the broker is well again.
const RETRY_CAP: Duration = Duration::from_secs(5);

/// How often a relay without a connection looks for one.
const RECONNECT_LOOK: Duration = Duration::from_millis(200);
const STUCK_BEFORE_NOT_READY: u32 = 2;

/// Publishes the outbox of one database to one stream.
pub struct Relay {
    pool: PgPool,
    nats: Nats,
    stream: &'static str,
    batch: usize,
    poll_interval: Duration,
    holder: Uuid,
    wake: Arc<Notify>,
    health: Health,
}

/// What one [`Relay::step`] did.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Rows were taken; there may be more.
    Worked {
        /// Acknowledged by the broker, and marked.
        published: usize,
        /// To be tried again, or parked.
        failed: usize,
    },
    /// Nothing to publish.
    Idle,
    /// Another relay holds the lease.
    Standby,
    /// No connection to the broker; no row was taken.
    Disconnected,
    /// The broker refused everything, or a row belongs into another stream: publishing more would
    /// only repeat it.
    Stuck(String),
}

impl Relay {
    /// A relay for the rows of `pool`. `health` is how readiness learns that it is alive.
    pub fn new(
        pool: PgPool,
        nats: Nats,
        stream: &'static str,
        batch: usize,
        poll_interval: Duration,
        health: Health,
    ) -> Self {
        let (holder, wake) = (Uuid::now_v7(), Arc::default());
        Self { pool, nats, stream, batch, poll_interval, holder, wake, health }
    }

    /// Notify it after a commit that wrote to the outbox, so that the row need not wait for a poll.
    pub fn waker(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Publishes until told to stop; then finishes what is in hand.
    ///
    /// # Errors
    /// Never of its own accord: whatever fails is tried again, and readiness says so.
    pub async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let mut failures = 0;
        while !stop.is_cancelled() {
            // Not inside a select!: a step is never cancelled half way.
            let (pause, wakeable) = match self.step().await {
                Ok(Outcome::Worked { published, failed }) => {
                    debug!(published, failed, "relayed");
                    failures = 0;
                    self.health.ok();
                    continue;
                }
                Ok(Outcome::Idle | Outcome::Standby) => {
                    failures = 0;
                    self.health.ok();
                    (self.poll_interval, true)
                }
                Ok(Outcome::Disconnected) => {
                    // The check "nats" says it already. No wake-up: rows cannot go anywhere.
                    self.health.ok();
                    (RECONNECT_LOOK, false)
                }
                Ok(Outcome::Stuck(reason)) => {
                    failures += 1;
                    warn!(attempt = failures, "the relay is stuck: {reason}");
                    // Two bad rows can make one wave fail; a broker that is gone goes on failing.
                    if failures > STUCK_BEFORE_NOT_READY {
                        self.health.failing(format!("nothing can be published: {reason}"));
                    } else {
                        self.health.ok();
                    }
                    (backoff::delay(failures, RETRY_BASE, RETRY_CAP), false)
                }
                Err(error) => {
                    failures += 1;
                    warn!(attempt = failures, "the relay cannot use its database: {error}");
                    self.health.failing(format!("the database fails: {error}"));
                    (backoff::delay(failures, RETRY_BASE, RETRY_CAP), false)
                }
            };
            // The permit of a notify_one that came during the step is kept, so a row committed
            // behind the step's back is not left for the poll.
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.wake.notified(), if wakeable => {}
                () = sleep(pause) => {}
            }
        }
        // So that another replica need not wait for the lease to run out.
        if let Err(error) = lease::release(&self.pool, self.holder).await {
            debug!("the lease was not released: {error}");
        }
        info!("the relay has stopped");
        Ok(())
    }

    /// One unit of work: look, take the lease, publish a batch, mark it.
    ///
    /// # Errors
    /// When the database cannot be asked. Whatever was published and not marked is published again.
    pub async fn step(&self) -> sqlx::Result<Outcome> {
        // Without a connection a publish is queued, reported as timed out, and sent long after.
        if !self.nats.connected() {
            return Ok(Outcome::Disconnected);
        }
        // Looking first, without the lease, is what lets replicas hand over without a poll: a
        // relay that finds the lease taken may go to sleep, because its holder looks once more
        // after giving it back. It also keeps an idle relay from writing.
        if outbox::pending(&self.pool, 1).await?.is_empty() {
            return Ok(Outcome::Idle);
        }
        if !lease::acquire(&self.pool, self.holder).await? {
            return Ok(Outcome::Standby);
        }
        let limit = self.batch.try_into().unwrap_or(i64::MAX);
        let rows = outbox::pending(&self.pool, limit).await?;
        let drained = rows.len() < self.batch;
        let sent = self.publish(rows).await;
        // Crash point 2, after publish and before mark: the rows are published again under the same
        // message ids. The broker drops them inside its window, the inbox beyond it.
        if !sent.published.is_empty() {
            let marked = outbox::mark_published(&self.pool, &sent.published).await?;
            if marked < sent.published.len() as u64 {
                info!(marked, published = sent.published.len(), "another relay was at work too");
            }
        }
        if !sent.failed.is_empty() {
            outbox::mark_failed(&self.pool, &sent.failed).await?;
        }
        if drained || sent.stuck.is_some() {
            lease::release(&self.pool, self.holder).await?;
        }
        Ok(match sent.stuck {
            Some(reason) => Outcome::Stuck(reason),
            None => Outcome::Worked { published: sent.published.len(), failed: sent.failed.len() },
        })
    }

    async fn publish(&self, rows: Vec<Row>) -> Sent {
        let mut sent = Sent::default();
        let mut waiting = rows;
        let mut failed_aggregates = HashSet::new();
        while !waiting.is_empty() {
            // A wave: the first waiting row of every aggregate.
            let mut aggregates = HashSet::new();
            let (wave, rest): (Vec<Row>, Vec<Row>) = waiting
                .into_iter()
                .filter(|row| !failed_aggregates.contains(&row.aggregate_id))
                .partition(|row| aggregates.insert(row.aggregate_id.clone()));
            waiting = rest;
            let before = (sent.published.len(), sent.refused);
            for (row, result) in join_all(wave.into_iter().map(|row| self.publish_one(row))).await {
                match result {
                    Ok(stream_seq) => {
                        sent.published.push(Published { event_id: row.event_id, stream_seq });
                    }
                    Err(error) => {
                        sent.note_failure(&row, &error);
                        failed_aggregates.insert(row.aggregate_id);
                    }
                }
            }
            // One row that fails alone is its own problem, and waits alone. Several of which none
            // arrives are the broker's.
            let (published, refused) = (sent.published.len() - before.0, sent.refused - before.1);
            if published == 0 && refused > 1 && sent.stuck.is_none() {
                sent.stuck = sent.failed.last().map(|row| row.error.clone());
            }
            if sent.stuck.is_some() {
                break;
            }
        }
        sent
    }

    #[expect(clippy::disallowed_methods, reason = "the relay is the only publisher")]
    async fn publish_one(&self, mut row: Row) -> (Row, Result<u64, PublishError>) {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", events::CONTENT_TYPE);
        if let Some(traceparent) = &row.traceparent {
            headers.insert(TRACEPARENT, traceparent.as_str());
        }
        // headers() replaces the whole map, so it comes before those that add to it.
        let message = PublishMessage::build()
            .headers(headers)
            .payload(std::mem::take(&mut row.payload).into())
            .message_id(row.event_id.to_string())
            .expected_stream(self.stream);
        let context = self.nats.jetstream();
        // Two awaits: the first only hands the message to the client, the second is the broker's
        // word. `duplicate: true` in it is success, an earlier attempt's.
        let acknowledged = match context.send_publish(row.subject.clone(), message).await {
            Ok(sent) => sent.await,
            Err(error) => Err(error),
        };
        let result = acknowledged.map(|ack| {
            if ack.duplicate {
                info!(event.id = %row.event_id, "published again; the broker had it already");
            }
            ack.sequence
        });
        (row, result)
    }
}

#[derive(Default)]
struct Sent {
    published: Vec<Published>,
    failed: Vec<Failed>,
    /// Those among the failed that may work later.
    refused: usize,
    /// Why it makes no sense to go on now.
    stuck: Option<String>,
}

impl Sent {
    fn note_failure(&mut self, row: &Row, error: &PublishError) {
        let attempt = u32::try_from(row.attempts).unwrap_or_default() + 1;
        let retry_after = match classify(error) {
            Failure::Retry => {
                self.refused += 1;
                Some(backoff::delay(attempt, RETRY_BASE, RETRY_CAP))
            }
            Failure::Park => {
                error!(event.id = %row.event_id, "parked, it can never be published: {error}");
                None
            }
            Failure::Halt => {
                error!(event.id = %row.event_id, subject = row.subject, "belongs to another stream: {error}");
                self.stuck = Some(format!("subject {}: {error}", row.subject));
                Some(RETRY_CAP)
            }
        };
        self.failed.push(Failed {
            event_id: row.event_id,
            error: error.to_string(),
            retry_after: retry_after.map(|wait| wait.as_secs_f64()),
        });
    }
}
