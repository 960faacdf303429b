//! Services that are killed at random, or told to stop, under load.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use e2e::{
    api::{Api, confirm_stubbornly},
    outside::Outside,
    services::{Kind, Service},
    wait::eventually,
    world::World,
};
use futures_util::{StreamExt as _, stream};
use shared::database::begin;
use tokio_util::sync::CancellationToken;

use crate::support::{
    AMOUNT, DISPATCHES, LIMIT, announce, blocked, logged, no_session, number, pay, request_dispatch,
};

#[tokio::test]
async fn five_processes_killed_at_random_dispatch_every_payment_once() {
    const PAYMENTS: usize = 5000;
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    let mut services = Vec::new();
    for kind in
        [Kind::Orders, Kind::Orders, Kind::Fulfillment, Kind::Fulfillment, Kind::Fulfillment]
    {
        let plan = world.plan(kind).unwrap().with("CARRIER_URL", &carrier.url());
        services.push(plan.start().await.unwrap());
    }
    let apis: Vec<Api> = services[..2].iter().map(|service| Api::new(service.url())).collect();
    let paid = AtomicUsize::new(0);
    let done = CancellationToken::new();
    let load = async {
        stream::iter(0..PAYMENTS)
            .for_each_concurrent(24, async |n| {
                confirm_stubbornly(&apis, &format!("A-{n}"), AMOUNT).await;
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
    assert_eq!(carrier.effects().len(), PAYMENTS, "parcels");
    println!("{} calls of the carrier", carrier.calls().len());
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
async fn what_is_in_hand_at_sigterm_is_committed_answered_and_acked() {
    let world = World::new().await.unwrap();
    let mut orders = world.start(Kind::Orders).await.unwrap();
    let mut fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = Api::new(orders.url());
    api.place("A-1", AMOUNT).await.unwrap();
    // Both transactions get as far as these locks, and are in the middle when the signal comes.
    let mut of_orders = begin(&world.orders).await.unwrap();
    sqlx::query("lock table outbox in share mode").execute(&mut *of_orders).await.unwrap();
    let mut of_fulfillment = begin(&world.fulfillment).await.unwrap();
    request_dispatch(&mut of_fulfillment, "tx-2", "A-2").await;
    announce(&world, "tx-2", "A-2").await;

    let confirm = async { api.confirm("tx-1", "A-1", AMOUNT).await.unwrap().status };
    let terminate = async {
        blocked(&world.orders, "orders-service").await;
        blocked(&world.fulfillment, "fulfillment-service").await;
        for service in [&orders, &fulfillment] {
            service.signal("TERM").unwrap();
            logged(service, "draining").await;
        }
        of_orders.rollback().await.unwrap();
        of_fulfillment.rollback().await.unwrap();
        (orders.ends().await.unwrap(), fulfillment.ends().await.unwrap())
    };
    let (answer, codes) = tokio::join!(confirm, terminate);
    assert_eq!((answer, codes), (201, (0, 0)));
    assert_eq!(number(&world.orders, "select count(*) from payments").await, 1);
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    assert_eq!(world.broker.consumer_backlog().await.unwrap().1, 0, "acked");
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
    no_session(&world.orders).await;
    // Every ack that could be sent was sent: what was applied is not pending any more, so whatever
    // is delivered again has not been applied.
    let dispatches = number(&world.fulfillment, DISPATCHES).await;
    let acked = world.broker.acked().await.unwrap();
    assert_eq!(acked as i64, dispatches, "acked, dispatched");

    orders.start_again().await.unwrap();
    fulfillment.start_again().await.unwrap();
    assert_eq!(world.settled(LIMIT).await.unwrap().payments as i64, payments);
}
