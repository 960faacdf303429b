//! A circuit breaker: while the carrier fails, one call every few seconds instead of thousands.
//!
//! Closed, everybody calls. Open, nobody does, until a pause is over; the pauses grow from failure to
//! failure. Then it is half open, and one caller, the probe, finds out. One failure is that call's
//! own; the second in a row opens the breaker, and so does a wish to be left alone (`Retry-After`).

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use shared::backoff;
use tokio::time::Instant;

const PAUSE_BASE: Duration = Duration::from_millis(100);
/// The longest pause that nobody asked for.
pub const PAUSE_CAP: Duration = Duration::from_secs(5);

#[derive(Default)]
pub struct CircuitBreaker(Mutex<State>);

#[derive(Default)]
struct State {
    /// Without a success in between.
    failures: u32,
    /// None: closed. In the future: open. In the past: half open.
    open_until: Option<Instant>,
}

impl CircuitBreaker {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether to call now.
    pub fn allows(&self, probe: bool) -> bool {
        self.state().open_until.is_none_or(|until| probe && until <= Instant::now())
    }

    /// How long it stays open. None when it is not.
    pub fn pause(&self) -> Option<Duration> {
        let left = self.state().open_until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// A call failed, and the other side may have said when to come again.
    pub fn failed(&self, retry_after: Option<Duration>) {
        let mut state = self.state();
        let now = Instant::now();
        if retry_after.is_none() && state.open_until.is_some_and(|until| until > now) {
            // A call that was under way when the pause began.
            return;
        }
        state.failures += 1;
        let grown = match state.failures {
            1 => Duration::ZERO,
            failures => backoff::delay(failures - 1, PAUSE_BASE, PAUSE_CAP),
        };
        let pause = grown.max(retry_after.unwrap_or_default());
        if !pause.is_zero() {
            state.open_until = state.open_until.max(Some(now + pause));
        }
    }

    /// A call had success. True when that closes the breaker; a call that was under way when it
    /// opened does not.
    pub fn succeeded(&self) -> bool {
        let mut state = self.state();
        state.failures = 0;
        let closes = state.open_until.is_some_and(|until| until <= Instant::now());
        if closes {
            state.open_until = None;
        }
        closes
    }
}
