"""Rounds without waiting: devices train all the time, and the server steps whenever K updates have arrived.

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1;
docs/methods/fedbuff.md. The order of arrival is durable (`Fleet.stream`), so a round that runs again is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet
from coordinator.methods.method import Method
from coordinator.methods.rounds import make_round_rng
from coordinator.methods.state import State
from coordinator.selection.select import compute_cohort_size, draw_uniform
from fedge.steps.training.train import Train, Trained

KEPT: Final = 20
"""Latest updates that are kept, so that the next updates' norms can be compared with theirs."""

ONE_BY_ONE: Final = "it takes answers one by one, and a relay gives those of its site together"
"""Reason why devices cannot be behind relays."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """The updates of a step, by ascending device id; a device may have sent several (`rounds.get_owner`).

    `staleness`: tau of each update, the steps since its order was written. `asked`: orders written meanwhile.
    `seen`: the latest updates, at most `KEPT`.
    """

    updates: dict[str, Trained]
    staleness: dict[str, int]
    asked: int
    seen: tuple[AcceptedUpdate, ...]

    @property
    def discounts(self) -> dict[str, float]:
        """The discount s(tau) of each update, in (0, 1]."""
        return {key: compute_discount(tau) for key, tau in self.staleness.items()}


def compute_discount(tau: int) -> float:
    """Compute s(tau) = 1 / sqrt(1 + tau), the weight of an update that is tau steps old."""
    return float(1 / np.sqrt(1 + tau))


async def fill_buffer(
    method: Method[Any],
    state: State,
    fleet: Fleet,
    seen: Sequence[AcceptedUpdate],
    size: int,
    order: Callable[[str], Train],
) -> Buffer:
    """Collect the next `size` updates, however old they are; fewer if no device is working any more.

    `--participation` is the share of devices that work at a time. Whenever a device answers, an idle device is drawn.
    A device that failed or declined is not asked again in this step.
    """
    r, settings, measures = state.round + 1, method.settings, list(seen)
    rng = make_round_rng(settings, r)
    there = [device.id for device in fleet.get_devices() if device.knows(order(device.id))]
    at_work = compute_cohort_size(len(there), settings.participation)
    found: list[tuple[str, int, Answer, Trained]] = []
    resting: set[str] = set()
    asked = wave = 0
    while len(found) < size:
        busy = fleet.get_busy_devices()
        idle = [i for i in there if i not in busy and i not in resting]
        begin = draw_uniform(idle, min(len(idle), max(0, at_work - len(busy.intersection(there)))), rng)
        coming = fleet.stream(f"train-{wave}", {i: order(i) for i in begin}, measures)
        async with contextlib.aclosing(cast("AsyncGenerator[Answer]", coming)):
            answer = await anext(coming, None)
        if answer is None:
            break
        asked, wave = asked + len(begin), wave + 1
        if not isinstance(answer.result, Trained):
            resting.add(answer.device_id)
            continue
        norms = fleet.get_norms(answer.result.update, state.layout)
        measures = [*measures, AcceptedUpdate(norms=norms, n_samples=answer.result.n_samples)][-KEPT:]
        found.append((answer.device_id, len(found), answer, answer.result))
    keyed = {f"{i}/{n}": (answer, result) for i, n, answer, result in sorted(found, key=lambda one: one[:2])}
    return Buffer(
        updates={key: result for key, (_, result) in keyed.items()},
        staleness={key: r - answer.round for key, (answer, _) in keyed.items()},
        asked=asked,
        seen=tuple(measures),
    )
