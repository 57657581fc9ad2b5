"""Takes samples from a watched source into the store: each new image of a folder, each new row of a file.

What was taken is noted in the store, so a sample that the store has given up for newer ones is not taken twice, and
kill -9 loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_agent.samples.database import Database
from edge_agent.samples.places import compute_digests
from edge_agent.samples.reading import Arriving, list_images, read_image, read_rows
from edge_agent.samples.store import SampleStore
from fedge.data.preprocessing import preprocess
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.system.files import compute_digest, get_version, require_there
from fedge.system.text import escape_controls, is_text

BATCH: Final = 500
"""Files between two notes of what was taken."""


@dataclass
class Collected:
    """What a look at a source has brought: samples new to the store, and files that could not be read, with reasons."""

    n_added: int = 0
    problems: dict[str, str] = field(default_factory=dict)


def collect_samples(store: SampleStore, source: Path) -> Collected:
    """Take what is new in a folder of images, or in a file of rows.

    Raises:
        ConfigError: there is no such source, its path is not UTF-8, the store does not know the task, or a mark cannot
            be read.
        StoreError: the store cannot be written.
    """
    require_there(source, "folder or file of samples")
    if not is_text(at := str(source.absolute())):
        raise ConfigError(f"the path {escape_controls(at)} is not UTF-8: rename it")
    task, found = store.require_task(), Collected()
    if source.is_dir():
        _collect_images(store, task, source, found)
    else:
        try:
            _collect_rows(store, task, source, found)
        except ConfigError as error:  # perhaps it is just being written
            found.problems[source.name] = str(error)
    return found


def _collect_images(store: SampleStore, task: TaskSpec, folder: Path, found: Collected) -> None:
    images, marked = list_images(folder)
    names, at = [name for name in images if is_text(name)], str(folder.absolute())
    found.problems |= {escape_controls(name): "its name is not UTF-8" for name in images if not is_text(name)}
    known = _read_taken(store.database, at)
    versions = {name: repr(get_version(folder / name)) for name in names}
    new = iter([name for name in names if known.get(f"{at}/{name}") != versions[name]])
    while batch := list(islice(new, BATCH)):
        taken = {}
        for name in batch:
            try:
                add_arriving(store, [read_image(task, folder, name, label=None, marked=name in marked)], found)
                taken[f"{at}/{name}"] = versions[name]
            except ConfigError as error:
                found.problems[name] = str(error)
        _save_taken(store.database, taken)
    gone = known.keys() - {f"{at}/{name}" for name in names}
    _forget_taken(store.database, gone)


def _collect_rows(store: SampleStore, task: TaskSpec, file: Path, found: Collected) -> None:
    at, version = str(file.absolute()), repr(get_version(file))
    before, count, beginning = _read_taken(store.database, at).get(at, "||").split("|")
    if before == version:
        return
    rows = list(read_rows(task, file))
    digests = compute_digests(preprocess(task, np.stack([row.x for row in rows]))) if rows else []
    keys = [digest + _format_target(row.label).encode() for digest, row in zip(digests, rows, strict=True)]
    n = int(count or 0)
    if n > len(rows) or compute_digest(*keys[:n]) != beginning:  # written anew; the store knows what it has
        n = 0
    add_arriving(store, rows[n:], found)
    _save_taken(store.database, {at: f"{version}|{len(rows)}|{compute_digest(*keys)}"})


def _format_target(target: int | NDArray[Any] | None) -> str:
    return repr(None if target is None else np.asarray(target).tolist())


def add_arriving(store: SampleStore, rows: Iterable[Arriving], found: Collected) -> None:
    """Add samples to the store, and count those that were new.

    Raises:
        ConfigError: a sample does not fit.
        StoreError: the store cannot be written.
    """
    for row in rows:
        found.n_added += store.add(row.x, row.label, origin=row.origin, sensitive=row.sensitive) is not None


def _read_taken(database: Database, at: str) -> dict[str, str]:
    """Return what was taken of a path or below it, each with its version."""
    with database.read() as db:
        rows = db.execute("SELECT path, version FROM taken WHERE path = ? OR path GLOB ?", (at, f"{_escape(at)}/*"))
        return dict(rows.fetchall())


def _escape(path: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in path)


def _save_taken(database: Database, taken: dict[str, str]) -> None:
    with database.write() as db:
        db.executemany("INSERT OR REPLACE INTO taken VALUES (?, ?)", taken.items())


def _forget_taken(database: Database, gone: Iterable[str]) -> None:
    with database.write() as db:
        db.executemany("DELETE FROM taken WHERE path = ?", [(path,) for path in gone])
