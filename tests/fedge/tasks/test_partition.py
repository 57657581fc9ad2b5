import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.settings import resolve_given as from_config
from fedge.tasks import (
    Partitioning,
    Pool,
    Share,
    load_pool,
    make_device_data,
    partition_pool,
    read_device_data,
    set_apart,
    write_share,
)
from fedge.tasks.partition import load_samples
from fedge.tasks.partitioners import MIN_SAMPLES, Milder, Sizes
from fedge.tasks.shares import How


def numbered(n: int, n_classes: int = 4, side: int = 3) -> Pool:
    """Images whose upper left pixel is their number, so that each can be recognised, in random classes."""
    x = np.zeros((n, side, side), np.int64)
    x[:, 0, 0] = np.arange(n)
    y = np.random.default_rng(5).integers(0, n_classes, n)
    spec = TaskSpec(name="n", classes=tuple(map(str, range(n_classes))), input_shape=(1, side, side), model="mlp")
    return Pool(x, y, spec)


def shares_of(source: Pool, n_devices: int, **changes: Any) -> list[Share]:
    given: dict[str, Any] = {"sensitive": 0.3, "n_groups": 3, "seed": 0, "milder": None} | changes
    more = {name: given.pop(name) for name in ("seed", "milder")}
    return partition_pool(source, n_devices, Partitioning(**given), **more)


def labels(share: Share) -> np.ndarray:
    return np.concatenate([share.y_train, share.y_val, share.y_test])


def samples(share: Share) -> np.ndarray:
    return np.concatenate([share.x_train, share.x_val, share.x_test])


@given(
    n_devices=st.integers(1, 8),
    alpha=st.sampled_from([0.05, 0.3, 1.0, 100.0]),
    how=st.sampled_from(["groups", "dirichlet", "shards", "iid"]),
    groups=st.sampled_from(["rotation", "labels"]),
    sizes=st.sampled_from(["equal", "log-normal", "power-law"]),
    n_groups=st.integers(1, 4),
    seed=st.integers(0, 1000),
    sensitive=st.floats(0, 1),
)
@example(
    n_devices=2,
    alpha=0.05,
    how="groups",
    groups="rotation",
    sizes="log-normal",
    n_groups=2,
    seed=3,
    sensitive=0.0,
)  # a group of one device, and too little for it
@settings(max_examples=60, deadline=None)
def test_every_sample_goes_to_one_device_with_its_label(
    n_devices: int, alpha: float, how: str, groups: str, sizes: str, n_groups: int, seed: int, sensitive: float
) -> None:
    source = numbered(400)
    changes: dict[str, Any] = {} if how == "shards" else {"sizes": sizes}
    changes |= {"partition": how, "alpha": alpha, "groups": groups, "n_groups": n_groups, "sensitive": sensitive}
    shares = shares_of(source, n_devices, seed=seed, **changes)
    numbers = np.concatenate([samples(share).reshape(-1, 9).max(axis=1) for share in shares])
    assert sorted(numbers.tolist()) == list(range(400))
    assert np.array_equal(np.concatenate([labels(share) for share in shares]), source.y[numbers])
    for share in shares:
        n, rest = len(labels(share)), len(share.y_train) + len(share.y_val)
        assert n >= MIN_SAMPLES
        assert len(share.y_test) == round(0.25 * n)
        assert len(share.y_val) == max(2, round(0.2 * rest))
        assert np.count_nonzero(share.sensitive) == round(sensitive * len(share.y_train))
        # the test part follows the device's own distribution: each class has its share, give or take one
        own, test = (np.bincount(y, minlength=4) for y in (labels(share), share.y_test))
        assert np.abs(test - len(share.y_test) * own / n).max() <= 1 + 1e-9


@pytest.mark.parametrize(("share", "n_marked"), [(0.0, 0), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_whole_classes_can_be_marked_other_ones_on_each_device(share: float, n_marked: int) -> None:
    shares = shares_of(numbered(800), 6, alpha=100.0, sensitive=share, marks="classes")
    marked = [frozenset(own.y_train[own.sensitive].tolist()) for own in shares]
    for own, classes in zip(shares, marked, strict=True):
        assert len(classes) == n_marked
        assert not classes & set(own.y_train[~own.sensitive].tolist())
    assert len(set(marked)) > 1 or share in {0.0, 1.0}


def test_equal_seeds_give_equal_shares_and_other_seeds_others() -> None:
    first, again, other = (shares_of(numbered(300), 5, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(samples(a), samples(b)) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(samples(a), samples(b)) for a, b in zip(first, other, strict=True))


def test_groups_turn_by_90_degrees_times_the_group() -> None:
    source = numbered(300)
    shares = shares_of(source, 7, partition="groups")
    assert [share.group for share in shares] == [0, 1, 2, 0, 1, 2, 0]
    corners = [(0, 0), (2, 0), (2, 2)]  # where the upper left pixel is after 0, 90 and 180 degrees, counter-clockwise
    for share in shares:
        x = samples(share)
        corner = corners[share.group]
        others = x.sum(axis=(1, 2)) - x[:, corner[0], corner[1]]
        assert not others.any()


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_colour_images_are_turned_in_their_plane(layout: str) -> None:
    grey = np.random.default_rng(0).integers(0, 255, (60, 1, 5, 5))
    x = np.concatenate([grey, grey + 1, grey + 2], axis=1)
    spec = TaskSpec(name="c", classes=("a", "b"), input_shape=(3, 5, 5), model="cnn")
    source = Pool(x if layout == "channels first" else np.moveaxis(x, 1, -1), np.arange(60) % 2, spec)
    (plain,) = shares_of(source, 1, partition="groups", n_groups=1)
    turned = shares_of(source, 2, partition="groups", n_groups=2, alpha=1e6)
    for share in turned:
        planes = np.moveaxis(samples(share), -1, 1) if layout == "channels last" else samples(share)
        assert (planes[:, 1] == planes[:, 0] + 1).all()
        upright = {plane.tobytes() for plane in np.rot90(planes[:, 0], -share.group, axes=(1, 2))}
        assert upright <= {plane.tobytes() for plane in grey[:, 0]}
    assert plain.group == 0


def test_what_cannot_be_turned_is_refused() -> None:
    spec = TaskSpec(name="w", classes=("a", "b"), input_shape=(9, 128), model="mlp")
    windows = Pool(np.zeros((100, 9, 128)), np.arange(100) % 2, spec)
    with pytest.raises(ConfigError, match="not square images"):
        shares_of(windows, 3, partition="groups")
    assert len(shares_of(windows, 3, partition="dirichlet")) == 3


def test_a_large_alpha_deals_evenly_and_a_small_one_does_not() -> None:
    source = numbered(4000)
    even = np.array([np.bincount(labels(s), minlength=4) for s in shares_of(source, 8, alpha=1e6)])
    assert np.abs(even - np.bincount(source.y) / 8).max() < 2
    skewed = np.array([np.bincount(labels(s), minlength=4) for s in shares_of(source, 8, alpha=0.1)])
    assert (skewed.max(axis=1) / skewed.sum(axis=1)).mean() > 0.6


def test_class_shares_follow_the_dirichlet_distribution() -> None:
    # a share of Dirichlet(1) over 8 devices is Beta(1, 7): mean 1/8, variance 7/576. With 50 classes x 8 devices the
    # standard error of the variance is below 12 %, of the redrawn ones (minimum of samples) nothing is seen here
    spec = TaskSpec(name="n", classes=tuple(map(str, range(50))), input_shape=(1,), model="mlp")
    source = Pool(np.zeros((50_000, 1)), np.repeat(np.arange(50), 1000), spec)
    shares = np.array([np.bincount(labels(s), minlength=50) for s in shares_of(source, 8)]) / 1000
    assert shares.mean() == pytest.approx(1 / 8)
    assert shares.var() == pytest.approx(7 / 576, rel=0.5)


def test_every_group_gets_its_part_of_each_class() -> None:
    source = numbered(4000)
    shares = shares_of(source, 6, partition="groups", alpha=0.5)
    for group in range(3):
        counts = sum(np.bincount(labels(s), minlength=4) for s in shares if s.group == group)
        assert np.abs(counts - np.bincount(source.y) / 3).max() <= 1


def test_label_groups_have_their_own_classes_alone() -> None:
    spec = TaskSpec(name="n", classes=tuple("0123456789"), input_shape=(1,), model="mlp")
    source = Pool(np.zeros((2000, 1)), np.arange(2000) % 10, spec)
    shares = shares_of(source, 8, partition="groups", groups="labels", n_groups=4)
    own = [{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}]  # fedge.md 15.1
    assert all(set(labels(share).tolist()) <= own[share.group] for share in shares)
    assert [share.group for share in shares] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("every", [1, 3])
def test_label_codes_rename_the_classes_of_each_device_of_the_first_group(every: int) -> None:
    source = numbered(600, n_classes=10)
    shares = shares_of(source, 6, partition="groups", groups="codes", n_groups=every)
    codes = []
    for share in shares:
        true = source.y[samples(share).reshape(-1, 9).max(axis=1)]
        code = dict(zip(true.tolist(), labels(share).tolist(), strict=True))
        assert [code[c] for c in true.tolist()] == labels(share).tolist(), "one name for each class, in all parts"
        assert len(set(code.values())) == len(code)
        assert share.group == 0 or all(name == c for c, name in code.items())
        codes += [tuple(code.items())] if share.group == 0 else []
    assert len(set(codes)) == 6 // every, "no two devices agree"
    plain = shares_of(source, 6, partition="groups", groups="rotation", n_groups=1)
    if every == 1:
        assert all(np.array_equal(samples(a), samples(b)) for a, b in zip(shares, plain, strict=True))


def test_people_are_devices() -> None:
    plain = numbered(120)
    source = Pool(plain.x, plain.y, plain.spec, user=np.arange(120) % 3)
    shares = shares_of(source, 3, partition="natural")
    assert [set((samples(share).reshape(-1, 9).max(axis=1) % 3).tolist()) for share in shares] == [{0}, {1}, {2}]
    with pytest.raises(ConfigError, match="do not say which person"):
        shares_of(plain, 3, partition="natural")


def test_people_need_a_block_for_each_of_the_three_parts() -> None:
    x, y, user = np.zeros((60, 1)), np.zeros(60, np.int64), np.repeat([0, 1], 30)
    task = TaskSpec(name="toy", classes=("a", "b"), input_shape=(1,), model="mlp")
    shares = shares_of(Pool(x, y, task, user, np.arange(60) // 10), 2, partition="natural")
    assert [(len(s.y_train), len(s.y_val), len(s.y_test)) for s in shares] == [(10, 10, 10)] * 2
    with pytest.raises(ConfigError, match="samples are in 2 blocks, a device needs 3"):
        shares_of(Pool(x, y, task, user, np.arange(60) // 15), 2, partition="natural")


@pytest.mark.parametrize("how", ["dirichlet", "shards", "iid", "groups"])
def test_the_users_own_test_samples_are_the_only_ones_and_nothing_learns_from_them(how: How) -> None:
    plain = numbered(400)
    is_test = np.arange(400) >= 300
    shares = shares_of(dataclasses.replace(plain, is_test=is_test), 4, partition=how, alpha=100.0)
    tests = np.concatenate([share.x_test.reshape(-1, 9).max(axis=1) for share in shares])
    others = np.concatenate([x.reshape(-1, 9).max(axis=1) for share in shares for x in (share.x_train, share.x_val)])
    assert sorted(tests.tolist()) == list(range(300, 400))
    assert sorted(others.tolist()) == list(range(300))


def test_a_device_without_test_samples_of_the_users_own_is_refused() -> None:
    few = dataclasses.replace(numbered(120), is_test=np.arange(120) >= 119)
    with pytest.raises(ConfigError, match=r"a device would get 0 of the test samples \(x_test\), and .* others"):
        shares_of(few, 3)


def test_what_is_set_apart_of_some_samples_leaves_the_others_alone() -> None:
    source = dataclasses.replace(numbered(400), is_test=np.arange(400) >= 300)
    rest, apart = set_apart(source, 0.2, seed=0, of=source.is_test)
    assert (len(apart.y), apart.is_test is not None and bool(apart.is_test.all())) == (20, True)
    assert rest.is_test is not None
    assert (~rest.is_test).sum() == 300


@given(share=st.floats(0, 0.9), turns=st.integers(1, 4), seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_what_is_set_apart_is_an_even_part_of_every_class(share: float, turns: int, seed: int) -> None:
    source = numbered(400)
    rest, apart = set_apart(source, share, seed=seed, turns=turns)
    numbers = np.concatenate([pool.x.reshape(-1, 9).max(axis=1) for pool in (rest, apart)])
    assert sorted(numbers.tolist()) == list(range(400))
    assert len(apart.y) == round(share * 400)
    expected = share * np.bincount(source.y, minlength=4)
    assert np.abs(np.bincount(apart.y, minlength=4) - expected).max() <= 1.5
    upright = {image.tobytes() for image in source.x}
    assert {np.rot90(image, -(j % turns)).tobytes() for j, image in enumerate(apart.x)} <= upright


def test_a_share_of_everything_cannot_be_set_apart() -> None:
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\)"):
        set_apart(numbered(100), 1.0, seed=0)


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "fedge.tasks"):
        yield caplog


def test_samples_are_moved_only_when_draws_do_not_help_and_both_is_said(
    warnings_logged: pytest.LogCaptureFixture,
) -> None:
    shares_of(numbered(4000), 5, alpha=1.0)
    assert not warnings_logged.records
    told = Milder()
    shares_of(numbered(400), 8, alpha=0.5, milder=told)
    assert f"event=partition_redrawn draws={told.draws} " in warnings_logged.text
    assert told.draws > 1
    assert told.moved == 0
    assert "event=partition_adjusted" not in warnings_logged.text
    warnings_logged.clear()
    shares = shares_of(numbered(200, n_classes=2), 10, alpha=0.05, milder=told)  # 10 x 20 samples: each gets exactly 20
    assert [len(labels(share)) for share in shares] == [20] * 10
    assert f"event=partition_adjusted moved={told.moved} " in warnings_logged.text
    assert told.draws == 100


@pytest.mark.parametrize(
    ("n_devices", "changes", "message"),
    [
        (11, {}, "200 samples are too few for 11 devices"),
        (9, {"partition": "groups", "n_groups": 5}, "9 devices can be in 1 to 4 groups by rotation, not in 5"),
        (9, {"partition": "groups", "n_groups": 11, "groups": "labels"}, "1 to 4 groups by labels, not in 11"),
        (3, {"partition": "groups", "n_groups": 4, "groups": "codes"}, "1 to 3 groups by codes"),
        (2, {"partition": "shards", "shards": 101}, "200 samples or blocks cannot be cut into 2 x 101 shards"),
        (2, {"partition": "shards", "sizes": "power-law"}, "quantity skew is for"),
    ],
)
def test_impossible_partitions_are_refused(n_devices: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shares_of(numbered(200), n_devices, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("devices", 0), ("alpha", 0.0), ("alpha", float("nan")), ("sensitive", 1.1), ("min_samples", 3)),
        *(("shards", 0), ("iid_share", 1.1), ("size_spread", 1e9), ("size_spread", float("nan"))),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_dealt(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}: [Ee]xpected"):
        from_config(Partitioning, {name: value})


@pytest.mark.parametrize("sizes", ["log-normal", "power-law"])
@pytest.mark.parametrize("how", ["dirichlet", "iid", "groups"])
def test_the_widest_spread_of_sizes_still_deals(sizes: Sizes, how: How) -> None:
    shares = shares_of(numbered(600), 9, partition=how, sizes=sizes, size_spread=5.0)
    assert sum(len(s.y_train) + len(s.y_val) + len(s.y_test) for s in shares) == 600
    assert min(len(s.y_train) for s in shares) > 0


def test_a_group_without_a_sample_of_its_own_classes_is_refused() -> None:
    source = numbered(600)
    two_classes = Pool(source.x, source.y % 2, source.spec)
    with pytest.raises(ConfigError, match="a group gets no sample"):
        shares_of(two_classes, 4, partition="groups", groups="labels", n_groups=2)


def test_a_written_share_is_what_the_device_reads(tmp_path: Path) -> None:
    source = load_pool("digits", limit=200)
    for number, share in enumerate(shares_of(source, 3, partition="groups")):
        file = tmp_path / "deep" / f"{number}.npz"
        write_share(share, file)
        read, direct = read_device_data(source.spec, file, seed=0), make_device_data(source.spec, share)
        for field in ("x_train", "y_train", "sensitive", "x_val", "y_val"):
            assert np.array_equal(getattr(read, field), getattr(direct, field))
        with np.load(file) as archive:
            assert np.array_equal(archive["x"][archive["split"] == 2], share.x_test)


def test_shares_leave_the_pool_alone() -> None:
    source = numbered(200)
    before = source.x.copy()
    shares = shares_of(source, 3, partition="groups")
    shares[1].x_train[:] = -1
    assert np.array_equal(source.x, before)
    assert msgspec.json.encode(source.spec)


def test_what_is_set_apart_no_device_gets_and_the_users_own_limit_goes_first() -> None:
    found, apart = load_samples(Partitioning(samples=200), 0, 0.1, limit=100)
    assert (len(found.y), len(apart.y)) == (180, 20)
    assert len(load_samples(Partitioning(), 0, 0.0, limit=100)[0].y) == 100


def test_another_network_takes_the_place_of_the_tasks_own() -> None:
    found, _ = load_samples(Partitioning(model="cnn", samples=100), 0, 0.0)
    assert (found.spec.model, found.spec.model_options) == ("cnn", {})
