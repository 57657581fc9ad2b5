"""FedAdam and FedYogi: the server takes the devices' mean change for a gradient, and steps by Adam or Yogi.

Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2; baselines.md section 15. With the mean
change Delta, number by number and without correction of the first steps:

    m <- beta1 m + (1 - beta1) Delta
    v <- beta2 v + (1 - beta2) Delta^2                              FedAdam
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)                  FedYogi
    w <- w + eta m / (sqrt(v) + tau)                                v = tau^2 at first
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation import Average
from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.fedavg import FedAvg, FedAvgState
from coordinator.methods.parts.averaging import average
from coordinator.methods.parts.cohort import train_cohort
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.rounds import finish_round
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.method")
Vector = NDArray[np.float64]

BETA1, BETA2 = 0.9, 0.99
"""Decays of m and v in all of the paper's experiments."""


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedAdam and FedYogi. `server_rate`: eta; `tau`: bounds the step of a number that hardly moves.

    The paper tunes these two.
    """

    server_rate: Annotated[float, Meta(gt=0)] = 0.03
    tau: Annotated[float, Meta(gt=0)] = 1e-3


class FedOptState(FedAvgState, frozen=True, kw_only=True):
    """The state. `model`: w; `moments`: m and v, each (d,), None at first."""

    moments: BlobRef | None = None


class FedAdam(FedAvg):
    """FedAdam; after the last round every device installs the global model."""

    name = "fedadam"
    State = FedOptState
    Options: ClassVar[type[Struct]] = Options

    def update_second_moment(self, v: Vector, square: Vector) -> Vector:
        """Return the next v from Delta^2, both (d,)."""
        return BETA2 * v + (1 - BETA2) * square

    def add_classes(self, state: FedAvgState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> FedAvgState:
        """Return the state for a network with further outputs; the moments begin anew."""
        return msgspec.structs.replace(super().add_classes(state, layout, grow), moments=None)

    async def round(self, state: FedAvgState, fleet: Fleet) -> FedAvgState:
        """Do one round of Algorithm 2."""
        order = Train(starts=(Start(model=state.model),), sgd=self.settings.sgd, codec=self.settings.codec)
        state, asked, updates = await train_cohort(self, state, fleet, state.model, lambda _: order)
        if len(updates) >= self.settings.min_reports:
            state = self.step_server(state, await average(self, fleet, updates, state.layout), fleet)
        return finish_round(state, asked, updates)

    def step_server(self, state: FedAvgState, mean: Average | None, fleet: Fleet) -> FedAvgState:
        """Return the state after a step by the mean change; the same if nothing came, or a number would overflow."""
        assert isinstance(state, FedOptState)
        if mean is None:
            return state
        o, delta = self.options, mean.params
        stored = fleet.get_tensors(state.moments) if state.moments else {}
        kept = {name: moment.astype(np.float64) for name, moment in stored.items()}
        m = BETA1 * kept.get("m", np.zeros_like(delta)) + (1 - BETA1) * delta
        v = self.update_second_moment(kept.get("v", np.full_like(delta, o.tau**2)), delta**2)
        step = o.server_rate * m / (np.sqrt(v) + o.tau)
        if max(np.abs(m).max(), v.max()) > np.finfo(np.float32).max:
            log.error("event=diverged the mean change is too long; the old model is kept")
            return state
        moments = fleet.put({"m": m.astype(np.float32), "v": v.astype(np.float32)})
        model = apply(state.model, replace(mean, params=step), state.layout, fleet)
        return msgspec.structs.replace(state, model=model, moments=moments)


class FedYogi(FedAdam):
    """FedYogi: FedAdam whose v moves by a bounded amount, and so forgets large changes less quickly."""

    name = "fedyogi"

    def update_second_moment(self, v: Vector, square: Vector) -> Vector:
        """Return the next v from Delta^2, both (d,)."""
        return v - (1 - BETA2) * square * np.sign(v - square)
