//! `cargo dev chaos`: real processes are killed, stopped, cut off and fed with rubbish while payments
//! are confirmed, the broker loses its data twice, and then the ledger is read.
//!
//! The schedule is drawn from the seed ([`schedule`]); the machine decides what each fault meets. A run
//! in which nothing was injected has proved nothing, and fails.

mod hands;
mod schedule;

use std::{
    fmt::Write as _,
    io::IsTerminal as _,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use e2e::{
    api::{Api, confirm_stubbornly},
    find::root,
    invariants::{self, Line, check},
    ledger::Ledger,
    nats_server::NatsServer,
    outside::{Outside, Reply},
    process::Footprint,
    proxy::Proxy,
    services::{Kind, Plan, Service, build},
    wait::eventually,
    world::World,
};
use fastrand::Rng;
use futures_util::{StreamExt as _, stream};
use tokio::time::{Instant, interval, sleep, sleep_until};

use self::{
    hands::{Injected, Letter},
    schedule::{Counts, Fault, MESSAGES, NETWORK, SERVICES},
};
use crate::{
    demo::{AMOUNT, SECRET},
    show::Timeline,
};

const ORDERS: usize = 2;
const FULFILLMENTS: usize = 3;
const CLIENTS: usize = 16;
const START_LIMIT: Duration = Duration::from_secs(60);
/// The longest way back to rest: an acknowledgement time, and a lease of the carrier's after it.
const QUIET_LIMIT: Duration = Duration::from_secs(90);

#[derive(Args)]
pub(crate) struct Options {
    /// Draws the schedule; a random one if none is given
    #[arg(long)]
    seed: Option<u64>,
    /// Payments to confirm
    #[arg(long, default_value_t = 5000)]
    orders: usize,
    /// How long payments are confirmed and faults injected
    #[arg(long, default_value_t = 55)]
    seconds: u64,
    /// Which faults, comma-separated; all but `cluster` if none is named
    #[arg(long, value_delimiter = ',')]
    faults: Vec<Fault>,
}

pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    build()?;
    let seed = options.seed.unwrap_or_else(|| fastrand::u16(..).into());
    let show = Timeline::new();
    show.line("seed", seed);
    let mut stage = Stage::start(&options).await?;
    show.line(
        "services",
        format_args!("{ORDERS} of orders-service, {FULFILLMENTS} of fulfillment-service, ready"),
    );
    let outcome = stage.run(&show, &options, seed).await;
    let lines = match &outcome {
        Ok(lines) => lines.as_slice(),
        Err(_) => &[],
    };
    println!();
    for Line { claim, found, holds } in lines {
        println!("{}  {claim}: {found}", if *holds { "ok    " } else { "BROKEN" });
    }
    let counts = stage.counts.lock().expect("no hand panics").to_string();
    println!("\nfaults: {counts}");
    let verdict = outcome.and_then(|lines| check(&lines));
    let total = stage.counts.lock().expect("no hand panics").total();
    println!(
        "verdict: seed {seed}, {} payments, {total} faults beside repeated confirmations, in {:.0?}: {}",
        options.orders,
        show.elapsed(),
        if verdict.is_ok() { "nothing lost, nothing doubled" } else { "FAILED" }
    );
    if verdict.is_err() {
        let folder = root().join(format!("target/chaos/seed-{seed}"));
        stage.keep(&folder).await?;
        println!("databases, stores and logs are in {}", folder.display());
        println!("again: {}", again(&options, seed));
    }
    verdict
}

/// The command that draws the same schedule.
fn again(options: &Options, seed: u64) -> String {
    let Options { orders, seconds, faults, .. } = options;
    let mut command =
        format!("cargo dev chaos --seed {seed} --orders {orders} --seconds {seconds}");
    if !faults.is_empty() {
        let names: Vec<String> = faults.iter().map(|fault| fault.name()).collect();
        write!(command, " --faults {}", names.join(",")).expect("a string takes everything");
    }
    command
}

struct Stage {
    world: World,
    /// The other nodes of a cluster.
    peers: Vec<NatsServer>,
    setups: [Plan; 2],
    services: Vec<Service>,
    /// What each service had when it was started last.
    footprints: Vec<Option<Footprint>>,
    apis: Vec<Api>,
    proxies: Vec<(&'static str, Proxy)>,
    carrier: Outside,
    receiver: Outside,
    counts: Mutex<Counts>,
    confirmed: AtomicUsize,
}

impl Stage {
    async fn start(options: &Options) -> anyhow::Result<Self> {
        let clustered = options.faults.contains(&Fault::Cluster);
        let mut nodes = if clustered {
            NatsServer::cluster().await?
        } else {
            vec![NatsServer::deployed(|config| config).await?]
        };
        let url = |user: &str| nodes.iter().map(|n| n.url_as(user)).collect::<Vec<_>>().join(",");
        let [operator, setup] = ["operator", "setup"].map(url);
        let direct = [Kind::Orders, Kind::Fulfillment].map(|kind| url(kind.user()));
        let peers = nodes.split_off(1);
        let world = World::deployed_on(nodes.remove(0), &operator).await?;
        let replicas = if clustered { "3" } else { "1" };
        let plan = |kind| {
            let plan = world.deployed_setup(kind)?;
            anyhow::Ok(plan.with("NATS_URL", &setup).with("NATS_REPLICAS", replicas))
        };
        let setups = [plan(Kind::Orders)?, plan(Kind::Fulfillment)?];
        set_up(&setups).await?;

        let (carrier, receiver) = (Outside::start().await?, Outside::start().await?);
        // Nobody is perfect.
        let moody = |call: &e2e::outside::Call| match call.number % 100 {
            33 => Reply::Fail(500, None),
            66 => Reply::HangUp,
            99 => Reply::Late(Duration::from_secs(1)),
            _ => Reply::Accept,
        };
        carrier.behave(moody);
        receiver.behave(moody);

        let mut stage = Self {
            world,
            peers,
            setups,
            services: Vec::new(),
            footprints: Vec::new(),
            apis: Vec::new(),
            proxies: Vec::new(),
            carrier,
            receiver,
            counts: Mutex::default(),
            confirmed: AtomicUsize::new(0),
        };
        for (kind, count, direct) in
            [(Kind::Orders, ORDERS, &direct[0]), (Kind::Fulfillment, FULFILLMENTS, &direct[1])]
        {
            let user = kind.user();
            let postgres = Proxy::start(stage.world.postgres().address().await?).await?;
            let database = format!("postgres://{user}:{user}@{}/{user}", postgres.address());
            stage.proxies.push(("PostgreSQL", postgres));
            let mut nats_url = direct.clone();
            if !clustered {
                let nats = Proxy::start(stage.world.nats.address()).await?;
                nats_url = format!("nats://{user}:{user}@{}", nats.address());
                stage.proxies.push(("NATS", nats));
            }
            for _ in 0..count {
                let mut plan = stage
                    .world
                    .deployed_plan(kind)?
                    .with("DATABASE_URL", &database)
                    .with("NATS_URL", &nats_url);
                plan = match kind {
                    Kind::Orders => plan.with("PAYMENT_WEBHOOK_SECRET", SECRET),
                    Kind::Fulfillment => plan
                        .with("CARRIER_URL", &stage.carrier.url())
                        .with("NOTIFY_URL", &format!("{}/notices", stage.receiver.url())),
                };
                let service = plan.start().await?;
                let api = Api::signing(service.url(), SECRET);
                eventually("it is ready", START_LIMIT, async || api.ready().await).await?;
                if kind == Kind::Orders {
                    stage.apis.push(api);
                }
                stage.footprints.push(service.footprint());
                stage.services.push(service);
            }
        }
        Ok(stage)
    }

    /// Everything at once, then rest, then the ledger.
    async fn run(
        &mut self,
        show: &Timeline,
        options: &Options,
        seed: u64,
    ) -> anyhow::Result<Vec<Line>> {
        let chosen =
            if options.faults.is_empty() { schedule::all() } else { options.faults.clone() };
        let length = Duration::from_secs(options.seconds);
        let until = Instant::now() + length;
        // Each hand has its own dice, so that the faults chosen for one do not change the others'.
        let dice = |hand: u64| Rng::with_seed(seed.wrapping_mul(4).wrapping_add(hand));
        let services = schedule::steps(&mut dice(0), &chosen, SERVICES, 200..1_500, length);
        let servers = schedule::server_steps(&mut dice(1), &chosen, length);
        let network = schedule::steps(&mut dice(2), &chosen, NETWORK, 500..3_000, length);
        let messages = schedule::steps(&mut dice(3), &chosen, MESSAGES, 100..1_500, length);

        let Self { world, peers, setups, services: processes, footprints, proxies, counts, .. } =
            self;
        let World { own_postgres, nats, broker, orders, fulfillment, .. } = world;
        let postgres = own_postgres.as_mut().context("the server is ours")?;
        let mut nodes: Vec<&mut NatsServer> =
            std::iter::once(nats).chain(peers.iter_mut()).collect();
        let injected = Injected { broker, orders, fulfillment };
        // The hands share them.
        let counts = &*counts;
        let count = |fault: Fault| counts.lock().expect("no hand panics").add(fault);
        let note = |fault: Fault, what: String| {
            count(fault);
            show.line("fault", format_args!("{}: {what}", fault.name()));
        };
        let (confirmed, apis) = (&self.confirmed, &self.apis);
        let twice = chosen.contains(&Fault::DuplicateConfirmation);
        let load = stream::iter(0..options.orders).for_each_concurrent(CLIENTS, async |n| {
            // Spread over the time, so that every fault meets some.
            sleep_until(until - length + length * n as u32 / options.orders as u32).await;
            let order = format!("A-{n}");
            if twice && n % 10 == 0 {
                let other = [apis[1].clone(), apis[0].clone()];
                tokio::join!(
                    confirm_stubbornly(apis, &order, AMOUNT),
                    confirm_stubbornly(&other, &order, AMOUNT)
                );
                count(Fault::DuplicateConfirmation);
            } else {
                confirm_stubbornly(apis, &order, AMOUNT).await;
            }
            confirmed.fetch_add(1, Relaxed);
        });
        let loaded = async {
            tokio::select! {
                () = load => {}
                () = progress(show, confirmed, options.orders) => {}
            }
            anyhow::Ok(())
        };
        let ((), (), (), (), mut letters) = tokio::try_join!(
            loaded,
            hands::on_services(&services, until, processes, footprints, &note),
            hands::on_servers(&servers, until, postgres, &mut nodes, setups, broker, &note),
            hands::on_network(&network, until, proxies, &note),
            injected.inject(&messages, until, &count),
        )?;
        show.line("load", format_args!("{} payments confirmed", confirmed.load(Relaxed)));

        let wait = show.wait("everything comes to rest");
        let rested = self.rest(&mut letters).await;
        drop(wait);
        let found =
            rested.as_ref().err().map_or("it does".to_owned(), |error| format!("{error:#}"));
        show.line("rest", &found);
        let mut lines = vec![Line::new("everything comes to rest", found, rested.is_ok())];
        lines.extend(self.lines(&letters, options.orders).await?);
        Ok(lines)
    }

    /// Waits for quiet by state. What was published past the outbox and lost by the broker is published
    /// again, as whoever does so would have to.
    async fn rest(&self, letters: &mut [Letter]) -> anyhow::Result<()> {
        let injected = Injected {
            broker: &self.world.broker,
            orders: &self.world.orders,
            fulfillment: &self.world.fulfillment,
        };
        eventually("everything comes to rest", QUIET_LIMIT, async || {
            // Reading a ledger costs the machine what the services need to come to rest.
            sleep(Duration::from_millis(500)).await;
            check(&invariants::settled(&self.world.ledger().await?))?;
            let lost = injected.publish_missing(letters).await?;
            ensure!(lost == 0, "{lost} messages published once more");
            Ok(())
        })
        .await
    }

    async fn lines(&self, letters: &[Letter], orders: usize) -> anyhow::Result<Vec<Line>> {
        let fulfillment = &self.world.fulfillment;
        let ledger = self.world.ledger().await?;
        let (confirmed, payments) = (self.confirmed.load(Relaxed), ledger.payments);
        let mut lines = vec![Line::new(
            "confirmations answered 2xx = payments",
            format!("{confirmed} = {payments}"),
            confirmed == payments && payments == orders,
        )];
        lines.extend(invariants::promise(&ledger));
        lines.push(self.effects("parcels", &self.carrier, &ledger));
        lines.push(self.effects("notices", &self.receiver, &ledger));
        lines.extend(invariants::settled(&ledger));
        lines.extend(hands::letters(letters, &self.world).await?);
        lines.push(hands::claimed_past_its_lease(fulfillment).await?);
        lines.push(hands::idle_in_transaction(fulfillment).await?);
        for service in [&self.services[0], &self.services[ORDERS]] {
            let audit = service.plan.command(&["outbox", "audit"]).await?;
            let found = audit.err.lines().find(|line| line.contains("published events"));
            let found = found.unwrap_or(&audit.err).trim().to_owned();
            let claim = format!("the stream of {} is whole", service.plan.kind.name());
            lines.push(Line::new(claim, found, audit.code == 0));
        }
        for (service, before) in self.services.iter().zip(&self.footprints) {
            if let (Some(before), Some(now)) = (before, service.footprint()) {
                let claim = format!("{} on port {}", service.plan.kind.name(), service.plan.port);
                lines.push(now.near(*before, &claim));
            }
        }
        let total = self.counts.lock().expect("no hand panics").total();
        lines.push(Line::new("something was injected", total.to_string(), total > 0));
        Ok(lines)
    }

    /// By key: each dispatch once, however often it was asked for.
    fn effects(&self, what: &str, outside: &Outside, ledger: &Ledger) -> Line {
        let (effects, calls) = (outside.effects().len(), outside.calls().len());
        Line::new(
            format!("dispatches = {what} by key"),
            format!("{} = {effects} ({calls} calls)", ledger.dispatches),
            effects == ledger.dispatches,
        )
    }

    async fn keep(&mut self, folder: &std::path::Path) -> anyhow::Result<()> {
        if folder.exists() {
            std::fs::remove_dir_all(folder)?;
        }
        for service in &mut self.services {
            if service.end("KILL").await.is_err() {
                println!("{} was gone already", service.plan.kind.name());
            }
        }
        self.world.keep(folder).await
    }
}

/// What every deployment begins with; again and again, until both servers are there.
async fn set_up(setups: &[Plan]) -> anyhow::Result<()> {
    for plan in setups {
        eventually("the set-up succeeds", START_LIMIT, async || {
            let code = plan.run("setup").await?;
            ensure!(code == 0, "exit code {code}, see {}", plan.log().display());
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// A bar on a terminal, a line now and then elsewhere; for ever.
async fn progress(show: &Timeline, confirmed: &AtomicUsize, total: usize) {
    let bar = show.bar("confirming payments", total);
    let terminal = std::io::stderr().is_terminal();
    let mut ticks = interval(Duration::from_millis(if terminal { 100 } else { 5_000 }));
    loop {
        ticks.tick().await;
        let now = confirmed.load(Relaxed);
        bar.set_position(now as u64);
        if !terminal && now > 0 {
            show.line("load", format_args!("{now} of {total} payments confirmed"));
        }
    }
}
