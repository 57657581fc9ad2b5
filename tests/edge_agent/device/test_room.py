"""Updates in memory and on the disk: whoever reads them sees the same numbers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edge_agent.device.room import StoredUpdate, UpdateStore
from fedge.errors import StoreError
from fedge.tensors.layout import Model
from tests.deploy.faults import no_room


def update(seed: int, d: int = 1000) -> Model:
    rng = np.random.default_rng(seed)
    return Model(rng.standard_normal(d, np.float32), rng.standard_normal(3, np.float32), np.array([seed]))


def same(a: Model, b: Model) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("params", "buffers", "counters"))


def test_what_memory_does_not_hold_is_read_from_the_disk_bit_for_bit() -> None:
    room, updates = UpdateStore(2 * 4000), [update(seed) for seed in range(5)]
    kept = [room.store(own) for own in updates]
    assert [isinstance(own, StoredUpdate) for own in kept] == [False, False, True, True, True]
    for own, stored in zip(updates[2:], kept[2:], strict=True):
        assert isinstance(stored, StoredUpdate)
        assert same(stored.read(), own)
        assert not stored.read().params.flags.writeable


def test_threads_keep_and_read_at_the_same_time() -> None:
    room, updates = UpdateStore(0), [update(seed) for seed in range(200)]

    def kept_and_read(own: Model) -> Model:
        stored = room.store(own)
        assert isinstance(stored, StoredUpdate)
        return stored.read()

    with ThreadPoolExecutor(4) as threads:
        assert all(map(same, threads.map(kept_and_read, updates), updates))


def test_zeros_take_no_room() -> None:
    stored = UpdateStore(0).store(Model(np.zeros(100_000, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64)))
    assert isinstance(stored, StoredUpdate)
    assert stored.size_bytes < 100


def test_the_file_has_no_name_and_goes_with_the_last_update() -> None:
    room = UpdateStore(0)
    kept = room.store(update(0))
    assert isinstance(kept, StoredUpdate)
    number = kept.file._number
    assert str(Path(f"/proc/self/fd/{number}").readlink()).endswith(" (deleted)")
    del room
    assert same(kept.read(), update(0))
    del kept
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_full_disk_stops_the_simulation() -> None:
    with no_room(), pytest.raises(StoreError, match="File too large"):
        UpdateStore(0).store(update(0))
