//! What comes back: an order ends as dispatched, however its report comes.

use async_nats::HeaderMap;
use e2e::{api::Api, proxy::Flow, services::Kind, wait::eventually, world::World};
use orders_service::{
    orders::{self, NewOrder},
    payments::{self, Confirmation},
    projection::Projection,
};
use proptest::{prelude::*, test_runner::TestRunner};
use serde_json::Value;
use shared::{
    database::begin,
    dead_letters::{Origin, Reason},
    events::{Event, ORDER_DISPATCHED_SUBJECT, OrderDispatched, Received},
    handler::{Delivery, Handler, Verdict},
    telemetry::TraceParent,
    topology,
};
use sqlx::PgPool;
use time::OffsetDateTime;

use crate::support::{
    AMOUNT, DEAD_LETTERS, LIMIT, blocked, bytes, check_is, no_session, number, proxied_orders,
    publish_report, ready, report, reported, world_with_orders,
};

async fn order(api: &Api, id: &str) -> Value {
    api.get(&format!("/orders/{id}")).await.unwrap().body
}

async fn becomes(api: &Api, id: &str, status: &str) -> Value {
    eventually("the order changes", LIMIT, async || {
        let order = order(api, id).await;
        anyhow::ensure!(order["status"] == status, "{order}");
        Ok(order)
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn a_report_that_comes_before_the_payment_waits_for_it() {
    let (world, _orders, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    publish_report(&world, &report("tx-1", "A-1", "PARCEL-1")).await;
    eventually("it was looked at", LIMIT, async || {
        let backlog = world.broker.backlog(topology::FULFILLMENT, "orders").await?;
        anyhow::ensure!(backlog == (0, 1), "{backlog:?}");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(order(&api, "A-1").await["status"], "pending");
    assert_eq!(api.confirm("tx-1", "A-1", AMOUNT).await.unwrap().status, 201);
    let dispatched = becomes(&api, "A-1", "dispatched").await;
    assert_eq!(dispatched["trackingCode"], "PARCEL-1");
    reported(&world, "orders").await;
    assert_eq!(number(&world.orders, DEAD_LETTERS).await, 0);
}

#[tokio::test]
async fn a_report_that_comes_late_or_again_changes_nothing_twice() {
    let (world, mut orders, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    api.confirm("tx-1", "A-1", AMOUNT).await.unwrap();
    // Late: the service is away when it comes.
    orders.end("KILL").await.unwrap();
    let first = report("tx-1", "A-1", "PARCEL-1");
    publish_report(&world, &first).await;
    orders.start_again().await.unwrap();
    let dispatched = becomes(&api, "A-1", "dispatched").await;
    // Again: the same, and the same under a new event id.
    for again in [&first, &first, &report("tx-1", "A-1", "PARCEL-1")] {
        publish_report(&world, again).await;
    }
    reported(&world, "orders").await;
    assert_eq!(order(&api, "A-1").await, dispatched);
    assert_eq!(number(&world.orders, DEAD_LETTERS).await, 0);
    assert_eq!(orders.log().matches("absorbed by State").count(), 3, "{}", orders.log());
}

#[tokio::test]
async fn crash_point_5a_before_the_commit_everything_is_delivered_again() {
    let (world, mut orders, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    api.confirm("tx-1", "A-1", AMOUNT).await.unwrap();
    let mut lock = begin(&world.orders).await.unwrap();
    sqlx::query("select from orders for update").execute(&mut *lock).await.unwrap();
    publish_report(&world, &report("tx-1", "A-1", "PARCEL-1")).await;
    blocked(&world.orders, "orders-service").await;
    orders.end("KILL").await.unwrap();
    lock.rollback().await.unwrap();
    no_session(&world.orders).await;
    let paid = "select count(*) from orders where status = 'paid'";
    assert_eq!(number(&world.orders, paid).await, 1, "nothing happened");
    orders.start_again().await.unwrap();
    becomes(&api, "A-1", "dispatched").await;
    reported(&world, "orders").await;
}

#[tokio::test]
async fn crash_point_5b_between_commit_and_ack_a_second_update_finds_nothing_to_do() {
    let world = World::new().await.unwrap();
    let (proxy, mut orders, api) = proxied_orders(&world).await;
    api.place("A-1", AMOUNT).await.unwrap();
    api.confirm("tx-1", "A-1", AMOUNT).await.unwrap();
    // Its pull request is with the broker; nothing it says from now on gets there.
    proxy.set(Flow::HoldRequests);
    publish_report(&world, &report("tx-1", "A-1", "PARCEL-1")).await;
    let dispatched = becomes(&api, "A-1", "dispatched").await;
    let backlog = world.broker.backlog(topology::FULFILLMENT, "orders").await.unwrap();
    assert_eq!(backlog, (0, 1), "delivered and not acked");
    orders.end("KILL").await.unwrap();
    drop(proxy);
    let again = world.start(Kind::Orders).await.unwrap();
    reported(&world, "orders").await;
    assert!(again.log().contains("absorbed by State"), "{}", again.log());
    assert_eq!(order(&Api::new(again.url()), "A-1").await, dispatched);
}

#[tokio::test]
async fn a_report_about_an_unknown_order_or_against_a_known_one_is_set_aside() {
    let (world, _orders, api) = world_with_orders().await;
    for n in 1..=2 {
        api.place(&format!("A-{n}"), AMOUNT).await.unwrap();
        api.confirm(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT).await.unwrap();
    }
    publish_report(&world, &report("tx-1", "A-1", "PARCEL-1")).await;
    let dispatched = becomes(&api, "A-1", "dispatched").await;
    let bad = [
        (report("tx-9", "A-9", "PARCEL-9"), "rejected", "there is no order A-9"),
        (report("tx-1", "A-1", "PARCEL-2"), "transaction_conflict", "PARCEL-1"),
        (report("tx-9", "A-2", "PARCEL-2"), "transaction_conflict", "tx-2"),
    ];
    for (report, ..) in &bad {
        publish_report(&world, report).await;
    }
    publish_report(&world, &report("tx-2", "A-2", "PARCEL-2")).await;
    becomes(&api, "A-2", "dispatched").await;
    reported(&world, "orders").await;
    assert_eq!(order(&api, "A-1").await, dispatched);
    let letters: Vec<(String, String, String, Vec<u8>)> = sqlx::query_as(
        "select consumer, reason, error, body from dead_letters order by stream_seq",
    )
    .fetch_all(&world.orders)
    .await
    .unwrap();
    assert_eq!(letters.len(), bad.len());
    for ((consumer, reason, error, body), (report, wanted, hint)) in letters.iter().zip(&bad) {
        assert_eq!((consumer.as_str(), reason.as_str()), ("orders", *wanted));
        assert!(error.contains(hint), "{error}");
        assert_eq!(*body, bytes(report), "kept as it came");
    }
}

/// What can happen to three orders, in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Pay(usize),
    /// Delivered; again under the same event id, or announced anew.
    Report(usize, bool),
    /// A report that names another payment.
    Wrong(usize),
}

const ORDERS: usize = 3;
const REPETITIONS: usize = 5;
const WRONG: &str = "tx-wrong";

/// All of it shuffled, and cut into batches.
fn histories() -> impl Strategy<Value = Vec<Vec<Step>>> {
    let mut steps: Vec<Step> = (0..ORDERS).map(Step::Pay).collect();
    for n in 0..ORDERS * REPETITIONS {
        steps.push(Step::Report(n % ORDERS, n % 2 == 0));
    }
    steps.extend((0..ORDERS).map(Step::Wrong));
    (Just(steps).prop_shuffle(), 1..6_usize)
        .prop_map(|(steps, batch)| steps.chunks(batch).map(<[Step]>::to_vec).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_repeated_in_any_order_end_in_the_same_state() {
    let world = World::new().await.unwrap();
    let here = tokio::runtime::Handle::current();
    let case = std::cell::Cell::new(0);
    let outcome = tokio::task::block_in_place(|| {
        let config =
            ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) };
        TestRunner::new(config).run(&histories(), |history| {
            case.set(case.get() + 1);
            let ends = here.block_on(live_through(&world, case.get(), &history));
            for (n, end) in ends.into_iter().enumerate() {
                prop_assert_eq!(
                    end,
                    ("dispatched".to_owned(), format!("PARCEL-{n}"), reported_at())
                );
            }
            Ok(())
        })
    });
    outcome.unwrap();
    let open = "select count(*) from orders where status <> 'dispatched'";
    assert_eq!(number(&world.orders, open).await, 0);
}

fn reported_at() -> OffsetDateTime {
    report("tx", "A", "P").data.dispatched_at
}

/// Runs a history, delivers what asks for it again, and returns how each order ends.
async fn live_through(
    world: &World,
    case: usize,
    history: &[Vec<Step>],
) -> Vec<(String, String, OffsetDateTime)> {
    let pool = &world.orders;
    let id = |n: usize| format!("A-{case}-{n}");
    let reports: Vec<_> = (0..ORDERS)
        .map(|n| report(&format!("tx-{}", id(n)), &id(n), &format!("PARCEL-{n}")))
        .collect();
    for n in 0..ORDERS {
        orders::place(pool, &new_order(&id(n))).await.unwrap();
    }
    let projection = Projection { pool: pool.clone() };
    let mut again = Vec::new();
    for batch in history {
        let mut deliveries = Vec::new();
        for step in batch {
            match *step {
                Step::Pay(n) => pay(pool, &id(n)).await,
                Step::Report(n, anew) => deliveries.push(deliver(&reports[n], anew)),
                Step::Wrong(n) => {
                    let wrong = report(WRONG, &id(n), "PARCEL-X");
                    deliveries.push(deliver(&wrong, false));
                }
            }
        }
        again.extend(apply(&projection, deliveries).await);
    }
    // By now everything is paid; nobody has to ask a second time.
    assert!(apply(&projection, again).await.is_empty());
    let mut ends = Vec::new();
    for n in 0..ORDERS {
        let order = orders::find(pool, &id(n)).await.unwrap().unwrap();
        let code = order.tracking_code.unwrap().to_string();
        ends.push((order.status, code, order.dispatched_at.unwrap()));
    }
    ends
}

/// Returns the deliveries that are to come again.
async fn apply(
    projection: &Projection,
    deliveries: Vec<Delivery<OrderDispatched>>,
) -> Vec<Delivery<OrderDispatched>> {
    let verdicts = projection.handle(&deliveries).await.unwrap();
    let both = deliveries.into_iter().zip(verdicts);
    both.filter_map(|(delivery, verdict)| match verdict {
        Verdict::Done | Verdict::Duplicate(_) => None,
        Verdict::Retry(_) => Some(delivery),
        Verdict::Reject(stored) => {
            let transaction = delivery.event.data.transaction_id.as_str();
            assert_eq!((transaction, stored.reason()), (WRONG, Reason::TransactionConflict));
            None
        }
    })
    .collect()
}

fn new_order(id: &str) -> NewOrder {
    NewOrder {
        order_id: id.to_owned().try_into().unwrap(),
        customer_id: "C-1".to_owned().try_into().unwrap(),
        amount_minor: AMOUNT.try_into().unwrap(),
        currency: "EUR".to_owned().try_into().unwrap(),
    }
}

async fn pay(pool: &PgPool, id: &str) {
    let order = new_order(id);
    let confirmation = Confirmation {
        transaction_id: format!("tx-{id}").try_into().unwrap(),
        order_id: order.order_id,
        amount_minor: order.amount_minor,
        currency: order.currency,
    };
    let paid = payments::confirm(pool, &confirmation, &TraceParent::from_header(None)).await;
    assert!(matches!(paid.unwrap(), payments::Outcome::Confirmed(_)));
}

/// A delivery as the consumer would hand it over.
fn deliver(report: &Event<OrderDispatched>, anew: bool) -> Delivery<OrderDispatched> {
    let id = if anew { shared::events::EventId::new() } else { report.id };
    let message = async_nats::Message {
        subject: ORDER_DISPATCHED_SUBJECT.into(),
        reply: None,
        payload: bytes(report).into(),
        headers: Some(HeaderMap::new()),
        status: None,
        description: None,
        length: 0,
    };
    Delivery {
        event: Received { id, data: report.data.clone() },
        origin: Origin {
            consumer: "orders".to_owned(),
            stream: topology::FULFILLMENT.to_owned(),
            stream_seq: 1,
            deliveries: 1,
            connection: 1,
            message,
        },
    }
}

#[tokio::test]
async fn the_service_is_ready_only_with_its_consumer() {
    let (world, _orders, api) = world_with_orders().await;
    ready(&api).await;
    let stream = world.broker.js.get_stream(topology::FULFILLMENT).await.unwrap();
    stream.delete_consumer("orders").await.unwrap();
    check_is(&api, "consumer", "failing").await;
    assert_eq!(world.plan(Kind::Orders).unwrap().run("setup").await.unwrap(), 0);
    ready(&api).await;
}

/// Two replicas are told about the same orders in opposite order, as after a lost ack.
#[tokio::test]
async fn two_batches_about_the_same_orders_do_not_deadlock() {
    const ROUND: usize = 200;
    let world = World::new().await.unwrap();
    let projection = Projection { pool: world.orders.clone() };
    for round in 0..10 {
        let id = |n: usize| format!("A-{round}-{n}");
        sqlx::query(
            "with paid as (
                 insert into orders (order_id, customer_id, amount_minor, currency, status, paid_at)
                 select unnest($1::text[]), 'C-1', 1, 'EUR', 'paid', now()
                 returning order_id
             )
             insert into payments (transaction_id, order_id, amount_minor, currency, event_id)
             select 'tx-' || order_id, order_id, 1, 'EUR', gen_random_uuid() from paid",
        )
        .bind((0..ROUND).map(id).collect::<Vec<_>>())
        .execute(&world.orders)
        .await
        .unwrap();
        let deliveries = |places: &mut dyn Iterator<Item = usize>| -> Vec<_> {
            places
                .map(|n| report(&format!("tx-{}", id(n)), &id(n), "PARCEL"))
                .map(|report| deliver(&report, false))
                .collect()
        };
        let (there, back) = (deliveries(&mut (0..ROUND)), deliveries(&mut (0..ROUND).rev()));
        let (one, other) = tokio::join!(projection.handle(&there), projection.handle(&back));
        let verdicts = one.unwrap().into_iter().chain(other.unwrap());
        let done = verdicts.filter(|verdict| matches!(verdict, Verdict::Done)).count();
        assert_eq!(done, ROUND, "each changed once");
    }
}
