"""Mean of the base's features over D_L (DBE, before its second phase)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta

from fedge.steps.contract import Action, Result, Reveals
from fedge.wire.messages import BlobRef, Count

MAX_FEATURES: Final = 4096
"""Most numbers in a mean of features, 9 bytes each."""


class FeaturesMeasured(Result, frozen=True, kw_only=True):
    """The mean feature vector (D,) of D_L."""

    REVEALS: ClassVar = {"mean": Reveals.FEATURES, "n_samples": Reveals.COUNT}
    mean: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MAX_FEATURES)]
    n_samples: Count


class MeanFeatures(Action, frozen=True, kw_only=True):
    """A request for the mean features that `model` computes."""

    STEP: ClassVar = "mean_features"
    RESULT: ClassVar = FeaturesMeasured

    model: BlobRef
