//! What an event costs in round trips, commits and bytes: a gate that no noisy clock can open.

use std::time::Duration;

use anyhow::ensure;
use e2e::{
    api::Api,
    cost::{self, Costs},
    services::Kind,
    stage::{DEFAULT, Stage},
    wait::eventually,
};

#[tokio::test]
async fn an_event_costs_no_more_than_it_did() {
    let stage = Stage::start(DEFAULT).await.unwrap();
    let costs = cost::measure(&stage).await.unwrap();
    cost::compare(&costs, &cost::baseline().unwrap()).unwrap();
    stage.world.close().await.unwrap();
}

#[test]
fn a_statement_more_per_event_is_told() {
    let baseline = cost::baseline().unwrap();
    for name in baseline.keys() {
        let mut costs: Costs = baseline.clone();
        let worse = costs.get_mut(name).unwrap();
        worse.statements = worse.statements * 1.3 + 0.01;
        let told = cost::compare(&costs, &baseline).unwrap_err().to_string();
        assert!(
            told.contains(&format!("{name}: {:.4} statements", costs[name].statements)),
            "{told}"
        );
    }
}

#[tokio::test]
async fn a_statement_is_planned_once_per_connection_and_not_for_each_payment() {
    let stage = Stage::start(DEFAULT).await.unwrap();
    let service = stage.service(Kind::Orders).await.unwrap();
    let api = Api::new(service.url());
    // With statistics of tables in use, a batch of one looks cheaper than one of any size.
    for n in 0..200 {
        pay(&api, &format!("before-{n}")).await;
    }
    stage.settle().await.unwrap();
    let pool = &stage.world.orders;
    for prepare in [
        "create extension pg_stat_statements",
        "alter system set pg_stat_statements.track_planning = on",
        "select pg_reload_conf()",
    ] {
        sqlx::query(prepare).execute(pool).await.unwrap();
    }
    eventually("plans are counted", Duration::from_secs(10), async || {
        let shown: String =
            sqlx::query_scalar("show pg_stat_statements.track_planning").fetch_one(pool).await?;
        ensure!(shown == "on", "{shown}");
        Ok(())
    })
    .await
    .unwrap();
    for n in 0..200 {
        pay(&api, &format!("counted-{n}")).await;
        // Each is a batch of its own.
        stage.drained().await.unwrap();
    }
    let often: Vec<(String, i64, i64)> = sqlx::query_as(
        "select query, calls, plans from pg_stat_statements
         where userid = (select oid from pg_roles where rolname = current_database()) and calls >= 100
           and query not in ('BEGIN', 'COMMIT')",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    assert!(often.iter().any(|(query, ..)| query.contains("update outbox")), "{often:?}");
    for (query, calls, plans) in often {
        assert!(plans < calls / 2, "planned {plans} times in {calls} calls: {query}");
    }
    stage.world.close().await.unwrap();
}

async fn pay(api: &Api, order: &str) {
    api.place(order, 1999).await.unwrap();
    let answer = api.confirm(&format!("tx-{order}"), order, 1999).await.unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
}
