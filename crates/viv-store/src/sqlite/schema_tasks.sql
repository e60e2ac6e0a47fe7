-- Tasks (K1). The record is the truth; the other columns are taken from it, so that it can be found. A task outlives its
-- sandbox, and may be there before it.
CREATE TABLE tasks (
    id       TEXT PRIMARY KEY,
    project  TEXT NOT NULL,
    sandbox  TEXT NOT NULL,
    version  INTEGER NOT NULL CHECK (version > 0),
    state    TEXT NOT NULL,
    living   INTEGER NOT NULL CHECK (living IN (0, 1)),
    at_work  INTEGER NOT NULL CHECK (at_work IN (0, 1)),
    made_at  INTEGER NOT NULL,
    ended_at INTEGER,
    record   TEXT NOT NULL
) STRICT;
CREATE INDEX tasks_made ON tasks (made_at, id);
CREATE INDEX tasks_project ON tasks (project, made_at, id);
CREATE INDEX tasks_sandbox ON tasks (sandbox, made_at, id);
CREATE INDEX tasks_living ON tasks (made_at, id) WHERE living = 1;
CREATE INDEX tasks_ended ON tasks (ended_at) WHERE ended_at IS NOT NULL;
-- One task of a sandbox is at work at a time.
CREATE UNIQUE INDEX tasks_at_work ON tasks (sandbox) WHERE at_work = 1;

-- The ends of what their executions wrote.
CREATE TABLE task_outputs (
    task      TEXT NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    execution TEXT NOT NULL,
    offset    INTEGER NOT NULL,
    data      BLOB NOT NULL,
    PRIMARY KEY (task, execution)
) STRICT, WITHOUT ROWID;
