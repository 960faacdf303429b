//! What both services of the pair are made of.
//!
//! The promise: a confirmed payment is never lost between PostgreSQL and NATS, and never dispatched
//! twice. Delivery is at-least-once; effects are applied once. Each module header says what the
//! module guarantees, what it assumes, and what breaks without it.
//!
//! Read in the order an event travels: [`outbox`] (written in the business transaction) →
//! [`relay`] (publishes, marks) → [`consumer`] (pulls, settles) → [`inbox`] (what is new) →
//! [`dead_letters`] (what cannot be applied). [`audit`] is how a broker that lost data is noticed. [`claim`] is for effects that no database holds.
//! [`values`] and [`events`] are the vocabulary, [`topology`] the streams and consumers, the rest is
//! what any service needs.
#![warn(missing_docs)]

pub mod audit;
pub mod backoff;
pub mod claim;
pub mod commands;
pub mod config;
pub mod consumer;
pub mod database;
pub mod dead_letters;
pub mod events;
pub mod handler;
pub mod http;
pub mod inbox;
pub mod lease;
pub mod lifecycle;
pub mod login;
pub mod nats;
pub mod outbox;
pub mod relay;
pub mod retention;
pub mod setup;
pub mod telemetry;
pub mod tls;
pub mod topology;
pub mod values;
