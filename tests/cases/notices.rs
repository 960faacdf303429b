//! Claims with a time to live, and the notices they thin out.

use std::time::Duration;

use e2e::{
    contract::NOTICES,
    outside::{Outside, Reply},
    proxy::{Flow, Proxy},
    services::{Kind, Service},
    wait::eventually,
    world::World,
};
use futures_util::{StreamExt as _, future::join_all};
use shared::{
    claim::{Claim, Claimed, Claims},
    topology,
};
use tokio::time::timeout;

use crate::support::{
    DEAD_LETTERS, LIMIT, called, connected, logged, number, publish_report, report, reported,
};

const LEASE: Duration = Duration::from_secs(30);
/// The shortest time to live there is.
const SHORT: Duration = Duration::from_secs(1);

async fn claims(world: &World) -> Claims {
    Claims::new(connected(&world.nats.url()).await, topology::NOTICES)
}

fn ours(claimed: Claimed) -> Claim {
    match claimed {
        Claimed::Ours(claim) => claim,
        other => panic!("{other:?}"),
    }
}

/// Waits until a key is free, and claims it.
async fn claimed_at_last(claims: &Claims, key: &str, lease: Duration) -> Claim {
    eventually("the claim runs out", LIMIT, async || match claims.claim(key, lease).await? {
        Claimed::Ours(claim) => Ok(claim),
        other => anyhow::bail!("{other:?}"),
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn of_many_who_claim_a_key_at_once_one_has_it() {
    let world = World::new().await.unwrap();
    let (one, other) = (claims(&world).await, claims(&world).await);
    for key in ["A-1", "Ünï.cöde /=% *>", "A-1.b"] {
        let both = (0..20).map(|n| if n % 2 == 0 { &one } else { &other });
        let claimed = join_all(both.map(|claims| claims.claim(key, LEASE))).await;
        let claimed: Vec<Claimed> = claimed.into_iter().map(Result::unwrap).collect();
        let held = claimed.iter().filter(|claimed| **claimed == Claimed::Held).count();
        assert_eq!(held, 19, "{key}: {claimed:?}");
    }
}

/// Over the marker of an expired key the client's own `create_with_ttl` writes for ever.
#[tokio::test]
async fn a_claim_that_ran_out_can_be_claimed_again_and_runs_out_again() {
    let world = World::new().await.unwrap();
    let claims = claims(&world).await;
    for _ in 0..3 {
        claimed_at_last(&claims, "A-1", SHORT).await;
        assert_eq!(claims.claim("A-1", SHORT).await.unwrap(), Claimed::Held);
    }
    // The same over the marker of one that was given back, and of a mark that is too old.
    let claim = claimed_at_last(&claims, "A-1", LEASE).await;
    claims.release(claim).await.unwrap();
    let claim = ours(claims.claim("A-1", SHORT).await.unwrap());
    assert!(claims.done(claim, SHORT).await.unwrap());
    assert_eq!(claims.claim("A-1", SHORT).await.unwrap(), Claimed::Done);
    claimed_at_last(&claims, "A-1", SHORT).await;
}

#[tokio::test]
async fn a_mark_after_the_lease_counts_unless_somebody_else_is_at_it() {
    let world = World::new().await.unwrap();
    let claims = claims(&world).await;
    let late = ours(claims.claim("A-1", SHORT).await.unwrap());
    let current = claimed_at_last(&claims, "A-1", LEASE).await;
    assert!(!claims.done(late, LEASE).await.unwrap(), "theirs");
    assert_eq!(claims.claim("A-1", LEASE).await.unwrap(), Claimed::Held, "unharmed");
    assert!(claims.done(current, LEASE).await.unwrap());
    assert_eq!(claims.claim("A-1", LEASE).await.unwrap(), Claimed::Done);

    // Nobody else wanted it: it has run out when the next lease, taken later, has.
    let late = ours(claims.claim("B-1", SHORT).await.unwrap());
    claimed_at_last(&claims, "B-2", SHORT).await;
    claimed_at_last(&claims, "B-2", SHORT).await;
    assert!(claims.done(late, LEASE).await.unwrap());
    assert_eq!(claims.claim("B-1", LEASE).await.unwrap(), Claimed::Done);
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_is_recognised_as_ones_own() {
    let world = World::new().await.unwrap();
    let proxy = Proxy::start(world.nats.address()).await.unwrap();
    let behind = connected(&world.nats.url_through(proxy.address())).await;
    let behind = Claims::new(behind, topology::NOTICES);
    // Whoever got no answer asks how the key stands. That question is what we wait for.
    let client = async_nats::connect(world.nats.url()).await.unwrap();
    let mut questions =
        client.subscribe(format!("$JS.API.STREAM.MSG.GET.KV_{NOTICES}")).await.unwrap();
    client.flush().await.unwrap();
    proxy.set(Flow::HoldReplies);
    let claim = behind.claim("A-1", LEASE);
    let lose = async {
        timeout(LIMIT, questions.next()).await.expect("it asks").unwrap();
        let stored = world.broker.js.get_stream(format!("KV_{NOTICES}")).await.unwrap();
        assert_eq!(stored.cached_info().state.messages, 1, "it was stored");
        proxy.set(Flow::Open);
    };
    let (claimed, ()) = tokio::join!(claim, lose);
    let claim = ours(claimed.unwrap());
    let other = claims(&world).await;
    assert_eq!(other.claim("A-1", LEASE).await.unwrap(), Claimed::Held);
    assert!(behind.done(claim, LEASE).await.unwrap(), "and it can be used");
    assert_eq!(other.claim("A-1", LEASE).await.unwrap(), Claimed::Done);
}

async fn notifying(world: &World, receiver: &Outside) -> Service {
    let plan = world.plan(Kind::Fulfillment).unwrap();
    plan.with("NOTIFY_URL", &receiver.url()).start().await.unwrap()
}

/// Kills the service with its first call in hand; the second one makes it one notice.
async fn one_notice_after_a_crash(world: &World, mut fulfillment: Service, receiver: &Outside) {
    fulfillment.end("KILL").await.unwrap();
    receiver.behave(|_| Reply::Accept);
    fulfillment.start_again().await.unwrap();
    reported(world, "notifications").await;
    assert_eq!((receiver.effects().len(), receiver.calls().len()), (1, 2));
}

#[tokio::test]
async fn crash_point_6a_after_the_claim_the_notice_comes_later() {
    let world = World::new().await.unwrap();
    let receiver = Outside::start().await.unwrap();
    receiver.behave(|_| Reply::Hold);
    let fulfillment = notifying(&world, &receiver).await;
    publish_report(&world, &report("tx-1", "A-1", "PARCEL-1")).await;
    called(&receiver, 1).await;
    one_notice_after_a_crash(&world, fulfillment, &receiver).await;
}

#[tokio::test]
async fn crash_point_6b_after_the_notice_it_comes_once_more_under_the_same_key() {
    let world = World::new().await.unwrap();
    let receiver = Outside::start().await.unwrap();
    receiver.behave(|_| Reply::Late(LIMIT));
    let fulfillment = notifying(&world, &receiver).await;
    publish_report(&world, &report("tx-1", "A-1", "PARCEL-1")).await;
    eventually("it is told", LIMIT, async || {
        anyhow::ensure!(receiver.effects().len() == 1, "not yet");
        Ok(())
    })
    .await
    .unwrap();
    one_notice_after_a_crash(&world, fulfillment, &receiver).await;
}

#[tokio::test]
async fn crash_point_6c_after_the_mark_a_repetition_tells_nobody() {
    let world = World::new().await.unwrap();
    let receiver = Outside::start().await.unwrap();
    let mut fulfillment = notifying(&world, &receiver).await;
    let first = report("tx-1", "A-1", "PARCEL-1");
    publish_report(&world, &first).await;
    reported(&world, "notifications").await;
    fulfillment.end("KILL").await.unwrap();
    fulfillment.start_again().await.unwrap();
    // What a lost ack leads to, and the same in a new event.
    for again in [&first, &first, &report("tx-1", "A-1", "PARCEL-1")] {
        publish_report(&world, again).await;
    }
    reported(&world, "notifications").await;
    assert_eq!(receiver.calls().len(), 1, "told once");
    assert_eq!(fulfillment.log().matches("absorbed by Claim").count(), 3);
}

#[tokio::test]
async fn a_notice_that_fails_goes_out_later_and_one_that_is_refused_is_set_aside() {
    let world = World::new().await.unwrap();
    let receiver = Outside::start().await.unwrap();
    receiver.behave(|call| match (call.body["orderId"].as_str(), call.attempt) {
        (Some("A-1"), 1) => Reply::Fail(500, None),
        (Some("A-2"), _) => Reply::Refuse("who is that?"),
        (Some("A-3"), _) => Reply::Fail(500, None),
        _ => Reply::Accept,
    });
    let plan = world.plan(Kind::Fulfillment).unwrap();
    let plan = plan.with("NOTIFY_URL", &receiver.url()).with("CONSUMER_MAX_DELIVERIES", "3");
    let _fulfillment = plan.start().await.unwrap();
    for n in 1..=5 {
        publish_report(&world, &report(&format!("tx-{n}"), &format!("A-{n}"), "PARCEL")).await;
    }
    reported(&world, "notifications").await;
    let mut told: Vec<String> = receiver
        .effects()
        .values()
        .map(|body| body["orderId"].as_str().unwrap().to_owned())
        .collect();
    told.sort();
    assert_eq!(told, ["A-1", "A-4", "A-5"]);
    // A claim given back lets the next delivery in at once, so a failure costs one delivery.
    let calls =
        |order: &str| receiver.calls().iter().filter(|c| c.body["orderId"] == order).count();
    assert_eq!((calls("A-1"), calls("A-2"), calls("A-3")), (2, 1, 3));
    let letters: Vec<(String, String)> =
        sqlx::query_as("select consumer, reason from dead_letters order by stream_seq")
            .fetch_all(&world.fulfillment)
            .await
            .unwrap();
    let expected = [("notifications", "rejected"), ("notifications", "delivery_limit")];
    assert_eq!(
        letters,
        expected.map(|(consumer, reason)| (consumer.to_owned(), reason.to_owned()))
    );
}

#[tokio::test]
async fn without_a_receiver_a_notice_is_logged_once() {
    let world = World::new().await.unwrap();
    let fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let report = report("tx-1", "A-1", "PARCEL-1");
    publish_report(&world, &report).await;
    publish_report(&world, &report).await;
    reported(&world, "notifications").await;
    logged(&fulfillment, "notice: on its way as PARCEL-1").await;
    assert_eq!(fulfillment.log().matches("notice: on its way").count(), 1);
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}
