//! What a failed publish means for its row. Kinds and codes alone do not say; the table behind this was
//! made by provoking each of them on a real server.

use std::error::Error as _;

use async_nats::jetstream::{
    self,
    context::{PublishError, PublishErrorKind},
};

/// What to do with a row that was not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
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

pub(crate) fn classify(error: &PublishError) -> Failure {
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
