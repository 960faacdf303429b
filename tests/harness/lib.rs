//! The harness: real servers, real service processes, faults between them, and the ledger and the
//! invariants that say what came of it. Used by the tests and by `cargo dev`.

pub mod api;
pub mod broker;
pub mod compose;
pub mod contract;
pub mod cost;
pub mod find;
pub mod invariants;
pub mod ledger;
pub mod nats_server;
pub mod outside;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod services;
pub mod stage;
pub mod wait;
pub mod world;
