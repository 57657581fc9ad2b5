from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.default_method import ablated
from benchmarks.steps.ablated_candidates import FitAblatedCandidates
from edge_agent.learning.candidates import FittedModels, load_fitted
from edge_agent.learning.evaluation import compute_loss
from fedge.steps.contract import Failed
from fedge.steps.mixture.fit_candidates import CandidatesFitted, FitCandidates
from fedge.steps.mixture.fit_energy import EnergyFitted
from fedge.steps.mixture.fit_weights import WeightsFitted
from fedge.steps.mixture.install import Installed
from fedge.steps.training.train import Start
from fedge.system.stopping import StoppedError
from fedge.wire.messages import Role
from tests.support.candidates import FIT_ENERGY, FIT_WEIGHTS, WITH_LOCAL, Mixing, fit_candidates, fit_gate
from tests.support.orders import Blobs, device, device_data, order, roles_of, worker


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


def done(home: Path, action: FitCandidates, blobs: Blobs) -> tuple[CandidatesFitted, FittedModels]:
    result = worker(home).execute(order(action), blobs, action=action).result
    assert isinstance(result, CandidatesFitted), result
    return result, load_fitted(device(home, action, blobs))


def test_each_candidate_is_told_by_its_losses_and_kept(tmp_path: Path, blobs: Blobs) -> None:
    result, kept = done(tmp_path, fit_candidates(blobs), blobs)
    assert list(result.losses) == list(Role) == list(kept.roles)
    assert result.cluster in {0, 1}
    assert result.n_validation == 15
    assert result.losses[Role.PRIVATE][0] < result.losses[Role.GLOBAL][0]


def test_the_expert_is_the_one_with_the_smallest_validation_loss(tmp_path: Path, blobs: Blobs) -> None:
    starts = tuple(Start(model=blobs.model(seed), cluster=seed) for seed in range(10, 15))
    action = fit_candidates(blobs, experts=0, local_steps=0)
    action = msgspec.structs.replace(action, experts=starts)
    here = device(tmp_path, action, blobs)
    losses = {
        start.cluster: compute_loss(here, here.fetch_model(start.model), here.data.validation) for start in starts
    }
    result, kept = done(tmp_path, action, blobs)
    assert result.cluster == min(losses, key=losses.__getitem__) != starts[0].cluster
    expected = here.fetch_model(next(start.model for start in starts if start.cluster == result.cluster))
    np.testing.assert_array_equal(kept.decode_model(here, Role.EXPERT).params, expected.params)


def test_the_private_model_may_start_from_the_initial_model_and_take_a_number_of_steps(
    tmp_path: Path, blobs: Blobs
) -> None:
    """As it would learn from the initial model if that were the global one; the final fit then takes as many steps."""
    first = blobs.model(0)
    plain = {"experts": 0, "global_model": first, "local_steps": 0}
    shared = {"experts": 0, "local_steps": 0}
    losses, kept = {}, {}
    for name, order_of, changes in [
        ("best", shared, {}),
        ("initial", shared, {"private_start": "initial"}),
        ("initial, 7", shared, {"private_start": "initial", "private_steps": 7}),
        ("plain", plain, {}),
        ("plain, 7", plain, {"private_steps": 7}),
    ]:
        action = ablated(FitAblatedCandidates, fit_candidates(blobs, **order_of), **changes)
        result, kept[name] = done(tmp_path / name, action, blobs)
        losses[name] = result.losses[Role.PRIVATE]
    assert losses["initial"] == losses["plain"] != losses["best"]
    assert losses["initial, 7"] == losses["plain, 7"] != losses["plain"]
    assert kept["initial, 7"].private_steps == 7
    starts = {name: one.models[one.plan.private_start] for name, one in kept.items()}
    assert starts["initial, 7"] == starts["plain"] != starts["best"]


def test_it_can_be_stopped_and_nothing_is_kept(tmp_path: Path, blobs: Blobs) -> None:
    asked = iter([False, False, True])
    with pytest.raises(StoppedError):
        worker(tmp_path).execute(order(fit_candidates(blobs)), blobs, stop=lambda: next(asked))
    assert not (tmp_path / "kept").exists()


def test_every_order_done_twice_or_after_a_restart_gives_the_same(tmp_path: Path) -> None:
    here = Mixing(tmp_path)
    for action in (here.fit, FIT_WEIGHTS, FIT_ENERGY, fit_gate()):
        asked = order(action, label=action.STEP)
        first = here.worker.execute(asked, here.blobs)
        assert not isinstance(first.result, Failed), first.result
        assert here.worker.execute(asked, here.blobs) == first
        assert worker(tmp_path).execute(asked, here.blobs) == first  # as after kill -9
    assert {p.name for p in (tmp_path / "kept" / "r").iterdir()} == {"candidates", "release"}
    assert [p.name for p in (tmp_path / "bundles").iterdir()] == ["1"]


@pytest.mark.parametrize(("n", "m"), [(40, 0), (1, 3), (0, 0), (2, 1), (30, 12)])
def test_devices_with_little_data_get_a_mixture_of_what_they_have(tmp_path: Path, n: int, m: int) -> None:
    data = device_data(n, m, sensitive=0)
    here = Mixing(tmp_path, replace(data, y_train=data.y_train * 0), experts=0)  # one class only
    fitted = here.does(here.fit)
    assert isinstance(fitted, CandidatesFitted), fitted
    expected = {Role.GLOBAL} | ({Role.PRIVATE, Role.LOCAL} if n >= 2 else set())
    assert set(fitted.losses) == expected
    assert fitted.n_validation == m
    weighed = here.does(FIT_WEIGHTS)
    assert isinstance(weighed, WeightsFitted), weighed
    assert set(weighed.weights[1]) == expected
    if m == 0 and n >= 2:
        assert weighed.weights[1][Role.PRIVATE] == pytest.approx(0.5)  # u spread over those present
    assert isinstance(here.does(FIT_ENERGY), EnergyFitted)
    installed = here.does(fit_gate(WITH_LOCAL))
    assert isinstance(installed, Installed), installed
    assert set(roles_of(tmp_path, installed)) == expected
