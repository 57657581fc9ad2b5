"""Cohorts of methods without clusters, or with overlapping ones: all devices are one cluster.

`uniform` and `fastest` draw from all devices; `ccmab` is FedEPC's bandit with its deadline (fedepc.md section 5).
Stratified draws need one cluster per device: methods that have them call `coordinator.selection.choose`.
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
"""Refused by methods without clusters."""


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
    """Have a cohort train `model`, or models of its size, each device by its order.

    Losses and gradient norms are measured only for the bandit.

    Returns:
        The state with what the round showed of the devices, the number asked, and their updates.
    """
    cohort = drawn(method.selection, state, fleet.devices(), method.settings, model)
    measure = cohort.held is not None
    if cohort.held is not None:
        tell_choices(fleet, {0: cohort.held})
    else:
        tell_draw(fleet, cohort.ids, [device.id for device in fleet.devices()])
    own = {i: order(i) for i in cohort.ids}
    measured = {id(each): msgspec.structs.replace(each, measure=measure) for each in own.values()}
    answers = await fleet.run("train", {i: measured[id(each)] for i, each in own.items()})  # equal ones stay one object
    return learned(method.selection, state, cohort, answers), len(own), accepted(answers)


def bandit_of(settings: MethodSettings) -> ccmab.Settings:
    """Settings of the bandits of a method without options for them; no deadline if everybody trains."""
    everybody = settings.participation == 1
    return ccmab.Settings(quota=settings.participation, deadline_s=math.inf if everybody else None)


def drawn(
    how: Selection | None, state: ChoosingState, devices: Sequence[Device], settings: MethodSettings, model: BlobRef
) -> Cohort:
    """The cohort of round `state.round + 1`, for `model` or one of its size."""
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


def learned(how: Selection | None, state: C, cohort: Cohort, answers: Mapping[str, Answer]) -> C:
    """The state with what a round showed of the devices."""
    if cohort.held is not None:
        bandit = observed(cohort.held[1], cohort.held[0], answers)
        return msgspec.structs.replace(state, bandit=bandit)
    return msgspec.structs.replace(state, seconds=state.seconds | times(answers)) if how == "fastest" else state


def times(answers: Mapping[str, Answer]) -> dict[str, float]:
    """Seconds of each device; infinity if it failed. Devices that declined are left out."""
    return {
        i: answer.seconds if i in accepted({i: answer}) else math.inf
        for i, answer in answers.items()
        if not declined(answer)
    }
