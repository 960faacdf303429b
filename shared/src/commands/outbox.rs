//! `outbox status | list | republish | audit | unpark`.
//!
//! What is to be published again waits in the outbox like anything new, and goes the relay's own way,
//! with the same event ids. The command does not wait for the service to do it: it runs the relay's
//! steps itself, and takes turns with those of the services.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, bail, ensure};
use clap::Subcommand;
use futures_util::TryStreamExt as _;
use sqlx::PgPool;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::{pin, time::sleep};
use uuid::Uuid;

use super::{Format, PATIENCE, Table, conclude, connected, progress};
use crate::{
    audit,
    config::Common,
    database,
    lifecycle::Health,
    nats::Nats,
    outbox::{self, Place, inspect},
    relay::{Outcome, Relay},
};

/// Between two looks, while a service's relay is at work.
const LOOK: Duration = Duration::from_millis(200);

const PLACES: &[(&str, usize)] = &[("eventId", 36), ("streamSeq", 9), ("publishedAt", 27)];

/// Operator tools over this service's outbox.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Counts what waits, is parked, and is published
    Status {
        /// How it is printed.
        #[command(flatten)]
        format: Format,
    },
    /// Lists what is not published, oldest first
    List {
        /// Only what a person has to look at
        #[arg(long)]
        parked: bool,
        /// How it is printed.
        #[command(flatten)]
        format: Format,
    },
    /// Publishes again, under the same event ids, what was published since a time. Consumers that have
    /// it absorb it
    Republish {
        /// A time, for example 2026-01-31T12:00:00Z
        #[arg(long, value_parser = rfc3339)]
        since: OffsetDateTime,
        /// Lists it, and publishes nothing
        #[arg(long)]
        dry_run: bool,
        /// How it is printed.
        #[command(flatten)]
        format: Format,
    },
    /// Compares the stream with what it has acknowledged, and lists what it does not have. Exit code 1
    /// if something is missing, and not repaired
    Audit {
        /// Publishes it again, under the same event ids
        #[arg(long)]
        repair: bool,
        /// How it is printed.
        #[command(flatten)]
        format: Format,
    },
    /// Has a parked event tried again
    Unpark {
        /// Its eventId, see `outbox list --parked`
        event_id: Uuid,
    },
}

fn rfc3339(text: &str) -> Result<OffsetDateTime, time::error::Parse> {
    OffsetDateTime::parse(text, &Rfc3339)
}

/// Runs one, for the outbox that is published to `stream`.
///
/// # Errors
/// When a server is away, or refuses.
pub async fn run(
    command: Command,
    common: Common,
    user: &str,
    stream: &'static str,
) -> anyhow::Result<ExitCode> {
    let pool = database::pool(common.database_url.clone(), 2, &format!("{user}-operator"));
    match command {
        Command::Status { format } => {
            let columns = &[
                ("pending", 9),
                ("retrying", 9),
                ("parked", 9),
                ("published", 9),
                ("oldestPendingSeconds", 20),
                ("lastPlace", 9),
                ("relaying", 8),
            ];
            Table::new(format, columns)?.row(&inspect::status(&pool).await?)?;
        }
        Command::List { parked, format } => {
            let columns = &[
                ("eventId", 36),
                ("aggregateId", 16),
                ("subject", 28),
                ("createdAt", 27),
                ("attempts", 8),
                ("parkedAt", 27),
                ("lastError", 0),
            ];
            let table = Table::new(format, columns)?;
            let rows = inspect::waiting(&pool, parked);
            pin!(rows);
            while let Some(row) = rows.try_next().await? {
                table.row(&row)?;
            }
        }
        Command::Republish { since, dry_run, format } => {
            let table = Table::new(format, PLACES)?;
            let found = walk(&pool, Some(since), &table, async |page| Ok(page)).await?.found;
            if dry_run {
                conclude(&format!("{} events would be published again", found.len()));
            } else {
                let nats = connected(&common, user).await?;
                publish(&common, &pool, nats, stream, &found, "published again by hand").await?;
                conclude(&format!("{} events published again", found.len()));
            }
        }
        Command::Audit { repair, format } => {
            let nats = connected(&common, user).await?;
            let table = Table::new(format, PLACES)?;
            let compare = async |page: Vec<Place>| audit::missing(&nats, stream, &page).await;
            let Walked { seen, found } = walk(&pool, None, &table, compare).await?;
            let missing = found.len();
            if missing == 0 {
                conclude(&format!("{seen} published events, none is missing"));
            } else if repair {
                publish(&common, &pool, nats, stream, &found, "missing in an audit").await?;
                conclude(&format!(
                    "{seen} published events, {missing} were missing, published again"
                ));
            } else {
                conclude(&format!("{seen} published events, {missing} are missing; see --repair"));
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Unpark { event_id } => {
            let unparked = inspect::unpark(&pool, event_id).await?;
            ensure!(unparked, "no event {event_id} is parked; see `outbox list --parked`");
            conclude("the relay tries it again");
        }
    }
    pool.close().await;
    Ok(ExitCode::SUCCESS)
}

struct Walked {
    seen: u64,
    found: Vec<Place>,
}

/// Goes through published rows, from the last one back, and prints those that `choose` picks.
async fn walk(
    pool: &PgPool,
    since: Option<OffsetDateTime>,
    table: &Table,
    choose: impl AsyncFn(Vec<Place>) -> anyhow::Result<Vec<Place>>,
) -> anyhow::Result<Walked> {
    let (mut walked, mut before) = (Walked { seen: 0, found: Vec::new() }, None);
    loop {
        let page = outbox::places(pool, since, before, audit::PAGE.into()).await?;
        let Some(last) = page.last() else { return Ok(walked) };
        before = Some(*last);
        progress(&mut walked.seen, page.len(), "rows seen");
        let chosen = choose(page).await?;
        for row in &chosen {
            table.row(row)?;
        }
        walked.found.extend(chosen);
    }
}

/// Has rows wait again, and relays until nothing waits, beside the relays of the services.
async fn publish(
    common: &Common,
    pool: &PgPool,
    nats: Nats,
    stream: &'static str,
    rows: &[Place],
    why: &str,
) -> anyhow::Result<()> {
    // The oldest first: a relay of a service may be quick.
    for page in rows.rchunks(audit::PAGE.into()) {
        outbox::unpublish(pool, page, why).await?;
    }
    let batch = common.relay_batch as usize;
    let relay = Relay::new(
        pool.clone(),
        nats.clone(),
        stream,
        batch,
        common.relay_poll_interval,
        Health::default(),
    );
    let (mut done, mut refused) = (0, 0);
    loop {
        match relay.step().await.context("the database fails")? {
            Outcome::Worked { published, failed } => {
                progress(&mut done, published, "events published");
                refused += failed;
            }
            Outcome::Refilled(_) => {}
            Outcome::Standby => sleep(LOOK).await,
            Outcome::Idle => break,
            Outcome::Disconnected => nats.wait_connected(PATIENCE).await?,
            Outcome::Stuck(reason) => {
                bail!("{reason}; what is left waits in the outbox for the service's relay")
            }
        }
    }
    nats.close().await;
    ensure!(refused == 0, "{refused} attempts were refused; see `outbox list`");
    Ok(())
}
