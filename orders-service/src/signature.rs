//! Who may confirm a payment: whoever signs with a secret that we share.
//!
//! Source: Standard Webhooks, <https://www.standardwebhooks.com>. A signature covers `webhook-id`,
//! `webhook-timestamp` and the body as it was sent, and is good for five minutes around its time.
//! Within them it can be replayed, which changes nothing: the transaction is confirmed already.

use std::{str::FromStr, sync::Arc};

use axum::http::HeaderMap;
use standardwebhooks::{HEADER_WEBHOOK_TIMESTAMP, Webhook, WebhookError};

/// 24 bytes in base64, the least that the specification allows.
const SHORTEST: usize = 32;

/// The secrets that count: several while one is replaced by the next. `Debug` shows none.
#[derive(Clone)]
pub struct Secrets(Arc<[Webhook]>);

impl FromStr for Secrets {
    type Err = &'static str;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        let secret = |text: &str| {
            let text = text.trim();
            if text.trim_start_matches("whsec_").len() < SHORTEST {
                return Err("a secret has less than 24 bytes");
            }
            Webhook::new(text).map_err(|_| "a secret is not base64")
        };
        list.split(',').map(secret).collect::<Result<_, _>>().map(Self)
    }
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} secrets", self.0.len())
    }
}

impl Secrets {
    /// Whether one of the secrets signed this, not long ago. The comparison takes the same time
    /// whatever is wrong.
    ///
    /// # Errors
    /// What is wrong.
    pub fn verify(&self, headers: &HeaderMap, body: &[u8]) -> Result<(), WebhookError> {
        // One far from any clock would overflow in the crate (standardwebhooks 1.0.1).
        let timestamp = headers.get(HEADER_WEBHOOK_TIMESTAMP);
        if timestamp.is_some_and(|seconds| seconds.len() > "1800000000".len()) {
            return Err(WebhookError::InvalidTimestamp);
        }
        let mut refusal = WebhookError::InvalidSignature;
        for secret in self.0.iter() {
            match secret.verify(body, headers) {
                Ok(()) => return Ok(()),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}
