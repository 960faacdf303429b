//! The transaction everything else serves: a payment and the event that announces it, or neither.
//!
//! Guarantees: a transaction id is confirmed once, an order is paid once, and each payment has one
//! event. Unique constraints decide that, not prior checks, so it holds for any number of
//! simultaneous requests and replicas; only the explanation of a refusal is read afterwards.

use anyhow::{Context as _, ensure};
use serde::Serialize;
use shared::{
    database,
    events::{Event, EventId, PaymentConfirmed},
    outbox,
    telemetry::TraceParent,
    values::{AmountMinor, Currency, CustomerId, OrderId, TransactionId},
};
use sqlx::{PgConnection, PgPool};
use time::{OffsetDateTime, serde::rfc3339};

use crate::orders;

/// What the payment provider says. It may say so more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confirmation {
    /// The provider's key for it.
    pub transaction_id: TransactionId,
    pub order_id: OrderId,
    pub amount_minor: AmountMinor,
    pub currency: Currency,
}

/// A confirmed payment as the API shows it: the same answer each time it is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Payment {
    pub transaction_id: TransactionId,
    pub order_id: OrderId,
    pub event_id: EventId,
    #[serde(with = "rfc3339")]
    pub confirmed_at: OffsetDateTime,
}

/// What a confirmation came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Payment, paid order and outbox row are committed: wake the relay.
    Confirmed(Payment),
    /// It was confirmed before, with the same values.
    Again(Payment),
    /// There is no such order.
    UnknownOrder,
    /// This transaction id was used with other values.
    TransactionConflict,
    /// Another transaction has paid this order.
    AlreadyPaid,
    /// The order is about another amount.
    AmountMismatch,
}

/// Confirms a payment: **one transaction**.
///
/// # Errors
/// Nothing was changed, or the answer to the commit was lost; either way the provider may repeat its
/// confirmation, and is told how it stands.
pub async fn confirm(
    pool: &PgPool,
    confirmation: &Confirmation,
    traceparent: &TraceParent,
) -> anyhow::Result<Outcome> {
    let mut tx = database::begin(pool).await.context("cannot begin")?;
    let order =
        orders::lock(&mut tx, &confirmation.order_id).await.context("cannot lock the order")?;
    let known = order.is_some();
    let payable = order.filter(|order| {
        order.amount_minor == confirmation.amount_minor && order.currency == confirmation.currency
    });
    if let Some(order) = payable
        && let Some(payment) =
            insert(&mut tx, confirmation).await.context("cannot insert the payment")?
    {
        let paid = orders::mark_paid(&mut tx, &order.order_id, payment.confirmed_at).await?;
        ensure!(paid, "order {} has no payment and is not pending", order.order_id);
        let event = announce(&payment, confirmation, order.customer_id);
        outbox::enqueue(&mut tx, &event, traceparent).await?;
        // Crash point 1a, before commit: nothing happened, the provider asks again.
        tx.commit().await.context("cannot commit")?;
        // Crash point 1b, after commit: the row waits for any relay.
        return Ok(Outcome::Confirmed(payment));
    }
    let in_the_way = find(&mut tx, confirmation).await.context("cannot read why")?;
    tx.rollback().await.context("cannot roll back")?;
    Ok(match in_the_way {
        Some(payment) => payment.refuse(confirmation),
        None if known => Outcome::AmountMismatch,
        None => Outcome::UnknownOrder,
    })
}

fn announce(
    payment: &Payment,
    confirmation: &Confirmation,
    customer_id: CustomerId,
) -> Event<PaymentConfirmed> {
    Event::payment_confirmed(
        payment.event_id,
        PaymentConfirmed {
            transaction_id: payment.transaction_id.clone(),
            order_id: payment.order_id.clone(),
            customer_id,
            amount_minor: confirmation.amount_minor,
            currency: confirmation.currency.clone(),
            confirmed_at: payment.confirmed_at,
        },
    )
}

/// None when the transaction id or the order has a payment already. A concurrent insert of either
/// is waited for.
async fn insert(tx: &mut PgConnection, new: &Confirmation) -> sqlx::Result<Option<Payment>> {
    sqlx::query_as!(
        Payment,
        r#"insert into payments (transaction_id, order_id, amount_minor, currency, event_id)
           values ($1, $2, $3, $4, $5)
           on conflict do nothing
           returning transaction_id as "transaction_id: TransactionId", order_id as "order_id: OrderId",
                     event_id as "event_id: EventId", confirmed_at"#,
        new.transaction_id.as_str(),
        new.order_id.as_str(),
        new.amount_minor.get(),
        new.currency.as_str(),
        EventId::new().get(),
    )
    .fetch_optional(tx)
    .await
}

/// A payment that stands in the way of another confirmation.
struct Existing {
    transaction_id: TransactionId,
    order_id: OrderId,
    amount_minor: AmountMinor,
    currency: Currency,
    event_id: EventId,
    confirmed_at: OffsetDateTime,
}

impl Existing {
    fn refuse(self, new: &Confirmation) -> Outcome {
        if self.transaction_id != new.transaction_id {
            return Outcome::AlreadyPaid;
        }
        let same = self.order_id == new.order_id
            && self.amount_minor == new.amount_minor
            && self.currency == new.currency;
        if !same {
            return Outcome::TransactionConflict;
        }
        Outcome::Again(Payment {
            transaction_id: self.transaction_id,
            order_id: self.order_id,
            event_id: self.event_id,
            confirmed_at: self.confirmed_at,
        })
    }
}

/// Why nothing was inserted. What is found is committed, and never changes.
async fn find(tx: &mut PgConnection, new: &Confirmation) -> sqlx::Result<Option<Existing>> {
    sqlx::query_as!(
        Existing,
        r#"select transaction_id as "transaction_id: TransactionId", order_id as "order_id: OrderId",
                  amount_minor as "amount_minor: AmountMinor", currency as "currency: Currency",
                  event_id as "event_id: EventId", confirmed_at
           from payments
           where transaction_id = $1 or order_id = $2
           -- the same transaction id says more than the same order
           order by transaction_id = $1 desc
           limit 1"#,
        new.transaction_id.as_str(),
        new.order_id.as_str(),
    )
    .fetch_optional(tx)
    .await
}
