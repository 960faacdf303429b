//! The carrier: what a cloner swaps. One method, and an idempotency key that makes it safe to ask
//! again.
//!
//! Whoever implements [`Carrier`] promises: the same `dispatch_id` is the same parcel, however often
//! it is booked; an error is only called a refusal, or unavailable, when surely nothing was booked.
//! Without the first promise a crash between the carrier's answer and our commit books twice.

use serde::{Deserialize, Serialize};
use shared::values::{AmountMinor, Currency, CustomerId, OrderId, TrackingCode, TransactionId};
use uuid::Uuid;

use crate::call::{CallError, Caller, Endpoint};

/// Takes parcels.
pub trait Carrier: Send + Sync + 'static {
    /// Books a parcel, or finds that it was booked.
    ///
    /// Called with no transaction open, and cut off by the dispatcher if it takes too long.
    ///
    /// # Errors
    /// See [`CallError`]. Whatever is not a refusal is asked again, with the same parcel.
    fn book(&self, parcel: &Parcel)
    -> impl Future<Output = Result<TrackingCode, CallError>> + Send;
}

/// What is sent. The same in every repetition, as an idempotency key demands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Parcel {
    /// The idempotency key.
    pub dispatch_id: Uuid,
    pub order_id: OrderId,
    pub transaction_id: TransactionId,
    pub customer_id: CustomerId,
    pub amount_minor: AmountMinor,
    pub currency: Currency,
    /// The trace of the request that caused it; a header, not part of the text.
    #[serde(skip)]
    pub traceparent: Option<String>,
}

/// A carrier within this process, for demonstrations and development. It keeps nothing: the tracking
/// code follows from the key, so every replica gives the same.
pub struct SandboxCarrier;

impl Carrier for SandboxCarrier {
    async fn book(&self, parcel: &Parcel) -> Result<TrackingCode, CallError> {
        let code = format!("SANDBOX-{:X}", parcel.dispatch_id.simple());
        code.try_into().map_err(|error| CallError::unknown(format!("tracking code {error}")))
    }
}

/// A carrier behind `POST {CARRIER_URL}/parcels`.
///
/// The body is the [`Parcel`], the answer a 200 or 201 with `{"trackingCode": "…"}`.
pub struct HttpCarrier(Caller);

impl HttpCarrier {
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(base: Endpoint) -> anyhow::Result<Self> {
        Caller::new(base.join("parcels")).map(Self)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Booked {
    tracking_code: TrackingCode,
}

impl Carrier for HttpCarrier {
    async fn book(&self, parcel: &Parcel) -> Result<TrackingCode, CallError> {
        let answer = self.0.post(parcel.dispatch_id, parcel.traceparent.as_deref(), parcel).await?;
        match serde_json::from_slice(&answer) {
            Ok(Booked { tracking_code }) => Ok(tracking_code),
            // It is booked, most likely, under a code that we do not know.
            Err(error) => Err(CallError::unknown(format!("the answer cannot be read: {error}"))),
        }
    }
}
