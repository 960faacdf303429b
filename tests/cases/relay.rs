//! From the outbox to the stream: marked only when stored, in order per order, whoever relays.

use std::time::Duration;

use e2e::{broker::Stored, services::Kind, wait::eventually, world::World};
use serde_json::Value;
use shared::{
    database,
    events::Event,
    lease,
    outbox::{self, EnqueueError},
    relay::Outcome,
    telemetry::TraceParent,
    topology,
};
use uuid::Uuid;

use crate::support::{
    AMOUNT, LIMIT, UNPUBLISHED, enqueue, event, number, pay, proxied_orders, relay,
    world_with_orders,
};

fn ids(messages: &[Stored]) -> Vec<String> {
    messages.iter().map(|message| message.event_id().unwrap()).collect()
}

#[tokio::test]
async fn an_event_carries_its_id_its_type_and_its_trace() {
    let (world, _service, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    let paid = api.confirm("tx-1", "A-1", AMOUNT).await.unwrap();
    let message = eventually("it is published", LIMIT, async || {
        world.broker.messages().await?.pop().ok_or_else(|| anyhow::anyhow!("nothing there"))
    })
    .await
    .unwrap();
    let event_id = paid.body["eventId"].as_str().unwrap();
    assert_eq!(message.message_id.as_deref(), Some(event_id), "Nats-Msg-Id is the eventId");
    assert!(message.traceparent.is_some());
    let body: Value = serde_json::from_slice(&message.body).unwrap();
    assert_eq!(body["id"], event_id);
    assert_eq!(body["type"], "payment.confirmed.v1");
    assert_eq!(body["subject"], "A-1");
    assert_eq!(body["data"]["confirmedAt"], paid.body["confirmedAt"]);
    assert_eq!(Uuid::parse_str(event_id).unwrap().get_version_num(), 7);
}

#[tokio::test]
async fn a_transaction_that_commits_late_is_not_skipped() {
    let world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    let trace = TraceParent::from_header(None);

    let (early, late) = (event("tx-1", "A-1", AMOUNT), event("tx-2", "A-2", AMOUNT));
    let mut open = database::begin(&world.orders).await.unwrap();
    outbox::enqueue(&mut open, &early, &trace).await.unwrap();
    enqueue(&world.orders, &late).await;
    assert_eq!(relay.step().await.unwrap(), Outcome::Worked { published: 1, failed: 0 });
    open.commit().await.unwrap();
    assert_eq!(relay.step().await.unwrap(), Outcome::Worked { published: 1, failed: 0 });
    assert_eq!(relay.step().await.unwrap(), Outcome::Idle);
    let expected = [late.id.to_string(), early.id.to_string()];
    assert_eq!(ids(&world.broker.messages().await.unwrap()), expected);
}

#[tokio::test]
async fn events_of_one_order_keep_their_order_when_one_fails_and_hold_nobody_else_up() {
    let world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    let mut of_a = Vec::new();
    for n in 1..=3 {
        of_a.push(enqueue(&world.orders, &event(&format!("tx-{n}"), "A", AMOUNT)).await);
        for other in ["B", "C", "D"] {
            enqueue(&world.orders, &event(&format!("tx-{other}{n}"), other, AMOUNT)).await;
        }
    }
    // Unpublishable, once: no stream takes this subject.
    let divert = "update outbox set subject = $2 where event_id::text = $1";
    sqlx::query(divert).bind(&of_a[1]).bind("elsewhere").execute(&world.orders).await.unwrap();

    assert_eq!(relay.step().await.unwrap(), Outcome::Worked { published: 10, failed: 1 });
    let stored = ids(&world.broker.messages().await.unwrap());
    assert_eq!(stored.len(), 10, "all of B, C and D, and the first of A");
    assert!(
        stored.contains(&of_a[0]) && !stored.contains(&of_a[2]),
        "the third waits for the second"
    );
    assert_eq!(
        number(&world.orders, "select count(*) from outbox where last_error is not null").await,
        1
    );

    sqlx::query(divert)
        .bind(&of_a[1])
        .bind("orders.payment.confirmed")
        .execute(&world.orders)
        .await
        .unwrap();
    eventually("the backlog is gone", LIMIT, async || {
        relay.step().await?;
        let pending = number(&world.orders, UNPUBLISHED).await;
        anyhow::ensure!(pending == 0, "{pending} rows wait");
        Ok(())
    })
    .await
    .unwrap();
    let stored = ids(&world.broker.messages().await.unwrap());
    let order_of_a: Vec<&String> = stored.iter().filter(|id| of_a.contains(id)).collect();
    assert_eq!(order_of_a, of_a.iter().collect::<Vec<_>>());
    assert_eq!(stored.len(), 12);
}

/// A whole batch of rows that cannot be published stands before the good ones.
#[tokio::test]
async fn poison_at_the_head_does_not_starve_the_rest() {
    let world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 20).await;
    for n in 0..20 {
        enqueue(&world.orders, &event(&format!("tx-p{n}"), &format!("P-{n}"), AMOUNT)).await;
    }
    sqlx::query("update outbox set subject = 'elsewhere'").execute(&world.orders).await.unwrap();
    for n in 0..100 {
        enqueue(&world.orders, &event(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT)).await;
    }
    assert!(
        matches!(relay.step().await.unwrap(), Outcome::Stuck(_)),
        "nothing of this batch arrives"
    );
    eventually("the others are published", Duration::from_secs(5), async || {
        relay.step().await?;
        let stored = world.broker.count().await?;
        anyhow::ensure!(stored == 100, "{stored} stored");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.orders, UNPUBLISHED).await, 20);
}

#[tokio::test]
async fn a_row_that_can_never_be_published_is_parked_and_only_its_order_waits() {
    let world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    let large = event("tx-1", "A-1", AMOUNT);
    enqueue(&world.orders, &large).await;
    enqueue(&world.orders, &event("tx-2", "A-1", AMOUNT)).await;
    enqueue(&world.orders, &event("tx-3", "B-1", AMOUNT)).await;
    // By hand: enqueue would refuse it. One is above the stream's limit, the other above the server's.
    for size in [300 * 1024, 2 * 1024 * 1024] {
        sqlx::query(
            "update outbox set payload = jsonb_build_object('x', repeat('x', $2)), parked_at = null,
             retry_at = null where event_id = $1",
        )
        .bind(large.id.get())
        .bind(size)
        .execute(&world.orders)
        .await
        .unwrap();
        relay.step().await.unwrap();
        assert_eq!(
            number(&world.orders, "select count(*) from outbox where parked_at is not null").await,
            1
        );
    }
    assert_eq!(world.broker.count().await.unwrap(), 1, "B-1 went out");
    assert_eq!(relay.step().await.unwrap(), Outcome::Idle, "a parked row is not tried again");

    // Mended and unparked, it goes before its successor.
    let mend = "update outbox set payload = '{}', parked_at = null where parked_at is not null";
    sqlx::query(mend).execute(&world.orders).await.unwrap();
    assert_eq!(relay.step().await.unwrap(), Outcome::Worked { published: 2, failed: 0 });
}

#[tokio::test]
async fn an_event_too_large_to_publish_is_refused_where_it_is_written() {
    let world = World::new().await.unwrap();
    let mut tx = database::begin(&world.orders).await.unwrap();
    let small = event("tx-1", "A-1", AMOUNT);
    let large = Event {
        specversion: small.specversion,
        id: small.id,
        source: small.source,
        event_type: small.event_type,
        subject: small.subject,
        time: small.time,
        datacontenttype: small.datacontenttype,
        nats_subject: small.nats_subject,
        data: "x".repeat(outbox::MAX_PAYLOAD),
    };
    let refused = outbox::enqueue(&mut tx, &large, &TraceParent::from_header(None)).await;
    assert!(matches!(refused, Err(EnqueueError::TooLarge(_))));
}

#[tokio::test]
async fn nothing_is_marked_while_the_stream_is_full_and_everything_is_sent_after() {
    let world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    let mut config = topology::wanted(1)[0].stream.clone();
    config.max_messages = 10;
    world.broker.js.update_stream(&config).await.unwrap();
    for n in 0..30 {
        enqueue(&world.orders, &event(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT)).await;
    }
    relay.step().await.unwrap();
    let marked = "select count(*) from outbox where published_at is not null";
    assert_eq!(number(&world.orders, marked).await, 10);
    assert_eq!(world.broker.count().await.unwrap(), 10);
    eventually("a full stream stops the relay", LIMIT, async || {
        let outcome = relay.step().await?;
        anyhow::ensure!(matches!(outcome, Outcome::Stuck(_)), "{outcome:?}");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.orders, marked).await, 10);

    config.max_messages = -1;
    world.broker.js.update_stream(&config).await.unwrap();
    eventually("everything is sent", LIMIT, async || {
        relay.step().await?;
        let marked = number(&world.orders, marked).await;
        anyhow::ensure!(marked == 30, "{marked} marked");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(world.broker.count().await.unwrap(), 30);
}

#[tokio::test]
async fn nothing_is_taken_or_marked_without_a_broker() {
    let mut world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    enqueue(&world.orders, &event("tx-1", "A-1", AMOUNT)).await;
    world.nats.stop("KILL").await.unwrap();
    eventually("the connection is known to be gone", LIMIT, async || {
        let outcome = relay.step().await?;
        anyhow::ensure!(outcome == Outcome::Disconnected, "{outcome:?}");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(
        number(&world.orders, "select count(*) from outbox where published_at is not null").await,
        0
    );
    world.nats.start_again().await.unwrap();
    eventually("it is published", LIMIT, async || {
        let outcome = relay.step().await?;
        anyhow::ensure!(outcome == Outcome::Worked { published: 1, failed: 0 }, "{outcome:?}");
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_stream_that_was_not_meant_halts_the_relay() {
    let world = World::new().await.unwrap();
    let relay = relay(&world.orders, &world.nats.url(), 500).await;
    enqueue(&world.orders, &event("tx-1", "A-1", AMOUNT)).await;
    sqlx::query("update outbox set subject = 'fulfillment.misrouted'")
        .execute(&world.orders)
        .await
        .unwrap();
    assert!(matches!(relay.step().await.unwrap(), Outcome::Stuck(_)));
    assert_eq!(
        number(&world.orders, "select count(*) from outbox where published_at is not null").await,
        0
    );
    let other = world.broker.js.get_stream(topology::FULFILLMENT).await.unwrap();
    assert_eq!(other.cached_info().state.messages, 0, "the other stream did not get it");
}

#[tokio::test]
async fn one_relay_works_at_a_time_and_a_dead_one_is_replaced() {
    let world = World::new().await.unwrap();
    let (first, second) = (
        relay(&world.orders, &world.nats.url(), 1).await,
        relay(&world.orders, &world.nats.url(), 1).await,
    );
    for n in 0..25 {
        enqueue(&world.orders, &event(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT)).await;
    }
    // Only full batches: there may be more, so the lease is kept. Then the first one "dies".
    assert_eq!(first.step().await.unwrap(), Outcome::Worked { published: 10, failed: 0 });
    assert_eq!(second.step().await.unwrap(), Outcome::Standby);
    sqlx::query("update relay_lease set expires_at = now()").execute(&world.orders).await.unwrap();
    assert_eq!(second.step().await.unwrap(), Outcome::Worked { published: 10, failed: 0 });
    assert_eq!(first.step().await.unwrap(), Outcome::Standby, "it came back too late");
}

#[tokio::test]
async fn the_lease_runs_out_by_the_databases_clock() {
    let world = World::new().await.unwrap();
    let (ours, theirs) = (Uuid::now_v7(), Uuid::now_v7());
    assert!(lease::acquire(&world.orders, ours).await.unwrap());
    assert!(lease::acquire(&world.orders, ours).await.unwrap(), "renewed");
    assert!(!lease::acquire(&world.orders, theirs).await.unwrap());
    lease::release(&world.orders, theirs).await.unwrap();
    assert!(!lease::acquire(&world.orders, theirs).await.unwrap(), "only its holder gives it back");
    let rest = "select extract(epoch from expires_at - now())::bigint from relay_lease";
    assert!((1..=5).contains(&number(&world.orders, rest).await));
    lease::release(&world.orders, ours).await.unwrap();
    assert!(lease::acquire(&world.orders, theirs).await.unwrap());
}

/// The hand-over without a poll: the poll of these two is far longer than the test may take.
#[tokio::test]
async fn with_two_replicas_no_event_waits_for_a_poll() {
    let world = World::new().await.unwrap();
    let mut apis = Vec::new();
    let mut services = Vec::new();
    for _ in 0..2 {
        let plan = world.plan(Kind::Orders).unwrap().with("RELAY_POLL_INTERVAL", "1h");
        let service = plan.start().await.unwrap();
        apis.push(e2e::api::Api::new(service.url()));
        services.push(service);
    }
    // Two payments at a time, so that again and again one relay finds the lease taken.
    for round in 1..=100 {
        let (one, other) = (format!("A{round}"), format!("B{round}"));
        tokio::join!(pay(&apis[0], &one, 1), pay(&apis[1], &other, 1));
        eventually("both are published", Duration::from_secs(10), async || {
            let stored = world.broker.count().await?;
            anyhow::ensure!(stored == 2 * round, "{stored} stored in round {round}");
            Ok(())
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn no_transaction_is_open_while_the_broker_is_waited_for() {
    let world = World::new().await.unwrap();
    let (proxy, _service, api) = proxied_orders(&world).await;
    proxy.set(e2e::proxy::Flow::HoldReplies);
    pay(&api, "A", 20).await;
    eventually("they are stored", LIMIT, async || {
        let stored = world.broker.count().await?;
        anyhow::ensure!(stored > 0, "none");
        Ok(())
    })
    .await
    .unwrap();
    // The relay is waiting for acknowledgements now.
    let open = "select count(*) from pg_stat_activity where datname = current_database()
                and application_name like 'orders-service-%' and xact_start is not null";
    assert_eq!(number(&world.orders, open).await, 0);
    assert_eq!(
        number(&world.orders, "select count(*) from outbox where published_at is not null").await,
        0
    );
}
