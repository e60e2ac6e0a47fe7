-- Schedules (L17). The record is the truth; the other columns are taken from it, so that it can be found.
CREATE TABLE schedules (
    id      TEXT PRIMARY KEY,
    project TEXT NOT NULL,
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    version INTEGER NOT NULL CHECK (version > 0),
    due_at  INTEGER,
    running INTEGER NOT NULL CHECK (running IN (0, 1)),
    record  TEXT NOT NULL
) STRICT;
CREATE INDEX schedules_sandbox ON schedules (sandbox, id);
CREATE INDEX schedules_project ON schedules (project, id);
CREATE INDEX schedules_due ON schedules (due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX schedules_running ON schedules (id) WHERE running = 1;

-- Who is gone has none.
CREATE TRIGGER schedules_over AFTER UPDATE OF deleted, phase ON sandboxes
WHEN new.deleted = 1 OR new.phase = 'stopped' BEGIN
    DELETE FROM schedules WHERE sandbox = new.id;
END;
