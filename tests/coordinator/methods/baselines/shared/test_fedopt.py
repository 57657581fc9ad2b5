"""FedAdam and FedYogi: two steps by hand, what overflows, rounds of one device and of none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation import Average
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.baselines.shared.fedopt import FedAdam, FedOptState, FedYogi
from coordinator.methods.settings import MethodSettings
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import Fleet, digits, rounds

OPTIONS = {"server_rate": 0.5, "tau": 0.5}
SETTINGS = MethodSettings(rounds=3, sgd=Sgd(steps=4), codec=Codec.FLOAT32, down="float32", options=OPTIONS)
KINDS = [FedAdam, FedYogi]


def made(home: Path, kind: type[FedAdam], **named: int) -> tuple[Fleet, FedAdam, FedOptState]:
    fleet, layout, first, _ = digits(home, limit=400, **named)
    method = kind(SETTINGS)
    state = method.init(layout, first)
    assert isinstance(state, FedOptState)
    return fleet, method, state


def change(fleet: Fleet, state: FedOptState, value: float) -> Average:
    w = fleet.get(state.model, state.layout)
    return Average(np.full(len(w.params), value), w.buffers.astype(np.float64), w.counters, 1.0)


@pytest.mark.parametrize(
    ("kind", "v"),
    [
        (FedAdam, (0.2575, 0.264925)),  # 0.99 * 1/4 + 0.01 * 1; 0.99 * 0.2575 + 0.01 * 1
        (FedYogi, (0.26, 0.27)),  # v < 1, so each time + 0.01 * 1
    ],
)
def test_two_steps_by_hand(tmp_path: Path, kind: type[FedAdam], v: tuple[float, float]) -> None:
    """With Delta = 1 both times, m is 0.1, then 0.19; v is 1/4 at first."""
    fleet, method, state = made(tmp_path, kind, n=2)
    w = fleet.get(state.model, state.layout).params.astype(np.float64)
    for m, now in zip((0.1, 0.19), v, strict=True):
        state = method.step_server(state, change(fleet, state, 1.0), fleet)  # type: ignore[assignment]
        w += 0.5 * m / (np.sqrt(now) + 0.5)
        np.testing.assert_allclose(fleet.get(state.model, state.layout).params, w, atol=1e-6)


def test_a_large_change_is_forgotten_less_quickly_by_yogi() -> None:
    """v = 100, then Delta^2 = 4: Adam loses a hundredth of v, Yogi a hundredth of the change."""
    adam, yogi = (kind(SETTINGS).update_second_moment(np.array([100.0]), np.array([4.0])) for kind in KINDS)
    assert adam.tolist() == pytest.approx([99.04])
    assert yogi.tolist() == pytest.approx([99.96])


def test_what_would_overflow_changes_nothing(tmp_path: Path) -> None:
    fleet, method, state = made(tmp_path, FedAdam, n=2)
    assert method.step_server(state, change(fleet, state, 1e30), fleet) == state


@pytest.mark.parametrize("kind", KINDS)
async def test_a_round_steps_by_fedavgs_mean_change(tmp_path: Path, kind: type[FedAdam]) -> None:
    """In the first round every number moves by eta (1 - beta1) Delta / (sqrt(v) + tau)."""
    fleet, method, state = made(tmp_path / "a", kind, n=3)
    after = await rounds(method, state, fleet)
    other, layout, first, _ = digits(tmp_path / "b", n=3, limit=400)
    plain = await rounds(FedAvg(MethodSettings(**EXACT)), FedAvg(MethodSettings()).init(layout, first), other)
    w, moved, averaged = (
        fleet.get(state.model, layout).params.astype(np.float64),
        fleet.get(after.model, layout).params,
        other.get(plain.model, layout).params,
    )
    delta = averaged - w
    v = 0.99 * 0.25 + 0.01 * delta**2 if kind is FedAdam else 0.25 - 0.01 * delta**2 * np.sign(0.25 - delta**2)
    np.testing.assert_allclose(moved - w, 0.05 * delta / (np.sqrt(v) + 0.5), atol=1e-6)


EXACT = {"rounds": 3, "sgd": Sgd(steps=4), "codec": Codec.FLOAT32, "down": "float32"}


async def test_an_unresponsive_round_changes_neither_model_nor_moments(tmp_path: Path) -> None:
    fleet, method, state = made(tmp_path, FedYogi, n=1)
    before = await rounds(method, state, fleet)  # a single device
    assert before.moments is not None
    fleet.unresponsive = frozenset(fleet.workers)
    after = await rounds(method, before, fleet)
    assert (after.model, after.moments) == (before.model, before.moments)
