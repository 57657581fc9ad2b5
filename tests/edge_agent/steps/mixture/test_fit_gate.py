from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.default_method import ablated
from benchmarks.steps.ablated_gate import FitAblatedGate
from deploy import load
from deploy.inference.runtime import Runtime
from edge_agent.learning.evaluation import Figures
from edge_agent.steps.mixture import fit_gate as steps
from fedge.bundle.conformal import summarise_scores
from fedge.data.problems.calibration import Calibration
from fedge.data.problems.regression import Regression
from fedge.steps.contract import Failed
from fedge.steps.mixture.install import Installed
from fedge.steps.training.train import Start
from fedge.wire.messages import Role
from tests.support.candidates import FIT_ENERGY, FIT_WEIGHTS, WITH_LOCAL, WITHOUT_LOCAL, Mixing, fit_gate
from tests.support.orders import device_data, manifest_of, roles_of


def test_the_whole_personalisation_ends_in_a_bundle_that_predicts(tmp_path: Path) -> None:
    here = Mixing(tmp_path).fitted()
    for action in (FIT_WEIGHTS, FIT_ENERGY):
        assert not isinstance(here.does(action), Failed)
    for release, pooled in {1: WITH_LOCAL, 2: WITHOUT_LOCAL}.items():
        installed = here.does(fit_gate(pooled), f"gate-{release}")
        assert isinstance(installed, Installed), installed
        assert installed.release == release
        assert set(pooled) <= set(roles_of(tmp_path, installed))
        assert manifest_of(tmp_path, installed).max_abs_diff < 1e-4
        runtime = load(tmp_path / "bundles" / str(release))
    x, y = here.worker.data.validation
    assert np.mean(runtime.predict(x).class_index == y) > 0.7


@pytest.mark.parametrize("trains_gate", [True, False])
def test_without_the_gate_the_weights_are_the_same_for_every_sample(tmp_path: Path, trains_gate: bool) -> None:
    here = Mixing(tmp_path).fitted()
    installed = here.does(ablated(FitAblatedGate, fit_gate(beta=0.0), trains_gate=trains_gate))
    assert isinstance(installed, Installed), installed
    spread = np.ptp(load(tmp_path / "bundles" / "1").predict(here.worker.data.x_val).weights, axis=0).max()
    assert spread > 1e-3 if trains_gate else spread < 1e-6


def test_the_final_fit_changes_the_private_and_the_local_model_alone(tmp_path: Path) -> None:
    here = Mixing(tmp_path).fitted()
    for refits in (False, True):
        installed = here.does(ablated(FitAblatedGate, fit_gate(), guards=False, refits=refits), f"gate-{refits}")
        assert isinstance(installed, Installed), installed
    plain, final = (load(tmp_path / "bundles" / name).manifest.candidates for name in ("1", "2"))
    assert {a.role for a, b in zip(plain, final, strict=True) if a.part != b.part} == {Role.PRIVATE, Role.LOCAL}


def test_scores_are_those_of_models_that_have_not_learned_from_the_validation_samples(tmp_path: Path) -> None:
    here = Mixing(tmp_path).fitted()
    for refits in (False, True):
        here.does(ablated(FitAblatedGate, fit_gate(), guards=False, refits=refits), f"gate-{refits}")
    plain, final = (load(tmp_path / "bundles" / name) for name in ("1", "2"))
    x, y = here.worker.data.validation
    assert plain.manifest.scores == final.manifest.scores
    assert len(y) == len(summarise(final, x, y))
    assert final.manifest.scores != summarise(final, x, y)


def summarise(runtime: Runtime, x: NDArray[np.float32], y: NDArray[np.int64]) -> tuple[float, ...]:
    return summarise_scores(runtime.task.problem, runtime.predict_inputs(x).answers, y)


def test_a_damaged_mixture_is_guarded_by_the_local_model_that_the_pool_left_out(tmp_path: Path) -> None:
    here = Mixing(tmp_path, device_data(60, 30), experts=0)
    damaged = here.blobs.model(1, scale=200.0)
    fit = here.fit.__class__(
        global_model=damaged, experts=(Start(model=damaged, cluster=0),), initial_model=here.blobs.model(0),
        sgd=here.fit.sgd, local_steps=60,
    )  # fmt: skip
    here.does(fit)
    installed = here.does(fit_gate({Role.GLOBAL: 1.0}))
    assert isinstance(installed, Installed), installed
    assert manifest_of(tmp_path, installed).fusion.guard is not None
    assert roles_of(tmp_path, installed) == (Role.GLOBAL, Role.LOCAL)
    unguarded = here.does(ablated(FitAblatedGate, fit_gate({Role.GLOBAL: 1.0}), guards=False), "again")
    assert isinstance(unguarded, Installed), unguarded
    assert manifest_of(tmp_path, unguarded).fusion.guard is None
    assert roles_of(tmp_path, unguarded) == (Role.GLOBAL,)


def test_the_guards_global_model_has_no_offset_and_keeps_the_deviation_of_its_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Regression(targets=("delay",), mean=(0.0,), std=(1.0,))
    y = np.tile(np.arange(10, dtype=np.float32), 2)[:, np.newaxis]
    data = SimpleNamespace(labelled=(y, y), n_train=10)
    device: Any = SimpleNamespace(task=SimpleNamespace(problem=problem), data=data)
    fitted: Any = SimpleNamespace(roles=(Role.GLOBAL,), decode_model=lambda *_: None)
    seen = []

    def measure_model(_device: object, _model: object, how: Calibration, _offset: object) -> Figures:
        seen.append(how)
        return Figures(0.0, 0.0, {})

    monkeypatch.setattr(steps, "measure_model", measure_model)
    monkeypatch.setattr(steps, "fit_own_offset", lambda *_: np.zeros(1))
    calibration = {Role.GLOBAL: Calibration(temperature=1.0, kappa=0.5, deviation=(0.4,))}
    steps.choose_guard(device, fitted, calibration, Figures(0.0, 0.0, {}))
    assert seen == [Calibration(temperature=1.0, kappa=0.0, deviation=(0.4,))]


def test_without_candidates_it_fails_and_no_release_is_used_up(tmp_path: Path) -> None:
    here = Mixing(tmp_path)
    assert isinstance(here.does(fit_gate()), Failed)
    assert not (tmp_path / "bundles").exists()
    installed = here.fitted().does(fit_gate(), "again")
    assert isinstance(installed, Installed)
    assert installed.release == 1
