"""Averages by the rule of the settings, within clusters."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation import average_clusters
from coordinator.aggregation.guarded import average_by_rule
from coordinator.aggregation.protection import Protection, Rule
from fedge.tensors.codecs import compute_norms
from fedge.tensors.layout import Layout, Model, TensorInfo

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="w", shape=(2,)),
        TensorInfo(name="running", shape=(1,), kind="buffer"),
        TensorInfo(name="steps", shape=(), kind="counter"),
    )
)
ROBUST: tuple[Rule, ...] = ("clipped", "median", "trimmed-mean", "multi-krum", "centred-clipping")


def model(w: tuple[float, float], buffer: float = 1.0, counter: int = 5) -> Model:
    return Model(np.float32(w), np.float32([buffer]), np.array([counter]))


HONEST = [model((1.0, 0.1 * k), 1.0 + 0.1 * k) for k in range(-2, 3)]


def averaged(rule: Rule, models: list[Model], sizes: list[int] | None = None, members: list[list[int]] | None = None):
    sizes, members = sizes or [1] * len(models), members or [list(range(len(models)))]
    norms = [compute_norms(own) for own in models]
    return average_by_rule(iter(models), norms, sizes, members, LAYOUT, Protection(average=rule))


@pytest.mark.parametrize("rule", ROBUST)
def test_one_hostile_device_of_six_does_no_harm(rule: Rule) -> None:
    for hostile in (model((1e6, -1e6), 1e9), model((-1e6, 0.0), -1e9)):
        (found,) = averaged(rule, [*HONEST, hostile], [10] * 5 + [10**6])
        assert found is not None
        assert 0.4 < found.params[0] < 1.3
        assert abs(found.params[1]) < 0.35
        assert 0.3 < found.buffers[0] < 1.4
        assert found.counters.tolist() == [5]


def test_a_norm_is_clipped_and_a_claim_is_believed() -> None:
    """The default: a broken device moves an average by twice the median at most; one with most samples counts whole."""
    (found,) = averaged("norm-clipped", [model((1.0, 0.0), 1.0)] * 4 + [model((-100.0, 0.0), 1.0)])
    assert found is not None
    assert found.params[0] == pytest.approx((4 - 2) / 5)
    (found,) = averaged("norm-clipped", [model((1.0, 0.0))] * 4 + [model((-1.0, 0.0))], [10, 10, 10, 10, 400])
    assert found is not None
    assert found.params[0] == pytest.approx((40 - 400) / 440)


@pytest.mark.parametrize("rule", ["mean", "norm-clipped", "clipped"])
def test_where_nobody_stands_out_clipping_is_the_mean_bit_for_bit(rule: Rule) -> None:
    sizes, members = [3, 4, 5, 4, 3], [[0, 1, 2, 3, 4], [1, 2, 3], []]
    plain = average_clusters(HONEST, sizes, members, LAYOUT)
    found = averaged(rule, HONEST, sizes, members)
    for ours, theirs in zip(found[:2], plain[:2], strict=True):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours.params, theirs.params)
        np.testing.assert_array_equal(ours.buffers, theirs.buffers)
    assert found[2] is None


def test_each_cluster_has_a_bound_of_its_own() -> None:
    far = [model((100.0, 0.0)), model((100.0, 0.0)), model((100.0, 0.0))]
    small, large = averaged("clipped", [*HONEST, *far], members=[[0, 1, 2, 3, 4, 5], [5, 6, 7]])
    assert small is not None
    assert small.params[0] < 1.3  # 2 and five times 1
    assert large is not None
    assert large.params[0] == 100


@pytest.mark.parametrize("rule", ROBUST)
def test_two_members_have_a_mean(rule: Rule) -> None:
    (found,) = averaged(rule, [model((1.0, 0.0)), model((3.0, 0.0))])
    assert found is not None
    np.testing.assert_allclose(found.params, [2.0, 0.0])


CASES = {
    "sizes of another cluster": ([1, 1, 1, 1, 1, 1, 1], [10, 10, 500, 400, 400, 400, 400], [1, 1]),
    "one large member": ([1] * 10, [20, 20, 20, 20, 100, 60, 60, 60, 60, 60], [1, 1]),
    "two members": ([1, -1, 1, 1, 1, 1], [4, 35, 10, 10, 10, 10], [-31 / 39, 1]),
    "a liar": ([1, 1, 0, 1, 1, 1, 1], [10, 10, 800, 400, 400, 400, 400], [0.5, 1]),
    "nothing to change": ([0, 1, 1e6], [1, 1, 1], [1]),
    "most have nothing to change": ([0, 0, 1e6], [1, 1, 1], [0]),
    "no samples, no say": ([1, 1, 0, 0, 0, 6], [2, 2, 0, 0, 0, 2], [4 / 3]),
}
MEMBERS = {
    "one large member": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
    "two members": [[0, 1], [2, 3, 4, 5]],
    "nothing to change": [[0, 1, 2]],
    "most have nothing to change": [[0, 1, 2]],
    "no samples, no say": [[0, 1, 2, 3, 4, 5]],
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_usual_is_that_of_those_who_are_averaged(case: str) -> None:
    """Bounds were once taken over all updates of the step, and a zero removed them: 0.077, 0.667, ..., 333,334."""
    values, sizes, expected = CASES[case]
    models = [model((value, 0.0)) for value in values]
    found = averaged("clipped", models, sizes, MEMBERS.get(case, [[0, 1, 2], [3, 4, 5, 6]]))
    assert [own.params[0] for own in found if own is not None] == pytest.approx(expected, rel=1e-6)


@given(
    rule=st.sampled_from(get_args(Rule)),
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    w=st.tuples(*2 * [st.floats(-1e6, 1e6, width=32)]),
    data=st.data(),
)
def test_a_mean_of_equal_updates_is_that_update(
    rule: Rule, sizes: list[int], w: tuple[float, float], data: st.DataObject
) -> None:
    members = data.draw(st.lists(st.lists(st.integers(0, len(sizes) - 1), unique=True, min_size=1), max_size=4))
    for found in averaged(rule, [model(w, 3.0) for _ in sizes], sizes, [sorted(own) for own in members]):
        assert found is not None
        np.testing.assert_allclose(found.params, w, rtol=1e-9)
        np.testing.assert_allclose(found.buffers, [3.0], rtol=1e-9)
