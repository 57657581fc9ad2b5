"""The lease of a store, by which one coordinator at a time works on it, and the store says which.

The lock of a folder or database (`Store`) keeps out other processes of the same machine or server. It says nothing
where a folder is shared by machines without locks, or where a database was restored or failed over beneath a running
coordinator. So a coordinator also writes into the store that it is there, every few seconds. Another one that finds the
lease of another machine waits whether it is renewed, without comparing clocks. Whoever finds another's lease in place
of its own has lost the store and ends.

Two coordinators with copies of a store do not meet here, but at the broker (`coordinator.fleet.mqtt.sole`).
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from coordinator.store.store import LEASE, Store, explain_unreadable
from fedge.errors import MALFORMED, ConfigError, StoreError
from fedge.system.text import escape_controls, format_time
from fedge.wire.messages import MAX_AT

RENEW_S: Final = 4.0
"""Pause between two renewals."""
LAPSED_S: Final = 12.0
"""Time without a renewal after which a lease has lapsed."""
LOOK_S: Final = 0.5
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Lease(Struct, frozen=True, kw_only=True):
    """A coordinator's lease. `machine`: of one kernel from its start on, whose locks hold. `renewed`: how often."""

    incarnation: str
    machine: str
    where: str
    since: Annotated[float, Meta(ge=0, le=MAX_AT)]
    renewed: int = 0


def make_lease(home: Path) -> Lease:
    """Make the lease of this process, not taken yet."""
    machine = BOOT.read_text().strip() if BOOT.exists() else uuid.uuid4().hex
    where = f"{socket.gethostname()}:{home.absolute()}"
    return Lease(incarnation=uuid.uuid4().hex, machine=machine, where=where, since=time.time())


def take_lease(store: Store, own: Lease) -> None:
    """Take the lease, from a coordinator of another machine only if it is not renewed while we wait.

    Raises:
        ConfigError: another coordinator works on the store.
        StoreError: the lease in the store cannot be read.
    """
    until = time.monotonic() + LAPSED_S
    first = _read_lease(store)
    while first is not None and first.machine != own.machine and time.monotonic() < until:
        time.sleep(LOOK_S)
        if (now := _read_lease(store)) != first:
            if now is None:
                break
            raise ConfigError(f"{_describe(now)} works on the same store: stop it, or use another --home and --store")
    store.put_value(LEASE, _encode(own))


def renew_lease(store: Store, own: Lease) -> Lease:
    """Renew the lease and return it.

    Raises:
        ConfigError: another coordinator has taken it, or the store was replaced by another.
        StoreError: the lease in the store cannot be read any more.
    """
    later = replace(own, renewed=own.renewed + 1)
    found = store.change_value(LEASE, lambda kept: _encode(later) if _is_of(kept, own) else kept or "")
    if not _is_of(found, own):
        other = _read_lease(store)
        what = "its store was replaced, as by a restore" if other is None else f"{_describe(other)} took its store over"
        raise ConfigError(f"this coordinator ends, since {what}: only one may work on a store")
    return later


def release_lease(store: Store, own: Lease) -> None:
    """Release the lease if it is still ours; if the store cannot be written, it lapses."""
    with contextlib.suppress(StoreError):
        store.change_value(LEASE, lambda kept: "" if _is_of(kept, own) else kept or "")


def _read_lease(store: Store) -> Lease | None:
    kept = store.find_value(LEASE)
    with explain_unreadable(store):
        return msgspec.json.decode(kept, type=Lease) if kept else None


def _is_of(kept: str | None, own: Lease) -> bool:
    with contextlib.suppress(*MALFORMED):
        return bool(kept) and msgspec.json.decode(kept or "", type=Lease).incarnation == own.incarnation
    return False


def _encode(lease: Lease) -> str:
    return msgspec.json.encode(lease).decode()


def _describe(lease: Lease) -> str:
    return f"another coordinator ({escape_controls(lease.where)}, which began at {format_time(lease.since)})"
