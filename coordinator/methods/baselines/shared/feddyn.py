"""FedDyn: each device's loss is changed from round to round so that all devices' minima become the same.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1; baselines.md
section 18. Device i trains theta_i from theta on F_i(theta_i) - <g_i, theta_i> + alpha / 2 |theta_i - theta|^2, and
keeps g_i <- g_i - alpha (theta_i - theta). Each order says which report of the device was the last that is in h, and
the device goes on from the g_i of that report. With the m devices that are there and the cohort P, the server moves by

    h <- h - alpha / m sum_{i in P} (theta_i - theta)
    theta <- mean_{i in P} theta_i - h / alpha
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace as replace_fields

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
    """The state of FedDyn. `model`: theta; `drift`: h (d,), zero if None.

    `counted`: by device the round of its last report that is in h.
    """

    model: BlobRef
    drift: BlobRef | None = None
    counted: dict[str, int] = {}


class FedDyn(Method[FedDynState]):
    """FedDyn, Algorithm 1; after the last round every device installs theta."""

    name = "feddyn"
    HEEDS = SHARED
    SELECTIONS = SELECTIONS
    State = FedDynState
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainFedDyn, "update"))}

    def begin_campaign(self, state: FedDynState, changed: Collection[str]) -> FedDynState:
        """Return the next campaign's first state; after an early stop h and all g_i begin anew.

        The state is then that of an earlier round, and devices have gone on since.
        """
        afresh: dict[str, Any] = {"drift": None, "counted": {}} if state.best_state else {}
        return replace_fields(super().begin_campaign(state, changed), **afresh)

    async def round(self, state: FedDynState, fleet: Fleet) -> FedDynState:
        """Do one round of Algorithm 1. With too few reports theta stays, and h moves."""
        alpha, own = self.options.alpha, state.counted
        orders = {
            counted: TrainFedDyn(
                starts=(Start(model=state.model),),
                sgd=self.settings.sgd,
                codec=self.settings.codec,
                alpha=alpha,
                counted=counted,
            )
            for counted in {0, *own.values()}
        }
        state, asked, updates = await train_cohort(self, state, fleet, state.model, lambda i: orders[own.get(i, 0)])
        missing: set[str] = set()
        mean = await average(self, fleet, updates, state.layout, alike=True, miss=missing.add)
        if mean is None:
            return finish_round(state, asked, updates)
        summed = updates.keys() - missing
        before = fleet.get_tensors(state.drift)["h"] if state.drift else np.zeros(len(mean.params), np.float32)
        h = before - alpha * len(summed) / len(fleet.get_devices()) * mean.params
        model = state.model
        if len(updates) >= self.settings.min_reports:
            model = apply(model, replace(mean, params=mean.params - h / alpha), state.layout, fleet)
        drift, counted = fleet.put({"h": h.astype(np.float32)}), dict.fromkeys(sorted(summed), state.round + 1)
        return finish_round(state, asked, updates, model=model, drift=drift, counted=own | counted)
