//! The hands that inject the faults, all at the same time; and what to ask about them afterwards.

use std::{collections::HashMap, path::PathBuf};

use anyhow::{Context as _, ensure};
use e2e::{
    broker::Broker,
    contract::{FULFILLMENT, ORDERS},
    invariants::Line,
    nats_server::NatsServer,
    postgres::Postgres,
    process::Footprint,
    proxy::{Flow, Proxy},
    services::{Plan, Service},
    wait::eventually,
    world::World,
};
use serde_json::Value;
use sqlx::PgPool;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    START_LIMIT,
    schedule::{Fault, Step},
    set_up,
};

/// Waits before a step. False when the time for faults is over.
async fn before(step: &Step, until: Instant) -> bool {
    sleep(step.pause).await;
    Instant::now() < until
}

pub(crate) async fn on_services(
    steps: &[Step],
    until: Instant,
    services: &mut [Service],
    footprints: &mut [Option<Footprint>],
    note: &impl Fn(Fault, String),
) -> anyhow::Result<()> {
    for step in steps {
        if !before(step, until).await {
            break;
        }
        let place = step.target % services.len();
        let service = &mut services[place];
        let who = format!("{} on port {}", service.plan.kind.name(), service.plan.port);
        if step.fault == Fault::Stop {
            service.signal("STOP")?;
            sleep(step.lasts).await;
            service.signal("CONT")?;
            note(step.fault, format!("{who} for {:?}", step.lasts));
        } else {
            service.end("KILL").await?;
            sleep(step.lasts).await;
            service.start_again().await?;
            footprints[place] = service.footprint();
            note(step.fault, who);
        }
    }
    Ok(())
}

pub(crate) async fn on_servers(
    steps: &[Step],
    until: Instant,
    postgres: &mut Postgres,
    nodes: &mut [&mut NatsServer],
    setups: &[Plan],
    broker: &Broker,
    note: &impl Fn(Fault, String),
) -> anyhow::Result<()> {
    // Of the broker's store, taken the first time it is stopped in order.
    let mut copy: Option<PathBuf> = None;
    for step in steps {
        if !before(step, until).await {
            break;
        }
        let lasts = step.lasts;
        let mut what = format!("away for {lasts:?}");
        match step.fault {
            Fault::Postgres => {
                postgres.stop("QUIT").await?;
                sleep(lasts).await;
                postgres.start_again().await?;
            }
            Fault::Sessions => {
                let ended = postgres.terminate_sessions(1 + step.target % 8).await?;
                what = format!("{ended} terminated");
            }
            Fault::NatsStop => {
                let node = &nodes[step.target % nodes.len()];
                node.signal("STOP")?;
                sleep(lasts).await;
                node.signal("CONT")?;
            }
            Fault::Cluster => {
                let stream = [ORDERS, FULFILLMENT][step.target % 2];
                let leader = leader(broker, stream).await?;
                let node = &mut nodes[leader];
                node.stop("KILL").await?;
                sleep(lasts).await;
                node.start_again().await?;
                complete(broker).await?;
                what = format!("the leader of {stream}, {what}");
            }
            fault => {
                let node = &mut nodes[step.target % nodes.len()];
                node.stop(if fault == Fault::NatsTerm { "TERM" } else { "KILL" }).await?;
                match fault {
                    Fault::NatsTerm if copy.is_none() => copy = Some(node.copy_store()?),
                    Fault::SetBack => {
                        node.replace_store(Some(copy.as_ref().context("no copy was taken")?))?;
                    }
                    Fault::Empty => node.replace_store(None)?,
                    _ => {}
                }
                sleep(lasts).await;
                node.start_again().await?;
                if fault == Fault::Empty {
                    set_up(setups).await?;
                }
            }
        }
        note(step.fault, what);
    }
    Ok(())
}

/// The place of the node that leads a stream, as soon as one does.
async fn leader(broker: &Broker, stream: &str) -> anyhow::Result<usize> {
    eventually("the stream has a leader", START_LIMIT, async || {
        let stream = broker.js.get_stream(stream).await?;
        let leader = stream.cached_info().cluster.as_ref().and_then(|c| c.leader.as_deref());
        let number = leader.and_then(|name| name.strip_prefix("node-")).context("no leader")?;
        Ok(number.parse()?)
    })
    .await
}

/// Waits until every node has everything again: with two of three away nothing is acknowledged.
async fn complete(broker: &Broker) -> anyhow::Result<()> {
    eventually("all copies are complete", START_LIMIT, async || {
        for stream in [ORDERS, FULFILLMENT] {
            let stream = broker.js.get_stream(stream).await?;
            let cluster = stream.cached_info().cluster.as_ref().context("no cluster")?;
            let complete = cluster.replicas.iter().filter(|r| r.current && !r.offline).count();
            ensure!(complete == 2, "{complete} of 2 followers");
        }
        Ok(())
    })
    .await
}

pub(crate) async fn on_network(
    steps: &[Step],
    until: Instant,
    proxies: &[(&'static str, Proxy)],
    note: &impl Fn(Fault, String),
) -> anyhow::Result<()> {
    for step in steps {
        if !before(step, until).await {
            break;
        }
        let place = step.target % proxies.len();
        let (server, proxy) = &proxies[place];
        proxy.set(match step.fault {
            Fault::Cut => Flow::Cut,
            Fault::BlackHole => Flow::BlackHole,
            Fault::Delay => Flow::Slow,
            _ => Flow::HalfClosed,
        });
        sleep(step.lasts).await;
        proxy.set(Flow::Open);
        let service = if place < proxies.len() / 2 { "orders" } else { "fulfillment" };
        note(step.fault, format!("between {service} and {server} for {:?}", step.lasts));
    }
    Ok(())
}

/// A message that was published past the outbox and belongs into the dead letters.
#[derive(Debug)]
pub(crate) struct Letter {
    body: Vec<u8>,
    reason: &'static str,
}

/// Publishes what nobody should.
pub(crate) struct Injected<'a> {
    pub(crate) broker: &'a Broker,
    pub(crate) orders: &'a PgPool,
    pub(crate) fulfillment: &'a PgPool,
}

impl Injected<'_> {
    /// Returns what has to end in the dead letters.
    pub(crate) async fn inject(
        &self,
        steps: &[Step],
        until: Instant,
        count: &impl Fn(Fault),
    ) -> anyhow::Result<Vec<Letter>> {
        let mut letters = Vec::new();
        for (n, step) in steps.iter().enumerate() {
            if !before(step, until).await {
                break;
            }
            // Servers may be away just now, or nothing be dispatched yet: then not this one.
            let Ok(body) = self.message(step.fault, n).await else { continue };
            let reason = match step.fault {
                Fault::Conflict => Some("transaction_conflict"),
                Fault::Garbage => Some("undecodable"),
                _ => None,
            };
            // Whether the broker has it is not known when it does not answer; it will be looked for.
            let published = self.broker.publish(&body, None).await;
            letters.extend(reason.map(|reason| Letter { body, reason }));
            if published.is_ok() || reason.is_some() {
                count(step.fault);
            }
        }
        Ok(letters)
    }

    async fn message(&self, fault: Fault, n: usize) -> anyhow::Result<Vec<u8>> {
        if fault == Fault::Garbage {
            return Ok([format!("garbage {n} ").as_bytes(), &[0xff, 0x00]].concat());
        }
        // Only of a payment that was dispatched: it is not the forgery that comes first.
        let order: String =
            sqlx::query_scalar("select order_id from dispatches order by random() limit 1")
                .fetch_one(self.fulfillment)
                .await?;
        let mut event: Value =
            sqlx::query_scalar("select payload from outbox where aggregate_id = $1")
                .bind(order)
                .fetch_one(self.orders)
                .await?;
        if fault != Fault::DuplicateEvent {
            event["id"] = Uuid::now_v7().to_string().into();
        }
        if fault == Fault::Conflict {
            let amount = event["data"]["amountMinor"].as_i64().unwrap_or_default();
            event["data"]["amountMinor"] = (amount + 1).into();
        }
        Ok(serde_json::to_vec(&event)?)
    }

    /// Publishes again what did not arrive, and returns how many that were.
    pub(crate) async fn publish_missing(&self, letters: &[Letter]) -> anyhow::Result<usize> {
        let kept: HashMap<Vec<u8>, String> =
            sqlx::query_as("select body, reason from dead_letters")
                .fetch_all(self.fulfillment)
                .await?
                .into_iter()
                .collect();
        let mut missing = 0;
        for letter in letters.iter().filter(|letter| !kept.contains_key(&letter.body)) {
            self.broker.publish(&letter.body, None).await?;
            missing += 1;
        }
        Ok(missing)
    }
}

/// The dead letters are what was injected, with the right reasons, and nothing else.
pub(crate) async fn letters(letters: &[Letter], world: &World) -> anyhow::Result<Vec<Line>> {
    let kept: Vec<(Vec<u8>, String, String)> =
        sqlx::query_as("select body, reason, error from dead_letters")
            .fetch_all(&world.fulfillment)
            .await?;
    let wanted: HashMap<&[u8], &str> =
        letters.iter().map(|letter| (letter.body.as_slice(), letter.reason)).collect();
    let wrong: Vec<String> = kept
        .iter()
        .filter(|(body, reason, _)| wanted.get(body.as_slice()) != Some(&reason.as_str()))
        .map(|(_, reason, error)| format!("{reason} ({error})"))
        .collect();
    let found: HashMap<&[u8], &str> =
        kept.iter().map(|(body, reason, _)| (body.as_slice(), reason.as_str())).collect();
    let of_orders: Vec<String> =
        sqlx::query_scalar("select reason || ' (' || error || ')' from dead_letters")
            .fetch_all(&world.orders)
            .await?;
    let count = |reason| wanted.values().filter(|wanted| **wanted == reason).count();
    Ok(vec![
        Line::new(
            "dead letters = garbage + conflicts injected, each with its reason",
            format!(
                "{} = {} + {}",
                found.len(),
                count("undecodable"),
                count("transaction_conflict")
            ),
            found == wanted,
        ),
        Line::none("other dead letters of fulfillment-service", &wrong),
        Line::none("dead letters of orders-service", &of_orders),
    ])
}

pub(crate) async fn claimed_past_its_lease(fulfillment: &PgPool) -> anyhow::Result<Line> {
    let claimed: i64 = sqlx::query_scalar(
        "select count(*) from dispatches where status = 'requested' and attempts > 0 and due_at < now()",
    )
    .fetch_one(fulfillment)
    .await?;
    Ok(Line::new("no dispatch is claimed past its lease", claimed.to_string(), claimed == 0))
}

/// On the whole server: both databases.
pub(crate) async fn idle_in_transaction(pool: &PgPool) -> anyhow::Result<Line> {
    let sessions: Vec<String> = sqlx::query_scalar(
        "select application_name || ': ' || query from pg_stat_activity
         where state like 'idle in transaction%' and state_change < now() - interval '1 second'",
    )
    .fetch_all(pool)
    .await?;
    Ok(Line::none("sessions idle in a transaction", &sessions))
}
