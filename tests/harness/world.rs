//! A world of its own for each test: two databases, a broker, and whatever runs between them.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, ensure};
use sqlx::{
    ConnectOptions as _, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tempfile::TempDir;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::{
    broker::Broker,
    contract::{FULFILLMENT, NOTICES, ORDERS},
    invariants::{self, check},
    ledger::Ledger,
    nats_server::{NatsServer, copy_folder},
    postgres::Postgres,
    process::tail,
    proxy::Proxy,
    services::{Kind, Plan, Service},
    wait::eventually,
};

/// The server most tests share; each has databases of its own in it.
static SHARED: OnceCell<Arc<Postgres>> = OnceCell::const_new();

/// Servers, two databases, and what runs between them. Dropping it ends everything of ours.
#[derive(Debug)]
pub struct World {
    /// Present when the world has a server of its own, which it may stop.
    pub own_postgres: Option<Postgres>,
    shared_postgres: Option<Arc<Postgres>>,
    pub nats: NatsServer,
    pub broker: Broker,
    /// Connections of the test's own.
    pub orders: PgPool,
    pub fulfillment: PgPool,
    orders_name: String,
    fulfillment_name: String,
    folder: TempDir,
}

impl World {
    /// A world for one test: databases of its own on a shared PostgreSQL, a broker of its own, and
    /// both as `setup` leaves them.
    pub async fn new() -> anyhow::Result<Self> {
        let postgres = SHARED
            .get_or_try_init(async || anyhow::Ok(Arc::new(Postgres::given_or_started().await?)))
            .await?;
        let world =
            Self::build(None, Some(Arc::clone(postgres)), NatsServer::start().await?).await?;
        world.set_up().await
    }

    /// The same, with a PostgreSQL that the test may stop.
    pub async fn with_own_postgres() -> anyhow::Result<Self> {
        let world =
            Self::build(Some(Postgres::start().await?), None, NatsServer::start().await?).await?;
        world.set_up().await
    }

    /// A world as a deployment finds it: servers, which may be given, and empty databases.
    pub async fn bare() -> anyhow::Result<Self> {
        let postgres = Postgres::given_or_started().await?;
        let nats = NatsServer::given_or_started().await?;
        // Before anything is created on a server that is not ours.
        ensure!(
            Broker::connect(&nats.url()).await?.stream().await.is_err(),
            "the server of NATS_URL has a stream ORDERS already; this needs one without"
        );
        Self::build(Some(postgres), None, nats).await
    }

    /// A world with the roles, users and permissions of `deploy/`, set up by those who may.
    pub async fn deployed() -> anyhow::Result<Self> {
        let nats = NatsServer::deployed(|config| config).await?;
        let url = nats.url_as("operator");
        let world = Self::deployed_on(nats, &url).await?;
        world.run_deployed_setup().await?;
        Ok(world)
    }

    /// The same with a given broker, and before its set-up. The operator reaches it at `url`.
    pub async fn deployed_on(nats: NatsServer, url: &str) -> anyhow::Result<Self> {
        let postgres = Postgres::deployed().await?;
        let broker = Broker::connect(url).await?;
        let names = ["orders", "fulfillment"].map(str::to_owned);
        Self::assemble(Some(postgres), None, nats, broker, names)
    }

    /// The same, to be measured: servers that keep what they acknowledge over a power failure, with
    /// the given `sync_interval` of nats-server.
    pub async fn measured(sync_interval: &str) -> anyhow::Result<Self> {
        let here = format!("sync_interval: {sync_interval}");
        let nats = NatsServer::deployed(|config| config.replace("sync_interval: always", &here));
        let nats = nats.await?;
        let broker = Broker::connect(&nats.url_as("operator")).await?;
        let names = ["orders", "fulfillment"].map(str::to_owned);
        let world = Self::assemble(Some(Postgres::measured().await?), None, nats, broker, names)?;
        world.run_deployed_setup().await?;
        Ok(world)
    }

    /// Has both services set up a world like that.
    pub async fn run_deployed_setup(&self) -> anyhow::Result<()> {
        for kind in [Kind::Orders, Kind::Fulfillment] {
            let plan = self.deployed_setup(kind)?;
            ensure!(plan.run("setup").await? == 0, "setup failed: {}", tail(&plan.log()));
        }
        Ok(())
    }

    /// How to run a service in a world like that: as itself.
    pub fn deployed_plan(&self, kind: Kind) -> anyhow::Result<Plan> {
        let user = kind.user();
        let database = self.postgres().url_as(user, user);
        Plan::new(kind, &database, &self.nats.url_as(user), self.folder.path())
    }

    /// How to set it up.
    pub fn deployed_setup(&self, kind: Kind) -> anyhow::Result<Plan> {
        let database = self.postgres().url_as(&format!("{}_setup", kind.user()), kind.user());
        Plan::new(kind, &database, &self.nats.url_as("setup"), self.folder.path())
    }

    async fn build(
        own_postgres: Option<Postgres>,
        shared_postgres: Option<Arc<Postgres>>,
        nats: NatsServer,
    ) -> anyhow::Result<Self> {
        let postgres =
            own_postgres.as_ref().or(shared_postgres.as_deref()).context("a server is needed")?;
        let broker = Broker::connect(&nats.url()).await?;
        let id = Uuid::now_v7().simple();
        let names = [format!("orders_{id}"), format!("fulfillment_{id}")];
        for name in &names {
            postgres.create_database(name).await?;
        }
        Self::assemble(own_postgres, shared_postgres, nats, broker, names)
    }

    fn assemble(
        own_postgres: Option<Postgres>,
        shared_postgres: Option<Arc<Postgres>>,
        nats: NatsServer,
        broker: Broker,
        [orders_name, fulfillment_name]: [String; 2],
    ) -> anyhow::Result<Self> {
        let postgres =
            own_postgres.as_ref().or(shared_postgres.as_deref()).context("a server is needed")?;
        let pool =
            |name: &str| PgPoolOptions::new().max_connections(10).connect_lazy(&postgres.url(name));
        let (orders, fulfillment) = (pool(&orders_name)?, pool(&fulfillment_name)?);
        let temporary = std::env::temp_dir();
        let folder = tempfile::Builder::new()
            .prefix("outbox-pair-logs-")
            .tempdir_in(nats.folder().unwrap_or(&temporary))?;
        Ok(Self {
            own_postgres,
            shared_postgres,
            nats,
            broker,
            orders,
            fulfillment,
            orders_name,
            fulfillment_name,
            folder,
        })
    }

    async fn set_up(self) -> anyhow::Result<Self> {
        self.run_setup().await?;
        Ok(self)
    }

    /// Has both services migrate their databases and upsert the topology, as each deployment does.
    pub async fn run_setup(&self) -> anyhow::Result<()> {
        let plans = [self.plan(Kind::Orders)?, self.plan(Kind::Fulfillment)?];
        let (orders, fulfillment) = tokio::try_join!(plans[0].run("setup"), plans[1].run("setup"))?;
        for (code, plan) in [orders, fulfillment].iter().zip(&plans) {
            ensure!(*code == 0, "setup failed: {}", tail(&plan.log()));
        }
        Ok(())
    }

    /// Ends everything, waits for it, and takes what was added to given servers away again.
    pub async fn close(mut self) -> anyhow::Result<()> {
        self.orders.close().await;
        self.fulfillment.close().await;
        if self.nats.is_ours() {
            self.nats.stop("KILL").await?;
        } else {
            // Whatever `setup` came to create.
            for stream in [ORDERS, FULFILLMENT, &format!("KV_{NOTICES}")] {
                if self.broker.js.get_stream(stream).await.is_ok() {
                    self.broker.js.delete_stream(stream).await?;
                }
            }
        }
        match &mut self.own_postgres {
            Some(postgres) if postgres.is_ours() => postgres.stop("QUIT").await,
            _ => self.drop_databases().await,
        }
    }

    async fn drop_databases(&self) -> anyhow::Result<()> {
        for name in [&self.orders_name, &self.fulfillment_name] {
            self.postgres().drop_database(name).await?;
        }
        Ok(())
    }

    pub fn postgres(&self) -> &Postgres {
        self.own_postgres.as_ref().or(self.shared_postgres.as_deref()).expect("build made sure")
    }

    pub fn database_url(&self, kind: Kind) -> String {
        self.postgres().url(match kind {
            Kind::Orders => &self.orders_name,
            Kind::Fulfillment => &self.fulfillment_name,
        })
    }

    /// The same through a proxy.
    pub fn database_url_through(&self, kind: Kind, proxy: &Proxy) -> anyhow::Result<String> {
        let options: PgConnectOptions = self.database_url(kind).parse()?;
        let address = proxy.address();
        Ok(options.host(&address.ip().to_string()).port(address.port()).to_url_lossy().into())
    }

    /// How to run a service in this world.
    pub fn plan(&self, kind: Kind) -> anyhow::Result<Plan> {
        self.plan_with(kind, &self.nats.url())
    }

    /// The same, with a proxy on the way to the broker.
    pub fn plan_through(&self, kind: Kind, proxy: &Proxy) -> anyhow::Result<Plan> {
        self.plan_with(kind, &self.nats.url_through(proxy.address()))
    }

    /// The same, with another broker.
    pub fn plan_with(&self, kind: Kind, nats_url: &str) -> anyhow::Result<Plan> {
        Plan::new(kind, &self.database_url(kind), nats_url, self.folder.path())
    }

    /// A running service.
    pub async fn start(&self, kind: Kind) -> anyhow::Result<Service> {
        self.plan(kind)?.start().await
    }

    pub async fn ledger(&self) -> anyhow::Result<Ledger> {
        Ledger::read(&self.orders, &self.fulfillment, &self.broker).await
    }

    /// Waits until nothing is under way, and returns the ledger of that moment.
    pub async fn arrived(&self, limit: Duration) -> anyhow::Result<Ledger> {
        eventually("everything has arrived", limit, async || {
            let ledger = self.ledger().await?;
            check(&invariants::settled(&ledger)).map(|()| ledger)
        })
        .await
    }

    /// The same, and the promise holds.
    pub async fn settled(&self, limit: Duration) -> anyhow::Result<Ledger> {
        let ledger = self.arrived(limit).await?;
        check(&invariants::promise(&ledger))?;
        Ok(ledger)
    }

    /// Stops the servers, and copies what they and the services leave behind to `folder`: databases,
    /// stores and logs.
    pub async fn keep(&mut self, folder: &Path) -> anyhow::Result<()> {
        // Either may be gone, or stopped, by the time that this is asked for.
        self.nats.stop("KILL").await.ok();
        let postgres = self.own_postgres.as_mut().context("the databases are not ours")?;
        postgres.stop("QUIT").await.ok();
        copy_folder(postgres.folder().context("it is not ours")?, &folder.join("postgres"))?;
        copy_folder(self.nats.folder().context("it is not ours")?, &folder.join("nats"))
    }

    /// Prints the end of every service's log, for a failure that wants an explanation.
    pub fn print_logs(&self) {
        for entry in std::fs::read_dir(self.folder.path()).into_iter().flatten().flatten() {
            eprintln!("{}\n", tail(&entry.path()));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_logs();
        }
        // On a server of ours the databases go with it; a given one is left as it was. Blocking is
        // all that a destructor can do.
        if self.shared_postgres.as_ref().is_some_and(|postgres| !postgres.is_ours()) {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let runtime =
                        tokio::runtime::Builder::new_current_thread().enable_all().build();
                    if let Ok(runtime) = runtime
                        && let Err(error) = runtime.block_on(self.drop_databases())
                    {
                        eprintln!("databases are left behind: {error:#}");
                    }
                });
            });
        }
    }
}
