//! Claims with a time to live in a JetStream key-value bucket: `SET NX EX` on this stack, for an
//! effect that no database holds.
//!
//! What it gives, and what it does not, against [`crate::inbox`]:
//! 1. Of all who want a key at once one gets it, and if that one dies, the next after its lease.
//! 2. So an effect is thinned out and never left out; an inbox row, committed with it, rules it out.
//! 3. A crash between effect and "done" repeats the effect: the receiver's key has to absorb that.
//! 4. There is no fence: who sleeps past its lease acts beside the next. A transaction would fail.
//! 5. "Done" is forgotten after a time, and with the broker's data; an inbox row is in your backup.

use std::time::Duration;

use async_nats::{
    Subject,
    header::NATS_MARKER_REASON,
    jetstream::{
        context::{PublishError, PublishErrorKind},
        message::{PublishMessage, StreamMessage},
        stream::{LastRawMessageError, LastRawMessageErrorKind},
    },
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use uuid::Uuid;

use crate::nats::Nats;

/// How often a write is tried that meets a change of its key, or no answer.
const ATTEMPTS: u32 = 4;

/// The value of a key whose effect is done.
const DONE: &str = "done";

/// Header that `delete` and `purge` leave on their marker (ADR-8 of NATS).
const KV_OPERATION: &str = "KV-Operation";

/// Why nobody knows whether a key is claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The write was refused, or not answered.
    #[error("the claim cannot be written")]
    Write(#[source] PublishError),
    /// The key could not be read.
    #[error("the claim cannot be read")]
    Read(#[source] LastRawMessageError),
    /// The key changed each time we looked.
    #[error("the claim changes all the time; try again later")]
    Contended,
}

/// What asking for a claim came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Claimed {
    /// Ours: go ahead.
    Ours(Claim),
    /// Somebody else is at it. If they fail, their lease runs out.
    Held,
    /// The effect was done before.
    Done,
}

/// A lease on a key.
#[derive(Debug, PartialEq, Eq)]
pub struct Claim {
    subject: Subject,
    revision: u64,
}

/// The claims of one bucket. Cheap to clone.
#[derive(Clone)]
pub struct Claims {
    nats: Nats,
    bucket: &'static str,
}

/// What a key holds: a value, or nothing (never written, deleted, expired) at a revision.
struct Entry {
    revision: u64,
    value: Option<String>,
}

impl Claims {
    /// The claims in `bucket`, which must allow a time to live per key (see [`crate::topology`]).
    pub fn new(nats: Nats, bucket: &'static str) -> Self {
        Self { nats, bucket }
    }

    /// Claims `key` for `lease`, in whole seconds and at least one. The lease should outlast the
    /// effect.
    ///
    /// # Errors
    /// When the broker does not say how it stands. Nothing may be done then; if the claim was
    /// written after all, it runs out.
    pub async fn claim(&self, key: &str, lease: Duration) -> Result<Claimed, ClaimError> {
        let subject = self.subject(key);
        // A token of this attempt, not of this process: two deliveries of one event may be in hand
        // here at the same time.
        let token = Uuid::now_v7().to_string();
        match self.write(&subject, &token, lease, 0).await? {
            Written::Stored(revision) => Ok(Claimed::Ours(Claim { subject, revision })),
            Written::Taken(value) if value == DONE => Ok(Claimed::Done),
            Written::Taken(_) => Ok(Claimed::Held),
        }
    }

    /// Marks the effect as done, for `keep`. False when the lease had run out and somebody else has
    /// claimed the key since: the effect will come once more.
    ///
    /// # Errors
    /// When the broker does not say how it stands.
    pub async fn done(&self, claim: Claim, keep: Duration) -> Result<bool, ClaimError> {
        let written = self.write(&claim.subject, DONE, keep, claim.revision).await?;
        Ok(matches!(written, Written::Stored(_)))
    }

    /// Gives the key back: the effect did not happen, and the next attempt need not wait for the
    /// lease to run out. If this fails, it does wait.
    ///
    /// # Errors
    /// When the broker does not say how it stands.
    pub async fn release(&self, claim: Claim) -> Result<(), ClaimError> {
        let message = PublishMessage::build()
            .header(KV_OPERATION, "DEL")
            .expected_last_subject_sequence(claim.revision);
        match self.publish(claim.subject, message).await {
            // It ran out already.
            Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => Ok(()),
            released => released.map(|_| ()).map_err(ClaimError::Write),
        }
    }

    /// Writes a value if the key is at `revision`, or holds nothing.
    ///
    /// The client's own `create_with_ttl` is not used: over the marker of an expired key it writes
    /// without a time to live (async-nats 0.51), and the claim would never run out.
    async fn write(
        &self,
        subject: &Subject,
        value: &str,
        ttl: Duration,
        mut revision: u64,
    ) -> Result<Written, ClaimError> {
        let mut unanswered = None;
        for _ in 0..ATTEMPTS {
            let message = PublishMessage::build()
                .payload(value.to_owned().into())
                .ttl(ttl)
                .expected_last_subject_sequence(revision);
            match self.publish(subject.clone(), message).await {
                Ok(revision) => return Ok(Written::Stored(revision)),
                Err(error) => match error.kind() {
                    PublishErrorKind::WrongLastSequence => {}
                    // It may have been stored. Reading tells, or the next attempt.
                    PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => {
                        unanswered = Some(error);
                    }
                    _ => return Err(ClaimError::Write(error)),
                },
            }
            let entry = self.read(subject).await?;
            match entry.value {
                // Ours from an attempt whose answer was lost.
                Some(found) if found == value => return Ok(Written::Stored(entry.revision)),
                Some(_) if entry.revision == revision => {}
                Some(found) => return Ok(Written::Taken(found)),
                None => revision = entry.revision,
            }
        }
        Err(unanswered.map_or(ClaimError::Contended, ClaimError::Write))
    }

    /// Asks the stream's leader. A "direct get", which the key-value client uses, may be answered by
    /// a replica that is behind.
    async fn read(&self, subject: &Subject) -> Result<Entry, ClaimError> {
        let stream = format!("KV_{}", self.bucket);
        let stream = self
            .nats
            .jetstream()
            .get_stream_no_info(stream)
            .await
            .expect("a name that is not empty needs no question");
        match stream.get_last_raw_message_by_subject(subject.as_str()).await {
            Ok(message) => Ok(Entry { revision: message.sequence, value: value(&message) }),
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                Ok(Entry { revision: 0, value: None })
            }
            Err(error) => Err(ClaimError::Read(error)),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a claim is no event")]
    async fn publish(
        &self,
        subject: Subject,
        message: PublishMessage,
    ) -> Result<u64, PublishError> {
        let acknowledged = self.nats.jetstream().send_publish(subject, message).await?;
        Ok(acknowledged.await?.sequence)
    }

    /// Keys hold fewer characters than our identifiers, and a dot would begin a new token.
    fn subject(&self, key: &str) -> Subject {
        const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');
        let key = utf8_percent_encode(key, ENCODED).to_string().replace('%', "=");
        format!("$KV.{}.{key}", self.bucket).into()
    }
}

enum Written {
    /// At this revision.
    Stored(u64),
    /// Another value is there.
    Taken(String),
}

/// None: a marker of a key that was deleted or has expired.
fn value(message: &StreamMessage) -> Option<String> {
    let is_marker = [KV_OPERATION, NATS_MARKER_REASON.as_ref()]
        .into_iter()
        .any(|name| message.headers.get(name).is_some());
    (!is_marker).then(|| String::from_utf8_lossy(&message.payload).into_owned())
}
