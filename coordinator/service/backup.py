"""`fedge backup` and `fedge restore`: copies a running coordinator's home, and restores it elsewhere.

A backup is a folder with the tables as one SQLite file, wherever they were, and the tensors. Tensors are copied after
the tables, with deletion suspended, so none that the tables name is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import click
import msgspec

from coordinator.store.blobs import open_blobs, prevent_deletion
from coordinator.store.database import Database, get_failures, make_connector, migrate
from coordinator.store.store import AT_BROKER, ISSUE, LEASE
from coordinator.watch.options import HOME, JSON, STORE
from coordinator.watch.state import read_summary
from fedge.errors import ConfigError, StoreError
from fedge.system.files import BlobFolder, copy_durably, fill_folder
from fedge.system.help import Command, option
from fedge.system.text import Heading
from fedge.wire.messages import Order

TABLES: Final = ("rounds", "orders", "states", "counters", "meta", "offences", "events")
"""Tables in copying order: a table comes before those that refer to it."""
BESIDE: Final = ("task.json", "summary.json")


def back_up(home: Path, store: str | None, folder: Path) -> int:
    """Copy the home of a coordinator, which may be running; return the number of tensors.

    Raises:
        ConfigError: there is no coordinator's home, it has no tables, or the folder exists already.
        StoreError: the store cannot be read, the copy cannot be written, or a tensor is damaged.
    """
    federation = read_summary(home)["federation"]
    if store is None and not ((home / "store.db").exists() or (home / "store.elsewhere").exists()):
        raise ConfigError(f"{home} has no store.db: name the whole home of a coordinator of this version")
    with _make_folder(folder) as made, prevent_deletion(home):
        with (
            closing(make_connector(home, store, federation)()) as source,
            closing(make_connector(made, None, "")()) as target,
        ):
            migrate(source, check=True)
            source.begin_reading()
            bucket = [url for (url,) in source.execute("SELECT value FROM meta WHERE name = 'blobs'") if url]
            _copy_tables(source, target)
        return _copy_files(home, made, bucket[0] if bucket else None)


def restore_to(folder: Path, home: Path, store: str | None, blobs: str | None = None) -> int:
    """Restore a coordinator's home from a backup; return the number of tensors. Open orders get new ids.

    Args:
        folder: the backup's folder.
        home: the home to make.
        store: postgresql://... of the tables, unless they go into the home.
        blobs: s3://... of a bucket that gets the tensors, too.

    Raises:
        ConfigError: there is no backup, or the target exists.
        StoreError: the backup cannot be read, the home cannot be written, a newer fedge made the backup, or a tensor is
            damaged.
    """
    federation = read_summary(folder)["federation"]
    with _make_folder(home) as made:
        n_tensors = _copy_files(folder, made)
        if blobs is not None:
            open_blobs(made, blobs, dispatcher=True).send_all()
        given = made / "given"  # opening a file changes it, and its tables may be of an earlier version
        given.mkdir()
        shutil.copyfile(folder / "store.db", given / "store.db")
        with (
            closing(make_connector(given, None, "")()) as source,
            closing(make_connector(made, store, federation)()) as target,
        ):
            migrate(source)
            target.become_dispatcher(f"a coordinator works for federation {federation} on this server: stop it")
            if target.get_version() and target.execute("SELECT name FROM meta"):
                raise ConfigError(f"{federation} is on this server already: drop the schema of that name first")
            source.execute("UPDATE meta SET value = $1 WHERE name = 'blobs'", blobs or "")
            _reissue(source)
            _copy_tables(source, target)
        shutil.rmtree(given)
    return n_tensors


@contextmanager
def _make_folder(folder: Path) -> Iterator[Path]:
    """Make a new folder to fill, which appears when it is complete; root gives it to the owner of its parent folder."""
    taken = ConfigError(f"{folder} is there already: name a new folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise taken
    try:
        with fill_folder(folder, replace=False) as made:
            yield made
            if os.geteuid() == 0:
                owner = folder.parent.stat()
                for _, _, files, at in os.fwalk(made, topdown=False):
                    for name in files:
                        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=at, follow_symlinks=False)
                    os.fchown(at, owner.st_uid, owner.st_gid)
    except FileExistsError as error:  # since we looked
        raise taken from error
    except get_failures() as error:
        raise StoreError(f"cannot make {folder}: {error}") from error


def _copy_tables(source: Database, target: Database) -> None:
    migrate(target)
    target.begin_writing()
    for table in TABLES:
        if rows := source.execute(f"SELECT * FROM {table}"):  # noqa: S608 - ours
            values = ", ".join(f"${n}" for n in range(1, len(rows[0]) + 1))
            target.executemany(f"INSERT INTO {table} VALUES ({values})", rows)  # noqa: S608
    target.execute("COMMIT")


def _copy_files(source: Path, target: Path, bucket: str | None = None) -> int:
    """Copy and verify the tensors, wherever they are, and the files beside them; return the number of tensors."""
    for name in BESIDE:
        if (source / name).exists():
            copy_durably(source / name, target / name)
    if bucket is not None:
        return open_blobs(target, bucket, dispatcher=True).fetch_all()
    blobs = sorted(BlobFolder(source / "blobs"))
    (target / "blobs").mkdir()
    for digest in blobs:
        if copy_durably(source / "blobs" / digest, target / "blobs" / digest) != digest:
            raise StoreError(f"{source / 'blobs' / digest} is damaged: its content does not match its name")
    return len(blobs)


def _reissue(db: Database) -> None:
    """Give open and future orders new ids, and the processes other names at the broker.

    Devices never repeat an acknowledged order, and some orders may have been acknowledged since the backup; with the
    old ids the coordinator would wait in vain. Seeds do not depend on ids, so the same work has the same result. An old
    coordinator that still runs would share the reports under the old names.
    """
    issue = f"-{uuid.uuid4().hex[:8]}"
    db.begin_writing()
    db.execute("INSERT INTO meta VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value", ISSUE, issue)
    for name in (AT_BROKER, LEASE):
        db.execute("DELETE FROM meta WHERE name = $1", name)
    for old, body in db.execute("SELECT id, body FROM orders WHERE status = 'open'"):
        order = msgspec.msgpack.decode(body, type=Order)
        new = f"{order.run}{issue}.{order.round}.{order.label}.{order.device_id}"
        written = msgspec.msgpack.encode(msgspec.structs.replace(order, id=new))
        db.execute("UPDATE orders SET id = $2, body = $3 WHERE id = $1", old, new, written)
    db.execute("COMMIT")


_folder = click.argument("folder", type=click.Path(path_type=Path))


@click.command(cls=Command)
@_folder
@HOME
@STORE
@JSON
def backup(folder: Path, home: Path, store: str | None, as_json: bool) -> int:
    """Copy a coordinator's home to FOLDER, consistently, while it runs or after it has stopped.

    FOLDER gets the tables as one file and the tensors, also those of a server or a bucket. It gets no keys and no
    certificates.

    Examples:
      fedge backup backups/monday --home shop
      fedge backup backups/monday --home shop --store postgresql://fedge@db/fedge

    Exit codes: 0 done, 2 no coordinator's folder or FOLDER is there already, 4 the store cannot be read or the copy
    cannot be written, or a tensor is damaged.
    """
    return _print_result("backed_up", back_up(home, store, folder), home, folder, folder, as_json)


@click.command(cls=Command)
@_folder
@option(
    "--home",
    heading=Heading.FOLDERS,
    type=click.Path(path_type=Path),
    required=True,
    help="This folder, which is not there yet, becomes the new home.",
)
@option(
    "--store",
    heading=Heading.FOLDERS,
    help="This database, postgresql://..., gets the tables; by default they are in HOME/store.db.",
)
@option(
    "--blobs",
    heading=Heading.FOLDERS,
    help="This bucket, s3://BUCKET/FOLDER, gets the tensors; by default they are in HOME/blobs.",
)
@JSON
def restore(folder: Path, home: Path, store: str | None, blobs: str | None, as_json: bool) -> int:
    """Make a coordinator's home from a backup in FOLDER.

    Start `fedge coordinator` with it as before, once the old coordinator has ended for good. It continues with the
    round that was under way at the backup. What devices have answered since then, they are asked again.

    Examples:
      fedge restore backups/monday --home shop2
      fedge restore backups/monday --home shop2 --store postgresql://fedge@db/fedge --blobs s3://tensors/shop2

    Exit codes: 0 done, 2 no backup, or HOME or the federation's schema is there already, 4 the backup cannot be read or
    the home cannot be written, a newer fedge made it, or a tensor is damaged.
    """
    return _print_result("restored", restore_to(folder, home, store, blobs), folder, home, home, as_json)


def _print_result(event: str, n_tensors: int, source: Path, target: Path, made: Path, as_json: bool) -> int:
    summary = read_summary(made)
    fields = {"event": event, "from": str(source), "to": str(target), "tensors": n_tensors, "round": summary["round"]}
    text = f"{source} is in {target}: {summary['federation']}, {n_tensors} tensors, after round {summary['round']}"
    click.echo(json.dumps(fields) if as_json else text)
    return 0
