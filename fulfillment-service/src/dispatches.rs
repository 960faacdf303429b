//! The table `dispatches`: at most one row per payment and per order, by constraint.
//!
//! A dispatch starts as `requested`. What calls a carrier takes it from there.

use std::collections::HashSet;

use shared::{
    events::{EventId, PaymentConfirmed},
    values::{AmountMinor, Currency, CustomerId, OrderId, TransactionId},
};
use sqlx::PgConnection;
use uuid::Uuid;

/// A dispatch that some event asks for.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Names this request; the row's key if it is the first for its payment.
    pub dispatch_id: Uuid,
    pub event_id: EventId,
    pub payment: &'a PaymentConfirmed,
}

/// What is dispatched under a transaction or for an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    pub transaction_id: TransactionId,
    pub order_id: OrderId,
    pub customer_id: CustomerId,
    pub amount_minor: AmountMinor,
    pub currency: Currency,
}

impl Dispatch {
    /// Whether `payment` says the same again. When it was confirmed does not count: a provider that
    /// repeats itself may give another time.
    pub fn is_for(&self, payment: &PaymentConfirmed) -> bool {
        self.transaction_id == payment.transaction_id
            && self.order_id == payment.order_id
            && self.customer_id == payment.customer_id
            && self.amount_minor == payment.amount_minor
            && self.currency == payment.currency
    }
}

/// Inserts what is new and returns the `dispatch_id`s of that. Of two requests for the same payment
/// the earlier in `requests` wins; a concurrent transaction with one is waited for.
pub async fn request(
    tx: &mut PgConnection,
    requests: &[Request<'_>],
) -> sqlx::Result<HashSet<Uuid>> {
    let dispatch_ids: Vec<Uuid> = requests.iter().map(|request| request.dispatch_id).collect();
    let event_ids: Vec<Uuid> = requests.iter().map(|request| request.event_id.get()).collect();
    let text = |of: fn(&PaymentConfirmed) -> &str| -> Vec<String> {
        requests.iter().map(|request| of(request.payment).to_owned()).collect()
    };
    let amounts: Vec<i64> =
        requests.iter().map(|request| request.payment.amount_minor.get()).collect();
    let inserted = sqlx::query_scalar!(
        r#"insert into dispatches (dispatch_id, transaction_id, order_id, customer_id, amount_minor,
                                   currency, event_id)
           select dispatch_id, transaction_id, order_id, customer_id, amount_minor, currency, event_id
           from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::uuid[])
                with ordinality
                as request (dispatch_id, transaction_id, order_id, customer_id, amount_minor,
                            currency, event_id, place)
           -- in one order everywhere, so that two batches with common payments cannot deadlock
           order by transaction_id, place
           -- either constraint: one per transaction, one per order
           on conflict do nothing
           returning dispatch_id"#,
        &dispatch_ids,
        &text(|payment| payment.transaction_id.as_str()),
        &text(|payment| payment.order_id.as_str()),
        &text(|payment| payment.customer_id.as_str()),
        &amounts,
        &text(|payment| payment.currency.as_str()),
        &event_ids,
    )
    .fetch_all(tx)
    .await?;
    Ok(inserted.into_iter().collect())
}

/// What stands in the way of these payments: the dispatches with their transactions or orders.
pub async fn existing(
    tx: &mut PgConnection,
    payments: &[&PaymentConfirmed],
) -> sqlx::Result<Vec<Dispatch>> {
    if payments.is_empty() {
        return Ok(Vec::new());
    }
    let transaction_ids: Vec<String> =
        payments.iter().map(|p| p.transaction_id.to_string()).collect();
    let order_ids: Vec<String> = payments.iter().map(|p| p.order_id.to_string()).collect();
    sqlx::query_as!(
        Dispatch,
        r#"select transaction_id as "transaction_id: TransactionId", order_id as "order_id: OrderId",
                  customer_id as "customer_id: CustomerId", amount_minor as "amount_minor: AmountMinor",
                  currency as "currency: Currency"
           from dispatches
           where transaction_id = any($1) or order_id = any($2)"#,
        &transaction_ids,
        &order_ids,
    )
    .fetch_all(tx)
    .await
}
