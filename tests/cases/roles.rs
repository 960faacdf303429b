//! What the roles of `deploy/postgres/provision.sql` may do in the databases, with the real server.

use e2e::{api::Api, services::Kind, world::World};
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::support::{DEAD_LETTERS, DISPATCHES, announce, check_is, consumed, number, ready};

/// A right that is missing is an outage, not a bad message: nothing goes to the dead letters.
#[tokio::test]
async fn a_missing_right_in_the_database_costs_no_message() {
    let world = World::deployed().await.unwrap();
    sqlx::query("revoke insert on dispatches from fulfillment")
        .execute(&world.fulfillment)
        .await
        .unwrap();
    let plan = world.deployed_plan(Kind::Fulfillment).unwrap().with("CONSUMER_MAX_DELIVERIES", "1");
    let service = plan.start().await.unwrap();
    let api = Api::new(service.url());
    ready(&api).await;
    announce(&world, "tx-1", "A-1").await;
    let answer = check_is(&api, "consumer", "failing").await;
    let reason = answer.body["failing"]["consumer"].as_str().unwrap();
    assert!(reason.contains("permission denied for table dispatches"), "{reason}");
    sqlx::query("grant insert on dispatches to fulfillment")
        .execute(&world.fulfillment)
        .await
        .unwrap();
    consumed(&world).await;
    ready(&api).await;
    assert_eq!(number(&world.fulfillment, DISPATCHES).await, 1);
    assert_eq!(number(&world.fulfillment, DEAD_LETTERS).await, 0);
}

#[tokio::test]
async fn a_service_reads_and_writes_its_rows_and_changes_no_table_and_no_other_database() {
    let world = World::deployed().await.unwrap();
    let postgres = world.postgres();
    for (role, other, table) in
        [("orders", "fulfillment", "payments"), ("fulfillment", "orders", "dispatches")]
    {
        for database in [other.to_owned(), format!("{other}_setup")] {
            let error = PgConnection::connect(&postgres.url_as(&database, role)).await.unwrap_err();
            assert!(error.to_string().contains("permission denied for database"), "{error}");
        }
        let pool = PgPool::connect(&postgres.url_as(role, role)).await.unwrap();
        for forbidden in [
            format!("alter table {table} add column more text"),
            format!("alter table {table} disable trigger all"),
            format!("drop table {table}"),
            format!("truncate {table}"),
            format!("create index on {table} (order_id)"),
            "create table more ()".to_owned(),
            "create temporary table more ()".to_owned(),
            "create schema more".to_owned(),
            "update _sqlx_migrations set success = true".to_owned(),
            "delete from _sqlx_migrations".to_owned(),
            format!("set role {role}_setup"),
            "create role more".to_owned(),
        ] {
            let done = sqlx::raw_sql(sqlx::AssertSqlSafe(forbidden.clone())).execute(&pool).await;
            let error = done.expect_err(&forbidden).into_database_error().unwrap();
            assert_eq!(error.code().as_deref(), Some("42501"), "{forbidden}: {error}");
        }
        for allowed in [
            format!("select count(*) from {table}"),
            format!("update {table} set amount_minor = amount_minor"),
            format!("delete from {table}"),
            "select count(*) from _sqlx_migrations".to_owned(),
        ] {
            let done = sqlx::raw_sql(sqlx::AssertSqlSafe(allowed.clone())).execute(&pool).await;
            done.unwrap_or_else(|error| panic!("{allowed}: {error}"));
        }
        pool.close().await;
    }
}
