//! Who may confirm a payment: whoever signs as Standard Webhooks has it.

use e2e::{
    api::{Answer, Api, answer, confirmation, sign},
    find::root,
    services::{Kind, Service},
    world::World,
};
use time::{Duration, OffsetDateTime};
use tokio::process::Command;

use crate::support::{AMOUNT, logged, number};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEXT: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const OTHER: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX";

async fn guarded(secrets: &str) -> (World, Service, Api) {
    let world = World::new().await.unwrap();
    let plan = world.plan(Kind::Orders).unwrap().with("PAYMENT_WEBHOOK_SECRET", secrets);
    let service = plan.start().await.unwrap();
    let api = Api::new(service.url());
    (world, service, api)
}

/// Sends a body with headers that were made for it, or for something else.
async fn send(api: &Api, headers: &[(&'static str, String)], body: &str) -> Answer {
    let mut request = api.client().post(api.url("/payments"));
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    answer(request.header("content-type", "application/json").body(body.to_owned())).await.unwrap()
}

#[tokio::test]
async fn a_confirmation_that_is_not_signed_by_who_may_is_401_and_changes_nothing() {
    let (world, service, api) = guarded(SECRET).await;
    api.place("A-1", AMOUNT).await.unwrap();
    let now = OffsetDateTime::now_utc();
    let body = confirmation("tx-1", "A-1", AMOUNT).to_string();
    let good = sign(SECRET, "msg-1", now, &body);
    let without = |name: &str| {
        let rest = good.iter().filter(|(header, _)| *header != name).cloned();
        rest.collect::<Vec<_>>()
    };
    let with = |name: &str, value: &str| {
        let mut headers = without(name);
        headers
            .push((good.iter().find(|(header, _)| *header == name).unwrap().0, value.to_owned()));
        headers
    };
    let seconds = Duration::seconds;
    let cases = [
        ("unsigned", vec![]),
        ("no id", without("webhook-id")),
        ("no time", without("webhook-timestamp")),
        ("no signature", without("webhook-signature")),
        ("another secret", sign(OTHER, "msg-1", now, &body).into()),
        ("another body", sign(SECRET, "msg-1", now, &body.replace("A-1", "A-2")).into()),
        ("another id", with("webhook-id", "msg-2")),
        ("another time", with("webhook-timestamp", &(now.unix_timestamp() + 1).to_string())),
        ("too old", sign(SECRET, "msg-1", now - seconds(310), &body).into()),
        ("of the future", sign(SECRET, "msg-1", now + seconds(310), &body).into()),
        ("no number", with("webhook-timestamp", "now")),
        ("before all time", with("webhook-timestamp", &i64::MIN.to_string())),
        ("after all time", with("webhook-timestamp", &i64::MAX.to_string())),
        ("empty", with("webhook-signature", "")),
        ("of no kind", with("webhook-signature", good[2].1.trim_start_matches("v1,"))),
        ("of another kind", with("webhook-signature", &good[2].1.replace("v1,", "v1a,"))),
        ("cut short", with("webhook-signature", &good[2].1[..good[2].1.len() - 1])),
    ];
    for (what, headers) in cases {
        let refused = send(&api, &headers, &body).await;
        assert_eq!((refused.status, refused.code()), (401, "bad_signature"), "{what}");
        assert_eq!(refused.content_type, "application/problem+json", "{what}");
    }
    // Who they are is asked before what they want.
    assert_eq!(send(&api, &[], "nonsense").await.status, 401);
    assert_eq!(number(&world.orders, "select count(*) from payments").await, 0);
    assert_eq!(api.get("/orders/A-1").await.unwrap().body["status"], "pending");

    assert_eq!(send(&api, &good, &body).await.status, 201);
    assert!(!service.log().contains("MfKQ"), "{}", service.log());
    assert!(!service.log().contains("PAYMENT_WEBHOOK_SECRET is not set"));
}

/// Within its five minutes a signature is good for as many copies as one likes; the transaction is
/// confirmed once.
#[tokio::test]
async fn a_replayed_confirmation_is_the_same_confirmation() {
    let (world, _service, api) = guarded(SECRET).await;
    api.place("A-1", AMOUNT).await.unwrap();
    let body = confirmation("tx-1", "A-1", AMOUNT).to_string();
    let almost_too_old = OffsetDateTime::now_utc() - Duration::seconds(240);
    let headers = sign(SECRET, "msg-1", almost_too_old, &body);
    let first = send(&api, &headers, &body).await;
    assert_eq!(first.status, 201, "{}", first.body);
    for _ in 0..3 {
        let replayed = send(&api, &headers, &body).await;
        assert_eq!((replayed.status, &replayed.body), (200, &first.body));
    }
    assert_eq!(number(&world.orders, "select count(*) from outbox").await, 1);
}

#[tokio::test]
async fn a_secret_is_replaced_without_a_gap() {
    let (_world, _service, api) = guarded(&format!("{SECRET}, {NEXT}")).await;
    let body = confirmation("tx-1", "A-1", AMOUNT).to_string();
    let now = OffsetDateTime::now_utc();
    for (secret, status) in [(SECRET, 404), (NEXT, 404), (OTHER, 401)] {
        let refused = send(&api, &sign(secret, "msg-1", now, &body), &body).await;
        assert_eq!(refused.status, status, "{}", refused.body);
    }
    // A provider in the middle of it signs with both, and says so in one header.
    let [id, time, old] = sign(OTHER, "msg-1", now, &body);
    let [.., new] = sign(NEXT, "msg-1", now, &body);
    let both = [id, time, (old.0, format!("{} {}", old.1, new.1))];
    assert_eq!(send(&api, &both, &body).await.status, 404, "known, but for an unknown order");
}

#[tokio::test]
async fn a_signed_body_keeps_its_limits() {
    let (_world, _service, api) = guarded(SECRET).await;
    let large = "x".repeat(65 * 1024);
    let headers = sign(SECRET, "msg-1", OffsetDateTime::now_utc(), &large);
    assert_eq!(send(&api, &headers, &large).await.status, 413);
    let body = "not json";
    let headers = sign(SECRET, "msg-1", OffsetDateTime::now_utc(), body);
    let refused = send(&api, &headers, body).await;
    assert_eq!((refused.status, refused.code()), (422, "invalid"));
}

/// `deploy/confirm-payment` signs without this project's code, as anybody's provider does.
#[tokio::test]
async fn a_signature_made_by_others_is_accepted() {
    let (_world, _service, api) = guarded(SECRET).await;
    api.place("A-1", AMOUNT).await.unwrap();
    let output = Command::new(root().join("deploy/confirm-payment"))
        .args(["tx-1", "A-1", &AMOUNT.to_string()])
        .env("ORDERS_HTTP", api.url(""))
        .env("PAYMENT_WEBHOOK_SECRET", SECRET)
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "are curl and openssl there? {text} {why}");
    assert!(text.contains("confirmedAt"), "{text}");
}

#[tokio::test]
async fn without_a_secret_a_service_says_so_at_the_start() {
    let world = World::new().await.unwrap();
    let service = world.start(Kind::Orders).await.unwrap();
    logged(&service, "PAYMENT_WEBHOOK_SECRET is not set").await;
}
