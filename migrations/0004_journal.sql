-- Calls that were answered while the shared counters were out of reach, in the order in which they came, until they have
-- reached them.
CREATE TABLE journal (
    entry    INTEGER PRIMARY KEY AUTOINCREMENT,
    -- pools.created_revision
    pool     INTEGER NOT NULL,
    -- The batch that may have carried it: who sent it, and the batch's number among those of the sender and the pool.
    sender   BLOB    CHECK (length(sender) = 16),
    sequence INTEGER CHECK (sequence > 0),
    -- A version and what the service has encoded.
    call     BLOB    NOT NULL,
    CHECK ((sender IS NULL) = (sequence IS NULL))
) STRICT;

CREATE INDEX journal_sent ON journal (sender, pool, sequence) WHERE sender IS NOT NULL;
