//! The claims of the README, each as a test against real PostgreSQL, real nats-server and real
//! processes. Names are claims; the crash points carry the labels of the code.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop there")]

mod api;
mod carrier;
mod connections;
mod consumer;
mod cost;
mod crashes;
mod dispatcher;
mod documents;
mod intake;
mod interleavings;
mod kills;
mod letters;
mod notices;
mod operations;
mod outages;
mod permissions;
mod projection;
mod recovery;
mod relay;
mod retention;
mod roles;
mod support;
mod webhook;
