//! From the stream to one dispatch per payment, whatever is repeated, contradicted or unreadable.

use std::time::Duration;

use async_nats::jetstream::{AckKind, Message, consumer::PullConsumer};
use e2e::{services::Kind, wait::eventually, world::World};
use fulfillment_service::{CONSUMER, intake::Intake};
use futures_util::StreamExt as _;
use serde_json::Value;
use shared::{
    consumer::Consumer,
    database,
    events::{PAYMENT_CONFIRMED, PaymentConfirmed},
    handler::{Delivery, Handler, Verdict},
    inbox,
    lifecycle::Health,
    topology,
    values::TransactionId,
};
use sqlx::{PgPool, Row as _};
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

/// A consumer in this process, to be stepped by hand.
async fn consumer<H: Handler>(world: &World, handler: H, max_deliveries: i64) -> Consumer<H> {
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
async fn deliveries(world: &World, most: usize) -> Vec<Message> {
    let durable: PullConsumer =
        world.broker.js.get_consumer_from_stream(CONSUMER, topology::ORDERS).await.unwrap();
    eventually("something is delivered", LIMIT, async || {
        let fetched = durable.fetch().max_messages(most).messages().await?;
        let batch: Vec<_> = fetched.map(Result::unwrap).collect().await;
        anyhow::ensure!(!batch.is_empty(), "nothing");
        Ok(batch)
    })
    .await
    .unwrap()
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
    let consumer = consumer(&world, Intake { pool: world.fulfillment.clone() }, 10).await;
    let batch = deliveries(&world, 5).await;
    assert_eq!(batch.len(), 5);
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

/// A handler with a bug.
struct Panics;

impl Handler for Panics {
    const EVENT_TYPE: &'static str = PAYMENT_CONFIRMED;
    type Data = PaymentConfirmed;

    async fn handle(&self, batch: &[Delivery<PaymentConfirmed>]) -> anyhow::Result<Vec<Verdict>> {
        assert!(
            batch.iter().all(|delivery| delivery.event.data.order_id.as_str() != "A-2"),
            "a bug"
        );
        Ok(batch.iter().map(|_| Verdict::Done).collect())
    }
}

#[tokio::test]
async fn a_handler_that_panics_fails_its_message_and_not_the_process() {
    let world = World::new().await.unwrap();
    for n in 1..=3 {
        world
            .broker
            .publish(&bytes(&event(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT)), None)
            .await
            .unwrap();
    }
    let consumer = consumer(&world, Panics, 1).await;
    consumer.process(deliveries(&world, 3).await, &CancellationToken::new()).await;
    assert_eq!(
        world.broker.consumer_backlog().await.unwrap(),
        (0, 1),
        "two acked, one comes again"
    );
    consumer.process(deliveries(&world, 1).await, &CancellationToken::new()).await;
    assert_eq!(world.broker.consumer_backlog().await.unwrap(), (0, 0));
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 1);
}

/// The poison's insert waits for a lock that the test holds.
const HANG_FOR_A_5: &str = "
    create function hang() returns trigger language plpgsql as $$
    begin
        perform pg_advisory_xact_lock(1);
        return new;
    end $$;
    create trigger hang before insert on dispatches for each row when (new.order_id = 'A-5')
    execute function hang();";

/// The worst message: whoever handles it dies at once, with everything in hand. The test plays the
/// killer, and drops the batch whenever the poison is reached.
#[tokio::test]
async fn a_message_that_kills_its_process_takes_no_other_with_it() {
    let world = World::new().await.unwrap();
    let mut impatient = topology::wanted(1)[0].consumers[0].clone();
    impatient.ack_wait = Duration::from_secs(1);
    world.broker.js.create_consumer_on_stream(impatient, topology::ORDERS).await.unwrap();
    sqlx::raw_sql(HANG_FOR_A_5).execute(&world.fulfillment).await.unwrap();
    let mut lock = database::begin(&world.fulfillment).await.unwrap();
    sqlx::query("select pg_advisory_xact_lock(1)").execute(&mut *lock).await.unwrap();
    for n in 1..=9 {
        world
            .broker
            .publish(&bytes(&event(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT)), None)
            .await
            .unwrap();
    }

    let stop = CancellationToken::new();
    let mut deaths = 0;
    while world.broker.consumer_backlog().await.unwrap() != (0, 0) {
        // A pool of its own, as a process has: it goes with the consumer.
        let pool = PgPool::connect(&world.database_url(Kind::Fulfillment)).await.unwrap();
        let mut consumer = consumer(&world, Intake { pool: pool.clone() }, 3).await;
        consumer.pool = pool;
        let death = eventually("the poison is reached", LIMIT, async || {
            let waiting = number(&world.fulfillment, WAITING).await;
            anyhow::ensure!(waiting > 0, "not yet");
            Ok(())
        });
        tokio::select! {
            () = consumer.process(deliveries(&world, 9).await, &stop) => {}
            dead = death => {
                dead.unwrap();
                deaths += 1;
            }
        }
        let kill =
            "select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'advisory'
                    and datname = current_database()";
        sqlx::query(kill).execute(&world.fulfillment).await.unwrap();
    }
    assert_eq!(deaths, 3, "as often as it may be delivered");
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 8);
    let given_up = "select convert_from(body, 'utf8')::json ->> 'subject' from dead_letters";
    let given_up: Vec<String> =
        sqlx::query_scalar(given_up).fetch_all(&world.fulfillment).await.unwrap();
    assert_eq!(given_up, ["A-5"]);
}

const WAITING: &str = "select count(*) from pg_stat_activity where wait_event = 'advisory'
                       and datname = current_database()";

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
