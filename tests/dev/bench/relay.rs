//! A backlog in the outbox until it is published and marked.

use e2e::{
    api::{Api, confirm_stubbornly},
    services::Kind,
    stage::{ALWAYS, DEFAULT, Event, Stage, events, publish, publish_all, rate},
};
use sqlx::PgPool;
use tokio::time::Instant;
use uuid::Uuid;

use super::{
    Scale,
    table::{Goal, Line},
};
use crate::{demo::AMOUNT, show::Timeline};

pub(super) async fn measure(scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for sync_interval in [DEFAULT, ALWAYS] {
        let _bar = show.wait("relay");
        let stage = Stage::start(sync_interval).await?;
        let service = stage.service(Kind::Orders).await?;
        drain(&stage, &service.url(), &events("before", scale.backlog / 5)).await?;
        stage.settle().await?;
        let ours = drain(&stage, &service.url(), &events("ours", scale.backlog)).await?;
        drop(service);
        let ceiling = raw(&stage).await?;
        let floor = textbook(&stage, &events("textbook", scale.textbook)).await?;
        // With a sync per message the disk decides, and no relay can be 25 times as fast.
        let deep = sync_interval == DEFAULT;
        let (half, many) =
            (Goal::AtLeast(0.5), if deep { Goal::AtLeast(25.0) } else { Goal::None });
        lines.push(
            Line::new(format!("relay, sync_interval {sync_interval}"), "events/s", ours)
                .beside("publishing the same, pipelined", ceiling, half)
                .beside("textbook: publish and mark one by one", floor, many),
        );
        stage.world.close().await?;
    }
    Ok(lines)
}

/// The rate of the relay of a service that finds this backlog.
pub(super) async fn drain(stage: &Stage, url: &str, events: &[Event]) -> anyhow::Result<f64> {
    let before = usize::try_from(stage.world.broker.count().await?)?;
    stage.hold_relay().await?;
    stage.fill_outbox(events).await?;
    let begun = Instant::now();
    stage.let_relay_go().await?;
    // A payment is what wakes a relay.
    confirm_stubbornly(&[Api::new(url.to_owned())], &Uuid::now_v7().to_string(), AMOUNT).await;
    stage.streamed(before + events.len() + 1).await?;
    stage.drained().await?;
    Ok(rate(events.len(), begun))
}

/// The ceiling: what the relay has just published, into the same stream, without a database, and as much
/// in flight as helps.
async fn raw(stage: &Stage) -> anyhow::Result<f64> {
    // Under ids that the stream does not know.
    let events: Vec<Event> = sqlx::query_as(
        r#"select gen_random_uuid() as id, aggregate_id as "order", payload::text as body from outbox
           where aggregate_id like 'ours-%' order by seq"#,
    )
    .fetch_all(&stage.world.orders)
    .await?;
    let begun = Instant::now();
    publish_all(stage.js(), &events).await?;
    Ok(rate(events.len(), begun))
}

/// The floor: whatever waits, one after another.
async fn textbook(stage: &Stage, events: &[Event]) -> anyhow::Result<f64> {
    stage.fill_outbox(events).await?;
    let begun = Instant::now();
    while pass(stage).await? > 0 {}
    Ok(rate(events.len(), begun))
}

/// Select a hundred, and for each publish, wait, mark. Returns how many there were.
pub(super) async fn pass(stage: &Stage) -> anyhow::Result<usize> {
    let pool: &PgPool = &stage.world.orders;
    let events: Vec<Event> = sqlx::query_as(
        r#"select event_id as id, aggregate_id as "order", payload::text as body from outbox
           where published_at is null order by seq limit 100"#,
    )
    .fetch_all(pool)
    .await?;
    for event in &events {
        let stream_seq = publish(stage.js(), event).await?;
        sqlx::query("update outbox set published_at = now(), stream_seq = $2 where event_id = $1")
            .bind(event.id)
            .bind(i64::try_from(stream_seq)?)
            .execute(pool)
            .await?;
    }
    Ok(events.len())
}
