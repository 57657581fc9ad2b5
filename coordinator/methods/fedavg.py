"""FedAvg: average what the cohort learned, weighted by how many samples each client learned it from.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. Local work is counted in SGD steps rather than epochs, so that every client of a round does the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.aggregation import averaged
from coordinator.fleet import Fleet
from coordinator.methods import (
    MethodSettings,
    NoOptions,
    State,
    accepted,
    counted,
    install,
    options_of,
    round_rng,
    sizes,
    summarise,
    summary_of,
)
from fedge.messages import BlobRef, Start, Train
from fedge.tensors import Layout, unflatten


class FedAvgState(State, frozen=True, kw_only=True):
    """`model`: the global model w."""

    model: BlobRef


class FedAvg:
    """McMahan et al., Algorithm 1; after the last round the global model is installed on every device."""

    name = "fedavg"
    Options = NoOptions

    def __init__(self, settings: MethodSettings) -> None:
        self.settings = settings
        options_of(settings, NoOptions)

    def initial(self, layout: Layout, model: BlobRef) -> FedAvgState:
        """The state before round 1."""
        return FedAvgState(round=0, layout=layout, model=model)

    def done(self, state: FedAvgState) -> bool:
        """R rounds of training and one of installing."""
        return state.round > self.settings.rounds

    async def round(self, state: FedAvgState, fleet: Fleet) -> FedAvgState:
        """One round of Algorithm 1, or the installation."""
        if state.round == self.settings.rounds:
            return await install(self, state, fleet)
        ids = [device.id for device in fleet.devices()]
        size = max(1, round(self.settings.participation * len(ids))) if ids else 0
        cohort = sorted(round_rng(self.settings, state.round + 1).permutation(ids)[:size].tolist())
        order = Train(starts=(Start(model=state.model),), sgd=self.settings.sgd, codec=self.settings.codec)
        updates = accepted(await fleet.run("train", dict.fromkeys(cohort, order)))
        model = state.model
        if len(updates) >= self.settings.min_reports:
            # sum_i (n_i / sum n) W_i = w + sum_i (n_i / sum n) Delta_i
            w = fleet.get(model, state.layout)
            step = averaged((fleet.get(u.update, state.layout) for u in updates.values()), sizes(updates), state.layout)
            model = fleet.put(unflatten(step.added_to(w), state.layout))
        return msgspec.structs.replace(
            state,
            round=state.round + 1,
            model=model,
            participations=counted(state.participations, updates),
            history=(*state.history, summarise(state.round + 1, len(cohort), updates)),
        )

    def serves(self, state: FedAvgState, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """The global model."""
        return state.model

    def summary(self, state: FedAvgState) -> dict[str, Any]:
        """History, selection counts, bundles."""
        return summary_of(self, state)
