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
from fedge.data.preprocessing import preprocess
from fedge.data.task import TRAIN, VALIDATION, TaskSpec
from fedge.data.validation import load_validation
from fedge.errors import ConfigError
from fedge.tasks import load_pool, read_device_data
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


# -------------------------------------------------------------------------------- what the newest samples contradict


POOL = load_pool("digits", limit=220)


@pytest.fixture
def camera(tmp_path: Path) -> Iterator[OwnSamples]:
    """A camera that began with 100 digits, every tenth of them sensitive."""
    file = tmp_path / "camera.npz"
    np.savez(file, x=POOL.x[:100], y=POOL.y[:100], sensitive=np.arange(100) % 10 == 0)
    with closing(OwnSamples(TASK, tmp_path, file, seed=3, trains=True)) as own:
        yield own


def collect(home: Path, numbers: range, quarters: int, *, mirrored: bool = False) -> None:
    with SampleStore(home, TASK) as store:
        for k in numbers:
            x = np.rot90(POOL.x[k], quarters)
            store.add(x[:, ::-1] if mirrored else x, int(POOL.y[k]), origin="http")


def test_a_turned_camera_goes_on_as_before_and_turns_back_what_it_sees(camera: OwnSamples, tmp_path: Path) -> None:
    before = camera.read()
    collect(tmp_path, range(100, 150), 1)
    after = camera.read()
    n, m = before.n_train, len(before.y_val)
    assert (before.quarters, after.quarters) == (0, 3)
    assert np.array_equal(after.x_train[:n], before.x_train)
    assert np.array_equal(after.x_val[:m], before.x_val)
    assert np.array_equal(after.sensitive[:n], before.sensitive)
    with SampleStore(tmp_path, TASK) as store:
        found = store.read_labelled()
    upright = preprocess(TASK, np.rot90(found.x, -1, axes=(2, 3)))
    assert np.mean(np.all(after.x_train[n:] == upright[found.place == TRAIN], axis=(1, 2, 3))) > 0.9
    assert len(after.y_val) == m + (found.place == VALIDATION).sum()


def test_what_examines_bundles_is_turned_as_the_camera_is_now(camera: OwnSamples, tmp_path: Path) -> None:
    before = camera.read()
    collect(tmp_path, range(100, 150), 1)
    after, saved = camera.read(), load_validation(tmp_path, TASK)
    assert np.array_equal(saved.x[: len(before.y_val)], np.rot90(before.x_val, 1, axes=(2, 3)))
    assert np.array_equal(np.rot90(saved.x, after.quarters, axes=(2, 3)), after.x_val)


def test_what_no_turn_explains_takes_part_in_nothing_and_stays_in_the_store(camera: OwnSamples, tmp_path: Path) -> None:
    collect(tmp_path, range(100, 130), 0)
    before = camera.read()
    collect(tmp_path, range(130, 220), 0, mirrored=True)
    after = camera.read()
    with SampleStore(tmp_path, TASK) as store:
        found = store.read_labelled()
        newest = store.read_newest(200)
    assert len(found.y) == 120
    new = found.place[30:]
    assert (after.n_train, len(after.y_val)) == ((new == TRAIN).sum(), (new == VALIDATION).sum())
    assert not set(map(bytes, before.x_train)) & set(map(bytes, after.x_train))
    assert newest.number.tolist() == found.number[30:].tolist(), "only these compare bundles"
    assert np.array_equal(load_validation(tmp_path, TASK).x, after.x_val)


def test_when_nothing_contradicts_any_more_everything_holds_again(camera: OwnSamples, tmp_path: Path) -> None:
    camera.read()
    collect(tmp_path, range(100, 150), 1)
    camera.read()
    with SampleStore(tmp_path, TASK) as store:
        store.delete(store.read_labelled().number.tolist())
    assert camera.read().compute_digest() == read_device_data(TASK, tmp_path / "camera.npz", seed=3).compute_digest()
    assert load_validation(tmp_path, TASK).x.shape == camera.read().x_val.shape


def test_a_turned_camera_stays_turned_back_when_its_first_samples_are_gone(camera: OwnSamples, tmp_path: Path) -> None:
    camera.read()
    collect(tmp_path, range(100, 150), 1)
    assert camera.read().quarters == 3
    np.savez(tmp_path / "camera.npz", x=POOL.x[:4], y=POOL.y[:4])
    few = camera.read()
    assert few.quarters == 3
    assert few.n_train > 20
    collect(tmp_path, range(150, 160), 1)
    assert camera.read().quarters == 3


def test_two_devices_that_differ_in_sensitive_samples_alone_hold_the_same_others(tmp_path: Path) -> None:
    shared, quarters = [], []
    for name, other in (("a", 0), ("b", 2)):
        home, file = tmp_path / name, tmp_path / f"{name}.npz"
        home.mkdir()
        marks = np.arange(100) % 4 == 0
        x = np.where(marks.reshape(-1, 1, 1), np.rot90(POOL.x[:100], other, axes=(1, 2)), POOL.x[:100])
        np.savez(file, x=x, y=POOL.y[:100], sensitive=marks)
        with closing(OwnSamples(TASK, home, file, seed=3, trains=True)) as own:
            own.read()
            with SampleStore(home, TASK) as store:
                for k in range(100, 150):
                    marked = k % 3 == 0
                    turned = np.rot90(POOL.x[k], 1 + (other if marked else 0))
                    store.add(turned, int(POOL.y[k]), origin="http", sensitive=marked)
            data = own.read()
            shared.append((data.shared, data.shared_validation))
            quarters.append(data.quarters)
    (training, validation), (again, and_again) = shared
    for one, two in zip((*training, *validation), (*again, *and_again), strict=True):
        assert np.array_equal(one, two)
    assert quarters == [3, 3]
