//! fulfillment-service: each confirmed payment becomes one dispatch, whatever is repeated on the
//! way: by the payment provider, the relay, the broker, the network, or a crash.
//!
//! Follow an event: `shared::consumer` → [`intake`] (the transaction) → `shared::inbox` and
//! [`dispatches`].

pub mod config;
pub mod dispatches;
pub mod intake;

use std::process::ExitCode;

use anyhow::Context as _;
use axum::{Router, extract::State, response::Response, routing::get};
use shared::{
    config::Run,
    consumer::Consumer,
    database, http,
    lifecycle::{Health, Lifecycle},
    nats::{self, Nats},
    setup, telemetry, topology,
};
use sqlx::{PgPool, migrate::Migrator};
use tokio::net::TcpListener;
use tower_http::catch_panic::CatchPanicLayer;

use crate::{config::Config, intake::Intake};

/// The schema of this service's database.
pub static MIGRATOR: Migrator = sqlx::migrate!("../migrations/fulfillment");

/// The durable that brings the payments.
pub const CONSUMER: &str = "fulfillment";

/// Runs the chosen subcommand.
pub async fn run(config: Config) -> anyhow::Result<ExitCode> {
    match config.run.unwrap_or(Run::Serve) {
        Run::Serve => serve(config).await,
        Run::Setup => {
            setup::run(config.common, &MIGRATOR, "fulfillment-service").await?;
            Ok(ExitCode::SUCCESS)
        }
        Run::Healthcheck => {
            http::healthcheck(shared::config::local(config.http_addr)).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn serve(config: Config) -> anyhow::Result<ExitCode> {
    let lifecycle = Lifecycle::new();
    let name = format!("fulfillment-service-{}", *telemetry::INSTANCE);
    let pool =
        database::pool(config.common.database_url, config.common.database_max_connections, &name);
    let nats = nats::connect(&config.common.nats_url, &name).await?;
    let listener = TcpListener::bind(config.http_addr)
        .await
        .with_context(|| format!("cannot listen on {}; check HTTP_ADDR", config.http_addr))?;

    let consumer = Consumer {
        pool: pool.clone(),
        nats: nats.clone(),
        stream: topology::ORDERS,
        durable: CONSUMER,
        batch: config.consumer_batch as usize,
        max_deliveries: config.consumer_max_deliveries.into(),
        handler: Intake { pool: pool.clone() },
        health: Health::default(),
    };
    let app = router(App {
        pool: pool.clone(),
        nats: nats.clone(),
        consumer_health: consumer.health.clone(),
        lifecycle: lifecycle.clone(),
    });
    lifecycle.worker("the consumer", consumer.run(lifecycle.stop()));
    lifecycle.worker("HTTP", http::serve(listener, app, lifecycle.clone()));

    let close = async {
        nats.close().await;
        pool.close().await;
    };
    Ok(lifecycle.run(config.common.shutdown_grace, close).await)
}

/// What the probes ask.
#[derive(Clone)]
struct App {
    pool: PgPool,
    nats: Nats,
    consumer_health: Health,
    lifecycle: Lifecycle,
}

fn router(app: App) -> Router {
    Router::new()
        .route("/healthz", get(http::alive))
        .route("/readyz", get(readyz))
        .layer(CatchPanicLayer::new())
        .with_state(app)
}

/// Ready: what this service needs to dispatch.
async fn readyz(State(app): State<App>) -> Response {
    let lifecycle = app.lifecycle.clone();
    let checks = lifecycle.detached(async move {
        [
            ("database", http::in_time(database::check(&app.pool, &MIGRATOR)).await),
            ("nats", app.nats.check()),
            ("consumer", app.consumer_health.check()),
        ]
    });
    http::ready(checks.await)
}
