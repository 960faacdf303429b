//! The settings of orders-service.

use std::net::SocketAddr;

use clap::Parser;
use shared::config::{Common, Run};

/// Takes orders, confirms payments, and announces them through the outbox.
#[derive(Debug, Clone, Parser)]
#[command(name = "orders-service", version)]
pub struct Config {
    #[command(flatten)]
    pub common: Common,

    /// Where to listen, for example 127.0.0.1:8080
    #[arg(long, env, default_value = "127.0.0.1:8080")]
    pub http_addr: SocketAddr,

    #[command(subcommand)]
    pub run: Option<Run>,
}
