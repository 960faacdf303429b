//! A real nats-server on loopback.

use std::{
    ffi::OsString,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use crate::{
    find::{find_nats, root},
    process::{Process, Program, Slot, free_port, tail},
    wait::eventually,
};

/// The users of `deploy/nats/nats.conf`.
pub const USERS: [&str; 4] = ["setup", "orders", "fulfillment", "operator"];

const START_LIMIT: Duration = Duration::from_secs(30);

/// A nats-server with JetStream, ours or one that was given.
#[derive(Debug)]
pub struct NatsServer {
    address: SocketAddr,
    monitor_port: u16,
    /// As it was given, with a password perhaps.
    given: Option<String>,
    ours: Option<OurNats>,
    process: Slot,
}

#[derive(Debug)]
struct OurNats {
    program: PathBuf,
    arguments: Vec<OsString>,
    data: TempDir,
}

impl NatsServer {
    /// The server of `NATS_URL` if that is set, else a new one of our own.
    pub async fn given_or_started() -> anyhow::Result<Self> {
        let Ok(url) = std::env::var("NATS_URL") else { return Self::start().await };
        let first: async_nats::ServerAddr = url.split(',').next().unwrap_or_default().parse()?;
        let address = tokio::net::lookup_host((first.host(), first.port())).await?.next();
        let address = address.with_context(|| format!("{} has no address", first.host()))?;
        Ok(Self {
            address,
            monitor_port: 0,
            given: Some(url),
            ours: None,
            process: Slot::default(),
        })
    }

    /// A new server with an empty store, which is removed with it.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(&[]).await
    }

    /// The same with further arguments.
    pub async fn start_with(arguments: &[&str]) -> anyhow::Result<Self> {
        let data = new_folder()?;
        let mut all = vec!["--jetstream".into(), "--store_dir".into(), store(data.path()).into()];
        all.extend(arguments.iter().map(OsString::from));
        Self::start_in(data, all).await
    }

    /// A new server with the users and permissions of `deploy/`, as `change` has the file.
    pub async fn deployed(change: impl FnOnce(String) -> String) -> anyhow::Result<Self> {
        let data = new_folder()?;
        let config = write_config(data.path(), &change(deployed_config()?))?;
        Self::start_in(data, vec!["--config".into(), config.into()]).await
    }

    /// Three of them, as one cluster: `node-0`, `node-1` and `node-2`.
    pub async fn cluster() -> anyhow::Result<Vec<Self>> {
        let ports = [free_port()?, free_port()?, free_port()?];
        let routes = ports.map(|port| format!("nats://127.0.0.1:{port}")).join(", ");
        let mut nodes = Vec::new();
        for (number, port) in ports.iter().enumerate() {
            let cluster = format!(
                "server_name: node-{number}
                 cluster {{ name: pair, listen: 127.0.0.1:{port}, routes: [{routes}] }}"
            );
            nodes.push(Self::deployed(|config| format!("{config}{cluster}\n")).await?);
        }
        Ok(nodes)
    }

    /// Gives a server as deployed another configuration: from its next start, or a `HUP`.
    pub fn configure(&self, config: &str) -> anyhow::Result<()> {
        write_config(self.folder().context("it is not ours")?, config).map(drop)
    }

    async fn start_in(data: TempDir, arguments: Vec<OsString>) -> anyhow::Result<Self> {
        let ours = OurNats { program: find_nats()?.path, arguments, data };
        let mut server = Self {
            address: ([127, 0, 0, 1], free_port()?).into(),
            monitor_port: free_port()?,
            given: None,
            ours: Some(ours),
            process: Slot::default(),
        };
        server.start_again().await?;
        Ok(server)
    }

    pub fn url(&self) -> String {
        self.given.clone().unwrap_or_else(|| format!("nats://{}", self.address))
    }

    /// As one of the users of `deploy/`, whose passwords are their names here.
    pub fn url_as(&self, user: &str) -> String {
        format!("nats://{user}:{user}@{}", self.address)
    }

    /// The same through something that stands before it: with the user and password as given.
    pub fn url_through(&self, address: SocketAddr) -> String {
        let given = self.given.as_deref().unwrap_or_default().split(',').next().unwrap_or_default();
        let who =
            given.trim_start_matches("nats://").rsplit_once('@').map(|(who, _)| format!("{who}@"));
        format!("nats://{}{address}", who.unwrap_or_default())
    }

    /// None for a server that was given.
    pub fn monitor_url(&self) -> Option<String> {
        self.is_ours().then(|| format!("http://127.0.0.1:{}", self.monitor_port))
    }

    /// A folder that goes with the server, even when we are killed. None for a server that was given.
    pub fn folder(&self) -> Option<&Path> {
        self.ours.as_ref().map(|ours| ours.data.path())
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn is_ours(&self) -> bool {
        self.ours.is_some()
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    /// Whether it ended by itself.
    pub fn ended(&mut self) -> bool {
        self.process.ended()
    }

    /// Sends a signal: `HUP` has it read its configuration again.
    pub fn signal(&self, signal: &str) -> anyhow::Result<()> {
        self.process.signal(signal)
    }

    /// Stops it: `TERM` in order, `KILL` at once.
    pub async fn stop(&mut self, signal: &str) -> anyhow::Result<()> {
        self.process.end(signal).await.map(drop)
    }

    /// Keeps a copy of the store of a stopped server, and returns where it is.
    pub fn copy_store(&self) -> anyhow::Result<PathBuf> {
        let folder = self.folder().context("it is not ours")?;
        let copy = tempfile::Builder::new().prefix("store-").tempdir_in(folder)?.keep();
        copy_folder(&store(folder), &copy)?;
        Ok(copy)
    }

    /// Gives a stopped server the store of a copy, or an empty one.
    pub fn replace_store(&self, copy: Option<&Path>) -> anyhow::Result<()> {
        let store = store(self.folder().context("it is not ours")?);
        fs::remove_dir_all(&store)?;
        copy.map_or(Ok(()), |copy| copy_folder(copy, &store))
    }

    /// Starts it where it was, on its ports and with its store.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        let OurNats { program, arguments: further, data } =
            self.ours.as_ref().context("it is not ours")?;
        let ports = data.path().join("ports");
        // Ports of an earlier run must not be taken for this one's.
        if ports.exists() {
            fs::remove_dir_all(&ports)?;
        }
        fs::create_dir(&ports)?;
        let mut arguments: Vec<OsString> = vec![
            "--addr".into(),
            "127.0.0.1".into(),
            "--port".into(),
            self.address.port().to_string().into(),
            "--http_port".into(),
            self.monitor_port.to_string().into(),
            "--ports_file_dir".into(),
            ports.clone().into(),
        ];
        arguments.extend(further.iter().cloned());
        let program = Program {
            path: program.clone(),
            arguments,
            // For the configuration of `deploy/`.
            environment: USERS
                .map(|user| (format!("NATS_{}_PASSWORD", user.to_uppercase()), user.to_owned()))
                .into(),
            user: None,
            log: data.path().join("log"),
            end_with: "KILL",
            remove: Some(data.path().to_owned()),
        };
        let mut process = Process::start(&program).await?;
        let file = ports.join(format!("nats-server_{}.ports", process.pid()));
        // It writes the file when it listens; by its own process id, so it is not another's.
        eventually("nats-server listens", START_LIMIT, async || {
            ensure!(!process.ended(), "it ended");
            Ok(fs::metadata(&file).map(drop)?)
        })
        .await
        .with_context(|| tail(&program.log))?;
        self.process.fill(process);
        Ok(())
    }
}

/// The configuration that is deployed.
pub fn deployed_config() -> anyhow::Result<String> {
    Ok(fs::read_to_string(root().join("deploy/nats/nats.conf"))?)
}

/// Writes a configuration like the deployed one, with the store where ours is.
fn write_config(folder: &Path, config: &str) -> anyhow::Result<PathBuf> {
    let file = folder.join("nats.conf");
    let here = format!("store_dir: \"{}\"", store(folder).display());
    fs::write(&file, config.replace("store_dir: /data", &here))?;
    Ok(file)
}

fn store(folder: &Path) -> PathBuf {
    folder.join("store")
}

/// A folder, and everything in it.
pub fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn new_folder() -> anyhow::Result<TempDir> {
    Ok(tempfile::Builder::new().prefix("outbox-pair-nats-").tempdir()?)
}
