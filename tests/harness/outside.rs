//! Somebody else's API, as a carrier or a receiver of notices: it makes one effect per idempotency
//! key, keeps count, and misbehaves on demand.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// What becomes of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The effect, and its answer.
    Accept,
    /// The effect, and its answer that much later.
    Late(Duration),
    /// The effect, and no answer: the connection is closed.
    HangUp,
    /// No effect, and no answer until the behaviour changes.
    Hold,
    /// No effect, and this status, perhaps with `Retry-After`. A redirect leads back here.
    Fail(u16, Option<String>),
    /// No effect, ever: 422 with this detail.
    Refuse(&'static str),
}

/// A call as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Counts from 1, over all keys and over this one.
    pub number: usize,
    pub attempt: usize,
    pub at: Instant,
    pub path: String,
    /// As it stood in the header.
    pub key: String,
    pub traceparent: Option<String>,
    pub body: Value,
}

type Rule = Arc<dyn Fn(&Call) -> Reply + Send + Sync>;

/// A server on loopback. Dropping it closes it.
pub struct Outside {
    address: SocketAddr,
    record: Arc<Mutex<Record>>,
    rule: watch::Sender<Rule>,
    _serving: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct Record {
    calls: Vec<Call>,
    attempts: HashMap<String, usize>,
    effects: HashMap<String, Value>,
    in_flight: HashMap<String, usize>,
    most_in_flight: usize,
    most_per_key: usize,
}

impl Outside {
    /// A well-behaved one.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_on(0).await
    }

    /// The same, on a port on which nobody has answered so far.
    pub async fn start_on(port: u16) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        let address = listener.local_addr()?;
        let record = Arc::default();
        let rule: Rule = Arc::new(|_| Reply::Accept);
        let rule = watch::Sender::new(rule);
        let app = Router::new().fallback(answer).with_state((Arc::clone(&record), rule.clone()));
        let serving = TaskTracker::new().spawn(async move {
            if let Err(error) = axum::serve(listener, app).await {
                eprintln!("the double has failed: {error}");
            }
        });
        Ok(Self { address, record, rule, _serving: AbortOnDropHandle::new(serving) })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Decides about the calls from now on, and about those that are held.
    pub fn behave(&self, rule: impl Fn(&Call) -> Reply + Send + Sync + 'static) {
        self.rule.send_replace(Arc::new(rule));
    }

    pub fn calls(&self) -> Vec<Call> {
        lock(&self.record).calls.clone()
    }

    /// What was done, by key, with the body that asked for it.
    pub fn effects(&self) -> HashMap<String, Value> {
        lock(&self.record).effects.clone()
    }

    /// The most calls at one time with the same key.
    pub fn most_in_flight_per_key(&self) -> usize {
        lock(&self.record).most_per_key
    }

    /// The most calls at one time.
    pub fn most_in_flight(&self) -> usize {
        lock(&self.record).most_in_flight
    }
}

fn lock(record: &Mutex<Record>) -> MutexGuard<'_, Record> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call as in flight until its client is gone or answered.
struct InFlight<'a>(&'a Mutex<Record>, String);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        *lock(self.0).in_flight.entry(self.1.clone()).or_default() -= 1;
    }
}

async fn answer(
    State((record, rule)): State<(Arc<Mutex<Record>>, watch::Sender<Rule>)>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let text = |name: &str| Some(headers.get(name)?.to_str().ok()?.to_owned());
    // A structured field of type String (RFC 8941): printable characters in quotes.
    let Some(key) = text("idempotency-key").filter(|key| {
        key.len() > 2 && key.starts_with('"') && key.ends_with('"') && key.matches('"').count() == 2
    }) else {
        return problem(StatusCode::BAD_REQUEST, "Idempotency-Key is missing or no string");
    };
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return problem(StatusCode::BAD_REQUEST, "no JSON");
    };
    let call = {
        let mut record = lock(&record);
        let attempt = record.attempts.entry(key.clone()).or_default();
        *attempt += 1;
        let attempt = *attempt;
        let call = Call {
            number: record.calls.len() + 1,
            attempt,
            at: Instant::now(),
            path: uri.path().to_owned(),
            key: key.clone(),
            traceparent: text("traceparent"),
            body: body.clone(),
        };
        record.calls.push(call.clone());
        *record.in_flight.entry(key.clone()).or_default() += 1;
        record.most_per_key = record.most_per_key.max(record.in_flight[&key]);
        record.most_in_flight = record.most_in_flight.max(record.in_flight.values().sum());
        call
    };
    let _in_flight = InFlight(&record, key.clone());
    let mut changes = rule.subscribe();
    let reply = loop {
        let decide = Arc::clone(&changes.borrow_and_update());
        match decide(&call) {
            Reply::Hold if changes.changed().await.is_ok() => {}
            reply => break reply,
        }
    };
    match reply {
        Reply::Accept | Reply::Late(_) | Reply::HangUp => {}
        Reply::Hold => return problem(StatusCode::SERVICE_UNAVAILABLE, "closed"),
        Reply::Refuse(reason) => return problem(StatusCode::UNPROCESSABLE_ENTITY, reason),
        Reply::Fail(status, retry_after) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::IM_A_TEAPOT);
            let mut response = problem(status, "not now");
            if status.is_redirection() {
                let elsewhere = header::HeaderValue::from_static("/elsewhere");
                response.headers_mut().insert(header::LOCATION, elsewhere);
            }
            if let Some(value) = retry_after.and_then(|value| value.try_into().ok()) {
                response.headers_mut().insert(header::RETRY_AFTER, value);
            }
            return response;
        }
    }
    if *lock(&record).effects.entry(key).or_insert_with(|| body.clone()) != body {
        return problem(StatusCode::UNPROCESSABLE_ENTITY, "this key was used for something else");
    }
    match reply {
        Reply::Late(time) => tokio::time::sleep(time).await,
        // Ends the task of the connection, and says nothing about it.
        Reply::HangUp => std::panic::resume_unwind(Box::new("hang up")),
        _ => {}
    }
    let code = format!("PARCEL-{}", body["orderId"].as_str().unwrap_or_default());
    (StatusCode::CREATED, axum::Json(json!({ "trackingCode": code }))).into_response()
}

fn problem(status: StatusCode, detail: &str) -> Response {
    let body = json!({ "title": "no", "status": status.as_u16(), "detail": detail });
    (status, axum::Json(body)).into_response()
}
