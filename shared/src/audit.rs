//! What the stream should hold, compared with what it does: how a broker that lost data is noticed.
//!
//! A broker acknowledges, and may lose it all the same: a power failure within its `sync_interval`
//! (nats-server#7564), a store that was restored from a copy, or is a new and empty one. So a place that
//! was acknowledged is not believed for ever: the message is asked for, and has to be the event. That
//! tells a lost event even when somebody else's message stands in its place by now.

use anyhow::Context as _;
use async_nats::{header::NATS_MESSAGE_ID, jetstream::stream::RawMessageErrorKind};
use futures_util::future::try_join_all;

use crate::{events::EventId, nats::Nats, outbox::Place};

/// How many rows are compared at once: so many requests are in flight.
pub const PAGE: u16 = 500;

/// Whether the stream has the event where it was put.
///
/// # Errors
/// When the stream cannot be asked.
pub async fn holds(
    nats: &Nats,
    stream: &str,
    event_id: EventId,
    stream_seq: u64,
) -> anyhow::Result<bool> {
    let handle = nats.jetstream().get_stream_no_info(stream).await?;
    // Asks the leader. A "direct get" may be answered by a replica that is behind.
    match handle.get_raw_message(stream_seq).await {
        Ok(message) => {
            // Parsed, because the relay may have had to spell it another way.
            let id = message.headers.get(NATS_MESSAGE_ID);
            Ok(id.and_then(|id| id.as_str().parse().ok()) == Some(event_id.get()))
        }
        Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("stream {stream} cannot be read")),
    }
}

/// Those of `places` that the stream does not have.
///
/// # Errors
/// When the stream cannot be asked.
pub async fn missing(nats: &Nats, stream: &str, places: &[Place]) -> anyhow::Result<Vec<Place>> {
    let held =
        places.iter().map(|row| holds(nats, stream, row.event_id, row.stream_seq.cast_unsigned()));
    let held = try_join_all(held).await?;
    Ok(places.iter().zip(held).filter(|(_, held)| !held).map(|(row, _)| *row).collect())
}

/// Those of `places` that the stream has lost. What is missing before its first message is not: it
/// has aged out, or was purged by somebody who may.
///
/// # Errors
/// When the stream cannot be asked.
pub async fn lost(nats: &Nats, stream: &str, places: &[Place]) -> anyhow::Result<Vec<Place>> {
    let mut missing = missing(nats, stream, places).await?;
    if !missing.is_empty() {
        let found = nats.jetstream().get_stream(stream).await;
        let found = found.with_context(|| format!("stream {stream} cannot be asked for"))?;
        let first = found.cached_info().state.first_sequence;
        missing.retain(|row| row.stream_seq.cast_unsigned() >= first);
    }
    Ok(missing)
}
