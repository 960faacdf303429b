//! What fulfillment-service reports, on the order: an update that is idempotent by its nature.
//!
//! Guarantees: an order ends as `dispatched` however often, in whatever order and however late its
//! event comes. No inbox: the update is absolute (it says how the order is, not what to add) and
//! guarded (only a paid order, only by the payment it was paid with), so a second one finds nothing
//! to do. That works because an order is dispatched once; an effect that accumulates needs the inbox.

use anyhow::{Context as _, anyhow};
use shared::{
    database,
    dead_letters::{self, Reason},
    events::{ORDER_DISPATCHED, OrderDispatched},
    handler::{Delivery, Duplicate, Handler, Verdict},
    values::TrackingCode,
};
use sqlx::PgPool;
use tracing::info;

use crate::orders::{self, Standing};

/// The durable that brings what was dispatched.
pub const CONSUMER: &str = "orders";

/// The handler of the durable [`CONSUMER`].
pub struct Projection {
    /// This service's database.
    pub pool: PgPool,
}

impl Handler for Projection {
    const EVENT_TYPE: &'static str = ORDER_DISPATCHED;
    type Data = OrderDispatched;

    async fn handle(&self, batch: &[Delivery<OrderDispatched>]) -> anyhow::Result<Vec<Verdict>> {
        let reports: Vec<&OrderDispatched> = batch.iter().map(|d| &d.event.data).collect();
        let mut tx = database::begin(&self.pool).await.context("cannot begin")?;
        let changed =
            orders::mark_dispatched(&mut tx, &reports).await.context("cannot update orders")?;
        let unchanged: Vec<&OrderDispatched> = (0..reports.len())
            .filter(|place| !changed.contains(place))
            .map(|place| reports[place])
            .collect();
        let standing = orders::standing(&mut tx, &unchanged).await.context("cannot read orders")?;

        let mut verdicts = Vec::with_capacity(batch.len());
        for (place, delivery) in batch.iter().enumerate() {
            if changed.contains(&place) {
                verdicts.push(Verdict::Done);
                continue;
            }
            verdicts.push(match explain(&standing, &delivery.event.data) {
                Unchanged::Same => Verdict::Duplicate(Duplicate::State),
                Unchanged::Early(why) => Verdict::Retry(why),
                Unchanged::Never(reason, why) => Verdict::Reject(
                    dead_letters::store(&mut tx, &delivery.origin, reason, &why).await?,
                ),
            });
        }
        // Crash point 5a, before the commit: nothing happened, everything is delivered again.
        tx.commit().await.context("cannot commit")?;
        // Crash point 5b, after it and before the ack: delivered again, and finds nothing to do.
        Ok(verdicts)
    }

    fn applied(&self, delivery: &Delivery<OrderDispatched>) {
        let report = &delivery.event.data;
        info!(
            order.id = %report.order_id, event.id = %delivery.event.id,
            traceparent = delivery.traceparent(), "order is on its way as {}", report.tracking_code
        );
    }
}

/// Why a report did not change its order.
enum Unchanged {
    /// The order says so already.
    Same,
    /// It is not paid here yet.
    Early(anyhow::Error),
    /// It never will.
    Never(Reason, String),
}

fn explain(standing: &[Standing], report: &OrderDispatched) -> Unchanged {
    let order_id = &report.order_id;
    let Some(there) = standing.iter().find(|there| there.order_id == *order_id) else {
        let why = format!("there is no order {order_id}, and orders are never deleted");
        return Unchanged::Never(Reason::Rejected, why);
    };
    let Some(transaction_id) = &there.transaction_id else {
        // Payments come before dispatches, so this database is behind, after a restore for example;
        // the provider may confirm once more.
        return Unchanged::Early(anyhow!("order {order_id} is dispatched and not paid here yet"));
    };
    if *transaction_id == report.transaction_id
        && there.tracking_code.as_ref() == Some(&report.tracking_code)
    {
        return Unchanged::Same;
    }
    let why = format!(
        "order {order_id} was paid with transaction {transaction_id} and its tracking code is {}; this \
         event says transaction {}, tracking code {}",
        there.tracking_code.as_ref().map_or("none yet", TrackingCode::as_str),
        report.transaction_id,
        report.tracking_code,
    );
    Unchanged::Never(Reason::TransactionConflict, why)
}
