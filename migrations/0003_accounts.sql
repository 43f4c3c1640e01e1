-- What is known of the account behind a connection, in one dimension of its pool's plan: what the provider last said, when
-- its window ends, and how much of it is nobody's. A JSON document that the service writes and reads.
CREATE TABLE accounts (
    -- pools.created_revision
    pool          INTEGER NOT NULL,
    connection_id TEXT    NOT NULL,
    unit          TEXT    NOT NULL CHECK (unit IN ('percent', 'requests', 'tokens', 'usd')),
    window_ms     INTEGER NOT NULL CHECK (window_ms > 0),
    state         TEXT    NOT NULL CHECK (json_valid(state)),
    PRIMARY KEY (pool, connection_id, unit, window_ms)
) STRICT, WITHOUT ROWID;

-- Each key's part of it, and what the key has recorded since the provider's figure last rose.
CREATE TABLE account_shares (
    pool          INTEGER NOT NULL,
    connection_id TEXT    NOT NULL,
    unit          TEXT    NOT NULL CHECK (unit IN ('percent', 'requests', 'tokens', 'usd')),
    window_ms     INTEGER NOT NULL CHECK (window_ms > 0),
    api_key_id    TEXT    NOT NULL,
    state         TEXT    NOT NULL CHECK (json_valid(state)),
    PRIMARY KEY (pool, connection_id, unit, window_ms, api_key_id)
) STRICT, WITHOUT ROWID;
