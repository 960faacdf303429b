//! Rows that have served their time, and those that have not.

use std::time::Duration;

use e2e::{services::Kind, wait::eventually, world::World};
use shared::retention::{Retention, Swept};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::support::{
    AMOUNT, DISPATCHES, LIMIT, PROCESSED, announce, blocked, consumed, dispatched, enqueue, event,
    number, world_with_orders,
};

const DAY: Duration = Duration::from_secs(24 * 3600);
const ROWS: &str = "select count(*) from outbox";

fn retention(pool: &PgPool, inbox: Option<Duration>) -> Retention {
    Retention { pool: pool.clone(), outbox: 14 * DAY, inbox }
}

async fn sweep(retention: &Retention) -> Option<Swept> {
    retention.sweep(&CancellationToken::new()).await.unwrap()
}

/// Rows that were published so many days ago.
async fn publish_long_ago(pool: &PgPool, count: i32, days: i32) {
    sqlx::query(
        "insert into outbox (event_id, aggregate_id, subject, payload, published_at, stream_seq)
         select gen_random_uuid(), 'old-' || n, 'orders.payment.confirmed', '{}',
                now() - make_interval(days => $2), n
         from generate_series(1, $1) as n",
    )
    .bind(count)
    .bind(days)
    .execute(pool)
    .await
    .unwrap();
}

#[tokio::test]
async fn old_rows_are_deleted_and_nothing_that_is_young_or_waits() {
    let world = World::new().await.unwrap();
    publish_long_ago(&world.orders, 2500, 15).await;
    publish_long_ago(&world.orders, 7, 13).await;
    for n in 0..5 {
        enqueue(&world.orders, &event(&format!("tx-{n}"), &format!("A-{n}"), AMOUNT)).await;
    }
    sqlx::query("update outbox set created_at = now() - interval '1 year', parked_at = now() - interval '1 year'
                 where aggregate_id in ('A-0', 'A-1')")
        .execute(&world.orders)
        .await
        .unwrap();
    let retention = retention(&world.orders, None);
    assert_eq!(sweep(&retention).await, Some(Swept { outbox: 2500, inbox: 0 }));
    assert_eq!(number(&world.orders, ROWS).await, 12, "seven are young, five wait");
    assert_eq!(sweep(&retention).await, Some(Swept::default()));
}

#[tokio::test]
async fn a_row_that_is_taken_back_meanwhile_stays() {
    let world = World::new().await.unwrap();
    publish_long_ago(&world.orders, 2, 15).await;
    let mut tx = shared::database::begin(&world.orders).await.unwrap();
    sqlx::query("update outbox set published_at = null, stream_seq = null where stream_seq = 1")
        .execute(&mut *tx)
        .await
        .unwrap();
    let retention = retention(&named(&world), None);
    let take_back = async {
        blocked(&world.orders, "test-service").await;
        tx.commit().await.unwrap();
    };
    let (swept, ()) = tokio::join!(sweep(&retention), take_back);
    assert!(swept.is_some());
    assert_eq!(number(&world.orders, ROWS).await, 1, "it waits to be published again");
}

/// A pool whose sessions can be told from others.
fn named(world: &World) -> PgPool {
    let url = world.database_url(Kind::Orders).parse().unwrap();
    shared::database::pool(url, 2, "test-service-1")
}

#[tokio::test]
async fn one_replica_deletes_at_a_time() {
    let world = World::new().await.unwrap();
    publish_long_ago(&world.orders, 5000, 15).await;
    let (first, second) = (retention(&world.orders, None), retention(&world.orders, None));
    let (first, second) = tokio::join!(sweep(&first), sweep(&second));
    let swept = Some(Swept { outbox: 5000, inbox: 0 });
    assert!(
        (first, second) == (swept, None) || (first, second) == (None, swept),
        "{first:?}, {second:?}"
    );
    publish_long_ago(&world.orders, 1, 15).await;
    let again = retention(&world.orders, None);
    assert!(sweep(&again).await.is_some(), "the lock is given back");
}

#[tokio::test]
async fn a_replay_after_the_inbox_row_is_gone_dispatches_nothing_twice() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let body = announce(&world, "tx-1", "A-1").await;
    dispatched(&world, 1).await;
    consumed(&world).await;
    sqlx::query("update processed_events set processed_at = now() - interval '31 days'")
        .execute(&world.fulfillment)
        .await
        .unwrap();
    // The service sweeps at its start as well, and may be at it: whichever comes first.
    let retention = retention(&world.fulfillment, Some(30 * DAY));
    eventually("the inbox has forgotten it", LIMIT, async || {
        sweep(&retention).await;
        anyhow::ensure!(number(&world.fulfillment, PROCESSED).await == 0, "not yet");
        Ok(())
    })
    .await
    .unwrap();

    world.broker.publish(&body, None).await.unwrap();
    eventually("it is new to the inbox", LIMIT, async || {
        anyhow::ensure!(number(&world.fulfillment, PROCESSED).await == 1, "not yet");
        Ok(())
    })
    .await
    .unwrap();
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1, "the business key knows it");
}

#[tokio::test]
async fn a_service_deletes_what_is_old_by_itself() {
    let (world, _orders, api) = world_with_orders().await;
    let plan = world.plan(Kind::Orders).unwrap().with("OUTBOX_RETENTION", "500ms");
    let _deleting = plan.start().await.unwrap();
    crate::support::pay(&api, "A", 3).await;
    eventually("they are published and deleted", LIMIT, async || {
        let rows = number(&world.orders, ROWS).await;
        anyhow::ensure!(rows == 0, "{rows} rows");
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn an_inbox_that_forgets_before_the_stream_is_refused_at_the_start() {
    let world = World::new().await.unwrap();
    for kind in [Kind::Orders, Kind::Fulfillment] {
        let plan = world.plan(kind).unwrap().with("INBOX_RETENTION", "13days");
        let said = plan.command(&["serve"]).await.unwrap();
        assert_eq!(said.code, 2);
        assert!(
            said.err.starts_with("error: INBOX_RETENTION: shorter than the stream"),
            "{}",
            said.err
        );
    }
}
