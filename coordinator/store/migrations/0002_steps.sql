CREATE TABLE rounds (
    round     INTEGER PRIMARY KEY,
    devices   BLOB    NOT NULL,              -- snapshot of who could be asked, msgpack
    begun_at  REAL    NOT NULL,
    done_at   REAL                           -- NULL: the round is under way
) STRICT;

CREATE TABLE orders (
    id          TEXT    PRIMARY KEY,
    round       INTEGER NOT NULL REFERENCES rounds (round),
    label       TEXT    NOT NULL,
    device_id   TEXT    NOT NULL,
    body        BLOB    NOT NULL,            -- the order as it was first sent, msgpack
    status      TEXT    NOT NULL CHECK (status IN ('open', 'accepted', 'rejected', 'expired')),
    reason      TEXT    NOT NULL DEFAULT '',
    report      BLOB,                        -- of an accepted order, msgpack
    closed_at   REAL,
    streamed    INTEGER NOT NULL CHECK (streamed IN (0, 1)),
    arrival     INTEGER UNIQUE,              -- orders by when they were closed: 1, 2, ...
    handed      INTEGER REFERENCES rounds (round),  -- of a streamed order: in which round the method was given its answer
    UNIQUE (round, label, device_id),
    CHECK ((status = 'accepted') = (report IS NOT NULL)),
    CHECK ((status = 'open') = (arrival IS NULL))
) STRICT;

CREATE INDEX streams ON orders (handed) WHERE streamed = 1;

CREATE TABLE states (
    round  INTEGER PRIMARY KEY,              -- the last row is the truth
    body   BLOB    NOT NULL
) STRICT;

CREATE TABLE counters (
    name   TEXT    PRIMARY KEY,
    value  INTEGER NOT NULL
) STRICT;

CREATE TABLE meta (
    name   TEXT PRIMARY KEY,
    value  TEXT NOT NULL
) STRICT;
