"""A simulated device's store keeps what a real one keeps, and each sample's place."""

from pathlib import Path

import numpy as np

from coordinator.simulation.stream.replay import Replay, choose_kept
from edge_agent.samples import SampleStore
from fedge.data.preprocessing import preprocess
from fedge.data.task import TEST, TRAIN, VALIDATION
from fedge.tasks import load_pool

POOL = load_pool("digits", limit=120)
MARKS = np.zeros(120, np.bool_)


def test_a_full_class_keeps_an_even_choice_of_all_and_the_newest() -> None:
    assert choose_kept(np.array([5, 1, 9, 2, 8, 7]), 4).tolist() == [False, True, False, True, True, True]
    assert choose_kept(np.array([3, 1, 2]), 3).all()
    assert choose_kept(np.array([1, 2, 3, 4]), 1).tolist() == [False, False, False, True]


def test_it_keeps_the_samples_and_places_that_a_device_s_store_keeps(tmp_path: Path) -> None:
    (tmp_path / "samples.toml").write_text("[samples]\nper_class = 5\n")
    replay = Replay.make_empty(POOL.spec)
    with SampleStore(tmp_path, POOL.spec) as store:
        for part in np.array_split(np.arange(120), 4):
            for k in part:
                store.add(POOL.x[k], int(POOL.y[k]), origin="test")
                replay = replay.add(POOL.spec, POOL.x[[k]], POOL.y[[k]], MARKS[[k]]).bound(5)
        kept = store.read_labelled()
    assert np.array_equal(preprocess(POOL.spec, kept.x), replay.x)
    assert np.array_equal(kept.y, replay.y)
    assert np.array_equal(kept.place, replay.place)
    assert np.bincount(replay.y, minlength=10).max() == 5


def test_no_sample_moves_when_others_come() -> None:
    some = Replay.make_empty(POOL.spec).add(POOL.spec, POOL.x[:60], POOL.y[:60], MARKS[:60])
    more = some.add(POOL.spec, POOL.x[60:], POOL.y[60:], MARKS[60:])
    assert np.array_equal(more.place[:60], some.place)
    assert {TRAIN, VALIDATION, TEST} == set(more.place.tolist())
    data = more.make_data()
    assert (len(data.y_train), len(data.y_val)) == ((more.place == TRAIN).sum(), (more.place == VALIDATION).sum())


def test_sensitive_samples_have_limits_of_their_own() -> None:
    marks = np.arange(120) % 2 == 0
    bounded = Replay.make_empty(POOL.spec).add(POOL.spec, POOL.x, POOL.y, marks).bound(3)
    plain = Replay.make_empty(POOL.spec).add(POOL.spec, POOL.x[~marks], POOL.y[~marks], marks[~marks]).bound(3)
    assert np.array_equal(bounded.x[~bounded.sensitive], plain.x)


def test_a_turned_camera_goes_on_as_before_and_turns_back_what_it_sees() -> None:
    pool = load_pool("digits", limit=200)
    marks, turned = np.zeros(200, np.bool_), np.rot90(pool.x, 1, axes=(1, 2))
    before = Replay.make_empty(pool.spec).add(pool.spec, pool.x[:120], pool.y[:120], marks[:120])
    after = before.add(pool.spec, turned[120:], pool.y[120:], marks[120:])
    data, upright = after.make_data(), preprocess(pool.spec, pool.x)
    assert (before.make_data().quarters, data.quarters) == (0, 3)
    for x, place in ((data.x_train, TRAIN), (data.x_val, VALIDATION)):
        assert np.mean(np.all(x == upright[after.place == place], axis=(1, 2, 3))) > 0.95
