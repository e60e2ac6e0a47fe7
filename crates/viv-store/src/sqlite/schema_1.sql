-- Times are milliseconds, flags 0 or 1. A scope is a project, or '' for all of them.

-- Who may write: one row. The greatest fencing token that was given is beside it, so both are read at once.
CREATE TABLE ownership (
    one   INTEGER PRIMARY KEY CHECK (one = 1),
    epoch INTEGER NOT NULL,
    token INTEGER NOT NULL,
    owner TEXT
) STRICT;
INSERT INTO ownership VALUES (1, 0, 0, NULL);

-- The record is the truth. The other columns are taken from it, so that it can be found, but for active_at, which
-- changes without it.
CREATE TABLE sandboxes (
    id          TEXT NOT NULL UNIQUE,
    project     TEXT NOT NULL,
    name        TEXT,
    phase       TEXT NOT NULL,
    phase_since INTEGER NOT NULL,
    deleted     INTEGER NOT NULL CHECK (deleted IN (0, 1)),
    may_live    INTEGER NOT NULL CHECK (may_live IN (0, 1)),
    version     INTEGER NOT NULL CHECK (version > 0),
    created_at  INTEGER NOT NULL,
    due_at      INTEGER,
    active_at   INTEGER NOT NULL,
    shrunk      INTEGER NOT NULL CHECK (shrunk IN (0, 1)),
    record      TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes (project, name)
    WHERE name IS NOT NULL AND deleted = 0 AND phase <> 'stopped';
CREATE INDEX sandboxes_name ON sandboxes (name, project, created_at, id) WHERE name IS NOT NULL;
CREATE INDEX sandboxes_listed ON sandboxes (deleted, phase, created_at, id);
CREATE INDEX sandboxes_listed_in_project ON sandboxes (project, deleted, phase, created_at, id);
CREATE INDEX sandboxes_due ON sandboxes (due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX sandboxes_may_live ON sandboxes (project, id) WHERE may_live = 1;
CREATE INDEX sandboxes_to_shrink ON sandboxes (phase_since) WHERE phase = 'stopped' AND shrunk = 0;

-- Each label twice: in the scope of its project, and in that of all.
CREATE TABLE labels (
    scope      TEXT NOT NULL,
    name       TEXT NOT NULL,
    value      TEXT NOT NULL,
    deleted    INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    id         TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    PRIMARY KEY (scope, name, value, deleted, created_at, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX labels_id ON labels (id);

-- How many records there are, for people to look at. Quotas are counted from the records themselves.
CREATE TABLE counts (
    scope TEXT NOT NULL,
    phase TEXT NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (scope, phase)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER count_new AFTER INSERT ON sandboxes WHEN new.deleted = 0 BEGIN
    INSERT INTO counts VALUES ('', new.phase, 1) ON CONFLICT DO UPDATE SET n = n + 1;
    INSERT INTO counts VALUES (new.project, new.phase, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER count_old AFTER DELETE ON sandboxes WHEN old.deleted = 0 BEGIN
    UPDATE counts SET n = n - 1 WHERE scope IN ('', old.project) AND phase = old.phase;
END;
CREATE TRIGGER count_moved AFTER UPDATE OF project, phase, deleted ON sandboxes
WHEN old.phase <> new.phase OR old.deleted <> new.deleted OR old.project <> new.project BEGIN
    UPDATE counts SET n = n - 1 WHERE old.deleted = 0 AND scope IN ('', old.project) AND phase = old.phase;
    INSERT INTO counts SELECT '', new.phase, 1 WHERE new.deleted = 0 ON CONFLICT DO UPDATE SET n = n + 1;
    INSERT INTO counts SELECT new.project, new.phase, 1 WHERE new.deleted = 0 ON CONFLICT DO UPDATE SET n = n + 1;
END;

-- A cursor is never given twice, also when the last lines were forgotten.
CREATE TABLE journal (
    cursor     INTEGER PRIMARY KEY AUTOINCREMENT,
    at         INTEGER NOT NULL,
    project    TEXT,
    sandbox    TEXT,
    generation INTEGER,
    kind       TEXT NOT NULL,
    from_phase TEXT,
    to_phase   TEXT,
    cause      TEXT,
    actor      TEXT NOT NULL,
    data       TEXT NOT NULL
) STRICT;
CREATE INDEX journal_sandbox ON journal (sandbox) WHERE sandbox IS NOT NULL;
CREATE INDEX journal_project ON journal (project) WHERE project IS NOT NULL;
CREATE INDEX journal_at ON journal (at);

-- A lease may be taken before there is a record.
CREATE TABLE leases (
    sandbox    TEXT NOT NULL,
    kind       TEXT NOT NULL,
    epoch      INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    token      INTEGER NOT NULL,
    lease      TEXT NOT NULL,
    PRIMARY KEY (sandbox, kind)
) STRICT, WITHOUT ROWID;
CREATE INDEX leases_expiry ON leases (expires_at);

CREATE TABLE idempotency (
    project   TEXT NOT NULL,
    route     TEXT NOT NULL,
    key       TEXT NOT NULL,
    body_hash BLOB NOT NULL CHECK (length(body_hash) = 32),
    sandbox   TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    at        INTEGER NOT NULL,
    over      INTEGER NOT NULL CHECK (over IN (0, 1)),
    PRIMARY KEY (project, route, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_sandbox ON idempotency (sandbox);
CREATE INDEX idempotency_to_forget ON idempotency (at) WHERE over = 1;
CREATE TRIGGER idempotency_over AFTER UPDATE OF phase ON sandboxes
WHEN new.phase = 'stopped' AND old.phase <> 'stopped' BEGIN
    UPDATE idempotency SET over = 1 WHERE sandbox = new.id;
END;

CREATE TABLE keys (
    id         TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL,
    key        TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
