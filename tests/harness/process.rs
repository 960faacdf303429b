//! Child processes that never outlive us.
//!
//! Each runs under a small shell that holds one end of a pipe. When our end closes, because we are
//! done, or panicked, or were killed with -9, the shell kills the program and removes its data.
//! No unsafe code, no polling, no process group that a terminal's Ctrl-C could reach.

use std::{
    ffi::OsString,
    fs::{self, File},
    net::TcpListener,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::invariants::Line;
use anyhow::{Context as _, ensure};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// Arguments: the signal that ends the program when we are gone, what to remove then, the program.
const SUPERVISOR: &str = r#"
signal=$1; remove=$2; shift 2
gone=
trap 'gone=yes' USR1
exec 3<&0 </dev/null
"$@" 3<&- >&2 &
pid=$!
echo "$pid"
{ cat <&3 >/dev/null; kill -s USR1 $$; kill -s "$signal" "$pid"; } 2>/dev/null &
wait "$pid"; code=$?
if [ "$gone" ]; then
    wait "$pid"
    [ -z "$remove" ] || rm -rf "$remove"
fi
echo "$code"
"#;

/// What to run.
#[derive(Debug, Clone)]
pub struct Program {
    pub path: PathBuf,
    pub arguments: Vec<OsString>,
    pub environment: Vec<(String, String)>,
    /// Whom to run it as; none: as ourselves.
    pub user: Option<u32>,
    /// Where its output goes; appended.
    pub log: PathBuf,
    /// How to end it when we are gone.
    pub end_with: &'static str,
    /// What to remove when we are gone.
    pub remove: Option<PathBuf>,
}

/// A running program. Dropping it ends the program.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    lines: Lines<BufReader<ChildStdout>>,
    shell: Child,
    // Closes on drop, which is the signal for the shell.
    _leash: ChildStdin,
}

impl Process {
    pub async fn start(program: &Program) -> anyhow::Result<Self> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(&program.log)
            .with_context(|| format!("cannot write {}", program.log.display()))?;
        let mut command = Command::new("sh");
        command
            .args(["-c", SUPERVISOR, "supervisor", program.end_with])
            .arg(program.remove.as_deref().unwrap_or(Path::new("")))
            .arg(&program.path)
            .args(&program.arguments)
            // No test may send parcels to a carrier that happens to be configured here, or fail
            // because a secret is.
            .env_remove("CARRIER_URL")
            .env_remove("NOTIFY_URL")
            .env_remove("PAYMENT_WEBHOOK_SECRET")
            .envs(program.environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .process_group(0);
        if let Some(user) = program.user {
            command.uid(user).gid(user).current_dir("/");
        }
        let mut shell = command.spawn().context("cannot start a shell")?;
        let leash = shell.stdin.take().context("no pipe to the shell")?;
        let mut lines =
            BufReader::new(shell.stdout.take().context("no pipe from the shell")?).lines();
        let pid = lines.next_line().await?.context("the shell said nothing")?.parse()?;
        Ok(Self { pid, lines, shell, _leash: leash })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal by name: `TERM`, `KILL`, `STOP`.
    pub fn signal(&self, name: &str) -> anyhow::Result<()> {
        let sent = std::process::Command::new("kill")
            .args(["-s", name, &self.pid.to_string()])
            .stderr(Stdio::null())
            .status()?;
        ensure!(sent.success(), "process {} is gone", self.pid);
        Ok(())
    }

    /// Waits for the end, at most `limit`, and returns the exit code; 128 + n for signal n.
    pub async fn wait(&mut self, limit: Duration) -> anyhow::Result<i32> {
        let code = timeout(limit, self.lines.next_line())
            .await
            .with_context(|| format!("process {} does not end", self.pid))??
            .context("the shell is gone")?;
        self.shell.wait().await?;
        Ok(code.parse()?)
    }

    /// Whether it has ended by itself.
    pub fn ended(&mut self) -> bool {
        matches!(self.shell.try_wait(), Ok(Some(_)))
    }
}

/// Memory and connections of a process.
#[derive(Debug, Clone, Copy)]
pub struct Footprint {
    mebibytes: u64,
    sockets: usize,
}

impl Footprint {
    /// None where there is no `/proc`, or no such process.
    pub fn of(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kibibytes: u64 = resident.split_whitespace().next()?.parse().ok()?;
        let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let is_socket = |file: &PathBuf| file.to_string_lossy().starts_with("socket:");
        let targets = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        Some(Self { mebibytes: kibibytes / 1024, sockets: targets.filter(is_socket).count() })
    }

    /// Not much more than `before`: a full pool, and what clients and callees keep open; no leak.
    pub fn near(self, before: Self, who: &str) -> Line {
        let Self { mebibytes, sockets } = self;
        Line::new(
            format!("{who} takes about what it took at its start"),
            format!(
                "{} → {mebibytes} MiB, {} → {sockets} sockets",
                before.mebibytes, before.sockets
            ),
            mebibytes < before.mebibytes + 64 && sockets < before.sockets + 50,
        )
    }
}

/// The most memory that a process has had so far. None where there is no `/proc`, or no such process.
pub fn peak_mebibytes(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: f64 = peak.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes / 1024.0)
}

/// The CPU seconds of a process and its children so far. NaN where there is no `/proc`.
pub fn cpu_seconds(pid: u32) -> f64 {
    /// Of Linux, on all machines that people have.
    const TICKS_PER_SECOND: f64 = 100.0;
    let Ok(processes) = fs::read_dir("/proc") else { return f64::NAN };
    let ticks = |folder: PathBuf| -> Option<u64> {
        let stat = fs::read_to_string(folder.join("stat")).ok()?;
        let own: u64 = folder.file_name()?.to_str()?.parse().ok()?;
        // The name before them may hold blanks.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        // proc(5): 4 is the parent, 14 and 15 are the times in user and system mode.
        let ours = [own, field(4)?].contains(&pid.into());
        ours.then_some(field(14)? + field(15)?)
    };
    processes.flatten().filter_map(|entry| ticks(entry.path())).sum::<u64>() as f64
        / TICKS_PER_SECOND
}

/// Longer than any service's drain.
const END_LIMIT: Duration = Duration::from_secs(40);

/// Room for a process that comes and goes: started, ended, started again.
#[derive(Debug, Default)]
pub struct Slot(Option<Process>);

impl Slot {
    pub fn fill(&mut self, process: Process) {
        self.0 = Some(process);
    }

    pub fn pid(&self) -> Option<u32> {
        self.0.as_ref().map(Process::pid)
    }

    pub fn signal(&self, name: &str) -> anyhow::Result<()> {
        self.0.as_ref().context("it is not running, or not ours")?.signal(name)
    }

    /// Waits for the end of one that was signalled; returns the exit code.
    pub async fn wait(&mut self) -> anyhow::Result<i32> {
        self.0.take().context("it is not running, or not ours")?.wait(END_LIMIT).await
    }

    /// Sends a signal and waits for the end.
    pub async fn end(&mut self, signal: &str) -> anyhow::Result<i32> {
        self.signal(signal)?;
        self.wait().await
    }

    /// Whether it was started and has ended by itself.
    pub fn ended(&mut self) -> bool {
        self.0.as_mut().is_some_and(Process::ended)
    }
}

/// Below the ports that Linux and macOS give to whoever asks for any: none of these is taken in the
/// time between choosing it and listening on it, or while a server is stopped.
const PORTS: std::ops::Range<u16> = 12_000..32_000;

/// A port that nobody listens on, and that this process has not given away before.
pub fn free_port() -> anyhow::Result<u16> {
    // Another harness beside us most likely begins elsewhere.
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(fastrand::u16(PORTS)));
    let mut candidates = PORTS.map(|_| {
        let next = |port: u16| Some(if port + 1 < PORTS.end { port + 1 } else { PORTS.start });
        NEXT.fetch_update(Relaxed, Relaxed, next).unwrap_or_else(|port| port)
    });
    candidates
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .with_context(|| format!("no port of {PORTS:?} is free"))
}

/// `wanted`, if it is free.
pub fn free_port_or(wanted: u16) -> anyhow::Result<u16> {
    TcpListener::bind(("127.0.0.1", wanted)).map(|_| wanted).or_else(|_| free_port())
}

/// The end of a log, for an error that wants an explanation.
pub fn tail(log: &Path) -> String {
    let text =
        fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(30)..];
    format!("{}, last lines:\n{}", log.display(), last.join("\n"))
}
