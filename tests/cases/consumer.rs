//! From the stream to one dispatch per payment, whatever is repeated, contradicted or unreadable.

use std::time::{Duration, Instant};

use async_nats::jetstream::{AckKind, consumer::PullConsumer};
use e2e::{services::Kind, wait::eventually, world::World};
use fulfillment_service::CONSUMER;
use futures_util::StreamExt as _;
use serde_json::Value;
use shared::{
    database,
    events::{PAYMENT_CONFIRMED, PaymentConfirmed},
    handler::{Delivery, Handler, Verdict},
    topology,
};
use sqlx::{PgPool, Row as _};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::support::{
    AMOUNT, DEAD_LETTERS, DISPATCHES, LIMIT, announce, bytes, connected, consumed, consumer,
    deliveries, dispatched, event, intake, number, ready,
};

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
    announce(&world, "tx-1", "A-1").await;
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
        announce(&world, &format!("tx-{n}"), &format!("A-{n}")).await;
    }
    let plan = world.plan(Kind::Fulfillment).unwrap().with("CONSUMER_MAX_DELIVERIES", "3");
    let fulfillment = plan.start().await.unwrap();
    // All fifty are in the stream, so the poison is in one batch with its neighbours.
    dispatched(&world, 49).await;
    let back = fulfillment.log().matches("not applied, again in").count();
    assert!(back <= 3, "{back} were sent back: the neighbours too");
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
    announce(&world, "tx-1", "A-1").await;
    let tried = async |times: i64| {
        eventually("it was tried", LIMIT, async || {
            let attempts = "select case when is_called then last_value else 0 end from attempts";
            let attempts = number(&world.fulfillment, attempts).await;
            anyhow::ensure!(attempts >= times, "{attempts} of {times} attempts");
            Ok(())
        })
        .await
        .unwrap();
    };
    tried(1).await;
    let first = Instant::now();
    // The eleventh delivery would be the limit's. A bare nak burns them in milliseconds; these are three
    // pauses, which grow from half a second.
    tried(4).await;
    assert!(first.elapsed() > Duration::from_secs(1), "{:?} for four attempts", first.elapsed());
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
    sqlx::raw_sql("drop trigger fail on dispatches").execute(&world.fulfillment).await.unwrap();
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1, "what was mended is applied");
}

/// `double_ack()` of async-nats 0.51 says Ok here.
#[tokio::test]
async fn the_brokers_word_about_the_last_ack_is_its_word_about_all() {
    let world = World::new().await.unwrap();
    let nats = connected(&world.nats.url()).await;
    for _ in 0..10 {
        for n in 0..200 {
            announce(&world, &format!("tx-{n}"), &format!("A-{n}")).await;
        }
        let mut acked = 0;
        while acked < 200 {
            let batch = deliveries(&world, 200).await;
            nats.settle(batch.iter().map(|message| (&**message, AckKind::Ack))).await.unwrap();
            acked += batch.len();
            // Not eventually: it has said so.
            assert_eq!(world.broker.consumer_backlog().await.unwrap().1, 0);
        }
    }
}

#[tokio::test]
async fn settling_for_a_consumer_that_is_gone_is_an_error() {
    let world = World::new().await.unwrap();
    let nats = connected(&world.nats.url()).await;
    announce(&world, "tx-1", "A-1").await;
    let durable: PullConsumer =
        nats.jetstream().get_consumer_from_stream(CONSUMER, topology::ORDERS).await.unwrap();
    let message = durable.messages().await.unwrap().next().await.unwrap().unwrap();
    world.broker.js.delete_consumer_from_stream(CONSUMER, topology::ORDERS).await.unwrap();
    assert!(nats.settle([(&*message, AckKind::Ack)]).await.is_err());
}

#[tokio::test]
async fn a_consumer_that_was_deleted_or_changed_is_reported_and_used_again_when_mended() {
    let world = World::new().await.unwrap();
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = e2e::api::Api::new(fulfillment.url());
    let limit = Duration::from_secs(30);
    ready(&api).await;
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
    announce(&world, "tx-1", "A-1").await;

    topology::upsert(&world.broker.js, 1).await.unwrap();
    ready(&api).await;
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
        announce(&world, &format!("tx-{n}"), &format!("A-{n}")).await;
    }
    let consumer = consumer(&world, Panics, 1).await;
    consumer
        .process(deliveries(&world, 3).await, consumer.nats.connection(), &CancellationToken::new())
        .await;
    assert_eq!(
        world.broker.consumer_backlog().await.unwrap(),
        (0, 1),
        "two acked, one comes again"
    );
    consumer
        .process(deliveries(&world, 1).await, consumer.nats.connection(), &CancellationToken::new())
        .await;
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
/// A durable that was made anew knows nothing of what the old one delivered, and does not answer.
#[tokio::test]
async fn deliveries_that_the_broker_has_forgotten_cost_one_wait_and_not_one_each() {
    let world = World::new().await.unwrap();
    for n in 0..20 {
        announce(&world, &format!("tx-{n}"), &format!("A-{n}")).await;
        world.broker.publish(b"garbage", None).await.unwrap();
    }
    let consumer = consumer(&world, intake(&world.fulfillment), 10).await;
    for message in deliveries(&world, 40).await {
        consumer.nats.settle([(&*message, AckKind::Nak(None))]).await.unwrap();
    }
    let again = deliveries(&world, 40).await;
    world.broker.js.delete_stream(topology::ORDERS).await.unwrap();
    world.run_setup().await.unwrap();
    // So that the durable expects acks, and these are none of them.
    announce(&world, "tx-new", "new").await;
    let new = deliveries(&world, 1).await;

    // An answer is waited for five seconds; forty of them would take over three minutes.
    let stop = CancellationToken::new();
    timeout(LIMIT, consumer.process(again, consumer.nats.connection(), &stop))
        .await
        .expect("it waits for each");
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 20, "what was read is kept");
    consumer.process(new, consumer.nats.connection(), &stop).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1, "and it goes on with the new ones");
}

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
        announce(&world, &format!("tx-{n}"), &format!("A-{n}")).await;
    }

    let stop = CancellationToken::new();
    let mut deaths = 0;
    while world.broker.consumer_backlog().await.unwrap() != (0, 0) {
        // A pool of its own, as a process has: it goes with the consumer.
        let pool = PgPool::connect(&world.database_url(Kind::Fulfillment)).await.unwrap();
        let mut consumer = consumer(&world, intake(&pool), 3).await;
        consumer.pool = pool;
        let death = eventually("the poison is reached", LIMIT, async || {
            let waiting = number(&world.fulfillment, WAITING).await;
            anyhow::ensure!(waiting > 0, "not yet");
            Ok(())
        });
        tokio::select! {
            () = consumer.process(deliveries(&world, 9).await, consumer.nats.connection(), &stop) => {}
            dead = death => {
                dead.unwrap();
                deaths += 1;
                assert!(deaths <= 3, "it is never given up");
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
