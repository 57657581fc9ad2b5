"""Who trains in a round of a method without clusters, or whose clusters overlap: all devices are one cluster.

`uniform` and `fastest` draw from everybody; `ccmab` is FedEPC's bandit with its deadline (fedepc.md section 5), of all
devices together. Stratified draws need a cluster for each device: `coordinator.selection.choose` has all four under one
signature for methods whose devices lie in clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from coordinator.fleet import Answer, Device, Fleet
from coordinator.methods import Method, MethodSettings, State, accepted, declined, round_rng
from coordinator.methods.grouping import arm, observed, tell_choices, tell_draw
from coordinator.selection import Selection, ccmab, cohort_size, fastest, uniform
from fedge.messages import BlobRef
from fedge.steps.train import Train, Trained

SELECTIONS: Final[tuple[Selection, ...]] = ("uniform", "fastest", "ccmab")
NO_CLUSTERS: Final = {
    "clustering": "all devices share one model, or a part of one; cfic, fedepc, fedge and scmoe-pfl make clusters",
    "selection=stratified": "it draws about as many devices from each cluster, and here are none; "
    "cfic:correction=false is fedavg with it",
}
"""What methods without clusters refuse."""


class ChoosingState(State, frozen=True, kw_only=True):
    """`seconds`: of each device's last round, of `fastest`; `bandit`: of `ccmab`."""

    seconds: dict[str, float] = {}
    bandit: ccmab.State = ccmab.State()


C = TypeVar("C", bound=ChoosingState)


@dataclass(frozen=True, slots=True)
class Cohort:
    """Ids, ascending; of `ccmab` the selection, and its bandit in which this round was held."""

    ids: list[str]
    held: tuple[ccmab.Selection, ccmab.State] | None = None


async def train_cohort(
    method: Method[Any], state: C, fleet: Fleet, model: BlobRef, order: Callable[[str], Train]
) -> tuple[C, int, dict[str, Trained]]:
    """Have a cohort train `model`, or ones as large, each device by its order.

    Losses and gradient norms are wanted where the bandit learns from them.

    Returns:
        The state with what the round told about the devices; how many were asked; what they learned.
    """
    cohort = drawn(method.selection, state, fleet.devices(), method.settings, model)
    measure = cohort.held is not None
    if cohort.held is not None:
        tell_choices(fleet, {0: cohort.held})
    else:
        tell_draw(fleet, cohort.ids, [device.id for device in fleet.devices()])
    orders = {i: msgspec.structs.replace(order(i), measure=measure) for i in cohort.ids}
    answers = await fleet.run("train", orders)
    return learned(method.selection, state, cohort, answers, method.settings), len(orders), accepted(answers)


def bandit_of(settings: MethodSettings) -> ccmab.Settings:
    """The bandits' settings of a method that has no options for them; without deadline where everybody is to train."""
    everybody = settings.participation == 1
    return ccmab.Settings(quota=settings.participation, deadline_s=math.inf if everybody else None)


def drawn(
    how: Selection | None, state: ChoosingState, devices: Sequence[Device], settings: MethodSettings, model: BlobRef
) -> Cohort:
    """Who trains `model`, or one as large, in round `state.round + 1`."""
    if how == "ccmab":
        arms = [arm(device, settings.sgd, model) for device in devices]
        held = ccmab.select(state.bandit, arms, bandit_of(settings))
        return Cohort(list(held[0].ids), held)
    ids = [device.id for device in devices]
    n = cohort_size(len(ids), settings.participation)
    if how == "uniform":
        return Cohort(uniform(ids, n, round_rng(settings, state.round + 1)))
    clocks = {d.id: d.context.cpu_ghz for d in devices if d.context is not None and d.context.cpu_ghz}
    return Cohort(fastest(ids, n, state.seconds, clocks))


def learned(
    how: Selection | None, state: C, cohort: Cohort, answers: Mapping[str, Answer], settings: MethodSettings
) -> C:
    """What a round tells about the devices."""
    if cohort.held is not None:
        bandit = observed(cohort.held[1], cohort.held[0], answers, bandit_of(settings))
        return msgspec.structs.replace(state, bandit=bandit)
    return msgspec.structs.replace(state, seconds=state.seconds | times(answers)) if how == "fastest" else state


def times(answers: Mapping[str, Answer]) -> dict[str, float]:
    """How long each device took; infinity where nothing came of it, nothing where it declined."""
    return {
        i: answer.seconds if i in accepted({i: answer}) else math.inf
        for i, answer in answers.items()
        if not declined(answer)
    }
