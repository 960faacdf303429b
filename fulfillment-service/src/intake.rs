//! From a confirmed payment to a requested dispatch: the transaction that makes delivery at least
//! once into an effect applied once.
//!
//! Guarantees: a payment is dispatched once, whether it is repeated under the same event id (the
//! inbox stops it) or under a new one (the business key does); the same key with other values is
//! set aside for a person, never applied and never dropped. All of it commits together, and the
//! consumer acks after that.

use std::sync::Arc;

use anyhow::Context as _;
use shared::{
    database,
    dead_letters::{self, Reason},
    events::{PAYMENT_CONFIRMED, PaymentConfirmed},
    handler::{Delivery, Duplicate, Handler, Verdict},
    inbox,
};
use sqlx::PgPool;
use tokio::sync::Notify;
use tracing::info;
use uuid::Uuid;

use crate::{
    CONSUMER,
    dispatches::{self, Dispatch, Request},
};

/// The handler of the durable [`CONSUMER`].
pub struct Intake {
    /// This service's database.
    pub pool: PgPool,
    /// Notified after a commit that requested dispatches.
    pub dispatcher_waker: Arc<Notify>,
}

impl Handler for Intake {
    const EVENT_TYPE: &'static str = PAYMENT_CONFIRMED;
    type Data = PaymentConfirmed;

    async fn handle(&self, batch: &[Delivery<PaymentConfirmed>]) -> anyhow::Result<Vec<Verdict>> {
        let mut tx = database::begin(&self.pool).await.context("cannot begin")?;
        let event_ids = batch.iter().map(|delivery| delivery.event.id);
        let mut fresh = inbox::claim(&mut tx, CONSUMER, event_ids).await.context("cannot claim")?;
        // Removing the id makes the second copy within one batch a duplicate too.
        let requests: Vec<Option<Request<'_>>> = batch
            .iter()
            .map(|delivery| {
                fresh
                    .remove(&delivery.event.id)
                    .then(|| Request { dispatch_id: Uuid::now_v7(), delivery })
            })
            .collect();
        let new: Vec<Request<'_>> = requests.iter().flatten().cloned().collect();
        let inserted =
            dispatches::request(&mut tx, &new).await.context("cannot request dispatches")?;
        let refused: Vec<&PaymentConfirmed> = new
            .iter()
            .filter(|request| !inserted.contains(&request.dispatch_id))
            .map(Request::payment)
            .collect();
        let standing =
            dispatches::existing(&mut tx, &refused).await.context("cannot read dispatches")?;

        let mut verdicts = Vec::with_capacity(batch.len());
        for (delivery, request) in batch.iter().zip(&requests) {
            verdicts.push(match request {
                None => Verdict::Duplicate(Duplicate::Event),
                Some(request) if inserted.contains(&request.dispatch_id) => Verdict::Done,
                Some(request) if standing.iter().any(|there| there.is_for(request.payment())) => {
                    Verdict::Duplicate(Duplicate::Transaction)
                }
                Some(request) => {
                    // Not applied, so not processed: a replay may apply it one day. Delivered once
                    // more, it is refused and stored once more, and that changes nothing.
                    inbox::unclaim(&mut tx, CONSUMER, delivery.event.id).await?;
                    let conflict = describe(&standing, request.payment());
                    let reason = Reason::TransactionConflict;
                    Verdict::Reject(
                        dead_letters::store(&mut tx, &delivery.origin, reason, &conflict).await?,
                    )
                }
            });
        }
        // Crash point 3a, before commit: nothing happened, everything is delivered again.
        tx.commit().await.context("cannot commit")?;
        if !inserted.is_empty() {
            self.dispatcher_waker.notify_one();
        }
        Ok(verdicts)
    }

    fn applied(&self, delivery: &Delivery<PaymentConfirmed>) {
        let payment = &delivery.event.data;
        info!(
            order.id = %payment.order_id, event.id = %delivery.event.id,
            traceparent = delivery.traceparent(), "dispatch requested for payment {}",
            payment.transaction_id
        );
    }
}

/// What a person needs to decide a conflict.
fn describe(standing: &[Dispatch], payment: &PaymentConfirmed) -> String {
    let there = standing.iter().find(|dispatch| {
        dispatch.transaction_id == payment.transaction_id || dispatch.order_id == payment.order_id
    });
    match there {
        Some(there) => format!(
            "transaction {} for order {} over {} {} by customer {} was dispatched; this event says \
             transaction {}, order {}, {} {}, customer {}",
            there.transaction_id,
            there.order_id,
            there.amount_minor.get(),
            there.currency,
            there.customer_id,
            payment.transaction_id,
            payment.order_id,
            payment.amount_minor.get(),
            payment.currency,
            payment.customer_id,
        ),
        None => "the dispatch in the way is gone".to_owned(),
    }
}
