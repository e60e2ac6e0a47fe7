-- Snapshots. The record is the truth; the other columns are taken from it, so that it can be found.
CREATE TABLE snapshots (
    id         TEXT NOT NULL UNIQUE,
    project    TEXT NOT NULL,
    sandbox    TEXT,
    settled    INTEGER NOT NULL CHECK (settled IN (0, 1)),
    version    INTEGER NOT NULL CHECK (version > 0),
    created_at INTEGER NOT NULL,
    record     TEXT NOT NULL
) STRICT;
CREATE INDEX snapshots_listed ON snapshots (created_at, id);
CREATE INDEX snapshots_in_project ON snapshots (project, created_at, id);
CREATE INDEX snapshots_of_sandbox ON snapshots (sandbox, created_at, id) WHERE sandbox IS NOT NULL;
CREATE INDEX snapshots_unsettled ON snapshots (created_at, id) WHERE settled = 0;

-- Which record, of those that are not over, begins with which snapshot.
CREATE TABLE snapshot_uses (
    snapshot TEXT NOT NULL,
    sandbox  TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    PRIMARY KEY (snapshot, sandbox)
) STRICT, WITHOUT ROWID;
CREATE INDEX snapshot_uses_of ON snapshot_uses (sandbox);
INSERT INTO snapshot_uses
    SELECT json_extract(record, '$.saved'), id FROM sandboxes
    WHERE phase <> 'stopped' AND json_extract(record, '$.saved') IS NOT NULL
    UNION
    SELECT json_extract(record, '$.sealed'), id FROM sandboxes
    WHERE phase <> 'stopped' AND json_extract(record, '$.sealed') IS NOT NULL;
