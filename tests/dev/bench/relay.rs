//! A backlog in the outbox until it is published and marked.

use async_nats::jetstream;
use e2e::{
    api::{Api, confirm_stubbornly},
    contract::{ORDERS, PAYMENT_CONFIRMED},
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

/// A stream that takes this is not in the relay's way.
const RAW: &str = "raw.payment.confirmed";

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
        let ceiling = raw(&stage, &events("raw", scale.backlog)).await?;
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

/// The ceiling: no database, as many in flight as helps, into a stream of the same kind.
async fn raw(stage: &Stage, events: &[Event]) -> anyhow::Result<f64> {
    let like_ours = stage.stream(ORDERS).await?.cached_info().config.clone();
    let config = jetstream::stream::Config {
        name: "RAW".to_owned(),
        subjects: vec![RAW.to_owned()],
        ..like_ours
    };
    stage.js().create_stream(config).await?;
    let begun = Instant::now();
    publish_all(stage.js(), RAW, events).await?;
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
    let rows: Vec<(Uuid, String, String)> = sqlx::query_as(
        "select event_id, aggregate_id, payload::text from outbox
         where published_at is null order by seq limit 100",
    )
    .fetch_all(pool)
    .await?;
    let count = rows.len();
    for (id, order, body) in rows {
        let event = Event { id, order, body };
        let stream_seq = publish(stage.js(), PAYMENT_CONFIRMED, &event).await?;
        sqlx::query("update outbox set published_at = now(), stream_seq = $2 where event_id = $1")
            .bind(id)
            .bind(i64::try_from(stream_seq)?)
            .execute(pool)
            .await?;
    }
    Ok(count)
}
