"""Files of what the agent must not lose: open orders, unacknowledged reports, ids of finished orders.

    HOME/outbox/lock             held by the one agent that uses this folder
    HOME/outbox/version          the version of this format, "2"; fedge 0.1 wrote no such file
    HOME/outbox/orders/{id}      an order and its time of writing; kept until it is acknowledged or discarded
    HOME/outbox/reports/{id}     the order's report; once this file is written, the work is done
    HOME/outbox/blobs/{digest}   tensors named in reports; written before the report
    HOME/outbox/acked            ids and verdicts of the last acknowledged orders, oldest first; written before deleting

Files are replaced atomically, and `Outbox` can read the folder after each step. The next start removes leftovers of a
kill -9. It also deletes files that it cannot read because the disk is damaged. Their work is repeated rather than
lost, because the coordinator repeats an order until it has the order's report.

An order's time keeps running while no agent runs. If the machine was off, nobody knows for how long, so half of the
remaining time counts as gone. A coordinator that still wants the order extends its time.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from edge_agent.agent.uptime import get_uptime_s, read_boot_id
from edge_agent.device.verdicts import ACKED, Verdict, verdicts
from fedge.errors import MALFORMED, ConfigError, ProtocolError, StoreError, raise_as
from fedge.system.files import BlobFolder, lock_folder, read_kept, write_atomically
from fedge.wire.messages import Ack, Order, Report, decode_message, encode_message, iterate_blobs

log = logging.getLogger("fedge.agent")

VERSION: Final = 2
"""Version of the folder's format, which is the version of the messages in it."""


class _StoredOrder(msgspec.Struct, frozen=True):
    """A stored order: the message, the id of the machine's boot, and the uptime in seconds when it was written."""

    order: bytes
    boot: str
    at: float

    def compute_left(self, left_s: float) -> float:
        """Return the seconds left now, of the `left_s` that were left when the order was written."""
        return left_s - (get_uptime_s() - self.at) if self.boot and self.boot == read_boot_id() else left_s / 2


T = TypeVar("T")
_kept = msgspec.msgpack.Decoder(_StoredOrder)


class Outbox:
    """The folder HOME/outbox, for one agent at a time; methods that write raise `StoreError` on failure.

    The outbox itself has no limits, because `edge_agent.agent.session` limits orders and acknowledged ids, and a report
    names at most 64 blobs (`Report.blobs`).
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the folder, and clean up after a crash.

        Raises:
            ConfigError: another agent uses the folder, or it holds work of fedge 0.1.
            StoreError: the folder cannot be read or written, or belongs to a newer fedge.
        """
        self._orders = folder / "orders"
        self._reports = folder / "reports"
        self._acked = folder / ACKED.name
        self._lock = ExitStack()
        self._lock.enter_context(lock_folder(folder, f"another agent uses {folder}; give each agent its own --home"))
        self._blob_lock = threading.Lock()
        self._unreported: set[str] = set()
        try:
            _migrate(folder)
            for part in (self._orders, self._reports):
                part.mkdir(exist_ok=True)
            self._blobs = BlobFolder(folder / "blobs")
            self.verdicts = read_kept(self._acked, verdicts.decode) or []
            self._clean_up()
        except (OSError, ConfigError, StoreError) as error:
            self.close()
            if isinstance(error, OSError):
                raise StoreError(f"cannot open {folder}: {error}") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder for another agent."""
        self._lock.close()

    # ------------------------------------------------------------------------------------------------------ reading

    def load_orders(self) -> list[Order]:
        """Read all open orders, oldest first. Their `left_s` counts from now; it is 0 if no time is left."""
        paths = sorted(self._orders.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [order for path in paths if (order := _read(path, _decode_order, lambda order: order.id)) is not None]

    def load_reports(self) -> list[Report]:
        """Read the reports of open orders."""
        return [
            report
            for path in sorted(self._reports.iterdir())
            if (report := _read(path, _decode_report, lambda report: report.order_id)) is not None
        ]

    def find_blob(self, digest: str) -> Path | None:
        """Return the file of a blob, or None if the outbox does not have this blob."""
        return self._blobs.get_path(digest) if digest in self._blobs else None

    # ------------------------------------------------------------------------------------------------------ writing

    def save_order(self, order: Order) -> None:
        """Write a new order, or an order with extended time. Its `left_s` counts from now."""
        kept = _StoredOrder(encode_message(order), read_boot_id(), get_uptime_s())
        write_atomically(self._orders / order.id, msgspec.msgpack.encode(kept))

    def put_blob(self, digest: str, data: bytes) -> None:
        """Write tensors for the next report, under their digest. May be called from another thread."""
        with self._blob_lock:  # before `put_as` looks whether the file exists; nobody deletes it from here on
            self._unreported.add(digest)
        self._blobs.put_as(digest, data)

    def save_report(self, report: Report) -> None:
        """Write a report, after its blobs. From now on the work is done and not repeated."""
        write_atomically(self._reports / report.order_id, encode_message(report))
        with self._blob_lock:
            self._unreported -= {ref.digest for ref in iterate_blobs(report)}

    def acknowledge(self, ack: Ack, *, remember: int) -> None:
        """Remember the verdict on an order, then delete the order's files. Only the last `remember` verdicts stay."""
        known = [*self.verdicts, Verdict(ack.order_id, ack.accepted, ack.reason)][-remember:]
        write_atomically(self._acked, msgspec.json.encode(known))
        self.verdicts = known
        self.remove_order(ack.order_id)

    def remove_order(self, order_id: str) -> None:
        """Delete an order with its report and blobs. The report goes first, so that no report lacks its order."""
        with raise_as(StoreError, f"cannot delete order {order_id}"):
            (self._reports / order_id).unlink(missing_ok=True)
            (self._orders / order_id).unlink(missing_ok=True)
            self._remove_stray_blobs()

    # ----------------------------------------------------------------------------------------------------- cleaning

    def _clean_up(self) -> None:
        """Delete leftovers of a crash: half-written files, unfinished deletions, incomplete reports."""
        over = {verdict.order_id for verdict in self.verdicts}
        for folder in (self._acked.parent, self._orders, self._reports, self._acked.parent / "blobs"):
            for path in folder.glob(".tmp-*"):
                path.unlink()
        for order in self.load_orders():
            if order.id in over:
                self.remove_order(order.id)
            elif order.left_s > 0:
                self.save_order(order)  # each further restart of the machine halves the remaining time
        open_orders = {order.id for order in self.load_orders()}
        for report in self.load_reports():
            if report.order_id not in open_orders or any(
                ref.digest not in self._blobs for ref in iterate_blobs(report)
            ):
                (self._reports / report.order_id).unlink()
        self._remove_stray_blobs()

    def _remove_stray_blobs(self) -> None:
        named = {ref.digest for report in self.load_reports() for ref in iterate_blobs(report)}
        with self._blob_lock:
            for digest in set(self._blobs) - named - self._unreported:
                self._blobs.remove(digest)


def _decode_order(data: bytes) -> Order:
    try:
        kept = _kept.decode(data)
    except MALFORMED as error:
        raise ProtocolError("malformed", str(error)) from error
    order = decode_message(kept.order, Order)
    return msgspec.structs.replace(order, left_s=min(max(kept.compute_left(order.left_s), 0.0), order.left_s))


def _decode_report(data: bytes) -> Report:
    return decode_message(data, Report)


def _read(path: Path, parse: Callable[[bytes], T], name_of: Callable[[T], str]) -> T | None:
    """Read a message; delete its file if the content does not match its name."""
    try:
        message = parse(path.read_bytes())
        if name_of(message) == path.name:
            return message
        reason = f"holds {name_of(message)}"
    except (ProtocolError, IsADirectoryError) as error:
        reason = str(error)
    log.warning("event=unreadable file=%s error=%s", path, reason)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return None


def _migrate(folder: Path) -> None:
    """Upgrade the folder to this version, unless that would lose work.

    Raises:
        ConfigError: the folder holds orders or reports of fedge 0.1, which can no longer be read.
        StoreError: the folder belongs to a newer fedge, or cannot be written.
    """
    file = folder / "version"
    known = file.exists()
    if found := read_kept(file, int):
        if found != VERSION:
            raise StoreError(f"{folder} has version {found}, this fedge knows {VERSION}: update fedge")
        return
    old = [*(folder / "orders").glob("[!.]*"), *(folder / "reports").glob("[!.]*")]
    if old and not known:  # fedge 0.1 had no version file, so a damaged one is ours
        raise ConfigError(
            f"{folder} holds work of fedge 0.1 ({old[0].name}), which fedge 0.2 cannot go on with: finish it with "
            f"fedge 0.1, or delete {folder}, or use another --home; bundles that are installed go on answering"
        )
    if (folder / "acked").exists():
        log.info("event=migrated folder=%s from=0.1 unused=%r", folder, "candidates and personal beside it")
    write_atomically(file, str(VERSION).encode())
