-- What a broker that lost data is noticed by: the relay looks whether what was published last is still in
-- its place, and if not, from the last one back for what else is gone. Within a batch, all marked at the same
-- time, places tell which was last.
create index outbox_published on outbox (published_at, stream_seq) where published_at is not null;
