//! What the subcommand `setup` does: the schema of one service, the topology of the pair.
//!
//! Idempotent, and safe when several run at once, so every deployment may start with it.

use std::time::Duration;

use sqlx::migrate::Migrator;
use tracing::info;

use crate::{config::Common, database, nats, topology};

/// How long to wait for NATS.
const PATIENCE: Duration = Duration::from_secs(10);

/// Migrates the service's own database and upserts all streams and consumers of the pair.
///
/// # Errors
/// When either server is away, or refuses.
pub async fn run(config: Common, migrator: &Migrator, service: &str) -> anyhow::Result<()> {
    let name = format!("{service}-setup");
    let pool = database::pool(config.database_url, 2, &name);
    database::migrate(&pool, migrator).await?;
    let nats = nats::connect(&config.nats_url, &name).await?;
    nats.wait_connected(PATIENCE).await?;
    topology::upsert(nats.jetstream(), config.nats_replicas).await?;
    info!("database migrated, streams and consumers as wanted");
    nats.close().await;
    pool.close().await;
    Ok(())
}
