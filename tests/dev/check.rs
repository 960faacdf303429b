//! `cargo dev test`, `check` and `sqlx`: what CI runs, as anybody can run it.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    path::Path,
    time::SystemTime,
};

use anyhow::{Context as _, ensure};
use e2e::{
    find::{find_nats, find_postgres, root},
    postgres::Postgres,
    services::{self, build},
};
use sqlx::{PgPool, migrate::Migrator};

/// How many tests run at the same time on a small machine.
const AT_LEAST_AT_ONCE: usize = 8;

pub(crate) fn test(arguments: impl Iterator<Item = OsString>) -> anyhow::Result<()> {
    println!("PostgreSQL   {}", find_postgres()?.how);
    println!("nats-server  {}", find_nats()?.how);
    build()?;
    let mut all: Vec<OsString> = vec!["test".into(), "--workspace".into()];
    all.extend(arguments);
    // Most of a test is waiting: for a lease, an acknowledgement time, an outage to end.
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    match std::env::var_os("RUST_TEST_THREADS") {
        None if cores < AT_LEAST_AT_ONCE => {
            cargo(&all, &[("RUST_TEST_THREADS", AT_LEAST_AT_ONCE.to_string().into())])
        }
        _ => cargo(&all, &[]),
    }
}

pub(crate) async fn all(no_tests: bool) -> anyhow::Result<()> {
    step("fmt", cargo(&["fmt", "--all", "--check"], &[]))?;
    step(
        "clippy",
        cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[]),
    )?;
    step(
        "docs",
        cargo(&["doc", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings".into())]),
    )?;
    step("queries", compare_queries().await)?;
    if services::cargo().args(["deny", "--version"]).output().is_ok_and(|o| o.status.success()) {
        // What depends on the tree alone. Advisories change while nothing here does, and need a
        // network: CI asks for them in a job of their own.
        let about = ["deny", "--workspace", "check", "bans", "licenses", "sources"];
        step("deny", cargo(&about, &[]))?;
    } else {
        println!("== deny: cargo-deny is not installed, skipped");
    }
    if no_tests { Ok(()) } else { step("tests", test(std::iter::empty())) }
}

fn step(name: &str, outcome: anyhow::Result<()>) -> anyhow::Result<()> {
    outcome.with_context(|| format!("{name} failed"))?;
    println!("== {name}: ok");
    Ok(())
}

fn cargo(arguments: &[impl AsRef<OsStr>], environment: &[(&str, OsString)]) -> anyhow::Result<()> {
    let line: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect();
    println!("== cargo {}", line.join(" "));
    let mut command = services::cargo();
    command.args(arguments).envs(environment.iter().cloned());
    ensure!(command.status().context("cannot run cargo")?.success(), "cargo {}", line.join(" "));
    Ok(())
}

/// Writes `.sqlx` anew.
pub(crate) async fn refresh_queries() -> anyhow::Result<()> {
    let fresh = tempfile::tempdir()?;
    describe_queries(fresh.path()).await?;
    let committed = root().join(".sqlx");
    fs::create_dir_all(&committed)?;
    for name in files(&committed)?.keys() {
        fs::remove_file(committed.join(name))?;
    }
    let files = files(fresh.path())?;
    for (name, content) in &files {
        fs::write(committed.join(name), content)?;
    }
    println!("{} queries in .sqlx", files.len());
    Ok(())
}

async fn compare_queries() -> anyhow::Result<()> {
    let fresh = tempfile::tempdir()?;
    describe_queries(fresh.path()).await?;
    ensure!(
        files(fresh.path())? == files(&root().join(".sqlx"))?,
        ".sqlx is not what the queries and migrations say; run `cargo dev sqlx` and commit"
    );
    Ok(())
}

fn files(folder: &Path) -> anyhow::Result<BTreeMap<OsString, String>> {
    fs::read_dir(folder)?
        .map(|entry| {
            let entry = entry?;
            Ok((entry.file_name(), fs::read_to_string(entry.path())?))
        })
        .collect()
}

/// Has the query macros ask a real database, and write down what it says.
async fn describe_queries(folder: &Path) -> anyhow::Result<()> {
    let postgres = Postgres::start().await?;
    for database in ["orders", "fulfillment"] {
        postgres.create_database(database).await?;
        let pool = PgPool::connect(&postgres.url(database)).await?;
        Migrator::new(root().join("migrations").join(database)).await?.run(&pool).await?;
        pool.close().await;
    }
    // `shared` first, against the database that has all its tables; the services then find it
    // compiled, and are each asked against their own.
    for (package, database) in [
        ("shared", "fulfillment"),
        ("orders-service", "orders"),
        ("fulfillment-service", "fulfillment"),
    ] {
        // Macros are expanded again only if a source is newer than the last time.
        let source =
            fs::File::options().write(true).open(root().join(package).join("src/lib.rs"))?;
        source.set_modified(SystemTime::now())?;
        cargo(
            &["check", "--package", package, "--lib"],
            &[
                ("SQLX_OFFLINE", "false".into()),
                ("SQLX_OFFLINE_DIR", folder.into()),
                ("DATABASE_URL", postgres.url(database).into()),
            ],
        )?;
    }
    Ok(())
}
