//! The table `dispatches`: at most one row per payment and per order, by constraint.
//!
//! A dispatch starts as `requested`, is taken under a lease as often as it needs, and ends as
//! `dispatched` or `failed`, once: every change asks for the status and for the attempt that was
//! taken, so whoever comes late hits no row. Those changes name the states it must not be in, instead of
//! `requested`: then only the primary key fits. A plan that is made while few wait would otherwise read
//! the index of all that do, and be kept when they are many.

use std::{collections::HashSet, time::Duration};

use shared::{
    database::storable,
    events::PaymentConfirmed,
    handler::Delivery,
    values::{AmountMinor, Currency, CustomerId, OrderId, TrackingCode, TransactionId},
};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::carrier::Parcel;

/// A dispatch that some event asks for.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Names this request; the row's key if it is the first for its payment.
    pub dispatch_id: Uuid,
    /// The event.
    pub delivery: &'a Delivery<PaymentConfirmed>,
}

impl<'a> Request<'a> {
    pub fn payment(&self) -> &'a PaymentConfirmed {
        &self.delivery.event.data
    }
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
    let deliveries = || requests.iter().map(|request| request.delivery);
    let event_ids: Vec<Uuid> = deliveries().map(|delivery| delivery.event.id.get()).collect();
    let stream_seqs: Vec<i64> =
        deliveries().map(|delivery| delivery.origin.stream_seq.cast_signed()).collect();
    let traceparents: Vec<Option<&str>> = deliveries().map(Delivery::traceparent).collect();
    let text = |of: fn(&PaymentConfirmed) -> &str| -> Vec<&str> {
        requests.iter().map(|request| of(request.payment())).collect()
    };
    let amounts: Vec<i64> =
        requests.iter().map(|request| request.payment().amount_minor.get()).collect();
    let inserted = sqlx::query_scalar!(
        r#"insert into dispatches (dispatch_id, transaction_id, order_id, customer_id, amount_minor,
                                   currency, event_id, stream_seq, traceparent)
           select dispatch_id, transaction_id, order_id, customer_id, amount_minor, currency,
                  event_id, stream_seq, traceparent
           from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[],
                       $7::uuid[], $8::bigint[], $9::text[])
                with ordinality
                as request (dispatch_id, transaction_id, order_id, customer_id, amount_minor,
                            currency, event_id, stream_seq, traceparent, place)
           -- in one order everywhere, so that two batches with common payments cannot deadlock
           order by transaction_id, place
           -- either constraint: one per transaction, one per order
           on conflict do nothing
           returning dispatch_id"#,
        &dispatch_ids,
        &text(|payment| payment.transaction_id.as_str()) as &[&str],
        &text(|payment| payment.order_id.as_str()) as &[&str],
        &text(|payment| payment.customer_id.as_str()) as &[&str],
        &amounts,
        &text(|payment| payment.currency.as_str()) as &[&str],
        &event_ids,
        &stream_seqs,
        &traceparents as &[Option<&str>],
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

/// A dispatch in our hands, until the lease runs out.
#[derive(Debug, Clone)]
pub struct Taken {
    pub parcel: Parcel,
    /// Counts from 1; the fence of every change that follows.
    pub attempt: i32,
    /// Where the event that caused it stands in the stream.
    pub stream_seq: Option<i64>,
    /// Whether others were due as well.
    pub more: bool,
}

/// Takes the dispatch that has been due for the longest, if there is one.
///
/// One statement, committed when it returns: the lease outlives it, the row lock does not.
pub async fn take(pool: &PgPool, lease: Duration) -> sqlx::Result<Option<Taken>> {
    let row = sqlx::query!(
        r#"update dispatches
           set attempts = attempts + 1, due_at = now() + make_interval(secs => $1)
           -- "=", not "in": the subquery runs once, and locks one row
           where dispatch_id = (
               select dispatch_id
               from dispatches
               where status = 'requested' and due_at <= now()
               order by due_at
               limit 1
               -- what somebody else is taking is theirs
               for update skip locked
           )
           returning dispatch_id, order_id as "order_id: OrderId",
                     transaction_id as "transaction_id: TransactionId",
                     customer_id as "customer_id: CustomerId",
                     amount_minor as "amount_minor: AmountMinor", currency as "currency: Currency",
                     traceparent, attempts, stream_seq,
                     -- as it was before this statement, in which the taken one is the first
                     (select true from dispatches
                      where status = 'requested' and due_at <= now()
                      order by due_at
                      offset 1 limit 1) is not null as "more!"
           "#,
        lease.as_secs_f64(),
    )
    .fetch_optional(pool)
    .await?;
    Ok(row.map(|row| Taken {
        parcel: Parcel {
            dispatch_id: row.dispatch_id,
            order_id: row.order_id,
            transaction_id: row.transaction_id,
            customer_id: row.customer_id,
            amount_minor: row.amount_minor,
            currency: row.currency,
            traceparent: row.traceparent,
        },
        attempt: row.attempts,
        stream_seq: row.stream_seq,
        more: row.more,
    }))
}

/// The carrier has it. Returns when that was, or none if the dispatch is not ours any more.
pub async fn complete(
    tx: &mut PgConnection,
    taken: &Taken,
    tracking_code: &TrackingCode,
) -> sqlx::Result<Option<OffsetDateTime>> {
    let dispatched_at = sqlx::query_scalar!(
        r#"update dispatches
           set status = 'dispatched', dispatched_at = now(), tracking_code = $3, last_error = null
           where dispatch_id = $1 and status not in ('dispatched', 'failed') and attempts = $2
           returning dispatched_at as "dispatched_at!""#,
        taken.parcel.dispatch_id,
        taken.attempt,
        tracking_code.as_str(),
    );
    dispatched_at.fetch_optional(tx).await
}

/// The carrier will never take it. False if the dispatch is not ours any more.
pub async fn fail(tx: &mut PgConnection, taken: &Taken, reason: &str) -> sqlx::Result<bool> {
    let failed = sqlx::query!(
        "update dispatches
         set status = 'failed', last_error = $3
         where dispatch_id = $1 and status not in ('dispatched', 'failed') and attempts = $2",
        taken.parcel.dispatch_id,
        taken.attempt,
        storable(reason),
    );
    Ok(failed.execute(tx).await?.rows_affected() == 1)
}

/// To be taken again after `delay`. False if the dispatch is not ours any more.
pub async fn postpone(
    pool: &PgPool,
    taken: &Taken,
    delay: Duration,
    error: &str,
) -> sqlx::Result<bool> {
    let postponed = sqlx::query!(
        "update dispatches
         set due_at = now() + make_interval(secs => $3), last_error = $4
         where dispatch_id = $1 and status not in ('dispatched', 'failed') and attempts = $2",
        taken.parcel.dispatch_id,
        taken.attempt,
        delay.as_secs_f64(),
        storable(error),
    );
    Ok(postponed.execute(pool).await?.rows_affected() == 1)
}

/// Has a dispatch that the carrier refused asked for again. False if it is not refused, or not there.
pub async fn request_again(tx: &mut PgConnection, dispatch_id: Uuid) -> sqlx::Result<bool> {
    let requested = sqlx::query!(
        "update dispatches set status = 'requested', due_at = now()
         where dispatch_id = $1 and status = 'failed'",
        dispatch_id,
    );
    Ok(requested.execute(tx).await?.rows_affected() == 1)
}
