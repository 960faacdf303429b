-- Which rows have served their time (see shared/src/retention.rs). All rows of a transaction have the
-- same time, so the index holds it once for each and is small. Writes wait while it is made: whoever has
-- many millions of rows makes it beforehand, concurrently, under this name.
create index if not exists inbox_age on processed_events (processed_at);

-- What is deleted is cleaned up by count, not by a share of a table that holds a month.
alter table processed_events set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);
