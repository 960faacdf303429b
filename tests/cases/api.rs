//! The HTTP contract of orders-service, and what makes a confirmation count once at its source.

use std::{collections::BTreeMap, time::Duration};

use e2e::{
    api::{Answer, Api, answer, confirmation},
    proxy::{Flow, Proxy},
    services::Kind,
    wait::eventually,
    world::World,
};
use futures_util::{StreamExt as _, future::join_all, stream};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::support::{AMOUNT, LIMIT, logged, number, world_with_orders};

fn assert_problem(answer: &Answer, status: u16, code: &str, what: &str) {
    assert_eq!((answer.status, answer.code()), (status, code), "{what}: {}", answer.body);
    assert_eq!(answer.content_type, "application/problem+json", "{what}");
    assert_eq!(answer.body["status"], status, "{what}");
    for member in ["type", "title", "detail"] {
        assert!(
            answer.body[member].as_str().is_some_and(|text| !text.is_empty()),
            "{what}: {member}"
        );
    }
}

#[tokio::test]
async fn an_order_is_placed_once_and_paid_once_and_the_answers_do_not_change() {
    let (_world, _service, api) = world_with_orders().await;

    let placed = api.place("A-1", AMOUNT).await.unwrap();
    assert_eq!(placed.status, 201);
    assert_eq!(placed.body["status"], "pending");
    let again = api.place("A-1", AMOUNT).await.unwrap();
    assert_eq!((again.status, &again.body), (200, &placed.body));
    assert_problem(
        &api.place("A-1", AMOUNT + 1).await.unwrap(),
        409,
        "order_differs",
        "another order",
    );

    let paid = api.confirm("tx-1", "A-1", AMOUNT).await.unwrap();
    assert_eq!(paid.status, 201);
    let mut members: Vec<&String> = paid.body.as_object().unwrap().keys().collect();
    members.sort();
    assert_eq!(members, ["confirmedAt", "eventId", "orderId", "transactionId"]);
    let again = api.confirm("tx-1", "A-1", AMOUNT).await.unwrap();
    assert_eq!((again.status, &again.body), (200, &paid.body));

    let order = api.get("/orders/A-1").await.unwrap();
    assert_eq!(order.status, 200);
    assert_eq!(order.body["status"], "paid");
    assert_eq!(order.body["transactionId"], "tx-1");
    assert_eq!(order.body["paidAt"], paid.body["confirmedAt"]);
    assert!(order.body["paidAt"].as_str().unwrap().ends_with('Z'), "RFC 3339 in UTC");
    assert_eq!(order.body.get("trackingCode"), None);
}

#[tokio::test]
async fn every_refusal_has_its_status_and_code_and_changes_nothing() {
    let (world, _service, api) = world_with_orders().await;
    for order in ["A-1", "A-2", "A-3"] {
        api.place(order, AMOUNT).await.unwrap();
    }
    api.confirm("tx-1", "A-1", AMOUNT).await.unwrap();

    for (what, transaction, order, amount, status, code) in [
        ("no such order", "tx-9", "nope", AMOUNT, 404, "unknown_order"),
        ("the transaction with another order", "tx-1", "A-2", AMOUNT, 409, "transaction_conflict"),
        (
            "the transaction with another amount",
            "tx-1",
            "A-1",
            AMOUNT + 1,
            409,
            "transaction_conflict",
        ),
        ("the transaction with no order", "tx-1", "nope", AMOUNT, 409, "transaction_conflict"),
        ("another transaction", "tx-2", "A-1", AMOUNT, 409, "already_paid"),
        ("another amount", "tx-3", "A-3", AMOUNT - 1, 422, "amount_mismatch"),
    ] {
        let refused = api.confirm(transaction, order, amount).await.unwrap();
        assert_problem(&refused, status, code, what);
    }
    let mut dollars = confirmation("tx-3", "A-3", AMOUNT);
    dollars["currency"] = "USD".into();
    let refused = api.post("/payments", &dollars).await.unwrap();
    assert_problem(&refused, 422, "amount_mismatch", "another currency");
    assert_problem(&api.get("/orders/nope").await.unwrap(), 404, "unknown_order", "get");
    assert_problem(&api.get("/nope").await.unwrap(), 404, "not_found", "path");
    let refused = answer(api.client().delete(api.url("/orders/A-1"))).await.unwrap();
    assert_problem(&refused, 405, "method_not_allowed", "method");

    assert_eq!(number(&world.orders, "select count(*) from payments").await, 1);
    assert_eq!(number(&world.orders, "select count(*) from outbox").await, 1);
}

#[tokio::test]
async fn bad_input_is_refused_with_a_reason_that_names_the_field() {
    let (world, _service, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    let with = |member: &str, value: Value| {
        let mut body = confirmation("tx-1", "A-1", AMOUNT);
        body[member] = value;
        body
    };
    let bad = [
        ("transactionId", with("transactionId", "".into())),
        ("transactionId", with("transactionId", "x".repeat(129).into())),
        ("transactionId", with("transactionId", "a\0b".into())),
        ("transactionId", with("transactionId", " padded ".into())),
        ("orderId", with("orderId", "line\nfeed".into())),
        ("amountMinor", with("amountMinor", (-1).into())),
        ("amountMinor", with("amountMinor", 0.into())),
        ("amountMinor", with("amountMinor", i64::MAX.into())),
        ("amountMinor", with("amountMinor", 1e30.into())),
        ("amountMinor", with("amountMinor", 19.99.into())),
        ("amountMinor", with("amountMinor", "1999".into())),
        ("amountMinor", with("amountMinor", Value::Null)),
        ("currency", with("currency", "eur".into())),
        ("currency", with("currency", "ZZZ".into())),
        ("currency", with("currency", "EURO".into())),
        ("tip", with("tip", 1.into())),
        ("transactionId", json!({ "orderId": "A-1", "amountMinor": AMOUNT, "currency": "EUR" })),
        ("", json!([])),
        ("", json!("payment")),
    ];
    for (member, body) in &bad {
        let refused = api.post("/payments", body).await.unwrap();
        assert_problem(&refused, 422, "invalid", &body.to_string());
        assert!(refused.body["detail"].as_str().unwrap().contains(member), "{}", refused.body);
    }
    for order in ["x".repeat(129), "%00".to_owned(), "%FF".to_owned(), "%20A".to_owned()] {
        let refused = api.place(&order, AMOUNT).await.unwrap();
        assert_problem(&refused, 422, "invalid", &order);
        let unknown = api.get(&format!("/orders/{order}")).await.unwrap();
        assert_problem(&unknown, 404, "unknown_order", &order);
    }

    let raw = |body: Vec<u8>, content_type: &'static str| {
        answer(
            api.client().post(api.url("/payments")).header("content-type", content_type).body(body),
        )
    };
    const JSON: &str = "application/json";
    for broken in [&b"{"[..], b"", b"\xff\xfe", b"{} {}", b"null"] {
        assert_problem(&raw(broken.to_vec(), JSON).await.unwrap(), 422, "invalid", "malformed");
    }
    let good = serde_json::to_vec(&confirmation("tx-1", "A-1", AMOUNT)).unwrap();
    let refused = raw(good.clone(), "text/plain").await.unwrap();
    assert_problem(&refused, 415, "unsupported_media_type", "content type");
    let mut padded = good.clone();
    padded.resize(64 * 1024 + 1, b' ');
    assert_problem(&raw(padded, JSON).await.unwrap(), 413, "body_too_large", "64 KiB and one byte");
    assert_eq!(number(&world.orders, "select count(*) from payments").await, 0);
    let mut just_fits = good;
    just_fits.resize(64 * 1024, b' ');
    assert_eq!(raw(just_fits, JSON).await.unwrap().status, 201, "64 KiB");
}

#[tokio::test]
async fn fifty_simultaneous_identical_confirmations_are_one_payment() {
    let (world, _service, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    let answers = join_all((0..50).map(|_| api.confirm("tx-1", "A-1", AMOUNT))).await;
    let mut by_status = BTreeMap::new();
    for answer in answers {
        let answer = answer.unwrap();
        let bodies: &mut Vec<Value> = by_status.entry(answer.status).or_default();
        bodies.push(answer.body);
    }
    assert_eq!(by_status[&201].len(), 1);
    assert_eq!(by_status[&200].len(), 49);
    assert!(by_status[&200].iter().all(|body| *body == by_status[&201][0]), "the same body");
    assert_eq!(number(&world.orders, "select count(*) from payments").await, 1);
    assert_eq!(number(&world.orders, "select count(*) from outbox").await, 1);
}

#[tokio::test]
async fn fifty_transactions_for_one_order_are_one_payment() {
    let (world, _service, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    let transactions: Vec<String> = (0..50).map(|n| format!("tx-{n}")).collect();
    let answers = join_all(transactions.iter().map(|tx| api.confirm(tx, "A-1", AMOUNT))).await;
    let mut by_status = BTreeMap::new();
    for answer in answers {
        let answer = answer.unwrap();
        *by_status.entry((answer.status, answer.code().to_owned())).or_insert(0) += 1;
    }
    let expected = [((201, String::new()), 1), ((409, "already_paid".to_owned()), 49)];
    assert_eq!(by_status, BTreeMap::from(expected));
    assert_eq!(number(&world.orders, "select count(*) from payments").await, 1);
    assert_eq!(number(&world.orders, "select count(*) from outbox").await, 1);
}

/// Also what the outbox insert's place in the transaction is for: an event that cannot be written
/// takes its payment with it.
#[tokio::test]
async fn a_payment_without_its_event_does_not_exist() {
    let (world, _service, api) = world_with_orders().await;
    api.place("A-1", AMOUNT).await.unwrap();
    sqlx::raw_sql("alter table outbox add constraint full_disk check (false) not valid")
        .execute(&world.orders)
        .await
        .unwrap();
    assert_problem(
        &api.confirm("tx-1", "A-1", AMOUNT).await.unwrap(),
        500,
        "internal",
        "no outbox",
    );
    assert_eq!(number(&world.orders, "select count(*) from payments").await, 0);
    assert_eq!(api.get("/orders/A-1").await.unwrap().body["status"], "pending");

    sqlx::raw_sql("alter table outbox drop constraint full_disk")
        .execute(&world.orders)
        .await
        .unwrap();
    assert_eq!(api.confirm("tx-1", "A-1", AMOUNT).await.unwrap().status, 201, "it can be repeated");
}

/// sqlx ≤ 0.9.0 leaks a transaction when a `begin()` is dropped half way (transact-rs/sqlx#4393).
#[tokio::test]
async fn three_thousand_clients_that_hang_up_leave_no_transaction_and_no_half_payment() {
    const CLIENTS: usize = 3000;
    let world = World::new().await.unwrap();
    // A database with a long way to it: every step of the transaction takes a while, so that some
    // client hangs up during each of them.
    let proxy = Proxy::start(world.postgres().address().await.unwrap()).await.unwrap();
    let database_url = world.database_url_through(Kind::Orders, &proxy).unwrap();
    let plan = world.plan(Kind::Orders).unwrap().with("DATABASE_URL", &database_url);
    let service = plan.start().await.unwrap();
    let api = Api::new(service.url());
    for n in 0..CLIENTS / 10 {
        api.place(&format!("A-{n}"), AMOUNT).await.unwrap();
    }
    proxy.set(Flow::Slow);
    let address = format!("127.0.0.1:{}", service.plan.port);
    stream::iter(0..CLIENTS)
        .for_each_concurrent(32, async |n| {
            let order = n % (CLIENTS / 10);
            let body =
                confirmation(&format!("tx-{order}"), &format!("A-{order}"), AMOUNT).to_string();
            let request = format!(
                "POST /payments HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{body}",
                body.len()
            );
            let mut client = TcpStream::connect(&address).await.unwrap();
            client.write_all(request.as_bytes()).await.unwrap();
            // Loses patience somewhere on the way, and goes.
            let patience = Duration::from_millis(n as u64 % 30);
            if let Ok(answered) = timeout(patience, client.read_u8()).await {
                assert_eq!(answered.unwrap(), b'H', "HTTP");
            }
        })
        .await;
    proxy.set(Flow::Open);
    // What was begun is finished. The limit is below the time after which PostgreSQL itself would
    // end a session that was left in a transaction.
    eventually("no transaction is open", Duration::from_secs(15), async || {
        let states: Vec<(String, i64)> = sqlx::query_as(
            "select state, count(*) from pg_stat_activity where datname = current_database()
             and application_name like 'orders-service-%' and state <> 'idle' group by state",
        )
        .fetch_all(&world.orders)
        .await?;
        anyhow::ensure!(states.is_empty(), "{states:?}");
        Ok(())
    })
    .await
    .unwrap();
    // No half payment.
    let halves = "select count(*) from orders
                  full join payments using (order_id) full join outbox on outbox.aggregate_id = order_id
                  where (orders.status = 'paid') is distinct from (payments.order_id is not null)
                     or (orders.status = 'paid') is distinct from (outbox.event_id is not null)";
    assert_eq!(number(&world.orders, halves).await, 0);
    assert!(number(&world.orders, "select count(*) from payments").await > 0, "some got through");
    // No poisoned connection: each one of the pool still works, and no statement of it runs inside
    // somebody else's transaction (a refused one would turn the rest into 25P02).
    let probes = (0..200).map(async |n| {
        let order = format!("B-{n}");
        assert_eq!(api.place(&order, AMOUNT).await.unwrap().status, 201);
        assert_eq!(api.confirm(&format!("tx-{order}"), &order, AMOUNT).await.unwrap().status, 201);
        assert_eq!(api.confirm("tx-unknown", "nope", AMOUNT).await.unwrap().status, 404);
    });
    join_all(probes).await;
    let seen = "select count(*) from orders where order_id like 'B-%' and status = 'paid'";
    assert_eq!(number(&world.orders, seen).await, 200, "committed, so visible from outside");
    assert!(!service.log().contains("25P02"), "no statement met a failed transaction");
}

#[tokio::test]
async fn the_trace_of_a_request_reaches_the_consumers_log() {
    let (world, _orders, api) = world_with_orders().await;
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    api.place("A-1", AMOUNT).await.unwrap();
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let request = api.client().post(api.url("/payments")).header("traceparent", traceparent);
    assert_eq!(
        answer(request.json(&confirmation("tx-1", "A-1", AMOUNT))).await.unwrap().status,
        201
    );
    world.settled(LIMIT).await.unwrap();

    let kept: String = sqlx::query_scalar("select traceparent from outbox")
        .fetch_one(&world.orders)
        .await
        .unwrap();
    assert_eq!(kept, traceparent);
    let message = world.broker.messages().await.unwrap().remove(0);
    assert_eq!(message.traceparent.as_deref(), Some(traceparent));
    logged(&fulfillment, traceparent).await;
}
