//! One parcel per dispatch, whatever the carrier, a crash or a lease does.

use std::{
    collections::HashSet,
    time::{Duration, SystemTime},
};

use async_nats::HeaderMap;
use e2e::{
    api::Api,
    contract::{FULFILLMENT, PAYMENT_CONFIRMED},
    outside::{Call, Outside, Reply},
    services::{Kind, Plan, Service},
    wait::eventually,
    world::World,
};
use fulfillment_service::{
    breaker::CircuitBreaker,
    call::{CALL_LIMIT, CallError},
    carrier::{Carrier, HttpCarrier, Parcel, SandboxCarrier},
    dispatcher::{Dispatcher, LANES, LEASE, Outcome, Wakers},
    dispatches,
};
use serde_json::json;
use shared::{database::begin, lifecycle::Health, values::TrackingCode};
use sqlx::PgPool;
use tokio::{io::AsyncReadExt as _, net::TcpListener, time::timeout};
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
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let (_orders, api, mut fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 1).await;
    called(&carrier, 1).await;
    fulfillment.end("KILL").await.unwrap();
    carrier.behave(|_| Reply::Accept);
    fulfillment.start_again().await.unwrap();
    one_parcel_each(&world, &carrier, 1).await;
    assert_eq!(number(&world.fulfillment, "select sum(attempts) from dispatches").await, 2);
}

#[tokio::test]
async fn crash_point_4b_after_the_carriers_answer_the_same_key_gives_the_same_parcel() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let (_orders, api, mut fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 1).await;
    called(&carrier, 1).await;
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
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let (mut orders, api, mut fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 1).await;
    called(&carrier, 1).await;
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
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let (_orders, api, sleeper) = pair(&world, &carrier).await;
    pay(&api, "A", 1).await;
    called(&carrier, 1).await;
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
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let (_orders, api, _fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 3).await;
    called(&carrier, 3).await;
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
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Hold);
    let (_orders, api, mut fulfillment) = pair(&world, &carrier).await;
    pay(&api, "A", 1).await;
    called(&carrier, 1).await;
    fulfillment.signal("TERM").unwrap();
    logged(&fulfillment, "draining").await;
    carrier.behave(|_| Reply::Accept);
    assert_eq!(fulfillment.ends().await.unwrap(), 0, "{}", fulfillment.log());
    assert_eq!(number(&world.fulfillment, DISPATCHED).await, 1);
    assert_eq!(carrier.calls().len(), 1);
}

#[tokio::test]
async fn an_open_circuit_breaker_lets_nobody_through_and_then_only_the_probe() {
    let breaker = CircuitBreaker::default();
    breaker.failed(None);
    assert!(breaker.allows(false), "one failure is that call's own");
    breaker.failed(None);
    assert!(!breaker.allows(true) && !breaker.allows(false), "open");
    assert!(!breaker.succeeded() && !breaker.allows(true), "a call from before does not close it");
    eventually("the pause is over", LIMIT, async || {
        anyhow::ensure!(breaker.pause().is_none(), "not yet");
        Ok(())
    })
    .await
    .unwrap();
    assert!(breaker.allows(true) && !breaker.allows(false), "half open");
    assert!(breaker.succeeded());
    assert!(breaker.allows(false), "closed");

    // To be in a hurry is no wish that is honoured.
    breaker.failed(Some(Duration::ZERO));
    breaker.failed(Some(Duration::ZERO));
    assert!(breaker.pause().is_some());
    breaker.failed(Some(LIMIT));
    assert!(breaker.pause().unwrap() > LIMIT / 2);
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

fn parcel() -> Parcel {
    let text = |text: &str| text.to_owned();
    Parcel {
        dispatch_id: Uuid::now_v7(),
        order_id: text("A-1").try_into().unwrap(),
        transaction_id: text("tx-1").try_into().unwrap(),
        customer_id: text("C-1").try_into().unwrap(),
        amount_minor: AMOUNT.try_into().unwrap(),
        currency: text("EUR").try_into().unwrap(),
        traceparent: None,
    }
}

#[tokio::test]
async fn every_answer_of_a_carrier_is_taken_for_what_it_is() {
    let double = Outside::start().await.unwrap();
    let carrier = HttpCarrier::new(double.url().parse().unwrap()).unwrap();
    let book = async |reply: Reply| {
        double.behave(move |_| reply.clone());
        carrier.book(&parcel()).await
    };
    assert_eq!(book(Reply::Accept).await.unwrap().as_str(), "PARCEL-A-1");
    for status in [400, 413, 422] {
        let error = book(Reply::Fail(status, None)).await.unwrap_err();
        assert!(
            matches!(&error, CallError::Refused { reason } if reason.contains("not now")),
            "{error}"
        );
    }
    for status in [429, 503] {
        let error = book(Reply::Fail(status, Some("7".to_owned()))).await.unwrap_err();
        assert!(matches!(error, CallError::Unavailable { .. }), "{error}");
        assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
    }
    // A mistake of ours, or an accident of theirs: no reason to give a parcel up. Each asked once: a
    // redirect is not followed.
    for status in [301, 307, 401, 403, 404, 409, 500, 502, 504] {
        let before = double.calls().len();
        let error = book(Reply::Fail(status, None)).await.unwrap_err();
        assert!(matches!(error, CallError::UnknownOutcome { .. }), "{status}: {error}");
        assert_eq!((error.retry_after(), double.calls().len()), (None, before + 1));
    }
    for silence in [Reply::HangUp, Reply::Late(LIMIT)] {
        let error = timeout(2 * CALL_LIMIT, book(silence)).await.expect("cut off").unwrap_err();
        assert!(matches!(error, CallError::UnknownOutcome { .. }), "{error}");
    }

    let soon = SystemTime::now() + Duration::from_secs(60);
    for (header, at_least, at_most) in [
        (httpdate(soon), 50, 60),
        ("999999999".to_owned(), 3600, 3600),
        ("Thu, 01 Jan 2015 00:00:00 GMT".to_owned(), 0, 0),
    ] {
        let error = book(Reply::Fail(503, Some(header))).await.unwrap_err();
        let wait = error.retry_after().unwrap().as_secs();
        assert!((at_least..=at_most).contains(&wait), "{wait} s");
    }
    assert_eq!(
        book(Reply::Fail(503, Some("soon".to_owned()))).await.unwrap_err().retry_after(),
        None
    );

    let address = double.url();
    drop(double);
    let nobody = HttpCarrier::new(address.parse().unwrap()).unwrap();
    let error = eventually("it is closed", LIMIT, async || match nobody.book(&parcel()).await {
        Err(error @ CallError::Unavailable { .. }) => Ok(error),
        other => anyhow::bail!("{other:?}"),
    })
    .await
    .unwrap();
    assert!(error.to_string().contains("refused"), "{error}");
}

fn httpdate(time: SystemTime) -> String {
    let format = time::macros::format_description!(
        "[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT"
    );
    time::OffsetDateTime::from(time).format(format).unwrap()
}

/// With no provider, or with two, this panics, after everything has worked without TLS.
#[tokio::test]
async fn a_carrier_behind_tls_is_greeted_in_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://user:hunter2@{}", listener.local_addr().unwrap());
    let carrier = HttpCarrier::new(url.parse().unwrap()).unwrap();
    let greeting = async {
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut greeting = [0; 2];
        connection.read_exact(&mut greeting).await.unwrap();
        greeting
    };
    let parcel = parcel();
    let (greeting, booked) = tokio::join!(greeting, carrier.book(&parcel));
    assert_eq!(greeting, [0x16, 0x03], "a TLS handshake record");
    let error = booked.unwrap_err();
    assert!(matches!(error, CallError::Unavailable { .. }), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[tokio::test]
async fn the_sandbox_gives_the_same_code_for_the_same_key_and_no_other() {
    let (one, other) = (parcel(), parcel());
    let code = SandboxCarrier.book(&one).await.unwrap();
    assert_eq!(SandboxCarrier.book(&one).await.unwrap(), code);
    assert_ne!(SandboxCarrier.book(&other).await.unwrap(), code);
}

/// What a cloner may write.
enum BadCarrier {
    Panics,
    Hangs,
    SendsNul,
    /// Takes so long that somebody else has taken the dispatch.
    LosesTheLease(PgPool),
}

impl Carrier for BadCarrier {
    async fn book(&self, _: &Parcel) -> Result<TrackingCode, CallError> {
        match self {
            Self::Panics => panic!("as the test wants it"),
            Self::Hangs => std::future::pending().await,
            Self::LosesTheLease(pool) => {
                sqlx::query("update dispatches set due_at = now()").execute(pool).await.unwrap();
                dispatches::take(pool, LEASE).await.unwrap().expect("it is due");
                Ok("PARCEL-1".to_owned().try_into().unwrap())
            }
            Self::SendsNul => Err(CallError::Refused { reason: "no\0 way".to_owned() }),
        }
    }
}

fn dispatcher<C: Carrier>(pool: &PgPool, carrier: C) -> Dispatcher<C> {
    let wakers = Wakers { own: std::sync::Arc::default(), relay: std::sync::Arc::default() };
    Dispatcher::new(pool.clone(), carrier, wakers, Duration::from_millis(500), Health::default())
}

#[tokio::test]
async fn a_carrier_that_panics_or_hangs_or_says_what_cannot_be_stored_costs_one_attempt() {
    let world = World::new().await.unwrap();
    let mut connection = world.fulfillment.acquire().await.unwrap();
    request_dispatch(&mut connection, "tx-1", "A-1").await;
    for (carrier, outcome) in [
        (BadCarrier::Panics, Outcome::Postponed),
        (BadCarrier::Hangs, Outcome::Postponed),
        (BadCarrier::SendsNul, Outcome::Refused),
    ] {
        let dispatcher = dispatcher(&world.fulfillment, carrier);
        sqlx::query("update dispatches set due_at = now()")
            .execute(&world.fulfillment)
            .await
            .unwrap();
        let step = timeout(LIMIT, dispatcher.step()).await.expect("cut off");
        assert_eq!(step.unwrap(), outcome);
        assert_eq!(dispatcher.step().await.unwrap(), Outcome::Idle);
    }
    let attempts = number(&world.fulfillment, "select sum(attempts) from dispatches").await;
    assert_eq!(attempts, 3);
}

#[tokio::test]
async fn an_answer_for_a_dispatch_in_other_hands_changes_nothing_and_is_counted() {
    let world = World::new().await.unwrap();
    let mut connection = world.fulfillment.acquire().await.unwrap();
    request_dispatch(&mut connection, "tx-1", "A-1").await;
    let carrier = BadCarrier::LosesTheLease(world.fulfillment.clone());
    let dispatcher = dispatcher(&world.fulfillment, carrier);
    assert_eq!(dispatcher.step().await.unwrap(), Outcome::Superseded);
    assert_eq!(dispatcher.superseded(), 1);
    let status: String = sqlx::query_scalar("select status from dispatches")
        .fetch_one(&world.fulfillment)
        .await
        .unwrap();
    assert_eq!(status, "requested");
    assert_eq!(number(&world.fulfillment, "select count(*) from outbox").await, 0);
}

#[tokio::test]
async fn whoever_comes_late_hits_no_row_whatever_it_has_to_say() {
    let world = World::new().await.unwrap();
    let pool = &world.fulfillment;
    let mut connection = pool.acquire().await.unwrap();
    request_dispatch(&mut connection, "tx-1", "A-1").await;
    let take = async |lease| dispatches::take(pool, lease).await.unwrap();
    let late = take(Duration::ZERO).await.unwrap();
    let current = take(LEASE).await.unwrap();
    assert_eq!((late.attempt, current.attempt), (1, 2));
    assert!(take(LEASE).await.is_none(), "leased");
    let code: TrackingCode = "PARCEL-1".to_owned().try_into().unwrap();
    for (taken, ours) in [(&late, false), (&current, true), (&current, false)] {
        if !ours {
            assert!(!dispatches::fail(&mut connection, taken, "no").await.unwrap());
            assert!(!dispatches::postpone(pool, taken, LEASE, "later").await.unwrap());
        }
        let completed = dispatches::complete(&mut connection, taken, &code).await.unwrap();
        assert_eq!(completed.is_some(), ours);
    }
}
