//! What the subcommand `setup` does: the schema of one service, the topology of the pair.
//!
//! Idempotent, and safe when several run at once, so every deployment may start with it.

use std::time::Duration;

use anyhow::Context as _;
use sqlx::migrate::Migrator;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::{
    backoff,
    config::Common,
    database,
    nats::{self, Nats},
    telemetry::Causes,
    topology,
};

/// How long to wait for NATS.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often the topology is tried. Of two who create the same stream in a cluster at once, neither is
/// told (nats-server 2.14.6, three replicas); the next time both find it there.
const ATTEMPTS: u32 = 5;
const RETRY_BASE: Duration = Duration::from_millis(500);
const RETRY_CAP: Duration = Duration::from_secs(5);

/// Migrates the service's own database and upserts all streams and consumers of the pair.
///
/// # Errors
/// When either server is away, or refuses.
pub async fn run(config: Common, migrator: &Migrator, service: &str) -> anyhow::Result<()> {
    let name = format!("{service}-setup");
    let pool = database::pool(config.database_url, 2, &name);
    database::migrate(&pool, migrator).await?;
    let nats = nats::connect(&config.nats, "setup", &name).await?;
    nats.wait_connected(PATIENCE).await?;
    upsert(&nats, config.nats_replicas).await?;
    info!("database migrated, streams and consumers as wanted");
    nats.close().await;
    pool.close().await;
    Ok(())
}

async fn upsert(nats: &Nats, replicas: usize) -> anyhow::Result<()> {
    let mut attempt = 1;
    while let Err(error) = topology::upsert(nats.jetstream(), replicas).await {
        // What is denied merely times out. If this is why, it is the better explanation.
        nats.check_permissions().with_context(|| Causes(&error).to_string())?;
        if attempt == ATTEMPTS {
            return Err(error);
        }
        warn!(attempt, "trying again: {}", Causes(&error));
        sleep(backoff::delay(attempt, RETRY_BASE, RETRY_CAP)).await;
        attempt += 1;
    }
    Ok(())
}
