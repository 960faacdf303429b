//! What an event costs: the figures of the gate beside the committed baseline, and what they come to in
//! CPU and memory here.

use e2e::{
    cost,
    process::{cpu_seconds, peak_mebibytes},
    services::{Kind, Service},
    stage::{DEFAULT, Stage, events},
};

use super::{
    Scale, inbox, relay,
    table::{Goal, Line},
};
use crate::show::Timeline;

pub(super) async fn measure(scale: Scale, show: &Timeline) -> anyhow::Result<Vec<Line>> {
    let _bar = show.wait("cost");
    let stage = Stage::start(DEFAULT).await?;
    let baseline = cost::baseline()?;
    let mut lines = Vec::new();
    for (name, now) in cost::measure(&stage).await? {
        let Some(before) = baseline.get(&name) else { continue };
        for ((figure, now), (_, before)) in now.figures().into_iter().zip(before.figures()) {
            let line = Line::new(format!("cost, {name}, {figure}"), "per event", now);
            lines.push(if before == 0.0 {
                line
            } else {
                line.beside("the committed baseline", before, Goal::AtMost(cost::TOLERANCE))
            });
        }
    }
    let service = stage.service(Kind::Orders).await?;
    relay::drain(&stage, &service.url(), &events("before", scale.backlog / 5)).await?;
    stage.settle().await?;
    let before = Cpu::now(&stage, &service);
    relay::drain(&stage, &service.url(), &events("ours", scale.backlog)).await?;
    lines.extend(before.until_now("relay", &stage, &service, scale.backlog));
    drop(service);

    let service = stage.service_with(Kind::Fulfillment, &inbox::no_carrier()).await?;
    stage.acked().await?;
    stage.settle().await?;
    let gate = inbox::Gate::closed(&stage, &events("taken", scale.backlog)).await?;
    let before = Cpu::now(&stage, &service);
    gate.open(&stage).await?;
    lines.extend(before.until_now("inbox", &stage, &service, scale.backlog));
    drop(service);
    stage.world.close().await?;
    Ok(lines)
}

/// CPU seconds so far.
struct Cpu([(&'static str, f64); 3]);

impl Cpu {
    fn now(stage: &Stage, service: &Service) -> Self {
        let used = |pid: Option<u32>| pid.map_or(f64::NAN, cpu_seconds);
        Self([
            ("the service", used(service.pid())),
            ("PostgreSQL", used(stage.world.postgres().pid())),
            ("nats-server", used(stage.world.nats.pid())),
        ])
    }

    fn until_now(self, name: &str, stage: &Stage, service: &Service, count: usize) -> Vec<Line> {
        let now = Self::now(stage, service);
        let spent = self.0.into_iter().zip(now.0).map(|((who, before), (_, after))| {
            let each = (after - before) * 1e6 / count as f64;
            Line::new(format!("cost, {name}, CPU of {who}"), "us per event", each)
        });
        let memory = service.pid().and_then(peak_mebibytes).unwrap_or(f64::NAN);
        let memory = Line::new(format!("cost, {name}, most memory of the service"), "MiB", memory);
        spent.chain([memory]).collect()
    }
}
