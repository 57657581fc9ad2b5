from __future__ import annotations

from pathlib import Path

import pytest

from fedge.steps.contract import Failed
from fedge.steps.mixture.fit_energy import EnergyFitted, FitEnergy
from tests.support.candidates import CALIBRATION, FIT_ENERGY, WITH_LOCAL, Mixing


def test_own_weights_fit_the_validation_samples_at_least_as_well_as_the_pooled_ones(tmp_path: Path) -> None:
    found = Mixing(tmp_path).fitted().does(FIT_ENERGY)
    assert isinstance(found, EnergyFitted), found
    assert len(found.pooled_losses) == len(found.beta_losses) == 2
    for pooled, own in zip(found.pooled_losses, found.beta_losses, strict=True):
        assert own[0] <= pooled + 1e-9
    assert found.n_validation == 15


def test_with_much_shrinkage_the_own_mixture_is_the_pooled_one(tmp_path: Path) -> None:
    action = FitEnergy(calibration=CALIBRATION, pooled=(WITH_LOCAL,), shrinkage=1e9)
    found = Mixing(tmp_path).fitted().does(action)
    assert isinstance(found, EnergyFitted), found
    assert found.beta_losses[0][0] == pytest.approx(found.pooled_losses[0], rel=1e-6)
    assert len(set(found.beta_losses[0])) == 3, "energies change something"


def test_without_candidates_it_fails(tmp_path: Path) -> None:
    assert isinstance(Mixing(tmp_path).does(FIT_ENERGY), Failed)
