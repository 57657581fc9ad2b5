"""Requests at the rate of a round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet
from coordinator.fleet.scheduled import ScheduledFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.rounds import compute_rate_factor
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.steps.contract import Action
from fedge.steps.mixture.install import Install
from fedge.steps.sgd import Sgd, iterate_recipes
from fedge.steps.training.train import Start, Train
from fedge.wire.messages import BlobRef
from tests.support.simulation import digits

REF = BlobRef(digest="0" * 64, size_bytes=1)
ORDER = Train(starts=(Start(model=REF),), sgd=Sgd(learning_rate=0.2))


class Asked(Fleet):
    """Notes what is asked."""

    task: Any = None

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        self.actions |= actions
        return {}

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        self.actions |= actions
        nothing: tuple[Answer, ...] = ()
        for answer in nothing:
            yield answer


async def test_only_the_rates_change_and_equal_requests_stay_one_object() -> None:
    asked = Asked()
    install = Install(model=REF, method="m")
    await ScheduledFleet(asked, 0.5).run("train", {"a": ORDER, "b": ORDER, "c": install})
    async for _ in ScheduledFleet(asked, 0.5).stream("train", {"d": ORDER}):
        pass
    assert asked.actions["a"] is asked.actions["b"]
    assert asked.actions["a"] == asked.actions["d"] == Train(starts=ORDER.starts, sgd=Sgd(learning_rate=0.1))
    assert asked.actions["c"] is install


@pytest.mark.parametrize("name", ["fedavg+ft", "fedepc", "fedbuff", "local"])
async def test_the_rate_falls_over_the_rounds_and_afterwards_it_is_the_given_one(name: str, tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    seen: dict[int, set[float]] = {}
    ask = fleet._make_orders

    def heard(label: str, actions: Mapping[str, Action], deadline_s: float | None = None) -> Any:
        rates = {sgd.learning_rate for action in actions.values() for sgd in iterate_recipes(action)}
        seen.setdefault(fleet.round, set()).update(rates)
        return ask(label, actions, deadline_s)

    fleet._make_orders = heard  # type: ignore[method-assign]
    settings = MethodSettings(rounds=4, sgd=Sgd(steps=1, learning_rate=0.2), schedule="steps")
    method: Any = make_method(name, settings)
    await run_rounds(method, method.make_first_state(layout, first), fleet)
    found = [sorted(rates) for rates in seen.values() if rates]
    if name == "local":
        assert found == [[0.2]]
        return
    expected = [0.2, 0.2, pytest.approx(0.02), pytest.approx(0.002)]
    assert found == [[rate] for rate in [*expected, *([0.2] if name == "fedavg+ft" else [])]]


def test_a_schedule_begins_at_the_given_rate_and_never_ends_at_zero() -> None:
    for schedule in ("constant", "cosine", "steps"):
        factors = [compute_rate_factor(schedule, r, 30) for r in range(1, 31)]
        assert factors[0] == 1
        assert factors == sorted(factors, reverse=True)
        assert factors[-1] > 0
    assert compute_rate_factor("cosine", 40, 30) == compute_rate_factor("cosine", 30, 30)  # rounds beyond the plan
    assert compute_rate_factor("cosine", 1, 0) == 1
