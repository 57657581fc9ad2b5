"""The device's source, the file or folder of `--data`, beside the store: each of its samples keeps its place for ever.

When a source is seen for the first time, its samples are in the places that it gives, or that the hold-out by the seed
draws. Later ones are where the source says or, if it does not, where their digest says. A known sample stays where it
is, and the owner's marks and deletions count here, too.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_agent.samples.database import UNLABELLED, get_fact, save_fact
from edge_agent.samples.places import choose_place, compute_digests
from edge_agent.samples.store import Labelled, SampleStore, count_change
from fedge.data.task import TRAIN
from fedge.system.files import compute_digest, get_versions

_Key = tuple[bytes, bool, int]

_SEEN: Final = "source_seen"
_IN_SOURCE: Final = "SELECT 1 FROM places AS p WHERE p.digest = s.digest AND p.sensitive = s.sensitive AND p.present"


@dataclass(frozen=True, slots=True)
class Placed:
    """The samples of a source, (n,) each: places, marks, and whether they count, which deleted ones do not."""

    place: NDArray[np.int64]
    sensitive: NDArray[np.bool_]
    kept: NDArray[np.bool_]


def identify_source(store: SampleStore, source: Path) -> str:
    """Return a text that changes when a file of the source does, or the owner's decisions on samples do."""
    files = sorted((str(path), version) for path, version in get_versions(source))
    with store.database.read() as db:
        return compute_digest(repr((files, get_fact(db, "decisions", 0))).encode())


def has_seen(store: SampleStore, source: Path) -> bool:
    """Return whether the source is as it was when it was placed last."""
    now = identify_source(store, source)
    with store.database.read() as db:
        return bool(get_fact(db, _SEEN, "") == now)


def was_seen(store: SampleStore) -> bool:
    """Return whether the source was ever placed."""
    with store.database.read() as db:
        return bool(get_fact(db, _SEEN, ""))


def place_source(
    store: SampleStore,
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    sensitive: NDArray[np.bool_],
    split: NDArray[np.int64],
    *,
    is_given: bool,
    seen: str,
) -> Placed:
    """Place the samples of a source, and note what changed.

    Args:
        store: of the device.
        x: model inputs, (n, *input_shape).
        y: labels, (n,); none for a device that does not train, whose samples do not count as labelled.
        sensitive: marks by the source, (n,).
        split: places by the source, or by the hold-out of a source that gives none, (n,).
        is_given: whether the source gives the places.
        seen: of `identify_source`, before the source was read.

    Raises:
        StoreError: it cannot be noted.
    """
    digests = compute_digests(x)
    with store.database.write() as db:
        _forget_other_inputs(db, store)
        decisions = {
            (d, bool(s)): what for d, s, what in db.execute("SELECT digest, sensitive, decision FROM decisions")
        }
        marks = sensitive | np.array([decisions.get((d, False)) == "marked" for d in digests], np.bool_)
        deleted = [
            "deleted" in (decisions.get((digest, False)), decisions.get((digest, True)) if marked else None)
            for digest, marked in zip(digests, marks.tolist(), strict=True)
        ]
        keys = _number_equals(digests, marks.tolist())
        known = {(d, bool(s), n): p for d, s, n, p in db.execute("SELECT digest, sensitive, nth, place FROM places")}
        first = not get_fact(db, _SEEN, "")
        marked = {digest for digest, marked in zip(digests, marks.tolist(), strict=True) if marked}
        elsewhere = _find_places_elsewhere(db, known, marked)
        place = np.array(
            [
                known[key] if key in known else _place_new(key, part, elsewhere, trusted=is_given or first)
                for key, part in zip(keys, split.tolist(), strict=True)
            ],
            np.int64,
        )
        placed = Placed(place, marks, ~np.array(deleted, np.bool_))
        _record(db, keys, placed, y, n_new=0 if not len(y) else sum(not k[1] for k in keys if k not in known))
        save_fact(db, _SEEN, seen)
    return placed


def _number_equals(digests: list[bytes], marks: list[bool]) -> list[_Key]:
    """Return each sample's digest, mark, and number among those that are equal in both, from 0."""
    count: Counter[tuple[bytes, bool]] = Counter()
    keys = []
    for key in zip(digests, marks, strict=True):
        keys.append((*key, count[key]))
        count[key] += 1
    return keys


def _find_places_elsewhere(
    db: sqlite3.Connection, known: dict[_Key, int], marked: set[bytes]
) -> dict[tuple[bytes, bool], int]:
    """Return the places of equal samples, also in the store; of several, one that is held out.

    `marked`: the samples of the source that are marked now. One that is no longer marked keeps its place.
    """
    found: dict[tuple[bytes, bool], int] = {}
    stored = db.execute("SELECT digest, sensitive, place FROM samples WHERE label >= 0")
    before = ((digest, sensitive and digest in marked, place) for (digest, sensitive, _), place in known.items())
    for digest, sensitive, place in (*before, *stored):
        key = digest, bool(sensitive)
        found[key] = max(place, found.get(key, TRAIN))
    return found


def _place_new(key: _Key, part: int, elsewhere: dict[tuple[bytes, bool], int], *, trusted: bool) -> int:
    """Return the place of a sample that the source did not have before.

    A sample that is not sensitive goes by others that are not.
    """
    digest, sensitive, _ = key
    equal = [elsewhere[digest, marked] for marked in {False, sensitive} if (digest, marked) in elsewhere]
    if equal:
        return max(equal)
    return part if trusted else choose_place(digest)


def _forget_other_inputs(db: sqlite3.Connection, store: SampleStore) -> None:
    """Begin anew if the task makes other inputs of the same samples, for then all of them are unknown."""
    task = store.task
    inputs = "" if task is None else msgspec.json.encode((task.input_shape, task.preprocessing)).decode()
    if get_fact(db, "source_inputs", inputs) != inputs:
        db.execute("DELETE FROM places")
        db.execute("DELETE FROM facts WHERE name = ?", (_SEEN,))
    save_fact(db, "source_inputs", inputs)


def _record(db: sqlite3.Connection, keys: list[_Key], placed: Placed, y: NDArray[np.int64], *, n_new: int) -> None:
    """Note the places, and count a change of what is not sensitive."""
    places = placed.place.tolist()
    rows = [(*key, place, kept) for key, place, kept in zip(keys, places, placed.kept.tolist(), strict=True)]
    shared = placed.kept & ~placed.sensitive
    labels = y.tolist() if len(y) else [0] * len(keys)
    now = compute_digest(
        repr([(k, p, c) for k, p, c, s in zip(keys, places, labels, shared.tolist(), strict=True) if s]).encode()
    )
    db.execute("UPDATE places SET present = 0 WHERE present")
    db.executemany(
        "INSERT INTO places VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET present = excluded.present", rows
    )
    save_fact(db, "source_shared", int((shared & (placed.place == TRAIN)).sum()))
    if get_fact(db, "source", "") != now:
        save_fact(db, "source", now)
        count_change(db, arrived=n_new)


def count_shared(store: SampleStore) -> int:
    """Return the number of non-sensitive training samples, in the source and the store, |D_L|.

    Raises:
        StoreError: it cannot be read.
    """
    with store.database.read() as db:
        (stored,) = db.execute(
            f"SELECT COUNT(*) FROM samples AS s WHERE sensitive = 0 AND label >= 0 AND place = {TRAIN} "  # noqa: S608
            f"AND NOT EXISTS ({_IN_SOURCE})"
        ).fetchone()
        return int(get_fact(db, "source_shared", 0)) + int(stored)


def read_further(store: SampleStore) -> Labelled:
    """Read the labelled samples of the store that the source does not have, raw, in order of arrival.

    Raises:
        StoreError: they cannot be read.
    """
    with store.database.read() as db:
        return store.read_rows(db, f"NOT EXISTS ({_IN_SOURCE})")


def read_unlabelled(store: SampleStore) -> NDArray[Any]:
    """Read the inputs without a label, raw, (n, *input_shape), in order of arrival.

    Left out are those from before a change (`edge_agent.samples.past`), and those that would be held out once they
    have a label.

    Raises:
        StoreError: they cannot be read.
    """
    since, shape = store.load_present()[0], store.require_task().input_shape
    query = "SELECT dtype, x FROM samples WHERE label = ? AND place = ? AND number >= ? ORDER BY number"
    with store.database.read() as db:
        found = [np.frombuffer(x, kind).reshape(shape) for kind, x in db.execute(query, (UNLABELLED, TRAIN, since))]
    return np.stack(found) if found else np.zeros((0, *shape), np.float32)
