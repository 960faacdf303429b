//! From the outbox to the broker: the only place in the workspace that publishes an event.
//!
//! Guarantees: a row is marked only after the broker has acknowledged it, so every committed event
//! is published at least once; events of one aggregate reach the stream in the order of their
//! commits; what the broker acknowledged and lost is published again, before anything new. Assumes
//! nothing about being alone: the lease ([`crate::lease`]) only saves work. No transaction is open while
//! the network is waited for.

mod publish;

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use sqlx::PgPool;
use tokio::{sync::Notify, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use uuid::Uuid;

use self::publish::Sent;
use crate::{
    audit, backoff, lease,
    lifecycle::Health,
    nats::Nats,
    outbox::{self, Row},
    telemetry::Causes,
};

const RETRY_BASE: Duration = Duration::from_millis(100);
/// Also the longest that a row waits once the broker is well again.
const RETRY_CAP: Duration = Duration::from_secs(5);

/// Of one step: after so many, the lease is renewed and the stream looked at again.
const BATCHES: usize = 10;

/// How long a relay whose work another one does lets wake-ups pile up: under load there is one for each
/// commit, and the other looks once more anyway.
const HAND_OVER: Duration = Duration::from_millis(5);

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

/// Why a step is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// Perhaps there is something, or something was lost.
    Look,
    /// There was something a moment ago, perhaps there is more.
    Again,
    /// Somebody has just committed a row: no need to look.
    Commit,
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
        let (mut failures, mut cause) = (0, Cause::Look);
        while !stop.is_cancelled() {
            // Not inside a select!: a step is never cancelled half way.
            let done = self.step_after(cause).await;
            cause = Cause::Look;
            let (pause, wakeable) = match done {
                Ok(Outcome::Worked { published, failed }) => {
                    debug!(published, failed, "relayed");
                    failures = 0;
                    self.health.ok();
                    // What was committed meanwhile is seen by the next look.
                    self.wake.notified().now_or_never();
                    cause = Cause::Again;
                    continue;
                }
                Ok(Outcome::Refilled(lost)) => {
                    warn!(lost, "{} had lost events; they are published again", self.stream);
                    self.health.ok();
                    continue;
                }
                Ok(Outcome::Idle) => {
                    failures = 0;
                    self.health.ok();
                    (self.poll_interval, true)
                }
                Ok(Outcome::Standby) => {
                    failures = 0;
                    self.health.ok();
                    sleep(HAND_OVER).await;
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
                () = self.wake.notified(), if wakeable => cause = Cause::Commit,
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

    /// One unit of work: look, and if something waits or was lost, take the lease, publish some batches,
    /// mark them.
    ///
    /// # Errors
    /// When the database cannot be asked. Whatever was published and not marked is published again.
    pub async fn step(&self) -> sqlx::Result<Outcome> {
        self.step_after(Cause::Look).await
    }

    async fn step_after(&self, cause: Cause) -> sqlx::Result<Outcome> {
        // Without a connection a publish is queued, reported as timed out, and sent long after.
        if !self.nats.connected() {
            return Ok(Outcome::Disconnected);
        }
        let connection = self.nats.connection();
        // Looking first, without the lease, is what lets replicas hand over without a poll: a
        // relay that finds the lease taken may go to sleep, because its holder looks once more
        // after giving it back. It also keeps an idle relay from writing.
        if cause != Cause::Commit && outbox::pending(&self.pool, 0, 1).await?.is_empty() {
            if cause == Cause::Again {
                return Ok(Outcome::Idle);
            }
            // What a broker has lost may be waited for, even if nothing new ever happens.
            match self.has_lost().await? {
                Ok(false) => return Ok(Outcome::Idle),
                Ok(true) => {}
                Err(error) => return Ok(stuck(&error)),
            }
        }
        let rows = async {
            let ours = lease::acquire(&self.pool, self.holder).await?;
            if ours { self.pending(0).await.map(Some) } else { Ok(None) }
        };
        let (rows, lost) = tokio::join!(rows, self.has_lost());
        let Some(rows) = rows? else { return Ok(Outcome::Standby) };
        let outcome = match lost? {
            Ok(false) => self.relay(rows, connection).await?,
            Ok(true) => self.refill().await?,
            Err(error) => stuck(&error),
        };
        if matches!(outcome, Outcome::Stuck(_)) {
            // Perhaps another replica has a better connection.
            lease::release(&self.pool, self.holder).await?;
        }
        Ok(outcome)
    }

    /// Publishes `rows` and what is behind them. While one batch is published, the one before it is
    /// marked and the one after it read, so that broker and database work at the same time.
    async fn relay(&self, mut rows: Vec<Row>, connection: u64) -> sqlx::Result<Outcome> {
        let (mut published, mut failed) = (0, 0);
        let mut sent = Sent::default();
        // At most one row of an aggregate is in flight, so one that turns up again in a later batch
        // waits for the next step, and so does everything behind it.
        let mut aggregates = HashSet::new();
        let mut drained = false;
        for batch in 1..=BATCHES {
            drained = rows.len() < self.batch;
            let more = !drained && batch < BATCHES;
            let after = rows.last().map_or(0, |row| row.seq);
            rows.retain(|row| !aggregates.contains(&row.aggregate_id));
            aggregates.extend(rows.iter().map(|row| row.aggregate_id.clone()));
            let (now_sent, marked, next, lost) = tokio::join!(
                publish::publish(&self.nats, self.stream, rows),
                self.mark(sent, connection),
                async { if more { self.pending(after).await } else { Ok(Vec::new()) } },
                async { if batch > 1 { self.has_lost().await } else { Ok(Ok(false)) } },
            );
            // Crash point 2, after publish and before mark: the rows are published again under the same
            // message ids. The broker drops them inside its window, the inbox beyond it.
            let marked = marked?;
            (published, failed) = (published + marked.0, failed + marked.1);
            (sent, rows) = (now_sent, next?);
            if !matches!(lost?, Ok(false)) {
                // A row marked now would be found in its place, and hide that others are not.
                sent.published.clear();
                break;
            }
            if rows.is_empty() || sent.stuck.is_some() {
                break;
            }
        }
        let stuck = sent.stuck.take();
        let marked = self.mark(sent, connection).await?;
        if drained {
            lease::release(&self.pool, self.holder).await?;
        }
        Ok(match stuck {
            Some(reason) => Outcome::Stuck(reason),
            None => Outcome::Worked { published: published + marked.0, failed: failed + marked.1 },
        })
    }

    async fn pending(&self, after: i64) -> sqlx::Result<Vec<Row>> {
        outbox::pending(&self.pool, after, self.batch.try_into().unwrap_or(i64::MAX)).await
    }

    /// Writes down what became of a batch. Returns how many rows were published, and how many not.
    async fn mark(&self, mut sent: Sent, connection: u64) -> sqlx::Result<(usize, usize)> {
        if self.nats.connection() != connection && !sent.published.is_empty() {
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
        Ok((sent.published.len(), sent.failed.len()))
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
