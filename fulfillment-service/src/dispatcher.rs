//! From a requested dispatch to a parcel at the carrier: an effect outside the database, made once
//! by an idempotency key.
//!
//! Guarantees: a dispatch that is committed is asked for until the carrier has taken or refused it;
//! whatever is repeated on the way (a time-out, a crash, a lease that ran out) is repeated under the
//! same key, so it is one parcel; it is announced once. No transaction is open during a call.
//! Assumes a carrier that recognises its keys ([`crate::carrier`]).
//!
//! Several lanes, each with one call at a time, so a call that hangs holds up one lane and not the
//! others. Only the first lane looks by itself; the others sleep until somebody who found work
//! wakes the next. While the carrier fails, the first lane is the probe of a circuit breaker
//! ([`crate::breaker`]), and the only one that calls.

use std::{
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use futures_util::{FutureExt as _, future::join_all};
use serde::Deserialize;
use shared::{
    backoff,
    commands::dead_letters::{Replayed, resolve_replayed},
    database,
    dead_letters::{self, Letter, Reason, settle::Kept},
    events::{Event, OrderDispatched, PAYMENT_CONFIRMED_SUBJECT},
    lifecycle::Health,
    outbox,
    telemetry::{Causes, TRACEPARENT, TraceParent},
    topology,
    values::TrackingCode,
};
use sqlx::PgPool;
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::{
    breaker::{CircuitBreaker, PAUSE_CAP},
    call::CallError,
    carrier::Carrier,
    dispatches::{self, Taken},
};

/// Who gives up on a refused parcel, in the dead letters.
pub const NAME: &str = "dispatcher";

/// Calls at the same time.
pub const LANES: usize = 16;
/// How long a carrier may take, whatever it does itself about time.
const CARRIER_LIMIT: Duration = Duration::from_secs(10);
/// How long a dispatch is in the hands of whoever took it: longer than the call, with room for the
/// transaction after it. The price of a crash.
pub const LEASE: Duration = Duration::from_secs(20);
/// Between attempts for one dispatch.
const RETRY_BASE: Duration = Duration::from_millis(500);
const RETRY_CAP: Duration = Duration::from_secs(60);
/// Between looks into a database that does not answer.
const DATABASE_RETRY: Duration = Duration::from_secs(1);

/// Calls the carrier for the dispatches of one database.
pub struct Dispatcher<C> {
    pool: PgPool,
    carrier: C,
    wakers: Wakers,
    poll_interval: Duration,
    health: Health,
    breaker: CircuitBreaker,
    superseded: AtomicU64,
}

/// So that nothing committed has to wait for a poll.
pub struct Wakers {
    /// Notified after a commit that requested dispatches.
    pub own: Arc<Notify>,
    /// To be notified after a commit that wrote to the outbox.
    pub relay: Arc<Notify>,
}

/// What one [`Dispatcher::step`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is due.
    Idle,
    /// The carrier has it, and the event is in the outbox.
    Dispatched,
    /// The carrier will not take it; a person decides.
    Refused,
    /// To be tried again.
    Postponed,
    /// Our lease had run out; somebody else has it, or had.
    Superseded,
}

impl<C: Carrier> Dispatcher<C> {
    /// A dispatcher for the rows of `pool`. `health` is how readiness learns that it is alive; an
    /// outage of the carrier is not ours, and not in it.
    pub fn new(
        pool: PgPool,
        carrier: C,
        wakers: Wakers,
        poll_interval: Duration,
        health: Health,
    ) -> Self {
        let (breaker, superseded) = Default::default();
        Self { pool, carrier, wakers, poll_interval, health, breaker, superseded }
    }

    /// Answers that came when the dispatch was in other hands, and changed nothing.
    pub fn superseded(&self) -> u64 {
        self.superseded.load(Ordering::Relaxed)
    }

    /// Dispatches until told to stop; then finishes the calls in hand.
    ///
    /// # Errors
    /// Never of its own accord: whatever fails is tried again.
    pub async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        join_all((0..LANES).map(|lane| self.lane(lane == 0, &stop))).await;
        info!("the dispatcher has stopped");
        Ok(())
    }

    async fn lane(&self, first: bool, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            let mut look_again = self.poll_interval;
            if self.breaker.allows(first) {
                // Not inside a select!: a step is never cancelled half way.
                match self.step().await {
                    Ok(Outcome::Dispatched | Outcome::Refused | Outcome::Superseded) => continue,
                    Ok(Outcome::Idle | Outcome::Postponed) => self.health.ok(),
                    Err(error) => {
                        warn!("the dispatcher cannot use its database: {}", Causes(&error));
                        self.health.failing(format!("the database fails: {}", Causes(&error)));
                        look_again = DATABASE_RETRY;
                    }
                }
            } else if first {
                self.health.ok();
            }
            let pause = self.breaker.pause();
            if let Some(pause) = pause {
                // Not longer, or readiness would take the silence of a long pause for death.
                look_again = pause.min(PAUSE_CAP);
            }
            tokio::select! {
                () = stop.cancelled() => {}
                // The permit of a notify_one that came during the step is kept.
                () = self.wakers.own.notified(), if !first || pause.is_none() => {}
                () = sleep(look_again), if first => {}
            }
        }
    }

    /// One unit of work: take a dispatch, call the carrier, write down what it said.
    ///
    /// # Errors
    /// When the database cannot be asked. Then the lease runs out, and the carrier is called again.
    pub async fn step(&self) -> anyhow::Result<Outcome> {
        let taken = dispatches::take(&self.pool, LEASE).await.context("cannot take a dispatch")?;
        let Some(taken) = taken else {
            return Ok(Outcome::Idle);
        };
        self.health.ok();
        if taken.more {
            // Let another lane look. What is committed from here on wakes one itself.
            self.wakers.own.notify_one();
        }
        // Crash point 4a, after taking and before the call: taken again when the lease runs out.
        let answer = self.call(&taken).await;
        // Crash point 4b, after the carrier's answer and before the commit: called again under the
        // same key, and given the same parcel.
        match answer {
            Ok(tracking_code) => {
                self.well();
                self.complete(&taken, &tracking_code).await
            }
            Err(CallError::Refused { reason }) => {
                self.well();
                self.give_up(&taken, &reason).await
            }
            Err(error) => {
                self.breaker.failed(error.retry_after());
                self.postpone(&taken, &error).await
            }
        }
    }

    /// The carrier answers. If it did not before, the other lanes may call again.
    fn well(&self) {
        if self.breaker.succeeded() {
            self.wakers.own.notify_one();
        }
    }

    /// Asks the carrier, within bounds: no answer, or a panic, is an unknown outcome.
    async fn call(&self, taken: &Taken) -> Result<TrackingCode, CallError> {
        let call = AssertUnwindSafe(self.carrier.book(&taken.parcel)).catch_unwind();
        match timeout(CARRIER_LIMIT, call).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(CallError::unknown("the carrier's code panicked")),
            Err(_) => Err(CallError::unknown(format!("no answer within {CARRIER_LIMIT:?}"))),
        }
    }

    /// The dispatch is done, and the event says so: **one transaction**.
    async fn complete(
        &self,
        taken: &Taken,
        tracking_code: &TrackingCode,
    ) -> anyhow::Result<Outcome> {
        let parcel = &taken.parcel;
        let mut tx = database::begin(&self.pool).await?;
        let Some(dispatched_at) = dispatches::complete(&mut tx, taken, tracking_code).await? else {
            return Ok(self.too_late(taken));
        };
        let event = Event::order_dispatched(OrderDispatched {
            dispatch_id: parcel.dispatch_id,
            order_id: parcel.order_id.clone(),
            transaction_id: parcel.transaction_id.clone(),
            tracking_code: tracking_code.clone(),
            dispatched_at,
        });
        let traceparent = TraceParent::from_header(parcel.traceparent.as_deref());
        outbox::enqueue(&mut tx, &event, &traceparent).await?;
        tx.commit().await?;
        // Crash point 4c, after the commit: the event waits for any relay.
        self.wakers.relay.notify_one();
        info!(
            order.id = %parcel.order_id, event.id = %event.id, traceparent = traceparent.as_str(),
            attempt = taken.attempt, "dispatched under {tracking_code}"
        );
        Ok(Outcome::Dispatched)
    }

    /// The carrier will never take it: set aside for a person, in one transaction.
    async fn give_up(&self, taken: &Taken, reason: &str) -> anyhow::Result<Outcome> {
        let parcel = &taken.parcel;
        let mut tx = database::begin(&self.pool).await?;
        if !dispatches::fail(&mut tx, taken, reason).await? {
            return Ok(self.too_late(taken));
        }
        let letter = Letter {
            consumer: NAME,
            stream: topology::ORDERS,
            stream_seq: taken.stream_seq.unwrap_or_default().cast_unsigned(),
            subject: PAYMENT_CONFIRMED_SUBJECT,
            headers: serde_json::json!({ (TRACEPARENT): parcel.traceparent.as_slice() }),
            body: &serde_json::to_vec(parcel)?,
            deliveries: taken.attempt.into(),
        };
        dead_letters::keep(&mut tx, &letter, Reason::Rejected, reason).await?;
        tx.commit().await?;
        error!(
            order.id = %parcel.order_id, traceparent = parcel.traceparent,
            "the carrier refuses dispatch {}: {reason}", parcel.dispatch_id
        );
        Ok(Outcome::Refused)
    }

    async fn postpone(&self, taken: &Taken, error: &CallError) -> anyhow::Result<Outcome> {
        let attempt = taken.attempt.try_into().unwrap_or(u32::MAX);
        let delay = backoff::delay(attempt, RETRY_BASE, RETRY_CAP);
        let delay = delay.max(error.retry_after().unwrap_or_default());
        warn!(
            order.id = %taken.parcel.order_id, attempt,
            "dispatch {} again in {delay:.1?}: {error}", taken.parcel.dispatch_id
        );
        if dispatches::postpone(&self.pool, taken, delay, &error.to_string()).await? {
            Ok(Outcome::Postponed)
        } else {
            Ok(self.too_late(taken))
        }
    }

    fn too_late(&self, taken: &Taken) -> Outcome {
        let total = self.superseded.fetch_add(1, Ordering::Relaxed) + 1;
        warn!(
            order.id = %taken.parcel.order_id, total,
            "the lease on dispatch {} had run out; nothing was changed", taken.parcel.dispatch_id
        );
        Outcome::Superseded
    }
}

/// Replays a dead letter of ours: the carrier is asked again, under the same key, by any dispatcher.
/// If it refuses again, there will be another letter.
pub async fn request_again(
    pool: &PgPool,
    letter: &Kept,
    dry_run: bool,
) -> anyhow::Result<Replayed> {
    let parcel: Key = match serde_json::from_slice(&letter.origin.message.payload) {
        Ok(parcel) => parcel,
        Err(error) => {
            let error = format!("this is no parcel: {error}");
            return Ok(Replayed::Failed { reason: None, error });
        }
    };
    if dry_run {
        return Ok(Replayed::Readable);
    }
    // **One transaction**: a refusal that comes at once must find the letter settled.
    let mut tx = database::begin(pool).await?;
    let how = if dispatches::request_again(&mut tx, parcel.dispatch_id).await? {
        "the carrier is asked again"
    } else {
        "the dispatch is not refused any more"
    };
    resolve_replayed(&mut tx, letter.dead_letter_id, how).await?;
    tx.commit().await?;
    Ok(Replayed::Settled(how.to_owned()))
}

/// What names a parcel.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Key {
    dispatch_id: Uuid,
}
