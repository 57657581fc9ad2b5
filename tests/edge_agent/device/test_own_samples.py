"""A device's samples at this moment: what is read, when it is read again, and what devices without training get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_agent.device import own_samples
from edge_agent.device.own_samples import OwnSamples
from edge_agent.samples import SampleStore
from fedge.data.classes import add_classes
from fedge.data.task import TaskSpec
from fedge.data.validation import load_validation
from fedge.errors import ConfigError
from fedge.tasks import read_device_data
from fedge.tasks.specs import BUILT_IN

TASK: TaskSpec = BUILT_IN["digits"]


def pictures(numbers: range) -> NDArray[np.float32]:
    return np.repeat(np.array(numbers, np.float32), 64).reshape(-1, 8, 8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "d.npz"
    np.savez(file, x=pictures(range(40)), y=np.arange(40) % 10, sensitive=np.arange(40) % 4 == 0)
    return file


@pytest.fixture
def own(tmp_path: Path, source: Path) -> Iterator[OwnSamples]:
    with closing(OwnSamples(TASK, tmp_path, source, seed=3, trains=True)) as own:
        yield own


def test_without_a_store_they_are_those_of_the_source_to_the_byte(own: OwnSamples, source: Path) -> None:
    assert own.read().compute_digest() == read_device_data(TASK, source, seed=3).compute_digest()


def test_nothing_is_read_again_unless_it_has_changed(own: OwnSamples, source: Path, tmp_path: Path) -> None:
    assert own.has_changed()
    own.read()
    assert not own.has_changed()
    with SampleStore(tmp_path, TASK) as store:
        number = store.add(pictures(range(99, 100))[0], 1, origin="http", sensitive=True)
        assert own.has_changed()
        assert own.read().n_train + len(own.read().y_val) <= 41
        assert not own.has_changed()
        store.mark([number or 0], sensitive=False)
        assert own.has_changed()
    own.read()
    source.touch()
    assert own.has_changed()


def test_a_source_that_is_read_once_serves_for_many_samples_that_come(
    own: OwnSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    real = own_samples.read_parts
    monkeypatch.setattr(own_samples, "read_parts", lambda *a, **k: (reads.append(1), real(*a, **k))[1])
    first = own.read()
    with SampleStore(tmp_path, TASK) as store:
        for k in range(100, 130):
            store.add(pictures(range(k, k + 1))[0], k % 10, origin="http")
            found = own.read()
    assert len(reads) == 1
    assert np.array_equal(found.x_train[: first.n_train], first.x_train)
    assert np.array_equal(found.y_val[: len(first.y_val)], first.y_val)
    assert first.n_train + len(first.y_val) < found.n_train + len(found.y_val) < 70, "some are held out for tests"


def test_the_sources_validation_samples_examine_bundles(own: OwnSamples, tmp_path: Path) -> None:
    data = own.read()
    saved = load_validation(tmp_path, TASK)
    assert saved.y is not None
    assert saved.sensitive is not None
    assert np.array_equal(saved.x, data.x_val)
    assert np.array_equal(saved.sensitive, data.marks_val)


def test_a_device_that_does_not_train_takes_inputs_that_are_not_sensitive(source: Path, tmp_path: Path) -> None:
    with closing(OwnSamples(TASK, tmp_path, source, seed=0, trains=False)) as own:
        data = own.read()
        assert data.n_train == data.n_shared == 30
        assert not (tmp_path / "validation.npz").exists()
        with SampleStore(tmp_path, TASK) as store:
            assert (store.data_version, store.n_arrived) == (1, 0)


def test_a_source_that_stays_unreadable_is_said(own: OwnSamples, source: Path) -> None:
    source.write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"d\.npz is not an \.npz file"):
        own.read()


def test_samples_of_a_class_that_nobody_knows_yet_count_once_it_has_joined(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = pictures(range(60)), np.concatenate([np.arange(40) % 10, np.full(20, 10)])
    with closing(OwnSamples(TASK, tmp_path, source, seed=3, trains=True)) as own:
        before = own.read()
        np.savez(source, x=x, y=y, sensitive=np.arange(60) % 4 == 0)
        assert own.has_changed()
        assert own.read().compute_digest() == before.compute_digest()
        assert "event=unknown_classes n=20" in caplog.text
    with closing(OwnSamples(add_classes(TASK, ("10",)), tmp_path, source, seed=3, trains=True)) as own:
        after = own.read()
    n = (after.labelled[1] == 10).sum()
    assert 0 < n <= 20, "some are held out for tests"
    assert len(after.labelled[1]) == len(before.labelled[1]) + n


def test_a_class_that_nobody_knows_is_a_mistake_at_first(tmp_path: Path, source: Path) -> None:
    np.savez(source, x=pictures(range(40)), y=np.arange(40) % 11)
    with (
        closing(OwnSamples(TASK, tmp_path, source, seed=3, trains=True)) as own,
        pytest.raises(ConfigError, match="class numbers"),
    ):
        own.read()
