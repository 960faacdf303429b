//! From the stream to a handler: pull a batch, decode it, have it handled, settle every message.
//!
//! Guarantees: a message is acked only after its effect is committed; one that cannot be handled is
//! kept in the dead letters before it is terminated; one bad message never drags others down; an
//! outage of the database does not use up the deliveries of a message. Assumes a handler whose
//! effect is applied once however often it is asked (inbox, business key), because redelivery is
//! normal: after a crash, a lost ack, a slow batch.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use async_nats::jetstream::{AckKind, Message, consumer::PullConsumer};
use futures_util::StreamExt as _;
use sqlx::PgPool;
use tokio::{
    task::{JoinSet, coop::unconstrained},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::{
    backoff, database,
    dead_letters::{self, Origin, Reason},
    events,
    handler::{self, Delivery, Handler, Verdict},
    lifecycle::Health,
    nats::Nats,
    telemetry::Causes,
    topology,
};

const RETRY_BASE: Duration = Duration::from_millis(500);
const RETRY_CAP: Duration = Duration::from_secs(30);
const REBIND_BASE: Duration = Duration::from_millis(100);
const REBIND_CAP: Duration = Duration::from_secs(5);
/// How long the server keeps an unanswered pull open, and how often it says it is still there.
const PULL_EXPIRES: Duration = Duration::from_secs(30);
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Batches in hand at the same time: while one waits for the database or the broker, the other works.
const UNITS: usize = 2;

/// A durable consumer and its handler.
pub struct Consumer<H> {
    /// Where the dead letters go, and whose absence stops the pulling.
    pub pool: PgPool,
    /// The connection.
    pub nats: Nats,
    /// The stream of the durable.
    pub stream: &'static str,
    /// The durable's name; also the consumer's name in inbox and dead letters.
    pub durable: &'static str,
    /// The most messages of one transaction.
    pub batch: usize,
    /// A message delivered more often than this goes to the dead letters unhandled.
    pub max_deliveries: i64,
    /// The business step.
    pub handler: H,
    /// How readiness learns that the consumer works.
    pub health: Health,
}

impl<H: Handler> Consumer<H> {
    /// Consumes until told to stop; then finishes and settles the batch in hand.
    ///
    /// # Errors
    /// Never of its own accord: whatever fails is tried again, and readiness says so.
    pub async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let consumer = Arc::new(self);
        let mut units = JoinSet::new();
        let mut failures = 0;
        while !stop.is_cancelled() {
            let consumed = consumer.consume(&mut units, &stop, &mut failures).await;
            let Err(error) = consumed else { continue };
            failures += 1;
            consumer.health.failing(Causes(&error).to_string());
            warn!(
                attempt = failures,
                "consumer {}: {}; binding again",
                consumer.durable,
                Causes(&error)
            );
            tokio::select! {
                () = stop.cancelled() => {}
                () = sleep(backoff::delay(failures, REBIND_BASE, REBIND_CAP)) => {}
            }
        }
        units.join_all().await;
        info!("consumer {} has stopped", consumer.durable);
        Ok(())
    }

    /// Binds to the durable and processes what it delivers. Ok when told to stop, or connected anew; any
    /// error of the pull means: let go, wait, bind again, because it does not always end by itself.
    async fn consume(
        self: &Arc<Self>,
        units: &mut JoinSet<()>,
        stop: &CancellationToken,
        failures: &mut u32,
    ) -> anyhow::Result<()> {
        let consumer: PullConsumer = self
            .nats
            .jetstream()
            .get_consumer_from_stream(self.durable, self.stream)
            .await
            .with_context(|| format!("{}/{} cannot be bound", self.stream, self.durable))?;
        // With other settings the promises of this module do not hold. The events are safe in the
        // stream until somebody has run `setup`.
        topology::compare_consumer(self.stream, self.durable, &consumer.cached_info().config)?;
        let connection = self.nats.connection();
        let messages = consumer
            .stream()
            // The client asks for more when half is taken: so that a whole batch waits while we work.
            .max_messages_per_batch(2 * self.batch)
            .expires(PULL_EXPIRES)
            .heartbeat(HEARTBEAT)
            .messages()
            .await
            .context("cannot pull")?;
        // Whatever is there, up to a batch, without waiting for more.
        let mut batches = messages.ready_chunks(self.batch);
        loop {
            // One that is in hand says itself how it goes: perhaps it waits for the database.
            let finished = units.try_join_next().transpose().context("a unit of work failed")?;
            if finished.is_some() || units.is_empty() {
                self.health.ok();
            }
            let batch = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = sleep(HEARTBEAT) => Some(Vec::new()),
                // A part of a batch costs as much as a whole one, and tokio would have others go first
                // after 128 messages.
                batch = unconstrained(batches.next()) => batch,
            };
            if self.nats.connection() != connection {
                info!("consumer {}: connected anew, binding again", self.durable);
                return Ok(());
            }
            let Some(batch) = batch else { bail!("the server ended the pull") };
            let (messages, errors): (Vec<_>, Vec<_>) = batch.into_iter().partition(Result::is_ok);
            let messages: Vec<Message> = messages.into_iter().flatten().collect();
            // What was delivered before has nothing else beside it, see `process`.
            let suspicious = messages.iter().any(|m| m.info().is_ok_and(|info| info.delivered > 1));
            while units.len() >= if suspicious { 1 } else { UNITS } {
                units.join_next().await.transpose().context("a unit of work failed")?;
            }
            // Not inside the select!: a batch is never cancelled half way.
            let (consumer, stop) = (Arc::clone(self), stop.clone());
            let unit = async move { consumer.process(messages, connection, &stop).await };
            if suspicious {
                unit.await
            } else {
                units.spawn(unit);
            }
            if let Some(Err(error)) = errors.into_iter().next() {
                return Err(error).context("the pull failed");
            }
            *failures = 0;
        }
    }

    /// One unit of work: decodes, handles and settles `messages`, which came on `connection` (see
    /// [`Nats::connection`]). Those it has to let go of because of `stop` are delivered again.
    pub async fn process(&self, messages: Vec<Message>, connection: u64, stop: &CancellationToken) {
        let mut new = Vec::with_capacity(messages.len());
        let (mut suspects, mut rejected) = (Vec::new(), Vec::new());
        for message in messages {
            let Some(origin) = Origin::of(message, connection) else {
                error!("a message that is not JetStream's was delivered to {}", self.durable);
                continue;
            };
            match self.read(origin) {
                Ok(delivery) if delivery.origin.deliveries == 1 => new.push(delivery),
                Ok(delivery) => suspects.push(delivery),
                Err((origin, reason, error)) => {
                    if let Some(verdict) = self.reject(&origin, reason, &error, stop).await {
                        rejected.push((origin, verdict));
                    }
                }
            }
        }
        let rejected = rejected.iter().map(|(origin, verdict)| (origin, verdict));
        let mut confirmed = self.settle_all(rejected).await;
        confirmed &= self.handle(&new, stop).await;
        // One of those delivered before may be what killed the process then. If it does so again,
        // the others must not be in hand with it until they are all given up: so each alone, and
        // every other time from the other end.
        if suspects.iter().any(|suspect| suspect.origin.deliveries % 2 == 1) {
            suspects.reverse();
        }
        for suspect in &suspects {
            if !confirmed {
                // A broker that came back without the state of this durable answers to none of its
                // deliveries, and each would take its time. What is still meant for us comes again.
                info!("consumer {}: lets go of what it has in hand", self.durable);
                break;
            }
            confirmed = self.handle(std::slice::from_ref(suspect), stop).await;
        }
    }

    /// Applies deliveries and settles them. False if the broker did not confirm all of it.
    async fn handle(&self, deliveries: &[Delivery<H::Data>], stop: &CancellationToken) -> bool {
        let verdicts = self.apply(deliveries, stop).await;
        for (delivery, verdict) in deliveries.iter().zip(&verdicts) {
            if matches!(verdict, Some(Verdict::Done)) {
                self.handler.applied(delivery);
            }
        }
        // Crash point 3b, after commit and before ack: delivered again, found in the inbox, acked.
        let applied = deliveries.iter().zip(&verdicts);
        self.settle_all(applied.filter_map(|(d, verdict)| Some((&d.origin, verdict.as_ref()?))))
            .await
    }

    /// Tells the broker. If it does not get to know, or does not say so, which is false, it delivers
    /// again, and the inbox answers.
    async fn settle_all<'a>(
        &self,
        verdicts: impl Iterator<Item = (&'a Origin, &'a Verdict)>,
    ) -> bool {
        let (origins, kinds): (Vec<_>, Vec<_>) =
            verdicts.map(|(origin, verdict)| (origin, Self::answer(origin, verdict))).unzip();
        if origins.is_empty() {
            return true;
        }
        // The broker knows a message by its place, and a broker that went back in time gives places
        // anew: an ack of what it delivered before would be taken for that of another message, which
        // nobody has handled. A broker only goes back with its connections.
        let current = self.nats.connection();
        if !self.nats.connected() || origins.iter().any(|origin| origin.connection != current) {
            info!("{} not settled, their connection is gone; delivered again", origins.len());
            return false;
        }
        let messages = origins.iter().map(|origin| &origin.message).zip(kinds);
        match self.nats.settle(messages).await {
            Ok(()) => true,
            Err(error) => {
                warn!(
                    "the broker did not confirm that {} are settled, it will deliver again: {}",
                    origins.len(),
                    Causes(&error)
                );
                false
            }
        }
    }

    /// Understands a message, or says why it belongs into the dead letters.
    #[expect(clippy::result_large_err, reason = "both sides hand the message on")]
    fn read(&self, origin: Origin) -> Result<Delivery<H::Data>, (Origin, Reason, String)> {
        // Before handling, not after: a message that kills the process never gets to an "after".
        if origin.deliveries > self.max_deliveries {
            let error = format!(
                "delivered {} times, at most {} allowed",
                origin.deliveries, self.max_deliveries
            );
            return Err((origin, Reason::DeliveryLimit, error));
        }
        match events::decode(&origin.message.payload, H::EVENT_TYPE) {
            Ok(event) => Ok(Delivery { event, origin }),
            Err(error) => Err((origin, Reason::from(&error), Causes(&error.into()).to_string())),
        }
    }

    /// The whole batch in one transaction, and if that fails, each delivery in its own.
    async fn apply(
        &self,
        deliveries: &[Delivery<H::Data>],
        stop: &CancellationToken,
    ) -> Vec<Option<Verdict>> {
        if deliveries.is_empty() {
            return Vec::new();
        }
        match self.attempt(deliveries, stop).await {
            Some(Ok(verdicts)) => verdicts.into_iter().map(Some).collect(),
            None => deliveries.iter().map(|_| None).collect(),
            Some(Err(error)) if deliveries.len() == 1 => vec![Some(Verdict::Retry(error))],
            Some(Err(error)) => {
                debug!(
                    "consumer {}: a batch failed ({}), trying each alone",
                    self.durable,
                    Causes(&error)
                );
                let mut verdicts = Vec::with_capacity(deliveries.len());
                for delivery in deliveries {
                    verdicts.push(match self.attempt(std::slice::from_ref(delivery), stop).await {
                        Some(Ok(mut verdict)) => verdict.pop(),
                        Some(Err(error)) => Some(Verdict::Retry(error)),
                        None => None,
                    });
                }
                verdicts
            }
        }
    }

    /// Asks the handler. None: told to stop while the database was away.
    async fn attempt(
        &self,
        deliveries: &[Delivery<H::Data>],
        stop: &CancellationToken,
    ) -> Option<anyhow::Result<Vec<Verdict>>> {
        self.through_outages(|| handler::guarded(&self.handler, deliveries), stop).await
    }

    /// Keeps a message that never reaches the handler. None: told to stop before it was kept.
    async fn reject(
        &self,
        origin: &Origin,
        reason: Reason,
        why: &str,
        stop: &CancellationToken,
    ) -> Option<Verdict> {
        let store = || async {
            let mut connection = self.pool.acquire().await?;
            anyhow::Ok(dead_letters::store(&mut connection, origin, reason, why).await?)
        };
        let stored = self.through_outages(store, stop).await?;
        Some(stored.map_or_else(Verdict::Retry, Verdict::Reject))
    }

    /// Does `work`, as often as it takes to find the database, and whatever else the handler needs,
    /// in place. An error is the work's own. None: told to stop before that.
    async fn through_outages<T, F: Future<Output = anyhow::Result<T>>>(
        &self,
        work: impl Fn() -> F,
        stop: &CancellationToken,
    ) -> Option<anyhow::Result<T>> {
        for attempt in 1.. {
            match work().await {
                Err(error) if self.is_outage(&error).await => {
                    self.wait(attempt, &error, stop).await?;
                }
                done => return Some(done),
            }
        }
        None
    }

    /// Whether something else than the message is to blame.
    async fn is_outage(&self, error: &anyhow::Error) -> bool {
        database::is_outage(error)
            || self.handler.is_outage(error)
            || !database::answers(&self.pool).await
    }

    /// Holds what is in hand, and pulls nothing, for a while, and until the database answers. A nak
    /// here would burn a delivery every few seconds, and the outage would end in the dead letters.
    /// None: told to stop.
    async fn wait(
        &self,
        attempt: u32,
        error: &anyhow::Error,
        stop: &CancellationToken,
    ) -> Option<()> {
        warn!(attempt, "consumer {}: waiting, {}", self.durable, Causes(error));
        for look in attempt.. {
            if self.handler.is_outage(error) {
                // Somebody else's outage. Readiness is about what is ours, and has checks for that.
                self.health.ok();
            } else {
                self.health.failing(format!("waiting for the database: {}", Causes(error)));
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                () = sleep(backoff::delay(look, REBIND_BASE, REBIND_CAP)) => {}
            }
            if database::answers(&self.pool).await {
                break;
            }
        }
        Some(())
    }

    /// What a verdict is to the broker.
    fn answer(origin: &Origin, verdict: &Verdict) -> AckKind {
        let seq = origin.stream_seq;
        match verdict {
            Verdict::Done => AckKind::Ack,
            Verdict::Duplicate(guard) => {
                info!(
                    stream.seq = seq,
                    deliveries = origin.deliveries,
                    "duplicate, absorbed by {guard:?}"
                );
                AckKind::Ack
            }
            Verdict::Retry(error) => {
                // Never a bare nak: it comes back at once, and ten of them take milliseconds.
                let attempt = origin.deliveries.try_into().unwrap_or(u32::MAX);
                let delay = backoff::delay(attempt, RETRY_BASE, RETRY_CAP);
                warn!(
                    stream.seq = seq,
                    attempt,
                    "not applied, again in {delay:.1?}: {}",
                    Causes(error)
                );
                AckKind::Nak(Some(delay))
            }
            Verdict::Reject(stored) => {
                error!(stream.seq = seq, "set aside in the dead letters: {}", stored.reason());
                AckKind::Term
            }
        }
    }
}
