-- Executions (X1). The record is the truth; the other columns are taken from it, so that it can be found.
CREATE TABLE executions (
    sandbox  TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    id       TEXT NOT NULL,
    project  TEXT NOT NULL,
    version  INTEGER NOT NULL CHECK (version > 0),
    asked_at INTEGER NOT NULL,
    ended_at INTEGER,
    queued   INTEGER NOT NULL CHECK (queued IN (0, 1)),
    record   TEXT NOT NULL,
    PRIMARY KEY (sandbox, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX executions_of_sandbox ON executions (sandbox, asked_at, id);
CREATE INDEX executions_listed ON executions (asked_at, id);
CREATE INDEX executions_in_project ON executions (project, asked_at, id);
CREATE INDEX executions_open ON executions (sandbox, asked_at, id) WHERE ended_at IS NULL;
CREATE INDEX executions_queued ON executions (sandbox, asked_at, id) WHERE queued = 1;
CREATE INDEX executions_ended ON executions (ended_at, sandbox, id) WHERE ended_at IS NOT NULL;

-- What is kept of outputs whose instance is gone.
CREATE TABLE outputs (
    sandbox   TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    execution TEXT NOT NULL,
    kept_at   INTEGER NOT NULL,
    bytes     INTEGER NOT NULL,
    output    BLOB NOT NULL,
    PRIMARY KEY (sandbox, execution)
) STRICT;
CREATE INDEX outputs_of_sandbox ON outputs (sandbox, kept_at, execution, bytes);
CREATE INDEX outputs_kept ON outputs (kept_at);

-- Who is gone has none.
CREATE TRIGGER outputs_over AFTER UPDATE OF deleted, phase ON sandboxes
WHEN new.deleted = 1 OR new.phase = 'stopped' BEGIN
    DELETE FROM outputs WHERE sandbox = new.id;
END;
