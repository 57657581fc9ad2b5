from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.device.device import Device, FailedError
from edge_agent.learning import candidates
from fedge.errors import StoreError
from fedge.models.build import make_initial_model
from fedge.steps.descriptions.mean_features import MeanFeatures
from fedge.tensors.layout import to_bytes, unflatten
from fedge.wire.messages import Role
from tests.support.candidates import CALIBRATION, WITH_LOCAL, WITHOUT_LOCAL
from tests.support.orders import LAYOUT, TASK, Blobs, device


def kept(home: Path, roles: tuple[Role, ...] = tuple(Role), number: int = 1) -> Device:
    here = device(home, MeanFeatures(model=Blobs().model(0)), number=number)
    models = {role: make_initial_model(TASK, seed)[1] for seed, role in enumerate(roles)}
    plan = candidates.Plan(private_start="initial", private_steps=None, local_steps=4)
    packed = {
        name: to_bytes(unflatten(model, LAYOUT))
        for name, model in (models | {"initial": make_initial_model(TASK, 9)[1]}).items()
    }
    candidates.save_fitted(here, candidates.FittedModels(models=packed, plan=plan, private_steps=3))
    return here


def test_what_was_kept_is_there_for_later_orders(tmp_path: Path) -> None:
    kept(tmp_path)
    later = device(tmp_path, MeanFeatures(model=Blobs().model(0)), number=5)
    found = candidates.load_fitted(later)
    assert found.roles == tuple(Role)
    assert (found.plan.private_start, found.private_steps, found.plan.local_steps) == ("initial", 3, 4)
    for seed, role in enumerate(Role):
        np.testing.assert_array_equal(found.decode_model(later, role).params, make_initial_model(TASK, seed)[1].params)


def test_candidates_are_those_of_the_device_the_calibration_and_the_pool(tmp_path: Path) -> None:
    here = kept(tmp_path, (Role.PRIVATE, Role.GLOBAL, Role.LOCAL))
    found = candidates.make_pooled_candidates(here, CALIBRATION, WITH_LOCAL)
    assert found.roles == (Role.PRIVATE, Role.GLOBAL, Role.LOCAL)
    assert [says.values.shape for says in found.answers] == [(15, 3)] * 3
    assert found.log_p.shape == found.energies.shape == (15, 3)
    assert candidates.make_pooled_candidates(here, CALIBRATION, WITHOUT_LOCAL).roles == (Role.PRIVATE, Role.GLOBAL)
    only = {Role.GLOBAL: CALIBRATION[Role.GLOBAL]}
    assert candidates.make_pooled_candidates(here, only, WITH_LOCAL).roles == (Role.GLOBAL,)
    with pytest.raises(FailedError, match="the order names expert, the device has private, global, local"):
        candidates.make_pooled_candidates(here, CALIBRATION, {Role.EXPERT: 1.0})


def test_the_log_probabilities_are_calibrated_ones(tmp_path: Path) -> None:
    here = kept(tmp_path)
    found = candidates.make_pooled_candidates(here, CALIBRATION, WITH_LOCAL)
    x, y = here.data.validation
    counts = np.bincount(here.data.shared[1], minlength=3) + 0.5
    for k, (model, says) in enumerate(zip(found.models, found.answers, strict=True)):
        np.testing.assert_allclose(np.exp(says.values).sum(axis=1), 1)
        np.testing.assert_array_equal(found.log_p[:, k], says.values[np.arange(15), y])
        scores = here.network.compute_logits(model, x) / 1.4 + 0.5 * np.log(counts / counts.sum())
        wanted = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        np.testing.assert_allclose(says.values, wanted, atol=1e-9)
    np.testing.assert_allclose(found.energies.mean(axis=0), 0, atol=1e-9)


def test_without_any_or_with_a_damaged_file_it_is_said(tmp_path: Path) -> None:
    here = device(tmp_path, MeanFeatures(model=Blobs().model(0)))
    with pytest.raises(FailedError, match="the device has no candidates: fit_candidates was not done"):
        candidates.load_fitted(here)
    here.files.write(candidates.CANDIDATES, b"no")
    with pytest.raises(StoreError, match="cannot be read"):
        candidates.load_fitted(here)
