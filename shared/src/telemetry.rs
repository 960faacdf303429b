//! Logs, and the trace a request starts: kept in the outbox row, sent as a header, logged by the
//! consumer. So one id finds everything that one request caused, in both services.

use std::{io::IsTerminal as _, sync::LazyLock};

use clap::ValueEnum;
use tracing_subscriber::{EnvFilter, fmt};
use uuid::Uuid;

/// The header's name in HTTP and, lower case too, in NATS, whose header names are case-sensitive.
pub const TRACEPARENT: &str = "traceparent";

/// How log lines look. They go to standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging to standard error.
///
/// # Errors
/// When the filter cannot be read, or logging was started before.
pub fn init(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let stderr = std::io::stderr;
    let lines = fmt()
        .with_env_filter(EnvFilter::try_new(filter)?)
        .with_ansi(stderr().is_terminal())
        .with_writer(stderr);
    match format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    }
    .map_err(anyhow::Error::from_boxed)
}

/// An error and its causes in one line. As `{:#}`, but for libraries that print their source in
/// their own text (sqlx and async-nats do): what was just said is not said again.
pub struct Causes<'a>(pub &'a anyhow::Error);

impl std::fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut said = String::new();
        for cause in self.0.chain() {
            let text = cause.to_string();
            if !said.ends_with(&text) {
                let colon = if said.is_empty() { "" } else { ": " };
                write!(f, "{colon}{text}")?;
                said = text;
            }
        }
        Ok(())
    }
}

/// A W3C trace context, version 00: `00-<trace id>-<parent id>-<flags>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceParent(String);

impl TraceParent {
    /// The one given, or a new trace when there is none that can be read.
    ///
    /// Source: W3C Trace Context, "A vendor receiving the request" (restart on an invalid header).
    pub fn from_header(header: Option<&str>) -> Self {
        match header {
            Some(text) if Self::is_valid(text) => Self(text.to_owned()),
            _ => Self::new(),
        }
    }

    /// Whether a header can be read, and passed on.
    pub fn is_valid(text: &str) -> bool {
        let mut parts = text.split('-');
        let (Some(version), Some(trace), Some(parent), Some(flags)) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return false;
        };
        let hex = |part: &str, length| {
            part.len() == length && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let zero = |part: &str| part.bytes().all(|b| b == b'0');
        version == "00"
            && hex(trace, 32)
            && hex(parent, 16)
            && hex(flags, 2)
            && !zero(trace)
            && !zero(parent)
            && parts.next().is_none()
    }

    fn new() -> Self {
        // A UUIDv7 is 16 bytes, never zero, and sorts by time.
        Self(format!("00-{:032x}-{:016x}-00", Uuid::now_v7().as_u128(), fastrand::u64(1..)))
    }

    /// The header's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Names this process among its replicas: host and process id.
pub static INSTANCE: LazyLock<String> = LazyLock::new(|| {
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "localhost".to_owned());
    format!("{host}-{}", std::process::id())
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once() {
        let refused = anyhow::anyhow!("permission denied").context("refused: permission denied");
        assert_eq!(
            Causes(&refused.context("cannot read")).to_string(),
            "cannot read: refused: permission denied"
        );
    }

    #[test]
    fn a_valid_trace_is_kept_and_anything_else_starts_a_new_one() {
        let given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(TraceParent::from_header(Some(given)).as_str(), given);
        for bad in [
            "",
            "00-4bf9-00f0-01",
            &given.to_uppercase(),
            &given.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &format!("{given}-x"),
        ] {
            let made = TraceParent::from_header(Some(bad));
            assert_ne!(made.as_str(), bad);
            assert!(TraceParent::is_valid(made.as_str()), "what we make is valid");
        }
    }
}
