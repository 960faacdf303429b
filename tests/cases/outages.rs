//! Servers that go away under load, and services that are killed at random.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use e2e::{
    api::Api,
    services::{Kind, Service},
    wait::eventually,
    world::World,
};
use futures_util::{StreamExt as _, stream};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::support::{AMOUNT, LIMIT, bytes, event, number, pay};

const OUTAGE: Duration = Duration::from_secs(30);
/// Several times the longest wait of a first nak.
const SEVERAL_NAKS: Duration = Duration::from_secs(3);
/// The outage, and what is left to do after it.
const AFTER: Duration = Duration::from_secs(90);

/// Pays an order every few milliseconds until told to stop; returns the slowest answer.
async fn pay_steadily(api: &Api, prefix: &str, stop: &CancellationToken) -> (usize, Duration) {
    let mut ticks = interval(Duration::from_millis(20));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut count, mut slowest) = (0, Duration::ZERO);
    while !stop.is_cancelled() {
        ticks.tick().await;
        let order = format!("{prefix}-{count}");
        assert_eq!(api.place(&order, AMOUNT).await.unwrap().status, 201);
        let start = Instant::now();
        let answer = api.confirm(&format!("tx-{order}"), &order, AMOUNT).await.unwrap();
        assert_eq!(answer.status, 201, "{}", answer.body);
        slowest = slowest.max(start.elapsed());
        count += 1;
    }
    (count, slowest)
}

/// Lets an outage last.
async fn last(outage: Duration) {
    tokio::time::sleep_until(tokio::time::Instant::now() + outage).await;
}

async fn ready(api: &Api) {
    eventually("it is ready", LIMIT, async || api.ready().await).await.unwrap();
}

async fn failing(api: &Api, check: &str) {
    eventually("readiness names the failing check", LIMIT, async || {
        let answer = api.get("/readyz").await?;
        anyhow::ensure!(
            answer.status == 503 && answer.body["failing"].get(check).is_some(),
            "{}",
            answer.body
        );
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn an_outage_of_the_database_costs_no_message_and_no_delivery() {
    // The orders database stays: the load must go on. So the two live on different servers.
    let orders_world = World::new().await.unwrap();
    let mut world = World::with_own_postgres().await.unwrap();
    let plan = orders_world.plan_with(Kind::Orders, &world.nats.url()).unwrap();
    let orders = plan.start().await.unwrap();
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let (orders_api, api) = (Api::new(orders.url()), Api::new(fulfillment.url()));
    ready(&api).await;

    let stop = CancellationToken::new();
    let load = pay_steadily(&orders_api, "A", &stop);
    let outage = async {
        eventually("payments are dispatched", LIMIT, async || {
            let dispatches = number(&world.fulfillment, "select count(*) from dispatches").await;
            anyhow::ensure!(dispatches > 20, "{dispatches}");
            Ok(())
        })
        .await
        .unwrap();
        world.own_postgres.as_mut().unwrap().stop("QUIT").await.unwrap();
        failing(&api, "database").await;
        failing(&api, "consumer").await;
        last(OUTAGE).await;
        world.own_postgres.as_mut().unwrap().start_again().await.unwrap();
        ready(&api).await;
        stop.cancel();
    };
    let ((paid, _), ()) = tokio::join!(load, outage);
    eventually("everything is dispatched", AFTER, async || {
        let dispatches: i64 = sqlx::query_scalar("select count(*) from dispatches")
            .fetch_one(&world.fulfillment)
            .await?;
        let backlog = world.broker.consumer_backlog().await?;
        let stored = world.broker.count().await?;
        let state =
            format!("{dispatches} of {paid} dispatched, {stored} stored, backlog {backlog:?}");
        anyhow::ensure!(dispatches == paid as i64 && backlog == (0, 0), state);
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.fulfillment, "select count(*) from dead_letters").await, 0);
    println!("{paid} payments through an outage of {OUTAGE:?}");
}

/// As after a fail-over, or with a full disk: the database answers, and cannot do its work.
#[tokio::test]
async fn a_database_that_may_only_read_costs_no_delivery() {
    let world = World::new().await.unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap().with("CONSUMER_MAX_DELIVERIES", "1");
    let fulfillment = plan.start().await.unwrap();
    let api = Api::new(fulfillment.url());
    ready(&api).await;
    let switch = async |to: &'static str| {
        let set = format!(
            "begin read write;
             do $$ begin
                 execute format('alter database %I set default_transaction_read_only = {to}', current_database());
             end $$;
             commit"
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&world.fulfillment).await.unwrap();
        let end = "select pg_terminate_backend(pid) from pg_stat_activity
                   where datname = current_database() and application_name like 'fulfillment-service-%'";
        sqlx::query(end).execute(&world.fulfillment).await.unwrap();
    };
    switch("on").await;
    world.broker.publish(&bytes(&event("tx-1", "A-1", AMOUNT)), None).await.unwrap();
    failing(&api, "consumer").await;
    // One delivery is all there is: a nak now, and the next one would be given up.
    last(SEVERAL_NAKS).await;
    assert_eq!(number(&world.fulfillment, "select count(*) from dead_letters").await, 0);
    switch("off").await;
    eventually("it is dispatched", LIMIT, async || {
        let dispatches = number(&world.fulfillment, "select count(*) from dispatches").await;
        anyhow::ensure!(dispatches == 1, "{dispatches}");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.fulfillment, "select count(*) from dead_letters").await, 0);
}

async fn payments_go_on_while_the_broker_is_away(signal: &str) {
    let mut world = World::new().await.unwrap();
    let orders = world.start(Kind::Orders).await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = Api::new(orders.url());
    ready(&api).await;

    let stop = CancellationToken::new();
    let load = pay_steadily(&api, "A", &stop);
    let outage = async {
        eventually("payments are published", LIMIT, async || {
            anyhow::ensure!(world.broker.count().await? > 20, "few");
            Ok(())
        })
        .await
        .unwrap();
        world.nats.stop(signal).await.unwrap();
        failing(&api, "nats").await;
        last(OUTAGE).await;
        let waiting =
            number(&world.orders, "select count(*) from outbox where published_at is null").await;
        assert!(waiting > 100, "the outbox is the buffer: {waiting} rows wait");
        world.nats.start_again().await.unwrap();
        ready(&api).await;
        stop.cancel();
        waiting
    };
    let ((paid, slowest), waiting) = tokio::join!(load, outage);
    // A confirmation that waited for the broker would have taken its time limit of 5 s.
    assert!(slowest < Duration::from_secs(3), "the slowest confirmation took {slowest:?}");
    let ledger = world.settled(AFTER).await.unwrap();
    assert_eq!(ledger.dispatches, paid);
    println!("{paid} payments, {waiting} waited in the outbox, slowest confirmation {slowest:?}");
}

#[tokio::test]
async fn confirmations_go_on_while_the_broker_is_stopped() {
    payments_go_on_while_the_broker_is_away("TERM").await;
}

#[tokio::test]
async fn confirmations_go_on_when_the_broker_is_killed() {
    payments_go_on_while_the_broker_is_away("KILL").await;
}

/// Confirms as a payment provider does: until it gets an answer that is final.
async fn confirm_stubbornly(apis: &[Api], order: &str) {
    let transaction = format!("tx-{order}");
    for attempt in 0.. {
        let api = &apis[attempt % apis.len()];
        let placed =
            api.place(order, AMOUNT).await.is_ok_and(|answer| matches!(answer.status, 200 | 201));
        if placed
            && let Ok(answer) = api.confirm(&transaction, order, AMOUNT).await
            && matches!(answer.status, 200 | 201)
        {
            return;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn five_processes_killed_at_random_dispatch_every_payment_once() {
    const PAYMENTS: usize = 5000;
    let world = World::new().await.unwrap();
    let mut services = Vec::new();
    for kind in
        [Kind::Orders, Kind::Orders, Kind::Fulfillment, Kind::Fulfillment, Kind::Fulfillment]
    {
        services.push(world.start(kind).await.unwrap());
    }
    let apis: Vec<Api> = services[..2].iter().map(|service| Api::new(service.url())).collect();
    let paid = AtomicUsize::new(0);
    let done = CancellationToken::new();
    let load = async {
        stream::iter(0..PAYMENTS)
            .for_each_concurrent(24, async |n| {
                confirm_stubbornly(&apis, &format!("A-{n}")).await;
                paid.fetch_add(1, Ordering::Relaxed);
            })
            .await;
        done.cancel();
    };
    let seed = fastrand::u64(..);
    let kills = kill_at_random(&mut services, seed, &paid, &done);
    let ((), kills) = tokio::join!(load, kills);
    println!("seed {seed}: {kills} processes killed during {PAYMENTS} payments");
    assert!(kills >= 10, "only {kills} kills");
    let ledger = world.settled(Duration::from_secs(120)).await.unwrap();
    assert_eq!((ledger.payments, ledger.dispatches), (PAYMENTS, PAYMENTS));
    assert_eq!(ledger.dead_letters.len(), 0);
    println!(
        "{} messages for {} events: {} absorbed by the inbox",
        ledger.messages, ledger.events, ledger.absorbed_by_event_id
    );
}

/// Kills one of the services after every few payments, and starts it again. The schedule follows
/// the payments, not the clock, so a slow machine gets as many kills as a fast one.
async fn kill_at_random(
    services: &mut [Service],
    seed: u64,
    paid: &AtomicUsize,
    done: &CancellationToken,
) -> usize {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kills = 0;
    let mut next = 100;
    while !done.is_cancelled() {
        let reached = eventually("more payments", Duration::from_secs(120), async || {
            let paid = paid.load(Ordering::Relaxed);
            anyhow::ensure!(paid >= next || done.is_cancelled(), "{paid} paid, waiting for {next}");
            Ok(())
        });
        reached.await.unwrap();
        let victim = &mut services[random.usize(..5)];
        victim.end("KILL").await.unwrap();
        victim.start_again().await.unwrap();
        kills += 1;
        next = paid.load(Ordering::Relaxed) + random.usize(50..250);
    }
    kills
}

#[tokio::test]
async fn a_terminated_service_finishes_what_it_has_in_hand() {
    let world = World::new().await.unwrap();
    let mut orders = world.start(Kind::Orders).await.unwrap();
    let mut fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = Api::new(orders.url());
    pay(&api, "A", 50).await;

    let stop = CancellationToken::new();
    let answered = AtomicUsize::new(0);
    let load = async {
        // Clients until the service refuses connections: whatever was answered must be true.
        stream::iter(0..)
            .take_until(stop.cancelled())
            .for_each_concurrent(16, async |n: u32| {
                let order = format!("B-{n}");
                if api.place(&order, AMOUNT).await.is_ok()
                    && let Ok(answer) = api.confirm(&format!("tx-{order}"), &order, AMOUNT).await
                    && answer.status == 201
                {
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
            .await;
    };
    let terminate = async {
        eventually("there is load", LIMIT, async || {
            anyhow::ensure!(answered.load(Ordering::Relaxed) > 100, "little");
            Ok(())
        })
        .await
        .unwrap();
        let start = Instant::now();
        assert_eq!(fulfillment.end("TERM").await.unwrap(), 0, "{}", fulfillment.log());
        let fulfillment_took = start.elapsed();
        let start = Instant::now();
        assert_eq!(orders.end("TERM").await.unwrap(), 0, "{}", orders.log());
        stop.cancel();
        (fulfillment_took, start.elapsed())
    };
    let ((), (fulfillment_took, orders_took)) = tokio::join!(load, terminate);
    println!("drained in {fulfillment_took:?} (fulfillment) and {orders_took:?} (orders)");
    assert!(fulfillment_took.max(orders_took) < Duration::from_secs(20), "inside the grace");

    let answered = answered.load(Ordering::Relaxed) as i64;
    let payments = number(&world.orders, "select count(*) from payments").await;
    assert!(payments >= 50 + answered, "{answered} answered, {payments} there");
    let open = "select count(*) from pg_stat_activity where datname = current_database()
                and application_name like '%-service-%'";
    assert_eq!(number(&world.orders, open).await, 0);
    // Every ack that could be sent was sent: what was applied is not pending any more, so whatever
    // is delivered again has not been applied.
    let dispatches = number(&world.fulfillment, "select count(*) from dispatches").await;
    let acked = world.broker.acked().await.unwrap();
    assert_eq!(acked as i64, dispatches, "acked, dispatched");

    orders.start_again().await.unwrap();
    fulfillment.start_again().await.unwrap();
    assert_eq!(world.settled(LIMIT).await.unwrap().payments as i64, payments);
}
