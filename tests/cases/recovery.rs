//! A broker that acknowledged and lost it all the same: noticed by itself, and filled again from the
//! outbox, under the same event ids and before anything new.

use std::path::Path;

use anyhow::ensure;
use async_nats::jetstream::{Message, stream::Stream};
use e2e::{
    api::{Api, confirm_stubbornly},
    contract::ORDERS,
    services::{Kind, Plan},
    wait::eventually,
    world::World,
};
use futures_util::{StreamExt as _, stream};
use serde_json::Value;
use shared::{
    events::EventId,
    lease,
    outbox::{self, Published},
    relay::{Outcome, Relay},
};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::{
    AMOUNT, DISPATCHES, LIMIT, UNPUBLISHED, announce, bytes, connected, consumer, deliveries,
    enqueue, event, intake, number, pay, published, ready, relay,
};

/// The broker dies, and comes back with another store.
async fn replace_store(world: &mut World, copy: Option<&Path>) {
    world.nats.stop("KILL").await.unwrap();
    world.nats.replace_store(copy).unwrap();
    world.nats.start_again().await.unwrap();
}

/// The ids of the events in the stream, in its order.
async fn in_the_stream(world: &World) -> Vec<String> {
    let messages = world.broker.messages().await.unwrap();
    messages.iter().filter_map(e2e::broker::Stored::event_id).collect()
}

/// Whether the stream has every event of the outbox, each once, and nothing else.
async fn is_whole(world: &World) -> bool {
    let (mut there, mut written) = (in_the_stream(world).await, in_the_outbox(&world.orders).await);
    there.sort();
    written.sort();
    there == written
}

/// The ids of the events in the outbox, in its order.
async fn in_the_outbox(pool: &PgPool) -> Vec<String> {
    let query = "select event_id::text from outbox order by seq";
    sqlx::query_scalar(query).fetch_all(pool).await.unwrap()
}

/// Writes events `{prefix}-{n}`, each of an order of its own.
async fn enqueue_some(world: &World, prefix: &str, count: usize) {
    for n in 0..count {
        let order = format!("{prefix}-{n}");
        enqueue(&world.orders, &event(&format!("tx-{order}"), &order, AMOUNT)).await;
    }
}

/// Steps until nothing waits, and returns how many events were found to be lost.
async fn relay_all(relay: &Relay) -> u64 {
    let mut lost = 0;
    eventually("the relay has nothing to do", LIMIT, async || {
        let outcome = relay.step().await?;
        if let Outcome::Refilled(count) = outcome {
            lost += count;
        }
        ensure!(outcome == Outcome::Idle, "{outcome:?}");
        Ok(())
    })
    .await
    .unwrap();
    lost
}

/// Payments go on while the broker loses something, and everything ends as if it had not.
async fn under_load(lose: impl AsyncFnOnce(&mut World)) {
    const PAYMENTS: usize = 600;
    let mut world = World::new().await.unwrap();
    let _orders = world.start(Kind::Orders).await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = [Api::new(_orders.url())];
    ready(&api[0]).await;
    let load = stream::iter(0..PAYMENTS).for_each_concurrent(4, async |n| {
        confirm_stubbornly(&api, &format!("A-{n}"), AMOUNT).await;
    });
    tokio::join!(load, lose(&mut world));
    let ledger = world.settled(LIMIT).await.unwrap();
    assert_eq!((ledger.payments, ledger.undispatched), (PAYMENTS, 0), "{ledger:?}");
    let (mut there, mut written) =
        (in_the_stream(&world).await, in_the_outbox(&world.orders).await);
    there.sort();
    there.dedup();
    written.sort();
    assert_eq!(there, written, "the stream is whole again");
}

/// Waits until the outbox knows of so many published events.
async fn marked(world: &World, at_least: i64) {
    let query = "select count(*) from outbox where published_at is not null";
    eventually("events are published", LIMIT, async || {
        let published = number(&world.orders, query).await;
        ensure!(published >= at_least, "{published} of {at_least}");
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_broker_emptied_under_load_is_filled_again_by_itself() {
    under_load(async |world| {
        marked(world, 200).await;
        replace_store(world, None).await;
        // What every deployment begins with. Nobody has to know that something was lost.
        world.run_setup().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_broker_set_back_under_load_is_filled_again_by_itself() {
    under_load(async |world| {
        marked(world, 100).await;
        world.nats.stop("KILL").await.unwrap();
        let copy = world.nats.copy_store().unwrap();
        world.nats.start_again().await.unwrap();
        marked(world, 300).await;
        replace_store(world, Some(&copy)).await;
    })
    .await;
}

#[tokio::test]
async fn what_was_lost_is_found_without_any_new_event_and_goes_before_it() {
    let mut world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    enqueue_some(&world, "A", 3).await;
    assert_eq!(relay_all(&relay).await, 0);
    world.nats.stop("KILL").await.unwrap();
    let copy = world.nats.copy_store().unwrap();
    world.nats.start_again().await.unwrap();
    enqueue_some(&world, "B", 4).await;
    assert_eq!(relay_all(&relay).await, 0, "a restart alone loses nothing");

    replace_store(&mut world, Some(&copy)).await;
    // Somebody is quicker, and takes the places of what was lost.
    for n in 0..10 {
        let (transaction, order) = (format!("tx-X-{n}"), format!("X-{n}"));
        eventually("the broker is back", LIMIT, async || {
            let body = bytes(&event(&transaction, &order, AMOUNT));
            world.broker.publish(&body, None).await
        })
        .await
        .unwrap();
    }
    assert_eq!(relay_all(&relay).await, 4, "without any new event");

    replace_store(&mut world, Some(&copy)).await;
    enqueue_some(&world, "C", 2).await;
    assert_eq!(relay_all(&relay).await, 4);
    assert_eq!(
        in_the_stream(&world).await,
        in_the_outbox(&world.orders).await,
        "in their old order"
    );
}

#[tokio::test]
async fn a_stream_made_anew_behind_the_relays_back_is_filled_again() {
    let world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    enqueue_some(&world, "A", 700).await;
    relay_all(&relay).await;
    // The connection stays: nothing else than the stream tells of it.
    world.broker.js.delete_stream(ORDERS).await.unwrap();
    assert!(matches!(relay.step().await.unwrap(), Outcome::Stuck(_)), "there is no stream");
    world.run_setup().await.unwrap();
    assert_eq!(relay_all(&relay).await, 700);
    assert!(is_whole(&world).await);
}

#[tokio::test]
async fn crash_point_2b_half_way_through_a_refill_the_rest_is_found() {
    let world = World::new().await.unwrap();
    let first = relay(&world.orders, &world.nats.url(), 500).await;
    enqueue_some(&world, "A", 30).await;
    relay_all(&first).await;
    world.broker.js.delete_stream(ORDERS).await.unwrap();
    world.run_setup().await.unwrap();
    // The first one dies after its first page.
    let page = outbox::places(&world.orders, None, None, 10).await.unwrap();
    assert_eq!(outbox::unpublish(&world.orders, &page, "lost").await.unwrap(), 10);
    let next = relay(&world.orders, &world.nats.url(), 500).await;
    assert_eq!(relay_all(&next).await, 20, "the rest");
    assert!(is_whole(&world).await);
}

#[tokio::test]
async fn what_was_acknowledged_before_a_reconnect_is_not_marked_after_it() {
    let mut world = World::new().await.unwrap();
    // One that never gets its acknowledgement, so that the step is under way while the broker is
    // replaced: no stream takes it, but somebody listens.
    let client = world.broker.js.client();
    let mut elsewhere = client.subscribe("elsewhere").await.unwrap();
    enqueue(&world.orders, &event("tx-B", "B", AMOUNT)).await;
    sqlx::query("update outbox set subject = 'elsewhere'").execute(&world.orders).await.unwrap();
    for n in 0..3 {
        enqueue(&world.orders, &event(&format!("tx-A-{n}"), "A", AMOUNT)).await;
    }
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    let lose = async {
        elsewhere.next().await.unwrap();
        eventually("the first of A is stored", LIMIT, async || {
            ensure!(world.broker.count().await? == 1, "not yet");
            Ok(())
        })
        .await
        .unwrap();
        replace_store(&mut world, None).await;
        world.run_setup().await.unwrap();
    };
    let (outcome, ()) = tokio::join!(relay.step(), lose);
    assert_eq!(outcome.unwrap(), Outcome::Worked { published: 0, failed: 1 }, "it was in time");
    eventually("all of A is in the stream", LIMIT, async || {
        relay.step().await?;
        let there = in_the_stream(&world).await;
        let written = in_the_outbox(&world.orders).await;
        ensure!(written[1..].iter().all(|id| there.contains(id)), "{there:?}");
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn whoever_slept_past_its_lease_marks_nothing() {
    let world = World::new().await.unwrap();
    let event = event("tx-A", "A", AMOUNT);
    enqueue(&world.orders, &event).await;
    let acknowledged = [Published { event_id: event.id, stream_seq: 1 }];
    let [asleep, awake] = [Uuid::now_v7(), Uuid::now_v7()];
    for holder in [asleep, awake] {
        assert!(lease::acquire(&world.orders, holder).await.unwrap());
        lease::release(&world.orders, holder).await.unwrap();
    }
    let marked = outbox::mark_published(&world.orders, asleep, &acknowledged).await.unwrap();
    assert_eq!((marked, number(&world.orders, UNPUBLISHED).await), (0, 1));
    assert_eq!(outbox::mark_published(&world.orders, awake, &acknowledged).await.unwrap(), 1);
}

async fn orders_stream(world: &World) -> Stream {
    world.broker.js.get_stream(ORDERS).await.unwrap()
}

/// Three events and something else, delivered, in places 1 to 4.
async fn delivered(world: &World, prefix: &str) -> Vec<Message> {
    eventually("the broker is back", LIMIT, async || world.broker.count().await).await.unwrap();
    for n in 0..3 {
        announce(world, &format!("tx-{prefix}-{n}"), &format!("{prefix}-{n}")).await;
    }
    world.broker.publish(b"garbage", None).await.unwrap();
    deliveries(world, 4).await
}

/// A broker that went back gives the same places to other messages, and believes any ack of them.
#[tokio::test]
async fn what_was_delivered_before_a_reconnect_is_not_acked_after_it() {
    let mut world = World::new().await.unwrap();
    world.nats.stop("KILL").await.unwrap();
    let copy = world.nats.copy_store().unwrap();
    world.nats.start_again().await.unwrap();
    let consumer = consumer(&world, intake(&world.fulfillment), 10).await;
    let connection = consumer.nats.connection();
    let old = delivered(&world, "old").await;
    replace_store(&mut world, Some(&copy)).await;
    consumer.nats.wait_connected(LIMIT).await.unwrap();
    let new = delivered(&world, "new").await;
    assert_eq!((old.len(), new.len()), (4, 4));

    consumer.process(old, connection, &CancellationToken::new()).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 3, "they are handled all the same");
    let unacked = world.broker.consumer_backlog().await.unwrap();
    assert_eq!(unacked, (0, 4), "the others are in the places of the old ones, and not acked");
    consumer.process(new, consumer.nats.connection(), &CancellationToken::new()).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 6);
    assert_eq!(world.broker.consumer_backlog().await.unwrap(), (0, 0));
}

fn column<'a>(rows: &'a [Value], name: &str) -> Vec<&'a str> {
    rows.iter().map(|row| row[name].as_str().unwrap()).collect()
}

/// The audit of a plan: its exit code, and the events it names.
async fn audit(plan: &Plan) -> (i32, Vec<String>) {
    let said = plan.command(&["outbox", "audit", "--json"]).await.unwrap();
    let rows = said.rows();
    (said.code, column(&rows, "eventId").into_iter().map(str::to_owned).collect())
}

/// A purge is not repaired by itself: somebody wanted it. And the broker goes on calling what it purged
/// a duplicate.
#[tokio::test]
async fn an_audit_names_what_is_missing_and_repairs_what_the_broker_still_takes_for_duplicates() {
    let world = World::new().await.unwrap();
    let plan = world.plan(Kind::Orders).unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    enqueue_some(&world, "A", 40).await;
    relay_all(&relay).await;
    assert_eq!(audit(&plan).await, (0, Vec::new()));

    orders_stream(&world).await.purge().sequence(31).await.unwrap();
    assert_eq!(relay_all(&relay).await, 0, "it was purged, not lost");
    let written = in_the_outbox(&world.orders).await;
    let (code, mut missing) = audit(&plan).await;
    missing.reverse();
    assert_eq!((code, missing.as_slice()), (1, &written[..30]), "from the last one back");
    assert_eq!(number(&world.orders, UNPUBLISHED).await, 0, "an audit changes nothing");

    let repaired = plan.command(&["outbox", "audit", "--repair"]).await.unwrap();
    assert_eq!(repaired.code, 0, "{}", repaired.err);
    assert!(repaired.err.contains("40 published events, 30 were missing"), "{}", repaired.err);
    assert!(is_whole(&world).await, "each once, under the same event ids");
    assert_eq!(audit(&plan).await, (0, Vec::new()));
    let again = plan.command(&["outbox", "audit", "--repair"]).await.unwrap();
    assert_eq!(again.code, 0);
    assert_eq!(world.broker.count().await.unwrap(), 40, "nothing to do");
}

#[tokio::test]
async fn the_audit_of_fulfillment_repairs_its_stream_too() {
    let world = World::new().await.unwrap();
    let _orders = world.start(Kind::Orders).await.unwrap();
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    pay(&Api::new(_orders.url()), "A", 5).await;
    world.settled(LIMIT).await.unwrap();
    let stream = world.broker.js.get_stream("FULFILLMENT").await.unwrap();
    stream.purge().await.unwrap();
    let (code, missing) = audit(&fulfillment.plan).await;
    assert_eq!((code, missing.len()), (1, 5));
    let repaired = fulfillment.plan.command(&["outbox", "audit", "--repair"]).await.unwrap();
    assert_eq!(repaired.code, 0, "{}", repaired.err);
    assert_eq!(audit(&fulfillment.plan).await, (0, Vec::new()));
    world.settled(LIMIT).await.unwrap();
}

#[tokio::test]
async fn everything_since_a_time_can_be_published_again_and_is_applied_once() {
    let world = World::new().await.unwrap();
    let orders = world.start(Kind::Orders).await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = Api::new(orders.url());
    pay(&api, "early", 3).await;
    published(&world).await;
    let query = r#"select to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"#;
    let since: String = sqlx::query_scalar(query).fetch_one(&world.orders).await.unwrap();
    pay(&api, "late", 4).await;
    world.settled(LIMIT).await.unwrap();
    let republish = ["outbox", "republish", "--since", &since, "--json"];
    let dry = orders.plan.command(&[&republish[..], &["--dry-run"]].concat()).await.unwrap();
    assert_eq!((dry.code, dry.rows().len()), (0, 4), "{}", dry.err);
    assert_eq!(number(&world.orders, UNPUBLISHED).await, 0, "a dry run changes nothing");
    // So that the broker does not have them.
    orders_stream(&world).await.purge().await.unwrap();
    let real = orders.plan.command(&republish).await.unwrap();
    assert_eq!((real.code, real.rows().len()), (0, 4), "{}", real.err);
    world.settled(LIMIT).await.unwrap();
    let mut late =
        column(&real.rows(), "eventId").into_iter().map(str::to_owned).collect::<Vec<_>>();
    late.sort();
    let mut there = in_the_stream(&world).await;
    there.sort();
    assert_eq!(there, late);
    let nonsense =
        orders.plan.command(&["outbox", "republish", "--since", "yesterday"]).await.unwrap();
    assert_eq!(nonsense.code, 2);
    assert!(nonsense.err.contains("--since"), "{}", nonsense.err);
}

#[tokio::test]
async fn operators_see_what_waits_and_let_parked_events_go() {
    let world = World::new().await.unwrap();
    let plan = world.plan(Kind::Orders).unwrap();
    enqueue_some(&world, "A", 3).await;
    let parked = in_the_outbox(&world.orders).await[1].clone();
    let park = "update outbox set parked_at = now(), last_error = E'too\\nlarge' where event_id::text = $1";
    sqlx::query(park).bind(&parked).execute(&world.orders).await.unwrap();

    let list = plan.command(&["outbox", "list", "--json"]).await.unwrap();
    assert_eq!(column(&list.rows(), "eventId"), in_the_outbox(&world.orders).await);
    let list = plan.command(&["outbox", "list", "--parked"]).await.unwrap();
    assert_eq!(list.out.lines().count(), 2, "a heading and a row: {}", list.out);
    assert!(list.out.contains(&parked) && list.out.contains("too\\nlarge"), "{}", list.out);
    let status = &plan.command(&["outbox", "status", "--json"]).await.unwrap().rows()[0];
    assert_eq!(
        (&status["pending"], &status["parked"], &status["published"]),
        (&2.into(), &1.into(), &0.into())
    );
    assert!(status["oldestPendingSeconds"].as_f64().unwrap() > 0.0);

    let unpark = ["outbox", "unpark", &parked];
    assert_eq!(plan.command(&unpark).await.unwrap().code, 0);
    let again = plan.command(&unpark).await.unwrap();
    assert_eq!(again.code, 1, "it is not parked any more");
    assert!(again.err.contains("outbox list --parked"), "{}", again.err);
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    relay_all(&relay).await;
    assert_eq!(in_the_stream(&world).await.len(), 3);
}

/// A place in the stream is known by what stands there, not by how far the stream has come.
#[tokio::test]
async fn somebody_elses_message_in_the_place_of_an_event_is_not_the_event() {
    let world = World::new().await.unwrap();
    announce(&world, "tx-X", "X").await;
    let nats = connected(&world.nats.url()).await;
    let event_id = EventId::new();
    let held = shared::audit::holds(&nats, ORDERS, event_id, 1).await;
    assert!(!held.unwrap());
    let held = shared::audit::holds(&nats, ORDERS, event_id, 9).await;
    assert!(!held.unwrap());
    world.broker.js.delete_stream(ORDERS).await.unwrap();
    let unknown = shared::audit::holds(&nats, ORDERS, event_id, 1).await;
    assert!(unknown.is_err(), "without a stream nobody knows");
}
