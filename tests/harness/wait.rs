//! Waiting for a state, never for a time.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

/// Looks again and again until `look` is satisfied, and returns what it found. Fails after `limit`
/// with the last state seen, so that a failed wait explains itself.
pub async fn eventually<T>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + limit;
    let mut ticks = interval(Duration::from_millis(25));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match look().await {
            Ok(found) => return Ok(found),
            Err(state) if Instant::now() > deadline => {
                anyhow::bail!("{what}: not within {limit:?}; last seen: {state:#}")
            }
            Err(_) => {}
        }
    }
}
