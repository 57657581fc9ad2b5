"""FedAvg averages the updates of the cohort, weighted by the number of samples that each client trained on.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. Unless `--local-epochs` is given, local work is counted in SGD steps, so that every client of a round does
equally many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.masked import Weights
from coordinator.methods.method import Method
from coordinator.methods.parts.averaging import average
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS, ChoosingState, train_cohort
from coordinator.methods.parts.server_optimizer import ServerModel, step_server
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef


class FedAvgState(ChoosingState, frozen=True, kw_only=True):
    """The state of FedAvg and FedAvgM. `model`: the global model w; `velocity`: FedAvgM's v, or None."""

    model: BlobRef
    velocity: BlobRef | None = None


F = TypeVar("F", bound=FedAvgState)


class FedAvg(Method[FedAvgState]):
    """The method FedAvg, Algorithm 1. After the last round every device installs the global model."""

    name = "fedavg"
    HEEDS = SHARED
    SELECTIONS = SELECTIONS
    REFUSED = NO_CLUSTERS
    SUMS: ClassVar[Weights | None] = "samples"
    State = FedAvgState

    def get_sgd(self) -> Sgd:
        """Return the SGD settings of the devices."""
        return self.settings.sgd

    def get_gamma(self) -> float:
        """Return the momentum of the server, in [0, 1)."""
        return 0.0

    def add_classes(self, state: FedAvgState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> FedAvgState:
        """Return the state for a network with further outputs; the velocity begins anew."""
        return msgspec.structs.replace(state, layout=layout, model=grow(state.model), velocity=None, descents={})

    async def round(self, state: FedAvgState, fleet: Fleet) -> FedAvgState:
        """Do one round of Algorithm 1."""
        order = Train(starts=(Start(model=state.model),), sgd=self.get_sgd(), codec=self.settings.codec)
        return await train(self, state, fleet, order, state.layout, gamma=self.get_gamma())


async def train(method: Method[Any], state: F, fleet: Fleet, order: Train, layout: Layout, *, gamma: float = 0.0) -> F:
    """Have a cohort carry out the order, then move the model by the mean update.

    `layout`: layout of the model and of the updates. `gamma`: momentum of the server, in [0, 1).
    """
    state, asked, updates = await train_cohort(method, state, fleet, state.model, lambda _: order)
    shared = ServerModel(model=state.model, velocity=state.velocity)
    if len(updates) >= method.settings.min_reports:
        # sum_i (n_i / sum n) W_i = w + sum_i (n_i / sum n) Delta_i
        shared = step_server(shared, await average(method, fleet, updates, layout), layout, fleet, gamma=gamma)
    return finish_round(state, asked, updates, model=shared.model, velocity=shared.velocity)
