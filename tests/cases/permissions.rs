//! Nobody may do more on the broker than their part, nor less: `deploy/nats/nats.conf`, with the real
//! server.

use std::{fs, time::Duration};

use anyhow::ensure;
use e2e::{
    api::Api,
    contract::{FULFILLMENT, NOTICES, ORDER_DISPATCHED, ORDERS},
    find::root,
    nats_server::{NatsServer, deployed_config},
    services::{Kind, Service},
    wait::eventually,
    world::World,
};
use futures_util::future::join_all;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    time::timeout,
};
use uuid::Uuid;

use crate::support::{AMOUNT, LIMIT, announce, bytes, check_is, pay, published, ready, report};

/// One permission of `deploy/nats/nats.conf`.
#[derive(Debug, Clone)]
struct Permission {
    user: String,
    subject: String,
}

impl Permission {
    /// All of those of the file that have a list.
    fn all() -> Vec<Self> {
        let mut user = String::new();
        let mut all = Vec::new();
        let config = deployed_config().unwrap();
        for line in config.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
            if let Some(name) = line.strip_prefix("user: ") {
                user = name.to_owned();
            }
            all.extend(
                line.split('"')
                    .skip(1)
                    .step_by(2)
                    .map(|subject| Self { user: user.clone(), subject: subject.to_owned() }),
            );
        }
        all
    }

    /// The file without it. A list that is empty would allow everything.
    fn taken_from(&self, config: &str) -> String {
        let owner = config.find(&format!("user: {}\n", self.user)).unwrap();
        let (before, from) = config.split_at(owner);
        let quoted = format!("\"{}\"", self.subject);
        assert!(from.contains(&quoted));
        format!("{before}{}", from.replacen(&quoted, "\"nothing\"", 1))
    }

    /// Whether the text is about a subject of this pattern.
    fn is_named_in(&self, text: &str) -> bool {
        text.contains("Permissions Violation")
            && self.subject.split(['*', '>']).all(|part| text.contains(part.trim_matches('.')))
    }
}

/// What 2.15 may come to send: acks go to the longer subject.
const NEW_ACKS: &str = "feature_flags { js_ack_fc_v2: true }\n";

/// Both services, as deployed.
struct Pair {
    orders: Service,
    fulfillment: Service,
}

impl Pair {
    async fn start(world: &World) -> Self {
        let [orders, fulfillment] =
            [Kind::Orders, Kind::Fulfillment].map(|kind| world.deployed_plan(kind).unwrap());
        Self {
            orders: orders.start().await.unwrap(),
            fulfillment: fulfillment.start().await.unwrap(),
        }
    }

    fn api(&self, user: &str) -> Api {
        Api::new(if user == "orders" { self.orders.url() } else { self.fulfillment.url() })
    }

    async fn kill(mut self) {
        self.orders.end("KILL").await.unwrap();
        self.fulfillment.end("KILL").await.unwrap();
    }
}

/// Starts NATS again with another configuration, and everything it holds.
async fn reconfigured(world: &mut World, config: &str) {
    world.nats.configure(config).unwrap();
    world.nats.stop("TERM").await.unwrap();
    world.nats.start_again().await.unwrap();
    eventually("the operator is back", LIMIT, async || world.broker.count().await).await.unwrap();
}

/// Everything the services ever do, whatever else fails: a payment over HTTP, one that is announced
/// by hand, and a report that comes twice.
async fn everything_happens(world: &World, pair: &Pair, name: &str) {
    pay(&pair.api("orders"), name, 1).await;
    announce(world, &format!("tx-hand-{name}"), &format!("hand-{name}")).await;
    let report = bytes(&report(&format!("tx-{name}-0"), &format!("{name}-0"), "PARCEL-1"));
    for _ in 0..2 {
        world.broker.publish_to(ORDER_DISPATCHED, &report, None).await.unwrap();
    }
}

#[tokio::test]
async fn the_deployed_permissions_are_enough() {
    let mut world = World::deployed().await.unwrap();
    for (round, flags) in ["", NEW_ACKS].into_iter().enumerate() {
        reconfigured(&mut world, &(deployed_config().unwrap() + flags)).await;
        let pair = Pair::start(&world).await;
        everything_happens(&world, &pair, &format!("A{round}")).await;
        world.arrived(LIMIT).await.unwrap();
        for user in ["orders", "fulfillment"] {
            ready(&pair.api(user)).await;
        }
        pair.kill().await;
    }
    // Of what was published by hand there is no payment, and of what came twice one dispatch.
    let ledger = world.ledger().await.unwrap();
    assert_eq!((ledger.payments, ledger.dispatches, ledger.lost.len()), (2, 4, 0), "{ledger:?}");
}

#[tokio::test]
async fn a_service_without_one_of_its_permissions_is_not_ready_and_names_the_subject() {
    let needed: Vec<_> = Permission::all().into_iter().filter(|p| p.user != "setup").collect();
    assert_eq!(needed.len(), 23, "the file is read: {needed:?}");
    // Each part in a world of its own, beside the others.
    join_all(needed.chunks(6).map(async |part| each_is_needed(part).await)).await;
}

async fn each_is_needed(permissions: &[Permission]) {
    let mut world = World::deployed().await.unwrap();
    let config = deployed_config().unwrap();
    // What is looked for later has to be there.
    let pair = Pair::start(&world).await;
    everything_happens(&world, &pair, "before").await;
    world.arrived(LIMIT).await.unwrap();
    pair.kill().await;
    for (n, permission) in permissions.iter().enumerate() {
        let flags = if permission.subject.starts_with("$JS.ACK.*") { NEW_ACKS } else { "" };
        reconfigured(&mut world, &(permission.taken_from(&config) + flags)).await;
        let pair = Pair::start(&world).await;
        everything_happens(&world, &pair, &format!("A{n}")).await;
        let api = pair.api(&permission.user);
        eventually("readiness names it", Duration::from_secs(10), async || {
            let answer = api.get("/readyz").await?;
            let reason = answer.body["failing"]["permissions"].as_str().unwrap_or_default();
            ensure!(permission.is_named_in(reason), "{}", answer.body);
            Ok(())
        })
        .await
        .unwrap_or_else(|error| panic!("without {permission:?}: {error:#}"));
        assert_eq!(api.get("/healthz").await.unwrap().status, 200, "no reason to start it again");
        pair.kill().await;
    }
}

#[tokio::test]
async fn setup_without_one_of_its_permissions_fails_and_names_the_subject() {
    let world = World::deployed().await.unwrap();
    let needed: Vec<_> = Permission::all().into_iter().filter(|p| p.user == "setup").collect();
    assert_eq!(needed.len(), 11, "the file is read: {needed:?}");
    join_all(needed.iter().map(async |permission| {
        let nats = NatsServer::deployed(|config| permission.taken_from(&config)).await.unwrap();
        let plan =
            world.deployed_setup(Kind::Orders).unwrap().with("NATS_URL", &nats.url_as("setup"));
        let code = plan.run("setup").await.unwrap();
        let log = fs::read_to_string(plan.log()).unwrap();
        assert_eq!(code, 1, "without {permission:?}: {log}");
        let error = log.lines().filter(|line| line.contains("ERROR")).collect::<String>();
        assert!(permission.is_named_in(&error), "without {permission:?}: {log}");
    }))
    .await;
}

/// The server as a client with bad intentions sees it: which subjects it lets the user publish to
/// (`PUB`), or subscribe to (`SUB`).
async fn permitted<'a>(
    nats: &NatsServer,
    user: &str,
    operation: &str,
    subjects: &'a [String],
) -> Vec<&'a str> {
    let mut connection = BufReader::new(TcpStream::connect(nats.address()).await.unwrap());
    let connect =
        format!("CONNECT {{\"user\":\"{user}\",\"pass\":\"{user}\",\"verbose\":false}}\r\n");
    connection.write_all(connect.as_bytes()).await.unwrap();
    let mut permitted = Vec::new();
    for subject in subjects {
        let line = match operation {
            "PUB" => format!("PUB {subject} 0\r\n\r\nPING\r\n"),
            _ => format!("SUB {subject} 1\r\nPING\r\n"),
        };
        connection.write_all(line.as_bytes()).await.unwrap();
        let mut refused = false;
        loop {
            let mut answer = String::new();
            timeout(LIMIT, connection.read_line(&mut answer)).await.unwrap().unwrap();
            assert!(!answer.is_empty(), "{user} was thrown out after {line}");
            refused |= answer.starts_with("-ERR 'Permissions Violation");
            if answer.starts_with("PONG") {
                break;
            }
        }
        if !refused {
            permitted.push(subject.as_str());
        }
    }
    permitted
}

/// What can be published and subscribed to on a server of the pair, and what it takes to be an
/// administrator of it.
fn everything_there_is() -> (Vec<String>, Vec<String>) {
    let mut publish: Vec<String> = [
        "orders.payment.confirmed",
        "orders.other",
        "fulfillment.order.dispatched",
        "fulfillment.other",
        "$KV.notices.key",
        "$KV.other.key",
        "_INBOX.reply",
        "_INBOX_setup.reply",
        "_INBOX_orders.reply",
        "_INBOX_fulfillment.reply",
        "$SYS.REQ.USER.INFO",
        "$SYS.REQ.SERVER.PING",
        "$JS.FC.ORDERS.fulfillment.x",
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.LIST",
        "$JS.API.SERVER.REMOVE",
        "$JS.API.META.LEADER.STEPDOWN",
        "$JS.API.ACCOUNT.PURGE.X",
    ]
    .map(str::to_owned)
    .into();
    let bucket = format!("KV_{NOTICES}");
    for (stream, durables, filter) in [
        (ORDERS, &["fulfillment", "other"][..], "orders.payment.confirmed"),
        (FULFILLMENT, &["orders", "notifications", "other"], "fulfillment.order.dispatched"),
        (&bucket, &["other"], "$KV.notices.key"),
        ("OTHER", &["other"], "other"),
    ] {
        for operation in [
            "STREAM.CREATE",
            "STREAM.UPDATE",
            "STREAM.INFO",
            "STREAM.DELETE",
            "STREAM.PURGE",
            "STREAM.MSG.GET",
            "STREAM.MSG.DELETE",
            "STREAM.SNAPSHOT",
            "STREAM.RESTORE",
            "STREAM.PEER.REMOVE",
            "STREAM.LEADER.STEPDOWN",
            "DIRECT.GET",
            "CONSUMER.CREATE",
            "CONSUMER.NAMES",
            "CONSUMER.LIST",
        ] {
            publish.push(format!("$JS.API.{operation}.{stream}"));
        }
        publish.push(format!("$JS.API.DIRECT.GET.{stream}.{filter}"));
        for durable in durables {
            for operation in [
                "CREATE",
                "DURABLE.CREATE",
                "INFO",
                "DELETE",
                "MSG.NEXT",
                "PAUSE",
                "RESET",
                "UNPIN",
                "LEADER.STEPDOWN",
            ] {
                publish.push(format!("$JS.API.CONSUMER.{operation}.{stream}.{durable}"));
            }
            publish.push(format!("$JS.API.CONSUMER.CREATE.{stream}.{durable}.{filter}"));
            publish.push(format!("$JS.ACK.{stream}.{durable}.1.1.1.1.0"));
            publish.push(format!("$JS.ACK._.hash.{stream}.{durable}.1.1.1.1.0"));
        }
    }
    let subscribe = [
        ">",
        "*",
        "orders.>",
        "orders.payment.confirmed",
        "fulfillment.>",
        "$KV.>",
        "$JS.>",
        "$SYS.>",
        "_INBOX.>",
        "_INBOX_setup.>",
        "_INBOX_orders.>",
        "_INBOX_fulfillment.>",
    ];
    (publish, subscribe.map(str::to_owned).into())
}

/// Written here a second time on purpose: what is added to the file has to be thought of twice.
const ALLOWED: [(&str, &[&str]); 3] = [
    (
        "setup",
        &[
            "$JS.API.INFO",
            "$JS.API.STREAM.CREATE.ORDERS",
            "$JS.API.STREAM.UPDATE.ORDERS",
            "$JS.API.CONSUMER.CREATE.ORDERS.fulfillment.orders.payment.confirmed",
            "$JS.API.STREAM.CREATE.FULFILLMENT",
            "$JS.API.STREAM.UPDATE.FULFILLMENT",
            "$JS.API.CONSUMER.CREATE.FULFILLMENT.orders.fulfillment.order.dispatched",
            "$JS.API.CONSUMER.CREATE.FULFILLMENT.notifications.fulfillment.order.dispatched",
            "$JS.API.STREAM.CREATE.KV_notices",
            "$JS.API.STREAM.UPDATE.KV_notices",
        ],
    ),
    (
        "orders",
        &[
            "orders.payment.confirmed",
            "$JS.API.STREAM.INFO.ORDERS",
            "$JS.API.STREAM.MSG.GET.ORDERS",
            "$JS.API.CONSUMER.INFO.FULFILLMENT.orders",
            "$JS.API.CONSUMER.MSG.NEXT.FULFILLMENT.orders",
            "$JS.ACK.FULFILLMENT.orders.1.1.1.1.0",
            "$JS.ACK._.hash.FULFILLMENT.orders.1.1.1.1.0",
        ],
    ),
    (
        "fulfillment",
        &[
            "fulfillment.order.dispatched",
            "$KV.notices.key",
            "$JS.API.CONSUMER.INFO.ORDERS.fulfillment",
            "$JS.API.CONSUMER.MSG.NEXT.ORDERS.fulfillment",
            "$JS.ACK.ORDERS.fulfillment.1.1.1.1.0",
            "$JS.ACK._.hash.ORDERS.fulfillment.1.1.1.1.0",
            "$JS.API.STREAM.INFO.FULFILLMENT",
            "$JS.API.STREAM.MSG.GET.FULFILLMENT",
            "$JS.API.CONSUMER.INFO.FULFILLMENT.notifications",
            "$JS.API.CONSUMER.MSG.NEXT.FULFILLMENT.notifications",
            "$JS.ACK.FULFILLMENT.notifications.1.1.1.1.0",
            "$JS.ACK._.hash.FULFILLMENT.notifications.1.1.1.1.0",
            "$JS.API.STREAM.INFO.KV_notices",
            "$JS.API.STREAM.MSG.GET.KV_notices",
        ],
    ),
];

#[tokio::test]
async fn nobody_may_do_more_on_the_broker_than_their_part() {
    let world = World::deployed().await.unwrap();
    let (publish, subscribe) = everything_there_is();
    for (user, allowed) in ALLOWED {
        let mut found = permitted(&world.nats, user, "PUB", &publish).await;
        let mut allowed = allowed.to_vec();
        found.sort_unstable();
        allowed.sort_unstable();
        assert_eq!(found, allowed, "{user} publishes");
        let found = permitted(&world.nats, user, "SUB", &subscribe).await;
        assert_eq!(found, [format!("_INBOX_{user}.>")], "{user} subscribes");
    }
    let everything = permitted(&world.nats, "operator", "SUB", &subscribe).await;
    assert!(!everything.is_empty(), "the question can be answered with yes");
}

/// The table is for people, and shall not tell them what was true once.
#[test]
fn the_readme_lists_the_permissions_of_the_file() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let of_file = Permission::all();
    for (user, _) in ALLOWED {
        let row = readme
            .lines()
            .find(|line| line.starts_with(&format!("| `{user}` |")) && line.contains("`_INBOX_"));
        let mut listed: Vec<&str> = row.unwrap().split('`').skip(3).step_by(2).collect();
        let mut wanted: Vec<&str> = of_file
            .iter()
            .filter(|permission| permission.user == user)
            .map(|permission| permission.subject.as_str())
            .collect();
        listed.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(listed, wanted, "{user}");
    }
}

/// A service is told of its mistakes while it runs, and need not be started again when they are
/// mended.
#[tokio::test]
async fn a_wrong_password_and_a_missing_permission_are_told_and_mended_without_a_restart() {
    let mut world = World::deployed().await.unwrap();
    let config = deployed_config().unwrap();
    let rotated = config.replace("$NATS_ORDERS_PASSWORD", "rotated");
    let publish = Permission { user: "orders".into(), subject: "orders.payment.confirmed".into() };
    reconfigured(&mut world, &rotated).await;
    let orders = world.deployed_plan(Kind::Orders).unwrap().start().await.unwrap();
    let api = Api::new(orders.url());
    let pid = orders.pid();

    eventually("the password is the reason", Duration::from_secs(10), async || {
        let answer = check_is(&api, "nats", "failing").await;
        let reason = answer.body["failing"]["nats"].as_str().unwrap_or_default().to_owned();
        ensure!(reason.contains("authorization violation"), "{reason}");
        Ok(())
    })
    .await
    .unwrap();
    assert!(!orders.log().contains("orders:orders"), "{}", orders.log());
    world.nats.configure(&config).unwrap();
    world.nats.signal("HUP").unwrap();
    ready(&api).await;

    // Mended by a restart of the server: the next connection is another one. Mended by a reload: the
    // server tells nobody, and the denial stands for its minute.
    for restart in [true, false] {
        world.nats.configure(&publish.taken_from(&config)).unwrap();
        world.nats.signal("HUP").unwrap();
        eventually("the permission is gone, and readiness names it", LIMIT, async || {
            pay(&api, &Uuid::now_v7().to_string(), 1).await;
            let answer = api.get("/readyz").await?;
            let reason = answer.body["failing"]["permissions"].as_str().unwrap_or_default();
            ensure!(publish.is_named_in(reason), "{}", answer.body);
            Ok(())
        })
        .await
        .unwrap();
        if restart {
            reconfigured(&mut world, &config).await;
            let soon = Duration::from_secs(20);
            eventually("it is ready", soon, async || api.ready().await).await.unwrap();
        } else {
            world.nats.configure(&config).unwrap();
            world.nats.signal("HUP").unwrap();
            eventually("it is ready", 2 * LIMIT, async || api.ready().await).await.unwrap();
        }
    }

    sqlx::query("alter role orders password 'rotated'").execute(&world.orders).await.unwrap();
    sqlx::query("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'orders'")
        .execute(&world.orders)
        .await
        .unwrap();
    eventually("readiness names the password", LIMIT, async || {
        let answer = api.get("/readyz").await?;
        let reason = answer.body["failing"]["database"].as_str().unwrap_or_default();
        ensure!(reason.contains("password authentication failed for user \"orders\""), "{reason}");
        Ok(())
    })
    .await
    .unwrap();
    let refused = api.place("A-late", AMOUNT).await.unwrap();
    assert_eq!((refused.status, refused.code()), (503, "unavailable"), "{}", refused.body);
    sqlx::query("alter role orders password 'orders'").execute(&world.orders).await.unwrap();
    ready(&api).await;
    assert_eq!(orders.pid(), pid);
    published(&world).await;
}
