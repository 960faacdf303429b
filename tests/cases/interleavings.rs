//! Any order of events, deliveries, repetitions and crashes ends the same: each payment dispatched once.
//!
//! The parts of the pair run in this process, step by step, against real servers. A crash is a step that
//! is dropped in the middle, at whichever of its awaits the dice choose; then what it held is free again
//! at once, as it is in production when a lease or an acknowledgement time has run out.

use std::{
    collections::{HashMap, HashSet},
    future::poll_fn,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use async_nats::jetstream::AckKind;
use e2e::{contract::ORDERS, world::World};
use fulfillment_service::{
    call::CallError,
    carrier::{Carrier, Parcel},
    dispatcher::{Dispatcher, Outcome, Wakers},
    intake::Intake,
};
use futures_util::StreamExt as _;
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use shared::{
    consumer::Consumer,
    events::{Event, PaymentConfirmed},
    lifecycle::Health,
    nats::Nats,
    relay::{self, Relay},
    values::TrackingCode,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::{
    AMOUNT, DEAD_LETTERS, PROCESSED, UNPUBLISHED, bytes, connected, consumer, enqueue, event,
    intake, number, relay,
};

/// Announcements; the last one is of the same payment as the first.
const EVENTS: usize = 5;
const PAYMENTS: usize = EVENTS - 1;

/// Something that happens. `wakes` is how often a step gets on before it is cut off.
#[derive(Debug, Clone)]
enum Happens {
    /// A payment is confirmed, if it was not.
    Confirmed(usize),
    /// An event is published past the outbox, and without a message id.
    Repeated(usize),
    /// The relay works.
    Relayed { wakes: usize },
    /// Some messages are delivered, and handled.
    Delivered { most: usize, wakes: usize },
    /// The dispatcher works.
    Dispatched { wakes: usize },
}

fn happens() -> impl Strategy<Value = Happens> {
    // Most steps need fewer than forty.
    let wakes = || prop_oneof![3 => 0..40_usize, 1 => Just(usize::MAX)];
    prop_oneof![
        3 => (0..EVENTS).prop_map(Happens::Confirmed),
        1 => (0..EVENTS).prop_map(Happens::Repeated),
        3 => wakes().prop_map(|wakes| Happens::Relayed { wakes }),
        3 => (1..4_usize, wakes()).prop_map(|(most, wakes)| Happens::Delivered { most, wakes }),
        3 => wakes().prop_map(|wakes| Happens::Dispatched { wakes }),
    ]
}

/// Lets `work` get on so often, and drops it then.
async fn cut_off<T>(work: impl Future<Output = T>, wakes: usize) -> Option<T> {
    let mut work = pin!(work);
    let mut woken = 0;
    poll_fn(|context| {
        if woken == wakes {
            return Poll::Ready(None);
        }
        woken += 1;
        work.as_mut().poll(context).map(Some)
    })
    .await
}

/// One that recognises its keys.
#[derive(Clone, Default)]
struct Counting(Arc<Mutex<HashMap<Uuid, String>>>);

impl Carrier for Counting {
    async fn book(&self, parcel: &Parcel) -> Result<TrackingCode, CallError> {
        let mut parcels = self.0.lock().unwrap();
        let order =
            parcels.entry(parcel.dispatch_id).or_insert_with(|| parcel.order_id.to_string());
        Ok(format!("PARCEL-{order}").try_into().unwrap())
    }
}

struct Stage {
    world: World,
    nats: Nats,
    relay: Relay,
    consumer: Consumer<Intake>,
    dispatcher: Dispatcher<Counting>,
    carrier: Counting,
}

impl Stage {
    async fn new() -> Self {
        let world = World::new().await.unwrap();
        let carrier = Counting::default();
        Self {
            nats: connected(&world.nats.url()).await,
            relay: relay(&world.orders, &world.nats.url(), 3).await,
            consumer: consumer(&world, intake(&world.fulfillment), 1_000).await,
            dispatcher: Dispatcher::new(
                world.fulfillment.clone(),
                carrier.clone(),
                Wakers { own: Arc::default(), relay: Arc::default() },
                Duration::from_millis(500),
                Health::default(),
            ),
            carrier,
            world,
        }
    }

    /// As if nothing had ever happened.
    async fn clear(&self) {
        let truncate = "truncate outbox";
        sqlx::query(truncate).execute(&self.world.orders).await.unwrap();
        let truncate = "truncate outbox, dispatches, processed_events, dead_letters";
        sqlx::query(truncate).execute(&self.world.fulfillment).await.unwrap();
        let stream = self.world.broker.js.get_stream(ORDERS).await.unwrap();
        stream.purge().await.unwrap();
        self.carrier.0.lock().unwrap().clear();
    }

    async fn happen(
        &self,
        what: &Happens,
        events: &[Event<PaymentConfirmed>],
        done: &mut HashSet<usize>,
    ) {
        match *what {
            Happens::Confirmed(n) => {
                if done.insert(n) {
                    enqueue(&self.world.orders, &events[n]).await;
                }
            }
            Happens::Repeated(n) => {
                if done.contains(&n) {
                    self.world.broker.publish(&bytes(&events[n]), None).await.unwrap();
                }
            }
            Happens::Relayed { wakes } => {
                cut_off(self.relay.step(), wakes).await.transpose().unwrap();
                let free = "update relay_lease set expires_at = now()";
                sqlx::query(free).execute(&self.world.orders).await.unwrap();
            }
            Happens::Delivered { most, wakes } => {
                self.deliver(most, wakes).await;
            }
            Happens::Dispatched { wakes } => {
                let step = cut_off(self.dispatcher.step(), wakes).await;
                step.transpose().unwrap();
                let free = "update dispatches set due_at = now() where status = 'requested'";
                sqlx::query(free).execute(&self.world.fulfillment).await.unwrap();
            }
        }
    }

    /// Returns how many messages there were.
    async fn deliver(&self, most: usize, wakes: usize) -> usize {
        let durable = self.world.broker.durable().await.unwrap();
        let fetched = durable.fetch().max_messages(most).messages().await.unwrap();
        let messages: Vec<_> = fetched.map(Result::unwrap).collect().await;
        let stop = CancellationToken::new();
        cut_off(
            self.consumer.process(messages.clone(), self.consumer.nats.connection(), &stop),
            wakes,
        )
        .await;
        // What was not settled comes again; of what was, the broker wants to hear no more.
        for message in &messages {
            self.nats.settle([(&**message, AckKind::Nak(None))]).await.unwrap();
        }
        messages.len()
    }

    /// Everything is finished in peace, and everything is as it should be.
    async fn finish(&self, events: &[Event<PaymentConfirmed>], done: &mut HashSet<usize>) {
        for n in 0..EVENTS {
            self.happen(&Happens::Confirmed(n), events, done).await;
        }
        while self.relay.step().await.unwrap() != relay::Outcome::Idle {}
        while self.deliver(10, usize::MAX).await > 0 {}
        let free = "update dispatches set due_at = now() where status = 'requested'";
        sqlx::query(free).execute(&self.world.fulfillment).await.unwrap();
        while self.dispatcher.step().await.unwrap() != Outcome::Idle {}

        assert_eq!(number(&self.world.orders, UNPUBLISHED).await, 0);
        let (orders, fulfillment) = (&self.world.orders, &self.world.fulfillment);
        assert_eq!(number(orders, "select count(*) from outbox").await, EVENTS as i64);
        assert_eq!(number(fulfillment, PROCESSED).await, EVENTS as i64, "each event, once");
        assert_eq!(number(fulfillment, DEAD_LETTERS).await, 0);
        let dispatched = "select count(*) from dispatches where status = 'dispatched'";
        assert_eq!(number(fulfillment, dispatched).await, PAYMENTS as i64, "each payment, once");
        let all = "select count(*) from dispatches";
        assert_eq!(number(fulfillment, all).await, PAYMENTS as i64);
        let announced = "select count(*) from outbox";
        assert_eq!(number(fulfillment, announced).await, PAYMENTS as i64, "announced once");
        assert_eq!(self.carrier.0.lock().unwrap().len(), PAYMENTS, "one parcel each");
    }
}

#[test]
fn any_interleaving_of_deliveries_repetitions_and_crashes_applies_each_payment_once() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let stage = runtime.block_on(Stage::new());
    let config = Config { failure_persistence: None, ..Config::with_cases(48) };
    let run = TestRunner::new(config).run(&vec(happens(), 5..30), |story| {
        runtime.block_on(async {
            stage.clear().await;
            let events: Vec<_> = (0..EVENTS)
                .map(|n| {
                    let order = format!("A-{}", n % PAYMENTS);
                    event(&format!("tx-{order}"), &order, AMOUNT)
                })
                .collect();
            let mut done = HashSet::new();
            for what in &story {
                stage.happen(what, &events, &mut done).await;
            }
            stage.finish(&events, &mut done).await;
        });
        Ok(())
    });
    run.unwrap();
}
