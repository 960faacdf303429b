//! What the documents say is so.

use std::{fs, path::Path, process::Command};

use e2e::{find::root, world::World};

use crate::support::number;

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// The sources of all tests.
fn tests() -> String {
    let sources = ["tests/cases", "shared/src", "orders-service/src", "fulfillment-service/src"];
    let files = sources.iter().flat_map(|folder| fs::read_dir(root().join(folder)).unwrap());
    let paths = files.map(|file| file.unwrap().path()).filter(|path| path.is_file());
    paths.map(|path| fs::read_to_string(path).unwrap()).collect()
}

/// What has the form of a test's name in the last column of the tables of a document; for each row.
fn named(document: &str) -> Vec<Vec<&str>> {
    let is_test = |name: &&str| {
        name.matches('_').count() > 2
            && name.chars().all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    document
        .lines()
        .filter(|line| line.starts_with("| ") && line.matches(" | ").count() >= 2)
        .filter_map(|line| line.rsplit(" | ").next())
        .map(|tests| tests.split('`').skip(1).step_by(2).filter(is_test).collect())
        .collect()
}

/// A claim without its test is a wish.
#[test]
fn every_test_that_a_document_names_exists() {
    let tests = tests();
    for (document, at_least) in
        [("README.md", 50), ("docs/failure-modes.md", 60), ("docs/sabotage.md", 30)]
    {
        let text = read(document);
        let names: Vec<&str> = named(&text).into_iter().flatten().collect();
        assert!(names.len() >= at_least, "{document} is read: {names:?}");
        for name in names {
            assert!(tests.contains(&format!("fn {name}()")), "{document}: {name} is no test");
        }
    }
}

#[test]
fn every_failure_mode_has_its_test() {
    let document = read("docs/failure-modes.md");
    let rows: Vec<Vec<&str>> = named(&document);
    // One heading for each table.
    let headings = document.matches("| what fails, and when |").count();
    let with_tests = rows.iter().filter(|tests| !tests.is_empty()).count();
    assert!(with_tests >= 30, "{with_tests} failure modes");
    assert_eq!(with_tests + headings, rows.len(), "a row without a test");
}

/// Whether they are caught takes half an hour to find out (`cargo dev sabotage`), this does not.
#[test]
fn every_sabotage_applies_and_names_tests_that_exist() {
    let tests = tests();
    let report = read("docs/sabotage.md");
    for file in fs::read_dir(root().join("tests/sabotage")).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let mut git = Command::new("git");
        git.args(["apply", "--check"]).arg(&file).current_dir(root());
        let checked = git.output().unwrap();
        let complaint = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "{name} does not apply any more: {complaint}");
        let text = fs::read_to_string(&file).unwrap();
        let named: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("Caught-by: ")).collect();
        assert!(!named.is_empty(), "{name} names no test");
        for test in named {
            assert!(tests.contains(&format!("fn {test}()")), "{name}: {test} is no test");
        }
        assert!(report.contains(&format!("[{name}]")), "{name} has not been tried yet");
    }
}

/// They are the same tables, for the same code.
#[test]
fn both_services_have_the_same_outbox_and_dead_letters() {
    for (orders, fulfillment) in [
        ("0002_outbox", "0003_outbox"),
        ("0003_dead_letters", "0004_dead_letters"),
        ("0004_migrations_are_setups", "0006_migrations_are_setups"),
        ("0005_published_rows", "0007_published_rows"),
        ("0006_dead_letter_replays", "0008_dead_letter_replays"),
        ("0007_held_rows", "0009_held_rows"),
    ] {
        assert_eq!(
            read(format!("migrations/orders/{orders}.sql")),
            read(format!("migrations/fulfillment/{fulfillment}.sql"))
        );
    }
}

/// The default is two minutes: what was acknowledged in them goes with the power (nats-server#7564).
#[test]
fn the_deployed_broker_syncs_before_it_acknowledges() {
    let config = read("deploy/nats/nats.conf");
    assert!(config.lines().any(|line| line.trim() == "sync_interval: always"), "{config}");
}

/// A NOTIFY in a transaction takes a lock that all commits of the server queue up for.
#[tokio::test]
async fn no_trigger_is_in_the_write_path() {
    let world = World::new().await.unwrap();
    for pool in [&world.orders, &world.fulfillment] {
        let triggers = "select count(*) from pg_trigger where not tgisinternal";
        assert_eq!(number(pool, triggers).await, 0);
    }
}
