"""The samples that a device has at this moment: those of its source, and those that came into its store since.

Both are read again when they have changed. Each sample stays in its place for ever (`edge_agent.samples.places`), but
what the newest ones contradict takes part in nothing, or is turned (`edge_agent.samples.past`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_agent.samples import SampleStore
from edge_agent.samples.past import SET_ASIDE, examine_past, preserve_frame, recall_frame, turn_inputs
from edge_agent.samples.sources import identify_source, place_source, read_further, was_seen
from fedge.data.preprocessing import preprocess, turn_images
from fedge.data.problems.names import HOW_TO_ADD
from fedge.data.task import TEST, TRAIN, VALIDATION, TaskSpec
from fedge.data.validation import Validation
from fedge.errors import ConfigError
from fedge.tasks import DeviceData, read_device_inputs, read_parts

log = logging.getLogger("fedge.agent")

SETTLE_S: Final = 1.0
"""Time after which a source that cannot be read, and has not changed meanwhile, is not just being written."""


class OwnSamples:
    """The samples of one device.

    Args:
        task: of the federation.
        home: the device's folder, with the store.
        source: the file or folder of `--data`.
        seed: of the hold-out, if the source says nothing about it.
        trains: whether the device trains; otherwise it needs no labels, and takes no samples from the store.

    Raises:
        ConfigError: the owner's rules are wrong, or the store holds samples of another task.
        StoreError: the store cannot be read.
    """

    def __init__(self, task: TaskSpec, home: Path, source: Path, *, seed: int, trains: bool) -> None:
        self._task, self._home, self._path, self._seed, self._trains = task, home, source, seed, trains
        self._store = SampleStore(home, task)
        self._seen, self._revision = "", -1
        self._source: DeviceData | None = None  # in memory, a part of `_data`
        self._data: DeviceData | None = None
        self._saved = ""  # version of the validation samples that were saved last

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def has_changed(self) -> bool:
        """Return whether the samples are others than at the last `read`.

        Raises:
            StoreError: the store cannot be read.
        """
        return self._data is None or self._has_source_changed() or self._store.revision != self._revision

    def _has_source_changed(self) -> bool:
        return self._source is None or identify_source(self._store, self._path) != self._seen

    def read(self) -> DeviceData:
        """Return the samples as they are now; the memory of what was read before is free unless somebody holds it.

        Raises:
            ConfigError: the samples cannot be read.
            StoreError: the store cannot be read, or the validation samples cannot be saved.
        """
        self._data = None
        if self._source is None or self._has_source_changed():
            self._source = None
            self._source = self._read_source()
        self._revision = self._store.revision
        self._source, self._data = self._join(self._source)
        return self._data

    def _read_source(self) -> DeviceData:
        """Read the source, and note where its samples belong."""
        while True:
            self._seen = identify_source(self._store, self._path)
            try:
                data = self._place_source() if self._trains else self._place_inputs()
                break
            except ConfigError:
                time.sleep(SETTLE_S)
                if identify_source(self._store, self._path) == self._seen:
                    raise
        return data

    def _place_source(self) -> DeviceData:
        # a class that nobody knows is an error at first; later one may come that joins the federation soon
        own = read_parts(self._task, self._path, seed=self._seed, only_known=was_seen(self._store))
        if own.n_unknown:
            log.warning("event=unknown_classes n=%d check=%r", own.n_unknown, HOW_TO_ADD)
        placed = place_source(
            self._store, own.x, own.y, own.sensitive, own.split, is_given=own.is_given, seen=self._seen
        )
        split = np.where(placed.kept, placed.place, TEST)  # what no step sees
        return DeviceData.from_samples(
            own.x, own.y, sensitive=placed.sensitive, split=split, converted=True, seed=self._seed
        )

    def _place_inputs(self) -> DeviceData:
        x = read_device_inputs(self._task, self._path)
        split, marks, labels = np.full(len(x), TRAIN), np.zeros(len(x), np.bool_), np.zeros(0, np.int64)
        placed = place_source(self._store, x, labels, marks, split, is_given=True, seen=self._seen)
        return DeviceData.from_inputs(x[placed.kept & ~placed.sensitive])

    def _join(self, source: DeviceData) -> tuple[DeviceData, DeviceData]:
        """Return the source's samples, and these with what came since and without what the newest contradict.

        The validation samples are saved to examine bundles with: the source's, or all that hold after a contradiction.
        """
        found = read_further(self._store) if self._trains else None
        if found is None or not len(found.y):
            self._save_validation(source, self._seen)
            return source, source
        x = preprocess(self._task, found.x)
        further = DeviceData.from_samples(
            x, found.y, sensitive=found.sensitive, split=found.place, converted=True, seed=self._seed
        )
        both, own = source.join(further)
        arrived = _InOrder.from_parts(both, own, found.place)
        turns, now = self._examine(arrived, found.number[found.place != TEST])
        if not turns.any():
            self._save_validation(own, self._seen)
            return own, both
        held = arrived.hold(turns, now, seed=self._seed)
        self._save_validation(held, f"{self._seen} {self._revision}")
        return source, held

    def _examine(self, arrived: _InOrder, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Return how samples are turned or set aside, and what the device sees now, and note where that begins.

        `numbers`: those of the stored samples, which came last.
        """
        if not self._task.problem.RIGHT_OR_WRONG:  # what is not of one class contradicts nothing
            return np.zeros(len(arrived.rows), np.int64), 0
        noted, noted_quarters = self._store.load_present()
        known = arrived.n_source + int((numbers < noted).sum()) if noted else 0
        marks = arrived.sensitive
        quarters = examine_past(arrived, arrived.y, marks, begun_with=arrived.n_source, known=known)
        if not quarters.any() and (recalled := recall_frame(marks, known, noted_quarters)) is not None:
            return recalled, noted_quarters
        turns, now = preserve_frame(quarters)
        past = np.flatnonzero(quarters)
        begins = int(past[-1]) + 1 - arrived.n_source if len(past) else 0
        self._store.save_present(int(numbers[begins]) if len(past) else 0, now)
        return turns, now

    def _save_validation(self, data: DeviceData, version: str) -> None:
        """Save the validation samples, as the device sees them now, if this version of them is not saved yet."""
        if self._trains and version != self._saved:
            Validation(turn_images(data.x_val, -data.quarters % 4), data.y_val, data.marks_val).save(self._home)
            self._saved = version


@dataclass(frozen=True, slots=True)
class _InOrder:
    """Samples in order of arrival, of which `rows` says where they are in the data, training before validation."""

    data: DeviceData
    rows: NDArray[np.int64]
    n_source: int

    @classmethod
    def from_parts(cls, both: DeviceData, source: DeviceData, place: NDArray[np.int64]) -> _InOrder:
        """Order the source's samples, then those in these places that came since, but not those for tests."""
        n, m, n_train = source.n_train, len(source.y_val), both.n_train
        further = np.where(place == TRAIN, n + np.cumsum(place == TRAIN) - 1, 0)
        held_out = place == VALIDATION
        further[held_out] = n_train + m + np.arange(held_out.sum())
        rows = np.concatenate([np.arange(n), n_train + np.arange(m), further[place != TEST]])
        return cls(both, rows, n + m)

    def __getitem__(self, numbers: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Return the model inputs of some samples, by number in order of arrival."""
        rows, n = self.rows[numbers], self.data.n_train
        x = np.empty((len(rows), *self.data.x_train.shape[1:]), np.float32)
        x[rows < n] = self.data.x_train[rows[rows < n]]
        x[rows >= n] = self.data.x_val[rows[rows >= n] - n]
        return x

    @property
    def y(self) -> NDArray[np.int64]:
        """The labels."""
        labels: NDArray[np.int64] = np.concatenate([self.data.y_train, self.data.y_val])[self.rows]
        return labels

    @property
    def sensitive(self) -> NDArray[np.bool_]:
        """The marks."""
        marks: NDArray[np.bool_] = np.concatenate([self.data.sensitive, self.data.marks_val])[self.rows]
        return marks

    def hold(self, turns: NDArray[np.int64], now: int, *, seed: int) -> DeviceData:
        """Make the data of what is not set aside, turned; what the device sees now is turned by `now` quarters."""
        held = np.flatnonzero(turns != SET_ASIDE)
        split = np.where(self.rows[held] < self.data.n_train, TRAIN, VALIDATION)
        x = turn_inputs(self[held], turns[held])
        data = DeviceData.from_samples(x, self.y[held], sensitive=self.sensitive[held], split=split, seed=seed)
        return replace(data, quarters=now)
