"""SCAFFOLD, as a user's own method whose step sends and keeps control variates: the numbers of a plain loop."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from methods.scaffold import Scaffold, ScaffoldState, select_params
from numpy.typing import NDArray
from torch.nn import functional

from coordinator.aggregation.protection import Protection
from coordinator.methods.settings import MethodSettings
from fedge.models.build import make_initial_model, make_network
from fedge.models.training import draw_batches
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec, Layout, Model, unflatten
from tests.support.simulation import Fleet, digits, rounds

SGD = Sgd(steps=7, batch_size=16, learning_rate=0.1)
ROUNDS = 4


def seed_of(number: int, device: str) -> int:
    """The seed of a device's order of training in a round, in a federation of seed 0."""
    return int.from_bytes(hashlib.sha256(f"0.{number}.train.{device}".encode()).digest()[:6])


def in_a_plain_loop(
    fleet: Fleet, layout: Layout, first: Model, cohorts: Sequence[Sequence[str]], lost: Collection[tuple[int, str]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x and c after Algorithm 1, in float64, without the answers that are lost (round, device)."""
    network = make_network(fleet.task)
    names = [info.name for info in layout.select_kind("param")]

    def gradient(weights: NDArray[np.float64], x: torch.Tensor, y: torch.Tensor) -> NDArray[np.float64]:
        tensors = unflatten(Model(weights.astype(np.float32), first.buffers, first.counters), layout)
        network.load_state_dict({name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()})
        network.zero_grad()
        functional.cross_entropy(network(x), y).backward()
        found = dict(network.named_parameters())
        return np.concatenate([found[name].grad.numpy().ravel() for name in names]).astype(np.float64)  # type: ignore[union-attr]

    ids = [device.id for device in fleet.get_devices()]
    w, c = first.params.astype(np.float64), np.zeros(layout.n_params)
    own = {i: np.zeros_like(c) for i in ids}
    for r, cohort in enumerate(cohorts, start=1):
        moved, new = [], {}
        for i in cohort:
            x, y = (torch.from_numpy(np.array(part)) for part in fleet.workers[i].data.shared)
            drawn = draw_batches(len(y), SGD.batch_size, np.random.default_rng(seed_of(r, i)))
            at = w.copy()
            for _ in range(SGD.steps):
                batch = next(drawn)
                at -= SGD.learning_rate * (gradient(at, x[batch], y[batch]) - own[i] + c)
            if (r, i) not in lost:
                moved.append(at - w)
                new[i] = own[i] - c + (w - at) / (SGD.steps * SGD.learning_rate)
        w += np.mean(moved, axis=0)
        c += sum(new[i] - own[i] for i in new) / len(ids)
        own |= new
    return w, c


def made(home: Path, **changes: object) -> tuple[Fleet, Layout, Scaffold]:
    fleet, layout, *_ = digits(home, n=5, how="dirichlet", alpha=0.1, limit=500, sensitive=0.2)
    whole = Protection(average="mean")
    settings = MethodSettings(rounds=ROUNDS, sgd=SGD, codec=Codec.FLOAT32, down="float32", protection=whole)
    return fleet, layout, Scaffold(msgspec.structs.replace(settings, **changes))


def require_equal(
    fleet: Fleet, layout: Layout, state: ScaffoldState, first: Model, lost: Collection[tuple[int, str]]
) -> None:
    cohorts = [[i for at, label, i in fleet.asked if (at, label) == (r, "train")] for r in range(1, ROUNDS + 1)]
    x, c = in_a_plain_loop(fleet, layout, first, cohorts, lost)
    assert state.control is not None
    np.testing.assert_allclose(fleet.get(state.model, layout).params, x, atol=1e-6)
    np.testing.assert_allclose(fleet.get(state.control, select_params(layout)).params, c, atol=1e-6)
    assert np.abs(x - first.params).max() > 0.1
    assert np.abs(c).max() > 0.01


@pytest.mark.parametrize("participation", [1.0, 0.5])
async def test_as_a_plain_loop(tmp_path: Path, participation: float) -> None:
    fleet, layout, method = made(tmp_path, participation=participation)
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    state = await rounds(method, method.init(layout, first), fleet, ROUNDS)
    require_equal(fleet, layout, state, fleet.get(first, layout), lost=())


async def test_a_report_that_comes_too_late_moves_neither_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device hears it with its next order (`was_counted`), and goes on from the control variate before."""
    fleet, layout, method = made(tmp_path)
    late = {(1, "d00"), (2, "d00"), (2, "d03"), (3, "d01")}
    monkeypatch.setattr(fleet, "_deadline_s", 100.0)
    monkeypatch.setattr(
        fleet, "_compute_seconds", lambda order, *_, **__: 1000.0 if (order.round, order.device_id) in late else 1.0
    )
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    state = await rounds(method, method.init(layout, first), fleet, ROUNDS)
    assert {
        (r, a.device_id) for r, a in zip([r for r, _, _ in fleet.asked], fleet.heard, strict=True) if a.result is None
    } == late
    require_equal(fleet, layout, state, fleet.get(first, layout), late)
