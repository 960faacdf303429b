//! What several tests need.

use std::time::Duration;

use e2e::{
    api::Api,
    services::{Kind, Service},
    world::World,
};
use futures_util::{StreamExt as _, stream};
use shared::{
    events::{Event, EventId, PaymentConfirmed},
    lifecycle::Health,
    nats::Nats,
    relay::Relay,
    topology,
};
use sqlx::PgPool;
use time::OffsetDateTime;

/// Generous: a wait that comes near it has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) const AMOUNT: i64 = 1999;

/// A world with orders-service in it.
pub(crate) async fn world_with_orders() -> (World, Service, Api) {
    let world = World::new().await.unwrap();
    let service = world.start(Kind::Orders).await.unwrap();
    let api = Api::new(service.url());
    (world, service, api)
}

/// Places and pays `count` orders named `{prefix}-{n}`, sixteen at a time.
pub(crate) async fn pay(api: &Api, prefix: &str, count: usize) {
    stream::iter(0..count)
        .for_each_concurrent(16, async |n| {
            let order = format!("{prefix}-{n}");
            assert_eq!(api.place(&order, AMOUNT).await.unwrap().status, 201);
            let paid = api.confirm(&format!("tx-{order}"), &order, AMOUNT).await.unwrap();
            assert_eq!(paid.status, 201, "{}", paid.body);
        })
        .await;
}

/// An event as orders-service would announce it.
pub(crate) fn event(transaction: &str, order: &str, amount: i64) -> Event<PaymentConfirmed> {
    let data = PaymentConfirmed {
        transaction_id: transaction.to_owned().try_into().unwrap(),
        order_id: order.to_owned().try_into().unwrap(),
        customer_id: "C-1".to_owned().try_into().unwrap(),
        amount_minor: amount.try_into().unwrap(),
        currency: "EUR".to_owned().try_into().unwrap(),
        confirmed_at: OffsetDateTime::from_unix_timestamp(1_800_000_000).unwrap(),
    };
    Event::payment_confirmed(EventId::new(), data)
}

pub(crate) fn bytes(event: &Event<PaymentConfirmed>) -> Vec<u8> {
    serde_json::to_vec(event).unwrap()
}

/// A relay in this process, to be stepped by hand.
pub(crate) async fn relay(pool: &PgPool, nats_url: &str, batch: usize) -> Relay {
    Relay::new(
        pool.clone(),
        connected(nats_url).await,
        topology::ORDERS,
        batch,
        Duration::from_millis(500),
        Health::default(),
    )
}

pub(crate) async fn connected(nats_url: &str) -> Nats {
    let nats = shared::nats::connect(&nats_url.parse().unwrap(), "test").await.unwrap();
    nats.wait_connected(LIMIT).await.unwrap();
    nats
}

/// Counts rows with a query of one number.
pub(crate) async fn number(pool: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(pool).await.unwrap()
}
