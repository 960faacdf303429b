//! What operators do by hand, with the service's own binary, rights and code: see its subcommands
//! `outbox` and `dead-letters`.
//!
//! Lists go to the standard output, as a table or as JSON lines, row by row, so that a list of a
//! million rows is as good as one of ten; what is said about them goes to the standard error.

pub mod dead_letters;
pub mod outbox;

use std::{
    io::{self, IsTerminal as _, Write as _},
    os::unix::fs::MetadataExt as _,
    time::Duration,
};

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use crate::{
    config::Common,
    nats::{self, Nats},
};

/// How long to wait for NATS.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a list is printed.
#[derive(Debug, Clone, Copy, Args)]
pub struct Format {
    /// JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

/// A list on the standard output. Columns are keys of the rows' JSON form, with their widths; what is
/// wider is printed all the same.
struct Table {
    format: Format,
    columns: &'static [(&'static str, usize)],
}

impl Table {
    fn new(format: Format, columns: &'static [(&'static str, usize)]) -> io::Result<Self> {
        let table = Self { format, columns };
        if !format.json {
            table.line(|name| name.to_owned())?;
        }
        Ok(table)
    }

    fn row(&self, row: &impl Serialize) -> anyhow::Result<()> {
        if self.format.json {
            return Ok(writeln!(io::stdout(), "{}", serde_json::to_string(row)?)?);
        }
        let row = serde_json::to_value(row)?;
        Ok(self.line(|name| match &row[name] {
            Value::Null => "-".to_owned(),
            Value::String(text) => printable(text),
            other => other.to_string(),
        })?)
    }

    fn line(&self, cell: impl Fn(&str) -> String) -> io::Result<()> {
        let cells = self.columns.iter().map(|(name, width)| format!("{:width$}", cell(name)));
        writeln!(io::stdout(), "{}", cells.collect::<Vec<_>>().join("  ").trim_end())
    }
}

/// What others sent must not move the cursor or break the line.
fn printable(text: &str) -> String {
    let escaped = |c: char| c.escape_debug().to_string();
    text.chars().map(|c| if c.is_control() { escaped(c) } else { c.to_string() }).collect()
}

/// Says how far a long command has come, after `more` steps: over the last line on a terminal, a line now
/// and then elsewhere.
fn progress(done: &mut u64, more: usize, what: &str) {
    const NOW_AND_THEN: u64 = 10_000;
    let before = *done;
    *done += more as u64;
    if io::stderr().is_terminal() {
        eprint!("\r{done} {what}");
    } else if before / NOW_AND_THEN < *done / NOW_AND_THEN {
        eprintln!("{done} {what}");
    }
}

/// The last line of a command.
fn conclude(what: &str) {
    let over = if io::stderr().is_terminal() { "\r" } else { "" };
    eprintln!("{over}{what}");
}

async fn connected(common: &Common, user: &str) -> anyhow::Result<Nats> {
    let nats = nats::connect(&common.nats, user, &format!("{user}-operator")).await?;
    nats.wait_connected(PATIENCE).await?;
    Ok(nats)
}

/// Who gives the command: the user's name, or number where there is no name.
fn operator() -> String {
    ["SUDO_USER", "USER", "LOGNAME"]
        .iter()
        .find_map(|name| std::env::var(name).ok())
        .unwrap_or_else(|| match std::fs::metadata("/proc/self") {
            Ok(process) => format!("uid {}", process.uid()),
            Err(_) => "unknown".to_owned(),
        })
}
