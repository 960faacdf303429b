//! `cargo dev sabotage`: takes one mechanism away after the other, and sees whether the tests notice.
//!
//! Each patch in `tests/sabotage` removes what a guarantee rests on, and names the tests that must fail
//! then. It is applied to a copy of the tree; a patch that does not apply any more is a failure too.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use e2e::{
    find::{find_nats, find_postgres, root},
    services,
};
use time::{OffsetDateTime, macros::format_description};
use tokio::{process::Command, time::timeout};

/// For one patch: compile, and run its tests.
const LIMIT: Duration = Duration::from_secs(900);
/// Where the last result of each is written.
const REPORT: &str = "docs/sabotage.md";

struct Patch {
    name: String,
    file: PathBuf,
    what: String,
    caught_by: Vec<String>,
    /// It changes a query that is checked when the code is compiled.
    queries: bool,
}

impl Patch {
    fn read(file: PathBuf) -> anyhow::Result<Self> {
        let text = fs::read_to_string(&file)?;
        let head: Vec<&str> = text.lines().take_while(|line| !line.starts_with("diff ")).collect();
        let caught_by = head.iter().filter_map(|line| line.strip_prefix("Caught-by: "));
        let caught_by: Vec<String> = caught_by.map(str::to_owned).collect();
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        ensure!(!caught_by.is_empty(), "{name} names no test");
        Ok(Self {
            name,
            what: head.first().copied().unwrap_or_default().to_owned(),
            queries: head.contains(&"Queries: changed"),
            caught_by,
            file,
        })
    }
}

/// Runs those named, or all.
pub(crate) async fn run(names: &[String]) -> anyhow::Result<()> {
    let folder = root().join("tests/sabotage");
    let mut patches = fs::read_dir(&folder)?
        .map(|entry| Patch::read(entry?.path()))
        .collect::<anyhow::Result<Vec<Patch>>>()?;
    patches.sort_by(|one, other| one.name.cmp(&other.name));
    let known: Vec<String> = patches.iter().map(|patch| patch.name.clone()).collect();
    if !names.is_empty() {
        patches.retain(|patch| names.contains(&patch.name));
        ensure!(patches.len() == names.len(), "not all of {names:?} are in {}", folder.display());
    }

    // If they have to be fetched, then once and for both trees.
    println!("PostgreSQL   {}\nnats-server  {}", find_postgres()?.how, find_nats()?.how);
    let copy = Copy::make().await?;
    let all: BTreeSet<&str> =
        patches.iter().flat_map(|patch| &patch.caught_by).map(String::as_str).collect();
    println!("{} patches; first, the {} tests without any of them", patches.len(), all.len());
    for (test, outcome) in copy.test(&all.into_iter().collect::<Vec<_>>()).await? {
        ensure!(outcome == Outcome::Passed, "{test} does not pass without sabotage: {outcome:?}");
    }

    let (mut rows, mut survivors) = (Vec::new(), Vec::new());
    for (n, patch) in patches.iter().enumerate() {
        let started = Instant::now();
        let verdict = copy.sabotage(patch).await.unwrap_or_else(|error| format!("{error:#}"));
        let caught = verdict == CAUGHT;
        println!(
            "{:>3}/{}  {:<9} {}  ({:.0?})",
            n + 1,
            patches.len(),
            if caught { CAUGHT } else { "SURVIVED" },
            patch.name,
            started.elapsed()
        );
        if !caught {
            println!("         {verdict}");
            survivors.push(patch.name.as_str());
        }
        rows.push((patch, verdict));
    }
    fs::write(root().join(REPORT), report(&known, &rows).await?)?;
    println!("the table is in {REPORT}");
    ensure!(survivors.is_empty(), "not caught: {}", survivors.join(", "));
    println!("verdict: all {} caught", rows.len());
    Ok(())
}

const CAUGHT: &str = "caught";

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    NotRun,
}

/// A copy of the tree, with compiled artefacts of its own that stay for the next time.
struct Copy {
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    async fn make() -> anyhow::Result<Self> {
        let folder = root().join("target/sabotage");
        let copy = Self { tree: folder.join("tree"), target: folder.join("target") };
        let mut git = Command::new("git");
        git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
        let listed = output(git.current_dir(root())).await?;
        let wanted: BTreeSet<&str> =
            listed.split('\0').filter(|path| root().join(path).is_file()).collect();
        for path in &wanted {
            let (from, to) = (root().join(path), copy.tree.join(path));
            let content = fs::read(&from)?;
            // What is as it was keeps its time, so that nothing is compiled for it.
            if fs::read(&to).ok().as_ref() != Some(&content) {
                fs::create_dir_all(to.parent().context("no folder")?)?;
                fs::copy(&from, &to)?;
            }
        }
        remove_others(&copy.tree, &copy.tree, &wanted)?;
        let servers = copy.tree.join(".dev");
        if root().join(".dev").exists() && !servers.exists() {
            std::os::unix::fs::symlink(root().join(".dev"), servers)?;
        }
        Ok(copy)
    }

    async fn sabotage(&self, patch: &Patch) -> anyhow::Result<String> {
        self.git(&["apply"], patch).await.context("it does not apply any more")?;
        let outcome = self.with_patch(patch).await;
        self.git(&["apply", "--reverse"], patch).await?;
        if patch.queries {
            self.refresh_queries().await?;
        }
        outcome
    }

    async fn with_patch(&self, patch: &Patch) -> anyhow::Result<String> {
        if patch.queries {
            self.refresh_queries().await?;
        }
        let tests: Vec<&str> = patch.caught_by.iter().map(String::as_str).collect();
        let outcomes = self.test(&tests).await?;
        let missed: Vec<String> = outcomes
            .into_iter()
            .filter(|(_, outcome)| *outcome != Outcome::Failed)
            .map(|(test, outcome)| format!("{test}: {outcome:?}"))
            .collect();
        Ok(if missed.is_empty() { CAUGHT.to_owned() } else { missed.join(", ") })
    }

    /// Runs tests, by name.
    async fn test(&self, tests: &[&str]) -> anyhow::Result<Vec<(String, Outcome)>> {
        output(&mut self.cargo(&["build", "--workspace", "--all-targets"])).await?;
        let mut cargo = self.cargo(&["test", "--workspace", "--no-fail-fast", "--"]);
        cargo.args(tests).env("RUST_TEST_THREADS", "8").env("RUST_BACKTRACE", "0");
        let done = timeout(LIMIT, cargo.output()).await.context("the tests do not end")??;
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        // Kept for whoever wonders about a result.
        fs::write(self.target.join("last-tests.log"), &said)?;
        Ok(tests
            .iter()
            .map(|test| {
                let result = said.lines().find_map(|line| {
                    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
                    (name.rsplit("::").next() == Some(test)).then_some(result)
                });
                let outcome = match result {
                    Some("ok") => Outcome::Passed,
                    Some("FAILED") => Outcome::Failed,
                    _ => Outcome::NotRun,
                };
                ((*test).to_owned(), outcome)
            })
            .collect())
    }

    async fn refresh_queries(&self) -> anyhow::Result<()> {
        let mut refresh = self.cargo(&["run", "--quiet", "--bin", "dev", "--", "sqlx"]);
        output(&mut refresh).await.map(drop)
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut cargo = services::cargo();
        cargo.args(arguments).current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target);
        let mut cargo = Command::from(cargo);
        cargo.kill_on_drop(true);
        cargo
    }

    async fn git(&self, arguments: &[&str], patch: &Patch) -> anyhow::Result<()> {
        let mut git = Command::new("git");
        // Not the repository that the copy lies in.
        git.env("GIT_CEILING_DIRECTORIES", self.tree.parent().unwrap_or(&self.tree));
        output(git.args(arguments).arg(&patch.file).current_dir(&self.tree)).await.map(drop)
    }
}

/// Removes what is not in the tree any more.
fn remove_others(tree: &Path, folder: &Path, wanted: &BTreeSet<&str>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let relative = path.strip_prefix(tree)?.to_string_lossy().into_owned();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            remove_others(tree, &path, wanted)?;
        } else if !wanted.contains(relative.as_str()) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// What a command prints.
async fn output(command: &mut Command) -> anyhow::Result<String> {
    let done = timeout(LIMIT, command.output()).await.context("it does not end")??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let errors = text(&done.stderr);
    let last: Vec<&str> = errors.lines().filter(|line| line.starts_with("error")).take(3).collect();
    ensure!(done.status.success(), "{:?}: {}", command.as_std().get_program(), last.join("; "));
    Ok(text(&done.stdout))
}

/// The table: of those that were run now, and of the others as it was.
async fn report(known: &[String], rows: &[(&Patch, String)]) -> anyhow::Result<String> {
    let git = |arguments: &'static [&str]| {
        let mut git = Command::new("git");
        git.args(arguments).current_dir(root());
        git
    };
    let commit = output(&mut git(&["rev-parse", "--short", "HEAD"])).await?;
    let changes = output(&mut git(&["status", "--porcelain", "--", ":!docs"])).await?;
    let changed = if changes.is_empty() { "" } else { ", with changes on top" };
    let date = OffsetDateTime::now_utc().format(format_description!("[year]-[month]-[day]"))?;
    let before = fs::read_to_string(root().join(REPORT)).unwrap_or_default();
    let mut text = "# What happens without it\n\n\
         Each patch in [`tests/sabotage`](../tests/sabotage) takes away a mechanism that a guarantee rests on. \
         `cargo dev sabotage`\napplies one after the other to a copy of the tree, and runs the tests that must fail \
         then. This is what it wrote last.\n\n\
         | what is taken away | result | date, commit | tests that fail without it |\n|---|---|---|---|\n"
        .to_owned();
    for name in known {
        let link = format!("| [{name}](../tests/sabotage/{name}.patch): ");
        let Some((patch, verdict)) = rows.iter().find(|(patch, _)| patch.name == *name) else {
            text.extend(
                before.lines().filter(|line| line.starts_with(&link)).flat_map(|l| [l, "\n"]),
            );
            continue;
        };
        let tests: Vec<String> = patch.caught_by.iter().map(|test| format!("`{test}`")).collect();
        let result =
            if verdict == CAUGHT { CAUGHT.to_owned() } else { format!("**SURVIVED**: {verdict}") };
        writeln!(
            text,
            "{link}{} | {result} | {date}, {}{changed} | {} |",
            patch.what,
            commit.trim(),
            tests.join(", ")
        )?;
    }
    Ok(text)
}
