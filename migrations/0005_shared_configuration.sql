-- Which configuration this is: its name among replicas that share it, NULL while none does; and the name of its last write,
-- by which another one of the same revision is told from it.
ALTER TABLE service ADD COLUMN lineage TEXT;
ALTER TABLE service ADD COLUMN config_write TEXT NOT NULL DEFAULT '';
-- The last write of what replicas share of the settings; 0: there was none.
ALTER TABLE service ADD COLUMN settings_revision INTEGER NOT NULL DEFAULT 0 CHECK (settings_revision >= 0);
ALTER TABLE service ADD COLUMN settings_ms INTEGER NOT NULL DEFAULT 0 CHECK (settings_ms >= 0);
ALTER TABLE plans ADD COLUMN written_ms INTEGER NOT NULL DEFAULT 0 CHECK (written_ms >= 0);

-- Pools and plans that were deleted, for replicas that have not heard of it.
CREATE TABLE deletions (
    -- pool:ID or plan:CONNECTION
    name       TEXT PRIMARY KEY NOT NULL,
    revision   INTEGER NOT NULL CHECK (revision > 0),
    deleted_ms INTEGER NOT NULL CHECK (deleted_ms >= 0)
) STRICT, WITHOUT ROWID;

-- Settings that are stored have been written: when is not known. They get a revision that no other document has.
UPDATE service SET settings_revision = config_revision + 1, config_revision = config_revision + 1
WHERE settings <> '{}';
