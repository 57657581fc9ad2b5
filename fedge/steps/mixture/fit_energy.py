"""fedge.md section 9: losses of the mixture with and without energies on the validation samples."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Result, Reveals, require
from fedge.steps.mixture.fit_weights import OfPooled
from fedge.wire.messages import Count


class EnergyFitted(Result, frozen=True, kw_only=True):
    """For each pooled mean, the sum of validation losses of its mixture, and one sum for each beta in (0, 0.5, 1)."""

    REVEALS: ClassVar = {
        "pooled_losses": Reveals.LOSS,
        "beta_losses": Reveals.LOSS,
        "n_validation": Reveals.COUNT,
    }
    pooled_losses: Annotated[tuple[float, ...], Meta(min_length=1, max_length=4)]
    beta_losses: Annotated[tuple[tuple[float, float, float], ...], Meta(min_length=1, max_length=4)]
    n_validation: Count


class FitEnergy(OfPooled, frozen=True, kw_only=True):
    """A request for the losses of each pooled mixture, and of the device's own mixture for each beta."""

    STEP: ClassVar = "fit_energy"
    RESULT: ClassVar = EnergyFitted

    def check(self, result: EnergyFitted, task: TaskSpec) -> None:
        """Require losses for each variant."""
        n = len(self.pooled)
        require(
            len(result.pooled_losses) == n == len(result.beta_losses), "the number of losses is not the one asked for"
        )
