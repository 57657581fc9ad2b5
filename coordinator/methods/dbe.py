"""DBE: a vector that is added to the features stays on the device; the shared features' mean is drawn to a global one.

Source: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023; pm_moe.md
section 4. Round 1 is FedAvg's; at its end every device tells the mean of its features once, under the new global model,
and the mean of those means, weighted by samples, is fixed as g. If nobody answers, the next round is like the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from coordinator.fleet import Fleet
from coordinator.methods import Idle, MethodSettings, options_of
from coordinator.methods.fedavg import FedAvgOptions
from coordinator.methods.keeping import Keeping, KeepingState
from fedge.errors import ConfigError
from fedge.messages import MAX_FEATURES, BlobRef, FeaturesMeasured, KeepOffset, MeanFeatures, Part
from fedge.tensors import Layout


class DbeOptions(FedAvgOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`feature_momentum`: m, of the running mean of the features; `kappa`: weight of the regulariser."""

    IDLE: ClassVar[tuple[Idle, ...]] = (Idle(("feature_momentum",), {"kappa": (0,)}, "there is no regulariser"),)
    feature_momentum: Annotated[float, Meta(gt=0, le=1)] = 1.0
    kappa: Annotated[float, Meta(ge=0)] = 1.0


class DbeState(KeepingState, frozen=True, kw_only=True):
    """`global_mean`: g (D,), once it is measured."""

    global_mean: BlobRef | None = None


class Dbe(Keeping[DbeState]):
    """Base and head travel; the prediction is Hd(B(x) + P_i)."""

    name = "dbe"
    kind = DbeState
    Options: ClassVar[type[FedAvgOptions]] = DbeOptions

    def __init__(self, settings: MethodSettings) -> None:
        super().__init__(settings)
        own = options_of(settings, DbeOptions)
        self.feature_momentum, self.kappa = own.feature_momentum, own.kappa

    def initial(self, layout: Layout, model: BlobRef) -> DbeState:
        """The state before round 1.

        Raises:
            ConfigError: the network has no linear layer as its last one, or more features than a message takes.
        """
        state = super().initial(layout, model)
        if (d := n_features(layout)) > MAX_FEATURES:
            raise ConfigError(
                f"dbe sends the mean of all features: the network has {d}, at most {MAX_FEATURES} will do"
            )
        return state

    def keep(self, state: DbeState) -> KeepOffset | None:
        """The vector P_i, from the round on in which g is known."""
        if state.global_mean is None:
            return None
        return KeepOffset(global_mean=state.global_mean, momentum=self.feature_momentum, kappa=self.kappa)

    async def round(self, state: DbeState, fleet: Fleet) -> DbeState:
        """One round of training, with the measurement of g at the end of the first, or the installation."""
        after = await super().round(state, fleet)
        if after.global_mean is not None or after.round > self.settings.rounds:
            return after
        return msgspec.structs.replace(after, global_mean=await self._measured(after, fleet))

    async def _measured(self, state: DbeState, fleet: Fleet) -> BlobRef | None:
        """The mean of all features, g = sum_j (N_j / N) mean features of device j; None where nobody answered."""
        order = MeanFeatures(model=state.model)
        answers = await fleet.run("mean", {device.id: order for device in fleet.devices()})
        d = n_features(state.layout)
        found = [a.result for a in answers.values() if isinstance(a.result, FeaturesMeasured)]
        found = [result for result in found if result.n_samples and is_mean(result.mean, d)]
        if not found:
            return None
        g = np.average([result.mean for result in found], axis=0, weights=[result.n_samples for result in found])
        return fleet.put({"mean": g.astype(np.float32)})


def n_features(layout: Layout) -> int:
    """D, what the head takes in."""
    return layout.part(Part.HEAD).tensors[0].shape[1]


def is_mean(mean: Sequence[float], d: int) -> bool:
    """Whether numbers from a device are a mean of features: D of them, finite in float32."""
    return len(mean) == d and bool((np.abs(mean) <= np.finfo(np.float32).max).all())
