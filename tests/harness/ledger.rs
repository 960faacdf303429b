//! The ledger: what the two databases and the streams say about all payments. Whether that is as
//! promised is for [`crate::invariants`] to say.

use std::collections::{BTreeMap, HashMap, HashSet};

use sqlx::PgPool;

use crate::{
    broker::Broker,
    contract::{BACK, FULFILLMENT},
};

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Confirmed payments.
    pub payments: usize,
    /// Outbox rows, those among them that wait, and those that a person has to look at, in both services.
    pub outbox: usize,
    pub pending: usize,
    pub parked: usize,
    /// Dispatches.
    pub dispatches: usize,
    /// Payments without a dispatch of the same transaction, order, amount and currency.
    pub lost: Vec<String>,
    /// Orders or transactions with more than one dispatch.
    pub doubled: Vec<String>,
    /// Dispatches for which there is no payment.
    pub unpaid: Vec<String>,
    /// Messages in the stream, and different event ids among those that can be read.
    pub messages: usize,
    pub events: usize,
    /// Second and further copies of an event in the stream: the inbox absorbed them.
    pub absorbed_by_event_id: usize,
    /// Processed events that caused no dispatch: the business key absorbed them.
    pub absorbed_by_transaction_id: usize,
    /// Dispatches that wait for the carrier, and those it has refused.
    pub requested: usize,
    pub failed: usize,
    /// Events of dispatches that wait in the outbox of fulfillment, or have not been consumed.
    pub reports_pending: usize,
    /// Paid orders that do not know of their dispatch yet.
    pub undispatched: usize,
    /// Dead letters by reason.
    pub dead_letters: BTreeMap<String, i64>,
    /// What the durable has not delivered, and what is delivered and not acked.
    pub consumer_pending: u64,
    pub consumer_ack_pending: usize,
}

type Payment = (String, String, i64, String);

impl Ledger {
    pub async fn read(
        orders: &PgPool,
        fulfillment: &PgPool,
        broker: &Broker,
    ) -> anyhow::Result<Self> {
        // In the order of travel: an event that is not in the outbox any more when that is read is in
        // the stream when the consumer is asked, and what the consumer has acked is in its database.
        let payments: Vec<Payment> =
            sqlx::query_as("select transaction_id, order_id, amount_minor, currency from payments")
                .fetch_all(orders)
                .await?;
        let (outbox, pending): (i64, i64) = sqlx::query_as(
            "select count(*), count(*) filter (where published_at is null) from outbox",
        )
        .fetch_one(orders)
        .await?;
        let mut parked = 0;
        for pool in [orders, fulfillment] {
            let count: i64 =
                sqlx::query_scalar("select count(parked_at) from outbox").fetch_one(pool).await?;
            parked += usize::try_from(count)?;
        }
        let (consumer_pending, consumer_ack_pending) = broker.consumer_backlog().await?;
        let dispatches: Vec<Payment> = sqlx::query_as(
            "select transaction_id, order_id, amount_minor, currency from dispatches",
        )
        .fetch_all(fulfillment)
        .await?;
        let (requested, failed): (i64, i64) = sqlx::query_as(
            "select count(*) filter (where status = 'requested'), count(*) filter (where status = 'failed')
             from dispatches",
        )
        .fetch_one(fulfillment)
        .await?;
        let reports: i64 =
            sqlx::query_scalar("select count(*) from outbox where published_at is null")
                .fetch_one(fulfillment)
                .await?;
        let mut reports_pending = usize::try_from(reports)?;
        for durable in BACK {
            let (undelivered, unacked) = broker.backlog(FULFILLMENT, durable).await?;
            reports_pending += usize::try_from(undelivered)? + unacked;
        }
        let undispatched: i64 =
            sqlx::query_scalar("select count(*) from orders where status = 'paid'")
                .fetch_one(orders)
                .await?;
        let processed: i64 = sqlx::query_scalar("select count(*) from processed_events")
            .fetch_one(fulfillment)
            .await?;
        let dead_letters: Vec<(String, i64)> =
            sqlx::query_as("select reason, count(*) from dead_letters group by reason")
                .fetch_all(fulfillment)
                .await?;

        let dispatched: HashSet<&Payment> = dispatches.iter().collect();
        let paid: HashSet<&Payment> = payments.iter().collect();
        let mut seen: HashMap<String, usize> = HashMap::new();
        for (transaction, order, ..) in &dispatches {
            *seen.entry(format!("transaction {transaction}")).or_default() += 1;
            *seen.entry(format!("order {order}")).or_default() += 1;
        }
        let mut copies: HashMap<String, usize> = HashMap::new();
        let stored = broker.messages().await?;
        for event_id in stored.iter().filter_map(crate::broker::Stored::event_id) {
            *copies.entry(event_id).or_default() += 1;
        }
        Ok(Self {
            payments: payments.len(),
            outbox: outbox.try_into()?,
            pending: pending.try_into()?,
            parked,
            dispatches: dispatches.len(),
            lost: payments
                .iter()
                .filter(|p| !dispatched.contains(p))
                .map(|p| p.0.clone())
                .collect(),
            doubled: seen.into_iter().filter(|(_, count)| *count > 1).map(|(key, _)| key).collect(),
            unpaid: dispatches.iter().filter(|p| !paid.contains(p)).map(|p| p.0.clone()).collect(),
            messages: stored.len(),
            events: copies.len(),
            absorbed_by_event_id: copies.values().map(|count| count - 1).sum(),
            absorbed_by_transaction_id: usize::try_from(processed)?
                .saturating_sub(dispatches.len()),
            requested: requested.try_into()?,
            failed: failed.try_into()?,
            reports_pending,
            undispatched: undispatched.try_into()?,
            dead_letters: dead_letters.into_iter().collect(),
            consumer_pending,
            consumer_ack_pending,
        })
    }
}
