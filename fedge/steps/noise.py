"""What a run with differential privacy promises each sample, and requests whose answers then have noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from fedge.steps.contract import HARMLESS, Action, Reveals
from fedge.wire.messages import Count

Epsilon = Annotated[float, Meta(gt=0, le=10_000)]
Delta = Annotated[float, Meta(gt=0, lt=1)]
ClipNorm = Annotated[float, Meta(gt=0, le=1e6)]
NoiseMultiplier = Annotated[float, Meta(gt=0, le=1e6)]

NOISE_RECIPE: Final = 2
"""Version of the recipe (`fedge.steps.sgd`) from which a device adds noise to more than updates."""


def explain_weak_delta(delta: float, n_samples: int) -> str:
    """Return why delta promises nothing to each of `n_samples` samples, or "".

    With delta = 1 / n, publishing one of n samples unchanged would count as private.
    """
    if delta * n_samples < 1:
        return ""
    return f"delta {delta:g} promises nothing to {n_samples} samples: it must be well below 1 / {n_samples}, as 1e-5 is"


class Privacy(Struct, frozen=True, kw_only=True):
    """A run's promise to each sample: (epsilon, delta) for all of its orders together, or a fixed noise level.

    Give either `epsilon`, from which each device derives the noise by its number of samples, or `noise_multiplier`, the
    noise's standard deviation divided by the clip norm, which gives each device its own epsilon. `participations` is
    the most orders to train of the run for one device, `descriptions` the most other answers about its training
    samples, and `examinations` the most about its validation samples.
    """

    clip_norm: ClipNorm
    delta: Delta
    participations: Annotated[int, Meta(ge=1, le=2**53)]
    epsilon: Epsilon | None = None
    noise_multiplier: NoiseMultiplier | None = None
    descriptions: Count = 0
    examinations: Count = 0


class Noisy(Action, frozen=True, kw_only=True):
    """A request whose answer has noise if `privacy` is set, and is then accounted for (docs/privacy.md)."""

    privacy: Privacy | UnsetType = UNSET

    @property
    def timed(self) -> bool:
        """Whether the report gives the time of the work, which has no noise."""
        return super().timed and self.privacy is UNSET

    @property
    def recipe_version(self) -> int:
        """The version of the recipe that a device must know; another device would answer without noise."""
        return super().recipe_version if self.privacy is UNSET else NOISE_RECIPE

    def reveals(self) -> Mapping[str, Reveals]:
        """Return what each field reveals; with noise, all that depends on samples is accounted for."""
        revealed = super().reveals()
        if self.privacy is UNSET:
            return revealed
        return {field: kind if kind in HARMLESS else Reveals.ACCOUNTED for field, kind in revealed.items()}
