//! The pool, and the guards without which a transaction is not one.
//!
//! sqlx up to 0.9.0 leaks an open transaction into the pool when a `begin()` future is dropped
//! before it is done (transact-rs/sqlx#4393): the next borrowers of that connection work inside a
//! transaction they never began. Two guards, either of which is enough:
//! - [`begin`] cannot be dropped half way, and a lint forbids every other `begin`;
//! - whoever owns a transaction runs where nobody can cancel it
//!   ([`crate::lifecycle::Lifecycle::detached`] for requests; workers never `select!` across one).

use std::{str::FromStr, time::Duration};

use anyhow::{Context as _, ensure};
use sqlx::{
    Connection as _, PgPool, PgTransaction,
    migrate::Migrator,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;

/// SQLSTATE of a query for a table that does not exist.
const UNDEFINED_TABLE: &str = "42P01";

/// How long a request or a worker waits for a free connection.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an idle connection is taken to be good without asking.
const TRUSTED_FOR: Duration = Duration::from_secs(1);

/// Where a database is, and the password for it, which `Debug` leaves out.
#[derive(Clone)]
pub struct DatabaseUrl(PgConnectOptions);

impl FromStr for DatabaseUrl {
    type Err = &'static str;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err("is not a PostgreSQL URL");
        }
        url.parse().map(Self).map_err(|_| "cannot be read")
    }
}

impl std::fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(options) = self;
        write!(
            f,
            "{}:{}/{}",
            options.get_host(),
            options.get_port(),
            options.get_database().unwrap_or_default()
        )
    }
}

/// Opens no connection yet: a service starts, and says it is not ready, while its database is away.
pub fn pool(DatabaseUrl(options): DatabaseUrl, max_connections: u32, name: &str) -> PgPool {
    let options = options.application_name(name).options([
        // "Ack after commit" means that what was committed survives a crash of the server. With
        // `off`, as a server may be configured, its last commits before a crash never were.
        ("synchronous_commit", "on"),
        // The queries are written for one plan, whatever their parameters. Left to itself, PostgreSQL plans
        // some for each call, because a batch of one looks cheaper than one of any size, and that takes
        // longer than running them.
        ("plan_cache_mode", "force_generic_plan"),
        // Nothing here takes long. What does, holds locks that others wait for.
        ("statement_timeout", "30s"),
        ("idle_in_transaction_session_timeout", "30s"),
    ]);
    PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        // sqlx asks each time whether the connection is still good, which is a round trip. One that was
        // in use a moment ago is; and if not, its next statement says so.
        .test_before_acquire(false)
        .before_acquire(|connection, used| {
            Box::pin(async move {
                if used.idle_for > TRUSTED_FOR {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(options)
}

/// Begins a transaction that no cancelled caller can leave open in the pool.
///
/// The `begin` runs in a task of its own. If the caller goes away, the task finishes and drops a
/// complete transaction, which rolls back.
///
/// # Errors
/// When no connection is free or the database is away.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that may begin, in a task nobody aborts"
)]
pub async fn begin(pool: &PgPool) -> sqlx::Result<PgTransaction<'static>> {
    let pool = pool.clone();
    match tokio::spawn(async move { pool.begin().await }).await {
        Ok(begun) => begun,
        Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
    }
}

/// Whether an error says that the database cannot do its work just now, whatever it is asked: it is
/// away, starting, full, overloaded, read-only after a fail-over, or does not let us in, or at its
/// tables. Waiting for it or for its operator helps; blaming the statement does not.
pub fn is_outage(error: &anyhow::Error) -> bool {
    let Some(error) = error.chain().find_map(|cause| cause.downcast_ref::<sqlx::Error>()) else {
        return false;
    };
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => true,
        // SQLSTATE, PostgreSQL manual, appendix A: connection exceptions, insufficient resources,
        // shutdown and start-up, system errors, a transaction that may only read; a wrong password,
        // no such database, no right to it or to a table.
        sqlx::Error::Database(refusal) => refusal.code().is_some_and(|code| {
            ["08", "53", "57P", "58", "25006", "28", "3D", "42501"]
                .iter()
                .any(|class| code.starts_with(class))
        }),
        _ => false,
    }
}

/// Whether the database answers at all, within the time a pool waits for a connection.
pub async fn answers(pool: &PgPool) -> bool {
    let ping = sqlx::query("select 1").execute(pool);
    matches!(timeout(ACQUIRE_TIMEOUT, ping).await, Ok(Ok(_)))
}

/// PostgreSQL's `text` and `jsonb` hold every character but NUL, and what others send may carry one
/// anywhere.
pub fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Applies the migrations that are missing. Safe when several run at once: sqlx holds an advisory
/// lock.
///
/// # Errors
/// When the database is away, or holds migrations that this binary does not know.
pub async fn migrate(pool: &PgPool, migrator: &Migrator) -> anyhow::Result<()> {
    let mut connection = pool.acquire().await.context("cannot reach the database")?;
    // A migration may take its time.
    sqlx::query("set statement_timeout = 0").execute(&mut *connection).await?;
    migrator.run(&mut *connection).await.context("cannot migrate the database")?;
    connection.close().await.context("cannot close the connection")
}

/// Readiness: the database answers, and has the migrations this binary was built with.
///
/// # Errors
/// When it does not.
pub async fn check(pool: &PgPool, migrator: &Migrator) -> anyhow::Result<()> {
    let wanted = migrator.iter().map(|migration| migration.version).max().unwrap_or_default();
    // Not a checked query: the table is sqlx's own and stands in no migration.
    let found: sqlx::Result<Option<i64>> =
        sqlx::query_scalar("select max(version) from _sqlx_migrations where success")
            .fetch_one(pool)
            .await;
    let found = match found {
        Ok(version) => version.unwrap_or_default(),
        Err(error)
            if error.as_database_error().and_then(|e| e.code()).as_deref()
                == Some(UNDEFINED_TABLE) =>
        {
            0
        }
        Err(error) => return Err(error).context("the database does not answer"),
    };
    ensure!(
        found >= wanted,
        "the schema is at migration {found}, this binary wants {wanted}; run `setup`"
    );
    Ok(())
}
