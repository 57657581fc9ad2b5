"""Parts of a round that methods share: its random numbers, its answers, its line of the history."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from coordinator.fleet.fleet import Answer, Fleet
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import RoundSummary, S
from coordinator.store.records import Device
from fedge.steps.contract import Action, Declined
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained

log = logging.getLogger("fedge.method")
R = TypeVar("R")
ATTEMPTS: Final = 3
"""How often a device is asked for the steps that end in its bundle: without it, all of its work is lost."""


async def insist(fleet: Fleet, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
    """`fleet.run`, repeated for devices without an acceptable answer, `ATTEMPTS` times in all."""
    answers = await fleet.run(label, actions)
    for attempt in range(2, ATTEMPTS + 1):
        missing = {i: action for i, action in actions.items() if answers[i].result is None}
        if not missing:
            break
        log.warning("event=asked_again label=%s attempt=%d devices=%s", label, attempt, sorted(missing))
        answers |= await fleet.run(f"{label}-{attempt}", missing)
    return answers


def results(answers: Mapping[str, Answer], kind: type[R]) -> dict[str, R]:
    """The results of one kind, by ascending device id."""
    return {i: a.result for i, a in answers.items() if isinstance(a.result, kind)}


def round_rng(settings: MethodSettings, round_number: int) -> np.random.Generator:
    """The random numbers of one round, the same whenever it runs."""
    return np.random.default_rng((settings.seed, round_number))


def steps_alone(device: Device, sgd: Sgd) -> int:
    """Steps of a participation in which a device learns alone from all of its samples, including sensitive ones.

    A device reports only how many are not sensitive; if there are none, a pass counts as one batch.
    """
    return sgd.steps_for(device.n_samples or sgd.batch_size)


def accepted(answers: Mapping[str, Answer]) -> dict[str, Trained]:
    """The updates among the answers that may be averaged, by ascending device id."""
    return {i: a.result for i, a in answers.items() if isinstance(a.result, Trained) and a.result.n_samples > 0}


def owner(key: str) -> str:
    """The device of an update. Keys are device ids, or ID/NUMBER where a device may send several."""
    return key.partition("/")[0]


def declined(answer: Answer) -> bool:
    """Whether the device declined, which is no fault."""
    return isinstance(answer.result, Declined)


def round_done(state: S, n_asked: int, updates: Mapping[str, Trained], **changes: Any) -> S:
    """The state after a round of training, with further changes. `updates`: keys as in `owner`."""
    accuracies = [u.val_accuracy for u in updates.values() if u.val_accuracy is not None]
    line = RoundSummary(
        round=state.round + 1,
        asked=n_asked,
        answered=len(updates),
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        loss=mean_loss(updates.values()),
    )
    return msgspec.structs.replace(
        state,
        round=line.round,
        participations=dict(Counter(state.participations) + Counter(map(owner, updates))),
        history=(*state.history, line),
        **changes,
    )


def mean_loss(updates: Collection[Trained]) -> float | None:
    """n_i-weighted mean of loss_before; None without updates, or if one of them lacks it."""
    n = sum(u.n_samples for u in updates)
    losses = [u.n_samples / n * u.loss_before for u in updates if u.loss_before is not None]
    return sum(losses) if losses and len(losses) == len(updates) else None
