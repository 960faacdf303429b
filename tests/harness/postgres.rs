//! A real PostgreSQL on loopback.

use std::{fs, net::SocketAddr, os::unix::fs::chown, path::Path, time::Duration};

use anyhow::{Context as _, ensure};
use sqlx::{Connection as _, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;
use tokio::net::lookup_host;

use crate::{
    find::{find_postgres, is_root, root},
    process::{Process, Program, Slot, free_port, tail},
    wait::eventually,
};

/// Whom PostgreSQL runs as when we are root, as which it refuses: nobody.
const NOBODY: u32 = 65534;

/// The superuser, and the password.
const SUPERUSER: &str = "postgres";

/// The roles of `deploy/postgres/provision.sql`.
const ROLES: [&str; 4] = ["orders_setup", "orders", "fulfillment_setup", "fulfillment"];

const START_LIMIT: Duration = Duration::from_secs(30);

/// For tests.
const CARELESS: [&str; 4] = [
    "max_connections=400",
    // The machine does not lose power here, the server does: what it has written to the operating
    // system stays.
    "fsync=off",
    "full_page_writes=off",
    // As a careless operator might have it. The services ask for better, and tests that kill the
    // server would lose payments if they did not.
    "synchronous_commit=off",
];

/// For measurements: nothing is left out that a power failure would ask for, and PostgreSQL's
/// defaults otherwise, but for what is there to be raised.
const MEASURED: [&str; 5] = [
    "max_connections=400",
    "shared_buffers=1GB",
    "max_wal_size=4GB",
    "shared_preload_libraries=pg_stat_statements",
    // When each row was committed, for the latency.
    "track_commit_timestamp=on",
];

/// A PostgreSQL server, ours or one that was given.
#[derive(Debug)]
pub struct Postgres {
    address: String,
    program: Option<Program>,
    process: Slot,
    data: Option<TempDir>,
}

impl Postgres {
    /// The server of `DATABASE_SERVER_URL` if that is set, else a new one of our own.
    pub async fn given_or_started() -> anyhow::Result<Self> {
        match std::env::var("DATABASE_SERVER_URL") {
            Ok(address) => Ok(Self {
                address: address.trim_end_matches('/').to_owned(),
                program: None,
                process: Slot::default(),
                data: None,
            }),
            Err(_) => Self::start().await,
        }
    }

    /// A new server with an empty data directory, which is removed with it. Everybody may do
    /// everything.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with("trust", &CARELESS).await
    }

    /// A new server with the databases and roles of `deploy/`, whose passwords are their names.
    pub async fn deployed() -> anyhow::Result<Self> {
        Self::start_with("scram-sha-256", &CARELESS).await?.provisioned().await
    }

    /// The same, to be measured.
    pub async fn measured() -> anyhow::Result<Self> {
        Self::start_with("scram-sha-256", &MEASURED).await?.provisioned().await
    }

    async fn provisioned(self) -> anyhow::Result<Self> {
        let mut psql = tokio::process::Command::new(find_postgres()?.path.join("psql"));
        psql.args(["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1"])
            .arg("--file")
            .arg(root().join("deploy/postgres/provision.sql"))
            .arg(self.url("postgres"))
            .envs(ROLES.map(|role| (format!("{}_PASSWORD", role.to_uppercase()), role)));
        let output = psql.output().await.context("cannot run psql")?;
        ensure!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr));
        Ok(self)
    }

    async fn start_with(authentication: &str, settings: &[&str]) -> anyhow::Result<Self> {
        let binaries = find_postgres()?.path;
        let data = tempfile::Builder::new().prefix("outbox-pair-postgres-").tempdir()?;
        let user = is_root().then_some(NOBODY);
        if user.is_some() {
            chown(data.path(), user, user)?;
        }
        let cluster = data.path().join("cluster");
        let password = data.path().join("password");
        fs::write(&password, SUPERUSER)?;
        let mut initdb = tokio::process::Command::new(binaries.join("initdb"));
        initdb
            .args(["--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync"])
            .arg(format!("--auth={authentication}"))
            .arg("--pwfile")
            .arg(&password)
            .arg("--pgdata")
            .arg(&cluster)
            .current_dir("/");
        if let Some(user) = user {
            initdb.uid(user).gid(user);
        }
        let output = initdb.output().await.context("cannot run initdb")?;
        ensure!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));

        let port = free_port()?;
        let port_is = format!("port={port}");
        let place = ["listen_addresses=127.0.0.1", &port_is, "unix_socket_directories="];
        let mut arguments = vec!["-D".into(), cluster.into()];
        for setting in place.iter().chain(settings) {
            arguments.extend(["-c".into(), setting.into()]);
        }
        let program = Program {
            path: binaries.join("postgres"),
            arguments,
            environment: Vec::new(),
            user,
            log: data.path().join("log"),
            end_with: "QUIT",
            remove: Some(data.path().to_owned()),
        };
        let mut server = Self {
            address: format!("postgres://{SUPERUSER}:{SUPERUSER}@127.0.0.1:{port}"),
            program: Some(program),
            process: Slot::default(),
            data: Some(data),
        };
        server.start_again().await?;
        Ok(server)
    }

    /// Where it listens.
    pub async fn address(&self) -> anyhow::Result<SocketAddr> {
        let options: PgConnectOptions = self.url("postgres").parse()?;
        let mut found = lookup_host((options.get_host(), options.get_port())).await?;
        found.next().context("the server has no address")
    }

    /// The URL of one of its databases.
    pub fn url(&self, database: &str) -> String {
        format!("{}/{database}", self.address)
    }

    /// The same as one of the roles of `deploy/`.
    pub fn url_as(&self, role: &str, database: &str) -> String {
        let (_, address) = self.address.rsplit_once('@').unwrap_or(("", &self.address));
        format!("postgres://{role}:{role}@{address}/{database}")
    }

    pub fn is_ours(&self) -> bool {
        self.program.is_some()
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    /// Where its databases and its log are. None for a server that was given.
    pub fn folder(&self) -> Option<&Path> {
        self.data.as_ref().map(TempDir::path)
    }

    /// Whether it ended by itself.
    pub fn ended(&mut self) -> bool {
        self.process.ended()
    }

    /// Stops it: `INT` lets nobody finish, `QUIT` is as if the power went.
    pub async fn stop(&mut self, signal: &str) -> anyhow::Result<()> {
        self.process.end(signal).await.map(drop)
    }

    /// Starts it where it was.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        let program = self.program.as_ref().context("it is not ours")?;
        self.process.fill(Process::start(program).await?);
        let options: PgConnectOptions = self.url("postgres").parse()?;
        eventually("PostgreSQL answers", START_LIMIT, async || {
            Ok(PgConnection::connect_with(&options).await?.close().await?)
        })
        .await
        .with_context(|| tail(&program.log))
    }

    /// Ends some sessions of the services; returns how many there were.
    pub async fn terminate_sessions(&self, most: usize) -> anyhow::Result<usize> {
        let mut connection = PgConnection::connect(&self.url("postgres")).await?;
        let ended: Vec<bool> = sqlx::query_scalar(
            "select pg_terminate_backend(pid)
             from (select pid from pg_stat_activity where application_name like '%-service-%'
                   order by random() limit $1) as chosen",
        )
        .bind(i64::try_from(most)?)
        .fetch_all(&mut connection)
        .await?;
        connection.close().await?;
        Ok(ended.len())
    }

    /// Creates an empty database.
    pub async fn create_database(&self, name: &str) -> anyhow::Result<()> {
        self.execute(format!(r#"create database "{name}""#)).await
    }

    pub async fn drop_database(&self, name: &str) -> anyhow::Result<()> {
        self.execute(format!(r#"drop database if exists "{name}" with (force)"#)).await
    }

    async fn execute(&self, statement: String) -> anyhow::Result<()> {
        let mut connection = PgConnection::connect(&self.url("postgres")).await?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut connection).await?;
        Ok(connection.close().await?)
    }
}
