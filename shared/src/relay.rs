//! From the outbox to the broker: the only place in the workspace that publishes an event.
//!
//! Guarantees: a row is marked only after the broker has acknowledged it, so every committed event
//! is published at least once; events of one aggregate reach the stream in the order of their
//! commits; what the broker acknowledged and lost is published again, before anything new. Assumes
//! nothing about being alone: the lease ([`crate::lease`]) only saves work. No transaction is open while
//! the network is waited for.

mod publish;

use std::{sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::{sync::Notify, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::{audit, backoff, lease, lifecycle::Health, nats::Nats, outbox, telemetry::Causes};

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
    /// The stream had lost events. They wait again, and nothing else goes before them.
    Refilled(u64),
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
                Ok(Outcome::Refilled(lost)) => {
                    warn!(lost, "{} had lost events; they are published again", self.stream);
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

    /// One unit of work: look, take the lease, compare the stream with what it has acknowledged, publish
    /// a batch, mark it.
    ///
    /// # Errors
    /// When the database cannot be asked. Whatever was published and not marked is published again.
    pub async fn step(&self) -> sqlx::Result<Outcome> {
        // Without a connection a publish is queued, reported as timed out, and sent long after.
        if !self.nats.connected() {
            return Ok(Outcome::Disconnected);
        }
        let connection = self.nats.connection();
        // Looking first, without the lease, is what lets replicas hand over without a poll: a
        // relay that finds the lease taken may go to sleep, because its holder looks once more
        // after giving it back. It also keeps an idle relay from writing.
        if outbox::pending(&self.pool, 1).await?.is_empty() {
            // What a broker has lost may be waited for, even if nothing new ever happens.
            match self.has_lost().await? {
                Ok(false) => return Ok(Outcome::Idle),
                Ok(true) => {}
                Err(error) => return Ok(stuck(&error)),
            }
        }
        if !lease::acquire(&self.pool, self.holder).await? {
            return Ok(Outcome::Standby);
        }
        let outcome = match self.has_lost().await? {
            Ok(false) => self.relay_batch(connection).await?,
            Ok(true) => self.refill().await?,
            Err(error) => stuck(&error),
        };
        if matches!(outcome, Outcome::Stuck(_)) {
            // Perhaps another replica has a better connection.
            lease::release(&self.pool, self.holder).await?;
        }
        Ok(outcome)
    }

    async fn relay_batch(&self, connection: u64) -> sqlx::Result<Outcome> {
        let limit = self.batch.try_into().unwrap_or(i64::MAX);
        let rows = outbox::pending(&self.pool, limit).await?;
        let drained = rows.len() < self.batch;
        let mut sent = publish::publish(&self.nats, self.stream, rows).await;
        // Crash point 2, after publish and before mark: the rows are published again under the same
        // message ids. The broker drops them inside its window, the inbox beyond it.
        if self.nats.connection() != connection {
            // The server came back, perhaps without what it had acknowledged a moment before, and of
            // rows marked now the next look would see the last one only.
            info!("connected anew while publishing; what was acknowledged is published again");
            sent.published.clear();
        }
        if !sent.published.is_empty() {
            let marked = outbox::mark_published(&self.pool, self.holder, &sent.published).await?;
            if marked < sent.published.len() as u64 {
                info!(marked, published = sent.published.len(), "another relay was at work too");
            }
        }
        if !sent.failed.is_empty() {
            outbox::mark_failed(&self.pool, &sent.failed).await?;
        }
        if drained {
            lease::release(&self.pool, self.holder).await?;
        }
        Ok(match sent.stuck {
            Some(reason) => Outcome::Stuck(reason),
            None => Outcome::Worked { published: sent.published.len(), failed: sent.failed.len() },
        })
    }

    /// Whether the broker is another one, or went back in time: then it does not have the event that was
    /// published last.
    async fn has_lost(&self) -> sqlx::Result<anyhow::Result<bool>> {
        let last = outbox::places(&self.pool, None, None, 1).await?;
        let lost = audit::lost(&self.nats, self.stream, &last).await;
        Ok(lost.map(|lost| !lost.is_empty()))
    }

    /// Takes back, from the last one on, that events were published which the stream has lost.
    async fn refill(&self) -> sqlx::Result<Outcome> {
        warn!("stream {} has lost events that it had acknowledged", self.stream);
        let (mut taken_back, mut before) = (0, None);
        loop {
            let page = outbox::places(&self.pool, None, before, audit::PAGE.into()).await?;
            let lost = match audit::lost(&self.nats, self.stream, &page).await {
                Ok(lost) => lost,
                Err(error) => return Ok(stuck(&error)),
            };
            // Crash point 2b, half way: the next look finds that the last of the rest is lost too.
            taken_back += outbox::unpublish(&self.pool, &lost, "lost by the stream").await?;
            // A broker that went back lost everything after some event, and nothing before it.
            if lost.is_empty() || !lease::acquire(&self.pool, self.holder).await? {
                return Ok(Outcome::Refilled(taken_back));
            }
            before = page.last().copied();
        }
    }
}

fn stuck(error: &anyhow::Error) -> Outcome {
    Outcome::Stuck(Causes(error).to_string())
}
