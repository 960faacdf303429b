//! The API: bodies in, values checked, one call, an answer out. No SQL, no NATS.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{
        DefaultBodyLimit, FromRequest, Path, Request, State,
        rejection::{BytesRejection, JsonRejection, PathRejection},
    },
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use serde::{Deserialize, de::DeserializeOwned};
use shared::{
    database,
    http::{alive, in_time, ready},
    lifecycle::{Health, Lifecycle},
    nats::Nats,
    telemetry::{TRACEPARENT, TraceParent},
    topology,
    values::{InvalidValue, OrderId},
};
use sqlx::PgPool;
use tokio::{sync::Notify, time::timeout};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::info;

use crate::{
    MIGRATOR,
    error::ApiError,
    orders::{self, NewOrder, Placed},
    payments::{self, Confirmation, Outcome},
    signature::Secrets,
};

/// The largest body. What is behind it is a handful of short fields.
pub const MAX_BODY: usize = 64 * 1024;

/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// What handlers work with.
#[derive(Clone)]
pub struct App {
    /// None: confirmations need no signature.
    pub webhook_secrets: Option<Secrets>,
    pub pool: PgPool,
    pub nats: Nats,
    /// Notified after each commit that wrote to the outbox.
    pub relay_waker: Arc<Notify>,
    pub relay_health: Health,
    pub consumer_health: Health,
    pub lifecycle: Lifecycle,
}

/// All routes of the service.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/orders/{order_id}", put(place_order).get(show_order))
        .route("/payments", post(confirm_payment))
        .route("/healthz", get(alive))
        .route("/readyz", get(readyz))
        .fallback(async || ApiError::NotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(CatchPanicLayer::custom(|_: Box<dyn std::any::Any + Send>| {
            ApiError::Internal(anyhow::anyhow!("a handler panicked")).into_response()
        }))
        .with_state(app)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct OrderBody {
    customer_id: String,
    amount_minor: i64,
    currency: String,
}

async fn place_order(
    State(app): State<App>,
    order_id: Result<Path<String>, PathRejection>,
    Body(body): Body<OrderBody>,
) -> Result<Response, ApiError> {
    let Path(order_id) = order_id.map_err(|rejection| ApiError::Invalid(rejection.body_text()))?;
    let new = NewOrder {
        order_id: field("orderId", order_id)?,
        customer_id: field("customerId", body.customer_id)?,
        amount_minor: field("amountMinor", body.amount_minor)?,
        currency: field("currency", body.currency)?,
    };
    let placed =
        app.lifecycle.detached(async move { orders::place(&app.pool, &new).await }).await?;
    match placed {
        Placed::Created(order) => Ok((StatusCode::CREATED, Json(order)).into_response()),
        Placed::Again(order) => Ok(Json(order).into_response()),
        Placed::Differs => Err(ApiError::OrderDiffers),
    }
}

async fn show_order(
    State(app): State<App>,
    order_id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    // An id that no order can have, one with a NUL character for example, is simply unknown.
    let Path(order_id) = order_id.map_err(|_| ApiError::UnknownOrder)?;
    let order_id = OrderId::try_from(order_id).map_err(|_| ApiError::UnknownOrder)?;
    let found =
        app.lifecycle.detached(async move { orders::find(&app.pool, order_id.as_str()).await });
    found.await?.map(|order| Json(order).into_response()).ok_or(ApiError::UnknownOrder)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PaymentBody {
    transaction_id: String,
    order_id: String,
    amount_minor: i64,
    currency: String,
}

async fn confirm_payment(
    State(app): State<App>,
    headers: HeaderMap,
    Signed(body): Signed<PaymentBody>,
) -> Result<Response, ApiError> {
    let confirmation = Confirmation {
        transaction_id: field("transactionId", body.transaction_id)?,
        order_id: field("orderId", body.order_id)?,
        amount_minor: field("amountMinor", body.amount_minor)?,
        currency: field("currency", body.currency)?,
    };
    let traceparent =
        TraceParent::from_header(headers.get(TRACEPARENT).and_then(|v| v.to_str().ok()));
    let lifecycle = app.lifecycle.clone();
    // Detached: a client that hangs up takes neither the transaction nor the wake-up with it.
    let outcome = lifecycle
        .detached(async move {
            let outcome = payments::confirm(&app.pool, &confirmation, &traceparent).await?;
            if let Outcome::Confirmed(payment) = &outcome {
                app.relay_waker.notify_one();
                info!(
                    order.id = %payment.order_id, event.id = %payment.event_id,
                    traceparent = traceparent.as_str(), "payment {} confirmed", payment.transaction_id
                );
            }
            anyhow::Ok(outcome)
        })
        .await?;
    match outcome {
        Outcome::Confirmed(payment) => Ok((StatusCode::CREATED, Json(payment)).into_response()),
        Outcome::Again(payment) => Ok(Json(payment).into_response()),
        Outcome::UnknownOrder => Err(ApiError::UnknownOrder),
        Outcome::TransactionConflict => Err(ApiError::TransactionConflict),
        Outcome::AlreadyPaid => Err(ApiError::AlreadyPaid),
        Outcome::AmountMismatch => Err(ApiError::AmountMismatch),
    }
}

/// Ready: what this service needs to confirm payments **and** to announce them. Without NATS it
/// still confirms, and the outbox keeps the events; readiness tells the operator.
async fn readyz(State(app): State<App>) -> Response {
    let lifecycle = app.lifecycle.clone();
    let checks = lifecycle.detached(async move {
        // First: whoever reads "nats: ok" can take the other checks at their word.
        let nats = app.nats.check();
        let (database, stream) = tokio::join!(
            in_time(database::check(&app.pool, &MIGRATOR)),
            in_time(topology::check_stream(&app.nats, topology::ORDERS))
        );
        [
            ("database", database),
            ("nats", nats),
            ("permissions", app.nats.check_permissions()),
            ("stream", stream),
            ("relay", app.relay_health.check()),
            ("consumer", app.consumer_health.check()),
        ]
    });
    ready(checks.await)
}

/// Checks one field of a request, and names it when it is refused.
fn field<T, V: TryFrom<T, Error = InvalidValue>>(name: &str, value: T) -> Result<V, ApiError> {
    value.try_into().map_err(|error| ApiError::Invalid(format!("{name} {error}")))
}

/// A JSON body, read within limits, with every refusal as a problem of ours.
struct Body<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let read = timeout(BODY_TIMEOUT, Json::from_request(request, state)).await;
        match read.map_err(|_| ApiError::BodyTooSlow)? {
            Ok(Json(body)) => Ok(Self(body)),
            Err(JsonRejection::MissingJsonContentType(_)) => Err(ApiError::UnsupportedMediaType),
            Err(JsonRejection::BytesRejection(rejection)) => Err(unread(&rejection)),
            Err(rejection) => Err(ApiError::Invalid(rejection.body_text())),
        }
    }
}

/// The same from somebody who may confirm payments. Who they are is asked before what they want.
struct Signed<T>(T);

impl<T: DeserializeOwned> FromRequest<App> for Signed<T> {
    type Rejection = ApiError;

    async fn from_request(mut request: Request, app: &App) -> Result<Self, ApiError> {
        if let Some(secrets) = &app.webhook_secrets {
            // The signature is one of bytes: what was read and written again would be another.
            let (head, body) = request.into_parts();
            let sent = Request::from_parts(head.clone(), body);
            let read = timeout(BODY_TIMEOUT, Bytes::from_request(sent, app)).await;
            let bytes =
                read.map_err(|_| ApiError::BodyTooSlow)?.map_err(|rejection| unread(&rejection))?;
            secrets.verify(&head.headers, &bytes).map_err(|error| {
                ApiError::BadSignature(format!("{error}; sign as Standard Webhooks has it"))
            })?;
            request = Request::from_parts(head, bytes.into());
        }
        Body::from_request(request, app).await.map(|Body(body)| Self(body))
    }
}

fn unread(rejection: &BytesRejection) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::BodyTooLarge,
        _ => ApiError::Invalid(rejection.body_text()),
    }
}
