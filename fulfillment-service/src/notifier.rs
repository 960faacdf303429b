//! Tells the outside that an order is on its way: an effect that no database holds.
//!
//! Guarantees: a notice is sent for every dispatched order, as a rule once. A crash between notice
//! and mark, or a lease that runs out, sends it again; the receiver's idempotency key (the dispatch)
//! is what makes that harmless, and the claim ([`shared::claim`]) what makes it rare.

use std::time::Duration;

use anyhow::anyhow;
use futures_util::future::join_all;
use shared::{
    claim::{Claim, ClaimError, Claimed, Claims},
    dead_letters::{self, Reason},
    events::{ORDER_DISPATCHED, OrderDispatched},
    handler::{Delivery, Duplicate, Handler, Verdict},
    nats::Nats,
    telemetry::Causes,
    topology,
};
use sqlx::PgPool;
use tracing::{info, warn};

use crate::call::{CALL_LIMIT, CallError, Caller, Endpoint};

/// The durable that brings what was dispatched.
pub const CONSUMER: &str = "notifications";

/// Notices under way at the same time. All of a batch are, so a batch takes about as long as one
/// notice, which is well inside the acknowledgement time.
pub const BATCH: usize = 16;

/// How long a notice is in the hands of one delivery: longer than the call. Shorter than the
/// acknowledgement time, so that after a crash the next delivery finds it free.
const LEASE: Duration = Duration::from_secs(15);
const _: () = assert!(CALL_LIMIT.as_secs() < LEASE.as_secs());
const _: () = assert!(LEASE.as_secs() < topology::ACK_WAIT.as_secs());

/// How long it is known that a notice was sent: longer than its event can come again.
const KEEP: Duration = Duration::from_secs(topology::MAX_AGE.as_secs() + 24 * 3600);

/// The handler of the durable [`CONSUMER`].
pub struct Notifier {
    /// What was sent, and who is at it.
    pub claims: Claims,
    /// Where notices go; none: into the log.
    pub receiver: Option<Caller>,
    /// For the dead letters, and nothing else.
    pub pool: PgPool,
}

impl Handler for Notifier {
    const EVENT_TYPE: &'static str = ORDER_DISPATCHED;
    type Data = OrderDispatched;

    async fn handle(&self, batch: &[Delivery<OrderDispatched>]) -> anyhow::Result<Vec<Verdict>> {
        let mut told = join_all(batch.iter().map(|delivery| self.notify(delivery))).await;
        // If none came through, what they need is away. If some did, it is something about the
        // others, and those come back one by one.
        let none = !told.iter().any(|told| matches!(told, Ok(Verdict::Done)));
        if none && let Some(away) = told.iter().position(|told| told.as_ref().is_err_and(is_away)) {
            return Err(told.swap_remove(away).expect_err("it was one"));
        }
        Ok(told.into_iter().map(|told| told.unwrap_or_else(Verdict::Retry)).collect())
    }

    fn is_outage(&self, error: &anyhow::Error) -> bool {
        is_away(error)
    }
}

/// Whether the receiver cannot be reached, or takes nothing; or nobody can say who is at it.
fn is_away(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(CallError::Unavailable { .. })) || error.is::<ClaimError>()
}

impl Notifier {
    /// One that tells `receiver`, or the log.
    pub fn new(pool: PgPool, nats: Nats, receiver: Option<Endpoint>) -> anyhow::Result<Self> {
        let claims = Claims::new(nats, topology::NOTICES);
        Ok(Self { claims, receiver: receiver.map(Caller::new).transpose()?, pool })
    }

    async fn notify(&self, delivery: &Delivery<OrderDispatched>) -> anyhow::Result<Verdict> {
        let order_id = &delivery.event.data.order_id;
        let claim = match self.claims.claim(order_id.as_str(), LEASE).await? {
            Claimed::Ours(claim) => claim,
            Claimed::Done => return Ok(Verdict::Duplicate(Duplicate::Claim)),
            Claimed::Held => {
                let busy = anyhow!("another delivery is telling about order {order_id}");
                return Ok(Verdict::Retry(busy));
            }
        };
        // Crash point 6a, after the claim and before the notice: the claim runs out, the event is
        // delivered again, the notice is sent then.
        match self.send(delivery).await {
            Ok(()) => {
                // Crash point 6b, after the notice and before the mark: sent once more, under the
                // same idempotency key.
                self.mark(delivery, claim).await;
                // Crash point 6c, after the mark and before the ack: delivered again, recognised.
                Ok(Verdict::Done)
            }
            Err(error) => {
                if let Err(error) = self.claims.release(claim).await {
                    warn!(order.id = %order_id, "the claim has to run out: {}", Causes(&error.into()));
                }
                let CallError::Refused { reason } = &error else { return Err(error.into()) };
                let mut connection = self.pool.acquire().await?;
                let origin = &delivery.origin;
                let stored =
                    dead_letters::store(&mut connection, origin, Reason::Rejected, reason).await?;
                Ok(Verdict::Reject(stored))
            }
        }
    }

    async fn send(&self, delivery: &Delivery<OrderDispatched>) -> Result<(), CallError> {
        let notice = &delivery.event.data;
        if let Some(receiver) = &self.receiver {
            receiver.post(notice.dispatch_id, delivery.traceparent(), notice).await?;
        }
        info!(
            order.id = %notice.order_id, event.id = %delivery.event.id,
            traceparent = delivery.traceparent(), "notice: on its way as {}", notice.tracking_code
        );
        Ok(())
    }

    /// The notice is sent either way. Without the mark it may be sent again, so nobody waits for it.
    async fn mark(&self, delivery: &Delivery<OrderDispatched>, claim: Claim) {
        let order_id = &delivery.event.data.order_id;
        match self.claims.done(claim, KEEP).await {
            Ok(true) => {}
            Ok(false) => {
                warn!(order.id = %order_id, "the lease ran out; the notice may be sent again");
            }
            Err(error) => {
                warn!(order.id = %order_id, "the notice may be sent again: {}", Causes(&error.into()));
            }
        }
    }
}
