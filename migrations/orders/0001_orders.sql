-- What a customer wants. The id is the client's: sending an order again is the same order.
create table orders (
    order_id      text        primary key,
    customer_id   text        not null,
    -- Money is whole minor units plus its currency. No numeric, no float, no assumption of cents.
    amount_minor  bigint      not null,
    currency      text        not null,
    status        text        not null default 'pending',
    -- Every time in this schema is the database's clock. Hosts disagree about the time.
    created_at    timestamptz not null default now(),
    paid_at       timestamptz,
    dispatched_at timestamptz,
    tracking_code text,

    constraint amount_is_positive      check (amount_minor > 0),
    constraint status_is_known         check (status in ('pending', 'paid', 'dispatched')),
    constraint paid_unless_pending     check ((status = 'pending') = (paid_at is null)),
    constraint tracked_when_dispatched check ((status = 'dispatched') = (dispatched_at is not null and tracking_code is not null))
);

-- What the payment provider confirmed. Two constraints decide every race; the code only explains
-- afterwards which of them it met.
create table payments (
    transaction_id text        constraint one_payment_per_transaction primary key,
    order_id       text        not null constraint one_payment_per_order unique
                               constraint payment_is_for_an_order references orders,
    amount_minor   bigint      not null,
    currency       text        not null,
    -- The event that announces this payment. A confirmation sent again is answered with the same id.
    event_id       uuid        not null constraint one_event_per_payment unique,
    confirmed_at   timestamptz not null default now(),

    constraint amount_is_positive check (amount_minor > 0)
);
