//! What a service plugs into the [consumer](crate::consumer): a business step, and its verdicts.
//!
//! The types keep a handler honest: there is a verdict for each delivery, and only a message that was
//! written to the dead letters can be rejected.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use serde::de::DeserializeOwned;

use crate::{
    dead_letters::{Origin, Stored},
    events::Received,
    telemetry::{TRACEPARENT, TraceParent},
};

/// A business step. It owns its transaction: returning verdicts means that what they say is
/// committed.
pub trait Handler: Send + Sync + 'static {
    /// The one event type it understands.
    const EVENT_TYPE: &'static str;

    /// The data of that type.
    type Data: DeserializeOwned + Send + Sync;

    /// Applies a batch and returns a verdict for each delivery, in order.
    ///
    /// # Errors
    /// Nothing was applied, or what was is recognised when it is asked again. The consumer finds
    /// out whether something it needs is away (and waits), or one delivery is at fault (and asks
    /// again for each alone).
    fn handle(
        &self,
        batch: &[Delivery<Self::Data>],
    ) -> impl Future<Output = anyhow::Result<Vec<Verdict>>> + Send;

    /// Told of each delivery that was applied, after the commit: for the log.
    fn applied(&self, _delivery: &Delivery<Self::Data>) {}

    /// Whether an error says that something besides the database is away, whatever it is asked.
    /// Then the consumer waits with what it has in hand, as it does for the database.
    fn is_outage(&self, _error: &anyhow::Error) -> bool {
        false
    }
}

/// An event, and the message it came in.
#[derive(Debug)]
pub struct Delivery<D> {
    /// What it says.
    pub event: Received<D>,
    /// Where it came from.
    pub origin: Origin,
}

impl<D> Delivery<D> {
    /// The trace of the request that caused the event. None when there is none that can be read.
    pub fn traceparent(&self) -> Option<&str> {
        let text = self.origin.message.headers.as_ref()?.get(TRACEPARENT)?.as_str();
        TraceParent::is_valid(text).then_some(text)
    }
}

/// What becomes of a delivery.
#[derive(Debug)]
pub enum Verdict {
    /// Applied now: ack.
    Done,
    /// Applied before: ack.
    Duplicate(Duplicate),
    /// Not applied, may work later: delayed nak.
    Retry(anyhow::Error),
    /// Never to be applied, and kept in the dead letters: terminate.
    Reject(Stored),
}

/// Which guard recognised a duplicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duplicate {
    /// The inbox: this event was applied.
    Event,
    /// The business key: this payment was applied, under another event id.
    Transaction,
    /// The state itself: it says already what the event would make of it.
    State,
    /// A claim: the effect was marked as done.
    Claim,
}

/// Asks a handler. A panic is a failure like any other: its transaction is rolled back, and the message
/// that causes it ends in the dead letters, not the process.
///
/// # Errors
/// The handler's.
pub async fn guarded<H: Handler>(
    handler: &H,
    deliveries: &[Delivery<H::Data>],
) -> anyhow::Result<Vec<Verdict>> {
    let handled = AssertUnwindSafe(handler.handle(deliveries)).catch_unwind().await;
    handled.unwrap_or_else(|_| Err(anyhow::anyhow!("the handler panicked")))
}
