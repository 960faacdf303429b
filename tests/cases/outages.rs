//! Servers that go away under load.

use std::time::{Duration, Instant};

use e2e::{
    api::Api,
    contract::FULFILLMENT,
    outside::{Outside, Reply},
    process::free_port,
    services::Kind,
    wait::eventually,
    world::World,
};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::support::{
    AMOUNT, DEAD_LETTERS, DISPATCHES, LIMIT, UNPUBLISHED, announce, check_is, dispatched, logged,
    number, ready,
};

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
            let dispatches = number(&world.fulfillment, DISPATCHES).await;
            anyhow::ensure!(dispatches > 20, "{dispatches}");
            Ok(())
        })
        .await
        .unwrap();
        world.own_postgres.as_mut().unwrap().stop("QUIT").await.unwrap();
        check_is(&api, "database", "failing").await;
        check_is(&api, "consumer", "failing").await;
        last(OUTAGE).await;
        world.own_postgres.as_mut().unwrap().start_again().await.unwrap();
        ready(&api).await;
        stop.cancel();
    };
    let ((paid, _), ()) = tokio::join!(load, outage);
    eventually("everything is dispatched", AFTER, async || {
        let dispatches: i64 = sqlx::query_scalar(DISPATCHES).fetch_one(&world.fulfillment).await?;
        let backlog = world.broker.consumer_backlog().await?;
        let stored = world.broker.count().await?;
        let state =
            format!("{dispatches} of {paid} dispatched, {stored} stored, backlog {backlog:?}");
        anyhow::ensure!(dispatches == paid as i64 && backlog == (0, 0), state);
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
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
    announce(&world, "tx-1", "A-1").await;
    check_is(&api, "consumer", "failing").await;
    // One delivery is all there is: a nak now, and the next one would be given up.
    last(SEVERAL_NAKS).await;
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
    switch("off").await;
    dispatched(&world, 1).await;
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
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
        check_is(&api, "nats", "failing").await;
        last(OUTAGE).await;
        let waiting = number(&world.orders, UNPUBLISHED).await;
        assert!(waiting > 100, "the outbox is the buffer: {waiting} rows wait");
        world.nats.start_again().await.unwrap();
        ready(&api).await;
        stop.cancel();
        waiting
    };
    let ((paid, slowest), waiting) = tokio::join!(load, outage);
    // A confirmation that waited for the broker would have taken a time limit of 5 s at least.
    assert!(slowest < Duration::from_secs(5), "the slowest confirmation took {slowest:?}");
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

/// Half of it nobody listens, half of it everything is answered with 503.
#[tokio::test]
async fn an_outage_of_the_carrier_holds_up_dispatches_and_nothing_else() {
    let world = World::new().await.unwrap();
    let port = free_port().unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap();
    let plan = plan.with("CARRIER_URL", &format!("http://127.0.0.1:{port}"));
    let orders = world.start(Kind::Orders).await.unwrap();
    let fulfillment = plan.start().await.unwrap();
    let (orders_api, api) = (Api::new(orders.url()), Api::new(fulfillment.url()));
    ready(&api).await;

    let stop = CancellationToken::new();
    let load = pay_steadily(&orders_api, "A", &stop);
    let outage = async {
        last(OUTAGE / 2).await;
        let refused = number(&world.fulfillment, "select sum(attempts) from dispatches").await;
        let carrier = Outside::start_on(port).await.unwrap();
        // The most impatient of wishes is no reason to hurry.
        carrier.behave(|_| Reply::Fail(503, Some("0".to_owned())));
        last(OUTAGE / 2).await;
        let unavailable = carrier.calls().len();
        carrier.behave(|_| Reply::Accept);
        let waiting = number(&world.fulfillment, DISPATCHES).await;
        api.ready().await.unwrap();
        stop.cancel();
        (carrier, refused, unavailable, waiting)
    };
    let ((paid, slowest), (carrier, refused, unavailable, waiting)) = tokio::join!(load, outage);
    println!(
        "{paid} payments, slowest {slowest:?}, {waiting} waiting; {refused} + {unavailable} calls"
    );
    // However fast the machine is.
    assert!(paid > 50 && waiting > paid as i64 * 9 / 10, "taken in all the time");
    // A call every few seconds; sixteen at first, which were under way.
    assert!((3..60).contains(&refused), "{refused} calls to nobody");
    assert!((3..60).contains(&unavailable), "{unavailable} calls to a carrier that said 503");
    let ledger = world.settled(AFTER).await.unwrap();
    assert_eq!((ledger.payments, ledger.dispatches), (paid, paid));
    assert_eq!(carrier.effects().len(), paid);
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}

/// The same for notices; none of them is given up, however few deliveries are allowed.
#[tokio::test]
async fn an_outage_of_the_receiver_costs_no_notice_and_no_delivery() {
    let world = World::new().await.unwrap();
    let port = free_port().unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap();
    let plan = plan
        .with("NOTIFY_URL", &format!("http://127.0.0.1:{port}/notices"))
        .with("CONSUMER_MAX_DELIVERIES", "2");
    let fulfillment = plan.start().await.unwrap();
    let api = Api::new(fulfillment.url());
    for n in 0..20 {
        announce(&world, &format!("tx-{n}"), &format!("A-{n}")).await;
    }
    logged(&fulfillment, "consumer notifications: waiting").await;
    last(SEVERAL_NAKS).await;
    api.ready().await.unwrap();
    let receiver = Outside::start_on(port).await.unwrap();
    eventually("all are told", LIMIT, async || {
        let told = receiver.effects().len();
        anyhow::ensure!(told == 20, "{told}");
        let backlog = world.broker.backlog(FULFILLMENT, "notifications").await?;
        anyhow::ensure!(backlog == (0, 0), "{backlog:?}");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}
