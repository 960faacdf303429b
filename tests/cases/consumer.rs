//! From the stream to one dispatch per payment, whatever is repeated, contradicted or unreadable.

use std::time::Duration;

use async_nats::jetstream::{AckKind, consumer::PullConsumer};
use e2e::{services::Kind, wait::eventually, world::World};
use fulfillment_service::{CONSUMER, intake::Intake};
use futures_util::StreamExt as _;
use serde_json::Value;
use shared::{
    consumer::Consumer, database, inbox, lifecycle::Health, topology, values::TransactionId,
};
use sqlx::Row as _;
use tokio_util::sync::CancellationToken;

use crate::support::{AMOUNT, LIMIT, bytes, connected, event, number};

/// Waits until the durable has nothing left to do.
async fn consumed(world: &World) {
    eventually("everything is consumed", LIMIT, async || {
        let backlog = world.broker.consumer_backlog().await?;
        anyhow::ensure!(backlog == (0, 0), "pending, ack pending: {backlog:?}");
        Ok(())
    })
    .await
    .unwrap();
}

const DISPATCHES: &str = "select count(*) from dispatches";
const DEAD_LETTERS: &str = "select count(*) from dead_letters";
const PROCESSED: &str = "select count(*) from processed_events";

#[tokio::test]
async fn a_redelivered_event_creates_one_dispatch() {
    let world = World::new().await.unwrap();
    // The inbox alone: without it the business key would absorb these too.
    let drop_keys = "alter table dispatches drop constraint one_dispatch_per_transaction,
                     drop constraint one_dispatch_per_order";
    sqlx::raw_sql(drop_keys).execute(&world.fulfillment).await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let body = bytes(&event("tx-1", "A-1", AMOUNT));
    for _ in 0..3 {
        // Without a message id the broker cannot help; only the inbox can.
        assert!(!world.broker.publish(&body, None).await.unwrap());
        consumed(&world).await;
    }
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    assert_eq!(number(&world.fulfillment, PROCESSED).await, 1);
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}

#[tokio::test]
async fn the_broker_absorbs_a_repeated_message_id() {
    let world = World::new().await.unwrap();
    let event = event("tx-1", "A-1", AMOUNT);
    let id = event.id.to_string();
    assert!(!world.broker.publish(&bytes(&event), Some(&id)).await.unwrap());
    assert!(world.broker.publish(&bytes(&event), Some(&id)).await.unwrap());
    assert_eq!(world.broker.count().await.unwrap(), 1);
}

#[tokio::test]
async fn the_same_payment_under_a_new_event_id_is_dispatched_once() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    for _ in 0..3 {
        let again = event("tx-1", "A-1", AMOUNT);
        world.broker.publish(&bytes(&again), Some(&again.id.to_string())).await.unwrap();
        consumed(&world).await;
    }
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    assert_eq!(number(&world.fulfillment, PROCESSED).await, 3, "each event was looked at");
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0, "a repetition is no conflict");
}

/// Also after the inbox has forgotten.
#[tokio::test]
async fn a_replay_after_the_inbox_was_purged_dispatches_nothing_twice() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let body = bytes(&event("tx-1", "A-1", AMOUNT));
    world.broker.publish(&body, None).await.unwrap();
    consumed(&world).await;
    sqlx::query("delete from processed_events").execute(&world.fulfillment).await.unwrap();
    world.broker.publish(&body, None).await.unwrap();
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}

#[tokio::test]
async fn another_payment_under_a_used_key_is_set_aside_and_never_applied() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let first = event("tx-1", "A-1", AMOUNT);
    world.broker.publish(&bytes(&first), None).await.unwrap();
    consumed(&world).await;
    let conflicts = [
        event("tx-1", "A-1", AMOUNT + 1), // another amount
        event("tx-1", "A-2", AMOUNT),     // another order
        event("tx-2", "A-1", AMOUNT),     // another transaction for the order
    ];
    for conflict in &conflicts {
        world.broker.publish(&bytes(conflict), None).await.unwrap();
    }
    let behind = event("tx-3", "A-3", AMOUNT);
    world.broker.publish(&bytes(&behind), None).await.unwrap();
    consumed(&world).await;

    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 2, "the first and the one behind");
    let letters =
        sqlx::query("select reason, error, body, stream_seq from dead_letters order by stream_seq")
            .fetch_all(&world.fulfillment)
            .await
            .unwrap();
    assert_eq!(letters.len(), conflicts.len());
    for (letter, conflict) in letters.iter().zip(&conflicts) {
        assert_eq!(letter.get::<String, _>("reason"), "transaction_conflict");
        assert_eq!(letter.get::<Vec<u8>, _>("body"), bytes(conflict), "kept as it came");
        assert!(letter.get::<String, _>("error").contains("tx-1"), "says what is in the way");
    }
    // An event that was not applied is not in the inbox: a replay may apply it one day.
    assert_eq!(number(&world.fulfillment, PROCESSED).await, 2);
}

#[tokio::test]
async fn what_cannot_be_read_is_kept_with_its_bytes_and_those_behind_it_flow() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let readable = String::from_utf8(bytes(&event("tx-9", "A-9", AMOUNT))).unwrap();
    let unreadable: Vec<(&str, Vec<u8>)> = vec![
        ("undecodable", b"".to_vec()),
        ("undecodable", b"not json".to_vec()),
        ("undecodable", vec![0, 159, 146, 150, 0]),
        (
            "undecodable",
            br#"{"specversion":"1.0","id":"1","type":"payment.confirmed.v1","data":{}}"#.to_vec(),
        ),
        ("undecodable", readable.replace("A-9", "A\\u0000").into_bytes()),
        ("undecodable", readable.replace("1999", "-1999").into_bytes()),
        ("undecodable", vec![b'['; 100_000]),
        ("unknown_type", readable.replace("confirmed.v1", "confirmed.v2").into_bytes()),
        ("unknown_type", readable.replace("payment.confirmed.v1", "a\\u0000b").into_bytes()),
    ];
    for (_, body) in &unreadable {
        world.broker.publish(body, None).await.unwrap();
    }
    world.broker.publish(&bytes(&event("tx-1", "A-1", AMOUNT)), None).await.unwrap();
    consumed(&world).await;

    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    let letters = sqlx::query(
        "select reason, body, consumer, stream, subject from dead_letters order by stream_seq",
    )
    .fetch_all(&world.fulfillment)
    .await
    .unwrap();
    assert_eq!(letters.len(), unreadable.len());
    for (letter, (reason, body)) in letters.iter().zip(&unreadable) {
        assert_eq!(letter.get::<String, _>("reason"), *reason);
        assert_eq!(&letter.get::<Vec<u8>, _>("body"), body);
        assert_eq!(letter.get::<String, _>("consumer"), "fulfillment");
        assert_eq!(letter.get::<String, _>("stream"), "ORDERS");
        assert_eq!(letter.get::<String, _>("subject"), "orders.payment.confirmed");
    }
}

/// A sequence counts attempts even when their transactions are rolled back.
const FAIL_FOR_A_1: &str = "
    create sequence attempts;
    create function fail() returns trigger language plpgsql as $$
    begin
        perform nextval('attempts');
        raise exception 'the shelf is on fire';
    end $$;
    create trigger fail before insert on dispatches for each row when (new.order_id = 'A-1')
    execute function fail();";

#[tokio::test]
async fn a_handler_that_fails_for_ever_ends_in_the_dead_letters_and_drags_nobody_down() {
    let world = World::new().await.unwrap();
    sqlx::raw_sql(FAIL_FOR_A_1).execute(&world.fulfillment).await.unwrap();
    let poison = bytes(&event("tx-1", "A-1", AMOUNT));
    world.broker.publish(&poison, None).await.unwrap();
    for n in 2..=50 {
        world
            .broker
            .publish(&bytes(&event(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT)), None)
            .await
            .unwrap();
    }
    let plan = world.plan(Kind::Fulfillment).unwrap().with("CONSUMER_MAX_DELIVERIES", "3");
    let _fulfillment = plan.start().await.unwrap();
    // All fifty are in the stream, so the poison is in one batch with its neighbours.
    eventually("the neighbours are dispatched", LIMIT, async || {
        let dispatches = number(&world.fulfillment, DISPATCHES).await;
        anyhow::ensure!(dispatches == 49, "{dispatches} dispatches");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(
        number(&world.fulfillment, DEAD_LETTERS).await,
        0,
        "long before the poison is given up"
    );
    consumed(&world).await;
    let letter = sqlx::query("select reason, error, body, deliveries from dead_letters")
        .fetch_one(&world.fulfillment)
        .await
        .unwrap();
    assert_eq!(letter.get::<String, _>("reason"), "delivery_limit");
    assert_eq!(letter.get::<Vec<u8>, _>("body"), poison);
    assert_eq!(letter.get::<i64, _>("deliveries"), 4, "the limit is looked at before handling");
    // Each delivery: once with its batch, once alone; alone in its batch, once.
    let attempts = number(&world.fulfillment, "select last_value from attempts").await;
    assert!((3..=6).contains(&attempts), "{attempts} attempts: no hot loop");
}

#[tokio::test]
async fn a_failing_message_comes_back_later_not_at_once() {
    let world = World::new().await.unwrap();
    sqlx::raw_sql(FAIL_FOR_A_1).execute(&world.fulfillment).await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    world.broker.publish(&bytes(&event("tx-1", "A-1", AMOUNT)), None).await.unwrap();
    // The eleventh delivery would be the limit's. A bare nak burns them in milliseconds.
    eventually("it was tried three times", LIMIT, async || {
        let attempts = number(&world.fulfillment, "select last_value from attempts").await;
        anyhow::ensure!(attempts >= 3, "{attempts} attempts");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
    sqlx::raw_sql("drop trigger fail on dispatches").execute(&world.fulfillment).await.unwrap();
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1, "what was mended is applied");
}

/// Two handlers in this process take the same events in opposite order.
#[tokio::test]
async fn concurrent_claims_of_the_same_events_do_not_deadlock_and_one_wins() {
    let world = World::new().await.unwrap();
    let ids: Vec<_> = (0..200).map(|n| event(&format!("tx-{n}"), "A-1", AMOUNT).id).collect();
    let claim = async |ids: Vec<_>| {
        let mut tx = database::begin(&world.fulfillment).await.unwrap();
        let fresh = inbox::claim(&mut tx, "fulfillment", ids).await.unwrap();
        tx.commit().await.unwrap();
        fresh.len()
    };
    for _ in 0..20 {
        sqlx::query("delete from processed_events").execute(&world.fulfillment).await.unwrap();
        let reversed = ids.iter().rev().copied().collect();
        let (one, other) = tokio::join!(claim(ids.clone()), claim(reversed));
        assert_eq!(one + other, ids.len());
    }
}

#[tokio::test]
async fn a_claim_that_is_rolled_back_is_free_again() {
    let world = World::new().await.unwrap();
    let id = event("tx-1", "A-1", AMOUNT).id;
    for (commit, expected) in [(false, 1), (true, 1), (true, 0)] {
        let mut tx = database::begin(&world.fulfillment).await.unwrap();
        assert_eq!(inbox::claim(&mut tx, "fulfillment", [id, id]).await.unwrap().len(), expected);
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
    }
    let mut tx = database::begin(&world.fulfillment).await.unwrap();
    assert_eq!(inbox::claim(&mut tx, "another", [id]).await.unwrap().len(), 1, "per consumer");
}

/// `double_ack()` of async-nats 0.51 says Ok here.
#[tokio::test]
async fn settling_for_a_consumer_that_is_gone_is_an_error() {
    let world = World::new().await.unwrap();
    let nats = connected(&world.nats.url()).await;
    world.broker.publish(&bytes(&event("tx-1", "A-1", AMOUNT)), None).await.unwrap();
    let durable: PullConsumer =
        nats.jetstream().get_consumer_from_stream(CONSUMER, topology::ORDERS).await.unwrap();
    let message = durable.messages().await.unwrap().next().await.unwrap().unwrap();
    world.broker.js.delete_consumer_from_stream(CONSUMER, topology::ORDERS).await.unwrap();
    assert!(nats.settle(&message, AckKind::Ack).await.is_err());
}

#[tokio::test]
async fn duplicates_within_one_batch_are_one_dispatch() {
    let world = World::new().await.unwrap();
    let (one, same_payment) = (event("tx-1", "A-1", AMOUNT), event("tx-1", "A-1", AMOUNT));
    let conflict = event("tx-1", "A-1", AMOUNT + 1);
    for each in [&one, &one, &same_payment, &conflict, &one] {
        world.broker.publish(&bytes(each), None).await.unwrap();
    }
    let nats = connected(&world.nats.url()).await;
    let durable: PullConsumer =
        nats.jetstream().get_consumer_from_stream(CONSUMER, topology::ORDERS).await.unwrap();
    let batch: Vec<_> =
        durable.messages().await.unwrap().take(5).map(Result::unwrap).collect().await;
    let consumer = Consumer {
        pool: world.fulfillment.clone(),
        nats,
        stream: topology::ORDERS,
        durable: CONSUMER,
        batch: 200,
        max_deliveries: 10,
        handler: Intake { pool: world.fulfillment.clone() },
        health: Health::default(),
    };
    consumer.process(batch, &CancellationToken::new()).await;
    let dispatched: (TransactionId, i64) =
        sqlx::query_as("select transaction_id, amount_minor from dispatches")
            .fetch_one(&world.fulfillment)
            .await
            .unwrap();
    assert_eq!(
        (dispatched.0.as_str(), dispatched.1),
        ("tx-1", AMOUNT),
        "the first in the stream wins"
    );
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 1);
    assert_eq!(world.broker.consumer_backlog().await.unwrap(), (0, 0), "all five are settled");
}

#[tokio::test]
async fn a_consumer_that_was_deleted_or_changed_is_reported_and_used_again_when_mended() {
    let world = World::new().await.unwrap();
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = e2e::api::Api::new(fulfillment.url());
    let limit = Duration::from_secs(30);
    eventually("it is ready", limit, async || api.ready().await).await.unwrap();
    let failing = async |part: &str| {
        eventually("readiness says what is wrong", limit, async || {
            let answer = api.get("/readyz").await?;
            let reason = answer.body["failing"]["consumer"].as_str().unwrap_or_default();
            anyhow::ensure!(answer.status == 503 && reason.contains(part), "{}", answer.body);
            Ok(())
        })
        .await
        .unwrap();
    };

    world.broker.js.delete_consumer_from_stream(CONSUMER, topology::ORDERS).await.unwrap();
    failing("cannot be bound").await;
    let mut drifted = topology::wanted(1)[0].consumers[0].clone();
    drifted.max_deliver = 5;
    world.broker.js.create_consumer_on_stream(drifted, topology::ORDERS).await.unwrap();
    failing("max_deliver is 5, wanted -1").await;
    world.broker.publish(&bytes(&event("tx-1", "A-1", AMOUNT)), None).await.unwrap();

    topology::upsert(&world.broker.js, 1).await.unwrap();
    eventually("it is ready", limit, async || api.ready().await).await.unwrap();
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1, "nothing was lost meanwhile");
}

#[tokio::test]
async fn a_dead_letter_keeps_the_headers() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    world.broker.publish(b"?", Some("an id")).await.unwrap();
    consumed(&world).await;
    let headers: Value = sqlx::query_scalar("select headers from dead_letters")
        .fetch_one(&world.fulfillment)
        .await
        .unwrap();
    assert_eq!(headers["Nats-Msg-Id"][0], "an id");
}
