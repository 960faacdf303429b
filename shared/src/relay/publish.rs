//! Rows on their way to the broker, and what a failure means for each.
//!
//! Throughput comes from publishing up to a batch at once, order from publishing at most one of an
//! aggregate at a time: the batch goes out in waves, and an aggregate whose row failed sits out the
//! rest of them. Kinds and codes of errors alone do not say what became of a message; the table behind
//! [`classify`] was made by provoking each of them on a real server.

use std::{collections::HashSet, error::Error as _};

use async_nats::{
    HeaderMap,
    jetstream::{
        self,
        context::{PublishError, PublishErrorKind},
        message::PublishMessage,
        publish::PublishAck,
    },
};
use futures_util::future::join_all;
use tracing::{error, info};

use super::{RETRY_BASE, RETRY_CAP};
use crate::{
    audit, backoff, events,
    nats::Nats,
    outbox::{Failed, Published, Row},
    telemetry::TRACEPARENT,
};

/// Publishes rows, in waves.
pub(super) async fn publish(nats: &Nats, stream: &'static str, rows: Vec<Row>) -> Sent {
    let mut sent = Sent::default();
    let mut waiting = rows;
    let mut failed_aggregates = HashSet::new();
    while !waiting.is_empty() {
        // A wave: the first waiting row of every aggregate.
        let mut aggregates = HashSet::new();
        let (wave, rest): (Vec<Row>, Vec<Row>) = waiting
            .into_iter()
            .filter(|row| !failed_aggregates.contains(&row.aggregate_id))
            .partition(|row| aggregates.insert(row.aggregate_id.clone()));
        waiting = rest;
        let before = (sent.published.len(), sent.refused);
        let results = join_all(wave.iter().map(|row| publish_one(nats, stream, row))).await;
        for (row, result) in wave.into_iter().zip(results) {
            match result {
                Ok(stream_seq) => {
                    sent.published.push(Published { event_id: row.event_id, stream_seq });
                }
                Err(error) => {
                    sent.note_failure(&row, &error);
                    failed_aggregates.insert(row.aggregate_id);
                }
            }
        }
        // One row that fails alone is its own problem, and waits alone. Several of which none
        // arrives are the broker's.
        let (published, refused) = (sent.published.len() - before.0, sent.refused - before.1);
        if published == 0 && refused > 1 && sent.stuck.is_none() {
            sent.stuck = sent.failed.last().map(|row| row.error.clone());
        }
        if sent.stuck.is_some() {
            break;
        }
    }
    sent
}

/// Returns the event's place in the stream.
async fn publish_one(nats: &Nats, stream: &'static str, row: &Row) -> Result<u64, PublishError> {
    // nats-server 2.14.6 remembers message ids over a purge, and then acknowledges a duplicate of
    // what it does not have. The id in capitals is another one to it, and the same to whoever
    // parses it.
    for write in [str::to_owned, str::to_ascii_uppercase] {
        let ack = send(nats, stream, row, write(&row.event_id.to_string())).await?;
        if !ack.duplicate {
            return Ok(ack.sequence);
        }
        let held = audit::holds(nats, stream, row.event_id, ack.sequence).await;
        if held.map_err(|error| PublishError::with_source(PublishErrorKind::Other, error))? {
            info!(event.id = %row.event_id, "published again; the broker had it already");
            return Ok(ack.sequence);
        }
    }
    let refusal = "called a duplicate of what the stream does not have";
    Err(PublishError::with_source(PublishErrorKind::Other, refusal))
}

#[expect(clippy::disallowed_methods, reason = "the relay is the only publisher")]
async fn send(
    nats: &Nats,
    stream: &'static str,
    row: &Row,
    message_id: String,
) -> Result<PublishAck, PublishError> {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", events::CONTENT_TYPE);
    if let Some(traceparent) = &row.traceparent {
        headers.insert(TRACEPARENT, traceparent.as_str());
    }
    // headers() replaces the whole map, so it comes before those that add to it.
    let message = PublishMessage::build()
        .headers(headers)
        .payload(row.payload.clone().into())
        .message_id(message_id)
        .expected_stream(stream);
    let context = nats.jetstream();
    // Two awaits: the first only hands the message to the client, the second is the broker's
    // word. `duplicate: true` in it is success, an earlier attempt's.
    context.send_publish(row.subject.clone(), message).await?.await
}

/// What came of it.
#[derive(Default)]
pub(super) struct Sent {
    /// Acknowledged, and held.
    pub(super) published: Vec<Published>,
    /// Not acknowledged.
    pub(super) failed: Vec<Failed>,
    /// Those among the failed that may work later.
    refused: usize,
    /// Why it makes no sense to go on now.
    pub(super) stuck: Option<String>,
}

impl Sent {
    fn note_failure(&mut self, row: &Row, error: &PublishError) {
        let attempt = u32::try_from(row.attempts).unwrap_or_default() + 1;
        let retry_after = match classify(error) {
            Failure::Retry => {
                self.refused += 1;
                Some(backoff::delay(attempt, RETRY_BASE, RETRY_CAP))
            }
            Failure::Park => {
                error!(event.id = %row.event_id, "parked, it can never be published: {error}");
                None
            }
            Failure::Halt => {
                error!(event.id = %row.event_id, subject = row.subject, "belongs to another stream: {error}");
                self.stuck = Some(format!("subject {}: {error}", row.subject));
                Some(RETRY_CAP)
            }
        };
        self.failed.push(Failed {
            event_id: row.event_id,
            error: error.to_string(),
            retry_after: retry_after.map(|wait| wait.as_secs_f64()),
        });
    }
}

/// What to do with a row that was not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// The broker may have it, or may take it later. The same message id makes a repetition safe.
    Retry,
    /// It can never be published as it is.
    Park,
    /// The subject belongs to another stream than the one we publish to: a mistake in the topology.
    Halt,
}

/// JetStream API error codes that say more than the kind does (`errors.json` of nats-server).
const EXPECTED_STREAM_MISMATCH: u64 = 10060;
const MESSAGE_TOO_LARGE_FOR_STREAM: u64 = 10054;

fn classify(error: &PublishError) -> Failure {
    match error.kind() {
        // StreamNotFound is any "no responders", a leader election for one: it passes.
        PublishErrorKind::StreamNotFound
        | PublishErrorKind::TimedOut
        | PublishErrorKind::BrokenPipe
        | PublishErrorKind::MaxAckPending
        | PublishErrorKind::WrongLastMessageId
        | PublishErrorKind::WrongLastSequence => Failure::Retry,
        PublishErrorKind::MaxPayloadExceeded => Failure::Park,
        PublishErrorKind::Other => match api_code(error) {
            Some(MESSAGE_TOO_LARGE_FOR_STREAM) => Failure::Park,
            Some(EXPECTED_STREAM_MISMATCH) => Failure::Halt,
            // A full stream (10077) among them: the outbox is the buffer.
            _ => Failure::Retry,
        },
    }
}

fn api_code(error: &PublishError) -> Option<u64> {
    let source = error.source()?.downcast_ref::<jetstream::Error>()?;
    Some(source.error_code().0)
}
