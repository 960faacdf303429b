//! The settings of orders-service.

use std::net::SocketAddr;

use clap::Parser;
use shared::config::{Common, Run};

use crate::signature::Secrets;

/// Takes orders, confirms payments, and announces them through the outbox.
#[derive(Debug, Clone, Parser)]
#[command(name = "orders-service", version)]
pub struct Config {
    #[command(flatten)]
    pub common: Common,

    /// Where to listen, for example 127.0.0.1:8080
    #[arg(long, env, default_value = "127.0.0.1:8080")]
    pub http_addr: SocketAddr,

    /// Secrets of which one must sign each confirmation (Standard Webhooks), comma-separated; without
    /// it, anybody can confirm; for example whsec_ and what `openssl rand -base64 24` prints
    #[arg(long, env, hide_env_values = true)]
    pub payment_webhook_secret: Option<Secrets>,

    #[command(subcommand)]
    pub run: Option<Run>,
}
