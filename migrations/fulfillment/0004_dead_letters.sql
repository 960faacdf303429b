-- Messages a consumer has given up on, kept whole: what it was, why, and what became of it.
create table dead_letters (
    dead_letter_id uuid        primary key,
    consumer       text        not null,
    stream         text        not null,
    stream_seq     bigint      not null,
    subject        text        not null,
    reason         text        not null,
    error          text        not null,
    headers        jsonb       not null,
    -- The bytes as they came. They may be no text at all.
    body           bytea       not null,
    deliveries     bigint      not null,
    created_at     timestamptz not null default now(),
    resolved_at    timestamptz,
    resolution     text,

    -- A message that is delivered again after it was stored is stored once.
    constraint one_dead_letter_per_message unique (consumer, stream, stream_seq),
    constraint reason_is_known check (reason in
        ('undecodable', 'unknown_type', 'transaction_conflict', 'delivery_limit', 'rejected')),
    constraint resolved_says_how check ((resolved_at is null) = (resolution is null))
);
