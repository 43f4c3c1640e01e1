-- One row: how far this database has come.
CREATE TABLE service (
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    -- Writes of administrators so far; a pool's and a plan's revision is its value at their last write.
    config_revision INTEGER NOT NULL CHECK (config_revision >= 0),
    -- The newest instant that the counters have seen, in ms since 1970.
    last_seen_ms    INTEGER NOT NULL CHECK (last_seen_ms >= 0),
    -- Names this data directory among replicas; chosen at the first start.
    replica_id      TEXT    NOT NULL,
    -- Stored settings, as a JSON document.
    settings        TEXT    NOT NULL CHECK (json_valid(settings))
) STRICT;

INSERT INTO service (id, config_revision, last_seen_ms, replica_id, settings) VALUES (1, 0, 0, '', '{}');

-- Pools with their allocations, as JSON documents.
CREATE TABLE pools (
    pool_id          TEXT PRIMARY KEY NOT NULL,
    -- The configuration revision at which the pool was created: names this life of the pool in the tables below.
    created_revision INTEGER NOT NULL UNIQUE,
    revision         INTEGER NOT NULL,
    created_ms       INTEGER NOT NULL,
    updated_ms       INTEGER NOT NULL,
    document         TEXT NOT NULL CHECK (json_valid(document))
) STRICT, WITHOUT ROWID;

-- Plans stored for connections, as JSON documents.
CREATE TABLE plans (
    connection_id TEXT PRIMARY KEY NOT NULL,
    revision      INTEGER NOT NULL,
    document      TEXT NOT NULL CHECK (json_valid(document))
) STRICT, WITHOUT ROWID;

-- What each key consumed, by bucket: bucket n covers [n * window_ms, (n + 1) * window_ms). The newest buckets of a
-- window stand together, where rows are written, read at start and swept.
CREATE TABLE quota_consumption (
    window_ms  INTEGER NOT NULL CHECK (window_ms > 0),
    bucket     INTEGER NOT NULL CHECK (bucket >= 0),
    -- pools.created_revision
    pool       INTEGER NOT NULL,
    api_key_id TEXT    NOT NULL,
    unit       TEXT    NOT NULL CHECK (unit IN ('percent', 'requests', 'tokens', 'usd')),
    -- Of a model cap's counter; else empty.
    model      TEXT    NOT NULL,
    -- In steps: 1 request, 1 token, 1e-9 USD, 1e-6 per cent.
    consumed   INTEGER NOT NULL CHECK (consumed BETWEEN 0 AND 9000000000000000),
    PRIMARY KEY (window_ms, bucket, pool, api_key_id, unit, model)
) STRICT, WITHOUT ROWID;

-- How fast each dimension of a pool is consumed, as of its last sample.
CREATE TABLE burn_rates (
    -- pools.created_revision
    pool             INTEGER NOT NULL,
    unit             TEXT    NOT NULL CHECK (unit IN ('percent', 'requests', 'tokens', 'usd')),
    window_ms        INTEGER NOT NULL CHECK (window_ms > 0),
    -- Steps a second, an exponential moving average; NULL until there are two samples.
    steps_per_second REAL,
    -- The last sample: when, and the steps consumed until then since the first record.
    sampled_ms       INTEGER NOT NULL CHECK (sampled_ms >= 0),
    cumulative       INTEGER NOT NULL CHECK (cumulative >= 0),
    PRIMARY KEY (pool, unit, window_ms)
) STRICT, WITHOUT ROWID;

-- Open reservations.
CREATE TABLE reservations (
    -- pools.created_revision
    pool          INTEGER NOT NULL,
    -- The random part of the reservation id, in hexadecimal digits.
    random        TEXT    NOT NULL,
    api_key_id    TEXT    NOT NULL,
    connection_id TEXT    NOT NULL,
    model         TEXT    NOT NULL,
    request_id    TEXT    NOT NULL,
    expires_ms    INTEGER NOT NULL,
    -- What is held: [[unit, window_ms, model, steps], ...]
    amounts       TEXT    NOT NULL CHECK (json_valid(amounts)),
    PRIMARY KEY (pool, random)
) STRICT, WITHOUT ROWID;

-- Ids of counted calls and of requests that made reservations. A row holds what one commit remembered until the end of
-- one slice of time, packed: they are written once, read at start, and dropped together.
CREATE TABLE remembered_calls (
    row        INTEGER PRIMARY KEY,
    ends_slice INTEGER NOT NULL,
    calls      BLOB    NOT NULL
) STRICT;

CREATE INDEX remembered_calls_by_end ON remembered_calls (ends_slice);
