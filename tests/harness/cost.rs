//! What an event costs, in figures that do not depend on the machine: statements, commits, bytes of WAL,
//! messages. A clock never notices a query more per event; these do.

use std::{collections::BTreeMap, fs, time::Duration};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::PgPool;

use crate::{
    api::Api,
    find::root,
    outside::{Outside, Reply},
    services::{Kind, Service},
    stage::{Stage, events, publish_all},
    wait::eventually,
};

/// Events of a backlog: many batches, so that what happens once hardly counts.
const BACKLOG: usize = 10_000;
const PAYMENTS: usize = 300;

/// What is allowed above the baseline: batches are not always full.
pub const TOLERANCE: f64 = 1.25;
const SLACK: f64 = 0.002;

/// Per event.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cost {
    /// Of the service, each of which is a round trip.
    pub statements: f64,
    /// Transactions that wrote something.
    pub commits: f64,
    pub wal_bytes: f64,
    /// Messages from the service to nats-server, and back.
    pub nats_in: f64,
    pub nats_out: f64,
}

impl Cost {
    /// By name, for whoever compares.
    pub fn figures(self) -> [(&'static str, f64); 5] {
        [
            ("statements", self.statements),
            ("commits", self.commits),
            ("WAL bytes", self.wal_bytes),
            ("messages to NATS", self.nats_in),
            ("messages from NATS", self.nats_out),
        ]
    }
}

/// The costs by what they are of.
pub type Costs = BTreeMap<String, Cost>;

/// What is committed.
pub fn baseline() -> anyhow::Result<Costs> {
    let file = root().join("tests/cost.json");
    let text = fs::read_to_string(&file).with_context(|| format!("no {}", file.display()))?;
    Ok(serde_json::from_str(&text)?)
}

/// Fails with everything that costs more than the baseline says.
pub fn compare(costs: &Costs, baseline: &Costs) -> anyhow::Result<()> {
    let mut worse = Vec::new();
    for (name, cost) in costs {
        let Some(before) = baseline.get(name) else {
            worse.push(format!("{name} has no baseline"));
            continue;
        };
        for ((figure, now), (_, then)) in cost.figures().into_iter().zip(before.figures()) {
            if now > then * TOLERANCE + SLACK {
                worse.push(format!("{name}: {now:.4} {figure} per event instead of {then:.4}"));
            }
        }
    }
    ensure!(
        worse.is_empty(),
        "an event costs more than it did:\n  {}\nIf that is meant, tests/cost.json becomes\n{}",
        worse.join("\n  "),
        serde_json::to_string_pretty(costs)?
    );
    Ok(())
}

/// Measures a service between two moments.
struct Meter<'a> {
    stage: &'a Stage,
    service: &'a Service,
    pool: &'a PgPool,
    before: Reading,
}

#[derive(Clone, Copy)]
struct Reading {
    statements: f64,
    commits: f64,
    wal_bytes: f64,
    nats_in: f64,
    nats_out: f64,
}

impl<'a> Meter<'a> {
    async fn start(stage: &'a Stage, service: &'a Service) -> anyhow::Result<Self> {
        let pool = match service.plan.kind {
            Kind::Orders => &stage.world.orders,
            Kind::Fulfillment => &stage.world.fulfillment,
        };
        sqlx::query("create extension if not exists pg_stat_statements").execute(pool).await?;
        let before = read(stage, service, pool).await?;
        Ok(Self { stage, service, pool, before })
    }

    async fn stop(self, count: usize) -> anyhow::Result<Cost> {
        let now = read(self.stage, self.service, self.pool).await?;
        let each = |of: fn(Reading) -> f64| (of(now) - of(self.before)) / count as f64;
        Ok(Cost {
            statements: each(|reading| reading.statements),
            commits: each(|reading| reading.commits),
            wal_bytes: each(|reading| reading.wal_bytes),
            nats_in: each(|reading| reading.nats_in),
            nats_out: each(|reading| reading.nats_out),
        })
    }
}

async fn read(stage: &Stage, service: &Service, pool: &PgPool) -> anyhow::Result<Reading> {
    let (statements, commits, wal_bytes) = sqlx::query_as(
        "select (select coalesce(sum(calls), 0)::float8 from pg_stat_statements(true)
                 where userid = (select oid from pg_roles where rolname = current_database())),
                -- one id for each transaction that wrote
                pg_snapshot_xmax(pg_current_snapshot())::text::float8,
                pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8",
    )
    .fetch_one(pool)
    .await?;
    let url = stage.world.nats.monitor_url().context("the server is not ours")?;
    let connections = Api::new(url).get("/connz").await?.body;
    let ours = connections["connections"].as_array().context("no connections")?;
    let name = service.plan.kind.name();
    let ours = ours.iter().find(|c| c["name"].as_str().is_some_and(|n| n.starts_with(name)));
    let messages = |of: &str| ours.and_then(|c: &Value| c[of].as_f64()).unwrap_or_default();
    let (nats_in, nats_out) = (messages("in_msgs"), messages("out_msgs"));
    Ok(Reading { statements, commits, wal_bytes, nats_in, nats_out })
}

/// Everything.
pub async fn measure(stage: &Stage) -> anyhow::Result<Costs> {
    let mut costs = Costs::new();
    let service = stage.service(Kind::Orders).await?;
    costs.insert("relay".to_owned(), relay(stage, &service).await?);
    drop(service);
    // Without a broker the relay does nothing, and payments are taken all the same.
    let plan = stage.world.deployed_plan(Kind::Orders)?.with("NATS_URL", "nats://127.0.0.1:9");
    let service = plan.start().await?;
    costs.insert("confirm".to_owned(), confirm(stage, &service).await?);
    drop(service);
    // Nobody is called back: the dispatcher has its hands full.
    let carrier = Outside::start().await?;
    carrier.behave(|_| Reply::Hold);
    let settings = [("CARRIER_URL", carrier.url())];
    let service = stage.service_with(Kind::Fulfillment, &settings).await?;
    costs.insert("inbox".to_owned(), inbox(stage, &service).await?);
    Ok(costs)
}

async fn relay(stage: &Stage, service: &Service) -> anyhow::Result<Cost> {
    stage.hold_relay().await?;
    stage.fill_outbox(&events("cost", BACKLOG)).await?;
    let meter = Meter::start(stage, service).await?;
    stage.let_relay_go().await?;
    stage.drained().await?;
    meter.stop(BACKLOG).await
}

async fn confirm(stage: &Stage, service: &Service) -> anyhow::Result<Cost> {
    let api = Api::new(service.url());
    for n in 0..PAYMENTS {
        api.place(&format!("cost-{n}"), 1999).await?;
    }
    let meter = Meter::start(stage, service).await?;
    for n in 0..PAYMENTS {
        let answer = api.confirm(&format!("tx-{n}"), &format!("cost-{n}"), 1999).await?;
        ensure!(answer.status == 201, "{}", answer.body);
    }
    meter.stop(PAYMENTS).await
}

async fn inbox(stage: &Stage, service: &Service) -> anyhow::Result<Cost> {
    eventually("nothing is left", Duration::from_secs(30), async || {
        ensure!(stage.world.broker.consumer_backlog().await? == (0, 0), "something is");
        Ok(())
    })
    .await?;
    let gate = stage.gate().await?;
    publish_all(stage.js(), &events("inbox", BACKLOG)).await?;
    let meter = Meter::start(stage, service).await?;
    gate.commit().await?;
    stage.acked().await?;
    meter.stop(BACKLOG).await
}
