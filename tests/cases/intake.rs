//! One dispatch per payment, whatever is repeated or contradicted.

use e2e::{services::Kind, world::World};
use shared::{database, inbox, values::TransactionId};
use sqlx::{AssertSqlSafe, Row as _};
use tokio_util::sync::CancellationToken;

use crate::support::{
    AMOUNT, DEAD_LETTERS, DISPATCHES, PROCESSED, bytes, consumed, consumer, deliveries, event,
    intake, number,
};

/// Takes one guard away, so that a test shows what the others do alone.
async fn drop_constraint(world: &World, name: &str) {
    let drop = format!("alter table dispatches drop constraint if exists {name}");
    sqlx::raw_sql(AssertSqlSafe(drop)).execute(&world.fulfillment).await.unwrap();
}

#[tokio::test]
async fn a_redelivered_event_creates_one_dispatch() {
    let world = World::new().await.unwrap();
    // The inbox alone: with them, the business keys would absorb these too.
    drop_constraint(&world, "one_dispatch_per_transaction").await;
    drop_constraint(&world, "one_dispatch_per_order").await;
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
    drop_constraint(&world, "one_dispatch_per_order").await;
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
    drop_constraint(&world, "one_dispatch_per_order").await;
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
async fn duplicates_within_one_batch_are_one_dispatch() {
    let world = World::new().await.unwrap();
    let (one, same_payment) = (event("tx-1", "A-1", AMOUNT), event("tx-1", "A-1", AMOUNT));
    let conflict = event("tx-1", "A-1", AMOUNT + 1);
    for each in [&one, &one, &same_payment, &conflict, &one] {
        world.broker.publish(&bytes(each), None).await.unwrap();
    }
    let consumer = consumer(&world, intake(&world.fulfillment), 10).await;
    let batch = deliveries(&world, 5).await;
    assert_eq!(batch.len(), 5);
    consumer.process(batch, consumer.nats.connection(), &CancellationToken::new()).await;
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
