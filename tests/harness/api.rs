//! orders-service as its clients see it.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use standardwebhooks::{
    HEADER_WEBHOOK_ID, HEADER_WEBHOOK_SIGNATURE, HEADER_WEBHOOK_TIMESTAMP, Webhook,
};
use time::OffsetDateTime;
use tokio::time::{sleep, timeout};

/// How long a client waits for an answer before it asks again.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a client waits that got no answer, or was told to come later.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

/// A client of one base URL. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Api {
    base: String,
    client: Client,
    /// What confirmations are signed with.
    secret: Option<String>,
}

/// An answer: status, content type, body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub content_type: String,
    pub body: Value,
}

impl Answer {
    /// The machine-readable code of a problem.
    pub fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or_default()
    }
}

impl Api {
    pub fn new(base: String) -> Self {
        Self { base, client: client(), secret: None }
    }

    /// A client that signs its confirmations, as a payment provider does.
    pub fn signing(base: String, secret: &str) -> Self {
        Self { secret: Some(secret.to_owned()), ..Self::new(base) }
    }

    pub async fn place(&self, order: &str, amount: i64) -> anyhow::Result<Answer> {
        let body = json!({ "customerId": "C-1", "amountMinor": amount, "currency": "EUR" });
        self.put(&format!("/orders/{order}"), &body).await
    }

    pub async fn confirm(
        &self,
        transaction: &str,
        order: &str,
        amount: i64,
    ) -> anyhow::Result<Answer> {
        let body = confirmation(transaction, order, amount).to_string();
        let mut request = self.client.post(self.url("/payments"));
        if let Some(secret) = &self.secret {
            for (name, value) in sign(secret, transaction, OffsetDateTime::now_utc(), &body) {
                request = request.header(name, value);
            }
        }
        answer(request.header("content-type", "application/json").body(body)).await
    }

    pub async fn put(&self, path: &str, body: &Value) -> anyhow::Result<Answer> {
        answer(self.client.put(self.url(path)).json(body)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Answer> {
        answer(self.client.post(self.url(path)).json(body)).await
    }

    pub async fn get(&self, path: &str) -> anyhow::Result<Answer> {
        answer(self.client.get(self.url(path))).await
    }

    /// For requests no decent client would send.
    pub fn client(&self) -> &Client {
        &self.client
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// Whether `/readyz` says 200.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let answer = self.get("/readyz").await?;
        anyhow::ensure!(answer.status == StatusCode::OK.as_u16(), "{}", answer.body);
        Ok(())
    }
}

/// A client that needs no TLS, and says so: the default one asks for a provider, and for the
/// machine's root certificates, before its first request.
fn client() -> Client {
    let tls = rustls::ClientConfig::builder_with_provider(
        rustls::crypto::ring::default_provider().into(),
    )
    .with_safe_default_protocol_versions()
    .expect("ring can do TLS")
    .with_root_certificates(rustls::RootCertStore::empty())
    .with_no_client_auth();
    Client::builder().tls_backend_preconfigured(tls).build().expect("nothing else to go wrong")
}

/// Places an order and confirms its payment as a payment provider does: until it gets an answer that
/// is final, from whichever replica. Returns how long the confirmation took in all.
pub async fn confirm_stubbornly(apis: &[Api], order: &str, amount: i64) -> Duration {
    let transaction = format!("tx-{order}");
    let mut asked = None;
    for attempt in 0.. {
        let api = &apis[attempt % apis.len()];
        if asked.is_some() || is_good(api.place(order, amount)).await {
            let asked = asked.get_or_insert_with(Instant::now);
            if is_good(api.confirm(&transaction, order, amount)).await {
                return asked.elapsed();
            }
        }
        sleep(BETWEEN_ATTEMPTS).await;
    }
    unreachable!("there is always one more attempt")
}

/// Whether there is an answer in time, and it is a good one.
async fn is_good(answer: impl Future<Output = anyhow::Result<Answer>>) -> bool {
    let answer = timeout(PATIENCE, answer).await;
    matches!(answer, Ok(Ok(answer)) if matches!(answer.status, 200 | 201))
}

/// The body of `POST /payments`.
pub fn confirmation(transaction: &str, order: &str, amount: i64) -> Value {
    json!({ "transactionId": transaction, "orderId": order, "amountMinor": amount, "currency": "EUR" })
}

/// The headers of Standard Webhooks.
pub fn sign(secret: &str, id: &str, at: OffsetDateTime, body: &str) -> [(&'static str, String); 3] {
    let seconds = at.unix_timestamp();
    let signature =
        Webhook::new(secret).and_then(|webhook| webhook.sign(id, seconds, body.as_bytes()));
    [
        (HEADER_WEBHOOK_ID, id.to_owned()),
        (HEADER_WEBHOOK_TIMESTAMP, seconds.to_string()),
        (HEADER_WEBHOOK_SIGNATURE, signature.expect("the secret can be read")),
    ]
}

/// Sends a request and reads the answer whole.
pub async fn answer(request: reqwest::RequestBuilder) -> anyhow::Result<Answer> {
    let response = request.send().await.context("no answer")?;
    let status = response.status().as_u16();
    let content_type = response.headers().get("content-type").and_then(|v| v.to_str().ok());
    let content_type = content_type.unwrap_or_default().to_owned();
    let text = response.text().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    Ok(Answer { status, content_type, body })
}
