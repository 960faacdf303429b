//! What a service plugs into the [consumer](crate::consumer): a business step, and its verdicts.
//!
//! The types keep a handler honest: there is a verdict for each delivery, and only a message that was
//! written to the dead letters can be rejected.

use serde::de::DeserializeOwned;

use crate::{
    dead_letters::{Origin, Stored},
    events::Received,
    telemetry::TRACEPARENT,
};

/// A business step. It owns its transaction: returning means committed, or nothing done.
pub trait Handler: Send + Sync + 'static {
    /// The one event type it understands.
    const EVENT_TYPE: &'static str;

    /// The data of that type.
    type Data: DeserializeOwned + Send + Sync;

    /// Applies a batch, all or nothing, and returns a verdict for each delivery, in order.
    ///
    /// # Errors
    /// Nothing was applied. The consumer finds out whether the database is away (and waits), or
    /// one delivery is at fault (and asks again for each alone).
    fn handle(
        &self,
        batch: &[Delivery<Self::Data>],
    ) -> impl Future<Output = anyhow::Result<Vec<Verdict>>> + Send;
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
    /// The trace of the request that caused the event.
    pub fn traceparent(&self) -> &str {
        self.origin
            .message
            .headers
            .as_ref()
            .and_then(|h| h.get(TRACEPARENT))
            .map_or("", |v| v.as_str())
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
}
