//! The crash points of the code, by their labels: real processes, killed with -9 at the point.
//!
//! No fault points in the services. A lock held by the test stops a transaction where it should
//! die; a proxy that holds one direction makes an acknowledgement late for ever.

use e2e::{
    api::Api,
    proxy::{Flow, Proxy},
    services::Kind,
    wait::eventually,
    world::World,
};
use shared::{database::begin, topology};

use crate::support::{
    AMOUNT, DEAD_LETTERS, DISPATCHES, LIMIT, UNPUBLISHED, announce, blocked, check_is, consumed,
    dispatched, no_session, number, pay, proxied_orders, ready, request_dispatch,
    world_with_orders,
};

#[tokio::test]
async fn crash_point_1a_before_commit_nothing_happened_and_the_provider_asks_again() {
    let (world, mut orders, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    // The transaction gets as far as its last statement, and waits there.
    let mut lock = begin(&world.orders).await.unwrap();
    sqlx::query("lock table outbox in share mode").execute(&mut *lock).await.unwrap();
    let confirm = async {
        assert!(api.confirm("tx-1", "A-1", AMOUNT).await.is_err(), "killed before it could answer");
    };
    let kill = async {
        blocked(&world.orders, "orders-service").await;
        orders.end("KILL").await.unwrap();
    };
    tokio::join!(confirm, kill);
    lock.rollback().await.unwrap();

    no_session(&world.orders).await;
    assert_eq!(number(&world.orders, "select count(*) from payments").await, 0);
    assert_eq!(number(&world.orders, "select count(*) from outbox").await, 0);
    orders.start_again().await.unwrap();
    assert_eq!(api.confirm("tx-1", "A-1", AMOUNT).await.unwrap().status, 201);
}

#[tokio::test]
async fn crash_point_1b_after_commit_the_event_waits_for_any_relay() {
    let mut world = World::new().await.unwrap();
    let mut orders = world.start(Kind::Orders).await.unwrap();
    let api = Api::new(orders.url());
    world.nats.stop("KILL").await.unwrap();
    pay(&api, "A", 10).await;
    orders.end("KILL").await.unwrap();
    assert_eq!(number(&world.orders, UNPUBLISHED).await, 10);

    world.nats.start_again().await.unwrap();
    let _another = world.start(Kind::Orders).await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    assert_eq!(world.settled(LIMIT).await.unwrap().dispatches, 10);
}

#[tokio::test]
async fn crash_point_2_between_publish_and_mark_is_absorbed_by_the_broker() {
    let world = World::new().await.unwrap();
    let (proxy, mut orders, api) = proxied_orders(&world).await;
    proxy.set(Flow::HoldReplies);
    pay(&api, "A", 20).await;
    eventually("the broker has some", LIMIT, async || {
        anyhow::ensure!(world.broker.count().await? > 0, "none");
        Ok(())
    })
    .await
    .unwrap();
    orders.end("KILL").await.unwrap();
    let stored = world.broker.count().await.unwrap();
    assert_eq!(number(&world.orders, UNPUBLISHED).await, 20);

    proxy.set(Flow::Open);
    orders.start_again().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let ledger = world.settled(LIMIT).await.unwrap();
    assert!(stored > 0);
    assert_eq!((ledger.messages, ledger.dispatches), (20, 20), "published again, stored once");
    let places: i64 = number(&world.orders, "select count(distinct stream_seq) from outbox").await;
    assert_eq!(places, 20, "each row knows where its message is");
}

#[tokio::test]
async fn crash_point_2_beyond_the_brokers_window_is_absorbed_by_the_inbox() {
    let world = World::new().await.unwrap();
    let mut config = topology::wanted(1)[0].stream.clone();
    config.duplicate_window = std::time::Duration::from_millis(100);
    world.broker.js.update_stream(&config).await.unwrap();
    let proxy = Proxy::start(world.nats.address()).await.unwrap();
    let mut orders = world.plan_through(Kind::Orders, &proxy).unwrap().start().await.unwrap();
    let api = Api::new(orders.url());
    // Not ready, because of the window; it works all the same.
    check_is(&api, "nats", "ok").await;
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    proxy.set(Flow::HoldReplies);
    pay(&api, "A", 1).await;
    dispatched(&world, 1).await;
    orders.end("KILL").await.unwrap();
    proxy.set(Flow::Open);
    // The lease of the dead relay is longer than the window.
    orders.start_again().await.unwrap();
    let ledger = world.settled(LIMIT).await.unwrap();
    assert_eq!((ledger.messages, ledger.events), (2, 1), "the broker had forgotten");
    assert_eq!((ledger.dispatches, ledger.absorbed_by_event_id), (1, 1));
}

#[tokio::test]
async fn crash_point_3a_before_commit_everything_is_delivered_again() {
    let world = World::new().await.unwrap();
    let mut fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    // The same dispatch, in a transaction that does not end: the event is claimed, and its effect
    // waits for that.
    let mut lock = begin(&world.fulfillment).await.unwrap();
    request_dispatch(&mut lock, "tx-1", "A-1").await;
    announce(&world, "tx-1", "A-1").await;
    blocked(&world.fulfillment, "fulfillment-service").await;
    fulfillment.end("KILL").await.unwrap();
    lock.rollback().await.unwrap();
    fulfillment.start_again().await.unwrap();
    // After the acknowledgement time.
    dispatched(&world, 1).await;
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}

#[tokio::test]
async fn crash_point_3b_between_commit_and_ack_is_absorbed_by_the_inbox() {
    let world = World::new().await.unwrap();
    let proxy = Proxy::start(world.nats.address()).await.unwrap();
    let plan = world.plan_through(Kind::Fulfillment, &proxy).unwrap();
    let mut fulfillment = plan.start().await.unwrap();
    let api = Api::new(fulfillment.url());
    ready(&api).await;
    // Its pull request is with the broker; nothing it says from now on gets there.
    proxy.set(Flow::HoldRequests);
    announce(&world, "tx-1", "A-1").await;
    dispatched(&world, 1).await;
    assert_eq!(world.broker.consumer_backlog().await.unwrap(), (0, 1), "delivered and not acked");
    fulfillment.end("KILL").await.unwrap();
    drop(proxy);
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    assert!(fulfillment.log().contains("absorbed by Event"), "{}", fulfillment.log());
}
