//! How long to wait before the next attempt: exponential, capped, with jitter.
//!
//! Jitter keeps replicas that failed together from coming back together.

use std::time::Duration;

/// The wait before attempt `attempt + 1`, where `attempt` counts from 1.
///
/// Doubles from `base` to `cap`, then takes a random point in the upper half of that, so two
/// callers rarely meet and nobody waits less than half. Never overflows, whatever the attempt.
pub fn delay(attempt: u32, base: Duration, cap: Duration) -> Duration {
    let doublings = attempt.saturating_sub(1).min(30);
    let full = base.saturating_mul(1 << doublings).min(cap);
    full / 2 + (full / 2).mul_f64(fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Duration = Duration::from_millis(100);
    const CAP: Duration = Duration::from_secs(5);

    #[test]
    fn grows_to_the_cap_and_never_below_half() {
        for (attempt, full) in
            [(0, BASE), (1, BASE), (2, BASE * 2), (5, BASE * 16), (7, CAP), (u32::MAX, CAP)]
        {
            for _ in 0..100 {
                let wait = delay(attempt, BASE, CAP);
                assert!(wait >= full / 2 && wait <= full, "attempt {attempt}: {wait:?}");
            }
        }
    }
}
