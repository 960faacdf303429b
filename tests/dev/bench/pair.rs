//! Everything at once: confirmed as fast as sixteen clients can, published, taken in, dispatched; and
//! what retention costs beside that.

use std::time::Duration;

use anyhow::ensure;
use e2e::{
    services::Kind,
    stage::{ALWAYS, Stage, number, rate},
};
use tokio::time::Instant;

use super::{
    Scale,
    confirm::Load,
    latency,
    table::{Goal, Line, percentile},
};
use crate::show::Timeline;

const CLIENTS: usize = 16;

pub(super) async fn measure(scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let _bar = show.wait("pair");
    let stage = Stage::start(ALWAYS).await?;
    let services = latency::pair(&stage, 1).await?;
    latency::warm_up(&stage, &services).await?;
    let length = Duration::from_secs(scale.seconds);
    let load = Load::place(&stage, "pair", 10_000 * scale.seconds).await?;
    let begun = Instant::now();
    let confirmed = load.closed(services[0].plan.port, CLIENTS, length).await?.len();
    stage.drained().await?;
    stage.acked().await?;
    let pair = rate(confirmed, begun);

    let half = pair as u64 / 2;
    stage.settle().await?;
    let without = under_load(&stage, services[0].plan.port, half, scale).await?;
    drop(services);
    age(&stage, scale.growing[2]).await?;
    // They look for old rows when they start.
    let services = latency::pair(&stage, 1).await?;
    latency::warm_up(&stage, &services).await?;
    let with = under_load(&stage, services[0].plan.port, half, scale).await?;
    let left =
        number(&stage.world.orders, "select count(*) from outbox where aggregate_id like 'old-%'");
    let deleted = scale.growing[2] as f64 - left.await? as f64;
    ensure!(deleted > 0.0, "nothing was deleted");
    show.line("pair", format_args!("{deleted} rows deleted at {half} payments a second"));
    drop(services);

    // The slowest of the three stages by far.
    let service = stage.service(Kind::Orders).await?;
    stage.hold_relay().await?;
    let load = Load::place(&stage, "alone", 10_000 * scale.seconds).await?;
    let begun = Instant::now();
    let confirmed = load.closed(service.plan.port, CLIENTS, length).await?.len();
    let alone = rate(confirmed, begun);
    drop(service);
    stage.world.close().await?;
    let beside = |what: &str, with: f64, without: f64| {
        Line::new(format!("{what} at half load, old rows deleted, p99"), "ms", with).beside(
            "without",
            without,
            Goal::AtMost(1.5),
        )
    };
    Ok(vec![
        Line::new("pair, confirmed and taken in", "payments/s", pair).beside(
            "confirmed only, nothing else at work",
            alone,
            Goal::None,
        ),
        beside("confirm", with.0, without.0),
        beside("latency", with.1, without.1),
    ])
}

/// The 99th percentiles in ms of confirmations, and from commit to commit.
async fn under_load(
    stage: &Stage,
    port: u16,
    per_second: u64,
    scale: Scale,
) -> anyhow::Result<(f64, f64)> {
    let seconds = 2 * scale.seconds;
    let prefix = uuid::Uuid::now_v7().to_string();
    let load = Load::place(stage, &prefix, per_second * seconds).await?;
    let times = load.open(&[port], per_second, Duration::from_secs(seconds)).await?;
    stage.drained().await?;
    stage.acked().await?;
    let between = latency::between_commits(stage, &prefix).await?;
    Ok((percentile(times, 0.99), percentile(between, 0.99)))
}

/// Rows that have served their time, in both outboxes and the inbox.
async fn age(stage: &Stage, count: usize) -> anyhow::Result<()> {
    let count = i64::try_from(count)?;
    for pool in [&stage.world.orders, &stage.world.fulfillment] {
        sqlx::query(
            "insert into outbox (event_id, aggregate_id, subject, payload, published_at, stream_seq)
             select gen_random_uuid(), 'old-' || n, 'x', '{}', now() - interval '40 days', n
             from generate_series(1, $1) as n",
        )
        .bind(count)
        .execute(pool)
        .await?;
    }
    sqlx::query(
        "insert into processed_events (consumer, event_id, processed_at)
         select 'fulfillment', gen_random_uuid(), now() - interval '40 days'
         from generate_series(1, $1)",
    )
    .bind(count)
    .execute(&stage.world.fulfillment)
    .await?;
    stage.settle().await
}
