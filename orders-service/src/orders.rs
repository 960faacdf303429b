//! The table `orders`, and the one way an order is placed.

use std::collections::HashSet;

use serde::Serialize;
use shared::{
    events::OrderDispatched,
    values::{AmountMinor, Currency, CustomerId, OrderId, TrackingCode, TransactionId},
};
use sqlx::{PgConnection, PgPool};
use time::{OffsetDateTime, serde::rfc3339};

/// What a client asks for. Two of the same are the same order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewOrder {
    /// Chosen by the client, which makes placing it safe to repeat.
    pub order_id: OrderId,
    pub customer_id: CustomerId,
    pub amount_minor: AmountMinor,
    pub currency: Currency,
}

/// An order as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Order {
    pub order_id: OrderId,
    pub customer_id: CustomerId,
    pub amount_minor: AmountMinor,
    pub currency: Currency,
    /// `pending`, `paid` or `dispatched`.
    pub status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transaction_id: Option<TransactionId>,
    #[serde(with = "rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub paid_at: Option<OffsetDateTime>,
    #[serde(with = "rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub dispatched_at: Option<OffsetDateTime>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracking_code: Option<TrackingCode>,
}

impl Order {
    fn is(&self, new: &NewOrder) -> bool {
        self.customer_id == new.customer_id
            && self.amount_minor == new.amount_minor
            && self.currency == new.currency
    }
}

/// What placing an order came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Placed {
    Created(Order),
    /// The same order was placed before.
    Again(Order),
    /// Another order has this id.
    Differs,
}

/// Places an order, once. The primary key decides between simultaneous requests.
pub async fn place(pool: &PgPool, new: &NewOrder) -> sqlx::Result<Placed> {
    let inserted = sqlx::query!(
        "insert into orders (order_id, customer_id, amount_minor, currency)
         values ($1, $2, $3, $4)
         on conflict (order_id) do nothing",
        new.order_id.as_str(),
        new.customer_id.as_str(),
        new.amount_minor.get(),
        new.currency.as_str(),
    )
    .execute(pool)
    .await?;
    // Orders are never deleted, so whichever insert won, the row is there.
    let order = find(pool, new.order_id.as_str()).await?.ok_or(sqlx::Error::RowNotFound)?;
    Ok(match (inserted.rows_affected(), order.is(new)) {
        (1, _) => Placed::Created(order),
        (_, true) => Placed::Again(order),
        (_, false) => Placed::Differs,
    })
}

/// Reads an order with its payment.
pub async fn find(pool: &PgPool, order_id: &str) -> sqlx::Result<Option<Order>> {
    sqlx::query_as!(
        Order,
        r#"select order_id as "order_id: OrderId", customer_id as "customer_id: CustomerId",
                  orders.amount_minor as "amount_minor: AmountMinor", orders.currency as "currency: Currency",
                  status, transaction_id as "transaction_id?: TransactionId",
                  created_at, paid_at, dispatched_at, tracking_code as "tracking_code: TrackingCode"
           from orders
           left join payments using (order_id)
           where order_id = $1"#,
        order_id,
    )
    .fetch_optional(pool)
    .await
}

/// What a payment has to fit, with the order's row locked until the caller's transaction ends.
///
/// The lock makes confirmations of one order queue up, and with them its events: rows of the
/// outbox are numbered in the order of their commits. It does not conflict with foreign keys.
pub async fn lock(tx: &mut PgConnection, order_id: &OrderId) -> sqlx::Result<Option<NewOrder>> {
    sqlx::query_as!(
        NewOrder,
        r#"select order_id as "order_id: OrderId", customer_id as "customer_id: CustomerId",
                  amount_minor as "amount_minor: AmountMinor", currency as "currency: Currency"
           from orders
           where order_id = $1
           for no key update"#,
        order_id.as_str(),
    )
    .fetch_optional(tx)
    .await
}

/// Marks a pending order as paid. False when it was not pending.
pub async fn mark_paid(
    tx: &mut PgConnection,
    order_id: &OrderId,
    paid_at: OffsetDateTime,
) -> sqlx::Result<bool> {
    let paid = sqlx::query!(
        "update orders set status = 'paid', paid_at = $2 where order_id = $1 and status = 'pending'",
        order_id.as_str(),
        paid_at,
    )
    .execute(tx)
    .await?;
    Ok(paid.rows_affected() == 1)
}

/// Marks paid orders as dispatched. Returns the places in `reports`, from 0, of those that did it: of
/// several about one order, the first that names its payment.
pub async fn mark_dispatched(
    tx: &mut PgConnection,
    reports: &[&OrderDispatched],
) -> sqlx::Result<HashSet<usize>> {
    let text = |of: fn(&OrderDispatched) -> &str| -> Vec<String> {
        reports.iter().map(|report| of(report).to_owned()).collect()
    };
    let times: Vec<OffsetDateTime> = reports.iter().map(|report| report.dispatched_at).collect();
    let places = sqlx::query_scalar!(
        r#"with report as (
               -- those that name the payment first, so that a wrong one does not hide a right one
               select distinct on (order_id) given.*
               from unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) with ordinality
                    as given (order_id, transaction_id, tracking_code, dispatched_at, place)
               join payments using (order_id, transaction_id)
               order by order_id, place
           ), due as (
               select report.*
               from report
               join orders using (order_id)
               where status = 'paid'
               -- in one order everywhere, so that two batches with common orders cannot deadlock
               order by order_id
               for no key update of orders
           )
           update orders
           set status = 'dispatched', dispatched_at = due.dispatched_at, tracking_code = due.tracking_code
           from due
           where orders.order_id = due.order_id
           returning place as "place!""#,
        &text(|report| report.order_id.as_str()),
        &text(|report| report.transaction_id.as_str()),
        &text(|report| report.tracking_code.as_str()),
        &times,
    )
    .fetch_all(tx)
    .await?;
    // SQL counts from 1.
    Ok(places.into_iter().filter_map(|place| usize::try_from(place - 1).ok()).collect())
}

/// How an order stands that a report did not change.
#[derive(Debug)]
pub struct Standing {
    pub order_id: OrderId,
    /// The payment it was paid with.
    pub transaction_id: Option<TransactionId>,
    pub tracking_code: Option<TrackingCode>,
}

/// How the orders of these reports stand.
pub async fn standing(
    tx: &mut PgConnection,
    reports: &[&OrderDispatched],
) -> sqlx::Result<Vec<Standing>> {
    if reports.is_empty() {
        return Ok(Vec::new());
    }
    let order_ids: Vec<String> = reports.iter().map(|report| report.order_id.to_string()).collect();
    sqlx::query_as!(
        Standing,
        r#"select order_id as "order_id!: OrderId", transaction_id as "transaction_id?: TransactionId",
                  tracking_code as "tracking_code: TrackingCode"
           from orders
           left join payments using (order_id)
           where order_id = any($1)"#,
        &order_ids,
    )
    .fetch_all(tx)
    .await
}
