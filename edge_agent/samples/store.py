"""A device's store of samples, HOME/samples, which agent, runtime and commands share.

    with SampleStore(home, task) as store:
        store.add(x, 3, origin="python")

A sample is *raw*, as the runtime takes it for `predict` and before preprocessing, everywhere in this module. What `add`
has returned from is on the disk. A sample counts once: the same input with the same label is known already. Of
other targets than classes, such as numbers or masks, a newer one of the same input takes the place of the older one.

What goes first when the store is full: the oldest sample of the class (or group, `Problem.find_group`) that exceeds its
limit, or of the fullest class
if all together are too many bytes. A share of each class (`keep_old`) is exempt: an even choice of all its samples that
ever came, which guards what was learned before. Sensitive samples have limits of their own, so they shape nothing about
the others.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_agent.samples import answers
from edge_agent.samples.answers import AnswerCount, Answered
from edge_agent.samples.database import OVERHEAD, TARGETS, UNLABELLED, Database, get_fact, save_fact
from edge_agent.samples.places import choose_place, compute_digests, compute_rank
from edge_agent.samples.rules import read_rules, require_classes
from fedge.data.classes import has_grown
from fedge.data.preprocessing import choose_input_precision, preprocess, reshape_samples
from fedge.data.problems.names import HOW_TO_ADD
from fedge.data.problems.problem import Problem
from fedge.data.task import TRAIN, TaskSpec
from fedge.errors import MALFORMED, ConfigError, DamagedError, raise_as

MAX_REMEMBERED_BYTES: Final = 32 << 20
"""Most bytes of recent requests whose labels may still come."""

_PRESENT: Final = "present"
_QUARTERS: Final = "quarters"
_COLUMNS: Final = "number, label, sensitive, place, at, origin, size"


@dataclass(frozen=True, slots=True)
class Labelled:
    """Labelled samples in order of arrival: raw x (n, ...), converted targets y (n, ...), and (n,) of all else."""

    x: NDArray[Any]
    y: NDArray[Any]
    sensitive: NDArray[np.bool_]
    place: NDArray[np.int64]
    at: NDArray[np.float64]
    number: NDArray[np.int64]


class Sample(Struct, frozen=True, kw_only=True):
    """What is known of a sample besides its numbers; `label` is its class or group, None without a target.

    `size` is its bytes on the disk.
    """

    number: int
    label: int | None
    sensitive: bool
    place: int
    at: float
    origin: str
    size: int


class Total(Struct, frozen=True, kw_only=True):
    """How many samples of a class there are, and their bytes; `label` is None for inputs without a label."""

    label: int | None
    sensitive: bool
    n: int
    size: int


class SampleStore:
    """The samples of one home. Several processes and threads may use it at once. Context manager."""

    def __init__(self, home: Path, task: TaskSpec | None = None) -> None:
        """Open or create the store; without a `task`, the store has the one with which it was opened before.

        Raises:
            ConfigError: the owner's rules are wrong, or the store holds samples of another task.
            StoreError: the store cannot be read or written.
        """
        self.rules = read_rules(home)
        self.database = Database(home)
        try:
            self.task = self._settle_task(task)
            if self.task is not None:
                require_classes(self.rules, self.task.problem.list_names())
                self._make_room_for_targets(self.task.problem)
        except BaseException:
            self.database.close()
            raise
        self._recent: OrderedDict[str, tuple[NDArray[Any], Answered | None]] = OrderedDict()
        self._recent_bytes = 0
        self._remembering = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store."""
        self.database.close()

    def _make_room_for_targets(self, problem: Problem) -> None:
        """Make the table of targets if the task needs it."""
        if not problem.GROUPED:
            with self.database.write() as db:
                for statement in TARGETS:
                    db.execute(statement)

    def _settle_task(self, task: TaskSpec | None) -> TaskSpec | None:
        """Return the task with which samples are read, and note one that has more classes than the noted one.

        If the noted one has further classes, which have joined the federation, samples are read with these.
        """
        with self.database.write() as db:
            noted = get_fact(db, "task", "")
            with raise_as(DamagedError, f"{self.database.file} is damaged, move it away to begin anew", on=MALFORMED):
                before = msgspec.json.decode(str(noted), type=TaskSpec) if noted else None
            if task is None:
                return before
            is_empty = not db.execute("SELECT 1 FROM samples LIMIT 1").fetchall()
            if before is None or is_empty or len(task.classes) > len(before.classes):
                save_fact(db, "task", msgspec.json.encode(task).decode())
            if before is not None and not is_empty:
                _require_same_samples(before, task)
                return before if has_grown(task, before) else task
        return task

    def refresh_task(self) -> TaskSpec:
        """Return the task of the samples as it is now, after classes may have joined in another process.

        Raises:
            ConfigError: the store was never opened with a task.
            StoreError: it cannot be read.
        """
        with self.database.read() as db:
            noted = msgspec.json.decode(str(get_fact(db, "task", "null")), type=TaskSpec | None)
        if noted is not None and (self.task is None or has_grown(self.task, noted)):
            self.task = noted
        return self.require_task()

    def _find_class(self, label: int) -> str:
        """Return the name of a class.

        Raises:
            ConfigError: there is no class of this number.
        """
        names = self.require_task().problem.name_groups()
        if label >= len(names):
            names = self.refresh_task().problem.name_groups()
        if not 0 <= label < len(names):
            raise ConfigError(f"the label {label} is not one of the {len(names)} classes; {HOW_TO_ADD}")
        return names[label]

    def _find_group(self, target: int | NDArray[Any]) -> tuple[int, tuple[str, ...]]:
        """Return the class or group of a target, and the names of the classes that it has.

        Raises:
            ConfigError: there is no such class, or the target does not fit the task.
        """
        task = self.require_task()
        if task.problem.GROUPED:
            return int(target), (self._find_class(int(target)),)
        found = np.asarray(target)
        task.problem.check_targets(found[np.newaxis], 1, task.input_shape)
        return task.problem.find_group(found), task.problem.find_names(found)

    def convert_target(self, value: Any) -> NDArray[Any]:
        """Return a target as `add` takes it, of one in its own units: a number, names of labels, a mask, and so on.

        Raises:
            ConfigError: it does not fit the task; the text says what to give.
        """
        task = self.require_task()
        return task.problem.read_target(value, task.input_shape)

    # ------------------------------------------------------------------------------------------------------ arriving

    def add(
        self,
        x: NDArray[Any],
        target: int | NDArray[Any] | None,
        *,
        origin: str,
        sensitive: bool = False,
        answered: Answered | None = None,
        at: float | None = None,
    ) -> int | None:
        """Add a raw sample; it is on the disk when this returns.

        Args:
            x: one sample in a shape that `predict` takes, without a batch axis.
            target: its class number, or the target that `convert_target` returns; None for an input without one, which
                is kept only if the owner says so.
            origin: where it came from: a word, or `word:path`.
            sensitive: whether it is marked; the owner's rules may mark it, too.
            answered: what the bundle in service had answered, for the score at work.
            at: seconds since the epoch; now if None.

        Returns:
            The sample's number, or None if it is known already, was deleted by the owner, or is not to be kept.

        Raises:
            ConfigError: the sample does not fit the task or the limits, or the owner's predicate fails.
            StoreError: it cannot be written.
        """
        if target is None and not self.keeps_unlabelled:
            return None
        group, names = (UNLABELLED, ()) if target is None else self._find_group(target)
        shaped, digest = self._prepare(self.require_task(), x)
        marked = sensitive or self.rules.is_sensitive(shaped, names, origin)
        now = time.time() if at is None else at
        with self.database.write() as db:
            decisions = _find_decisions(db, digest)
            marked = marked or decisions.get(False) == "marked"
            if "deleted" in {decisions.get(False), decisions.get(True) if marked else None}:
                return None
            if answered is not None and target is not None:
                answers.record_answer(db, digest, group, answered, sensitive=marked, at=now)
            own = None if target is None or self.require_task().problem.GROUPED else np.asarray(target)
            return self._insert(db, shaped, digest, group, marked, now, origin, own)

    def _insert(
        self,
        db: sqlite3.Connection,
        x: NDArray[Any],
        digest: bytes,
        label: int,
        sensitive: bool,
        at: float,
        origin: str,
        target: NDArray[Any] | None,
    ) -> int | None:
        known = "SELECT number FROM samples WHERE digest = ? AND sensitive = ? AND (label = ? OR ? = -1)"
        found = db.execute(known, (digest, sensitive, label, label)).fetchone()
        if found and (target is None or _read_target(db, found[0]) == (target.dtype.str, target.tobytes())):
            return None
        before = "DELETE FROM samples WHERE digest = ? AND sensitive = ?" + " AND label = -1" * (target is None)
        db.execute(before, (digest, sensitive))
        place = find_place(db, digest, sensitive=sensitive)
        size = x.nbytes + OVERHEAD + (0 if target is None else target.nbytes)
        row = digest, compute_rank(digest), label, sensitive, place, at, origin, size, x.dtype.str
        columns = "digest, rank, label, sensitive, place, at, origin, size, dtype, x"
        number = db.execute(
            f"INSERT INTO samples ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608 - our own names
            (*row, x.tobytes()),
        ).lastrowid
        if target is not None:
            db.execute("INSERT INTO targets VALUES (?, ?, ?)", (number, target.dtype.str, target.tobytes()))
        if label != UNLABELLED:
            count_change(db, arrived=1, sensitive=sensitive)
        self._make_room(db, label, sensitive)
        return number

    def _make_room(self, db: sqlite3.Connection, label: int, sensitive: bool) -> None:
        """Delete what goes first until the limits are kept."""
        limits, labelled = self.rules.settings, label != UNLABELLED
        while True:
            rows = db.execute("SELECT label, n, size FROM totals WHERE sensitive = ?", (sensitive,)).fetchall()
            found = {label: (n, size) for label, n, size in rows if (label != UNLABELLED) == labelled}
            full, own = max(found, key=lambda label: found[label][0]), found[label][0]
            if own > (limits.per_class if labelled else limits.unlabelled):
                full = label
            elif sum(size for _, size in found.values()) <= self.rules.max_bytes:
                return
            db.execute(
                "DELETE FROM samples WHERE number = (SELECT number FROM samples WHERE sensitive = ?1 AND label = ?2 "
                "AND number NOT IN "
                "(SELECT number FROM samples WHERE sensitive = ?1 AND label = ?2 ORDER BY rank LIMIT ?3) "
                "ORDER BY number LIMIT 1)",
                (sensitive, full, int(limits.keep_old * (found[full][0] - 1))),
            )

    def _prepare(self, task: TaskSpec, x: NDArray[Any]) -> tuple[NDArray[Any], bytes]:
        """Return a sample as it is kept, (*input_shape), with its digest."""
        x = np.asarray(x)
        digest = compute_digests(preprocess(task, x[np.newaxis]))[0]
        kept = reshape_samples(task.input_shape, x[np.newaxis])[0]
        if kept.nbytes + OVERHEAD > self.rules.max_bytes:
            raise ConfigError(f"a sample of {kept.nbytes / 1e6:.1f} MB is more than max_mb of samples.toml")
        if task.preprocessing.image_mode and kept.dtype != np.uint8:
            with np.errstate(invalid="ignore"):  # what is no pixel stays as it is
                pixels = kept.astype(np.uint8)
            kept = pixels if np.array_equal(pixels, kept) else kept
        if kept.dtype.kind == "f":
            kept = kept.astype(choose_input_precision(task))
        return np.ascontiguousarray(kept), digest

    def require_task(self) -> TaskSpec:
        """Return the task of the samples.

        Raises:
            ConfigError: the store was never opened with one.
        """
        if self.task is None:
            raise ConfigError(
                "the store does not know the task yet: start `fedge agent` or `fedge serve` with this --home once"
            )
        return self.task

    @property
    def keeps_unlabelled(self) -> bool:
        """Whether the owner wants inputs without a label to be kept."""
        return self.rules.settings.unlabelled > 0

    # ------------------------------------------------------------------------------------------------ labels that come

    def remember(self, request: str, x: NDArray[Any], answered: Answered | None) -> None:
        """Remember a request in this process, so that its target may come later (`add_target`); the oldest go first."""
        kept = np.array(x)
        with self._remembering:
            self._forget(request)
            self._recent[request] = kept, answered
            self._recent_bytes += kept.nbytes + OVERHEAD
            while self._recent_bytes > MAX_REMEMBERED_BYTES:
                self._forget(next(iter(self._recent)))

    def _forget(self, request: str) -> None:
        found = self._recent.pop(request, None)
        if found is not None:
            self._recent_bytes -= found[0].nbytes + OVERHEAD

    def add_target(
        self, request: str, target: int | NDArray[Any], *, origin: str = "feedback", sensitive: bool = False
    ) -> bool:
        """Add the sample of an earlier request with its target, as `add` takes it; return False if it has gone.

        Raises:
            ConfigError, StoreError: as `add`; the request is still remembered.
        """
        with self._remembering:
            found = self._recent.get(request)
        if found is None:
            return False
        self.add(found[0], target, origin=origin, sensitive=sensitive, answered=found[1])
        return True

    def set_label(self, number: int, label: int) -> None:
        """Give a sample in the store this label, its first one or a right one.

        Raises:
            ConfigError: there is no such sample or class, or the owner's predicate fails.
            StoreError: it cannot be written.
        """
        name = self._find_class(label)
        sample, x = self.read_sample(number), self.read_input(number)
        marked = sample.sensitive or self.rules.is_sensitive(x, (name,), sample.origin)
        with self.database.write() as db:
            for digest, before, sensitive in _iterate_keys(db, [number]):
                _move(db, digest, before, sensitive=sensitive, to_label=label, to_sensitive=marked)
                self._make_room(db, label, marked)

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def data_version(self) -> int:
        """A number that rises whenever the non-sensitive labelled samples, here or in the source, have changed."""
        return self._get_count("data_version")

    @property
    def n_arrived(self) -> int:
        """The number of non-sensitive labelled samples that ever came; it never falls."""
        return self._get_count("n_arrived")

    @property
    def revision(self) -> int:
        """A number that changes whenever anything in the store has, also sensitive samples; it stays here."""
        with self.database.read() as db:
            (count,) = db.execute(
                "SELECT TOTAL(value) FROM facts WHERE name IN ('data_version', 'sensitive')"
            ).fetchone()
            return int(count)

    def _get_count(self, name: str) -> int:
        with self.database.read() as db:
            return int(get_fact(db, name, 0))

    def read_labelled(self) -> Labelled:
        """Read all labelled samples, raw, in order of arrival.

        Raises:
            StoreError: they cannot be read.
        """
        with self.database.read() as db:
            return self.read_rows(db, "TRUE")

    def read_newest(self, n: int) -> Labelled:
        """Read n labelled samples, raw: the newest held out for validation or test, then the newest others.

        They come in order of arrival; nothing has trained on those that are held out. Of sensitive samples there are n
        more. What newer ones contradict (`edge_agent.samples.past`) is left out.

        Raises:
            StoreError: they cannot be read.
        """
        newest = (
            "SELECT number FROM samples WHERE label >= 0 AND sensitive = ? AND number >= ? "
            "ORDER BY place = ?, number DESC LIMIT ?"
        )
        with self.database.read() as db:
            since = get_fact(db, _PRESENT, 0)
            numbers = [str(number) for marked in (0, 1) for (number,) in db.execute(newest, (marked, since, TRAIN, n))]
            return self.read_rows(db, f"number IN ({', '.join(numbers)})")

    def load_present(self) -> tuple[int, int]:
        """Return the number of the first sample after what newer ones contradict, and by how many quarters they turned.

        Raises:
            StoreError: it cannot be read.
        """
        with self.database.read() as db:
            return int(get_fact(db, _PRESENT, 0)), int(get_fact(db, _QUARTERS, 0))

    def save_present(self, number: int, quarters: int) -> None:
        """Note what `load_present` returns; 0 and 0 if samples contradict nothing.

        Raises:
            StoreError: it cannot be written.
        """
        if self.load_present() != (number, quarters):
            with self.database.write() as db:
                save_fact(db, _PRESENT, number)
                save_fact(db, _QUARTERS, quarters)

    def read_rows(self, db: sqlite3.Connection, where: str) -> Labelled:
        """Read the labelled samples of a condition into arrays, one row after the other."""
        shape = () if self.task is None else self.task.input_shape
        problem = None if self.task is None or self.task.problem.GROUPED else self.task.problem
        source = f"FROM samples AS s WHERE label >= 0 AND {where}"
        kinds = db.execute(f"SELECT dtype, COUNT(*) {source} GROUP BY dtype").fetchall()
        n = sum(count for _, count in kinds)
        x = np.empty((n, *shape), np.result_type(*(kind for kind, _ in kinds)) if kinds else np.float32)
        labels, place, number = (np.empty(n, np.int64) for _ in range(3))
        y = labels if problem is None else _read_targets(db, source, problem.make_no_targets(shape))
        found = Labelled(x, y, np.empty(n, np.bool_), place, np.empty(n), number)
        columns = labels, found.sensitive, found.place, found.at, found.number
        rows = db.execute(f"SELECT label, sensitive, place, at, number, dtype, x {source} ORDER BY number")
        for i, (*values, dtype, data) in enumerate(rows):
            x[i] = np.frombuffer(data, dtype).reshape(shape)
            for column, value in zip(columns, values, strict=True):
                column[i] = value
        return found

    def count_answers(
        self, *, since: float = 0.0, every_s: float = answers.DAY_S, with_sensitive: bool = False
    ) -> list[AnswerCount]:
        """Count right and wrong answers among those labelled later, by class, release and time.

        Those to sensitive samples are left out, as nothing about them may leave, unless `with_sensitive`.

        Raises:
            StoreError: they cannot be read.
        """
        with self.database.read() as db:
            return answers.count_by_class(db, since=since, every_s=every_s, with_sensitive=with_sensitive)

    def count_recent_answers(
        self, n: int, *, release: int | None = None, with_sensitive: bool = False
    ) -> tuple[int, int]:
        """Return how many of the newest n answers labelled later, of a release if given, were right and wrong.

        Raises:
            StoreError: they cannot be read.
        """
        with self.database.read() as db:
            return answers.count_newest(db, n, release=release, with_sensitive=with_sensitive)

    def count_samples(self) -> list[Total]:
        """Count the samples by class, those without a label last.

        Raises:
            StoreError: they cannot be read.
        """
        with self.database.read() as db:
            rows = db.execute(
                "SELECT label, sensitive, n, size FROM totals WHERE n ORDER BY label < 0, label, sensitive"
            )
            return [Total(label=_get_label(label), sensitive=bool(s), n=n, size=size) for label, s, n, size in rows]

    def list_samples(
        self, *, label: int | None = None, labelled: bool | None = None, before: int | None = None, limit: int = 50
    ) -> list[Sample]:
        """List the newest samples: of a class, with or without a label, and of smaller numbers than `before`.

        Raises:
            StoreError: they cannot be read.
        """
        with self.database.read() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM samples WHERE (? IS NULL OR label = ?) AND (? IS NULL OR (label >= 0) = ?) "  # noqa: S608
                "AND (? IS NULL OR number < ?) ORDER BY number DESC LIMIT ?",
                (label, label, labelled, labelled, before, before, limit),
            )
            return [_make_sample(row) for row in rows]

    def read_sample(self, number: int) -> Sample:
        """Read what is known of a sample.

        Raises:
            ConfigError: there is no such sample.
            StoreError: it cannot be read.
        """
        with self.database.read() as db:
            row = db.execute(f"SELECT {_COLUMNS} FROM samples WHERE number = ?", (number,)).fetchone()  # noqa: S608
        if row is None:
            raise ConfigError(f"there is no sample {number}: `fedge samples list` shows those that there are")
        return _make_sample(row)

    def read_input(self, number: int) -> NDArray[Any]:
        """Read a sample's numbers, raw, (*input_shape).

        Raises:
            ConfigError: there is no such sample.
            StoreError: it cannot be read.
        """
        shape = self.require_task().input_shape
        with self.database.read() as db:
            row = db.execute("SELECT dtype, x FROM samples WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise ConfigError(f"there is no sample {number}: `fedge samples list` shows those that there are")
        return np.frombuffer(row[1], row[0]).reshape(shape)

    def read_target(self, number: int) -> NDArray[Any] | None:
        """Read a sample's converted target, None without one.

        Raises:
            ConfigError: there is no such sample.
            StoreError: it cannot be read.
        """
        label, problem = self.read_sample(number).label, self.require_task().problem
        if label is None or problem.GROUPED:
            return None if label is None else np.asarray(label)
        with self.database.read() as db:
            dtype, data = _read_target(db, number)
        return np.frombuffer(data, dtype).reshape(problem.get_target_shape(self.require_task().input_shape))

    def _find_names(self, number: int) -> tuple[str, ...]:
        """Return the names of the classes that a sample has; none without a target."""
        target = self.read_target(number)
        return () if target is None else self.require_task().problem.find_names(target)

    # ------------------------------------------------------------------------------------------- what the owner decides

    def mark(self, numbers: Sequence[int], *, sensitive: bool = True) -> int:
        """Mark samples as sensitive, or take the marks away; return how many changed.

        A marked sample stays marked when it comes again.

        Raises:
            StoreError: it cannot be written.
        """
        n = 0
        with self.database.write() as db:
            for digest, label, before in _iterate_keys(db, numbers):
                if before == sensitive:
                    continue
                n += 1
                _move(db, digest, label, sensitive=before, to_label=label, to_sensitive=sensitive)
                db.execute("DELETE FROM decisions WHERE digest = ? AND decision = 'marked'", (digest,))
                if sensitive:
                    db.execute("INSERT OR REPLACE INTO decisions VALUES (?, 0, 'marked')", (digest,))
                self._make_room(db, label, sensitive)
                _count_decision(db)
        return n

    def apply_rules(self) -> int:
        """Mark the samples that the owner's present rules call sensitive; return how many.

        Raises:
            ConfigError: the owner's predicate fails.
            StoreError: it cannot be written.
        """
        marked, before = 0, None
        while page := self.list_samples(before=before, limit=200):
            before = page[-1].number
            numbers = [
                sample.number
                for sample in page
                if self.rules.is_sensitive(
                    self.read_input(sample.number), self._find_names(sample.number), sample.origin
                )
            ]
            marked += self.mark(numbers)
        return marked

    def delete(self, numbers: Sequence[int]) -> int:
        """Delete samples for good, with what was answered to them; return how many.

        They do not come back when they arrive again, and those in the device's source do not count any more either.

        Raises:
            StoreError: it cannot be written.
        """
        n = 0
        with self.database.write() as db:
            for digest, _, sensitive in _iterate_keys(db, numbers):
                n += 1
                for table in ("samples", "answers"):
                    db.execute(f"DELETE FROM {table} WHERE digest = ? AND sensitive = ?", (digest, sensitive))  # noqa: S608
                db.execute("INSERT OR REPLACE INTO decisions VALUES (?, ?, 'deleted')", (digest, sensitive))
                count_change(db, sensitive=sensitive)
                _count_decision(db)
        self.database.erase()
        return n


def find_place(db: sqlite3.Connection, digest: bytes, *, sensitive: bool) -> int:
    """Return the place of a sample that arrives: that of the same sample in the source, else its digest's.

    Of several, one that is held out counts. A place of sensitive samples says nothing about others.
    """
    rows = db.execute("SELECT MAX(place) FROM places WHERE digest = ? AND sensitive <= ?", (digest, sensitive))
    (known,) = rows.fetchone()
    return choose_place(digest) if known is None else int(known)


def count_change(db: sqlite3.Connection, *, arrived: int = 0, sensitive: bool = False) -> None:
    """Count a change of labelled samples and, of those that are not sensitive, how many came."""
    name = "sensitive" if sensitive else "data_version"
    save_fact(db, name, int(get_fact(db, name, 0)) + 1)
    if arrived and not sensitive:
        save_fact(db, "n_arrived", int(get_fact(db, "n_arrived", 0)) + arrived)


def _read_target(db: sqlite3.Connection, number: int) -> tuple[str, bytes]:
    """Read the type and bytes of a sample's target from the table of targets."""
    dtype, data = db.execute("SELECT dtype, target FROM targets WHERE number = ?", (number,)).fetchone()
    return dtype, data


def _read_targets(db: sqlite3.Connection, source: str, none: NDArray[Any]) -> NDArray[Any]:
    """Read the targets of selected samples, (n, ...), in order of their numbers; `none` are those of no samples."""
    rows = db.execute(
        "SELECT dtype, target FROM targets WHERE number IN "  # noqa: S608 - our own names
        f"(SELECT number {source}) ORDER BY number"
    ).fetchall()
    return np.stack([np.frombuffer(t, d).reshape(none.shape[1:]) for d, t in rows]) if rows else none


def _move(
    db: sqlite3.Connection, digest: bytes, label: int, *, sensitive: bool, to_label: int, to_sensitive: bool
) -> None:
    """Give a sample another label or mark, with the answers to it, in the place that it has."""
    db.execute(
        "INSERT OR IGNORE INTO places SELECT digest, ?, nth, place, 0 FROM places WHERE digest = ? AND sensitive = ?",
        (to_sensitive, digest, sensitive),
    )
    db.execute(
        "UPDATE OR REPLACE samples SET label = ?, sensitive = ? WHERE digest = ? AND label = ? AND sensitive = ?",
        (to_label, to_sensitive, digest, label, sensitive),
    )
    answers.move_answers(db, digest, label, sensitive=sensitive, to_label=to_label, to_sensitive=to_sensitive)
    if to_label == UNLABELLED:
        return
    came = label == UNLABELLED or sensitive > to_sensitive
    if sensitive != to_sensitive:
        count_change(db, sensitive=sensitive)
    count_change(db, arrived=came, sensitive=to_sensitive)


def _count_decision(db: sqlite3.Connection) -> None:
    """Count a decision of the owner, which may concern samples of the source, too."""
    save_fact(db, "decisions", int(get_fact(db, "decisions", 0)) + 1)


def _require_same_samples(before: TaskSpec, task: TaskSpec) -> None:
    """Refuse a task whose samples are others, in words."""
    if before.asked != task.asked:
        raise ConfigError(
            f"HOME/samples holds samples of {before.problem.NAME} with other targets than those of this task "
            f"({task.problem.NAME}): give another --home, or move the folder away"
        )
    n = min(len(before.classes), len(task.classes))
    if before.classes[:n] != task.classes[:n]:
        raise ConfigError(
            f"HOME/samples holds samples of the classes {', '.join(before.classes)}, and the task has "
            f"{', '.join(task.classes)}: give another --home, or move the folder away"
        )
    if before.input_shape != task.input_shape:
        raise ConfigError(
            f"HOME/samples holds samples of shape {before.input_shape}, and the task has {task.input_shape}: give "
            "another --home, or move the folder away"
        )


def _find_decisions(db: sqlite3.Connection, digest: bytes) -> dict[bool, str]:
    """Return what the owner decided on a sample, by whether it was sensitive."""
    rows = db.execute("SELECT sensitive, decision FROM decisions WHERE digest = ?", (digest,))
    return {bool(sensitive): decision for sensitive, decision in rows}


def _iterate_keys(db: sqlite3.Connection, numbers: Sequence[int]) -> Iterator[tuple[bytes, int, bool]]:
    """Yield digest, label and mark of the samples that there are."""
    for number in numbers:
        row = db.execute("SELECT digest, label, sensitive FROM samples WHERE number = ?", (number,)).fetchone()
        if row is not None:
            yield row[0], row[1], bool(row[2])


def _get_label(label: int) -> int | None:
    return None if label == UNLABELLED else label


def _make_sample(row: Sequence[Any]) -> Sample:
    number, label, sensitive, place, at, origin, size = row
    return Sample(
        number=number,
        label=_get_label(label),
        sensitive=bool(sensitive),
        place=place,
        at=at,
        origin=origin,
        size=size,
    )
