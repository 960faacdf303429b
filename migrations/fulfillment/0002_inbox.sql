-- Which events were applied, per consumer: two consumers of one service each apply an event once.
create table processed_events (
    consumer     text        not null,
    event_id     uuid        not null,
    processed_at timestamptz not null default now(),

    constraint one_claim_per_event primary key (consumer, event_id)
);
