//! fulfillment-service: each confirmed payment becomes one dispatch, whatever is repeated on the
//! way: by the payment provider, the relay, the broker, the network, or a crash.
//!
//! Follow an event: `shared::consumer` → [`intake`] (the transaction) → `shared::inbox` and
//! [`dispatches`] → [`dispatcher`] (calls the [`carrier`], then the other transaction) →
//! `shared::outbox` → `shared::relay`, and back through the consumer to the [`notifier`].

pub mod breaker;
pub mod call;
pub mod carrier;
pub mod config;
pub mod dispatcher;
pub mod dispatches;
pub mod intake;
pub mod notifier;

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use axum::{Router, extract::State, response::Response, routing::get};
use shared::{
    commands::{
        self,
        dead_letters::{Replayed, replay},
    },
    config::{Common, Run},
    consumer::Consumer,
    database,
    dead_letters::settle::Kept,
    http,
    lifecycle::{Health, Lifecycle},
    nats::{self, Nats},
    relay::Relay,
    retention::Retention,
    setup, telemetry, topology,
};
use sqlx::{PgPool, migrate::Migrator};
use tokio::{net::TcpListener, sync::Notify};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::warn;

use crate::{
    call::Endpoint,
    carrier::{HttpCarrier, SandboxCarrier},
    config::Config,
    dispatcher::{Dispatcher, Wakers},
    intake::Intake,
    notifier::Notifier,
};

/// The schema of this service's database.
pub static MIGRATOR: Migrator = sqlx::migrate!("../migrations/fulfillment");

/// The durable that brings the payments.
pub const CONSUMER: &str = "fulfillment";

/// Who it is to NATS.
const USER: &str = "fulfillment";

/// Runs the chosen subcommand.
pub async fn run(mut config: Config) -> anyhow::Result<ExitCode> {
    match config.run.take().unwrap_or(Run::Serve) {
        Run::Serve => serve(config).await,
        Run::Setup => {
            setup::run(config.common, &MIGRATOR, "fulfillment-service").await?;
            Ok(ExitCode::SUCCESS)
        }
        Run::Healthcheck => {
            http::healthcheck(shared::config::local(config.http_addr)).await?;
            Ok(ExitCode::SUCCESS)
        }
        Run::Outbox(command) => {
            commands::outbox::run(command, config.common, USER, topology::FULFILLMENT).await
        }
        Run::DeadLetters(command) => dead_letters(command, config.common, config.notify_url).await,
    }
}

async fn dead_letters(
    command: commands::dead_letters::Command,
    common: Common,
    notify_url: Option<Endpoint>,
) -> anyhow::Result<ExitCode> {
    let pool = database::pool(common.database_url, 2, "fulfillment-operator");
    // Connects in the background; only notices need it.
    let nats = nats::connect(&common.nats, USER, "fulfillment-operator").await?;
    let intake = Intake { pool: pool.clone(), dispatcher_waker: Arc::default() };
    let notifier = Notifier::new(pool.clone(), nats, notify_url)?;
    let replay = async |letter: &Kept, dry_run| match letter.origin.consumer.as_str() {
        CONSUMER => replay(&intake, letter, dry_run).await,
        notifier::CONSUMER => replay(&notifier, letter, dry_run).await,
        dispatcher::NAME => dispatcher::request_again(&pool, letter, dry_run).await,
        _ => Ok(Replayed::unknown(letter)),
    };
    commands::dead_letters::run(command, &pool, replay).await
}

async fn serve(config: Config) -> anyhow::Result<ExitCode> {
    let common = config.common;
    let lifecycle = Lifecycle::new();
    let name = format!("fulfillment-service-{}", *telemetry::INSTANCE);
    let pool = database::pool(common.database_url, common.database_max_connections, &name);
    let nats = nats::connect(&common.nats, USER, &name).await?;
    let listener = TcpListener::bind(config.http_addr)
        .await
        .with_context(|| format!("cannot listen on {}; check HTTP_ADDR", config.http_addr))?;

    let healths = Healths::default();
    let relay = Relay::new(
        pool.clone(),
        nats.clone(),
        topology::FULFILLMENT,
        common.relay_batch as usize,
        common.relay_poll_interval,
        healths.relay.clone(),
    );
    let dispatcher_waker: Arc<Notify> = Arc::default();
    let wakers = Wakers { own: Arc::clone(&dispatcher_waker), relay: relay.waker() };
    let intake = Consumer {
        pool: pool.clone(),
        nats: nats.clone(),
        stream: topology::ORDERS,
        durable: CONSUMER,
        batch: common.consumer_batch as usize,
        max_deliveries: common.consumer_max_deliveries.into(),
        handler: Intake { pool: pool.clone(), dispatcher_waker },
        health: healths.consumer.clone(),
    };
    let notifications = Consumer {
        pool: pool.clone(),
        nats: nats.clone(),
        stream: topology::FULFILLMENT,
        durable: notifier::CONSUMER,
        batch: notifier::BATCH.min(common.consumer_batch as usize),
        max_deliveries: common.consumer_max_deliveries.into(),
        handler: Notifier::new(pool.clone(), nats.clone(), config.notify_url)?,
        health: healths.notifications.clone(),
    };
    lifecycle.worker("the consumer", intake.run(lifecycle.stop()));
    // The one place that knows which carrier there is.
    let (dispatcher, poll) = ("the dispatcher", common.relay_poll_interval);
    let health = healths.dispatcher.clone();
    match config.carrier_url {
        Some(url) => {
            let carrier = HttpCarrier::new(url)?;
            let work = Dispatcher::new(pool.clone(), carrier, wakers, poll, health);
            lifecycle.worker(dispatcher, work.run(lifecycle.stop()));
        }
        None => {
            warn!("CARRIER_URL is not set: parcels go to a sandbox, and nowhere else");
            let work = Dispatcher::new(pool.clone(), SandboxCarrier, wakers, poll, health);
            lifecycle.worker(dispatcher, work.run(lifecycle.stop()));
        }
    }
    lifecycle.worker("the relay", relay.run(lifecycle.stop()));
    lifecycle.worker("the notifications", notifications.run(lifecycle.stop()));
    let app = router(App {
        pool: pool.clone(),
        nats: nats.clone(),
        healths,
        lifecycle: lifecycle.clone(),
    });
    let retention = Retention {
        pool: pool.clone(),
        outbox: common.outbox_retention,
        inbox: Some(common.inbox_retention),
    };
    lifecycle.worker("the retention", retention.run(lifecycle.stop()));
    lifecycle.worker("HTTP", http::serve(listener, app, lifecycle.clone()));

    let close = async {
        nats.close().await;
        pool.close().await;
    };
    Ok(lifecycle.run(common.shutdown_grace, close).await)
}

/// What the probes ask.
#[derive(Clone)]
struct App {
    pool: PgPool,
    nats: Nats,
    healths: Healths,
    lifecycle: Lifecycle,
}

/// How the workers are.
#[derive(Clone, Default)]
struct Healths {
    consumer: Health,
    dispatcher: Health,
    relay: Health,
    notifications: Health,
}

fn router(app: App) -> Router {
    Router::new()
        .route("/healthz", get(http::alive))
        .route("/readyz", get(readyz))
        .layer(CatchPanicLayer::new())
        .with_state(app)
}

/// Ready: what this service needs to dispatch, as far as it is ours. A carrier that is away is not:
/// payments are taken in all the same, and their dispatches wait.
async fn readyz(State(app): State<App>) -> Response {
    let lifecycle = app.lifecycle.clone();
    let checks = lifecycle.detached(async move {
        // First: whoever reads "nats: ok" can take the other checks at their word.
        let nats = app.nats.check();
        let (database, stream, bucket) = tokio::join!(
            http::in_time(database::check(&app.pool, &MIGRATOR)),
            http::in_time(topology::check_stream(&app.nats, topology::FULFILLMENT)),
            http::in_time(topology::check_bucket(&app.nats))
        );
        [
            ("database", database),
            ("nats", nats),
            ("permissions", app.nats.check_permissions()),
            ("stream", stream),
            ("bucket", bucket),
            ("consumer", app.healths.consumer.check()),
            ("dispatcher", app.healths.dispatcher.check()),
            ("relay", app.healths.relay.check()),
            ("notifications", app.healths.notifications.check()),
        ]
    });
    http::ready(checks.await)
}
