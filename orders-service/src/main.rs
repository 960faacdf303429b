//! `orders-service serve | setup | healthcheck`; `--help` documents every setting.

use std::process::ExitCode;

use orders_service::config::Config;

#[tokio::main]
async fn main() -> ExitCode {
    let config: Config = shared::config::parse();
    if let Err(error) = shared::telemetry::init(config.common.log_format) {
        eprintln!("error: {error:#}");
        return ExitCode::from(2);
    }
    orders_service::run(config).await.unwrap_or_else(|error| {
        tracing::error!("{}", shared::telemetry::Causes(&error));
        ExitCode::FAILURE
    })
}
