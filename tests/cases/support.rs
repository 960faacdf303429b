//! What several tests need.

use std::{sync::Arc, time::Duration};

use async_nats::jetstream::Message;
use e2e::{
    api::{Answer, Api},
    contract::ORDER_DISPATCHED,
    outside::Outside,
    proxy::Proxy,
    services::{Kind, Service},
    wait::eventually,
    world::World,
};
use fulfillment_service::{CONSUMER, intake::Intake};
use futures_util::{StreamExt as _, stream};
use serde::Serialize;
use shared::{
    consumer::Consumer,
    database,
    events::{Event, EventId, OrderDispatched, PaymentConfirmed},
    handler::Handler,
    lifecycle::Health,
    nats::Nats,
    outbox,
    relay::Relay,
    telemetry::TraceParent,
    topology,
};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

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

/// orders-service, ready, with a proxy between it and the broker.
pub(crate) async fn proxied_orders(world: &World) -> (Proxy, Service, Api) {
    let proxy = Proxy::start(world.nats.address()).await.unwrap();
    let orders = world.plan_through(Kind::Orders, &proxy).unwrap().start().await.unwrap();
    let api = Api::new(orders.url());
    ready(&api).await;
    (proxy, orders, api)
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

/// Writes an event as a committed transaction does, and returns its id.
pub(crate) async fn enqueue(pool: &PgPool, event: &Event<PaymentConfirmed>) -> String {
    let mut tx = database::begin(pool).await.unwrap();
    outbox::enqueue(&mut tx, event, &TraceParent::from_header(None)).await.unwrap();
    tx.commit().await.unwrap();
    event.id.to_string()
}

/// What fulfillment-service reports about it.
pub(crate) fn report(transaction: &str, order: &str, code: &str) -> Event<OrderDispatched> {
    Event::order_dispatched(OrderDispatched {
        dispatch_id: Uuid::now_v7(),
        order_id: order.to_owned().try_into().unwrap(),
        transaction_id: transaction.to_owned().try_into().unwrap(),
        tracking_code: code.to_owned().try_into().unwrap(),
        dispatched_at: OffsetDateTime::from_unix_timestamp(1_800_000_060).unwrap(),
    })
}

/// Publishes such a report past the outbox, without a message id.
pub(crate) async fn publish_report(world: &World, report: &Event<OrderDispatched>) {
    world.broker.publish_to(ORDER_DISPATCHED, &bytes(report), None).await.unwrap();
}

/// Waits until a durable on FULFILLMENT has nothing left to do.
pub(crate) async fn reported(world: &World, durable: &str) {
    eventually("all reports are consumed", LIMIT, async || {
        let backlog = world.broker.backlog(topology::FULFILLMENT, durable).await?;
        anyhow::ensure!(backlog == (0, 0), "pending, ack pending: {backlog:?}");
        Ok(())
    })
    .await
    .unwrap();
}

pub(crate) fn bytes<D: Serialize>(event: &Event<D>) -> Vec<u8> {
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
    let settings = shared::login::Settings {
        nats_url: nats_url.parse().unwrap(),
        nats_credentials_file: None,
        nats_nkey_seed_file: None,
        nats_ca_file: None,
    };
    let nats = shared::nats::connect(&settings, "test", "test").await.unwrap();
    nats.wait_connected(LIMIT).await.unwrap();
    nats
}

/// Counts rows with a query of one number.
pub(crate) async fn number(pool: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(pool).await.unwrap()
}

/// Waits until no event of orders-service waits in its outbox.
pub(crate) async fn published(world: &World) {
    eventually("everything is published", LIMIT, async || {
        let waiting = number(&world.orders, UNPUBLISHED).await;
        anyhow::ensure!(waiting == 0, "{waiting} rows wait");
        Ok(())
    })
    .await
    .unwrap();
}

/// Waits until the durable has nothing left to do.
pub(crate) async fn consumed(world: &World) {
    eventually("everything is consumed", LIMIT, async || {
        let backlog = world.broker.consumer_backlog().await?;
        anyhow::ensure!(backlog == (0, 0), "pending, ack pending: {backlog:?}");
        Ok(())
    })
    .await
    .unwrap();
}

/// A consumer in this process, to be stepped by hand.
pub(crate) async fn consumer<H: Handler>(
    world: &World,
    handler: H,
    max_deliveries: i64,
) -> Consumer<H> {
    Consumer {
        pool: world.fulfillment.clone(),
        nats: connected(&world.nats.url()).await,
        stream: topology::ORDERS,
        durable: CONSUMER,
        batch: 200,
        max_deliveries,
        handler,
        health: Health::default(),
    }
}

/// What the durable has to deliver, at most `most`; waits for the first.
pub(crate) async fn deliveries(world: &World, most: usize) -> Vec<Message> {
    let durable = world.broker.durable().await.unwrap();
    eventually("something is delivered", LIMIT, async || {
        let fetched = durable.fetch().max_messages(most).messages().await?;
        let batch: Vec<_> = fetched.map(Result::unwrap).collect().await;
        anyhow::ensure!(!batch.is_empty(), "nothing");
        Ok(batch)
    })
    .await
    .unwrap()
}

/// The business step of fulfillment, with nobody to wake.
pub(crate) fn intake(pool: &PgPool) -> Intake {
    Intake { pool: pool.clone(), dispatcher_waker: Arc::default() }
}

/// Writes a dispatch that is due, as the intake does.
pub(crate) async fn request_dispatch(
    connection: &mut PgConnection,
    transaction: &str,
    order: &str,
) {
    sqlx::query(
        "insert into dispatches (dispatch_id, transaction_id, order_id, customer_id, amount_minor,
                                 currency, event_id, stream_seq)
         values (gen_random_uuid(), $1, $2, 'C-1', 1999, 'EUR', gen_random_uuid(), 1)",
    )
    .bind(transaction)
    .bind(order)
    .execute(connection)
    .await
    .unwrap();
}

pub(crate) const DISPATCHES: &str = "select count(*) from dispatches";

/// Outbox rows that wait.
pub(crate) const UNPUBLISHED: &str = "select count(*) from outbox where published_at is null";

pub(crate) const DEAD_LETTERS: &str = "select count(*) from dead_letters";

pub(crate) const PROCESSED: &str = "select count(*) from processed_events";

/// Publishes, past the outbox and without a message id, the event of a payment.
pub(crate) async fn announce(world: &World, transaction: &str, order: &str) -> Vec<u8> {
    let body = bytes(&event(transaction, order, AMOUNT));
    world.broker.publish(&body, None).await.unwrap();
    body
}

/// Waits for `count` dispatches.
pub(crate) async fn dispatched(world: &World, count: i64) {
    eventually("they are dispatched", LIMIT, async || {
        let dispatches: i64 = sqlx::query_scalar(DISPATCHES).fetch_one(&world.fulfillment).await?;
        anyhow::ensure!(dispatches == count, "{dispatches} of {count}");
        Ok(())
    })
    .await
    .unwrap();
}

/// Waits until somebody else's API was called so many times.
pub(crate) async fn called(outside: &Outside, times: usize) {
    eventually("it is called", LIMIT, async || {
        let calls = outside.calls().len();
        anyhow::ensure!(calls >= times, "{calls} of {times}");
        Ok(())
    })
    .await
    .unwrap();
}

pub(crate) async fn ready(api: &Api) {
    eventually("it is ready", LIMIT, async || api.ready().await).await.unwrap();
}

/// Waits until readiness says that a check is `ok` or `failing`, and returns all it says.
pub(crate) async fn check_is(api: &Api, check: &str, state: &str) -> Answer {
    eventually("the check changes", LIMIT, async || {
        let answer = api.get("/readyz").await?;
        anyhow::ensure!(answer.body["checks"][check] == state, "{}", answer.body);
        Ok(answer)
    })
    .await
    .unwrap()
}

/// Waits until a session of `service` waits for a lock.
pub(crate) async fn blocked(pool: &PgPool, service: &'static str) {
    eventually("the transaction has come this far", LIMIT, async || {
        let waiting: i64 = sqlx::query_scalar(
            "select count(*) from pg_stat_activity where datname = current_database()
             and application_name like $1 || '-%' and wait_event_type = 'Lock'",
        )
        .bind(service)
        .fetch_one(pool)
        .await?;
        anyhow::ensure!(waiting > 0, "nobody waits");
        Ok(())
    })
    .await
    .unwrap();
}

/// Waits until a service has logged something.
pub(crate) async fn logged(service: &Service, text: &str) {
    eventually("it is logged", LIMIT, async || {
        anyhow::ensure!(service.log().contains(text), "{}", service.log());
        Ok(())
    })
    .await
    .unwrap();
}

/// Waits until a database has no session of our services any more: a moment after they are gone,
/// unless one was left in a transaction, which PostgreSQL ends after 30 s.
pub(crate) async fn no_session(pool: &PgPool) {
    eventually("no session is left", Duration::from_secs(15), async || {
        let open = "select count(*) from pg_stat_activity where datname = current_database()
                    and application_name like '%-service-%'";
        let sessions = number(pool, open).await;
        anyhow::ensure!(sessions == 0, "{sessions} sessions");
        Ok(())
    })
    .await
    .unwrap();
}
