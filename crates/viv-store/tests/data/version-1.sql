-- A file as version 1 wrote it. It is never changed: files like it are out there.
PRAGMA foreign_keys = OFF;
PRAGMA application_id = 1986623091;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE counts (
    scope TEXT NOT NULL,
    phase TEXT NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (scope, phase)
) STRICT, WITHOUT ROWID;
INSERT INTO "counts" VALUES('','provisioning',0);
INSERT INTO "counts" VALUES('','ready',1);
INSERT INTO "counts" VALUES('default','provisioning',0);
INSERT INTO "counts" VALUES('default','ready',1);
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
INSERT INTO "idempotency" VALUES('default','create','k',X'0707070707070707070707070707070707070707070707070707070707070707','sbx_00000000000000000000000001',1000,0);
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
INSERT INTO "journal" VALUES(1,1,'default','sbx_00000000000000000000000001',NULL,'note',NULL,NULL,NULL,'{"who":"test"}','{"version":1}');
INSERT INTO "journal" VALUES(2,1,'default','sbx_00000000000000000000000001',NULL,'note',NULL,NULL,NULL,'{"who":"test"}','{"version":2}');
INSERT INTO "journal" VALUES(3,1,'default','sbx_00000000000000000000000002',NULL,'note',NULL,NULL,NULL,'{"who":"test"}','{"version":1}');
INSERT INTO "journal" VALUES(4,1,NULL,NULL,NULL,'note',NULL,NULL,NULL,'{"who":"test"}','{"text":"made"}');
CREATE TABLE keys (
    id         TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL,
    key        TEXT NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "keys" VALUES('key_1',1000,'{"id":"key_1","name":"first","scope":"admin","hash":[9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9],"created_at_ms":1000,"revoked_at_ms":null}');
CREATE TABLE labels (
    scope      TEXT NOT NULL,
    name       TEXT NOT NULL,
    value      TEXT NOT NULL,
    deleted    INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    id         TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    PRIMARY KEY (scope, name, value, deleted, created_at, id)
) STRICT, WITHOUT ROWID;
INSERT INTO "labels" VALUES('','team','a',0,1000,'sbx_00000000000000000000000001');
INSERT INTO "labels" VALUES('default','team','a',0,1000,'sbx_00000000000000000000000001');
CREATE TABLE leases (
    sandbox    TEXT NOT NULL,
    kind       TEXT NOT NULL,
    epoch      INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    token      INTEGER NOT NULL,
    lease      TEXT NOT NULL,
    PRIMARY KEY (sandbox, kind)
) STRICT, WITHOUT ROWID;
INSERT INTO "leases" VALUES('sbx_00000000000000000000000001','lifecycle',1,2000,1,'{"sandbox":"sbx_00000000000000000000000001","kind":"lifecycle","holder":"a","since_ms":1000,"expires_at_ms":2000,"token":1}');
CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "meta" VALUES('installation','one');
CREATE TABLE ownership (
    one   INTEGER PRIMARY KEY CHECK (one = 1),
    epoch INTEGER NOT NULL,
    token INTEGER NOT NULL,
    owner TEXT
) STRICT;
INSERT INTO "ownership" VALUES(1,1,1,'{"name":"test","boot_id":"boot","pid":1,"start_ticks":1,"epoch":1,"since_ms":1}');
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
INSERT INTO "sandboxes" VALUES('sbx_00000000000000000000000001','default','kept','ready',1000,0,1,2,1000,NULL,7000,0,'{"id":"sbx_00000000000000000000000001","project":"default","name":"kept","spec":{"image":{"kind":"host"},"limits":{"cpu_millis":null,"cpu_weight":null,"cpu_burst_us":null,"memory_bytes":null,"processes":null,"disk_bytes":null,"io_read_bps":null,"io_write_bps":null,"open_files":null},"network":{"egress":"none"},"env":{},"workdir":"/workspace","ports":[]},"policy":{"persistent":false,"lifetime_ms":3600000,"idle_ms":900000},"labels":{"team":"a"},"version":2,"desired":"running","phase":{"phase":"ready"},"phase_since_ms":1000,"cause":{"code":"requested","by":{"who":"test"},"at_ms":1000},"generation":1,"operations":1,"token":1,"entry":{"kind":"create","by":{"who":"test"},"at_ms":1000},"held":false,"deleted":false,"evidence":{"exec":null,"filesystem":null,"ports":[]},"observed":null,"saved":null,"created_at_ms":1000,"active_at_ms":1000,"expires_at_ms":null,"keep_awake":{}}');
INSERT INTO "sandboxes" VALUES('sbx_00000000000000000000000002','default',NULL,'stopped',2000,1,0,1,2000,NULL,2000,0,'{"id":"sbx_00000000000000000000000002","project":"default","name":null,"spec":{"image":{"kind":"host"},"limits":{"cpu_millis":null,"cpu_weight":null,"cpu_burst_us":null,"memory_bytes":null,"processes":null,"disk_bytes":null,"io_read_bps":null,"io_write_bps":null,"open_files":null},"network":{"egress":"none"},"env":{},"workdir":"/workspace","ports":[]},"policy":{"persistent":false,"lifetime_ms":3600000,"idle_ms":900000},"labels":{},"version":1,"desired":"running","phase":{"phase":"stopped"},"phase_since_ms":2000,"cause":{"code":"requested","by":{"who":"test"},"at_ms":2000},"generation":1,"operations":1,"token":1,"entry":{"kind":"create","by":{"who":"test"},"at_ms":2000},"held":false,"deleted":true,"evidence":{"exec":null,"filesystem":null,"ports":[]},"observed":null,"saved":null,"created_at_ms":2000,"active_at_ms":2000,"expires_at_ms":null,"keep_awake":{}}');
CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes (project, name)
    WHERE name IS NOT NULL AND deleted = 0 AND phase <> 'stopped';
CREATE INDEX sandboxes_name ON sandboxes (name, project, created_at, id) WHERE name IS NOT NULL;
CREATE INDEX sandboxes_listed ON sandboxes (deleted, phase, created_at, id);
CREATE INDEX sandboxes_listed_in_project ON sandboxes (project, deleted, phase, created_at, id);
CREATE INDEX sandboxes_due ON sandboxes (due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX sandboxes_may_live ON sandboxes (project, id) WHERE may_live = 1;
CREATE INDEX sandboxes_to_shrink ON sandboxes (phase_since) WHERE phase = 'stopped' AND shrunk = 0;
CREATE INDEX labels_id ON labels (id);
CREATE INDEX journal_sandbox ON journal (sandbox) WHERE sandbox IS NOT NULL;
CREATE INDEX journal_project ON journal (project) WHERE project IS NOT NULL;
CREATE INDEX journal_at ON journal (at);
CREATE INDEX leases_expiry ON leases (expires_at);
CREATE INDEX idempotency_sandbox ON idempotency (sandbox);
CREATE INDEX idempotency_to_forget ON idempotency (at) WHERE over = 1;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('journal',4);
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
CREATE TRIGGER idempotency_over AFTER UPDATE OF phase ON sandboxes
WHEN new.phase = 'stopped' AND old.phase <> 'stopped' BEGIN
    UPDATE idempotency SET over = 1 WHERE sandbox = new.id;
END;
COMMIT;
