"""q-FedAvg: devices with a larger loss move the model more, so that accuracies differ less over the devices.

Source: Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2; baselines.md section 16. It
minimises the sum of p_i F_i^(q+1) / (q + 1). Device i trains from w and sends its change delta_i with its loss F_i at
w; L is 1 / rate of the devices' SGD, and p_i the device's share of the samples:

    h_i = q F_i^(q-1) |L delta_i|^2 + L F_i^q
    w <- w + sum_i p_i F_i^q L delta_i / sum_i p_i h_i

With q = 0 this is FedAvg. The update of a device whose owner withholds the loss does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation.protection import explain_no_noise
from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.fedavg import FedAvg, FedAvgState
from coordinator.methods.parts.averaging import average, compute_update_factors
from coordinator.methods.parts.cohort import NO_CLUSTERS, train_cohort
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.rounds import finish_round
from fedge.steps.training.train import Start, Train, Trained
from fedge.wire.messages import BlobRef

LEAST_LOSS: Final = 1e-10
"""Added to each loss, as the authors' code does, so that powers of a loss of 0 are finite."""

log = logging.getLogger("fedge.method")


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of q-FedAvg. `q`: how much more a larger loss counts; 0 is FedAvg."""

    q: Annotated[float, Meta(ge=0, le=20)] = 1.0


class QFedAvg(FedAvg):
    """q-FedAvg, Algorithm 2; after the last round every device installs the global model."""

    name = "q-fedavg"
    Options: ClassVar[type[Struct]] = Options
    SUMS = None
    REFUSED = NO_CLUSTERS | {
        "optimizer": "L is 1 / rate of SGD; Adam has no such L",
        "dp": explain_no_noise((Train, "loss_before")),
    }

    async def round(self, state: FedAvgState, fleet: Fleet) -> FedAvgState:
        """Do one round of Algorithm 2; an update without its loss does not count."""
        order = Train(starts=(Start(model=state.model),), sgd=self.settings.sgd, codec=self.settings.codec)
        state, asked, found = await train_cohort(self, state, fleet, state.model, lambda _: order, measure=True)
        updates = {i: u for i, u in found.items() if u.loss_before is not None}
        if left := sorted(found.keys() - updates.keys()):
            log.warning("event=no_loss devices=%s", left)
        model = state.model
        if len(updates) >= self.settings.min_reports:
            model = await self.step_server(state, updates, fleet)
        return finish_round(state, asked, updates, model=model)

    async def step_server(self, state: FedAvgState, updates: Mapping[str, Trained], fleet: Fleet) -> BlobRef:
        """Return the model after the step of all updates, each with its loss."""
        q, sgd, layout = self.options.q, self.settings.sgd, state.layout
        n = np.array([u.n_samples for u in updates.values()], np.float64)
        losses = np.array([max(u.loss_before or 0.0, 0.0) for u in updates.values()]) + LEAST_LOSS
        factors = compute_update_factors(self, fleet, updates, layout)  # the rule of --average shortens long updates
        lengths = [factors[i][0] * fleet.get_norms(u.update, layout)[0] for i, u in updates.items()]
        weights = losses**q
        mean = await average(self, fleet, updates, layout, discounts=dict(zip(updates, weights.tolist(), strict=True)))
        if mean is None:
            return state.model
        lipschitz = (1 - sgd.momentum) / sgd.learning_rate
        scale = compute_scale(losses, np.array(lengths), n / n.sum(), q=q, lipschitz=lipschitz)
        return apply(state.model, replace(mean, params=scale * mean.params), layout, fleet)


def compute_scale(
    losses: NDArray[np.float64], lengths: NDArray[np.float64], p: NDArray[np.float64], *, q: float, lipschitz: float
) -> float:
    """Compute L / sum_i p_i h_i, the factor of sum_i p_i F_i^q delta_i.

    Args:
        losses: F_i, (n,), positive.
        lengths: |delta_i|, (n,).
        p: shares of the samples, (n,); they sum to 1.
        q: at least 0.
        lipschitz: L, positive.

    Example:
        >>> one = np.ones(1)
        >>> float(compute_scale(2 * one, 3 * one, one, q=0, lipschitz=10.0))
        1.0
        >>> float(compute_scale(2 * one, 3 * one, one, q=1, lipschitz=10.0))  # 1 / (10 * 3^2 + 2)
        0.010869565217391304
    """
    h = q * losses ** (q - 1) * lipschitz * lengths**2 + losses**q  # h_i / L
    return float(1 / (p @ h))
