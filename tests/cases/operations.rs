//! What an operator relies on: set-up, readiness, health checks, messages about mistakes, and a
//! harness that leaves nothing behind.

use std::{fs, process::Command, time::Duration};

use async_nats::jetstream::kv;
use e2e::{
    api::Api,
    find::root,
    process::tail,
    services::{Kind, build},
    wait::eventually,
    world::World,
};
use futures_util::future::join_all;
use shared::topology;
use tokio::time::timeout;

use crate::support::{LIMIT, check_is, logged, ready};

/// A world as it is before any `setup`.
async fn start_over(world: &World) {
    for stream in [topology::ORDERS, topology::FULFILLMENT] {
        world.broker.js.delete_stream(stream).await.unwrap();
    }
    world.broker.js.delete_key_value(topology::NOTICES).await.unwrap();
    for pool in [&world.orders, &world.fulfillment] {
        sqlx::raw_sql("drop schema public cascade; create schema public")
            .execute(pool)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn setup_is_idempotent_and_safe_when_several_run_at_once() {
    let world = World::new().await.unwrap();
    start_over(&world).await;
    let kinds = [Kind::Orders, Kind::Fulfillment].into_iter().cycle().take(8);
    let plans: Vec<_> = kinds.map(|kind| world.plan(kind).unwrap()).collect();
    for _ in 0..2 {
        for (code, plan) in
            join_all(plans.iter().map(|plan| plan.run("setup"))).await.iter().zip(&plans)
        {
            assert_eq!(*code.as_ref().unwrap(), 0, "{}", tail(&plan.log()));
        }
    }
    for (stream, consumers) in [
        (topology::ORDERS, vec!["fulfillment"]),
        (topology::FULFILLMENT, vec!["notifications", "orders"]),
    ] {
        let stream = world.broker.js.get_stream(stream).await.unwrap();
        assert_eq!(stream.cached_info().state.consumer_count, consumers.len());
        for consumer in consumers {
            stream.consumer_info(consumer).await.unwrap();
        }
    }
    world.broker.js.get_key_value(topology::NOTICES).await.unwrap();
}

#[tokio::test]
async fn setup_starts_from_nothing_and_serve_is_ready_only_after_it() {
    let world = World::new().await.unwrap();
    start_over(&world).await;
    let orders = world.start(Kind::Orders).await.unwrap();
    let api = Api::new(orders.url());
    let answer = check_is(&api, "nats", "ok").await;
    assert_eq!((answer.status, answer.code()), (503, "not_ready"));
    let reason = answer.body["failing"]["database"].as_str().unwrap();
    assert!(reason.contains("migration 0") && reason.contains("run `setup`"), "{reason}");
    assert!(answer.body["failing"]["stream"].as_str().unwrap().contains("run `setup`"));
    assert_eq!(api.get("/healthz").await.unwrap().status, 200, "alive all the same");
    assert_eq!(orders.plan.run("healthcheck").await.unwrap(), 1);

    assert_eq!(world.plan(Kind::Orders).unwrap().run("setup").await.unwrap(), 0);
    ready(&api).await;
    assert_eq!(orders.plan.run("healthcheck").await.unwrap(), 0);
}

#[tokio::test]
async fn a_stream_that_differs_is_not_ready_and_says_which_field() {
    let world = World::new().await.unwrap();
    let orders = world.start(Kind::Orders).await.unwrap();
    let api = Api::new(orders.url());
    ready(&api).await;
    let mut drifted = topology::wanted(1)[0].stream.clone();
    drifted.duplicate_window = Duration::from_secs(60);
    world.broker.js.update_stream(&drifted).await.unwrap();
    let answer = api.get("/readyz").await.unwrap();
    assert_eq!(answer.status, 503);
    assert_eq!(
        answer.body["failing"]["stream"],
        "stream ORDERS: duplicate_window is 60s, wanted 1800s; run `setup`"
    );
    assert_eq!(answer.body["checks"]["relay"], "ok");
    let found = world.broker.stream().await.unwrap().cached_info().config.duplicate_window;
    assert_eq!(found, Duration::from_secs(60), "serve compares and changes nothing");
    topology::upsert(&world.broker.js, 1).await.unwrap();
    api.ready().await.unwrap();
}

/// Keys without a time to live would stay claimed for ever.
#[tokio::test]
async fn a_bucket_that_differs_is_not_ready_and_says_which_field() {
    let world = World::new().await.unwrap();
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let api = Api::new(fulfillment.url());
    ready(&api).await;
    world.broker.js.delete_key_value(topology::NOTICES).await.unwrap();
    let answer = check_is(&api, "bucket", "failing").await;
    assert!(answer.body["failing"]["bucket"].as_str().unwrap().contains("run `setup`"));
    let drifted = kv::Config { bucket: topology::NOTICES.to_owned(), ..Default::default() };
    world.broker.js.create_key_value(drifted).await.unwrap();
    let answer = api.get("/readyz").await.unwrap();
    assert_eq!(
        answer.body["failing"]["bucket"],
        "bucket notices: allow_message_ttl is false, wanted true; run `setup`"
    );
    topology::upsert(&world.broker.js, 1).await.unwrap();
    api.ready().await.unwrap();
}

#[tokio::test]
async fn a_wrong_setting_stops_the_start_with_one_line_and_without_its_value() {
    for kind in [Kind::Orders, Kind::Fulfillment] {
        let program = build().unwrap().join(kind.name());
        let complain = |variables: &[(&str, &str)]| {
            let mut command = Command::new(&program);
            command.env_remove("DATABASE_URL").env("RUST_LOG", "").envs(variables.iter().copied());
            let output = command.output().unwrap();
            let text = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{text}");
            assert_eq!(text.trim_end().lines().count(), 1, "{text}");
            assert!(!text.contains("hunter2"), "{text}");
            text
        };
        let missing = complain(&[]);
        assert!(missing.starts_with("error: DATABASE_URL: is not set"), "{missing}");
        assert!(missing.contains("for example `postgres://"), "{missing}");
        let malformed = complain(&[("DATABASE_URL", "hunter2")]);
        assert!(
            malformed.starts_with("error: DATABASE_URL: is not a PostgreSQL URL"),
            "{malformed}"
        );
        const GOOD: (&str, &str) = ("DATABASE_URL", "postgres://u:hunter2@127.0.0.1/x");
        let malformed = complain(&[GOOD, ("HTTP_ADDR", "here")]);
        assert!(malformed.starts_with("error: HTTP_ADDR: "), "{malformed}");
        let malformed = complain(&[GOOD, ("NATS_URL", "nats://u:hunter2@:no")]);
        assert!(malformed.starts_with("error: NATS_URL: "), "{malformed}");
        if kind == Kind::Fulfillment {
            let malformed = complain(&[GOOD, ("CARRIER_URL", "ftp://u:hunter2@carrier")]);
            assert!(malformed.starts_with("error: CARRIER_URL: is not an http://"), "{malformed}");
        }
    }
}

#[tokio::test]
async fn a_second_signal_aborts_the_drain() {
    let world = World::new().await.unwrap();
    let mut orders = world.start(Kind::Orders).await.unwrap();
    let api = Api::new(orders.url());
    api.place("A-1", 1).await.unwrap();
    let mut lock = shared::database::begin(&world.orders).await.unwrap();
    sqlx::query("lock table payments in access exclusive mode").execute(&mut *lock).await.unwrap();
    let confirm = async {
        assert!(api.confirm("tx-1", "A-1", 1).await.is_err(), "cut off");
    };
    let abort = async {
        eventually("the payment is under way", LIMIT, async || {
            let waiting: i64 =
                sqlx::query_scalar("select count(*) from pg_locks where not granted")
                    .fetch_one(&world.orders)
                    .await?;
            anyhow::ensure!(waiting > 0, "not yet");
            Ok(())
        })
        .await
        .unwrap();
        orders.signal("TERM").unwrap();
        logged(&orders, "draining").await;
        assert_ne!(orders.end("TERM").await.unwrap(), 0);
    };
    tokio::join!(confirm, abort);
}

/// `cargo dev up` is killed with -9, so nothing of it can clean up; the shells that hold its
/// children do.
#[tokio::test]
async fn a_harness_that_is_killed_leaves_no_process_behind() {
    let folder = tempfile::tempdir().unwrap();
    let log = fs::File::create(folder.path().join("log")).unwrap();
    let environment = folder.path().join("env");
    let mut up = Command::new(build().unwrap().join("dev"))
        .arg("up")
        .arg("--env-file")
        .arg(&environment)
        .env_remove("DATABASE_SERVER_URL")
        .env_remove("NATS_URL")
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let pids = eventually("it is up", LIMIT, async || {
        let text = fs::read_to_string(&environment)?;
        let pids: Vec<u32> = text
            .lines()
            .filter_map(|line| line.split_once('='))
            .filter(|(name, _)| name.ends_with("_PID"))
            .filter_map(|(_, pid)| pid.parse().ok())
            .collect();
        anyhow::ensure!(pids.len() == 4, "{text}");
        Ok(pids)
    })
    .await;
    up.kill().unwrap();
    up.wait().unwrap();
    let pids = pids.unwrap_or_else(|error| {
        panic!("{error:#}\n{}", fs::read_to_string(folder.path().join("log")).unwrap_or_default())
    });
    eventually("all four are gone", LIMIT, async || {
        for pid in &pids {
            let alive =
                Command::new("kill").args(["-0", &pid.to_string()]).output()?.status.success();
            anyhow::ensure!(!alive, "process {pid} is still there");
        }
        Ok(())
    })
    .await
    .unwrap();
}

/// A fault run can fail, and then leaves what is needed to find out why.
#[tokio::test]
async fn a_fault_run_that_injected_nothing_fails_and_leaves_its_databases() {
    // Repeated confirmations are part of every load, and no fault.
    let arguments = ["--seed", "7070707", "--orders", "20", "--seconds", "1"];
    let run = tokio::process::Command::new(build().unwrap().join("dev"))
        .arg("chaos")
        .args(arguments)
        .args(["--faults", "duplicate-confirmation"])
        .env_remove("DATABASE_SERVER_URL")
        .env_remove("NATS_URL")
        .kill_on_drop(true)
        .output();
    // Eight seconds alone. It starts two servers and five services, and other tests do so beside it.
    let run = timeout(3 * LIMIT, run).await.expect("it takes seconds").unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert_eq!(run.status.code(), Some(1), "{said}");
    assert!(said.contains("BROKEN  something was injected: 0"), "{said}");
    assert!(said.contains("ok      payments = dispatches: 20 = 20"), "{said}");
    let again =
        format!("again: cargo dev chaos {} --faults duplicate-confirmation", arguments.join(" "));
    assert!(said.contains(&again), "{said}");
    let kept = root().join("target/chaos/seed-7070707");
    for left in ["postgres/cluster/PG_VERSION", "postgres/log", "nats/store", "nats/log"] {
        assert!(kept.join(left).exists(), "{left}");
    }
    fs::remove_dir_all(kept).unwrap();
}
