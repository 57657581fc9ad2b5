"""What is compared before a bundle is written, and what a difference does."""

from pathlib import Path

import numpy as np
import pytest

from export import parity
from fedge.bundle.manifest import read_bundle
from fedge.data.task import TaskSpec
from fedge.errors import UpdateRejected
from fedge.models import build
from fedge.tensors.layout import Layout, Model, flatten, unflatten
from tests.support.tables import inputs, layout_of, mixture_of, task_of, write

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(6,), model="mlp", model_options={"hidden": 4})


def test_at_most_256_validation_samples_are_compared_and_random_ones_where_there_are_none() -> None:
    validation = np.arange(300 * 6, dtype=np.float64).reshape(300, 6)
    compared = parity.select_samples(TASK, validation)
    assert compared.dtype == np.float32
    assert compared.shape == (256, 6)
    rows = compared[:, 0] / 6
    assert (rows[0], rows[-1]) == (0, 299), "they are of the whole range, which may be in order of the classes"
    assert set(np.diff(rows)) == {1, 2}
    assert parity.select_samples(TASK, validation[:0]).shape == (8, 6)


def test_logits_are_those_of_each_model() -> None:
    layout, first = build.make_initial_model(TASK, 0)
    _, second = build.make_initial_model(TASK, 1)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    together = parity.compute_logits(TASK, layout, [first, second], x)
    assert together.shape == (2, 5, 3)
    w1, b1, w2, b2 = (first.params[a:b] for a, b in ((0, 24), (24, 28), (28, 40), (40, 43)))
    by_hand = np.maximum(x @ w1.reshape(4, 6).T + b1, 0) @ w2.reshape(3, 4).T + b2
    np.testing.assert_allclose(together[0], by_hand, atol=1e-5)
    assert not np.allclose(together[0], together[1])


@pytest.mark.parametrize("difference", [0.0, 1e-5, 0.99e-4])
def test_a_small_difference_is_reported(difference: float) -> None:
    wanted = np.array([[0.5, 0.5]])
    assert parity.require_parity(np.add(wanted, [[difference, 0]]), lambda _: wanted) == pytest.approx(
        difference, abs=1e-12
    )


def test_a_difference_is_relative_to_a_large_value_and_absolute_below_1() -> None:
    wanted = np.array([[200.0, 0.01]])
    assert parity.require_parity(np.add(wanted, [[0.01, 0]]), lambda _: wanted) == pytest.approx(5e-5)
    assert parity.require_parity(np.add(wanted, [[0, 5e-5]]), lambda _: wanted) == pytest.approx(5e-5)


@pytest.mark.parametrize("difference", [1.01e-4, 1.0, np.nan])
def test_a_large_one_or_none_at_all_is_refused(difference: float) -> None:
    wanted = np.array([[0.5, 0.5]])
    with pytest.raises(UpdateRejected, match="no bundle written"):
        parity.require_parity(np.add(wanted, [[difference, 0]]), lambda _: wanted)


# ---------------------------------------------------------------------------------------- experts that are level

ABOVE = 1 + 1e-9
"""Float64 sees it, float32 does not."""


@pytest.mark.parametrize("above", [ABOVE, 1 / ABOVE])
def test_experts_that_are_level_may_win_either_way(tmp_path: Path, above: float) -> None:
    """Of three experts with equal energies one counts: the graph takes the first, float64 the larger weight."""
    logits = np.tile([[[1.0, 1.0, 1.0]], [[3.0, 0, 0]], [[0, 3.0, 0]], [[0, 0, 3.0]]], (1, 5, 1))
    mixture = mixture_of(logits, weights=[0.4, 0.2, 0.2 * above, 0.2], top=1)
    assert write(tmp_path / "1", logits, mixture).max_abs_diff < 1e-5


def test_an_expert_that_is_clearly_better_must_win(tmp_path: Path) -> None:
    logits = np.tile([[[1.0, 1.0, 1.0]], [[3.0, 0, 0]], [[0, 3.0, 0]]], (1, 5, 1))
    other = mixture_of(logits, weights=[0.4, 0.3, 0.3 * 1.001], top=1)
    write(tmp_path, logits, mixture_of(logits, weights=[0.4, 0.3, 0.3], top=1))
    task, layout, x = task_of(5, 3), layout_of(logits[0]), inputs(5)
    bundle = read_bundle(tmp_path)
    found = parity.run_graph(bundle.graph, bundle.folder, x)
    with pytest.raises(UpdateRejected, match="no bundle written"):
        parity.require_parity(found[0], lambda lean: parity.compute_expected(task, layout, other, x, found, lean)[0])


ROUTED = TaskSpec(
    name="routed", classes=("a", "b", "c"), input_shape=(1, 8, 8), model="resnet_moe",
    model_options={"experts": 2, "top": 1},
)  # fmt: skip


def undecided() -> tuple[Layout, Model]:
    """A network whose routers say the same of both routes."""
    layout, model = build.make_initial_model(ROUTED, 0)
    tensors = unflatten(model, layout)
    return layout, flatten({n: np.zeros_like(t) if "router" in n else t for n, t in tensors.items()}, layout)


def test_routes_inside_a_network_that_are_level_may_win_either_way() -> None:
    layout, model = undecided()
    x = np.random.default_rng(1).random((6, 1, 8, 8), dtype=np.float32)

    def by_torch(lean: float) -> np.ndarray:
        return parity.compute_logits(ROUTED, layout, [model], x, lean)[0]

    first, last = by_torch(-1), by_torch(1)
    assert np.abs(first - by_torch(0)).max() < 1e-4
    assert np.abs(first - last).max() > 1e-2, "the other routes"
    assert parity.compute_difference(last, by_torch) < 1e-4
    assert parity.compute_difference(last + 0.01, by_torch) == pytest.approx(0.01, abs=1e-4)
    assert np.isnan(parity.compute_difference(last * np.nan, by_torch))
