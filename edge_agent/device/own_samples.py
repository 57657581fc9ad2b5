"""The samples that a device has at this moment: those of its source, and those that came into its store since.

Both are read again when they have changed. Each sample stays in its place for ever (`edge_agent.samples.places`).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

import numpy as np

from edge_agent.samples import SampleStore
from edge_agent.samples.sources import identify_source, place_source, read_further, was_seen
from fedge.data.classes import HOW_TO_ADD
from fedge.data.preprocessing import preprocess
from fedge.data.task import TEST, TRAIN, TaskSpec
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
        """Read the source, note where its samples belong, and save its validation samples to examine bundles with."""
        while True:
            self._seen = identify_source(self._store, self._path)
            try:
                data = self._place_source() if self._trains else self._place_inputs()
                break
            except ConfigError:
                time.sleep(SETTLE_S)
                if identify_source(self._store, self._path) == self._seen:
                    raise
        if self._trains:
            Validation(data.x_val, data.y_val, data.marks_val).save(self._home)
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
        return DeviceData.from_samples(own.x, own.y, sensitive=placed.sensitive, split=split, seed=self._seed)

    def _place_inputs(self) -> DeviceData:
        x = read_device_inputs(self._task, self._path)
        split, marks, labels = np.full(len(x), TRAIN), np.zeros(len(x), np.bool_), np.zeros(0, np.int64)
        placed = place_source(self._store, x, labels, marks, split, is_given=True, seen=self._seen)
        return DeviceData.from_inputs(x[placed.kept & ~placed.sensitive])

    def _join(self, source: DeviceData) -> tuple[DeviceData, DeviceData]:
        """Return the source's samples, and these with what came since."""
        found = read_further(self._store) if self._trains else None
        if found is None or not len(found.y):
            return source, source
        x = preprocess(self._task, found.x)
        further = DeviceData.from_samples(x, found.y, sensitive=found.sensitive, split=found.place, seed=self._seed)
        both, own = source.join(further)
        return own, both
