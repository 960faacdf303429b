//! `cargo dev up`: the pair, running, until Ctrl-C.

use std::{fmt::Write as _, fs, path::Path, time::Duration};

use anyhow::Context as _;
use e2e::{
    process::free_port_or,
    services::{Kind, Service, build},
    world::World,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};

pub(crate) async fn run(env_file: &Path) -> anyhow::Result<()> {
    build()?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut world = World::bare().await?;
    let mut services = Vec::new();
    let given = |names: &[&'static str]| -> Vec<(&'static str, String)> {
        names.iter().filter_map(|name| Some((*name, std::env::var(name).ok()?))).collect()
    };
    let (secret, outside) =
        (given(&["PAYMENT_WEBHOOK_SECRET"]), given(&["CARRIER_URL", "NOTIFY_URL"]));
    for (kind, port) in [(Kind::Orders, 8080), (Kind::Fulfillment, 8081)] {
        let mut plan = world.plan(kind)?;
        let settings = match kind {
            Kind::Orders => &secret,
            Kind::Fulfillment => &outside,
        };
        plan = settings.iter().fold(plan, |plan, (name, value)| plan.with(name, value));
        plan.port = free_port_or(port)?;
        anyhow::ensure!(
            plan.run("setup").await? == 0,
            "setup failed, see {}",
            plan.log().display()
        );
        services.push(plan.start().await?);
    }
    publish(env_file, &world, &services)?;
    println!(
        "orders-service       {}   (PUT /orders/ID, GET /orders/ID, POST /payments)",
        services[0].url()
    );
    println!("fulfillment-service  {}   (GET /readyz)", services[1].url());
    if outside.is_empty() {
        println!("outside              a carrier in a sandbox; notices are logged");
    }
    match secret.first() {
        Some((name, _)) => println!("confirmations        must be signed with {name}"),
        None => {
            println!("confirmations        need no signature; PAYMENT_WEBHOOK_SECRET is not set")
        }
    }
    for (name, _) in &outside {
        println!("outside              as given in {name}");
    }
    println!(
        "nats-server          {}",
        world.nats.monitor_url().unwrap_or_else(|| "as given".to_owned())
    );
    for service in &services {
        println!("log                  {}", service.plan.log().display());
    }
    println!("addresses and process ids are in {}; Ctrl-C ends everything", env_file.display());

    let mut look = interval(Duration::from_millis(200));
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = look.tick() => {}
        }
        if revive(&mut world, &mut services).await? {
            publish(env_file, &world, &services)?;
        }
    }
    println!("stopping");
    for service in &mut services {
        if !service.ended() {
            service.end("TERM").await?;
        }
    }
    fs::remove_file(env_file).context("cannot remove the file of addresses")?;
    world.close().await
}

/// Starts again what has died. True when something had.
async fn revive(world: &mut World, services: &mut [Service]) -> anyhow::Result<bool> {
    let mut revived = false;
    if let Some(postgres) = &mut world.own_postgres
        && postgres.ended()
    {
        println!("PostgreSQL died, starting it again");
        postgres.start_again().await?;
        revived = true;
    }
    if world.nats.ended() {
        println!("nats-server died, starting it again");
        world.nats.start_again().await?;
        revived = true;
    }
    for service in services {
        if service.ended() {
            println!("{} died, starting it again", service.plan.kind.name());
            service.start_again().await?;
            revived = true;
        }
    }
    Ok(revived)
}

/// Writes the file that scripts read. Through a rename, so nobody reads half of it.
fn publish(file: &Path, world: &World, services: &[Service]) -> anyhow::Result<()> {
    let mut text = String::new();
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            writeln!(text, "{name}={value}").expect("a string takes everything");
        }
    };
    line("ORDERS_HTTP", Some(services[0].url()));
    line("FULFILLMENT_HTTP", Some(services[1].url()));
    line("ORDERS_DATABASE_URL", Some(world.database_url(Kind::Orders)));
    line("FULFILLMENT_DATABASE_URL", Some(world.database_url(Kind::Fulfillment)));
    line("NATS_URL", Some(world.nats.url()));
    line("NATS_MONITOR_URL", world.nats.monitor_url());
    let pid = |pid: Option<u32>| pid.map(|pid| pid.to_string());
    line("ORDERS_PID", pid(services[0].pid()));
    line("FULFILLMENT_PID", pid(services[1].pid()));
    line("POSTGRES_PID", pid(world.own_postgres.as_ref().and_then(e2e::postgres::Postgres::pid)));
    line("NATS_PID", pid(world.nats.pid()));
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = file.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, file).with_context(|| format!("cannot write {}", file.display()))
}
