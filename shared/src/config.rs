//! What both services are configured with: environment variables, each of them a flag too. One that
//! may hold a secret can come from a file instead, as container platforms mount secrets.
//!
//! A missing or malformed value stops the start with one line that names the variable, what is
//! wrong and an example. The line does not repeat the value: it may hold a password.

use std::{error::Error as _, ffi::OsString, fs, net::SocketAddr, time::Duration};

use clap::{
    Args, Command, Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};

use tracing_subscriber::EnvFilter;

use crate::{commands, database::DatabaseUrl, login::Settings, telemetry::LogFormat, topology};

/// Settings of either service.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// This service's own database, for example `postgres://user:password@127.0.0.1:5432/orders`
    #[arg(long, env, hide_env_values = true)]
    pub database_url: DatabaseUrl,

    /// Where NATS is, and how to log in.
    #[command(flatten)]
    pub nats: Settings,

    /// Stream replicas that `setup` asks for, 1 or 3, for example 1
    #[arg(long, env, default_value = "1", value_parser = replicas)]
    pub nats_replicas: usize,

    /// The most connections to the database, for example 16
    #[arg(long, env, default_value = "16", value_parser = clap::value_parser!(u32).range(2..))]
    pub database_max_connections: u32,

    /// The most rows of one unit of the relay's work, for example 500
    #[arg(long, env, default_value = "500", value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub relay_batch: u32,

    /// How often relay and dispatcher look without being woken, for example 500ms
    #[arg(long, env, default_value = "500ms", value_parser = duration)]
    pub relay_poll_interval: Duration,

    /// The most messages of one transaction, for example 200
    #[arg(long, env, default_value = "200", value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub consumer_batch: u32,

    /// Deliveries before a message goes to the dead letters, for example 10
    #[arg(long, env, default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    pub consumer_max_deliveries: u32,

    /// How long published rows of the outbox stay, for example 14d
    #[arg(long, env, default_value = "14d", value_parser = duration)]
    pub outbox_retention: Duration,

    /// How long rows of the inbox stay, at least as long as the stream keeps events, for example 30d
    #[arg(long, env, default_value = "30d", value_parser = inbox_retention)]
    pub inbox_retention: Duration,

    /// How long the drain after a signal may take, for example 20s
    #[arg(long, env, default_value = "20s", value_parser = duration)]
    pub shutdown_grace: Duration,

    /// What is logged, for example info,sqlx=warn
    #[arg(long, env, default_value = "info", value_parser = log_filter)]
    pub rust_log: String,

    /// How log lines look, text or json, for example text
    #[arg(long, env, default_value = "text")]
    pub log_format: LogFormat,
}

/// The subcommands both services have.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Run {
    /// HTTP and workers until SIGINT or SIGTERM; a second signal aborts (the default)
    Serve,
    /// Migrate this service's database and upsert the JetStream topology of the pair; idempotent
    Setup,
    /// Ask this service's own /readyz; exit code 0 when it is ready
    Healthcheck,
    /// Look into this service's outbox, and publish again what the broker lost
    #[command(subcommand)]
    Outbox(commands::outbox::Command),
    /// Look into this service's dead letters, and try again or discard them
    #[command(subcommand)]
    DeadLetters(commands::dead_letters::Command),
}

/// Reads flags, environment and files, or ends the process with one line (exit code 2).
pub fn parse<T: Parser>() -> T {
    let refuse = |line| -> ! {
        eprintln!("{line}");
        std::process::exit(2)
    };
    let command = T::command().after_help(
        "Whatever may hold a secret (its value is not shown above) can come from a file: DATABASE_URL_FILE \
         instead of DATABASE_URL, and so on.",
    );
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    // Before any subcommand.
    arguments.splice(1..1, secrets(&command).unwrap_or_else(|line| refuse(line)));
    let parsed = command.clone().try_get_matches_from(arguments);
    parsed.and_then(|matches| T::from_arg_matches(&matches)).unwrap_or_else(|error| {
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => error.exit(),
            _ => refuse(explain(&error, &command)),
        }
    })
}

/// The settings that come from files, as arguments. They stay within this process.
fn secrets(command: &Command) -> Result<Vec<OsString>, String> {
    let mut arguments = Vec::new();
    for arg in command.get_arguments().filter(|arg| arg.is_hide_env_values_set()) {
        let (Some(name), Some(flag)) = (arg.get_env().and_then(|n| n.to_str()), arg.get_long())
        else {
            continue;
        };
        let from = format!("{name}_FILE");
        let Some(file) = std::env::var_os(&from) else { continue };
        if std::env::var_os(name).is_some() {
            return Err(format!("error: {from}: {name} is set too; set one of them"));
        }
        let value = fs::read_to_string(&file).map_err(|error| {
            format!("error: {from}: {} cannot be read: {error}", file.display())
        })?;
        arguments.push(format!("--{flag}={}", value.trim_end()).into());
    }
    Ok(arguments)
}

fn replicas(text: &str) -> Result<usize, &'static str> {
    match text {
        "1" => Ok(1),
        "3" => Ok(3),
        "2" => Err("two replicas lose their quorum with either of them"),
        _ => Err("not 1 or 3"),
    }
}

/// Checked here, so that a mistake in it is reported like any other.
fn log_filter(text: &str) -> Result<String, String> {
    // An empty variable is one that is not set.
    let text = if text.is_empty() { "info" } else { text };
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// A time span such as `500ms` or `20s`; not zero, which would be a busy loop.
///
/// # Errors
/// What is wrong with it.
pub fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("must not be zero".to_owned()),
        Ok(span) => Ok(span),
        Err(error) => Err(error.to_string()),
    }
}

/// An event that the stream still has may be delivered again, to a consumer that was set back for
/// example; the inbox must know it then.
fn inbox_retention(text: &str) -> Result<Duration, String> {
    let keep = duration(text)?;
    if keep < topology::MAX_AGE {
        let stream = humantime::format_duration(topology::MAX_AGE);
        return Err(format!("shorter than the stream keeps events, which is {stream}"));
    }
    Ok(keep)
}

/// Where a health check of this machine finds a service that listens on `address`.
pub fn local(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    address
}

fn explain(error: &clap::Error, command: &Command) -> String {
    let flag = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) => flag.as_str(),
        Some(ContextValue::Strings(flags)) => flags.first().map_or("", String::as_str),
        _ => "",
    };
    let long = flag.trim_start_matches("--").split([' ', '=']).next();
    let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == long && long.is_some())
    else {
        // An unknown flag or subcommand, or one of a subcommand's own: nothing secret, and clap says it
        // well, in its first paragraph.
        let text = error.to_string();
        let paragraph = text.lines().take_while(|line| !line.is_empty()).map(str::trim);
        return paragraph.collect::<Vec<_>>().join(" ");
    };
    let problem = match (error.kind(), error.source()) {
        (ErrorKind::MissingRequiredArgument, _) => "is not set".to_owned(),
        (ErrorKind::ArgumentConflict, _) => {
            let others = error.get(ContextKind::PriorArg).map(ToString::to_string);
            format!("cannot be set together with {}", others.unwrap_or_default())
        }
        (_, Some(problem)) => problem.to_string(),
        (_, None) => "is none of the possible values".to_owned(),
    };
    let name = arg.get_env().unwrap_or_default().to_string_lossy();
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    format!("error: {name}: {problem} ({help})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct Config {
        #[command(flatten)]
        common: Common,
    }

    fn complaint(arguments: &[&str]) -> String {
        let arguments = [&["test"], arguments].concat();
        let error = Config::try_parse_from(arguments).expect_err("these are wrong");
        explain(&error, &<Config as clap::CommandFactory>::command())
    }

    const DATABASE: &str = "--database-url=postgres://u:p@127.0.0.1/orders";

    #[test]
    fn a_bad_value_names_the_variable_the_problem_and_an_example_in_one_line() {
        for (arguments, variable, problem, example) in [
            (
                &["--database-url=secret"][..],
                "DATABASE_URL",
                "not a PostgreSQL URL",
                "`postgres://",
            ),
            (
                &[DATABASE, "--nats-url=nats://u:secret@:x"],
                "NATS_URL",
                "cannot be read",
                "`nats://",
            ),
            (&[DATABASE, "--nats-replicas=2"], "NATS_REPLICAS", "quorum", "1"),
            (
                &[DATABASE, "--database-max-connections=many"],
                "DATABASE_MAX_CONNECTIONS",
                "invalid digit",
                "16",
            ),
            (&[DATABASE, "--shutdown-grace=soon"], "SHUTDOWN_GRACE", "expected number", "20s"),
            (&[DATABASE, "--shutdown-grace=0s"], "SHUTDOWN_GRACE", "zero", "20s"),
            (&[DATABASE, "--inbox-retention=13d"], "INBOX_RETENTION", "stream", "30d"),
            (&[DATABASE, "--rust-log=sqlx=loud"], "RUST_LOG", "expected one of", "info"),
            (&[DATABASE, "--log-format=loud"], "LOG_FORMAT", "possible values", "text"),
            (
                &[DATABASE, "--nats-credentials-file=c", "--nats-nkey-seed-file=s"],
                "NATS_CREDENTIALS_FILE",
                "together with --nats-nkey-seed-file",
                "/etc/nats",
            ),
        ] {
            let line = complaint(arguments);
            assert!(line.starts_with(&format!("error: {variable}: ")), "{line}");
            assert!(
                line.contains(problem) && line.contains(&format!("for example {example}")),
                "{line}"
            );
            assert!(!line.contains('\n') && !line.contains("secret"), "{line}");
        }
    }

    #[test]
    fn secrets_stay_out_of_debug_output() {
        let given =
            ["test", "--database-url=postgres://u:secret@h/d", "--nats-url=nats://u:secret@h:4222"];
        let config = Config::try_parse_from(given).unwrap();
        assert!(!format!("{:?}", config.common).contains("secret"));
    }
}
