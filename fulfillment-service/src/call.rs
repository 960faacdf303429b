//! A call to somebody else's HTTP API that is safe to repeat, and the three ways it can fail.
//!
//! Guarantees: each call ends within [`CALL_LIMIT`], carries an idempotency key, and is reported as
//! what it is; above all, "it may have happened" is never taken for "it did not". Repeating is left
//! to the caller, who does it with the same key and the same body.
//!
//! Source: the IETF draft "The Idempotency-Key HTTP Header Field"
//! (draft-ietf-httpapi-idempotency-key-header-07); RFC 9110 for the status codes and `Retry-After`.

use std::{
    str::FromStr,
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use reqwest::{
    Client, Response, StatusCode, Url,
    header::{HeaderMap, RETRY_AFTER},
    redirect::Policy,
};
use serde::Serialize;
use serde_json::Value;
use shared::{
    telemetry::{Causes, TRACEPARENT},
    tls,
};
use uuid::Uuid;

/// How long a call may take, from connecting to the last byte of the answer.
pub const CALL_LIMIT: Duration = Duration::from_secs(5);
/// How long connecting may take. Until then, surely nothing has happened.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// How many connections without work are kept, ready for the next call.
const IDLE_CONNECTIONS: usize = 16;
/// More of an answer is not read.
const MAX_ANSWER: usize = 64 * 1024;
/// More of a reason is not kept.
const MAX_REASON_CHARS: usize = 500;
/// The longest that somebody may have us wait. Then we ask again, which is one call.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// Why a call had no success.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// Nothing has happened, and it may work later: nobody there, or too much to do.
    #[error("unavailable: {reason}")]
    Unavailable {
        reason: String,
        /// What the other side asked for.
        retry_after: Option<Duration>,
    },
    /// Nothing has happened, and it never will: this request is not acceptable.
    #[error("refused: {reason}")]
    Refused { reason: String },
    /// It may have happened. Only the same call with the same key tells.
    #[error("outcome unknown: {reason}")]
    UnknownOutcome {
        reason: String,
        /// What the other side asked for.
        retry_after: Option<Duration>,
    },
}

impl CallError {
    /// Nothing says when to try again.
    pub fn unknown(reason: impl Into<String>) -> Self {
        Self::UnknownOutcome { reason: reason.into(), retry_after: None }
    }

    /// When to try again, if the other side said so.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. } | Self::UnknownOutcome { retry_after, .. } => {
                *retry_after
            }
            Self::Refused { .. } => None,
        }
    }
}

/// Where to call. It may hold a password, which `Debug` leaves out.
#[derive(Clone)]
pub struct Endpoint(Url);

impl FromStr for Endpoint {
    type Err = &'static str;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        match Url::parse(url) {
            Ok(url) if matches!(url.scheme(), "http" | "https") => Ok(Self(url)),
            Ok(_) => Err("is not an http:// or https:// URL"),
            Err(_) => Err("cannot be read"),
        }
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(url) = self;
        write!(f, "{}://{}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
    }
}

impl Endpoint {
    /// The resource `name` below it.
    pub fn join(mut self, name: &str) -> Self {
        self.0
            .path_segments_mut()
            .expect("http and https URLs have a path")
            .pop_if_empty()
            .push(name);
        self
    }
}

/// Calls one endpoint, and keeps connections to it.
pub struct Caller {
    client: Client,
    endpoint: Endpoint,
}

impl Caller {
    /// Connects when the first call is made.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(endpoint: Endpoint) -> anyhow::Result<Self> {
        let client = Client::builder()
            // Built without a provider, reqwest would look for one, and for the machine's roots.
            .tls_backend_preconfigured(tls::client()?)
            .user_agent(concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_LIMIT)
            .timeout(CALL_LIMIT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            // A redirected POST may come out as a GET. An API that moved is a mistake in the URL.
            .redirect(Policy::none())
            .build()
            .context("the HTTP client cannot be built")?;
        Ok(Self { client, endpoint })
    }

    /// Posts `body` and returns the answer's body.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn post(
        &self,
        key: Uuid,
        traceparent: Option<&str>,
        body: &impl Serialize,
    ) -> Result<Vec<u8>, CallError> {
        let mut request = self
            .client
            .post(self.endpoint.0.clone())
            // A structured field of type String, hence the quotes ("Syntax" in the draft).
            .header("Idempotency-Key", format!("\"{key}\""))
            .json(body);
        if let Some(traceparent) = traceparent {
            request = request.header(TRACEPARENT, traceparent);
        }
        let response = request.send().await.map_err(unanswered)?;
        let (status, retry_after) = (response.status(), retry_after(response.headers()));
        let answer = read(response).await;
        match status {
            status if status.is_success() => answer.map_err(unanswered),
            status => Err(refusal(status, retry_after, &answer.unwrap_or_default())),
        }
    }
}

/// No answer, or half of one.
fn unanswered(error: reqwest::Error) -> CallError {
    let connecting = error.is_connect();
    // The URL may hold a password.
    let reason = Causes(&error.without_url().into()).to_string();
    if connecting {
        CallError::Unavailable { reason, retry_after: None }
    } else {
        CallError::unknown(reason)
    }
}

/// What an answer means that is no success.
fn refusal(status: StatusCode, retry_after: Option<Duration>, answer: &[u8]) -> CallError {
    let reason = format!("{status}{}", explanation(answer));
    match status {
        // About this request, as it is: no repetition makes it better.
        StatusCode::BAD_REQUEST
        | StatusCode::PAYLOAD_TOO_LARGE
        | StatusCode::UNPROCESSABLE_ENTITY => CallError::Refused { reason },
        // About all requests at this time.
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            CallError::Unavailable { reason, retry_after }
        }
        // 5xx: taken on, and not brought to an end. 409: an earlier request with this key is being
        // worked on (as the draft has it). 401, 403, 404 and the like: about us, our
        // credentials or our URL; were that a refusal, a password that has run out would give up
        // every parcel within a minute.
        _ => CallError::UnknownOutcome { reason, retry_after },
    }
}

/// The other side's own words: the detail of a problem (RFC 9457), or the body.
fn explanation(answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    let problem: Value = serde_json::from_slice(answer).unwrap_or_default();
    let words = problem["detail"].as_str().or(problem["title"].as_str()).unwrap_or(text.trim());
    let printable = words.chars().map(|c| if c.is_control() { ' ' } else { c });
    let words: String = printable.take(MAX_REASON_CHARS).collect();
    if words.is_empty() { words } else { format!(": {words}") }
}

/// Seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?;
    let wait = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(value)
            .ok()?
            .duration_since(SystemTime::now())
            .unwrap_or_default(),
    };
    Some(wait.min(MAX_RETRY_AFTER))
}

async fn read(mut response: Response) -> reqwest::Result<Vec<u8>> {
    let mut answer = Vec::new();
    while let Some(part) = response.chunk().await? {
        answer.extend_from_slice(&part);
        if answer.len() > MAX_ANSWER {
            break;
        }
    }
    Ok(answer)
}
