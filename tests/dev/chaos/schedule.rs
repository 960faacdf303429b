//! What goes wrong, and when: drawn from a seed, so that a run can be repeated.

use std::{collections::BTreeMap, time::Duration};

use clap::ValueEnum;
use fastrand::Rng;

/// What can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Fault {
    /// SIGKILL to a service, which is started again
    Kill,
    /// SIGSTOP to a service, and SIGCONT
    Stop,
    /// PostgreSQL stops at once, as if the power went, and starts again
    Postgres,
    /// Some sessions are terminated by PostgreSQL
    Sessions,
    /// SIGKILL to nats-server, which is started again
    NatsKill,
    /// SIGTERM to nats-server, which is started again
    NatsTerm,
    /// SIGSTOP to nats-server, and SIGCONT
    NatsStop,
    /// nats-server comes back with an older copy of its store
    SetBack,
    /// nats-server comes back with an empty store
    Empty,
    /// Three nats-servers; the leader of a stream is killed, and started again. Instead of those above
    Cluster,
    /// Connections between services and a server are cut, and refused
    Cut,
    /// Nothing passes between services and a server, and connections stay open
    BlackHole,
    /// Answers of a server come late
    Delay,
    /// Connections are closed in one direction
    HalfClose,
    /// A payment is confirmed twice at the same time, at two replicas
    DuplicateConfirmation,
    /// An event is published again, past the outbox and without its message id
    DuplicateEvent,
    /// A payment is announced again, under a new event id
    DuplicatePayment,
    /// A payment that was dispatched is announced over another amount
    Conflict,
    /// Bytes that are no event are published
    Garbage,
}

impl Fault {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Who injects it: three hands at once, so that faults meet each other.
pub(crate) const SERVICES: &[Fault] = &[Fault::Kill, Fault::Stop];
pub(crate) const SERVERS: &[Fault] = &[
    Fault::Postgres,
    Fault::Sessions,
    Fault::NatsKill,
    Fault::NatsTerm,
    Fault::NatsStop,
    Fault::Cluster,
];
pub(crate) const NETWORK: &[Fault] =
    &[Fault::Cut, Fault::BlackHole, Fault::Delay, Fault::HalfClose];
pub(crate) const MESSAGES: &[Fault] = &[
    Fault::DuplicateEvent,
    Fault::DuplicateEvent,
    Fault::DuplicatePayment,
    Fault::Conflict,
    Fault::Garbage,
];

/// Everything but the cluster.
pub(crate) fn all() -> Vec<Fault> {
    Fault::value_variants().iter().copied().filter(|fault| *fault != Fault::Cluster).collect()
}

/// A fault, how long nothing happens before it, how long it lasts, and a number to choose its target by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) pause: Duration,
    pub(crate) fault: Fault,
    pub(crate) lasts: Duration,
    pub(crate) target: usize,
}

/// Steps of one hand for so long.
pub(crate) fn steps(
    rng: &mut Rng,
    chosen: &[Fault],
    hand: &[Fault],
    pause: std::ops::Range<u64>,
    length: Duration,
) -> Vec<Step> {
    let faults: Vec<Fault> = hand.iter().copied().filter(|fault| chosen.contains(fault)).collect();
    let mut steps = Vec::new();
    let mut at = Duration::ZERO;
    while !faults.is_empty() {
        let fault = faults[rng.usize(..faults.len())];
        let step = step(rng, fault, pause.clone());
        at += step.pause + step.lasts;
        if at > length {
            break;
        }
        steps.push(step);
    }
    steps
}

fn step(rng: &mut Rng, fault: Fault, pause: std::ops::Range<u64>) -> Step {
    let lasts = match fault {
        // Some outlast the lease of a relay, which is five seconds.
        Fault::Stop => 300..7_000,
        Fault::Kill | Fault::Postgres | Fault::Cut | Fault::HalfClose | Fault::Delay => 50..1_500,
        Fault::NatsKill | Fault::NatsTerm | Fault::SetBack | Fault::Empty | Fault::Cluster => {
            50..1_000
        }
        Fault::NatsStop | Fault::BlackHole => 200..3_000,
        _ => 0..1,
    };
    Step {
        pause: Duration::from_millis(rng.u64(pause)),
        fault,
        lasts: Duration::from_millis(rng.u64(lasts)),
        target: rng.usize(..),
    }
}

/// The hand on the servers also takes a copy of the broker's store, sets the broker back to it, and
/// empties it, each once, between random faults.
pub(crate) fn server_steps(rng: &mut Rng, chosen: &[Fault], length: Duration) -> Vec<Step> {
    // Four parts, and time for servers to come back.
    let part = length / 5;
    let mut all = steps(rng, chosen, SERVERS, 200..2_000, part);
    for fault in [Fault::NatsTerm, Fault::SetBack, Fault::Empty] {
        // A copy is of use for setting back.
        if chosen.contains(&fault) || fault == Fault::NatsTerm && chosen.contains(&Fault::SetBack) {
            all.push(step(rng, fault, 0..500));
        }
        all.extend(steps(rng, chosen, SERVERS, 200..2_000, part));
    }
    all
}

/// How often each was injected.
#[derive(Debug, Default)]
pub(crate) struct Counts(BTreeMap<Fault, usize>);

impl Counts {
    pub(crate) fn add(&mut self, fault: Fault) {
        *self.0.entry(fault).or_default() += 1;
    }

    /// Without the confirmations that are repeated: those are part of every load.
    pub(crate) fn total(&self) -> usize {
        let faults = self.0.iter().filter(|(fault, _)| **fault != Fault::DuplicateConfirmation);
        faults.map(|(_, count)| count).sum()
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = self.0.iter().map(|(fault, count)| format!("{} {count}", fault.name()));
        f.write_str(&counts.collect::<Vec<_>>().join(", "))
    }
}
