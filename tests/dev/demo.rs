//! `cargo dev demo`: the whole story once, with everything that usually goes wrong.
//!
//! Payments are confirmed over HTTP, some of them twice; duplicates and a contradiction are
//! published by hand; the carrier answers too late; the broker goes away; orders-service dies between
//! publish and mark. What each stage saw is printed, and a verdict is computed from the two
//! databases, the stream, and what the carrier says it has.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use e2e::{
    api::{Api, confirmation},
    find::{find_nats, find_postgres},
    invariants::{self, check},
    ledger::Ledger,
    outside::{Outside, Reply},
    proxy::{Flow, Proxy},
    services::{Kind, Service, build},
    wait::eventually,
    world::World,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::Value;
use sqlx::PgPool;
use time::{OffsetDateTime, macros::format_description};
use uuid::Uuid;

use crate::show::Timeline;

/// Payments confirmed while all is well, and how many of them are confirmed twice.
const CALM: usize = 160;
const TWICE: usize = 40;
/// Payments confirmed while the broker is away; their events meet the crash.
const STORMY: usize = 40;
/// Copies published by hand: with the message id, without it, and under a new event id.
const WITH_ID: usize = 20;
const WITHOUT_ID: usize = 20;
const NEW_ID: usize = 2;

/// The order for which the carrier's first answer comes too late, and how late.
const LATE: &str = "calm-0";
const TOO_LATE: Duration = Duration::from_secs(8);

/// What the payment provider signs with.
pub(crate) const SECRET: &str = "whsec_Zm9yLWRldmVsb3BtZW50LW9ubHktbm90LXNlY3JldA==";

pub(crate) const AMOUNT: i64 = 1999;
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn run() -> anyhow::Result<()> {
    let (postgres, nats) = (find_postgres(), find_nats());
    build()?;
    let show = Timeline::new();
    show.chapter("1. Servers and services");
    let given = |name: &str| std::env::var_os(name).map(|_| format!("as given in {name}"));
    show.line(
        "postgres",
        given("DATABASE_SERVER_URL").map_or_else(|| postgres.map(|f| f.how), Ok)?,
    );
    show.line("nats", given("NATS_URL").map_or_else(|| nats.map(|f| f.how), Ok)?);
    let world = World::bare().await?;
    let verdict = story(&show, &world).await;
    if verdict.is_err() {
        world.print_logs();
    }
    world.close().await?;
    verdict
}

struct Stage<'a> {
    show: &'a Timeline,
    world: &'a World,
    proxy: Proxy,
    carrier: Outside,
    receiver: Outside,
    orders: Service,
    api: Api,
}

async fn story(show: &Timeline, world: &World) -> anyhow::Result<()> {
    let proxy = Proxy::start(world.nats.address()).await?;
    let orders = world.plan_through(Kind::Orders, &proxy)?.with("PAYMENT_WEBHOOK_SECRET", SECRET);
    let (carrier, receiver) = (Outside::start().await?, Outside::start().await?);
    carrier.behave(|call| match (call.body["orderId"].as_str(), call.attempt) {
        (Some(LATE), 1) => Reply::Late(TOO_LATE),
        _ => Reply::Accept,
    });
    let fulfillment = world
        .plan(Kind::Fulfillment)?
        .with("CARRIER_URL", &carrier.url())
        .with("NOTIFY_URL", &format!("{}/notices", receiver.url()));
    for plan in [&orders, &fulfillment] {
        ensure!(plan.run("setup").await? == 0, "setup failed, see {}", plan.log().display());
    }
    show.line("setup", "two databases migrated; streams, consumers and the bucket are as wanted");
    let orders = orders.start().await?;
    let mut fulfillment = fulfillment.start().await?;
    let api = Api::signing(orders.url(), SECRET);
    for api in [&api, &Api::new(fulfillment.url())] {
        eventually("the service is ready", LIMIT, async || api.ready().await).await?;
    }
    show.line(
        "services",
        format_args!(
            "orders-service ready on {}, fulfillment-service on {}",
            orders.url(),
            fulfillment.url()
        ),
    );
    show.line(
        "outside",
        format_args!("a carrier on {}, a receiver of notices on {}", carrier.url(), receiver.url()),
    );
    let mut stage = Stage { show, world, proxy, carrier, receiver, orders, api };

    stage.confirm_in_calm().await?;
    let by_broker = stage.repeat_by_hand().await?;
    stage.lose_the_broker().await?;
    let unmarked = stage.crash_between_publish_and_mark().await?;
    let ledger = stage.come_back().await?;
    stage.look_outside(&ledger).await?;
    stage.tell_one_story(&format!("storm-{}", STORMY - 1)).await?;
    let codes = [stage.orders.end("TERM").await?, fulfillment.end("TERM").await?];
    ensure!(codes == [0, 0], "the services did not drain: exit codes {codes:?}");
    stage.verdict(&ledger, by_broker, unmarked)
}

impl Stage<'_> {
    async fn confirm(
        &self,
        prefix: &str,
        count: usize,
        twice: usize,
    ) -> anyhow::Result<(usize, usize)> {
        let bar = self.show.bar("placing orders and confirming payments", count);
        let answers: Vec<Vec<u16>> = stream::iter(0..count)
            .map(async |n| {
                let order = format!("{prefix}-{n}");
                let transaction = format!("tx-{order}");
                let placed = self.api.place(&order, AMOUNT).await?;
                ensure!(matches!(placed.status, 200 | 201), "placing {order}: {}", placed.body);
                let confirm = || self.api.confirm(&transaction, &order, AMOUNT);
                let answers = if n < twice {
                    // Payment providers repeat themselves, and not politely one after the other.
                    let (one, other) = tokio::try_join!(confirm(), confirm())?;
                    ensure!(one.body == other.body, "the two answers differ");
                    vec![one.status, other.status]
                } else {
                    vec![confirm().await?.status]
                };
                bar.inc(1);
                Ok(answers)
            })
            .buffer_unordered(16)
            .try_collect()
            .await?;
        let with = |status: u16| answers.iter().flatten().filter(|s| **s == status).count();
        ensure!(with(201) == count && with(200) == twice, "unexpected answers: {answers:?}");
        Ok((with(201), with(200)))
    }

    async fn confirm_in_calm(&self) -> anyhow::Result<()> {
        self.show.chapter("2. Payments, some of them confirmed twice");
        self.api.place(LATE, AMOUNT).await?;
        self.show_order("pending").await?;
        let unsigned = self.api.post("/payments", &confirmation("tx-forged", LATE, AMOUNT)).await?;
        ensure!(unsigned.status == 401, "{}", unsigned.body);
        self.show.line("orders", "a confirmation without a signature answered 401");
        let (new, again) = self.confirm("calm", CALM, TWICE).await?;
        self.show.line(
            "provider",
            format_args!(
                "{CALM} orders paid with {} confirmations, {TWICE} of them sent twice at once",
                new + again
            ),
        );
        self.show.line("orders", format_args!("{new} answered 201, {again} answered 200 with the same body (guard: one_payment_per_transaction)"));
        // The carrier is slow with this one.
        self.show_order("paid").await?;
        self.requested(CALM).await?;
        let count = self.world.broker.count().await?;
        self.show.line("broker", format_args!("{count} events in stream ORDERS"));
        self.show.line("fulfillment", format_args!("{CALM} dispatches requested"));
        Ok(())
    }

    async fn requested(&self, count: usize) -> anyhow::Result<()> {
        let bar = self.show.bar("requesting dispatches", count);
        eventually("a dispatch is requested for every payment", LIMIT, async || {
            let dispatches =
                number(&self.world.fulfillment, "select count(*) from dispatches").await?;
            bar.set_position(dispatches as u64);
            ensure!(dispatches >= count, "{dispatches} of {count}");
            Ok(())
        })
        .await
    }

    /// Returns how many copies the broker recognised.
    async fn repeat_by_hand(&self) -> anyhow::Result<usize> {
        self.show.chapter("3. Duplicates and a contradiction, published past the outbox");
        let broker = &self.world.broker;
        let stored = broker.messages().await?;
        let mut recognised = 0;
        for message in &stored[..WITH_ID] {
            recognised +=
                usize::from(broker.publish(&message.body, message.message_id.as_deref()).await?);
        }
        self.show.line("by hand", format_args!("{WITH_ID} events again, with their message ids"));
        self.show.line("broker", format_args!("{recognised} recognised as duplicates (guard: Nats-Msg-Id within the duplicate window)"));
        for message in &stored[..WITHOUT_ID] {
            broker.publish(&message.body, None).await?;
        }
        self.show.line(
            "by hand",
            format_args!(
                "{WITHOUT_ID} events again without message ids, as if the window had passed"
            ),
        );
        let mut event: Value = serde_json::from_slice(&stored[0].body)?;
        for _ in 0..NEW_ID {
            event["id"] = Uuid::now_v7().to_string().into();
            broker.publish(&serde_json::to_vec(&event)?, None).await?;
        }
        self.show.line(
            "by hand",
            format_args!("{NEW_ID} new events for a transaction that was dispatched"),
        );
        event["id"] = Uuid::now_v7().to_string().into();
        event["data"]["amountMinor"] = (AMOUNT * 100).into();
        broker.publish(&serde_json::to_vec(&event)?, None).await?;
        self.show.line(
            "by hand",
            "1 new event for the same transaction over a hundred times the amount",
        );

        let wait = self.show.wait("fulfillment reads them");
        let ledger = eventually("everything is read", LIMIT, async || {
            let ledger = self.world.ledger().await?;
            check(&invariants::taken_in(&ledger))?;
            // All but the late one are reported back. An ack that is under way when the connection
            // is cut would be missed for the acknowledgement time.
            let (requested, reports) = (ledger.requested, ledger.reports_pending);
            ensure!(requested <= 1 && reports == 0, "{requested} requested, {reports} reports");
            Ok(ledger)
        })
        .await?;
        drop(wait);
        self.show.line(
            "fulfillment",
            format_args!(
                "{} copies absorbed by eventId (guard: one_claim_per_event)",
                ledger.absorbed_by_event_id
            ),
        );
        self.show.line(
            "fulfillment",
            format_args!(
                "{} absorbed by transactionId (guard: one_dispatch_per_transaction)",
                ledger.absorbed_by_transaction_id
            ),
        );
        let conflicts =
            ledger.dead_letters.get("transaction_conflict").copied().unwrap_or_default();
        self.show.line(
            "fulfillment",
            format_args!("{conflicts} conflict set aside in dead_letters, not applied"),
        );
        self.show.line("fulfillment", format_args!("still {} dispatches", ledger.dispatches));
        Ok(recognised)
    }

    async fn lose_the_broker(&self) -> anyhow::Result<()> {
        self.show.chapter("4. The broker is out of reach");
        self.proxy.set(Flow::Cut);
        eventually("orders-service has noticed", LIMIT, async || {
            let ready = self.api.get("/readyz").await?;
            ensure!(ready.body["failing"].get("nats").is_some(), "{}", ready.body);
            Ok(())
        })
        .await?;
        self.show.line("network", "the connection between orders-service and the broker is cut");
        self.show.line("orders", "/readyz answers 503, failing: nats");
        let (new, _) = self.confirm("storm", STORMY, 0).await?;
        self.show.line(
            "orders",
            format_args!("{new} more payments answered 201: confirming needs no broker"),
        );
        let waiting = number(&self.world.orders, UNMARKED).await?;
        self.show.line("outbox", format_args!("{waiting} events wait"));
        Ok(())
    }

    /// Returns how many events the broker holds that the outbox does not know to be published.
    async fn crash_between_publish_and_mark(&mut self) -> anyhow::Result<usize> {
        self.show.chapter("5. A crash between publish and mark");
        let before = self.world.broker.count().await?;
        // What comes back would be delivered into the hole behind orders-service, and would have to
        // wait for its acknowledgement time.
        self.carrier.behave(|_| Reply::Hold);
        self.proxy.set(Flow::HoldAcks);
        let bar = self.show.bar("publishing, acknowledgements held back", STORMY);
        eventually("the broker has the events", LIMIT, async || {
            let stored = self.world.broker.count().await? - before;
            bar.set_position(stored);
            ensure!(stored == STORMY as u64, "{stored} of {STORMY}");
            Ok(())
        })
        .await?;
        bar.finish_and_clear();
        self.show.line("network", "mended, but the broker's acknowledgements do not come through");
        self.show.line("broker", format_args!("{STORMY} more events in stream ORDERS"));
        let code = self.orders.end("KILL").await?;
        self.show.line("orders", format_args!("killed with SIGKILL (exit code {code})"));
        let unmarked: Vec<Uuid> =
            sqlx::query_scalar("select event_id from outbox where published_at is null")
                .fetch_all(&self.world.orders)
                .await?;
        let stored = self.world.broker.messages().await?;
        let stored: Vec<String> = stored.iter().filter_map(e2e::broker::Stored::event_id).collect();
        let twice_told = unmarked.iter().filter(|id| stored.contains(&id.to_string())).count();
        self.show.line(
            "outbox",
            format_args!(
                "{} events not marked as published; the broker has {twice_told} of them",
                unmarked.len()
            ),
        );
        ensure!(twice_told > 0, "the crash missed its point");
        Ok(twice_told)
    }

    async fn come_back(&mut self) -> anyhow::Result<Ledger> {
        self.show.chapter("6. Back again");
        self.proxy.set(Flow::Open);
        self.orders.start_again().await?;
        eventually("orders-service is ready", LIMIT, async || self.api.ready().await).await?;
        self.carrier.behave(|_| Reply::Accept);
        self.show
            .line("orders", "started again; its relay waits for the dead one's lease to run out");
        let wait = self.show.wait("publishing again");
        let ledger = self.world.arrived(LIMIT).await?;
        drop(wait);
        self.show.line("relay", "published what was not marked, under the same message ids");
        self.show.line(
            "broker",
            format_args!("{} events in stream ORDERS, not one more than before", ledger.messages),
        );
        self.show.line("fulfillment", format_args!("{} dispatches", ledger.dispatches));
        Ok(ledger)
    }

    /// The order that is watched, as the API shows it.
    async fn show_order(&self, status: &str) -> anyhow::Result<()> {
        let order = self.api.get(&format!("/orders/{LATE}")).await?.body;
        ensure!(order["status"] == status, "{order}");
        let tracking = order["trackingCode"].as_str().map(|code| format!(", tracking code {code}"));
        let tracking = tracking.unwrap_or_default();
        self.show.line("orders", format_args!("GET /orders/{LATE}: {status}{tracking}"));
        Ok(())
    }

    /// What the carrier and the receiver have seen, and what the orders say.
    async fn look_outside(&self, ledger: &Ledger) -> anyhow::Result<()> {
        self.show.chapter("7. Outside: the carrier, and the notices");
        let (calls, parcels) = (self.carrier.calls(), self.carrier.effects());
        let late: Vec<_> = calls.iter().filter(|call| call.body["orderId"] == LATE).collect();
        let [first, again] = late[..] else { bail!("{} calls for order {LATE}", late.len()) };
        self.show.line(
            "carrier",
            format_args!("order {LATE}: booked, and the answer came too late; outcome unknown"),
        );
        ensure!(first.key == again.key && first.body == again.body, "another call: {again:?}");
        self.show.line(
            "carrier",
            format_args!(
                "order {LATE}: called again after {:.1} s, with the same key {}",
                (again.at - first.at).as_secs_f64(),
                again.key
            ),
        );
        self.show.line(
            "carrier",
            format_args!(
                "{} calls, {} parcels (guard: Idempotency-Key)",
                calls.len(),
                parcels.len()
            ),
        );
        self.show.line(
            "receiver",
            format_args!(
                "{} calls, {} notices (guards: a claim in bucket notices, Idempotency-Key)",
                self.receiver.calls().len(),
                self.receiver.effects().len()
            ),
        );
        self.show_order("dispatched").await?;
        ensure!(
            parcels.len() == ledger.payments && self.receiver.effects().len() == ledger.payments,
            "not one parcel and one notice for each of {} payments",
            ledger.payments
        );
        Ok(())
    }

    /// One order's way through all of it, by the clocks of the databases.
    async fn tell_one_story(&self, order: &str) -> anyhow::Result<()> {
        type Row = (OffsetDateTime, OffsetDateTime, OffsetDateTime, i64, Uuid, String);
        let (created_at, paid_at, published_at, place, event_id, traceparent): Row =
            sqlx::query_as(
                "select orders.created_at, paid_at, published_at, stream_seq, event_id, traceparent
             from orders join outbox on aggregate_id = order_id
             where order_id = $1",
            )
            .bind(order)
            .fetch_one(&self.world.orders)
            .await?;
        let (requested_at, dispatched_at, tracking_code): (OffsetDateTime, OffsetDateTime, String) =
            sqlx::query_as(
                "select requested_at, dispatched_at, tracking_code from dispatches where order_id = $1",
            )
            .bind(order)
            .fetch_one(&self.world.fulfillment)
            .await?;
        let mut steps = [
            (created_at, "order placed".to_owned()),
            (
                paid_at,
                format!("payment confirmed, event {event_id} written in the same transaction"),
            ),
            (
                requested_at,
                format!("event read from the stream (sequence {place}), dispatch requested"),
            ),
            (
                published_at,
                "event marked as published, by the relay that came after the crash".to_owned(),
            ),
            (
                dispatched_at,
                format!(
                    "the carrier has it as {tracking_code}; the event back is written in the same transaction"
                ),
            ),
        ];
        steps.sort();
        self.show.chapter(format_args!("Order {order}, as the databases tell it"));
        for (at, what) in steps {
            let clock =
                at.format(format_description!("[hour]:[minute]:[second].[subsecond digits:3]"))?;
            println!("  {clock}  {what}");
        }
        println!("  trace         {traceparent}, in the logs of both services");
        Ok(())
    }

    fn verdict(&self, ledger: &Ledger, by_hand: usize, unmarked: usize) -> anyhow::Result<()> {
        // What the relay published again and the broker did not store again, the broker absorbed.
        let stored_again = ledger.absorbed_by_event_id.saturating_sub(WITHOUT_ID);
        let by_broker = by_hand + unmarked.saturating_sub(stored_again);
        let (by_event, by_transaction) =
            (ledger.absorbed_by_event_id, ledger.absorbed_by_transaction_id);
        let conflicts =
            ledger.dead_letters.get("transaction_conflict").copied().unwrap_or_default();
        println!(
            "\nverdict: {} payments confirmed, {} dispatched once, {} parcels, {} lost, {} doubled; {} duplicates \
             absorbed ({by_broker} by the broker, {by_event} by eventId, {by_transaction} by \
             transactionId); {conflicts} conflict set aside",
            ledger.payments,
            ledger.dispatches - ledger.doubled.len(),
            self.carrier.effects().len(),
            ledger.lost.len(),
            ledger.doubled.len(),
            by_broker + by_event + by_transaction,
        );
        check(&invariants::promise(ledger))?;
        ensure!(
            ledger.payments == CALM + STORMY,
            "{} payments, expected {}",
            ledger.payments,
            CALM + STORMY
        );
        ensure!(
            by_transaction == NEW_ID && conflicts == 1 && ledger.dead_letters.len() == 1,
            "what was injected was not recognised as what it is"
        );
        Ok(())
    }
}

const UNMARKED: &str = "select count(*) from outbox where published_at is null";

async fn number(pool: &PgPool, query: &'static str) -> anyhow::Result<usize> {
    let number: i64 = sqlx::query_scalar(query).fetch_one(pool).await?;
    number.try_into().context("a count is not negative")
}
