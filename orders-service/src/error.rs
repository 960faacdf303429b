//! What can go wrong in a request, and how the client is told.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use shared::{database, http::Problem, telemetry::Causes};

/// Every refusal of the API. `code` in the answer is what programs decide by.
#[derive(Debug)]
pub enum ApiError {
    /// The request itself is wrong; the text names the field and the rule.
    Invalid(String),
    /// Not JSON by its content type.
    UnsupportedMediaType,
    /// More than 64 KiB.
    BodyTooLarge,
    /// The body did not arrive in time.
    BodyTooSlow,
    /// A confirmation that is not signed by who may; the text says what is wrong.
    BadSignature(String),
    /// No such path.
    NotFound,
    /// No such method on this path.
    MethodNotAllowed,
    UnknownOrder,
    OrderDiffers,
    TransactionConflict,
    AlreadyPaid,
    AmountMismatch,
    /// The database is away; the same request may be sent again.
    Unavailable(anyhow::Error),
    /// A bug, or a database that refuses what it should not.
    Internal(anyhow::Error),
}

impl From<anyhow::Error> for ApiError {
    fn from(error: anyhow::Error) -> Self {
        if database::is_outage(&error) { Self::Unavailable(error) } else { Self::Internal(error) }
    }
}

impl From<sqlx::Error> for ApiError {
    fn from(error: sqlx::Error) -> Self {
        anyhow::Error::from(error).into()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code, title, detail) = match self {
            Self::Invalid(detail) => {
                (StatusCode::UNPROCESSABLE_ENTITY, "invalid", "Invalid request", detail)
            }
            Self::UnsupportedMediaType => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_media_type",
                "Not JSON",
                "send the body with content-type: application/json".to_owned(),
            ),
            Self::BodyTooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "body_too_large",
                "Body too large",
                "a body may have 64 KiB".to_owned(),
            ),
            Self::BodyTooSlow => (
                StatusCode::REQUEST_TIMEOUT,
                "body_too_slow",
                "Body too slow",
                "the body did not arrive within 10 s".to_owned(),
            ),
            Self::BadSignature(detail) => {
                (StatusCode::UNAUTHORIZED, "bad_signature", "Not signed by who may", detail)
            }
            Self::NotFound => (
                StatusCode::NOT_FOUND,
                "not_found",
                "No such resource",
                "check the path".to_owned(),
            ),
            Self::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "No such method here",
                "see the header Allow".to_owned(),
            ),
            Self::UnknownOrder => (
                StatusCode::NOT_FOUND,
                "unknown_order",
                "Unknown order",
                "there is no order with this orderId; place it first".to_owned(),
            ),
            Self::OrderDiffers => (
                StatusCode::CONFLICT,
                "order_differs",
                "Another order has this id",
                "an order with this orderId exists, with other values; choose a new orderId"
                    .to_owned(),
            ),
            Self::TransactionConflict => (
                StatusCode::CONFLICT,
                "transaction_conflict",
                "Transaction used otherwise",
                "this transactionId was confirmed with other values; nothing was changed"
                    .to_owned(),
            ),
            Self::AlreadyPaid => (
                StatusCode::CONFLICT,
                "already_paid",
                "Already paid",
                "another transaction has paid this order; nothing was changed".to_owned(),
            ),
            Self::AmountMismatch => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "amount_mismatch",
                "Amount does not match",
                "amountMinor and currency must be those of the order".to_owned(),
            ),
            Self::Unavailable(error) => {
                tracing::warn!("the database is away: {}", Causes(&error));
                (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "unavailable",
                    "Temporarily unavailable",
                    "nothing is known to have changed; send the same request again".to_owned(),
                )
            }
            Self::Internal(error) => {
                tracing::error!("request failed: {}", Causes(&error));
                (
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "internal",
                    "Internal error",
                    "the cause is in this service's log; the same request may be sent again"
                        .to_owned(),
                )
            }
        };
        let mut response = Problem::new(status, code, title, detail).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
