//! The relay and the inbox with more that waits, more that is kept, and more replicas.

use e2e::{
    process::peak_mebibytes,
    services::{Kind, Service},
    stage::{DEFAULT, Stage, events},
};

use super::{
    Scale, inbox, relay,
    table::{Goal, Line, median},
};
use crate::show::Timeline;

/// A small backlog is gone before a clock can tell, so it is measured more than once.
const REPETITIONS: usize = 10;
const MORE_REPLICAS: [usize; 2] = [2, 4];
/// Of memory, between the smallest and the largest backlog.
const FLAT: f64 = 20.0;

#[derive(Clone, Copy)]
enum Side {
    Relay,
    Inbox,
}

pub(super) async fn measure(scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for side in [Side::Relay, Side::Inbox] {
        lines.extend(grow(side, scale, show).await?);
    }
    Ok(lines)
}

async fn grow(side: Side, scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let (name, kind) = match side {
        Side::Relay => ("relay", Kind::Orders),
        Side::Inbox => ("inbox", Kind::Fulfillment),
    };
    // orders-service does not ask for it.
    let settings = &inbox::no_carrier();
    let stage = Stage::start(DEFAULT).await?;
    let mut services = vec![stage.service_with(kind, settings).await?];
    let [few, many, most] = scale.growing;
    // Connections and plans, as after a while.
    drain(side, &stage, &services, many / 10).await?;
    stage.settle().await?;
    let at_few = drain(side, &stage, &services, few).await?;
    let memory_at_few = peak(&services[0]);

    let mut lines = Vec::new();
    let mut line = |what: String, rate: f64| {
        show.line("growth", format_args!("{name}, {what}: {rate:.0}/s"));
        lines.push(Line::new(format!("growth, {name}, {what}"), "events/s", rate).beside(
            "itself with the least",
            at_few,
            Goal::AtLeast(0.8),
        ));
    };
    line(format!("{many} pending"), drain(side, &stage, &services, many).await?);
    line(format!("{most} pending"), drain(side, &stage, &services, most).await?);
    let memory =
        Line::new(format!("growth, {name}, memory after {most}"), "MiB", peak(&services[0]))
            .beside(
                "after the least",
                memory_at_few,
                Goal::AtMost((memory_at_few + FLAT) / memory_at_few),
            );
    // Kept, and no longer just handled: what vacuum has not seen yet is read over and over.
    stage.settle().await?;
    let kept = format!("{few} pending, {} kept", most + many);
    line(kept, drain(side, &stage, &services, few).await?);
    line(format!("{many} pending, as many kept"), drain(side, &stage, &services, many).await?);
    for replicas in MORE_REPLICAS {
        while services.len() < replicas {
            services.push(stage.service_with(kind, settings).await?);
        }
        let rate = drain(side, &stage, &services, many).await?;
        line(format!("{many} pending, {replicas} replicas"), rate);
    }
    lines.push(memory);
    drop(services);
    stage.world.close().await?;
    Ok(lines)
}

/// The rate at which a backlog is worked off.
async fn drain(
    side: Side,
    stage: &Stage,
    services: &[Service],
    count: usize,
) -> anyhow::Result<f64> {
    let mut rates = Vec::new();
    for _ in 0..if count < 10_000 { REPETITIONS } else { 1 } {
        let events = events(&uuid::Uuid::now_v7().to_string(), count);
        rates.push(match side {
            Side::Relay => relay::drain(stage, &services[0].url(), &events).await?,
            Side::Inbox => inbox::take_in(stage, &events).await?,
        });
    }
    Ok(median(rates.into_iter()))
}

fn peak(service: &Service) -> f64 {
    service.pid().and_then(peak_mebibytes).unwrap_or(f64::NAN)
}
