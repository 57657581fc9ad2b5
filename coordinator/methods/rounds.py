"""Parts of a round that methods share: random numbers, answers, the record in the history."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from coordinator.fleet.fleet import Answer, Fleet
from coordinator.methods.settings import MethodSettings, Schedule
from coordinator.methods.state import Best, RoundSummary, S, decode_state, encode_state
from coordinator.store.records import Device
from fedge.steps.contract import Action, Declined
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.system.moved import alias_names
from fedge.wire.messages import iterate_blobs

log = logging.getLogger("fedge.method")
R = TypeVar("R")
ATTEMPTS: Final = 3
"""How often a device is asked for the steps that end in its bundle; without a bundle, all of its work is lost."""


async def run_with_retries(fleet: Fleet, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
    """Run actions, up to `ATTEMPTS` times in all for devices without an acceptable answer."""
    answers = await fleet.run(label, actions)
    for attempt in range(2, ATTEMPTS + 1):
        missing = {i: action for i, action in actions.items() if answers[i].result is None}
        if not missing:
            break
        log.warning("event=asked_again label=%s attempt=%d devices=%s", label, attempt, sorted(missing))
        answers |= await fleet.run(f"{label}-{attempt}", missing)
    return answers


def select_results(answers: Mapping[str, Answer], kind: type[R]) -> dict[str, R]:
    """Return the results of one kind, by ascending device id."""
    return {i: a.result for i, a in answers.items() if isinstance(a.result, kind)}


def make_round_rng(settings: MethodSettings, round_number: int) -> np.random.Generator:
    """Make the random generator of one round, the same whenever it runs."""
    return np.random.default_rng((settings.seed, round_number))


def compute_rate_factor(schedule: Schedule, number: int, rounds: int) -> float:
    """Compute the factor of the learning rate in round `number` of 1 to `rounds`; it is 1 in the first round.

    Example:
        >>> [round(compute_rate_factor("cosine", r, 4), 3) for r in (1, 2, 3, 4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> [round(compute_rate_factor("steps", r, 8), 3) for r in (4, 5, 6, 7, 8)]
        [1.0, 0.1, 0.1, 0.01, 0.01]
    """
    passed = max(0, min(number, rounds) - 1) / max(rounds, 1)
    if schedule == "cosine":
        return (1 + math.cos(math.pi * passed)) / 2
    return 1.0 if schedule == "constant" or passed < 1 / 2 else 0.1 if passed < 3 / 4 else 0.01


def count_steps_alone(device: Device, sgd: Sgd) -> int:
    """Count the steps in which a device learns alone from all of its samples, including sensitive ones.

    A device reports only the number of its other samples; if that is 0, a pass counts as one batch.
    """
    return sgd.count_steps(device.n_samples or sgd.batch_size)


def select_updates(answers: Mapping[str, Answer]) -> dict[str, Trained]:
    """Return the updates among the answers that may be averaged, by ascending device id."""
    return {i: a.result for i, a in answers.items() if isinstance(a.result, Trained) and a.result.n_samples > 0}


def get_owner(key: str) -> str:
    """Return the device of an update. Keys are device ids, or ID/NUMBER where a device may send several."""
    return key.partition("/")[0]


def has_declined(answer: Answer) -> bool:
    """Return whether the device declined, which is no fault."""
    return isinstance(answer.result, Declined)


def finish_round(state: S, n_asked: int, updates: Mapping[str, Trained], **changes: Any) -> S:
    """Return the state after a round of training, with further changes. `updates`: keys as in `get_owner`."""
    accuracies = [u.val_score for u in updates.values() if u.val_score is not None]
    line = RoundSummary(
        round=state.round + 1,
        asked=n_asked,
        answered=len(updates),
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        loss=compute_mean_loss(updates.values()),
    )
    return msgspec.structs.replace(
        state,
        round=line.round,
        participations=dict(Counter(state.participations) + Counter(map(get_owner, updates))),
        history=(*state.history, line),
        **changes,
    )


def compute_mean_loss(updates: Collection[Trained]) -> float | None:
    """Compute the n_i-weighted mean of loss_before; None without updates, or if an update lacks loss_before."""
    n = sum(u.n_samples for u in updates)
    losses = [u.n_samples / n * u.loss_before for u in updates if u.loss_before is not None]
    return sum(losses) if losses and len(losses) == len(updates) else None


def stop_early(before: S, after: S, last: int, patience: int) -> S:
    """Return the state after a round of training, or at its end the best one: early stopping.

    A device that trains tells the score of the model it received, on its own validation samples. So the mean over a
    round's devices is that of the state before the round. After `patience` rounds in a row that were no better than the
    best one, training ends as if all rounds had passed, with the state of the best. If the rounds pass before, the last
    state is kept only if the model that it came from was the best. The best state is a part of the present one
    (`coordinator.methods.state.Best`), so it survives whatever that survives.

    Args:
        before: the state before the round.
        after: the state after it.
        last: the number of the last round of training.
        patience: the number of rounds without a better score that end training.
    """
    score = next((line.accuracy for line in after.history[-1:] if line.round == after.round), None)
    best = before.best_state
    if best and best.stopped is not None:  # a person has asked for more rounds since
        best = UNSET
    if score is not None and (not best or score > best.score):
        best = _remember(before, score)
    elif best:
        best = msgspec.structs.replace(best, since=best.since + 1)
    if not best or not best.since or (best.since < patience and after.round < last):
        return msgspec.structs.replace(after, best_state=best)
    found = decode_state(best.state, type(after))
    log.info("event=stopped round=%d best=%d score=%.4f", after.round, found.round, best.score)
    return msgspec.structs.replace(
        found,
        round=last,
        participations=after.participations,
        history=after.history,
        sums=after.sums,
        best_state=msgspec.structs.replace(best, state=b"", held=(), stopped=after.round),
    )


def _remember(state: S, score: float) -> Best:
    """Make the record of a state whose models have this score; its tensors stay in the store as long as it is known."""
    alone = msgspec.structs.replace(state, best_state=UNSET, descents={}, history=(), participations={})
    held = tuple({ref.digest: ref for ref in iterate_blobs(alone)}.values())
    return Best(score=score, round=state.round, state=encode_state(alone), held=held)


__getattr__ = alias_names(
    __name__,
    round_rng="make_round_rng",
    accepted="select_updates",
    round_done="finish_round",
    insist="run_with_retries",
    results="select_results",
    mean_loss="compute_mean_loss",
    owner="get_owner",
)
