-- What a keyed request made beside a record, in the words of who asked (L1). Such a key is kept for its time, however
-- long the sandbox lives: it begins as `over`.
ALTER TABLE idempotency ADD COLUMN made TEXT;
