-- What the dispatcher needs to take a dispatch, call the carrier with no transaction open, and come
-- back for it.
alter table dispatches
    -- Counted when a dispatch is taken. Also the fence: whoever slept past its lease finds that the
    -- number has moved on, and changes nothing.
    add column attempts    integer     not null default 0,
    -- When it may be taken (again): at once; at the end of the lease of whoever has it; at the end
    -- of the pause after a failed attempt. One column, because they are one question.
    add column due_at      timestamptz not null default now(),
    -- What the carrier said last, when it was not a tracking code.
    add column last_error  text,
    -- Where the event that caused it stands in the stream, and the trace it belongs to. Null in rows
    -- from before this migration.
    add column stream_seq  bigint,
    add column traceparent text;

-- The dispatcher's one question, answered from an index that holds the backlog and nothing else.
create index dispatches_due on dispatches (due_at) where status = 'requested';

-- A row changes twice soon after it is written, then never again: clean up by count, not by a share of
-- a table that only grows.
alter table dispatches set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);
