//! How a service gets to NATS: passwords, keys, credentials, TLS. Each against a server that insists.

use std::{fs, path::Path, process::Command};

use e2e::{
    api::Api,
    find::root,
    nats_server::NatsServer,
    process::tail,
    services::{Kind, Service, build},
    world::World,
};
use tokio::time::timeout;

use crate::support::{AMOUNT, LIMIT, check_is, logged, published, ready};

async fn orders_with(world: &World, settings: &[(&str, &str)]) -> (Service, Api) {
    let plan = world.plan(Kind::Orders).unwrap();
    let plan = settings.iter().fold(plan, |plan, (name, value)| plan.with(name, value));
    let service = plan.start().await.unwrap();
    let api = Api::new(service.url());
    (service, api)
}

/// async-nats reads them nowhere; the services have to.
#[tokio::test]
async fn user_and_password_may_stand_in_the_url() {
    let world = World::new().await.unwrap();
    let guarded = NatsServer::start_with(&["--user", "pair", "--pass", "p@ss/word"]).await.unwrap();
    let url = |who: &str| format!("nats://{who}@{}", guarded.address());
    let (_right, api) = orders_with(&world, &[("NATS_URL", &url("pair:p%40ss%2Fword"))]).await;
    check_is(&api, "nats", "ok").await;
    let (wrong, api) = orders_with(&world, &[("NATS_URL", &url("pair:hunter2"))]).await;
    logged(&wrong, "authorization violation").await;
    assert_eq!(api.get("/readyz").await.unwrap().body["checks"]["nats"], "failing");
    assert!(!wrong.log().contains("hunter2"), "{}", wrong.log());
}

#[tokio::test]
async fn a_service_logs_in_by_nkey_and_by_credentials() {
    let world = World::new().await.unwrap();
    let fixture = |name: &str| root().join("tests/fixtures").join(name).display().to_string();
    for (config, setting, file) in [
        ("nkey.conf", "NATS_NKEY_SEED_FILE", "user.seed"),
        ("operator.conf", "NATS_CREDENTIALS_FILE", "user.creds"),
    ] {
        let guarded = NatsServer::start_with(&["--config", &fixture(config)]).await.unwrap();
        let (_stranger, api) = orders_with(&world, &[("NATS_URL", &guarded.url())]).await;
        check_is(&api, "nats", "failing").await;
        let (url, file) = (guarded.url(), fixture(file));
        let (service, api) = orders_with(&world, &[("NATS_URL", &url), (setting, &file)]).await;
        check_is(&api, "nats", "ok").await;
        assert_eq!(service.plan.run("setup").await.unwrap(), 0, "{}", tail(&service.plan.log()));
        ready(&api).await;
    }
}

/// A CA and a certificate of `deploy/make-certificates`, in a folder of their own.
fn certificates(folder: &Path) -> [String; 3] {
    let script = folder.join("make-certificates");
    fs::copy(root().join("deploy/make-certificates"), &script).unwrap();
    let made = Command::new(&script).output().unwrap();
    assert!(made.status.success(), "is openssl there? {}", String::from_utf8_lossy(&made.stderr));
    let path = |name: &str| folder.join("certificates").join(name).display().to_string();
    ["ca.pem", "nats.pem", "nats.key"].map(path)
}

/// A handshake is really made: with two TLS providers in the tree it would panic here, and nowhere
/// before.
#[tokio::test]
async fn tls_works_with_the_private_ca_and_no_other() {
    let world = World::new().await.unwrap();
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [ca, certificate, key] = certificates(ours.path());
    let [other_ca, ..] = certificates(theirs.path());
    let tls = ["--tls", "--tlscert", &certificate, "--tlskey", &key];
    let server = NatsServer::start_with(&tls).await.unwrap();

    // Neither with another CA, which has the same name, nor with the public ones.
    let address = server.address();
    let url = format!("tls://{address}");
    let wrong: [(&[(&str, &str)], &str); 2] = [
        (&[("NATS_URL", &url), ("NATS_CA_FILE", &other_ca)], "invalid peer certificate"),
        (&[("NATS_URL", &url)], "UnknownIssuer"),
    ];
    for (settings, why) in wrong {
        let (service, api) = orders_with(&world, settings).await;
        logged(&service, "the server is not trusted").await;
        let answer = check_is(&api, "nats", "failing").await;
        let reason = answer.body["failing"]["nats"].as_str().unwrap();
        assert!(reason.contains(why) && reason.contains("NATS_CA_FILE"), "{reason}");
    }

    // Also when the URL does not ask for TLS.
    let url = format!("nats://{address}");
    let (service, api) = orders_with(&world, &[("NATS_URL", &url), ("NATS_CA_FILE", &ca)]).await;
    check_is(&api, "nats", "ok").await;
    assert_eq!(service.plan.run("setup").await.unwrap(), 0, "{}", tail(&service.plan.log()));
    ready(&api).await;
    api.place("A-1", AMOUNT).await.unwrap();
    assert_eq!(api.confirm("tx-1", "A-1", AMOUNT).await.unwrap().status, 201);
    published(&world).await;
}

/// Whoever names a CA does not talk in the clear.
#[tokio::test]
async fn a_server_without_tls_is_refused_when_a_ca_is_named() {
    let world = World::new().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [ca, ..] = certificates(folder.path());
    let (service, api) = orders_with(&world, &[("NATS_CA_FILE", &ca)]).await;
    // It was tried, and not taken.
    logged(&service, "client error").await;
    let answer = check_is(&api, "nats", "failing").await;
    assert_eq!(answer.status, 503);
    assert!(!service.log().contains("nats: connected"), "{}", service.log());
}

#[tokio::test]
async fn a_file_that_is_missing_or_wrong_stops_the_start_and_is_named() {
    let program = build().unwrap().join("orders-service");
    let complain = async |variables: &[(&str, &str)]| {
        let mut command = tokio::process::Command::new(&program);
        command.env_remove("DATABASE_URL").env("HTTP_ADDR", "127.0.0.1:0").kill_on_drop(true);
        let output = command.envs(variables.iter().copied()).output();
        let output = timeout(LIMIT, output).await.expect("it ends").unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{text}");
        text
    };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let database = file("database", "postgres://u:hunter2@127.0.0.1/x\n");
    let nonsense = file("nonsense", "hunter2\n");
    for (variable, value, complaint) in [
        ("DATABASE_URL_FILE", "/nowhere", "/nowhere cannot be read"),
        ("DATABASE_URL_FILE", &nonsense, "is not a PostgreSQL URL"),
        ("PAYMENT_WEBHOOK_SECRET_FILE", &nonsense, "less than 24 bytes"),
        ("NATS_CA_FILE", "/nowhere", "/nowhere cannot be read"),
        ("NATS_CA_FILE", &nonsense, "holds no certificate"),
        ("NATS_NKEY_SEED_FILE", "/nowhere", "/nowhere cannot be read"),
        ("NATS_NKEY_SEED_FILE", &nonsense, "holds no seed"),
        ("NATS_CREDENTIALS_FILE", "/nowhere", "holds no credentials"),
        ("NATS_CREDENTIALS_FILE", &nonsense, "holds no credentials"),
    ] {
        // The last of two counts.
        let text = complain(&[("DATABASE_URL_FILE", &database), (variable, value)]).await;
        let line = text.lines().find(|line| line.contains(complaint));
        let line = line.unwrap_or_else(|| panic!("{variable}: {text}"));
        assert!(line.contains(variable.trim_end_matches("_FILE")), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
    let url = ("DATABASE_URL", "postgres://u:p@127.0.0.1/x");
    let both = complain(&[url, ("DATABASE_URL_FILE", &database)]).await;
    assert!(both.starts_with("error: DATABASE_URL_FILE: DATABASE_URL is set too"), "{both}");
}

/// As container platforms mount them: a trailing newline is no part of it.
#[tokio::test]
async fn a_secret_may_come_from_a_file() {
    let world = World::deployed().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::write(&path, format!("{content}\n")).unwrap();
        path.display().to_string()
    };
    let database = file("database", &world.postgres().url_as("orders", "orders"));
    let nats = file("nats", &world.nats.url_as("orders"));
    let plan = world.deployed_plan(Kind::Orders).unwrap();
    let plan = plan.without("DATABASE_URL").without("NATS_URL");
    let plan = plan.with("DATABASE_URL_FILE", &database).with("NATS_URL_FILE", &nats);
    let service = plan.start().await.unwrap();
    ready(&Api::new(service.url())).await;
}
