//! The two services as real processes.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    find::root,
    process::{Footprint, Process, Program, Slot, free_port, tail},
    wait::eventually,
};

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Orders,
    Fulfillment,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Orders => "orders-service",
            Self::Fulfillment => "fulfillment-service",
        }
    }

    /// Its user on the servers of `deploy/`, and its database.
    pub fn user(self) -> &'static str {
        match self {
            Self::Orders => "orders",
            Self::Fulfillment => "fulfillment",
        }
    }
}

/// Cargo in the workspace's root, without what the cargo that runs us says about our package: build
/// scripts that look at it (ring's does) would run again, and half the dependencies with them.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    for (name, _) in std::env::vars_os() {
        let about_us = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];
        if about_us.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            cargo.env_remove(name);
        }
    }
    cargo.current_dir(root());
    cargo
}

/// The folder with the services' programs, built from the sources as they are now. Cargo's output
/// is passed through: a build takes minutes, and nobody should stare at nothing.
pub fn build() -> anyhow::Result<&'static Path> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let attempt = || {
            let exe = std::env::current_exe()?;
            // target/PROFILE/dev, or target/PROFILE/deps/cases-…
            let profile = exe
                .ancestors()
                .skip(1)
                .find(|folder| folder.file_name() != Some("deps".as_ref()))
                .context("this program is in no folder")?;
            let target = profile.parent().context("the profile is in no folder")?;
            let mut cargo = cargo();
            // The whole workspace: another selection of packages is another set of features, and
            // the dependencies would be compiled once more.
            cargo.args(["build", "--workspace", "--bins", "--target-dir"]).arg(target);
            if profile.file_name() == Some("release".as_ref()) {
                cargo.arg("--release");
            }
            ensure!(
                cargo.status().context("cannot run cargo")?.success(),
                "the services do not build"
            );
            anyhow::Ok(profile.to_owned())
        };
        attempt().map_err(|error| format!("{error:#}"))
    });
    built.as_deref().map_err(|error| anyhow::anyhow!(error.clone()))
}

/// What a command came to.
#[derive(Debug)]
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Said {
    /// The JSON lines it printed.
    pub fn rows(&self) -> Vec<Value> {
        self.out.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect()
    }
}

const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// How to run a service.
#[derive(Debug, Clone)]
pub struct Plan {
    pub kind: Kind,
    pub port: u16,
    /// Beyond the address.
    environment: Vec<(String, String)>,
    folder: PathBuf,
}

impl Plan {
    pub fn new(
        kind: Kind,
        database_url: &str,
        nats_url: &str,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            kind,
            port: free_port()?,
            environment: vec![
                ("DATABASE_URL".to_owned(), database_url.to_owned()),
                ("NATS_URL".to_owned(), nats_url.to_owned()),
            ],
            folder: folder.to_owned(),
        })
    }

    /// Where it logs to.
    pub fn log(&self) -> PathBuf {
        self.folder.join(format!("{}-{}.log", self.kind.name(), self.port))
    }

    /// Adds a variable.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Takes a variable away.
    pub fn without(mut self, name: &str) -> Self {
        self.environment.retain(|(variable, _)| variable != name);
        self
    }

    fn program(&self, subcommand: &str) -> anyhow::Result<Program> {
        let mut environment = self.environment.clone();
        environment.push(("HTTP_ADDR".to_owned(), format!("127.0.0.1:{}", self.port)));
        Ok(Program {
            path: build()?.join(self.kind.name()),
            arguments: vec![subcommand.into()],
            environment,
            user: None,
            log: self.log(),
            end_with: "KILL",
            remove: None,
        })
    }

    /// Runs a subcommand to its end and returns its exit code.
    pub async fn run(&self, subcommand: &str) -> anyhow::Result<i32> {
        Process::start(&self.program(subcommand)?).await?.wait(Duration::from_secs(60)).await
    }

    /// Runs a command of an operator, and returns what it says.
    pub async fn command(&self, arguments: &[&str]) -> anyhow::Result<Said> {
        let mut command = tokio::process::Command::new(build()?.join(self.kind.name()));
        command.args(arguments).envs(self.environment.iter().cloned()).kill_on_drop(true);
        let output = timeout(COMMAND_LIMIT, command.output())
            .await
            .with_context(|| format!("{arguments:?} does not end"))??;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        Ok(Said { code: output.status.code().context("killed")?, out, err })
    }

    /// Starts `serve`, and waits until it listens.
    pub async fn start(&self) -> anyhow::Result<Service> {
        let mut process = Process::start(&self.program("serve")?).await?;
        eventually("the service listens", Duration::from_secs(30), async || {
            ensure!(!process.ended(), "it ended");
            Ok(tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.map(drop)?)
        })
        .await
        .with_context(|| tail(&self.log()))?;
        let mut service = Service { plan: self.clone(), process: Slot::default() };
        service.process.fill(process);
        Ok(service)
    }
}

/// A running service.
#[derive(Debug)]
pub struct Service {
    pub plan: Plan,
    process: Slot,
}

impl Service {
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.plan.port)
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    pub fn signal(&self, name: &str) -> anyhow::Result<()> {
        self.process.signal(name)
    }

    /// Sends a signal and waits for the end; returns the exit code.
    pub async fn end(&mut self, signal: &str) -> anyhow::Result<i32> {
        self.process.end(signal).await
    }

    /// Waits for the end of one that was signalled; returns the exit code.
    pub async fn ends(&mut self) -> anyhow::Result<i32> {
        self.process.wait().await
    }

    /// Starts it again, on the same port and with the same settings.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        self.process = Slot::default();
        *self = self.plan.start().await?;
        Ok(())
    }

    /// What it takes of the machine now. None where that cannot be asked.
    pub fn footprint(&self) -> Option<Footprint> {
        Footprint::of(self.pid()?)
    }

    /// Whether it ended by itself.
    pub fn ended(&mut self) -> bool {
        self.process.ended()
    }

    /// Everything it logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.plan.log()).unwrap_or_default()
    }
}
