//! Where it is measured: servers, a backlog, and the moment from which somebody may work on it.

use std::time::Duration;

use crate::{
    api::Api,
    contract::{ORDERS, PAYMENT_CONFIRMED},
    services::{Kind, Service},
    wait::eventually,
    world::World,
};
use anyhow::{Context as _, ensure};
use async_nats::{
    HeaderMap,
    jetstream::{self, message::PublishMessage, stream::Stream},
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::json;
use sqlx::{PgPool, PgTransaction};
use time::OffsetDateTime;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

/// As it is deployed: an acknowledged publish is on disk.
pub const ALWAYS: &str = "always";
/// The default of nats-server: it is on disk within two minutes.
pub const DEFAULT: &str = "2m";

/// Publishes in flight, of whoever publishes as fast as can be.
const IN_FLIGHT: usize = 1000;
const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// For the largest backlog, on the slowest of our machines.
const LIMIT: Duration = Duration::from_secs(300);
/// Between looks whether a backlog is gone: short beside what is measured, and rare beside its work.
const LOOK: Duration = Duration::from_millis(10);

/// An event as orders-service would announce it.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Event {
    pub id: Uuid,
    pub order: String,
    pub body: String,
}

/// Events of as many orders.
pub fn events(prefix: &str, count: usize) -> Vec<Event> {
    let confirmed_at = OffsetDateTime::now_utc()
        .format(&time::format_description::well_known::Rfc3339)
        .expect("now can be written");
    let event = |n| {
        let (id, order) = (Uuid::now_v7(), format!("{prefix}-{n}"));
        let body = json!({
            "specversion": "1.0", "id": id, "source": "/orders-service", "type": "payment.confirmed.v1",
            "subject": order, "time": confirmed_at, "datacontenttype": "application/json",
            "data": {
                "transactionId": format!("tx-{order}"), "orderId": order, "customerId": "C-1",
                "amountMinor": 1999, "currency": "EUR", "confirmedAt": confirmed_at,
            },
        });
        Event { id, order, body: body.to_string() }
    };
    (0..count).map(event).collect()
}

/// Servers and two databases, as deployed.
pub struct Stage {
    pub world: World,
}

impl Stage {
    pub async fn start(sync_interval: &str) -> anyhow::Result<Self> {
        Ok(Self { world: World::measured(sync_interval).await? })
    }

    pub fn js(&self) -> &jetstream::Context {
        &self.world.broker.js
    }

    /// A service that is ready.
    pub async fn service(&self, kind: Kind) -> anyhow::Result<Service> {
        self.service_with(kind, &[]).await
    }

    pub async fn service_with(
        &self,
        kind: Kind,
        settings: &[(&str, String)],
    ) -> anyhow::Result<Service> {
        let mut plan = self.world.deployed_plan(kind)?;
        for (name, value) in settings {
            plan = plan.with(name, value);
        }
        let service = plan.start().await?;
        let api = Api::new(service.url());
        eventually("it is ready", Duration::from_secs(30), async || api.ready().await).await?;
        Ok(service)
    }

    /// Takes the lease, so that no relay of orders-service works.
    pub async fn hold_relay(&self) -> anyhow::Result<()> {
        let hold = "update relay_lease
                    set holder = 'ffffffff-ffff-ffff-ffff-ffffffffffff', expires_at = now() + interval '1 h'
                    where expires_at <= now()";
        eventually("no relay is at work", LIMIT, async || {
            let held = sqlx::query(hold).execute(&self.world.orders).await?.rows_affected();
            ensure!(held == 1, "one is");
            Ok(())
        })
        .await
    }

    /// Gives the lease back.
    pub async fn let_relay_go(&self) -> anyhow::Result<()> {
        sqlx::query("update relay_lease set expires_at = now()")
            .execute(&self.world.orders)
            .await?;
        Ok(())
    }

    /// Writes events to the outbox of orders-service, past its HTTP.
    pub async fn fill_outbox(&self, events: &[Event]) -> anyhow::Result<()> {
        for part in events.chunks(10_000) {
            let ids: Vec<Uuid> = part.iter().map(|event| event.id).collect();
            let orders: Vec<&str> = part.iter().map(|event| event.order.as_str()).collect();
            let bodies: Vec<&str> = part.iter().map(|event| event.body.as_str()).collect();
            sqlx::query(
                "insert into outbox (event_id, aggregate_id, subject, payload, traceparent)
                 select id, aggregate, $4, body::jsonb, $5
                 from unnest($1::uuid[], $2::text[], $3::text[]) as event (id, aggregate, body)",
            )
            .bind(ids)
            .bind(orders)
            .bind(bodies)
            .bind(PAYMENT_CONFIRMED)
            .bind(TRACEPARENT)
            .execute(&self.world.orders)
            .await?;
        }
        Ok(())
    }

    /// What autovacuum and the checkpointer do within minutes, of which some would see the end and others
    /// not.
    pub async fn settle(&self) -> anyhow::Result<()> {
        for pool in [&self.world.orders, &self.world.fulfillment] {
            sqlx::query("vacuum analyze").execute(pool).await?;
        }
        sqlx::query("checkpoint").execute(&self.world.orders).await?;
        Ok(())
    }

    /// Waits until nothing in the outbox of orders-service waits.
    pub async fn drained(&self) -> anyhow::Result<()> {
        until(async || {
            let waits = "select exists (select from outbox where published_at is null)";
            let waits: bool = sqlx::query_scalar(waits).fetch_one(&self.world.orders).await?;
            Ok(!waits)
        })
        .await
    }

    /// Waits until the stream of orders-service holds so many messages.
    pub async fn streamed(&self, count: usize) -> anyhow::Result<()> {
        until(async || Ok(self.world.broker.count().await? >= count as u64)).await
    }

    /// Waits until the durable of fulfillment-service has been acked everything.
    pub async fn acked(&self) -> anyhow::Result<()> {
        until(async || Ok(self.world.broker.consumer_backlog().await? == (0, 0))).await
    }

    /// A lock on the inbox of fulfillment-service, which waits for it.
    #[expect(clippy::disallowed_methods, reason = "nobody cancels a measurement")]
    pub async fn gate(&self) -> anyhow::Result<PgTransaction<'static>> {
        let mut gate = self.world.fulfillment.begin().await?;
        sqlx::query("lock table processed_events").execute(&mut *gate).await?;
        Ok(gate)
    }

    pub async fn stream(&self, name: &str) -> anyhow::Result<Stream> {
        self.js().get_stream(name).await.with_context(|| format!("no stream {name}"))
    }
}

async fn until(mut look: impl AsyncFnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !look().await? {
        ensure!(begun.elapsed() < LIMIT, "the backlog is not gone within {LIMIT:?}");
        sleep(LOOK).await;
    }
    Ok(())
}

/// Publishes events, as many at a time as makes it fast.
pub async fn publish_all(js: &jetstream::Context, events: &[Event]) -> anyhow::Result<()> {
    stream::iter(events)
        .map(|event| publish(js, event))
        .buffer_unordered(IN_FLIGHT)
        .try_for_each(async |_| Ok(()))
        .await
}

/// Publishes an event with the headers that the relay gives it; returns its place in the stream.
#[expect(clippy::disallowed_methods, reason = "what the relay is compared with")]
pub async fn publish(js: &jetstream::Context, event: &Event) -> anyhow::Result<u64> {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", "application/cloudevents+json");
    headers.insert("traceparent", TRACEPARENT);
    let message = PublishMessage::build()
        .headers(headers)
        .payload(event.body.clone().into())
        .message_id(event.id.to_string())
        .expected_stream(ORDERS);
    Ok(js.send_publish(PAYMENT_CONFIRMED, message).await?.await?.sequence)
}

/// Events per second.
pub fn rate(count: usize, begun: Instant) -> f64 {
    count as f64 / begun.elapsed().as_secs_f64()
}

/// Rows of a query of one number.
pub async fn number(pool: &PgPool, query: &'static str) -> anyhow::Result<i64> {
    Ok(sqlx::query_scalar(query).fetch_one(pool).await?)
}
