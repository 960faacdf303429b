//! `cargo dev bench`: how fast the pair is. Each figure stands beside what it could be at best, or what
//! the textbook makes of it, measured in the same round on the same servers: a figure alone says more
//! about the machine than about the code.
//!
//! The services are the real processes, built for release, with their default settings and the users
//! and permissions of `deploy/`. PostgreSQL and nats-server keep what they acknowledge.

mod confirm;
mod cost;
mod growth;
mod inbox;
mod latency;
mod pair;
mod relay;
mod table;

use std::{ffi::OsString, process::ExitStatus};

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use e2e::{
    find::{find_nats, find_postgres},
    services::{build, cargo},
};

use self::table::{Line, Table};
use crate::show::Timeline;

#[derive(Args)]
pub(crate) struct Options {
    /// What to measure; everything if nothing is named
    names: Vec<Name>,
    /// One JSON object per figure instead of a table
    #[arg(long)]
    json: bool,
    /// One round with a tenth of the load: whether it runs, and roughly how fast
    #[arg(long)]
    quick: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// A backlog in the outbox, published
    Relay,
    /// A backlog in the stream, dispatched
    Inbox,
    /// POST /payments
    Confirm,
    /// From the commit of a payment to that of its dispatch
    Latency,
    /// Confirmed and dispatched, everything at once
    Pair,
    /// With more pending, more kept, and more replicas
    Growth,
    /// Statements, commits, bytes of WAL, messages, CPU and memory
    Cost,
}

/// How much of everything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    rounds: usize,
    /// Rows or messages that wait.
    backlog: usize,
    /// The same for what handles them one by one.
    textbook: usize,
    /// Of load.
    seconds: u64,
    /// More and more of a backlog.
    growing: [usize; 3],
}

const FULL: Scale = Scale {
    rounds: 3,
    backlog: 50_000,
    textbook: 3_000,
    seconds: 5,
    growing: [1_000, 100_000, 1_000_000],
};
const QUICK: Scale =
    Scale { rounds: 1, backlog: 5_000, textbook: 500, seconds: 3, growing: [1_000, 5_000, 20_000] };

/// Measures with a program built for release: this one, or one like it.
pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    if cfg!(debug_assertions) {
        let status = again_for_release()?;
        ensure!(status.success(), "the measurement failed");
        return Ok(());
    }
    build()?;
    let scale = if options.quick { QUICK } else { FULL };
    let names = if options.names.is_empty() { Name::value_variants() } else { &options.names };
    let show = Timeline::aside(options.json);
    show.line("PostgreSQL", find_postgres()?.how);
    show.line("nats-server", find_nats()?.how);
    let mut table = Table::default();
    for name in names {
        for round in 1..=scale.rounds {
            let lines = measure(*name, scale, &show)
                .await
                .with_context(|| format!("{name:?}, round {round}"))?;
            for line in &lines {
                show.line(&format!("round {round}/{}", scale.rounds), line);
            }
            table.add(lines);
        }
    }
    if options.json {
        for row in table.rows() {
            println!("{}", serde_json::to_string(&row)?);
        }
    } else {
        println!("\n{table}");
    }
    Ok(())
}

async fn measure(name: Name, scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    match name {
        Name::Relay => relay::measure(scale, show).await,
        Name::Inbox => inbox::measure(scale, show).await,
        Name::Confirm => confirm::measure(scale, show).await,
        Name::Latency => latency::measure(scale, show).await,
        Name::Pair => pair::measure(scale, show).await,
        Name::Growth => growth::measure(scale, show).await,
        Name::Cost => cost::measure(scale, show).await,
    }
}

/// The floors and ceilings are code of ours too, and would be slow for no reason.
fn again_for_release() -> anyhow::Result<ExitStatus> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut build = cargo();
    build.args(["build", "--release", "--workspace", "--bins"]);
    ensure!(build.status().context("cannot run cargo")?.success(), "it does not build");
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(2).context("this program is in no target folder")?;
    let mut again = std::process::Command::new(target.join("release/dev"));
    again.args(arguments).status().context("cannot run what was built")
}
