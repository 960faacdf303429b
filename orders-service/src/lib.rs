//! orders-service: an order is placed, its payment is confirmed, and the event that says so is
//! written in the same transaction. The relay that publishes it runs in this process.
//!
//! Follow a payment: [`http`] → [`payments`] (the transaction) → `shared::outbox` →
//! `shared::relay`; and what comes back: `shared::consumer` → [`projection`].

pub mod config;
pub mod error;
pub mod http;
pub mod orders;
pub mod payments;
pub mod projection;
pub mod signature;

use std::process::ExitCode;

use anyhow::Context as _;
use shared::{
    commands::{self, dead_letters::Replayed},
    config::{Common, Run},
    consumer::Consumer,
    database,
    dead_letters::settle::Kept,
    http as shared_http,
    lifecycle::{Health, Lifecycle},
    nats,
    relay::Relay,
    retention::Retention,
    setup, telemetry, topology,
};
use sqlx::migrate::Migrator;
use tokio::net::TcpListener;
use tracing::warn;

use crate::{config::Config, projection::Projection};

/// The schema of this service's database.
pub static MIGRATOR: Migrator = sqlx::migrate!("../migrations/orders");

/// Who it is to NATS.
const USER: &str = "orders";

/// Runs the chosen subcommand.
pub async fn run(mut config: Config) -> anyhow::Result<ExitCode> {
    match config.run.take().unwrap_or(Run::Serve) {
        Run::Serve => serve(config).await,
        Run::Setup => {
            setup::run(config.common, &MIGRATOR, "orders-service").await?;
            Ok(ExitCode::SUCCESS)
        }
        Run::Healthcheck => {
            shared_http::healthcheck(shared::config::local(config.http_addr)).await?;
            Ok(ExitCode::SUCCESS)
        }
        Run::Outbox(command) => {
            commands::outbox::run(command, config.common, USER, topology::ORDERS).await
        }
        Run::DeadLetters(command) => dead_letters(command, config.common).await,
    }
}

async fn dead_letters(
    command: commands::dead_letters::Command,
    common: Common,
) -> anyhow::Result<ExitCode> {
    let pool = database::pool(common.database_url, 2, "orders-operator");
    let projection = Projection { pool: pool.clone() };
    let replay = async |letter: &Kept, dry_run| match letter.origin.consumer.as_str() {
        projection::CONSUMER => commands::dead_letters::replay(&projection, letter, dry_run).await,
        _ => Ok(Replayed::unknown(letter)),
    };
    commands::dead_letters::run(command, &pool, replay).await
}

async fn serve(config: Config) -> anyhow::Result<ExitCode> {
    let common = config.common;
    let lifecycle = Lifecycle::new();
    let name = format!("orders-service-{}", *telemetry::INSTANCE);
    let pool = database::pool(common.database_url, common.database_max_connections, &name);
    let nats = nats::connect(&common.nats, USER, &name).await?;
    let listener = TcpListener::bind(config.http_addr)
        .await
        .with_context(|| format!("cannot listen on {}; check HTTP_ADDR", config.http_addr))?;

    let relay_health = Health::default();
    let relay = Relay::new(
        pool.clone(),
        nats.clone(),
        topology::ORDERS,
        common.relay_batch as usize,
        common.relay_poll_interval,
        relay_health.clone(),
    );
    let consumer = Consumer {
        pool: pool.clone(),
        nats: nats.clone(),
        stream: topology::FULFILLMENT,
        durable: projection::CONSUMER,
        batch: common.consumer_batch as usize,
        max_deliveries: common.consumer_max_deliveries.into(),
        handler: Projection { pool: pool.clone() },
        health: Health::default(),
    };
    if config.payment_webhook_secret.is_none() {
        warn!(
            "PAYMENT_WEBHOOK_SECRET is not set: whoever reaches this service can confirm payments"
        );
    }
    let app = http::router(http::App {
        webhook_secrets: config.payment_webhook_secret,
        pool: pool.clone(),
        nats: nats.clone(),
        relay_waker: relay.waker(),
        relay_health,
        consumer_health: consumer.health.clone(),
        lifecycle: lifecycle.clone(),
    });
    lifecycle.worker("the relay", relay.run(lifecycle.stop()));
    lifecycle.worker("the consumer", consumer.run(lifecycle.stop()));
    let retention = Retention { pool: pool.clone(), outbox: common.outbox_retention, inbox: None };
    lifecycle.worker("the retention", retention.run(lifecycle.stop()));
    lifecycle.worker("HTTP", shared_http::serve(listener, app, lifecycle.clone()));

    let close = async {
        nats.close().await;
        pool.close().await;
    };
    Ok(lifecycle.run(common.shutdown_grace, close).await)
}
