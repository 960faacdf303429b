//! A backlog in the stream until its dispatches are committed and its messages acked.

use anyhow::ensure;
use async_nats::jetstream::{
    Message,
    consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull},
};
use e2e::{
    contract::ORDERS,
    services::Kind,
    stage::{ALWAYS, DEFAULT, Event, Stage, events, number, publish_all, rate},
};
use futures_util::{StreamExt as _, TryStreamExt as _};
use serde_json::Value;
use sqlx::{PgPool, PgTransaction};
use tokio::time::Instant;
use uuid::Uuid;

use super::{
    Scale,
    table::{Goal, Line},
};
use crate::show::Timeline;

/// Nobody listens there. The dispatcher finds that out and lets its dispatches wait, so that only the
/// intake works.
pub(super) fn no_carrier() -> [(&'static str, String); 1] {
    [("CARRIER_URL", "http://127.0.0.1:9".to_owned())]
}

/// Rows of one transaction: as many as `CONSUMER_BATCH` has by default.
const BULK: usize = 200;

const DISPATCHES: &str = "select count(*) from dispatches";

pub(super) async fn measure(scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for sync_interval in [DEFAULT, ALWAYS] {
        let _bar = show.wait("inbox");
        let stage = Stage::start(sync_interval).await?;
        let service = stage.service_with(Kind::Fulfillment, &no_carrier()).await?;
        // So that all connections are open and have their plans, as in a service that has run for a while.
        take_in(&stage, &events("before", scale.backlog / 5)).await?;
        stage.settle().await?;
        let ours = take_in(&stage, &events("ours", scale.backlog)).await?;
        drop(service);
        let pulled = pull_and_ack(&stage, scale.backlog).await?;
        let inserted = insert_all(&stage.world.fulfillment, scale.backlog).await?;
        let sequential = textbook(&stage, scale.textbook, 1).await?;
        let eight = textbook(&stage, scale.textbook, 8).await?;
        lines.push(
            Line::new(format!("inbox, sync_interval {sync_interval}"), "messages/s", ours)
                .beside("pulled and acked, no database", pulled, lower(pulled, inserted))
                .beside("the same rows inserted, no broker", inserted, lower(inserted, pulled))
                .beside("textbook: a transaction each, eight at once", eight, Goal::AtLeast(8.0))
                .beside("textbook: a transaction each", sequential, Goal::AtLeast(25.0)),
        );
        stage.world.close().await?;
    }
    Ok(lines)
}

/// What is aimed at is a share of the lower of two ceilings.
fn lower(this: f64, that: f64) -> Goal {
    if this <= that { Goal::AtLeast(0.6) } else { Goal::None }
}

/// The rate of the services that find this backlog.
pub(super) async fn take_in(stage: &Stage, events: &[Event]) -> anyhow::Result<f64> {
    Gate::closed(stage, events).await?.open(stage).await
}

/// A backlog in the stream, with the services before it, and no way to their inbox.
pub(super) struct Gate {
    lock: PgTransaction<'static>,
    messages: usize,
    dispatches: i64,
}

impl Gate {
    pub(super) async fn closed(stage: &Stage, events: &[Event]) -> anyhow::Result<Self> {
        let there = number(&stage.world.fulfillment, DISPATCHES).await?;
        let lock = stage.gate().await?;
        publish_all(stage.js(), events).await?;
        let messages = events.len();
        Ok(Self { lock, messages, dispatches: there + i64::try_from(messages)? })
    }

    /// Lets them, and waits until all is done. Returns the rate at which that went.
    pub(super) async fn open(self, stage: &Stage) -> anyhow::Result<f64> {
        let begun = Instant::now();
        self.lock.commit().await?;
        stage.acked().await?;
        let rate = rate(self.messages, begun);
        // Among a million that are kept, counting them takes longer than a small backlog.
        let found = number(&stage.world.fulfillment, DISPATCHES).await?;
        ensure!(found == self.dispatches, "{found} dispatches instead of {}", self.dispatches);
        Ok(rate)
    }
}

/// A ceiling: every message of the stream pulled and acked, and nothing done with it.
async fn pull_and_ack(stage: &Stage, count: usize) -> anyhow::Result<f64> {
    let mut messages =
        durable(stage, "raw", DeliverPolicy::All).await?.messages().await?.take(count);
    let begun = Instant::now();
    while let Some(message) = messages.try_next().await? {
        ack(&message).await?;
    }
    Ok(rate(count, begun))
}

/// A durable of the bench's own.
pub(super) async fn durable(
    stage: &Stage,
    name: &str,
    deliver_policy: DeliverPolicy,
) -> anyhow::Result<PullConsumer> {
    let config = pull::Config {
        durable_name: Some(name.to_owned()),
        deliver_policy,
        ack_policy: AckPolicy::Explicit,
        max_ack_pending: 20_000,
        ..Default::default()
    };
    Ok(stage.stream(ORDERS).await?.create_consumer(config).await?)
}

#[expect(clippy::disallowed_methods, reason = "what the consumer is compared with")]
pub(super) async fn ack(message: &Message) -> anyhow::Result<()> {
    message.ack().await.map_err(anyhow::Error::from_boxed)
}

const CLAIM: &str = "insert into processed_events (consumer, event_id)
                     select 'raw', event_id from unnest($1::uuid[]) as event (event_id)
                     on conflict do nothing";
const REQUEST: &str = "insert into dispatches
    (dispatch_id, transaction_id, order_id, customer_id, amount_minor, currency, event_id, stream_seq, traceparent)
    select dispatch_id, 'tx-' || order_id, order_id, 'C-1', 1999, 'EUR', event_id, 1,
           '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
    from unnest($1::uuid[], $2::uuid[], $3::text[]) as request (dispatch_id, event_id, order_id)
    on conflict do nothing";

/// The other ceiling: the rows, in large transactions, one after another.
async fn insert_all(pool: &PgPool, count: usize) -> anyhow::Result<f64> {
    let events = events("bulk", count);
    let begun = Instant::now();
    for part in events.chunks(BULK) {
        insert(pool, part).await?;
    }
    Ok(rate(count, begun))
}

#[expect(clippy::disallowed_methods, reason = "nobody cancels a measurement")]
pub(super) async fn insert(pool: &PgPool, events: &[Event]) -> anyhow::Result<()> {
    let event_ids: Vec<Uuid> = events.iter().map(|event| event.id).collect();
    let dispatch_ids: Vec<Uuid> = events.iter().map(|_| Uuid::now_v7()).collect();
    let orders: Vec<&str> = events.iter().map(|event| event.order.as_str()).collect();
    let mut tx = pool.begin().await?;
    sqlx::query(CLAIM).bind(&event_ids).execute(&mut *tx).await?;
    sqlx::query(REQUEST).bind(dispatch_ids).bind(&event_ids).bind(orders).execute(&mut *tx).await?;
    Ok(tx.commit().await?)
}

/// The floor: for each message a transaction, then its ack.
async fn textbook(stage: &Stage, count: usize, at_once: usize) -> anyhow::Result<f64> {
    let pool = &stage.world.fulfillment;
    let name = format!("textbook-{at_once}");
    let messages = durable(stage, &name, DeliverPolicy::All).await?.messages().await?;
    let begun = Instant::now();
    messages
        .take(count)
        .map_err(anyhow::Error::from)
        .map(async |message| {
            let message = message?;
            let body: Value = serde_json::from_slice(&message.payload)?;
            let order = format!("{at_once}-{}", body["subject"].as_str().unwrap_or_default());
            let event = Event { id: Uuid::now_v7(), order, body: String::new() };
            insert(pool, &[event]).await?;
            ack(&message).await
        })
        .buffer_unordered(at_once)
        .try_for_each(async |()| Ok(()))
        .await?;
    Ok(rate(count, begun))
}
