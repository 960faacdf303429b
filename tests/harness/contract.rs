//! Names of the outer contract, written here a second time on purpose: the harness sees the pair from
//! outside, and builds without it.

/// The stream of orders-service, and of fulfillment-service.
pub const ORDERS: &str = "ORDERS";
pub const FULFILLMENT: &str = "FULFILLMENT";

/// The bucket of the notifications.
pub const NOTICES: &str = "notices";

/// The subject of confirmed payments, and the durable that brings them to fulfillment-service.
pub const PAYMENT_CONFIRMED: &str = "orders.payment.confirmed";
pub const CONSUMER: &str = "fulfillment";

/// The subject of what was dispatched, and the durables that bring it back.
pub const ORDER_DISPATCHED: &str = "fulfillment.order.dispatched";
pub const BACK: [&str; 2] = ["orders", "notifications"];
