//! `cargo dev compose`: the pair in containers, as users run it, from the build to the last volume.
//!
//! Each scenario is a set of compose files. Payments are confirmed by HTTP with signatures while
//! servers are restarted or killed, and the verdict is the ledger's.

use std::{
    cell::Cell,
    fs,
    future::ready,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use e2e::{
    api::{Api, confirm_stubbornly, confirmation},
    broker::Broker,
    compose::{Container, Project, docker},
    contract::{FULFILLMENT, NOTICES, ORDERS},
    find::root,
    invariants::{self, check},
    ledger::Ledger,
    wait::eventually,
};
use futures_util::{StreamExt as _, stream};
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::{process::Command, signal::ctrl_c, time::sleep};

use crate::show::Timeline;

const AMOUNT: i64 = 1999;
const LIMIT: Duration = Duration::from_secs(180);
/// With a build from nothing on a slow machine.
const SCENARIO_LIMIT: Duration = Duration::from_secs(30 * 60);

/// As in `docker-compose.yml`; said again, so that a `.env` does not matter.
const SECRET: &str = "whsec_Zm9yLWRldmVsb3BtZW50LW9ubHktbm90LXNlY3JldA==";

/// What a scenario confirms: few to see that it works, and enough to go on while servers go and come.
const FEW: usize = 50;
const PAYMENTS: usize = 2_000;
const CLUSTER_PAYMENTS: usize = 10_000;
const CLIENTS: usize = 16;

/// Which files, and what happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// docker-compose.yml: duplicates, replicas, restarts of the servers, an orderly stop
    Single,
    /// With deploy/compose.tls.yml
    Tls,
    /// With deploy/compose.secrets.yml
    Secrets,
    /// With deploy/compose.cluster.yml: each NATS node is killed in turn
    Cluster,
}

impl Scenario {
    fn overlay(self) -> Option<&'static str> {
        match self {
            Self::Single => None,
            Self::Tls => Some("tls"),
            Self::Secrets => Some("secrets"),
            Self::Cluster => Some("cluster"),
        }
    }

    /// What has to be run before, once.
    fn preparation(self) -> Option<&'static str> {
        match self {
            Self::Single | Self::Cluster => None,
            Self::Tls => Some("deploy/make-certificates"),
            Self::Secrets => Some("deploy/make-secrets"),
        }
    }
}

pub(crate) async fn run(scenarios: &[Scenario]) -> anyhow::Result<()> {
    let scenarios = if scenarios.is_empty() { Scenario::value_variants() } else { scenarios };
    let show = Timeline::new();
    for scenario in scenarios {
        if let Some(script) = scenario.preparation() {
            let status = Command::new(root().join(script)).status().await;
            ensure!(status.is_ok_and(|status| status.success()), "{script} failed");
        }
        let mut project = Project::new(scenario.overlay()).await?;
        show.chapter(format_args!(
            "{} (compose {}, project {})",
            project.files().join(", "),
            project.version().await?,
            project.name
        ));
        let told = tokio::select! {
            told = tell(&show, *scenario, &mut project) => told,
            _ = ctrl_c() => Err(anyhow::anyhow!("interrupted")),
            () = sleep(SCENARIO_LIMIT) => Err(anyhow::anyhow!("not within {SCENARIO_LIMIT:?}")),
        };
        if told.is_err() {
            project.print_logs().await;
        }
        let down = project.down().await;
        told.with_context(|| format!("{scenario:?}"))?;
        down?;
        show.line("compose", "down: no container, volume or network is left");
    }
    println!("\nverdict: all {} scenarios held", scenarios.len());
    Ok(())
}

/// What a scenario looks at, from outside.
struct Stage {
    api: Api,
    orders: PgPool,
    fulfillment: PgPool,
    broker: Broker,
}

impl Stage {
    async fn new(scenario: Scenario, project: &Project) -> anyhow::Result<Self> {
        let secret = |name: &str, otherwise: &str| match scenario {
            Scenario::Secrets => {
                let text = fs::read_to_string(root().join("deploy/secrets").join(name))?;
                anyhow::Ok(text.trim().to_owned())
            }
            _ => Ok(otherwise.to_owned()),
        };
        let password = secret("postgres_password", "postgres")?;
        let port = project.setting("POSTGRES_PORT");
        let pool = |database: &str| {
            let url = format!("postgres://postgres:{password}@127.0.0.1:{port}/{database}");
            PgPoolOptions::new().max_connections(4).connect_lazy(&url)
        };
        let password = secret("nats_operator_password", "operator")?;
        let ports: &[&str] = match scenario {
            Scenario::Cluster => &["NATS_PORT", "NATS_2_PORT", "NATS_3_PORT"],
            _ => &["NATS_PORT"],
        };
        let addresses: Vec<String> = ports
            .iter()
            .map(|name| format!("nats://operator:{password}@127.0.0.1:{}", project.setting(name)))
            .collect();
        let addresses = addresses.join(",");
        let broker = match scenario {
            Scenario::Tls => {
                let ca = root().join("deploy/certificates/ca.pem");
                Broker::connect_trusting(&addresses, ca).await?
            }
            _ => Broker::connect(&addresses).await?,
        };
        let secret = secret("payment_webhook_secret", SECRET)?;
        let url = format!("http://127.0.0.1:{}", project.setting("ORDERS_PORT"));
        Ok(Self {
            api: Api::signing(url, &secret),
            orders: pool("orders")?,
            fulfillment: pool("fulfillment")?,
            broker,
        })
    }

    /// Confirms so many payments, and more for as long as `meanwhile` takes; tells the longest that one
    /// took.
    async fn load<T>(
        &self,
        show: &Timeline,
        name: &str,
        least: usize,
        paid: &Cell<usize>,
        meanwhile: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let bar = show.bar("payments", least);
        let apis = [self.api.clone()];
        let busy = Cell::new(true);
        let before = paid.get();
        let load = stream::iter(0..)
            .take_while(|n| ready(*n < least || busy.get()))
            .map(async |n| {
                let took = confirm_stubbornly(&apis, &format!("{name}-{n}"), AMOUNT).await;
                paid.set(paid.get() + 1);
                bar.inc(1);
                took
            })
            .buffer_unordered(CLIENTS)
            .fold(Duration::ZERO, async |worst, took| worst.max(took));
        let meanwhile = async {
            let done = meanwhile.await;
            busy.set(false);
            done
        };
        let (worst, done) = tokio::join!(load, meanwhile);
        bar.finish_and_clear();
        let count = paid.get() - before;
        show.line(
            "provider",
            format_args!("{count} payments confirmed, the slowest in {worst:.1?}"),
        );
        done
    }

    /// Waits until nothing is under way, and checks the promise.
    async fn settled(&self) -> anyhow::Result<Ledger> {
        let ledger = eventually("everything has arrived", LIMIT, async || {
            let ledger = Ledger::read(&self.orders, &self.fulfillment, &self.broker).await?;
            check(&invariants::settled(&ledger)).map(|()| ledger)
        })
        .await?;
        check(&invariants::promise(&ledger)).map(|()| ledger)
    }
}

async fn tell(show: &Timeline, scenario: Scenario, project: &mut Project) -> anyhow::Result<()> {
    if scenario != Scenario::Secrets {
        project.set("PAYMENT_WEBHOOK_SECRET", SECRET);
    }
    let started = Instant::now();
    project.build().await?;
    let built = started.elapsed();
    project.up(&[]).await?;
    let up = started.elapsed() - built;
    show.line("compose", format_args!("built in {built:.0?}, up and healthy in {up:.1?}"));
    let stage = Stage::new(scenario, project).await?;
    let paid = Cell::new(0);
    match scenario {
        Scenario::Single => single(show, project, &stage, &paid).await?,
        Scenario::Tls => {
            let port = project.setting("NATS_PORT");
            let plain = format!("nats://operator:operator@127.0.0.1:{port}");
            ensure!(Broker::connect(&plain).await.is_err(), "a client without the CA was let in");
            stage.load(show, "tls", FEW, &paid, ready(Ok(()))).await?;
        }
        Scenario::Secrets => {
            no_secret_in_the_environment(project).await?;
            stage.load(show, "secret", FEW, &paid, ready(Ok(()))).await?;
        }
        Scenario::Cluster => cluster(show, project, &stage, &paid).await?,
    }
    let ledger = stage.settled().await?;
    ensure!(ledger.payments == paid.get(), "{} of {} payments", ledger.payments, paid.get());
    ensure!(ledger.failed == 0 && ledger.dead_letters.is_empty(), "{ledger:?}");
    show.line(
        "ledger",
        format_args!(
            "{} payments confirmed, {} dispatched once; {} copies absorbed by eventId",
            ledger.payments, ledger.dispatches, ledger.absorbed_by_event_id
        ),
    );
    stop_in_order(show, project).await
}

async fn single(
    show: &Timeline,
    project: &mut Project,
    stage: &Stage,
    paid: &Cell<usize>,
) -> anyhow::Result<()> {
    for container in project.containers().await? {
        let Container { service, user, read_only, cap_drop, .. } = container;
        ensure!(read_only && cap_drop == r#"["ALL"]"#, "{service}: {read_only} {cap_drop}");
        // The image of NATS has no other user, see docker-compose.yml.
        let root = matches!(user.as_str(), "" | "0" | "root");
        ensure!(!root || service == "nats", "{service} runs as root");
    }
    for image in ["orders-service", "fulfillment-service"] {
        let name = format!("outbox-pair/{image}");
        let size = docker(&["image", "inspect", "--format", "{{.Size}}", &name]).await?;
        show.line("image", format_args!("{name}: {} MB", size.parse::<u64>()? / 1_000_000));
    }

    stage.load(show, "calm", FEW, paid, ready(Ok(()))).await?;
    let unsigned = stage.api.post("/payments", &confirmation("tx-x", "calm-0", AMOUNT)).await?;
    ensure!((unsigned.status, unsigned.code()) == (401, "bad_signature"), "{}", unsigned.body);
    show.line("orders", "a confirmation without a signature answered 401");
    stage.settled().await?;
    let event = stage.broker.messages().await?.pop().context("no event in the stream")?;
    let known = stage.broker.publish(&event.body, event.message_id.as_deref()).await?;
    ensure!(known, "the broker did not recognise the message id");
    stage.broker.publish(&event.body, None).await?;
    let ledger = stage.settled().await?;
    ensure!((ledger.absorbed_by_event_id, ledger.dispatches) == (1, FEW), "{ledger:?}");
    show.line("by hand", "an event twice more: one absorbed by the broker, one by the inbox");

    project.up(&["--no-recreate", "--scale=fulfillment-service=3"]).await?;
    show.line("compose", "fulfillment-service scaled to 3");
    let restarts = async {
        for server in ["nats", "postgres"] {
            more(paid, PAYMENTS / 4).await?;
            project.run(&["restart", server]).await?;
            show.line("compose", format_args!("{server} restarted while payments flow"));
        }
        project.healthy().await
    };
    stage.load(show, "storm", PAYMENTS, paid, restarts).await?;

    // Two replicas cannot have one port.
    project.set("ORDERS_PORT", "0");
    project.up(&["--scale=orders-service=2", "--scale=fulfillment-service=3"]).await?;
    for replica in 1..=2 {
        let address = project.port("orders-service", replica, 8080).await?;
        Api::new(format!("http://{address}")).ready().await?;
        show.line("compose", format_args!("orders-service, replica {replica}: ready on {address}"));
    }
    Ok(())
}

/// Kills one node after the other, and waits for its copies to be complete before the next: a cluster
/// of three bears one that is away.
async fn cluster(
    show: &Timeline,
    project: &Project,
    stage: &Stage,
    paid: &Cell<usize>,
) -> anyhow::Result<()> {
    let kills = async {
        for node in ["nats", "nats-2", "nats-3"] {
            complete(stage).await.with_context(|| format!("before {node} is killed"))?;
            more(paid, CLUSTER_PAYMENTS / 10).await?;
            project.run(&["kill", node]).await?;
            let without = more(paid, CLUSTER_PAYMENTS / 10).await?;
            project.run(&["start", node]).await?;
            show.line(
                "compose",
                format_args!("{node} killed; {without} payments until it came back"),
            );
        }
        complete(stage).await?;
        project.healthy().await
    };
    stage.load(show, "cluster", CLUSTER_PAYMENTS, paid, kills).await
}

/// Waits until every stream has three complete copies.
async fn complete(stage: &Stage) -> anyhow::Result<()> {
    eventually("all copies are complete", LIMIT, async || {
        for name in [ORDERS, FULFILLMENT, &format!("KV_{NOTICES}")] {
            let stream = stage.broker.js.get_stream(name).await?;
            let info = stream.cached_info();
            let followers = info.cluster.as_ref().map(|cluster| &cluster.replicas);
            let followers = followers.context("it is no cluster")?;
            let current = followers.iter().filter(|peer| peer.current && !peer.offline).count();
            ensure!(current == 2, "{name}: {current} followers are current");
        }
        Ok(())
    })
    .await
}

/// Waits until so many more payments are confirmed, and tells how many there are.
async fn more(paid: &Cell<usize>, wanted: usize) -> anyhow::Result<usize> {
    let before = paid.get();
    eventually("more payments", LIMIT, async || {
        let more = paid.get() - before;
        ensure!(more >= wanted, "{more} of {wanted}");
        Ok(more)
    })
    .await
}

/// What everybody sees who may inspect containers.
async fn no_secret_in_the_environment(project: &Project) -> anyhow::Result<()> {
    let mut secrets = Vec::new();
    for file in fs::read_dir(root().join("deploy/secrets"))? {
        secrets.push(fs::read_to_string(file?.path())?);
    }
    for container in project.containers().await? {
        for secret in &secrets {
            let seen = container.environment.contains(secret.trim());
            ensure!(!seen, "{} has a secret in its environment", container.service);
        }
    }
    Ok(())
}

/// `docker stop`: SIGTERM, and the drain ends well before the kill.
async fn stop_in_order(show: &Timeline, project: &Project) -> anyhow::Result<()> {
    let started = Instant::now();
    project.run(&["stop", "orders-service", "fulfillment-service"]).await?;
    let took = started.elapsed();
    let services = project.containers().await?;
    for stopped in services.iter().filter(|container| container.service.ends_with("-service")) {
        ensure!(
            (stopped.state.as_str(), stopped.exit_code) == ("exited", 0),
            "{} is {}, exit code {}",
            stopped.service,
            stopped.state,
            stopped.exit_code
        );
    }
    show.line("compose", format_args!("all services stopped in {took:.1?}, exit code 0"));
    Ok(())
}
