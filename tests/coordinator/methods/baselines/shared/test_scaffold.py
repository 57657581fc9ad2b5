"""SCAFFOLD against a plain loop in float64, also where reports are lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.aggregation.protection import Protection
from coordinator.fleet.fleet import Answer
from coordinator.methods.baselines.shared.scaffold import Scaffold, ScaffoldState
from coordinator.methods.settings import MethodSettings
from fedge.models.build import make_initial_model
from fedge.steps.sgd import Sgd
from fedge.tensors.layers import select_params
from fedge.tensors.layout import Codec, Layout, Model
from tests.support.plain_loop import Gradients
from tests.support.simulation import Fleet, digits, lose_sums, rounds

SGD = Sgd(steps=7, batch_size=16, learning_rate=0.1)
ROUNDS = 4


def in_a_plain_loop(
    fleet: Fleet, layout: Layout, first: Model, cohorts: Sequence[Sequence[str]], lost: Collection[tuple[int, str]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x and c after Algorithm 1, in float64, without the answers that are lost (round, device)."""
    gradients = Gradients(fleet, layout, first)
    ids = [device.id for device in fleet.get_devices()]
    w, c = first.params.astype(np.float64), np.zeros(layout.n_params)
    own = {i: np.zeros_like(c) for i in ids}
    for r, cohort in enumerate(cohorts, start=1):
        moved, new = [], {}
        for i in cohort:
            at = w.copy()
            for gradient in gradients.of_round(r, i, SGD):
                at -= SGD.learning_rate * (gradient(at) - own[i] + c)
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
    """The device hears it with its next order, and goes on from the control variate before."""
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


async def test_a_sum_that_a_relay_does_not_send_moves_neither_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay has accepted the reports of its devices, which learn of it with their next orders."""
    fleet, layout, method = made(tmp_path)
    far = ("d01", "d03")
    lose_sums(fleet, monkeypatch, far=far, lost={1, 3})
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    state = await rounds(method, method.init(layout, first), fleet, ROUNDS)
    require_equal(fleet, layout, state, fleet.get(first, layout), {(r, i) for r in (1, 3) for i in far})


async def test_an_update_that_is_left_out_as_too_long_moves_neither_side(tmp_path: Path) -> None:
    """Its report has been accepted; the device goes on from the control variate before."""
    fleet, layout, method = made(tmp_path)
    fleet.change = lambda _, answers: answers.update(d02=Answer("d02", None)) if fleet.round == 2 else None
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    state = await rounds(method, method.init(layout, first), fleet, ROUNDS)
    require_equal(fleet, layout, state, fleet.get(first, layout), {(2, "d02")})


async def test_after_an_early_stop_a_campaign_begins_with_new_control_variates(tmp_path: Path) -> None:
    """Its state is that of an earlier round, and the devices have gone on."""
    fleet, layout, method = made(tmp_path, patience=1)
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    state = await rounds(method, method.init(layout, first), fleet, ROUNDS)
    assert state.best_state
    assert state.counted
    begun = method.begin_campaign(state, ())
    assert (begun.model, begun.control, begun.counted) == (state.model, None, {})
    goes_on = method.begin_campaign(msgspec.structs.replace(state, best_state=msgspec.UNSET), ())
    assert (goes_on.control, goes_on.counted) == (state.control, state.counted)


async def test_c_moves_even_if_too_few_reports_leave_x_as_it_is(tmp_path: Path) -> None:
    """The device has moved its control variate, since its report was accepted."""
    fleet, layout, method = made(tmp_path, min_reports=2)
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    fleet.unresponsive = frozenset(fleet.workers) - {"d01"}
    state = await rounds(method, method.init(layout, first), fleet)
    assert state.model == first
    assert state.control is not None
    c = fleet.get(state.control, select_params(layout)).params
    fleet.unresponsive = frozenset()
    after = await rounds(method, state, fleet)
    assert after.model != first
    assert np.abs(c).max() > 0


async def test_without_answers_nothing_moves(tmp_path: Path) -> None:
    fleet, layout, method = made(tmp_path)
    first = fleet.put_model(make_initial_model(fleet.task, 0)[1], layout)
    fleet.unresponsive = frozenset(fleet.workers)
    state = await rounds(method, method.init(layout, first), fleet)
    assert (state.round, state.model, state.control) == (1, first, None)
