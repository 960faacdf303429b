-- Events that are committed with the change they announce, until the relay has published them, and
-- for a while after: they are what a broker that lost data is filled again from.
create table outbox (
    event_id     uuid        constraint one_row_per_event primary key,
    -- Publishing order. Rows of one aggregate are written under a lock on that aggregate, so their
    -- seq follows their commits. Across aggregates it does not, and nothing relies on it: the relay
    -- looks for rows without published_at, never for rows above the last seq it saw, so a
    -- transaction that commits late is not skipped.
    seq          bigint      generated always as identity,
    aggregate_id text        not null,
    subject      text        not null,
    payload      jsonb       not null,
    traceparent  text,
    created_at   timestamptz not null default now(),
    -- Set when the broker has acknowledged, with the place it gave the message.
    published_at timestamptz,
    stream_seq   bigint,
    -- A failed attempt holds back this row, and those of its aggregate behind it, until retry_at.
    attempts     integer     not null default 0,
    last_error   text,
    retry_at     timestamptz,
    -- Set when trying again cannot help. A person decides.
    parked_at    timestamptz,

    constraint published_has_a_place check ((published_at is null) = (stream_seq is null)),
    constraint parked_is_unpublished check (parked_at is null or published_at is null)
);

-- The relay's two questions, answered from indexes that hold the backlog and nothing else.
create index outbox_pending on outbox (seq) where published_at is null;
create index outbox_held on outbox (aggregate_id, seq)
    where published_at is null and (parked_at is not null or retry_at is not null);

-- Who relays. One row, always there, so taking the lease is an update that either hits it or not.
create table relay_lease (
    singleton  boolean     primary key default true,
    holder     uuid        not null,
    expires_at timestamptz not null,

    constraint one_lease check (singleton)
);
insert into relay_lease (holder, expires_at) values ('00000000-0000-0000-0000-000000000000', '-infinity');

-- Rows change once or twice soon after they are written: leave room to do it in the same page, and
-- clean up by count, not by a share of a table that keeps published rows for days.
alter table outbox set (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);
alter table relay_lease set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
