//! One parcel per dispatch, whatever the carrier, a crash or a lease does.

use std::{collections::HashSet, time::Duration};

use async_nats::HeaderMap;
use e2e::{
    api::Api,
    contract::{FULFILLMENT, PAYMENT_CONFIRMED},
    outside::{Call, Outside, Reply},
    services::{Kind, Plan, Service},
    wait::eventually,
    world::World,
};
use fulfillment_service::dispatcher::{LANES, LEASE};
use serde_json::json;
use shared::database::begin;
use uuid::Uuid;

use crate::support::{
    AMOUNT, DEAD_LETTERS, LIMIT, UNPUBLISHED, blocked, bytes, called, consumed, event, logged,
    number, pay, ready, reported, request_dispatch,
};

const DISPATCHED: &str = "select count(*) from dispatches where status = 'dispatched'";

/// The pair, with a carrier of our own.
async fn pair(world: &World, carrier: &Outside) -> (Service, Api, Service) {
    let orders = world.start(Kind::Orders).await.unwrap();
    let api = Api::new(orders.url());
    (orders, api, fulfillment(world, carrier).start().await.unwrap())
}

/// The pair with `count` payments, and the carrier holding a call for each.
async fn pair_with_calls_held(world: &World, count: usize) -> (Outside, Service, Service) {
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let (orders, api, fulfillment) = pair(world, &carrier).await;
    pay(&api, "A", count).await;
    called(&carrier, count).await;
    (carrier, orders, fulfillment)
}

fn fulfillment(world: &World, carrier: &Outside) -> Plan {
    world.plan(Kind::Fulfillment).unwrap().with("CARRIER_URL", &carrier.url())
}

/// Waits until all is done, and looks whether each of `count` payments became one parcel.
async fn one_parcel_each(world: &World, carrier: &Outside, count: usize) {
    let ledger = world.settled(LIMIT).await.unwrap();
    assert_eq!((ledger.payments, ledger.dispatches, ledger.undispatched), (count, count, 0));
    let parcels = carrier.effects();
    assert_eq!(parcels.len(), count, "parcels by key");
    let orders: HashSet<_> = parcels.values().map(|body| body["orderId"].to_string()).collect();
    assert_eq!(orders.len(), count, "parcels by order");
    let events = world.broker.js.get_stream(FULFILLMENT).await.unwrap();
    assert_eq!(events.cached_info().state.messages, count as u64, "order.dispatched events");
}

#[tokio::test]
async fn an_order_goes_from_pending_to_paid_to_dispatched_with_a_tracking_code() {
    let world = World::new().await.unwrap();
    let (carrier, receiver) = (Outside::start().await.unwrap(), Outside::start().await.unwrap());
    carrier.behave(|_| Reply::Hold);
    let orders = world.start(Kind::Orders).await.unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap();
    let plan = plan
        .with("CARRIER_URL", &format!("{}/v1/", carrier.url()))
        .with("NOTIFY_URL", &format!("{}/notices", receiver.url()));
    let _fulfillment = plan.start().await.unwrap();
    let api = Api::new(orders.url());
    let order = async || api.get("/orders/A-1").await.unwrap().body;

    api.place("A-1", AMOUNT).await.unwrap();
    assert_eq!(order().await["status"], "pending");
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let payment = e2e::api::confirmation("tx-1", "A-1", AMOUNT);
    let request = api.client().post(api.url("/payments")).header("traceparent", trace);
    assert_eq!(e2e::api::answer(request.json(&payment)).await.unwrap().status, 201);
    called(&carrier, 1).await;
    assert_eq!(order().await["status"], "paid");
    carrier.behave(|_| Reply::Accept);
    let dispatched = eventually("it is dispatched", LIMIT, async || {
        let order = order().await;
        anyhow::ensure!(order["status"] == "dispatched", "{order}");
        Ok(order)
    })
    .await
    .unwrap();
    assert_eq!(dispatched["trackingCode"], "PARCEL-A-1");

    let call = &carrier.calls()[0];
    let (dispatch_id, tracking_code): (Uuid, String) =
        sqlx::query_as("select dispatch_id, tracking_code from dispatches")
            .fetch_one(&world.fulfillment)
            .await
            .unwrap();
    assert_eq!((call.path.as_str(), &call.key), ("/v1/parcels", &format!("\"{dispatch_id}\"")));
    assert_eq!(call.traceparent.as_deref(), Some(trace), "the trace of the payment");
    assert_eq!(tracking_code, "PARCEL-A-1");
    let parcel = json!({
        "dispatchId": dispatch_id, "orderId": "A-1", "transactionId": "tx-1", "customerId": "C-1",
        "amountMinor": AMOUNT, "currency": "EUR"
    });
    assert_eq!(call.body, parcel);
    one_parcel_each(&world, &carrier, 1).await;
    let notice = &receiver.calls()[0];
    assert_eq!((notice.path.as_str(), receiver.calls().len()), ("/notices", 1));
    assert_eq!(notice.key, format!("\"{dispatch_id}\""));
    assert_eq!(notice.traceparent.as_deref(), Some(trace));
    assert_eq!(notice.body["trackingCode"], "PARCEL-A-1");
}

#[tokio::test]
async fn a_carrier_that_books_and_hangs_up_every_tenth_time_has_one_parcel_each() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|call| match call.number % 10 {
        0 => Reply::HangUp,
        _ => Reply::Accept,
    });
    let (_orders, api, _fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 1000).await;
    one_parcel_each(&world, &carrier, 1000).await;
    let calls = carrier.calls().len();
    println!("{calls} calls for 1,000 parcels");
    assert!(calls >= 1100, "only {calls} calls: nothing was repeated");
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}

#[tokio::test]
async fn an_answer_that_comes_too_late_is_asked_for_again_under_the_same_key() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|call| match call.number {
        1 => Reply::Late(LIMIT),
        _ => Reply::Accept,
    });
    let (_orders, api, _fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 1).await;
    one_parcel_each(&world, &carrier, 1).await;
    let calls = carrier.calls();
    assert_eq!(calls.len(), 2);
    assert_eq!((&calls[0].key, &calls[0].body), (&calls[1].key, &calls[1].body));
}

#[tokio::test]
async fn crash_point_4a_after_taking_the_dispatch_it_is_taken_again() {
    let world = World::new().await.unwrap();
    let (carrier, _orders, mut fulfillment) = pair_with_calls_held(&world, 1).await;
    fulfillment.end("KILL").await.unwrap();
    carrier.behave(|_| Reply::Accept);
    fulfillment.start_again().await.unwrap();
    one_parcel_each(&world, &carrier, 1).await;
    assert_eq!(number(&world.fulfillment, "select sum(attempts) from dispatches").await, 2);
}

#[tokio::test]
async fn crash_point_4b_after_the_carriers_answer_the_same_key_gives_the_same_parcel() {
    let world = World::new().await.unwrap();
    let (carrier, _orders, mut fulfillment) = pair_with_calls_held(&world, 1).await;
    // The transaction that would record the answer gets as far as its last statement, the event.
    let mut lock = begin(&world.fulfillment).await.unwrap();
    sqlx::query("lock table outbox in share mode").execute(&mut *lock).await.unwrap();
    carrier.behave(|_| Reply::Accept);
    blocked(&world.fulfillment, "fulfillment-service").await;
    assert_eq!(carrier.effects().len(), 1, "booked");
    assert_eq!(number(&world.fulfillment, DISPATCHED).await, 0, "no dispatch without its event");
    fulfillment.end("KILL").await.unwrap();
    lock.rollback().await.unwrap();
    fulfillment.start_again().await.unwrap();
    one_parcel_each(&world, &carrier, 1).await;
    assert_eq!(carrier.calls().len(), 2);
}

#[tokio::test]
async fn crash_point_4c_after_the_commit_the_event_waits_for_any_relay() {
    let mut world = World::new().await.unwrap();
    let (carrier, mut orders, mut fulfillment) = pair_with_calls_held(&world, 1).await;
    consumed(&world).await;
    world.nats.stop("KILL").await.unwrap();
    carrier.behave(|_| Reply::Accept);
    eventually("it is committed", LIMIT, async || {
        anyhow::ensure!(number(&world.fulfillment, UNPUBLISHED).await == 1, "not yet");
        Ok(())
    })
    .await
    .unwrap();
    fulfillment.end("KILL").await.unwrap();
    orders.end("KILL").await.unwrap();
    world.nats.start_again().await.unwrap();
    orders.start_again().await.unwrap();
    fulfillment.start_again().await.unwrap();
    one_parcel_each(&world, &carrier, 1).await;
    assert_eq!(carrier.calls().len(), 1);
}

#[tokio::test]
async fn with_two_replicas_no_dispatch_is_in_flight_twice() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Late(Duration::from_millis(50)));
    let (_orders, api, _fulfillment) = pair(&world, &carrier).await;
    let _another = fulfillment(&world, &carrier).start().await.unwrap();
    pay(&api, "A", 500).await;
    one_parcel_each(&world, &carrier, 500).await;
    assert_eq!(carrier.most_in_flight_per_key(), 1);
    assert_eq!(carrier.calls().len(), 500, "each once");
    let most = carrier.most_in_flight();
    assert!((LANES..=2 * LANES).contains(&most), "{most} at the same time");
}

/// Nobody wakes the lanes here but they each other.
#[tokio::test]
async fn a_backlog_sets_every_lane_to_work_and_no_more() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let fulfillment = fulfillment(&world, &carrier).start().await.unwrap();
    // By then each has looked once, and sleeps.
    ready(&Api::new(fulfillment.url())).await;
    let mut tx = begin(&world.fulfillment).await.unwrap();
    for n in 0..2 * LANES {
        request_dispatch(&mut tx, &format!("tx-{n}"), &format!("A-{n}")).await;
    }
    tx.commit().await.unwrap();
    called(&carrier, LANES).await;
    carrier.behave(|_| Reply::Accept);
    eventually("all are dispatched", LIMIT, async || {
        let dispatched = number(&world.fulfillment, DISPATCHED).await;
        anyhow::ensure!(dispatched == 2 * LANES as i64, "{dispatched}");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(carrier.most_in_flight(), LANES);
}

#[tokio::test]
async fn from_payment_to_dispatched_order_nothing_waits_for_a_poll() {
    let world = World::new().await.unwrap();
    let never = |kind| world.plan(kind).unwrap().with("RELAY_POLL_INTERVAL", "1h");
    let orders = never(Kind::Orders).start().await.unwrap();
    let fulfillment = never(Kind::Fulfillment).start().await.unwrap();
    let api = Api::new(orders.url());
    // By then all have looked once, and sleep.
    ready(&api).await;
    ready(&Api::new(fulfillment.url())).await;
    for prefix in ["A", "B", "C"] {
        pay(&api, prefix, 100).await;
        world.settled(LIMIT).await.unwrap();
    }
}

#[tokio::test]
async fn a_dispatcher_that_sleeps_past_its_lease_changes_nothing_when_it_wakes() {
    let world = World::new().await.unwrap();
    let (carrier, _orders, sleeper) = pair_with_calls_held(&world, 1).await;
    sleeper.signal("STOP").unwrap();
    let _another = fulfillment(&world, &carrier).start().await.unwrap();
    // The other one calls when the lease has run out, and gets an answer.
    called(&carrier, 2).await;
    let calls = carrier.calls();
    assert!(calls[1].at - calls[0].at >= LEASE - Duration::from_secs(1), "too early");
    carrier.behave(|_| Reply::Accept);
    one_parcel_each(&world, &carrier, 1).await;
    sleeper.signal("CONT").unwrap();
    logged(&sleeper, "had run out; nothing was changed").await;
    assert!(sleeper.log().contains("total=1"), "{}", sleeper.log());
    one_parcel_each(&world, &carrier, 1).await;
    assert_eq!(number(&world.fulfillment, "select sum(attempts) from dispatches").await, 2);
}

#[tokio::test]
async fn a_refused_dispatch_fails_with_the_carriers_reason_and_the_others_flow() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|call| match call.body["orderId"].as_str() {
        Some("A-3") => Reply::Refuse("no parcels to the moon"),
        _ => Reply::Accept,
    });
    let (_orders, api, _fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 10).await;
    let ledger = world.settled(LIMIT).await.unwrap();
    assert_eq!((ledger.dispatches, ledger.failed, ledger.undispatched), (10, 1, 1));
    assert_eq!(carrier.effects().len(), 9);
    assert_eq!(carrier.calls().len(), 10, "a refusal is not asked again");
    let (reason, error, stream, body): (String, String, String, Vec<u8>) =
        sqlx::query_as("select reason, error, stream, body from dead_letters")
            .fetch_one(&world.fulfillment)
            .await
            .unwrap();
    assert_eq!((reason.as_str(), stream.as_str()), ("rejected", "ORDERS"));
    assert!(error.contains("no parcels to the moon"), "{error}");
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&body).unwrap()["orderId"], "A-3");
    let failed: (String, String) =
        sqlx::query_as("select status, last_error from dispatches where order_id = 'A-3'")
            .fetch_one(&world.fulfillment)
            .await
            .unwrap();
    assert_eq!(failed, ("failed".to_owned(), error));
    assert_eq!(api.get("/orders/A-3").await.unwrap().body["status"], "paid");
}

#[tokio::test]
async fn a_dispatch_that_fails_alone_comes_back_later_not_at_once() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    let is_bad = |call: &Call| call.body["orderId"] == "A-0";
    carrier.behave(move |call| if is_bad(call) { Reply::Fail(500, None) } else { Reply::Accept });
    let (_orders, api, _fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 500).await;
    eventually("the others are dispatched", LIMIT, async || {
        let parcels = carrier.effects().len();
        anyhow::ensure!(parcels == 499, "{parcels}");
        Ok(())
    })
    .await
    .unwrap();
    let calls = carrier.calls().iter().filter(|call| is_bad(call)).count();
    assert!(calls < 10, "{calls} calls for one that fails");
    let error: String =
        sqlx::query_scalar("select last_error from dispatches where order_id = 'A-0'")
            .fetch_one(&world.fulfillment)
            .await
            .unwrap();
    assert_eq!(error, "outcome unknown: 500 Internal Server Error: not now");
    carrier.behave(|_| Reply::Accept);
    one_parcel_each(&world, &carrier, 500).await;
}

#[tokio::test]
async fn no_transaction_is_open_while_the_carrier_is_called() {
    let world = World::new().await.unwrap();
    let (carrier, _orders, _fulfillment) = pair_with_calls_held(&world, 3).await;
    consumed(&world).await;
    for pool in [&world.orders, &world.fulfillment] {
        // Whatever was begun before this moment comes to an end, with the calls still held.
        let now: time::OffsetDateTime =
            sqlx::query_scalar("select clock_timestamp()").fetch_one(pool).await.unwrap();
        eventually("transactions are over", Duration::from_secs(3), async || {
            let open: i64 = sqlx::query_scalar(
                "select count(*) from pg_stat_activity where datname = current_database()
                 and application_name like '%-service-%' and xact_start <= $1",
            )
            .bind(now)
            .fetch_one(pool)
            .await?;
            anyhow::ensure!(open == 0, "{open} transactions");
            Ok(())
        })
        .await
        .unwrap();
    }
    assert_eq!((carrier.calls().len(), carrier.effects().len()), (3, 0), "still held");
    carrier.behave(|_| Reply::Accept);
    one_parcel_each(&world, &carrier, 3).await;
}

#[tokio::test]
async fn a_call_in_hand_at_sigterm_is_finished_and_recorded() {
    let world = World::new().await.unwrap();
    let (carrier, _orders, mut fulfillment) = pair_with_calls_held(&world, 1).await;
    fulfillment.signal("TERM").unwrap();
    logged(&fulfillment, "draining").await;
    carrier.behave(|_| Reply::Accept);
    assert_eq!(fulfillment.ends().await.unwrap(), 0, "{}", fulfillment.log());
    assert_eq!(number(&world.fulfillment, DISPATCHED).await, 1);
    assert_eq!(carrier.calls().len(), 1);
}

#[tokio::test]
async fn retry_after_is_honoured_for_every_dispatch() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|call| match call.number {
        1 => Reply::Fail(503, Some("3".to_owned())),
        _ => Reply::Accept,
    });
    let (_orders, api, _fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 1).await;
    called(&carrier, 1).await;
    // Another one, which nobody has refused, has to wait as well.
    pay(&api, "B", 1).await;
    one_parcel_each(&world, &carrier, 2).await;
    let calls = carrier.calls();
    assert_eq!(calls.len(), 3);
    let pause = calls[1].at - calls[0].at;
    assert!(pause >= Duration::from_secs(3), "called again after {pause:?}");
}

/// It would be no HTTP header, and the dispatch would never go out.
#[tokio::test]
async fn a_trace_nobody_can_read_does_not_hold_a_dispatch_up() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    let _fulfillment = fulfillment(&world, &carrier).start().await.unwrap();
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", "\u{1}\u{fc}");
    let body = bytes(&event("tx-1", "A-1", AMOUNT));
    world.broker.publish_with(PAYMENT_CONFIRMED, headers, &body).await.unwrap();
    called(&carrier, 1).await;
    assert_eq!(carrier.calls()[0].traceparent, None);
    reported(&world, "notifications").await;
}
