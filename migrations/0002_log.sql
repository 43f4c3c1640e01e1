-- Effects of calls in the order of their commits, until they are in the tables of counters: what counts is the tables with
-- these on top. An entry is a version and what the service has encoded; empty after a stop in order.
CREATE TABLE log (
    seq     INTEGER PRIMARY KEY CHECK (seq > 0),
    changes BLOB    NOT NULL
) STRICT;

-- Entries up to this one are in the tables.
ALTER TABLE service ADD COLUMN folded_to INTEGER NOT NULL DEFAULT 0 CHECK (folded_to >= 0);
-- Entries after those and up to this one are being written into the tables, merged and in order ...
ALTER TABLE service ADD COLUMN folding_to INTEGER NOT NULL DEFAULT 0 CHECK (folding_to >= 0);
-- ... of which so many rows are there.
ALTER TABLE service ADD COLUMN folding_rows INTEGER NOT NULL DEFAULT 0 CHECK (folding_rows >= 0);
