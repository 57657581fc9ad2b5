"""q-FedAvg: its step by hand, FedAvg with q = 0, losses that are missing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.fleet.fleet import Answer
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.baselines.shared.q_fedavg import QFedAvg, compute_scale
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, rounds

SGD = Sgd(steps=4, learning_rate=0.1, momentum=0.5)
EXACT = {"rounds": 3, "sgd": SGD, "codec": Codec.FLOAT32, "down": "float32"}


def test_the_scale_by_hand() -> None:
    """L = 10, F = (2, 1), |delta| = (1, 2), p = (3/4, 1/4), q = 2: h / L = (2*2*10*1 + 4, 2*1*10*4 + 1) = (44, 81)."""
    found = compute_scale(np.array([2.0, 1.0]), np.array([1.0, 2.0]), np.array([0.75, 0.25]), q=2, lipschitz=10)
    assert found == pytest.approx(1 / (0.75 * 44 + 0.25 * 81))


async def test_a_round_is_the_papers_step(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    method = QFedAvg(MethodSettings(**EXACT, options={"q": 2.0}))
    state = await rounds(method, method.init(layout, first), fleet)
    updates = [answer.result for answer in fleet.heard if isinstance(answer.result, Trained)]
    deltas = np.stack([fleet.get(u.update, layout).params.astype(np.float64) for u in updates])
    losses, n = (np.array([getattr(u, name) for u in updates]) for name in ("loss_before", "n_samples"))
    p, lipschitz = n / n.sum(), 0.5 / 0.1
    h = 2 * losses * np.square(lipschitz * deltas).sum(axis=1) + lipschitz * losses**2
    step = (p * losses**2 * lipschitz) @ deltas / (p @ h)
    found = fleet.get(state.model, layout).params - fleet.get(first, layout).params
    np.testing.assert_allclose(found, step, atol=1e-6)
    assert np.abs(found).max() > 1e-3


async def test_with_q_0_it_is_fedavg(tmp_path: Path) -> None:
    states = []
    for name, kind, options in (("a", QFedAvg, {"q": 0.0}), ("b", FedAvg, {})):
        fleet, layout, first, _ = digits(tmp_path / name, n=4, limit=400)
        method = kind(MethodSettings(**{**EXACT, "rounds": 2}, participation=0.5, options=options))
        state = await run_rounds(method, method.init(layout, first), fleet)
        states.append(fleet.get(state.model, layout).params)
    np.testing.assert_allclose(*states, atol=1e-6)


async def test_an_update_without_its_loss_does_not_count(tmp_path: Path) -> None:
    """Its owner withholds losses. With a single device that does so, the model stays; so it does without answers."""
    fleet, layout, first, _ = digits(tmp_path, n=1, limit=100)

    def withhold(_: str, answers: dict[str, Answer]) -> None:
        for i, answer in answers.items():
            assert isinstance(answer.result, Trained)
            answers[i] = Answer(i, msgspec.structs.replace(answer.result, loss_before=None))

    method = QFedAvg(MethodSettings(**EXACT))
    fleet.change = withhold
    state = await rounds(method, method.init(layout, first), fleet)
    assert (state.model, state.participations) == (first, {})
    fleet.change, fleet.unresponsive = (lambda *_: None), frozenset(fleet.workers)
    assert (await rounds(method, state, fleet)).model == first


def test_adam_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no --optimizer"):
        make_method("q-fedavg", MethodSettings(sgd=Sgd(optimizer="adam")))
