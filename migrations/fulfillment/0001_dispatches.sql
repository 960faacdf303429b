-- What goes out of the door. A payment becomes at most one row here, whoever repeats it.
create table dispatches (
    -- Also the idempotency key towards the carrier.
    dispatch_id    uuid        primary key,
    -- The business key. It stops what the inbox cannot: the same payment under a new event id, and
    -- a replay after the inbox row was purged.
    transaction_id text        not null constraint one_dispatch_per_transaction unique,
    order_id       text        not null constraint one_dispatch_per_order unique,
    customer_id    text        not null,
    amount_minor   bigint      not null,
    currency       text        not null,
    -- The event that caused it.
    event_id       uuid        not null,
    status         text        not null default 'requested',
    tracking_code  text,
    requested_at   timestamptz not null default now(),
    dispatched_at  timestamptz,

    constraint amount_is_positive      check (amount_minor > 0),
    constraint status_is_known         check (status in ('requested', 'dispatched', 'failed')),
    constraint tracked_when_dispatched check ((status = 'dispatched') = (dispatched_at is not null and tracking_code is not null))
);
