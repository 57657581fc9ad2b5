"""Cohorts of methods without clusters or with overlapping clusters, which treat all devices as one cluster.

`uniform` and `fastest` draw from all devices; `ccmab` is FedEPC's bandit with its deadline (fedepc.md
section 5). A rule of another package chooses from all devices with samples, without a deadline. Stratified draws need
one cluster per device; methods with such clusters call `coordinator.selection.select.choose`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from coordinator.fleet.fleet import Answer, Fleet
from coordinator.methods.method import Method
from coordinator.methods.parts.grouping import Choices, make_arm, record_choices, record_draw, update_bandits
from coordinator.methods.rounds import has_declined, make_round_rng, select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import State
from coordinator.selection import ccmab
from coordinator.selection.select import choose, compute_cohort_size, draw_uniform, select_fastest
from coordinator.store.records import Device
from fedge.steps.training.train import Train, Trained
from fedge.wire.messages import BlobRef

SELECTIONS: Final = ("uniform", "fastest", "ccmab")
NO_CLUSTERS: Final = {
    "clustering": "all devices share one model, or a part of one; cfic, fedepc, fedge and scmoe-pfl make clusters",
    "selection=stratified": "it draws about as many devices from each cluster, and here are none; "
    "cfic:correction=false is fedavg with it",
}
"""Settings that methods without clusters refuse, and why."""


class ChoosingState(State, frozen=True, kw_only=True):
    """The state of a method that chooses. `seconds`: of devices' last rounds, for `fastest`; `bandit`: for `ccmab`."""

    seconds: dict[str, float] = {}
    bandit: ccmab.State = ccmab.State()


C = TypeVar("C", bound=ChoosingState)


async def train_cohort(
    method: Method[Any],
    state: C,
    fleet: Fleet,
    model: BlobRef,
    order: Callable[[str], Train],
    *,
    measure: bool = False,
) -> tuple[C, int, dict[str, Trained]]:
    """Have a cohort train `model`, or models of the same size, each device by its order.

    Losses and gradient norms are measured only for the bandit, unless the method needs them (`measure`).

    Returns:
        The state with the measurements of the round, the number of devices asked, and their updates.
    """
    ids, choices = draw_devices(method.selection, state, fleet.get_devices(), method.settings, model)
    if choices:
        record_choices(fleet, choices)
    else:
        record_draw(fleet, ids, [device.id for device in fleet.get_devices()])
    own = {i: order(i) for i in ids}
    measured = {id(each): msgspec.structs.replace(each, measure=measure or bool(choices)) for each in own.values()}
    answers = await fleet.run("train", {i: measured[id(each)] for i, each in own.items()})  # equal ones stay one object
    return record_answers(method.selection, state, choices, answers), len(own), select_updates(answers)


def make_bandit_settings(settings: MethodSettings) -> ccmab.Settings:
    """Return the settings of the bandits of a method without options for them; no deadline if all train."""
    everybody = settings.participation == 1
    return ccmab.Settings(quota=settings.participation, deadline_s=math.inf if everybody else None)


def draw_devices(
    how: str | None, state: ChoosingState, devices: Sequence[Device], settings: MethodSettings, model: BlobRef
) -> tuple[list[str], Choices]:
    """Draw the cohort of round `state.round + 1`: ascending ids, and for `ccmab` and others' rules the choices.

    `model`: a model of the size of those that are trained.
    """
    ids = [device.id for device in devices]
    n = compute_cohort_size(len(ids), settings.participation)
    if how == "uniform":
        return draw_uniform(ids, n, make_round_rng(settings, state.round + 1)), {}
    if how is None or how == "fastest":
        clocks = {d.id: d.context.cpu_ghz for d in devices if d.context is not None and d.context.cpu_ghz}
        return select_fastest(ids, n, state.seconds, clocks), {}
    arms = {0: [make_arm(d, settings.sgd, model) for d in devices]}
    bandit = make_bandit_settings(settings)
    if how != "ccmab":
        bandit = replace(bandit, deadline_s=math.inf, fairness=False)
    seed = (settings.seed, state.round + 1)
    choices = choose(how, arms, {0: state.bandit}, bandit, seed=seed, last_visit={})
    return list(choices[0][0].ids), choices


def record_answers(how: str | None, state: C, choices: Choices, answers: Mapping[str, Answer]) -> C:
    """Return the state with a round's measurements; with `fastest`, infinite seconds for devices without an answer."""
    if choices:
        return msgspec.structs.replace(state, bandit=update_bandits(choices, answers)[0])
    if how != "fastest":
        return state
    trained = select_updates(answers)
    times = {i: a.seconds if i in trained else math.inf for i, a in answers.items() if not has_declined(a)}
    return msgspec.structs.replace(state, seconds=state.seconds | times)
