CREATE TABLE events (                        -- what happened, for people to look at (coordinator.watch)
    number  INTEGER PRIMARY KEY,
    at      REAL    NOT NULL,                -- seconds since the epoch
    round   INTEGER NOT NULL,
    name    TEXT    NOT NULL,
    device  TEXT    NOT NULL,                -- empty: of no one device
    fields  TEXT    NOT NULL                 -- JSON
) STRICT;

CREATE INDEX events_of_devices ON events (device, number);
CREATE INDEX events_of_rounds ON events (round, number);
