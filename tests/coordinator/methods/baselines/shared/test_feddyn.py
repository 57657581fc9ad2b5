"""FedDyn against a plain loop in float64, also where reports are lost; a toy whose fixed point is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.aggregation.protection import Protection
from coordinator.methods.baselines.shared.feddyn import FedDyn, FedDynState
from coordinator.methods.settings import MethodSettings
from fedge.models.build import make_initial_model
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec, Layout, Model
from tests.support.plain_loop import Gradients
from tests.support.simulation import Fleet, digits, lose_sums, rounds

SGD = Sgd(steps=5, batch_size=16, learning_rate=0.1, momentum=0.0)
ROUNDS, ALPHA = 3, 0.3


def in_a_plain_loop(
    fleet: Fleet, layout: Layout, first: Model, cohorts: Sequence[Sequence[str]], lost: Collection[tuple[int, str]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Theta and h after Algorithm 1, in float64, without the answers that are lost (round, device)."""
    gradients = Gradients(fleet, layout, first)
    ids = [device.id for device in fleet.get_devices()]
    theta, h = first.params.astype(np.float64), np.zeros(layout.n_params)
    own = {i: np.zeros_like(h) for i in ids}
    for r, cohort in enumerate(cohorts, start=1):
        trained = {}
        for i in cohort:
            at = theta.copy()
            for gradient in gradients.of_round(r, i, SGD):
                at -= SGD.learning_rate * (gradient(at) - own[i] + ALPHA * (at - theta))
            if (r, i) not in lost:
                trained[i] = at
        for i, at in trained.items():
            own[i] = own[i] - ALPHA * (at - theta)
        h -= ALPHA / len(ids) * sum(at - theta for at in trained.values())
        theta = np.mean(list(trained.values()), axis=0) - h / ALPHA
    return theta, h


def made(home: Path, n: int = 4, **changes: object) -> tuple[Fleet, Layout, FedDyn, FedDynState]:
    fleet, layout, *_ = digits(home, n=n, how="dirichlet", alpha=0.3, limit=300, sensitive=0.2)
    settings = MethodSettings(
        rounds=ROUNDS,
        sgd=SGD,
        codec=Codec.FLOAT32,
        down="float32",
        protection=Protection(average="mean"),
        options={"alpha": ALPHA},
    )
    method = FedDyn(msgspec.structs.replace(settings, **changes))
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    return fleet, layout, method, method.init(layout, first)


@pytest.mark.parametrize(
    ("participation", "lost"), [(0.5, frozenset[tuple[int, str]]()), (1.0, {(1, "d00"), (2, "d00"), (2, "d03")})]
)
async def test_as_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, participation: float, lost: Collection[tuple[int, str]]
) -> None:
    """A report that comes too late moves neither h nor the device's gradient, as it hears with its next order."""
    fleet, layout, method, state = made(tmp_path, participation=participation)
    first = fleet.get(state.model, layout)
    monkeypatch.setattr(fleet, "_deadline_s", 100.0)
    monkeypatch.setattr(
        fleet, "_compute_seconds", lambda order, *_, **__: 1000.0 if (order.round, order.device_id) in lost else 1.0
    )
    state = await rounds(method, state, fleet, ROUNDS)
    cohorts = [[i for at, label, i in fleet.asked if (at, label) == (r, "train")] for r in range(1, ROUNDS + 1)]
    theta, h = in_a_plain_loop(fleet, layout, first, cohorts, lost)
    assert state.drift is not None
    np.testing.assert_allclose(fleet.get(state.model, layout).params, theta, atol=1e-5)
    np.testing.assert_allclose(fleet.get_tensors(state.drift)["h"], h, atol=1e-5)
    assert np.abs(theta - first.params).max() > 0.05


async def test_a_sum_that_a_relay_does_not_send_moves_neither_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay has accepted the reports of its devices, which learn of it with their next orders."""
    fleet, layout, method, state = made(tmp_path)
    first, far = fleet.get(state.model, layout), ("d01", "d03")
    lose_sums(fleet, monkeypatch, far=far, lost={1})
    state = await rounds(method, state, fleet, ROUNDS)
    cohorts = [sorted(fleet.workers)] * ROUNDS
    theta, h = in_a_plain_loop(fleet, layout, first, cohorts, {(1, i) for i in far})
    assert state.drift is not None
    np.testing.assert_allclose(fleet.get(state.model, layout).params, theta, atol=1e-5)
    np.testing.assert_allclose(fleet.get_tensors(state.drift)["h"], h, atol=1e-5)


async def test_a_single_device_doubles_its_step_at_first(tmp_path: Path) -> None:
    """With m = 1, h = -alpha delta, so theta moves by delta + delta."""
    fleet, layout, method, state = made(tmp_path, n=1)
    after = await rounds(method, state, fleet)
    (update,) = (fleet.get(answer.result.update, layout).params for answer in fleet.heard)  # type: ignore[union-attr]
    moved = fleet.get(after.model, layout).params - fleet.get(state.model, layout).params
    np.testing.assert_allclose(moved, 2 * update, atol=1e-6)


async def test_without_answers_nothing_moves_and_with_too_few_only_h(tmp_path: Path) -> None:
    fleet, _, method, state = made(tmp_path, min_reports=2)
    fleet.unresponsive = frozenset(fleet.workers)
    after = await rounds(method, state, fleet)
    assert (after.model, after.drift) == (state.model, None)
    fleet.unresponsive = frozenset(fleet.workers) - {"d02"}
    after = await rounds(method, after, fleet)
    assert after.model == state.model
    assert after.drift is not None
