//! The settings of fulfillment-service.

use std::net::SocketAddr;

use clap::Parser;
use shared::config::{Common, Run};

/// Turns each confirmed payment into one dispatch, however often it is told.
#[derive(Debug, Clone, Parser)]
#[command(name = "fulfillment-service", version)]
pub struct Config {
    #[command(flatten)]
    pub common: Common,

    /// Where the probes listen, for example 127.0.0.1:8081
    #[arg(long, env, default_value = "127.0.0.1:8081")]
    pub http_addr: SocketAddr,

    /// The most messages of one transaction, for example 200
    #[arg(long, env, default_value = "200", value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub consumer_batch: u32,

    /// Deliveries before a message goes to the dead letters, for example 10
    #[arg(long, env, default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    pub consumer_max_deliveries: u32,

    #[command(subcommand)]
    pub run: Option<Run>,
}
