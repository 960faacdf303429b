//! The settings of fulfillment-service.

use std::net::SocketAddr;

use clap::Parser;
use shared::config::{Common, Run};

use crate::call::Endpoint;

/// Turns each confirmed payment into one dispatch, however often it is told.
#[derive(Debug, Clone, Parser)]
#[command(name = "fulfillment-service", version)]
pub struct Config {
    #[command(flatten)]
    pub common: Common,

    /// Where the probes listen, for example 127.0.0.1:8081
    #[arg(long, env, default_value = "127.0.0.1:8081")]
    pub http_addr: SocketAddr,

    /// The carrier's HTTP API; without it, a sandbox within this process, for example `https://carrier.example/v1`
    #[arg(long, env, hide_env_values = true)]
    pub carrier_url: Option<Endpoint>,

    /// Where notices of dispatched orders are posted; without it, they are logged, for example `https://shop.example/notices`
    #[arg(long, env, hide_env_values = true)]
    pub notify_url: Option<Endpoint>,

    #[command(subcommand)]
    pub run: Option<Run>,
}
