//! What a carrier may say or do, and what that is taken for: in this process, one call or one step at a
//! time.

use std::time::{Duration, SystemTime};

use e2e::{
    outside::{Outside, Reply},
    wait::eventually,
    world::World,
};
use fulfillment_service::{
    breaker::CircuitBreaker,
    call::{CALL_LIMIT, CallError},
    carrier::{Carrier, HttpCarrier, Parcel, SandboxCarrier},
    dispatcher::{Dispatcher, LEASE, Outcome, Wakers},
    dispatches,
};
use shared::{lifecycle::Health, values::TrackingCode};
use sqlx::PgPool;
use tokio::{io::AsyncReadExt as _, net::TcpListener, time::timeout};
use uuid::Uuid;

use crate::support::{AMOUNT, LIMIT, number, request_dispatch};

fn parcel() -> Parcel {
    let text = |text: &str| text.to_owned();
    Parcel {
        dispatch_id: Uuid::now_v7(),
        order_id: text("A-1").try_into().unwrap(),
        transaction_id: text("tx-1").try_into().unwrap(),
        customer_id: text("C-1").try_into().unwrap(),
        amount_minor: AMOUNT.try_into().unwrap(),
        currency: text("EUR").try_into().unwrap(),
        traceparent: None,
    }
}

#[tokio::test]
async fn every_answer_of_a_carrier_is_taken_for_what_it_is() {
    let double = Outside::start().await.unwrap();
    let carrier = HttpCarrier::new(double.url().parse().unwrap()).unwrap();
    let book = async |reply: Reply| {
        double.behave(move |_| reply.clone());
        carrier.book(&parcel()).await
    };
    assert_eq!(book(Reply::Accept).await.unwrap().as_str(), "PARCEL-A-1");
    for status in [400, 413, 422] {
        let error = book(Reply::Fail(status, None)).await.unwrap_err();
        assert!(
            matches!(&error, CallError::Refused { reason } if reason.contains("not now")),
            "{error}"
        );
    }
    for status in [429, 503] {
        let error = book(Reply::Fail(status, Some("7".to_owned()))).await.unwrap_err();
        assert!(matches!(error, CallError::Unavailable { .. }), "{error}");
        assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
    }
    // A mistake of ours, or an accident of theirs: no reason to give a parcel up. Each asked once: a
    // redirect is not followed.
    for status in [301, 307, 401, 403, 404, 409, 500, 502, 504] {
        let before = double.calls().len();
        let error = book(Reply::Fail(status, None)).await.unwrap_err();
        assert!(matches!(error, CallError::UnknownOutcome { .. }), "{status}: {error}");
        assert_eq!((error.retry_after(), double.calls().len()), (None, before + 1));
    }
    for silence in [Reply::HangUp, Reply::Late(LIMIT)] {
        let error = timeout(2 * CALL_LIMIT, book(silence)).await.expect("cut off").unwrap_err();
        assert!(matches!(error, CallError::UnknownOutcome { .. }), "{error}");
    }

    let soon = SystemTime::now() + Duration::from_secs(60);
    for (header, at_least, at_most) in [
        (httpdate(soon), 50, 60),
        ("999999999".to_owned(), 3600, 3600),
        ("Thu, 01 Jan 2015 00:00:00 GMT".to_owned(), 0, 0),
    ] {
        let error = book(Reply::Fail(503, Some(header))).await.unwrap_err();
        let wait = error.retry_after().unwrap().as_secs();
        assert!((at_least..=at_most).contains(&wait), "{wait} s");
    }
    assert_eq!(
        book(Reply::Fail(503, Some("soon".to_owned()))).await.unwrap_err().retry_after(),
        None
    );

    let address = double.url();
    drop(double);
    let nobody = HttpCarrier::new(address.parse().unwrap()).unwrap();
    let error = eventually("it is closed", LIMIT, async || match nobody.book(&parcel()).await {
        Err(error @ CallError::Unavailable { .. }) => Ok(error),
        other => anyhow::bail!("{other:?}"),
    })
    .await
    .unwrap();
    assert!(error.to_string().contains("refused"), "{error}");
}

fn httpdate(time: SystemTime) -> String {
    let format = time::macros::format_description!(
        "[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT"
    );
    time::OffsetDateTime::from(time).format(format).unwrap()
}

/// With no provider, or with two, this panics, after everything has worked without TLS.
#[tokio::test]
async fn a_carrier_behind_tls_is_greeted_in_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://user:hunter2@{}", listener.local_addr().unwrap());
    let carrier = HttpCarrier::new(url.parse().unwrap()).unwrap();
    let greeting = async {
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut greeting = [0; 2];
        connection.read_exact(&mut greeting).await.unwrap();
        greeting
    };
    let parcel = parcel();
    let (greeting, booked) = tokio::join!(greeting, carrier.book(&parcel));
    assert_eq!(greeting, [0x16, 0x03], "a TLS handshake record");
    let error = booked.unwrap_err();
    assert!(matches!(error, CallError::Unavailable { .. }), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[tokio::test]
async fn the_sandbox_gives_the_same_code_for_the_same_key_and_no_other() {
    let (one, other) = (parcel(), parcel());
    let code = SandboxCarrier.book(&one).await.unwrap();
    assert_eq!(SandboxCarrier.book(&one).await.unwrap(), code);
    assert_ne!(SandboxCarrier.book(&other).await.unwrap(), code);
}

/// What a cloner may write.
enum BadCarrier {
    Panics,
    Hangs,
    SendsNul,
    /// Takes so long that somebody else has taken the dispatch.
    LosesTheLease(PgPool),
}

impl Carrier for BadCarrier {
    async fn book(&self, _: &Parcel) -> Result<TrackingCode, CallError> {
        match self {
            Self::Panics => panic!("as the test wants it"),
            Self::Hangs => std::future::pending().await,
            Self::LosesTheLease(pool) => {
                sqlx::query("update dispatches set due_at = now()").execute(pool).await.unwrap();
                dispatches::take(pool, LEASE).await.unwrap().expect("it is due");
                Ok("PARCEL-1".to_owned().try_into().unwrap())
            }
            Self::SendsNul => Err(CallError::Refused { reason: "no\0 way".to_owned() }),
        }
    }
}

fn dispatcher<C: Carrier>(pool: &PgPool, carrier: C) -> Dispatcher<C> {
    let wakers = Wakers { own: std::sync::Arc::default(), relay: std::sync::Arc::default() };
    Dispatcher::new(pool.clone(), carrier, wakers, Duration::from_millis(500), Health::default())
}

#[tokio::test]
async fn a_carrier_that_panics_or_hangs_or_says_what_cannot_be_stored_costs_one_attempt() {
    let world = World::new().await.unwrap();
    let mut connection = world.fulfillment.acquire().await.unwrap();
    request_dispatch(&mut connection, "tx-1", "A-1").await;
    for (carrier, outcome) in [
        (BadCarrier::Panics, Outcome::Postponed),
        (BadCarrier::Hangs, Outcome::Postponed),
        (BadCarrier::SendsNul, Outcome::Refused),
    ] {
        let dispatcher = dispatcher(&world.fulfillment, carrier);
        sqlx::query("update dispatches set due_at = now()")
            .execute(&world.fulfillment)
            .await
            .unwrap();
        let step = timeout(LIMIT, dispatcher.step()).await.expect("cut off");
        assert_eq!(step.unwrap(), outcome);
        assert_eq!(dispatcher.step().await.unwrap(), Outcome::Idle);
    }
    let attempts = number(&world.fulfillment, "select sum(attempts) from dispatches").await;
    assert_eq!(attempts, 3);
}

#[tokio::test]
async fn an_answer_for_a_dispatch_in_other_hands_changes_nothing_and_is_counted() {
    let world = World::new().await.unwrap();
    let mut connection = world.fulfillment.acquire().await.unwrap();
    request_dispatch(&mut connection, "tx-1", "A-1").await;
    let carrier = BadCarrier::LosesTheLease(world.fulfillment.clone());
    let dispatcher = dispatcher(&world.fulfillment, carrier);
    assert_eq!(dispatcher.step().await.unwrap(), Outcome::Superseded);
    assert_eq!(dispatcher.superseded(), 1);
    let status: String = sqlx::query_scalar("select status from dispatches")
        .fetch_one(&world.fulfillment)
        .await
        .unwrap();
    assert_eq!(status, "requested");
    assert_eq!(number(&world.fulfillment, "select count(*) from outbox").await, 0);
}

#[tokio::test]
async fn whoever_comes_late_hits_no_row_whatever_it_has_to_say() {
    let world = World::new().await.unwrap();
    let pool = &world.fulfillment;
    let mut connection = pool.acquire().await.unwrap();
    request_dispatch(&mut connection, "tx-1", "A-1").await;
    let take = async |lease| dispatches::take(pool, lease).await.unwrap();
    let late = take(Duration::ZERO).await.unwrap();
    let current = take(LEASE).await.unwrap();
    assert_eq!((late.attempt, current.attempt), (1, 2));
    assert!(take(LEASE).await.is_none(), "leased");
    let code: TrackingCode = "PARCEL-1".to_owned().try_into().unwrap();
    for (taken, ours) in [(&late, false), (&current, true), (&current, false)] {
        if !ours {
            assert!(!dispatches::fail(&mut connection, taken, "no").await.unwrap());
            assert!(!dispatches::postpone(pool, taken, LEASE, "later").await.unwrap());
        }
        let completed = dispatches::complete(&mut connection, taken, &code).await.unwrap();
        assert_eq!(completed.is_some(), ours);
    }
}

#[tokio::test]
async fn an_open_circuit_breaker_lets_nobody_through_and_then_only_the_probe() {
    let breaker = CircuitBreaker::default();
    breaker.failed(None);
    assert!(breaker.allows(false), "one failure is that call's own");
    breaker.failed(None);
    assert!(!breaker.allows(true) && !breaker.allows(false), "open");
    assert!(!breaker.succeeded() && !breaker.allows(true), "a call from before does not close it");
    eventually("the pause is over", LIMIT, async || {
        anyhow::ensure!(breaker.pause().is_none(), "not yet");
        Ok(())
    })
    .await
    .unwrap();
    assert!(breaker.allows(true) && !breaker.allows(false), "half open");
    assert!(breaker.succeeded());
    assert!(breaker.allows(false), "closed");

    // To be in a hurry is no wish that is honoured.
    breaker.failed(Some(Duration::ZERO));
    breaker.failed(Some(Duration::ZERO));
    assert!(breaker.pause().is_some());
    breaker.failed(Some(LIMIT));
    assert!(breaker.pause().unwrap() > LIMIT / 2);
}
