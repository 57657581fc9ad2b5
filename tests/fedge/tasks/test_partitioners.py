"""Worked deals of a few samples, and properties of all of them."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedge.errors import ConfigError
from fedge.tasks.partitioners import (
    MIN_SAMPLES,
    Ints,
    Units,
    draw_relative_sizes,
    fill_up,
    make_units,
    partition_by_label,
    partition_by_shards,
    partition_by_user,
    partition_evenly,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def singles(y: np.ndarray) -> Units:
    return make_units(y, None)


def test_blocks_are_units_with_their_most_frequent_label() -> None:
    units = make_units(np.array([2, 2, 0, 1, 1, 0]), np.array([7, 7, 7, 3, 3, 3]))
    assert units.y.tolist() == [1, 2]
    assert units.size.tolist() == [3, 3]
    assert units.of_sample.tolist() == [1, 1, 1, 0, 0, 0]


def test_sizes_have_mean_1_and_the_shape_that_was_asked_for() -> None:
    assert draw_relative_sizes(4, "equal", 1.0, rng()).tolist() == [1, 1, 1, 1]
    zipf = np.sort(draw_relative_sizes(4, "power-law", 1.0, rng()))[::-1]
    np.testing.assert_allclose(zipf, np.array([1, 1 / 2, 1 / 3, 1 / 4]) * 4 / (25 / 12))
    normal = np.log(draw_relative_sizes(4000, "log-normal", 0.7, rng()))
    assert normal.std() == pytest.approx(0.7, rel=0.05)  # standard error 1.1 %
    for how in ("equal", "log-normal", "power-law"):
        assert draw_relative_sizes(9, how, 0.5, rng()).mean() == pytest.approx(1)
        np.testing.assert_allclose(draw_relative_sizes(9, how, 0.0, rng()), 1)


@given(
    n_devices=st.integers(1, 10),
    n=st.integers(200, 600),
    sizes=st.sampled_from(["equal", "log-normal", "power-law"]),
    block=st.sampled_from([1, 5]),
    seed=st.integers(0, 10_000),
    least=st.sampled_from([4, 10, MIN_SAMPLES]),
)
@settings(max_examples=60, deadline=None)
def test_every_deal_gives_each_unit_to_a_device_and_each_device_enough(
    n_devices: int, n: int, sizes: str, block: int, seed: int, least: int
) -> None:
    y = rng(seed).integers(0, 4, n)
    units = make_units(y, np.arange(n) // block)
    weights = draw_relative_sizes(n_devices, sizes, 1.0, rng(seed))
    whole, one_group = np.ones((1, 4)), np.zeros(n_devices, np.int64)

    def filled(deal: Callable[[np.random.Generator], Ints]) -> Ints:
        r = rng(seed)
        return fill_up(units, deal(r), one_group, r, least=least)

    for deal in (
        lambda r: partition_evenly(units, weights, r),
        lambda r: partition_by_shards(units, n_devices, 2, 0.2, r),
        lambda r: partition_by_label(units, whole, one_group, weights, 0.3, r, least=least),
    ):
        owners = filled(deal)
        assert owners.shape == units.y.shape
        assert set(owners.tolist()) == set(range(n_devices))
        assert np.bincount(owners, weights=units.size).min() >= least
        assert np.bincount(owners).min() >= 3
        np.testing.assert_array_equal(owners, filled(deal))


def test_sizes_follow_the_weights() -> None:
    weights = np.array([0.5, 1.0, 1.5])
    y = np.arange(3000) % 3
    np.testing.assert_array_equal(np.bincount(partition_evenly(singles(y), weights, rng())), [500, 1000, 1500])
    owners = partition_by_label(singles(y), np.ones((1, 3)), np.zeros(3, np.int64), weights, 1e6, rng())
    assert np.abs(np.bincount(owners) - [500, 1000, 1500]).max() <= 6  # 3 classes, each cut to the nearest sample


def test_an_even_share_of_each_class_goes_to_everybody_and_the_rest_is_skewed() -> None:
    y = np.repeat(np.arange(4), 100)
    whole, one_group, weights = np.ones((1, 4)), np.zeros(5, np.int64), np.ones(5)
    owners = partition_by_label(singles(y), whole, one_group, weights, 0.05, rng(), least=1, iid_share=0.2)
    per_device = np.array([np.bincount(y[owners == i], minlength=4) for i in range(5)])
    np.testing.assert_array_equal(per_device.sum(axis=0), 100)
    assert per_device.min() == 4, "a fifth of 100, over five devices"
    assert (per_device.max(axis=0) > 40).all()
    plain, none = (
        partition_by_label(singles(y), whole, one_group, weights, 0.5, rng(), **s) for s in ({}, {"iid_share": 0.0})
    )
    np.testing.assert_array_equal(plain, none)
    equal = partition_by_label(singles(y), whole, one_group, weights, 0.05, rng(), iid_share=1.0)
    np.testing.assert_array_equal(np.bincount(equal), 80)


def test_two_shards_hold_at_most_three_classes_where_a_shard_is_smaller_than_a_class() -> None:
    y = rng().permutation(np.repeat(np.arange(10), 100))
    owners = partition_by_shards(singles(y), 20, 2, 0.0, rng())
    per_device = np.array([np.bincount(y[owners == i], minlength=10) for i in range(20)])
    np.testing.assert_array_equal(per_device.sum(axis=1), 50)
    assert set(np.unique(per_device)) == {0, 25, 50}  # 40 shards of 25, four a class: a device has one or two classes


def test_a_fifth_of_equal_data_shows_every_class_to_everybody() -> None:
    y = np.repeat(np.arange(10), 1000)
    owners = partition_by_shards(singles(y), 10, 2, 0.2, rng())
    per_device = np.array([np.bincount(y[owners == i], minlength=10) for i in range(10)])
    np.testing.assert_array_equal(per_device.sum(axis=1), 1000)
    assert per_device.min() > 5  # 20 of each class are expected in the equal part; below 6 has probability 1e-4 each
    largest = np.sort(per_device, axis=1)[:, -3:].sum(axis=1)
    assert (largest >= 0.8 * 1000).all()  # the two shards of 400 samples touch at most three classes


def test_people_are_devices_and_those_not_drawn_give_nothing() -> None:
    user = np.repeat([0, 1, 2], [30, 40, 50])
    owners = partition_by_user(user, 2, rng())
    kept = np.unique(user[owners >= 0])
    assert len(kept) == 2
    assert [np.unique(owners[user == k]).tolist() for k in kept] == [[0], [1]]
    assert (partition_by_user(user, 3, rng()) == user).all()
    with pytest.raises(ConfigError, match="3 people"):
        partition_by_user(user, 4, rng())
    with pytest.raises(ConfigError, match="person 1 has 19 samples"):
        partition_by_user(np.repeat([0, 1], [30, 19]), 2, rng())


def test_moving_takes_from_the_largest_and_says_how_much(caplog: pytest.LogCaptureFixture) -> None:
    units = singles(np.zeros(60, np.int64))
    before = np.repeat([0, 1, 2], [35, 10, 15])
    with caplog.at_level(logging.WARNING, "fedge.tasks"):
        after = fill_up(units, before, np.zeros(3, np.int64), rng())
    assert np.bincount(after).tolist() == [20, 20, 20]
    assert "event=partition_adjusted moved=15" in caplog.text
    assert (after[before != 0] == before[before != 0]).all()
    assert before.tolist() == np.repeat([0, 1, 2], [35, 10, 15]).tolist()


def test_samples_stay_in_their_planted_group() -> None:
    units = singles(np.repeat([0, 1], [70, 130]))
    before = np.repeat([0, 1, 2, 3], [60, 10, 120, 10])
    after = fill_up(units, before, np.array([0, 0, 1, 1]), rng())
    assert (after[:70] < 2).all()
    assert (after[70:] >= 2).all()
    assert np.bincount(after).min() == 20


def test_each_device_has_blocks_for_its_three_parts() -> None:
    """Fewer than three blocks left nothing to test on, however many samples they had."""
    units = make_units(np.zeros(100, np.int64), np.arange(100) // 10)
    before = np.repeat([0, 1], [8, 2])
    after = fill_up(units, before, np.zeros(2, np.int64), rng())
    assert np.bincount(after).tolist() == [7, 3]
    r, one_group = rng(), np.zeros(3, np.int64)
    owners = partition_by_label(units, np.ones((1, 1)), one_group, np.ones(3), 0.1, r, least=4)
    owners = fill_up(units, owners, one_group, r, least=4)
    assert np.bincount(owners).min() == 3
    with pytest.raises(ConfigError, match="100 samples in 10 blocks are too few for 4 devices"):
        fill_up(units, np.repeat([0, 1, 2, 3], [4, 2, 2, 2]), np.zeros(4, np.int64), rng())


def test_blocks_too_large_to_move_are_an_error_not_an_endless_loop() -> None:
    units = make_units(np.zeros(60, np.int64), np.repeat([0, 1, 2], 20))
    with pytest.raises(ConfigError, match="60 samples in 3 blocks are too few for 4 devices"):
        fill_up(units, np.array([0, 1, 2]), np.zeros(4, np.int64), rng())
