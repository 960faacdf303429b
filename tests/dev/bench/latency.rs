//! From the commit of a payment to the commit of its dispatch, on the clock of the one PostgreSQL that
//! has both databases.

use std::{collections::HashMap, slice, sync::Mutex, time::Duration};

use anyhow::{Context as _, ensure};
use async_nats::jetstream::consumer::DeliverPolicy;
use e2e::{
    services::{Kind, Service},
    stage::{ALWAYS, DEFAULT, Stage, events, publish},
};
use futures_util::StreamExt as _;
use tokio::time::{Instant, interval, sleep};
use uuid::Uuid;

use super::{
    Scale,
    confirm::Load,
    inbox::{ack, durable, insert},
    relay::pass,
    table::{Goal, Line, percentile},
};
use crate::show::Timeline;

/// Replicas of each service, and payments a second.
const CASES: [(usize, u64); 3] = [(1, 100), (1, 500), (2, 100)];

pub(super) async fn measure(scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for sync_interval in [ALWAYS, DEFAULT] {
        let _bar = show.wait("latency");
        let stage = Stage::start(sync_interval).await?;
        let floor = floor(&stage, scale.textbook / 10).await?;
        while pass(&stage).await? > 0 {}
        let textbook = textbook(&stage, scale.textbook / 10).await?;
        for (replicas, per_second) in CASES {
            let services = pair(&stage, replicas).await?;
            warm_up(&stage, &services).await?;
            let times = under_load(&stage, &services, per_second, scale.seconds).await?;
            let what = format!(
                "latency, {replicas} + {replicas} services, {per_second}/s, sync_interval {sync_interval}"
            );
            let goals = if per_second == 100 {
                [Goal::AtMost(2.0), Goal::AtMost(5.0)]
            } else {
                [Goal::None; 2]
            };
            let shares =
                [("p50", 0.5, goals[0]), ("p99", 0.99, goals[1]), ("max", 1.0, Goal::None)];
            for (name, share, goal) in shares {
                lines.push(
                    Line::new(format!("{what}, {name}"), "ms", percentile(times.clone(), share))
                        .beside(
                            "the four steps one after another",
                            percentile(floor.clone(), 0.5),
                            goal,
                        )
                        .beside(
                            "textbook: a poll each 500 ms",
                            percentile(textbook.clone(), share),
                            Goal::None,
                        ),
                );
            }
        }
        stage.world.close().await?;
    }
    Ok(lines)
}

/// So many of each service, ready: of orders first.
pub(super) async fn pair(stage: &Stage, replicas: usize) -> anyhow::Result<Vec<Service>> {
    let mut services = Vec::new();
    for kind in [Kind::Orders, Kind::Fulfillment] {
        for _ in 0..replicas {
            services.push(stage.service(kind).await?);
        }
    }
    Ok(services)
}

/// A moment of load, so that connections are open and plans are those of tables that are in use.
pub(super) async fn warm_up(stage: &Stage, services: &[Service]) -> anyhow::Result<()> {
    under_load(stage, services, 200, 3).await?;
    stage.settle().await
}

/// The times in ms of payments that are confirmed at a steady rate.
pub(super) async fn under_load(
    stage: &Stage,
    services: &[Service],
    per_second: u64,
    seconds: u64,
) -> anyhow::Result<Vec<f64>> {
    let load = Load::place(stage, &Uuid::now_v7().to_string(), per_second * seconds).await?;
    let ports: Vec<u16> =
        services.iter().filter(|s| s.plan.kind == Kind::Orders).map(|s| s.plan.port).collect();
    load.open(&ports, per_second, Duration::from_secs(seconds)).await?;
    stage.drained().await?;
    stage.acked().await?;
    between_commits(stage, load.prefix()).await
}

/// What PostgreSQL remembers of its commits.
pub(super) async fn between_commits(stage: &Stage, prefix: &str) -> anyhow::Result<Vec<f64>> {
    let paid: Vec<(Uuid, f64)> = sqlx::query_as(
        "select event_id, extract(epoch from pg_xact_commit_timestamp(xmin))::float8 from payments
         where order_id like $1 || '%'",
    )
    .bind(prefix)
    .fetch_all(&stage.world.orders)
    .await?;
    let taken_in: Vec<(Uuid, f64)> = sqlx::query_as(
        "select event_id, extract(epoch from pg_xact_commit_timestamp(xmin))::float8
         from processed_events",
    )
    .fetch_all(&stage.world.fulfillment)
    .await?;
    let taken_in: HashMap<Uuid, f64> = taken_in.into_iter().collect();
    let time = |(event_id, paid): &(Uuid, f64)| Some((taken_in.get(event_id)? - paid) * 1000.0);
    let times: Option<Vec<f64>> = paid.iter().map(time).collect();
    let times = times.context("a payment has no dispatch")?;
    ensure!(!times.is_empty(), "no payment was confirmed");
    Ok(times)
}

/// The least it can take: a commit, a publish acknowledged, a delivery, and another commit.
async fn floor(stage: &Stage, count: usize) -> anyhow::Result<Vec<f64>> {
    let mut messages = durable(stage, "floor", DeliverPolicy::New).await?.messages().await?;
    let mut times = Vec::new();
    for event in events("floor", count) {
        let begun = Instant::now();
        stage.fill_outbox(slice::from_ref(&event)).await?;
        publish(stage.js(), &event).await?;
        messages.next().await.context("nothing was delivered")??;
        insert(&stage.world.fulfillment, slice::from_ref(&event)).await?;
        times.push(begun.elapsed().as_secs_f64() * 1000.0);
    }
    Ok(times)
}

/// A relay that looks each half second and publishes what it finds one by one, and a consumer with a
/// transaction for each message.
async fn textbook(stage: &Stage, count: usize) -> anyhow::Result<Vec<f64>> {
    let messages = durable(stage, "poll", DeliverPolicy::New).await?.messages().await?;
    let (events, committed) = (events("poll", count), Mutex::new(Vec::new()));
    let write = async {
        let mut ticks = interval(Duration::from_millis(10));
        for event in &events {
            ticks.tick().await;
            stage.fill_outbox(slice::from_ref(event)).await?;
            committed.lock().expect("nobody panics").push(Instant::now());
        }
        anyhow::Ok(())
    };
    let relay = async {
        loop {
            sleep(Duration::from_millis(500)).await;
            pass(stage).await?;
        }
    };
    let consume = async {
        let mut times = Vec::new();
        let mut messages = messages.take(count);
        while let Some(message) = messages.next().await {
            insert(&stage.world.fulfillment, &self::events("polled", 1)).await?;
            ack(&message?).await?;
            // They come in the order in which they were written.
            let written = committed.lock().expect("nobody panics")[times.len()];
            times.push(written.elapsed().as_secs_f64() * 1000.0);
        }
        anyhow::Ok(times)
    };
    tokio::select! {
        done = async { tokio::try_join!(write, consume) } => done.map(|((), times)| times),
        failed = relay => failed,
    }
}
