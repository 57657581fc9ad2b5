"""FedDyn: each device's loss is changed from round to round so that all devices' minima become the same.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1; baselines.md
section 18. Device i trains theta_i from theta on F_i(theta_i) - <g_i, theta_i> + alpha / 2 |theta_i - theta|^2, and
keeps g_i <- g_i - alpha (theta_i - theta). With the m devices that are there and the cohort P, the server moves by

    h <- h - alpha / m sum_{i in P} (theta_i - theta)
    theta <- mean_{i in P} theta_i - h / alpha
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from msgspec import Meta, Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.method import Method
from coordinator.methods.parts.averaging import average
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS, ChoosingState, train_cohort
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round
from fedge.steps.training.train import Start
from fedge.steps.training.train_feddyn import TrainFedDyn
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from coordinator.fleet.fleet import Fleet


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedDyn. `alpha`: weight of both terms."""

    alpha: Annotated[float, Meta(gt=0)] = 0.5


class FedDynState(ChoosingState, frozen=True, kw_only=True):
    """The state of FedDyn. `model`: theta; `drift`: h (d,), zero if None."""

    model: BlobRef
    drift: BlobRef | None = None


class FedDyn(Method[FedDynState]):
    """FedDyn, Algorithm 1; after the last round every device installs theta."""

    name = "feddyn"
    HEEDS = SHARED
    SELECTIONS = SELECTIONS
    State = FedDynState
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainFedDyn, "update"))}

    async def round(self, state: FedDynState, fleet: Fleet) -> FedDynState:
        """Do one round of Algorithm 1. If theta stays, h moves: devices whose reports were accepted have moved g_i."""
        order = TrainFedDyn(
            starts=(Start(model=state.model),),
            sgd=self.settings.sgd,
            codec=self.settings.codec,
            alpha=self.options.alpha,
        )
        state, asked, updates = await train_cohort(self, state, fleet, state.model, lambda _: order)
        mean = await average(self, fleet, updates, state.layout, alike=True)
        if mean is None:
            return finish_round(state, asked, updates)
        alpha = self.options.alpha
        before = fleet.get_tensors(state.drift)["h"] if state.drift else np.zeros(len(mean.params), np.float32)
        h = before - alpha * len(updates) / len(fleet.get_devices()) * mean.params
        model = state.model
        if len(updates) >= self.settings.min_reports:
            model = apply(model, replace(mean, params=mean.params - h / alpha), state.layout, fleet)
        return finish_round(state, asked, updates, model=model, drift=fleet.put({"h": h.astype(np.float32)}))
