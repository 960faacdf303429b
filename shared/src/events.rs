//! The wire contract: what the two services tell each other.
//!
//! Events are CloudEvents 1.0 in structured JSON mode. The golden texts in the tests below are the
//! contract: a change that breaks one breaks a deployed consumer. Readers ignore fields they do not
//! know, so adding one is safe; anything else needs a new type name (`….v2`) beside the old one.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::values::{AmountMinor, Currency, CustomerId, OrderId, TrackingCode, TransactionId};

/// The content type of a structured-mode CloudEvent.
pub const CONTENT_TYPE: &str = "application/cloudevents+json";

/// Subject on which orders-service announces confirmed payments.
pub const PAYMENT_CONFIRMED_SUBJECT: &str = "orders.payment.confirmed";

/// Type of [`PaymentConfirmed`].
pub const PAYMENT_CONFIRMED: &str = "payment.confirmed.v1";

/// Subject on which fulfillment-service announces what the carrier has taken.
pub const ORDER_DISPATCHED_SUBJECT: &str = "fulfillment.order.dispatched";

/// Type of [`OrderDispatched`].
pub const ORDER_DISPATCHED: &str = "order.dispatched.v1";

/// The CloudEvents `id`: made when the outbox row is written, the same in every repetition.
///
/// A UUIDv7, so ids made one after another lie side by side in the inbox index.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, sqlx::Type,
)]
#[sqlx(transparent)]
pub struct EventId(Uuid);

impl EventId {
    /// A new id.
    #[expect(clippy::new_without_default, reason = "two new ids differ; a default would hide that")]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The plain UUID.
    pub fn get(self) -> Uuid {
        self.0
    }
}

impl From<Uuid> for EventId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// An event on its way out: built here, written by [`crate::outbox::enqueue`], published by the relay.
#[derive(Debug, Clone, Serialize)]
pub struct Event<D> {
    /// Always `1.0`.
    pub specversion: &'static str,
    /// The deduplication key of relay, broker and inbox.
    pub id: EventId,
    /// Which service says so.
    pub source: &'static str,
    /// The contract of `data`, with its version.
    #[serde(rename = "type")]
    pub event_type: &'static str,
    /// The aggregate: events of one order keep their order.
    pub subject: OrderId,
    /// When it happened (database clock).
    #[serde(with = "time::serde::rfc3339")]
    pub time: OffsetDateTime,
    /// Always `application/json`.
    pub datacontenttype: &'static str,
    /// The payload.
    pub data: D,
    /// The NATS subject, which is not part of the text.
    #[serde(skip)]
    pub nats_subject: &'static str,
}

/// Data of `payment.confirmed.v1`: the provider has the money, the order may go out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentConfirmed {
    /// The provider's transaction: the business key of the effect.
    pub transaction_id: TransactionId,
    /// The paid order.
    pub order_id: OrderId,
    /// Who ordered it.
    pub customer_id: CustomerId,
    /// What was paid, in minor units of `currency`.
    pub amount_minor: AmountMinor,
    /// ISO 4217.
    pub currency: Currency,
    /// When orders-service committed it (database clock).
    #[serde(with = "time::serde::rfc3339")]
    pub confirmed_at: OffsetDateTime,
}

impl Event<PaymentConfirmed> {
    /// The event of a payment whose row carries `id`.
    pub fn payment_confirmed(id: EventId, data: PaymentConfirmed) -> Self {
        Self {
            specversion: "1.0",
            id,
            source: "/orders-service",
            event_type: PAYMENT_CONFIRMED,
            subject: data.order_id.clone(),
            time: data.confirmed_at,
            datacontenttype: "application/json",
            nats_subject: PAYMENT_CONFIRMED_SUBJECT,
            data,
        }
    }
}

/// Data of `order.dispatched.v1`: the carrier has the parcel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OrderDispatched {
    /// Names the dispatch; also the idempotency key under which the carrier was asked.
    pub dispatch_id: Uuid,
    /// What is on its way.
    pub order_id: OrderId,
    /// The payment that caused it.
    pub transaction_id: TransactionId,
    /// The carrier's.
    pub tracking_code: TrackingCode,
    /// When fulfillment-service committed it (database clock).
    #[serde(with = "time::serde::rfc3339")]
    pub dispatched_at: OffsetDateTime,
}

impl Event<OrderDispatched> {
    /// A new event. Its transaction changes the dispatch from `requested` to `dispatched`, which
    /// happens once; so there is one per dispatch, and no row needs to remember its id.
    pub fn order_dispatched(data: OrderDispatched) -> Self {
        Self {
            specversion: "1.0",
            id: EventId::new(),
            source: "/fulfillment-service",
            event_type: ORDER_DISPATCHED,
            subject: data.order_id.clone(),
            time: data.dispatched_at,
            datacontenttype: "application/json",
            nats_subject: ORDER_DISPATCHED_SUBJECT,
            data,
        }
    }
}

/// An event as a consumer got it, its data understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received<D> {
    /// The deduplication key.
    pub id: EventId,
    /// The payload.
    pub data: D,
}

/// Why a body cannot be handled. Repeating the delivery would not help.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Not JSON, not a CloudEvent, or data of another shape.
    #[error("the body cannot be read as a CloudEvent of this type")]
    Undecodable(#[from] serde_json::Error),
    /// A future CloudEvents version.
    #[error("specversion {0:?} is not 1.0")]
    SpecVersion(String),
    /// A type this consumer has no code for.
    #[error("no handler for type {0:?}")]
    UnknownType(String),
}

#[derive(Deserialize)]
struct Envelope<'a> {
    specversion: String,
    id: EventId,
    #[serde(rename = "type")]
    event_type: String,
    #[serde(borrow)]
    data: &'a RawValue,
}

/// Reads `body` as an event of type `wanted`.
///
/// # Errors
/// [`DecodeError`]: the message belongs into the dead letters. The type is looked at before the
/// data, so an event of a newer version is reported as unknown, not as broken.
pub fn decode<D: DeserializeOwned>(body: &[u8], wanted: &str) -> Result<Received<D>, DecodeError> {
    let envelope: Envelope<'_> = serde_json::from_slice(body)?;
    if envelope.specversion != "1.0" {
        return Err(DecodeError::SpecVersion(envelope.specversion));
    }
    if envelope.event_type != wanted {
        return Err(DecodeError::UnknownType(envelope.event_type));
    }
    Ok(Received { id: envelope.id, data: serde_json::from_str(envelope.data.get())? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = r#"{
        "specversion": "1.0",
        "id": "01939c4e-0000-7000-8000-000000000001",
        "source": "/orders-service",
        "type": "payment.confirmed.v1",
        "subject": "A-1",
        "time": "2026-11-30T12:00:00.123456Z",
        "datacontenttype": "application/json",
        "data": {
            "transactionId": "tx-1",
            "orderId": "A-1",
            "customerId": "C-7",
            "amountMinor": 1999,
            "currency": "EUR",
            "confirmedAt": "2026-11-30T12:00:00.123456Z"
        }
    }"#;

    const GOLDEN_DISPATCHED: &str = r#"{
        "specversion": "1.0",
        "id": "01939c4e-0000-7000-8000-000000000001",
        "source": "/fulfillment-service",
        "type": "order.dispatched.v1",
        "subject": "A-1",
        "time": "2026-11-30T12:00:00.123456Z",
        "datacontenttype": "application/json",
        "data": {
            "dispatchId": "01939c4e-0000-7000-8000-000000000002",
            "orderId": "A-1",
            "transactionId": "tx-1",
            "trackingCode": "PARCEL-1",
            "dispatchedAt": "2026-11-30T12:00:00.123456Z"
        }
    }"#;

    fn dispatched() -> OrderDispatched {
        let text = |s: &str| s.to_owned();
        OrderDispatched {
            dispatch_id: Uuid::from_u128(0x01939c4e_0000_7000_8000_000000000002),
            order_id: text("A-1").try_into().unwrap(),
            transaction_id: text("tx-1").try_into().unwrap(),
            tracking_code: text("PARCEL-1").try_into().unwrap(),
            dispatched_at: time::macros::datetime!(2026-11-30 12:00:00.123456 UTC),
        }
    }

    fn payment() -> PaymentConfirmed {
        let text = |s: &str| s.to_owned();
        PaymentConfirmed {
            transaction_id: text("tx-1").try_into().unwrap(),
            order_id: text("A-1").try_into().unwrap(),
            customer_id: text("C-7").try_into().unwrap(),
            amount_minor: 1999.try_into().unwrap(),
            currency: text("EUR").try_into().unwrap(),
            confirmed_at: time::macros::datetime!(2026-11-30 12:00:00.123456 UTC),
        }
    }

    fn id() -> EventId {
        Uuid::from_u128(0x01939c4e_0000_7000_8000_000000000001).into()
    }

    #[test]
    fn payment_confirmed_is_written_as_the_contract_says() {
        let written = serde_json::to_value(Event::payment_confirmed(id(), payment())).unwrap();
        let golden: serde_json::Value = serde_json::from_str(GOLDEN).unwrap();
        assert_eq!(written, golden);
    }

    #[test]
    fn order_dispatched_is_written_and_read_as_the_contract_says() {
        let event = Event { id: id(), ..Event::order_dispatched(dispatched()) };
        let golden: serde_json::Value = serde_json::from_str(GOLDEN_DISPATCHED).unwrap();
        assert_eq!(serde_json::to_value(event).unwrap(), golden);
        let read: Received<OrderDispatched> =
            decode(GOLDEN_DISPATCHED.as_bytes(), ORDER_DISPATCHED).unwrap();
        assert_eq!(read, Received { id: id(), data: dispatched() });
    }

    #[test]
    fn what_is_written_is_read_and_unknown_fields_are_ignored() {
        let newer = GOLDEN
            .replace(r#""currency""#, r#""giftWrap": true, "currency""#)
            .replace(r#""source""#, r#""dataschema": "x", "source""#);
        for body in [GOLDEN, &newer] {
            let read: Received<PaymentConfirmed> =
                decode(body.as_bytes(), PAYMENT_CONFIRMED).unwrap();
            assert_eq!(read, Received { id: id(), data: payment() });
        }
    }

    #[test]
    fn what_cannot_be_read_or_is_not_known_says_which() {
        let verdict =
            |body: &str| match decode::<PaymentConfirmed>(body.as_bytes(), PAYMENT_CONFIRMED) {
                Ok(_) => "read",
                Err(DecodeError::UnknownType(_)) => "unknown type",
                Err(DecodeError::Undecodable(_) | DecodeError::SpecVersion(_)) => "undecodable",
            };
        assert_eq!(verdict(GOLDEN), "read");
        assert_eq!(verdict("not json"), "undecodable");
        assert_eq!(verdict("{}"), "undecodable");
        assert_eq!(verdict(&GOLDEN.replace(r#""1.0""#, r#""2.0""#)), "undecodable");
        assert_eq!(verdict(&GOLDEN.replace("01939c4e-", "")), "undecodable");
        assert_eq!(verdict(&GOLDEN.replace("1999", "-5")), "undecodable");
        assert_eq!(verdict(&GOLDEN.replace("tx-1", "tx\\u0000")), "undecodable");
        assert_eq!(verdict(&GOLDEN.replace("confirmed.v1", "confirmed.v2")), "unknown type");
    }
}
