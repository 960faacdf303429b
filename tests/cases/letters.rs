//! Dead letters, as an operator meets them: whatever they hold, they are listed, shown, and tried again
//! without anything being applied twice.

use anyhow::ensure;
use e2e::{
    api::Api,
    contract::ORDER_DISPATCHED,
    outside::{Outside, Reply},
    services::{Kind, Plan, Said},
    wait::eventually,
    world::World,
};
use sqlx::PgPool;

use crate::support::{
    AMOUNT, DEAD_LETTERS, DISPATCHES, LIMIT, announce, bytes, consumed, dispatched, event, number,
    pay, ready, report, reported,
};

/// How many letters wait for a person.
const OPEN: &str = "select count(*) from dead_letters where resolved_at is null";

async fn letters(plan: &Plan, arguments: &[&str]) -> Said {
    plan.command(&[&["dead-letters"], arguments, &["--json"]].concat()).await.unwrap()
}

fn outcomes(said: &Said, outcome: &str) -> usize {
    said.rows().iter().filter(|row| row["outcome"] == outcome).count()
}

async fn ids(pool: &PgPool) -> Vec<String> {
    let query = "select dead_letter_id::text from dead_letters order by created_at, dead_letter_id";
    sqlx::query_scalar(query).fetch_all(pool).await.unwrap()
}

/// Waits until so many letters wait for a person.
async fn open(pool: &PgPool, count: i64) {
    eventually("they are set aside", LIMIT, async || {
        let open = number(pool, OPEN).await;
        ensure!(open == count, "{open} of {count}");
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn three_hundred_letters_are_replayed_and_nothing_is_applied_twice() {
    const EACH: usize = 100;
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|call| match call.body["orderId"].as_str() {
        Some(order) if order.starts_with("bad") => Reply::Refuse("no such address"),
        _ => Reply::Accept,
    });
    let orders = world.start(Kind::Orders).await.unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap().with("CARRIER_URL", &carrier.url());
    let _fulfillment = plan.start().await.unwrap();
    let api = Api::new(orders.url());
    ready(&api).await;
    pay(&api, "good", EACH).await;
    pay(&api, "bad", EACH).await;
    dispatched(&world, 2 * EACH as i64).await;
    for n in 0..EACH {
        // The same transaction over another amount.
        let conflict = event(&format!("tx-good-{n}"), &format!("good-{n}"), AMOUNT + 1);
        world.broker.publish(&bytes(&conflict), None).await.unwrap();
        world.broker.publish(&[0xff, 0x00, n as u8], None).await.unwrap();
    }
    consumed(&world).await;
    open(&world.fulfillment, 3 * EACH as i64).await;

    let dry = letters(&plan, &["replay", "--all", "--dry-run"]).await;
    assert_eq!(outcomes(&dry, "readable"), 2 * EACH, "{}", dry.err);
    assert_eq!((dry.code, outcomes(&dry, "stays")), (1, EACH), "what is no event is no event");
    assert_eq!(number(&world.fulfillment, OPEN).await, 3 * EACH as i64);
    let replays = "select sum(replays)::bigint from dead_letters";
    assert_eq!(number(&world.fulfillment, replays).await, 0, "a dry run changes nothing");
    let calls = carrier.calls().len();

    // The addresses were mended.
    carrier.behave(|_| Reply::Accept);
    let real = letters(&plan, &["replay", "--all"]).await;
    assert_eq!((real.code, outcomes(&real, "settled")), (1, EACH), "{}", real.err);
    assert_eq!(outcomes(&real, "stays"), 2 * EACH);
    world.settled(LIMIT).await.unwrap();
    assert_eq!(carrier.effects().len(), 2 * EACH, "each parcel once");
    assert_eq!(carrier.calls().len(), calls + EACH, "and each refused one asked for once more");

    let again = letters(&plan, &["replay", "--all"]).await;
    assert_eq!((outcomes(&again, "settled"), outcomes(&again, "stays")), (0, 2 * EACH));
    let by_id = ids(&world.fulfillment).await;
    let by_id: Vec<&str> = by_id.iter().map(String::as_str).collect();
    let named = letters(&plan, &[&["replay"], &by_id[..]].concat()).await;
    assert_eq!((outcomes(&named, "settled"), outcomes(&named, "stays")), (EACH, 2 * EACH));
    let ledger = world.settled(LIMIT).await.unwrap();
    assert_eq!((ledger.dispatches, ledger.failed), (2 * EACH, 0), "{ledger:?}");
    assert_eq!(carrier.calls().len(), calls + EACH, "nobody was asked again");
    let counts: Vec<(String, i64, i64)> = sqlx::query_as(
        "select reason, count(*), sum(replays)::bigint from dead_letters where resolved_at is null
         group by reason order by reason",
    )
    .fetch_all(&world.fulfillment)
    .await
    .unwrap();
    let (each, thrice) = (EACH as i64, 3 * EACH as i64);
    assert_eq!(
        counts,
        [
            ("transaction_conflict".to_owned(), each, thrice),
            ("undecodable".to_owned(), each, thrice)
        ]
    );
}

#[tokio::test]
async fn a_letter_of_any_bytes_and_any_size_is_listed_shown_and_tried_again() {
    let world = World::new().await.unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap();
    let large = vec![0xfe; 20 * 1024 * 1024];
    for (place, body) in [&[][..], b"\x1b[2Jtext\0", &[0xff, 0xfe, 0x00], &large].iter().enumerate()
    {
        sqlx::query(
            "insert into dead_letters (dead_letter_id, consumer, stream, stream_seq, subject, reason,
                                       error, headers, body, deliveries)
             values (gen_random_uuid(), 'fulfillment', 'ORDERS', $1, E'a\\nb', 'undecodable', E'\\x1b[2J',
                     '{\"bad name \": [\"a\\nb\", 7], \"traceparent\": \"no list\"}', $2, 1)",
        )
        .bind(place as i64)
        .bind(*body)
        .execute(&world.fulfillment)
        .await
        .unwrap();
    }
    let list = letters(&plan, &["list"]).await;
    let sizes: Vec<i64> =
        list.rows().iter().map(|row| row["bodyBytes"].as_i64().unwrap()).collect();
    assert_eq!(sizes, [0, 9, 3, large.len() as i64]);
    let table = plan.command(&["dead-letters", "list"]).await.unwrap();
    assert_eq!(table.out.lines().count(), 5, "a heading, and a line for each");
    let mut shapes = Vec::new();
    for id in ids(&world.fulfillment).await {
        let shown = plan.command(&["dead-letters", "show", &id]).await.unwrap();
        assert_eq!(shown.code, 0, "{}", shown.err);
        assert!(
            !shown.out.contains('\x1b') && !table.out.contains('\x1b'),
            "no control characters"
        );
        let shown = letters(&plan, &["show", &id]).await;
        shapes.push((
            shown.rows()[0]["body"].as_str().map(str::len),
            shown.rows()[0]["bodyBase64"].as_str().map(str::len),
        ));
    }
    let in_base64 = |length: usize| (None, Some(length.div_ceil(3) * 4));
    assert_eq!(shapes, [(Some(0), None), (Some(9), None), in_base64(3), in_base64(large.len())]);
    let replayed = letters(&plan, &["replay", "--all", "--reason", "undecodable"]).await;
    assert_eq!((replayed.code, outcomes(&replayed, "stays")), (1, 4), "{}", replayed.err);
    let nobody = letters(&plan, &["show", "00000000-0000-0000-0000-000000000000"]).await;
    assert_eq!(nobody.code, 1);
    assert!(nobody.err.contains("there is no dead letter"), "{}", nobody.err);
}

#[tokio::test]
async fn a_replay_that_fails_again_stays_with_the_new_error_and_one_that_works_is_settled() {
    let world = World::new().await.unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap();
    // Set aside by an older release, and for another reason.
    let keep = async |order: &str, reason: &str| {
        let body = bytes(&event(&format!("tx-{order}"), order, AMOUNT));
        sqlx::query(
            "insert into dead_letters (dead_letter_id, consumer, stream, stream_seq, subject, reason,
                                       error, headers, body, deliveries)
             select gen_random_uuid(), 'fulfillment', 'ORDERS', count(*), 'orders.payment.confirmed', $2,
                    'as it was', '{}', $1, 11 from dead_letters",
        )
        .bind(body)
        .bind(reason)
        .execute(&world.fulfillment)
        .await
        .unwrap();
    };
    keep("A", "delivery_limit").await;
    let said = letters(&plan, &["replay", "--all"]).await;
    assert_eq!((said.code, outcomes(&said, "settled")), (0, 1), "{}", said.out);
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);

    // The same payment in another letter is a duplicate; with another amount it is a conflict.
    keep("A", "delivery_limit").await;
    let conflict = bytes(&event("tx-A", "A", AMOUNT + 1));
    keep("B", "delivery_limit").await;
    sqlx::query("update dead_letters set body = $1 where stream_seq = 2")
        .bind(conflict)
        .execute(&world.fulfillment)
        .await
        .unwrap();
    let said = letters(&plan, &["replay", "--all"]).await;
    assert_eq!((said.code, outcomes(&said, "settled"), outcomes(&said, "stays")), (1, 1, 1));
    let rows: Vec<(String, String, Option<String>, Option<String>)> = sqlx::query_as(
        "select reason, error, resolution, resolved_by from dead_letters order by stream_seq",
    )
    .fetch_all(&world.fulfillment)
    .await
    .unwrap();
    assert_eq!(rows[0].2.as_deref(), Some("replayed: applied"));
    assert_eq!(rows[1].2.as_deref(), Some("replayed: a duplicate, absorbed by Transaction"));
    assert!(rows[0].3.as_ref().is_some_and(|by| !by.is_empty()), "somebody did it");
    assert_eq!((rows[2].0.as_str(), rows[2].2.as_deref()), ("transaction_conflict", None));
    assert!(rows[2].1.contains("was dispatched"), "the new error: {}", rows[2].1);
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
}

#[tokio::test]
async fn crash_point_7_between_a_replay_and_its_note_the_next_one_is_a_duplicate() {
    let world = World::new().await.unwrap();
    let plan = world.plan(Kind::Fulfillment).unwrap();
    let keep = "insert into dead_letters (dead_letter_id, consumer, stream, stream_seq, subject, reason,
                                          error, headers, body, deliveries)
                values (gen_random_uuid(), $1, 'ORDERS', 1, '', 'delivery_limit', '', '{}', $2, 11)";
    let body = bytes(&event("tx-A", "A", AMOUNT));
    sqlx::query(keep).bind("fulfillment").bind(&body).execute(&world.fulfillment).await.unwrap();
    assert_eq!(letters(&plan, &["replay", "--all"]).await.code, 0);
    // As if nobody had come to note it.
    let forget = "update dead_letters set resolved_at = null, resolution = null";
    sqlx::query(forget).execute(&world.fulfillment).await.unwrap();
    assert_eq!(letters(&plan, &["replay", "--all"]).await.code, 0);
    let how: String = sqlx::query_scalar("select resolution from dead_letters")
        .fetch_one(&world.fulfillment)
        .await
        .unwrap();
    assert_eq!(how, "replayed: a duplicate, absorbed by Event");
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);

    // One of a consumer that is no more, and one that holds no parcel, hold up nobody.
    for consumer in ["an older one", "dispatcher"] {
        sqlx::query(keep).bind(consumer).bind(&body).execute(&world.fulfillment).await.unwrap();
    }
    let said = letters(&plan, &["replay", "--all"]).await;
    assert_eq!((said.code, outcomes(&said, "stays")), (1, 2), "{}", said.err);
}

#[tokio::test]
async fn a_discarded_letter_says_who_and_why() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let plan = &_fulfillment.plan;
    world.broker.publish(b"garbage", None).await.unwrap();
    open(&world.fulfillment, 1).await;
    let id = &ids(&world.fulfillment).await[0];
    let discard =
        async |why| plan.command(&["dead-letters", "discard", id, "--why", why]).await.unwrap();
    assert_eq!(discard(" ").await.code, 1, "a reason is wanted");
    assert_eq!(discard("a test of the provider").await.code, 0);
    assert_eq!(discard("a test of the provider").await.code, 0, "once more is the same");
    let other = discard("no reason").await;
    assert_eq!(other.code, 1);
    assert!(other.err.contains("settled already: discarded: a test"), "{}", other.err);
    assert!(letters(plan, &["list"]).await.rows().is_empty());
    let all = letters(plan, &["list", "--all"]).await.rows();
    assert_eq!(all[0]["resolution"], "discarded: a test of the provider");
    assert!(all[0]["resolvedBy"].as_str().is_some_and(|by| !by.is_empty()));
    let replayed = letters(plan, &["replay", id]).await;
    assert_eq!((replayed.code, outcomes(&replayed, "settled")), (0, 1), "it stays discarded");
}

#[tokio::test]
async fn refused_notices_and_reports_are_replayed_by_their_own_handlers() {
    let world = World::new().await.unwrap();
    let receiver = Outside::start().await.unwrap();
    receiver.behave(|_| Reply::Refuse("no such customer"));
    let orders = world.start(Kind::Orders).await.unwrap();
    let notify = format!("{}/notices", receiver.url());
    let plan = world.plan(Kind::Fulfillment).unwrap().with("NOTIFY_URL", &notify);
    let mut fulfillment = plan.start().await.unwrap();
    pay(&Api::new(orders.url()), "A", 1).await;
    open(&world.fulfillment, 1).await;
    assert_eq!(outcomes(&letters(&plan, &["replay", "--all"]).await, "stays"), 1);
    receiver.behave(|_| Reply::Accept);
    assert_eq!(letters(&plan, &["replay", "--all"]).await.code, 0);
    assert_eq!(letters(&plan, &["replay", "--all"]).await.rows().len(), 0);
    assert_eq!(receiver.effects().len(), 1);

    // A report about an order that is only restored later.
    fulfillment.end("TERM").await.unwrap();
    let unknown = report("tx-B", "B", "PARCEL-B");
    world.broker.publish_to(ORDER_DISPATCHED, &bytes(&unknown), None).await.unwrap();
    open(&world.orders, 1).await;
    let api = Api::new(orders.url());
    assert_eq!(outcomes(&letters(&orders.plan, &["replay", "--all"]).await, "stays"), 1);
    api.place("B", AMOUNT).await.unwrap();
    api.confirm("tx-B", "B", AMOUNT).await.unwrap();
    assert_eq!(letters(&orders.plan, &["replay", "--all"]).await.code, 0);
    assert_eq!(api.get("/orders/B").await.unwrap().body["trackingCode"], "PARCEL-B");
    reported(&world, "orders").await;
}

/// Places count from 1 again in a stream that was made anew.
#[tokio::test]
async fn a_letter_in_the_place_of_an_older_one_is_kept_beside_it() {
    let world = World::new().await.unwrap();
    let _fulfillment = world.start(Kind::Fulfillment).await.unwrap();
    let bodies = async || -> Vec<(String, Vec<u8>)> {
        let query = "select stream, body from dead_letters order by created_at, dead_letter_id";
        sqlx::query_as(query).fetch_all(&world.fulfillment).await.unwrap()
    };
    for (round, body) in [&b"one"[..], b"another"].into_iter().enumerate() {
        world.broker.publish(body, None).await.unwrap();
        open(&world.fulfillment, round as i64 + 1).await;
        consumed(&world).await;
        world.broker.js.delete_stream("ORDERS").await.unwrap();
        world.run_setup().await.unwrap();
    }
    let kept = bodies().await;
    assert!(kept[0].0.starts_with("ORDERS before "), "{kept:?}");
    assert_eq!((kept[0].1.as_slice(), kept[1].1.as_slice()), (&b"one"[..], &b"another"[..]));
    assert_eq!(kept[1].0, "ORDERS");

    // The same one in the same place is the same letter.
    world.broker.publish(b"another", None).await.unwrap();
    consumed(&world).await;
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 2);
    announce(&world, "tx-A", "A").await;
    dispatched(&world, 1).await;
}

/// The carrier may refuse again what was settled by a replay: then a person has to look again.
#[tokio::test]
async fn a_parcel_that_is_refused_again_is_a_letter_again() {
    let world = World::new().await.unwrap();
    let carrier = Outside::start().await.unwrap();
    carrier.behave(|_| Reply::Refuse("no such address"));
    let plan = world.plan(Kind::Fulfillment).unwrap().with("CARRIER_URL", &carrier.url());
    let _fulfillment = plan.start().await.unwrap();
    announce(&world, "tx-A", "A").await;
    for round in 1..=2 {
        open(&world.fulfillment, 1).await;
        assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, round);
        carrier.behave(move |_| Reply::Refuse(if round == 1 { "still none" } else { "none" }));
        assert_eq!(letters(&plan, &["replay", "--all"]).await.code, 0);
    }
    open(&world.fulfillment, 1).await;
    carrier.behave(|_| Reply::Accept);
    assert_eq!(letters(&plan, &["replay", "--all"]).await.code, 0);
    eventually("it is dispatched", LIMIT, async || {
        let query = "select count(*) from dispatches where status = 'dispatched'";
        ensure!(number(&world.fulfillment, query).await == 1, "not yet");
        Ok(())
    })
    .await
    .unwrap();
    assert_eq!(number(&world.fulfillment, OPEN).await, 0);
    assert_eq!((number(&world.fulfillment, DEAD_LETTERS).await, carrier.effects().len()), (3, 1));
}
