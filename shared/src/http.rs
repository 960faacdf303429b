//! What both services say over HTTP: problems (RFC 9457), the probes, and how serving ends.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};
use axum::{
    Json, Router,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tracing::{info, warn};

use crate::{lifecycle::Lifecycle, telemetry::Causes};

/// How long requests in hand may keep the drain waiting. What they began in the database is
/// finished either way.
const HTTP_DRAIN: Duration = Duration::from_secs(5);

/// How long the health check waits: every check behind /readyz has its own, shorter limit.
const HEALTHCHECK_TIMEOUT: Duration = Duration::from_secs(8);

/// An error answer, `application/problem+json`.
#[derive(Debug, Clone, Serialize)]
pub struct Problem {
    #[serde(rename = "type")]
    problem_type: String,
    title: &'static str,
    status: u16,
    detail: String,
    /// What a program decides by; never changes.
    code: &'static str,
}

impl Problem {
    /// `code` is for programs, `title` says the same in words, `detail` what to do about it.
    pub fn new(
        status: StatusCode,
        code: &'static str,
        title: &'static str,
        detail: impl Into<String>,
    ) -> Self {
        let problem_type = format!("/problems/{code}");
        Self { problem_type, title, status: status.as_u16(), detail: detail.into(), code }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        problem_json(
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            &self,
        )
    }
}

fn problem_json(status: StatusCode, body: &impl Serialize) -> Response {
    let mut response = (status, Json(body)).into_response();
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

/// A named check of [`ready`].
pub type Check = (&'static str, anyhow::Result<()>);

/// The answer of `/readyz`: 200, or 503 with the failing checks by name and reason.
pub fn ready(checks: impl IntoIterator<Item = Check>) -> Response {
    let mut failing = Map::new();
    let mut names = Map::new();
    for (name, result) in checks {
        names.insert(name.to_owned(), if result.is_ok() { "ok" } else { "failing" }.into());
        if let Err(error) = result {
            failing.insert(name.to_owned(), Causes(&error).to_string().into());
        }
    }
    if failing.is_empty() {
        return Json(json!({ "status": "ready", "checks": names })).into_response();
    }
    let detail: Vec<String> = failing
        .iter()
        .map(|(name, why)| format!("{name}: {}", why.as_str().unwrap_or_default()))
        .collect();
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let problem = Problem::new(status, "not_ready", "Not ready", detail.join("; "));
    problem_json(status, &NotReady { problem, checks: names, failing })
}

/// A problem with two members of its own.
#[derive(Serialize)]
struct NotReady {
    #[serde(flatten)]
    problem: Problem,
    /// All checks, by name: `ok` or `failing`.
    checks: Map<String, Value>,
    /// The failing ones, with the reason.
    failing: Map<String, Value>,
}

/// Runs a check of [`ready`], and takes no answer in time for a no.
///
/// # Errors
/// The check's own, or that it took too long.
pub async fn in_time(check: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    const LIMIT: Duration = Duration::from_secs(3);
    timeout(LIMIT, check).await.with_context(|| format!("no answer within {LIMIT:?}"))?
}

/// The answer of `/healthz`: the process runs, whatever it can reach. A restart mends nothing else.
pub async fn alive() -> Json<Value> {
    Json(json!({ "status": "alive" }))
}

/// Serves `app` until it is time to stop, then finishes the requests in hand, for a while.
///
/// # Errors
/// When the listener fails.
pub async fn serve(listener: TcpListener, app: Router, lifecycle: Lifecycle) -> anyhow::Result<()> {
    info!("listening on http://{}", listener.local_addr()?);
    let stop = lifecycle.stop();
    let serving = axum::serve(listener, app)
        .with_graceful_shutdown({
            let stop = stop.clone();
            async move { stop.cancelled().await }
        })
        .into_future();
    tokio::select! {
        served = serving => served.context("HTTP failed"),
        () = async { stop.cancelled().await; sleep(HTTP_DRAIN).await } => {
            warn!("some clients took more than {HTTP_DRAIN:?}, their connections are closed");
            Ok(())
        }
    }
}

/// The `healthcheck` subcommand: asks `/readyz` of the service that listens on `address`.
///
/// # Errors
/// When it is not ready, with the reason it gives.
pub async fn healthcheck(address: SocketAddr) -> anyhow::Result<()> {
    let ask = async {
        let mut connection = TcpStream::connect(address)
            .await
            .with_context(|| format!("nothing listens on {address}"))?;
        let request =
            format!("GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = timeout(HEALTHCHECK_TIMEOUT, ask).await.context("no answer")??;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    ensure!(answer.starts_with("HTTP/1.1 200 "), "not ready: {body}");
    Ok(())
}
