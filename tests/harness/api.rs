//! orders-service as its clients see it.

use anyhow::Context as _;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};

/// A client of one base URL. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Api {
    base: String,
    client: Client,
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
        Self { base, client: client() }
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
        self.post("/payments", &confirmation(transaction, order, amount)).await
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

/// The body of `POST /payments`.
pub fn confirmation(transaction: &str, order: &str, amount: i64) -> Value {
    json!({ "transactionId": transaction, "orderId": order, "amountMinor": amount, "currency": "EUR" })
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
