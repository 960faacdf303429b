//! `fulfillment-service serve | setup | healthcheck`; `--help` documents every setting.

use std::process::ExitCode;

use fulfillment_service::config::Config;

#[tokio::main]
async fn main() -> ExitCode {
    let config: Config = shared::config::parse();
    shared::lifecycle::main(&config.common.clone(), fulfillment_service::run(config)).await
}
