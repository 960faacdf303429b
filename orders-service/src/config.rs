//! The settings of orders-service.

use std::{net::SocketAddr, time::Duration};

use clap::Parser;
use shared::config::{Common, Run, duration};

/// Takes orders, confirms payments, and announces them through the outbox.
#[derive(Debug, Clone, Parser)]
#[command(name = "orders-service", version)]
pub struct Config {
    #[command(flatten)]
    pub common: Common,

    /// Where to listen, for example 127.0.0.1:8080
    #[arg(long, env, default_value = "127.0.0.1:8080")]
    pub http_addr: SocketAddr,

    /// The most rows of one unit of the relay's work, for example 500
    #[arg(long, env, default_value = "500", value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub relay_batch: u32,

    /// How often the relay looks without being woken, for example 500ms
    #[arg(long, env, default_value = "500ms", value_parser = duration)]
    pub relay_poll_interval: Duration,

    #[command(subcommand)]
    pub run: Option<Run>,
}
