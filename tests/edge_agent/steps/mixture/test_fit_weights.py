from __future__ import annotations

from pathlib import Path

import pytest

from fedge.steps.contract import Failed
from fedge.steps.mixture.fit_weights import FitWeights, WeightsFitted
from fedge.wire.messages import Role
from tests.support.candidates import CALIBRATION, FIT_WEIGHTS, WITH_LOCAL, WITHOUT_LOCAL, Mixing


def test_there_are_weights_for_each_pooled_mean(tmp_path: Path) -> None:
    found = Mixing(tmp_path).fitted().does(FIT_WEIGHTS)
    assert isinstance(found, WeightsFitted), found
    assert [set(weights) for weights in found.weights] == [set(WITHOUT_LOCAL), set(WITH_LOCAL)]
    assert all(sum(weights.values()) == pytest.approx(1) for weights in found.weights)
    assert found.n_validation == 15


def test_the_stronger_the_shrinkage_the_nearer_to_the_pooled_mean(tmp_path: Path) -> None:
    here, distances = Mixing(tmp_path).fitted(), []
    for shrinkage in (0.1, 10.0, 1e6):
        found = here.does(FitWeights(calibration=CALIBRATION, pooled=(WITH_LOCAL,), shrinkage=shrinkage))
        assert isinstance(found, WeightsFitted)
        distances.append(sum(abs(found.weights[0][role] - WITH_LOCAL[role]) for role in Role))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-4


def test_without_candidates_it_fails(tmp_path: Path) -> None:
    found = Mixing(tmp_path).does(FIT_WEIGHTS)
    assert isinstance(found, Failed)
    assert "no candidates" in found.reason
