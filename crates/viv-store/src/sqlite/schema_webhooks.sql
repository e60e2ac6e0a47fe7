-- Subscriptions to the journal (O6). The record is the truth; the other columns are taken from it, so that it can be found,
-- but for the cursor, which moves without it: what lies before it was looked at.
CREATE TABLE subscriptions (
    id      TEXT PRIMARY KEY,
    project TEXT,
    version INTEGER NOT NULL CHECK (version > 0),
    cursor  INTEGER NOT NULL,
    record  TEXT NOT NULL
) STRICT;

-- Lines that are to be sent, or that nobody tries to send any more.
CREATE TABLE letters (
    subscription TEXT NOT NULL REFERENCES subscriptions (id) ON DELETE CASCADE,
    cursor       INTEGER NOT NULL,
    dead_at      INTEGER,
    letter       TEXT NOT NULL,
    PRIMARY KEY (subscription, cursor)
) STRICT, WITHOUT ROWID;
CREATE INDEX letters_waiting ON letters (subscription, cursor) WHERE dead_at IS NULL;
CREATE INDEX letters_dead ON letters (subscription, cursor) WHERE dead_at IS NOT NULL;
CREATE INDEX letters_to_forget ON letters (dead_at) WHERE dead_at IS NOT NULL;
