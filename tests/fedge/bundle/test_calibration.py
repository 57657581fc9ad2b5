"""The grids that devices and coordinator share."""

import msgspec
import pytest

from fedge.bundle.calibration import BETAS
from fedge.data.problems.calibration import Calibration
from fedge.data.problems.classification import Classification
from fedge.steps.mixture.fit_candidates import CandidatesFitted
from fedge.steps.mixture.fit_energy import EnergyFitted
from fedge.wire.messages import Role

TEMPERATURES = (1.0, 1.4, 2.0, 2.8)
SHARED, OWN = (0.0, 0.5, 1.0, 1.5), (0.0, 0.3, 0.6, 1.0)
KAPPAS = {Role.PRIVATE: OWN, Role.GLOBAL: SHARED, Role.EXPERT: SHARED, Role.LOCAL: OWN}
"""fedge.md section 7."""


def list_choices(role: Role) -> tuple[Calibration, ...]:
    return Classification(classes=("a", "b")).list_choices(own=not role.is_shared)


@pytest.mark.parametrize("role", Role)
def test_a_point_is_found_by_its_place_temperature_outermost(role: Role) -> None:
    points = list_choices(role)
    assert points[0] == Calibration(temperature=1.0, kappa=0.0)
    assert [p.kappa for p in points[:4]] == list(KAPPAS[role])
    assert [p.temperature for p in points[::4]] == list(TEMPERATURES)
    assert len(set(map(repr, points))) == len(points) == 16


def test_a_report_has_room_for_each_point() -> None:
    fitted = CandidatesFitted(losses={role: (0.0,) * len(list_choices(role)) for role in Role}, n_validation=1)
    energy = EnergyFitted(pooled_losses=(0.0,), beta_losses=((0.0,) * len(BETAS),), n_validation=1)
    for report in (fitted, energy):
        assert msgspec.convert(msgspec.to_builtins(report), type=type(report)) == report
