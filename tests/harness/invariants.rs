//! The promise, line by line: what must be true of a [`Ledger`], whatever happened before. `cargo dev
//! chaos` prints each line; demo and tests only ask whether all of them hold.

use anyhow::ensure;

use crate::ledger::Ledger;

/// A statement, what was found, and whether they agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub claim: String,
    pub found: String,
    pub holds: bool,
}

impl Line {
    pub fn new(claim: impl Into<String>, found: impl Into<String>, holds: bool) -> Self {
        Self { claim: claim.into(), found: found.into(), holds }
    }

    /// Nothing of something, named if there is.
    pub fn none(claim: impl Into<String>, found: &[String]) -> Self {
        let named = found.iter().take(10).cloned().collect::<Vec<_>>().join(", ");
        let found_text = if found.is_empty() {
            "none".to_owned()
        } else {
            format!("{}: {named}{}", found.len(), if found.len() > 10 { ", …" } else { "" })
        };
        Self::new(claim, found_text, found.is_empty())
    }
}

/// All of them hold.
///
/// # Errors
/// Those that do not.
pub fn check(lines: &[Line]) -> anyhow::Result<()> {
    let broken: Vec<String> = lines
        .iter()
        .filter(|line| !line.holds)
        .map(|line| format!("{}: {}", line.claim, line.found))
        .collect();
    ensure!(broken.is_empty(), "{}", broken.join("; "));
    Ok(())
}

/// Every payment has arrived at fulfillment, as far as it will.
pub fn taken_in(ledger: &Ledger) -> Vec<Line> {
    let (undelivered, unacked) = (ledger.consumer_pending, ledger.consumer_ack_pending);
    vec![
        nothing("outbox rows of payments wait", ledger.pending),
        nothing("payments are not delivered, or not acked", undelivered as usize + unacked),
    ]
}

/// Nothing is under way: not in an outbox, a consumer, or on its way to the carrier and back.
pub fn settled(ledger: &Ledger) -> Vec<Line> {
    let mut lines = taken_in(ledger);
    lines.push(nothing("dispatches wait for the carrier", ledger.requested));
    lines.push(nothing("reports of dispatches are under way", ledger.reports_pending));
    lines
}

/// Every confirmed payment is announced, and dispatched once, and its order knows, unless the carrier
/// refused.
pub fn promise(ledger: &Ledger) -> Vec<Line> {
    let Ledger { payments, outbox, dispatches, undispatched, failed, .. } = ledger;
    vec![
        Line::none("payments lost", &ledger.lost),
        Line::none("payments or orders dispatched twice", &ledger.doubled),
        Line::none("dispatches without a payment", &ledger.unpaid),
        Line::new("payments = outbox events", format!("{payments} = {outbox}"), payments == outbox),
        Line::new(
            "payments = dispatches",
            format!("{payments} = {dispatches}"),
            payments == dispatches,
        ),
        Line::new(
            "paid orders that are not dispatched = refusals of the carrier",
            format!("{undispatched} = {failed}"),
            undispatched == failed,
        ),
        nothing("outbox rows are parked", ledger.parked),
    ]
}

fn nothing(claim: &str, count: usize) -> Line {
    Line::new(format!("no {claim}"), count.to_string(), count == 0)
}
