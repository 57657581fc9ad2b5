"""FedAvg: average what the cohort learned, weighted by how many samples each client learned it from.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. Local work is counted in SGD steps rather than epochs, so that every client of a round does the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Struct

from coordinator.aggregation import averaged
from coordinator.fleet import Answer, Fleet
from coordinator.methods import (
    MethodSettings,
    State,
    accepted,
    counted,
    declined,
    install,
    options_of,
    round_rng,
    sizes,
    summarise,
    summary_of,
)
from coordinator.methods.moving import Moving, moved
from coordinator.selection import cohort_size, fastest, uniform
from fedge.messages import BlobRef, Start, Train
from fedge.tensors import Layout


class FedAvgOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`selection`: who trains in a round."""

    selection: Literal["uniform", "fastest"] = "uniform"


class FedAvgState(State, frozen=True, kw_only=True):
    """`model`: the global model w; `velocity`: FedAvgM's v; `seconds`: of each device's last round, if asked for."""

    model: BlobRef
    velocity: BlobRef | None = None
    seconds: dict[str, float] = {}


F = TypeVar("F", bound=FedAvgState)


class FedAvg:
    """McMahan et al., Algorithm 1; after the last round the global model is installed on every device."""

    name = "fedavg"
    Options: ClassVar[type[FedAvgOptions]] = FedAvgOptions

    def __init__(self, settings: MethodSettings) -> None:
        self.settings = settings
        self.options = options_of(settings, self.Options)
        self.sgd = settings.sgd
        self.gamma = 0.0  # server momentum

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
        order = Train(starts=(Start(model=state.model),), sgd=self.sgd, codec=self.settings.codec, measure=False)
        return await train(state, fleet, order, state.layout, self.settings, self.options, gamma=self.gamma)

    def serves(self, state: FedAvgState, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """The global model."""
        return state.model

    def summary(self, state: FedAvgState) -> dict[str, Any]:
        """History, selection counts, bundles."""
        return summary_of(self, state)


def select(state: FedAvgState, fleet: Fleet, settings: MethodSettings, options: FedAvgOptions) -> list[str]:
    """Who trains in this round."""
    devices = fleet.devices()
    ids = [device.id for device in devices]
    n = cohort_size(len(ids), settings.participation)
    if options.selection == "uniform":
        return uniform(ids, n, round_rng(settings, state.round + 1))
    clocks = {d.id: d.context.cpu_ghz for d in devices if d.context is not None and d.context.cpu_ghz}
    return fastest(ids, n, state.seconds, clocks)


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
    cohort = select(state, fleet, settings, options)
    answers = await fleet.run("train", dict.fromkeys(cohort, order))
    updates = accepted(answers)
    shared = Moving(model=state.model, velocity=state.velocity)
    if len(updates) >= settings.min_reports:
        # sum_i (n_i / sum n) W_i = w + sum_i (n_i / sum n) Delta_i
        changes = (fleet.get(u.update, layout) for u in updates.values())
        shared = moved(shared, averaged(changes, sizes(updates), layout), layout, fleet, gamma=gamma)
    return msgspec.structs.replace(
        state,
        round=state.round + 1,
        model=shared.model,
        velocity=shared.velocity,
        seconds=state.seconds | times(answers) if options.selection == "fastest" else {},
        participations=counted(state.participations, updates),
        history=(*state.history, summarise(state.round + 1, len(cohort), updates)),
    )


def times(answers: Mapping[str, Answer]) -> dict[str, float]:
    """How long each device took; infinity where nothing came of it, nothing where it declined."""
    return {
        i: answer.seconds if i in accepted({i: answer}) else math.inf
        for i, answer in answers.items()
        if not declined(answer)
    }
