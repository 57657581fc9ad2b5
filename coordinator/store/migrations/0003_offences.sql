CREATE TABLE offences (                      -- evidence against devices (coordinator.fleet.quarantine)
    device_id  TEXT    NOT NULL,
    round      INTEGER NOT NULL,
    name       TEXT    NOT NULL,
    detail     TEXT    NOT NULL,
    PRIMARY KEY (device_id, round, name)
) STRICT;
