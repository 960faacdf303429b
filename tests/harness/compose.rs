//! The pair in containers: one compose project, made of the files a user would use.

use std::{process::Stdio, time::Duration};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tempfile::NamedTempFile;
use tokio::process::Command;

use crate::{find::root, process::free_port, wait::eventually};

/// Starting servers, migrating, starting services.
const UP_LIMIT: Duration = Duration::from_secs(180);

/// A compose project with a name, ports and settings of its own.
pub struct Project {
    /// `docker compose`, or `docker-compose` 1.29.
    program: Vec<&'static str>,
    pub name: String,
    overlay: Option<&'static str>,
    environment: Vec<(String, String)>,
    /// Instead of a `.env` that may be here.
    no_settings: NamedTempFile,
}

/// How a container is.
#[derive(Debug)]
pub struct Container {
    pub service: String,
    /// `running`, `exited`, …
    pub state: String,
    /// `healthy`, `starting`, `unhealthy`, or nothing.
    pub health: String,
    pub exit_code: i64,
    pub user: String,
    pub read_only: bool,
    pub cap_drop: String,
    /// As anybody sees it who may inspect containers.
    pub environment: String,
}

impl Project {
    /// A project of `docker-compose.yml` and an overlay of `deploy/`, by name.
    ///
    /// # Errors
    /// When there is no compose, or no engine.
    pub async fn new(overlay: Option<&'static str>) -> anyhow::Result<Self> {
        docker(&["info"]).await.context("no Docker engine answers")?;
        // A client without the plug-in takes `compose` for a mistake.
        let plugin = docker(&["compose", "version"]).await.is_ok();
        let program = if plugin { vec!["docker", "compose"] } else { vec!["docker-compose"] };
        let mut environment = Vec::new();
        for name in ["ORDERS_PORT", "POSTGRES_PORT", "NATS_PORT", "NATS_2_PORT", "NATS_3_PORT"] {
            environment.push((name.to_owned(), free_port()?.to_string()));
        }
        Ok(Self {
            program,
            name: format!("outbox-pair-{}", std::process::id()),
            overlay,
            environment,
            no_settings: NamedTempFile::new()?,
        })
    }

    /// The files it is made of.
    pub fn files(&self) -> Vec<String> {
        let overlay = self.overlay.map(|name| format!("deploy/compose.{name}.yml"));
        ["docker-compose.yml".to_owned()].into_iter().chain(overlay).collect()
    }

    /// The value of a setting.
    pub fn setting(&self, name: &str) -> &str {
        let found = self.environment.iter().rfind(|(setting, _)| setting == name);
        found.map_or("", |(_, value)| value.as_str())
    }

    /// Changes a setting, for whatever is started from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// What this compose calls itself.
    pub async fn version(&self) -> anyhow::Result<String> {
        self.output(&["version", "--short"]).await
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program[0]);
        command.args(&self.program[1..]).current_dir(root()).stdin(Stdio::null());
        command.arg("--project-name").arg(&self.name);
        command.arg("--env-file").arg(self.no_settings.path());
        for file in self.files() {
            command.arg("--file").arg(file);
        }
        command.args(arguments).envs(self.environment.iter().cloned());
        command
    }

    /// Runs compose, whose output is passed through.
    pub async fn run(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let status = self.command(arguments).status().await.context("cannot run compose")?;
        ensure!(status.success(), "compose {}: {status}", arguments.join(" "));
        Ok(())
    }

    /// Runs compose and returns what it printed.
    pub async fn output(&self, arguments: &[&str]) -> anyhow::Result<String> {
        printed(self.command(arguments), &format!("compose {}", arguments.join(" "))).await
    }

    /// Builds the images.
    pub async fn build(&self) -> anyhow::Result<()> {
        self.run(&["build"]).await
    }

    /// Starts what is not running, and waits until all of it is healthy: what `up --wait` does, which
    /// docker-compose 1.29 has not.
    pub async fn up(&self, further: &[&str]) -> anyhow::Result<()> {
        self.run(&[&["up", "--detach"], further].concat()).await?;
        self.healthy().await
    }

    /// Waits until everything is healthy, and what was to end has ended well.
    pub async fn healthy(&self) -> anyhow::Result<()> {
        eventually("all containers are healthy", UP_LIMIT, async || {
            let containers = self.containers().await?;
            ensure!(!containers.is_empty(), "there are none");
            for container in containers {
                let well = if container.service.ends_with("-setup") {
                    container.state == "exited" && container.exit_code == 0
                } else {
                    container.state == "running" && container.health == "healthy"
                };
                ensure!(
                    well,
                    "{} is {} {}, exit code {}",
                    container.service,
                    container.state,
                    container.health,
                    container.exit_code
                );
            }
            Ok(())
        })
        .await
    }

    /// All containers, running or not.
    pub async fn containers(&self) -> anyhow::Result<Vec<Container>> {
        let ids = self.ours("ps", &["--all"]).await?;
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut arguments = vec!["inspect"];
        arguments.extend(ids.iter().map(String::as_str));
        let found: Vec<Value> = serde_json::from_str(&docker(&arguments).await?)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(found
            .iter()
            .map(|container| {
                let (state, config) = (&container["State"], &container["Config"]);
                Container {
                    service: text(&config["Labels"]["com.docker.compose.service"]),
                    state: text(&state["Status"]),
                    health: text(&state["Health"]["Status"]),
                    exit_code: state["ExitCode"].as_i64().unwrap_or(-1),
                    user: text(&config["User"]),
                    read_only: container["HostConfig"]["ReadonlyRootfs"] == true,
                    cap_drop: container["HostConfig"]["CapDrop"].to_string(),
                    environment: config["Env"].to_string(),
                }
            })
            .collect())
    }

    /// Where a replica of a service is published, counted from 1.
    pub async fn port(&self, service: &str, replica: usize, port: u16) -> anyhow::Result<String> {
        let index = format!("--index={replica}");
        self.output(&["port", &index, service, &port.to_string()]).await
    }

    /// Prints what every container logged last, for a failure that wants an explanation.
    pub async fn print_logs(&self) {
        if let Err(error) = self.run(&["logs", "--no-color", "--tail=60"]).await {
            eprintln!("no logs: {error:#}");
        }
    }

    /// Removes everything, volumes too, and makes sure of it.
    pub async fn down(&self) -> anyhow::Result<()> {
        self.run(&["down", "--volumes", "--remove-orphans"]).await?;
        for (kind, further) in [("ps", &["--all"][..]), ("volume ls", &[]), ("network ls", &[])] {
            let left = self.ours(kind, further).await?;
            ensure!(left.is_empty(), "{kind}: {} are left behind", left.len());
        }
        Ok(())
    }

    /// The ids of all there is of this project, of one kind.
    async fn ours(&self, kind: &str, further: &[&str]) -> anyhow::Result<Vec<String>> {
        let label = format!("label=com.docker.compose.project={}", self.name);
        let mut arguments: Vec<&str> = kind.split(' ').collect();
        arguments.extend(["--quiet", "--filter", &label]);
        arguments.extend(further);
        Ok(docker(&arguments).await?.lines().map(str::to_owned).collect())
    }
}

/// Runs docker and returns what it printed.
pub async fn docker(arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new("docker");
    command.args(arguments);
    printed(command, &format!("docker {}", arguments.join(" "))).await
}

async fn printed(mut command: Command, what: &str) -> anyhow::Result<String> {
    let output = command.output().await.with_context(|| format!("cannot run {what}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what}: {error}");
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
