-- Who set a dead letter right (how is in resolution), and how often it was tried again in vain.
alter table dead_letters
    add column resolved_by text,
    add column replays     integer not null default 0;

-- Those that wait for a person.
create index dead_letters_open on dead_letters (created_at) where resolved_at is null;
