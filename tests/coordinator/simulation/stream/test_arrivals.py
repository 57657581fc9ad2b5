"""The samples of each campaign: each arrives once, as the sensor saw it then."""

import numpy as np

from coordinator.simulation.federation import partition_samples
from coordinator.simulation.settings import Scenario
from coordinator.simulation.stream.arrivals import FIRST, Stream, distribute, randomise_labels, scale_inputs
from coordinator.simulation.stream.happenings import WRONG_SHARE, Happenings

SCENARIO = Scenario(devices=4, samples=800, partition="groups", n_groups=2, global_test=0.0, sensitive=0.3)
FEDERATION = partition_samples(SCENARIO, 0)
IDS = list(FEDERATION.shares)
QUIET = Happenings(campaigns=5, births=(1,) * 10)


def test_every_sample_arrives_once_and_the_first_campaign_gets_more() -> None:
    stream = Stream(FEDERATION, QUIET, seed=0)
    for i in IDS:
        share = FEDERATION.shares[i]
        arrivals = [stream.list_arrivals(i, c) for c in range(1, 6)]
        x = np.concatenate([a.x for a in arrivals])
        everything = np.concatenate([share.x_train, share.x_val])
        assert sorted(map(bytes, x)) == sorted(map(bytes, everything))
        assert sum(int(a.sensitive.sum()) for a in arrivals) == share.sensitive.sum() + share.sensitive_val.sum()
        assert len(arrivals[0].y) > 2 * len(arrivals[1].y)


def test_a_class_appears_late_in_samples_and_tests() -> None:
    happens = Happenings(campaigns=5, births=(1,) * 9 + (3,))
    stream = Stream(FEDERATION, happens, seed=0)
    for i in IDS:
        assert all(9 not in stream.list_arrivals(i, c).y for c in (1, 2))
        assert all(9 not in stream.list_tests(i, c).y for c in (1, 2))
    assert any(9 in stream.list_arrivals(i, 3).y for i in IDS)
    assert sum(len(stream.list_tests(i, 3).y) for i in IDS) == sum(len(s.y_test) for s in FEDERATION.shares.values())


def test_deals_are_even_from_a_class_s_birth_on() -> None:
    happens = Happenings(campaigns=4, births=(1, 3))
    dealt = distribute(np.repeat([0, 1], [70, 20]), happens, np.random.default_rng(0))
    y = np.repeat([0, 1], [70, 20])
    assert [np.bincount(y[own], minlength=2).tolist() for own in dealt] == [
        [FIRST * 10, 0], [10, 0], [10, 10], [10, 10]
    ]  # fmt: skip


def test_a_camera_is_turned_for_new_samples_and_tests_alone() -> None:
    happens = Happenings(campaigns=5, births=(1,) * 10, turned=IDS[0], turns_in=3)
    quiet, stream = Stream(FEDERATION, QUIET, seed=0), Stream(FEDERATION, happens, seed=0)
    for c, turns in ((2, 0), (3, 1)):
        for of in ("list_arrivals", "list_tests"):
            before, now = getattr(quiet, of)(IDS[0], c), getattr(stream, of)(IDS[0], c)
            assert np.array_equal(now.x, np.rot90(before.x, turns, axes=(-2, -1)))
            assert np.array_equal(now.y, before.y)
        assert np.array_equal(stream.list_tests(IDS[1], c).x, quiet.list_tests(IDS[1], c).x)


def test_two_devices_take_each_other_s_place() -> None:
    happens = Happenings(campaigns=5, births=(1,) * 10, moved=(IDS[0], IDS[1]), moves_in=4)
    quiet, stream = Stream(FEDERATION, QUIET, seed=0), Stream(FEDERATION, happens, seed=0)
    for c, source in ((3, IDS[0]), (4, IDS[1])):
        assert np.array_equal(stream.list_arrivals(IDS[0], c).x, quiet.list_arrivals(source, c).x)
        assert np.array_equal(stream.list_tests(IDS[0], c).x, quiet.list_tests(source, c).x)


def test_light_changes_and_pixels_stay_pixels() -> None:
    pixels = np.array([0, 100, 255], np.uint8)
    assert scale_inputs(pixels, 0.5).tolist() == [0, 50, 128]
    assert scale_inputs(pixels, 0.5).dtype == np.uint8
    assert scale_inputs(np.array([1.0], np.float32), 0.6).dtype == np.float32


def test_wrong_labels_are_another_class_and_tests_stay_right() -> None:
    y = np.arange(10000) % 10
    wrong = randomise_labels(y, 10, np.random.default_rng(0)) != y
    assert abs(wrong.mean() - WRONG_SHARE) < 5 * np.sqrt(WRONG_SHARE * (1 - WRONG_SHARE) / 10000)
    happens = Happenings(campaigns=5, births=(1,) * 10, wrong=(IDS[0],), wrong_from=2)
    quiet, stream = Stream(FEDERATION, QUIET, seed=0), Stream(FEDERATION, happens, seed=0)
    assert np.array_equal(stream.list_tests(IDS[0], 5).y, quiet.list_tests(IDS[0], 5).y)
    assert np.array_equal(stream.list_arrivals(IDS[0], 1).y, quiet.list_arrivals(IDS[0], 1).y)
    assert any((stream.list_arrivals(IDS[0], c).y != quiet.list_arrivals(IDS[0], c).y).any() for c in range(2, 6))
