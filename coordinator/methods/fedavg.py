"""FedAvg: average what the cohort learned, weighted by how many samples each client learned it from.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. Unless `--local-epochs` is given, local work is counted in SGD steps, so that every client of a round does
the same.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import msgspec
from msgspec import Struct

from coordinator.aggregation import averaged
from coordinator.fleet import Fleet
from coordinator.methods import Method, MethodSettings, accepted, counted, sizes, summarise
from coordinator.methods.cohort import NOT_STRATIFIED, Choice, ChoosingState, drawn, learned
from coordinator.methods.server_optimizer import ServerModel, stepped
from fedge.messages import BlobRef
from fedge.sgd import Sgd
from fedge.steps.train import Start, Train
from fedge.tensors import Layout


class FedAvgOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`selection`: who trains in a round; ccmab: FedEPC's bandit and deadline, all devices as one cluster."""

    REFUSED: ClassVar[dict[str, str]] = {
        "clustering": "all devices share one model, or a part of one; cfic, fedepc, fedge and scmoe-pfl make clusters",
        "selection=stratified": f"{NOT_STRATIFIED}; cfic:correction=false is fedavg with it",
    }
    selection: Choice = "uniform"


class FedAvgState(ChoosingState, frozen=True, kw_only=True):
    """`model`: the global model w; `velocity`: FedAvgM's v."""

    model: BlobRef
    velocity: BlobRef | None = None


F = TypeVar("F", bound=FedAvgState)


class FedAvg(Method[FedAvgState]):
    """McMahan et al., Algorithm 1; after the last round the global model is installed on every device."""

    name = "fedavg"
    Options: ClassVar[type[FedAvgOptions]] = FedAvgOptions

    def init(self, layout: Layout, model: BlobRef) -> FedAvgState:
        """The state before round 1."""
        return FedAvgState(round=0, layout=layout, model=model)

    def sgd(self) -> Sgd:
        """Of the devices."""
        return self.settings.sgd

    def gamma(self) -> float:
        """Momentum of the server."""
        return 0.0

    async def round(self, state: FedAvgState, fleet: Fleet) -> FedAvgState:
        """One round of Algorithm 1."""
        order = Train(starts=(Start(model=state.model),), sgd=self.sgd(), codec=self.settings.codec)
        return await train(state, fleet, order, state.layout, self.settings, self.options, gamma=self.gamma())

    def serves(self, state: FedAvgState, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """The global model."""
        return state.model


async def train(
    state: F,
    fleet: Fleet,
    order: Train,
    layout: Layout,
    settings: MethodSettings,
    options: FedAvgOptions,
    *,
    gamma: float = 0.0,
) -> F:
    """Have a cohort carry out the order, then move the model by the mean change. `layout`: of both."""
    cohort = drawn(options.selection, state, fleet.devices(), settings, state.model)
    order = msgspec.structs.replace(order, measure=cohort.measured)
    answers = await fleet.run("train", dict.fromkeys(cohort.ids, order))
    updates = accepted(answers)
    shared = ServerModel(model=state.model, velocity=state.velocity)
    if len(updates) >= settings.min_reports:
        # sum_i (n_i / sum n) W_i = w + sum_i (n_i / sum n) Delta_i
        changes = (fleet.get(u.update, layout) for u in updates.values())
        shared = stepped(shared, averaged(changes, sizes(updates), layout), layout, fleet, gamma=gamma)
    return msgspec.structs.replace(
        learned(options.selection, state, cohort, answers, settings),
        round=state.round + 1,
        model=shared.model,
        velocity=shared.velocity,
        participations=counted(state.participations, updates),
        history=(*state.history, summarise(state.round + 1, len(cohort.ids), updates)),
    )
