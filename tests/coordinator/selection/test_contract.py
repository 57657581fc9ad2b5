"""What a rule of selection must be, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Self

import numpy as np
import pytest

from coordinator.selection import ccmab
from coordinator.selection.ccmab import Arm, Participation, Settings
from coordinator.selection.contract import GROUP, Candidates, Rule, draw_positions, load_rule
from coordinator.selection.select import BANDIT, OURS, choose
from fedge.errors import ConfigError
from fedge.system.loading import find_entry_points, register_object

ARMS = [Arm(id=f"d{k}", n_samples=10 * (k + 1), work=10.0, cpu_ghz=2.0 if k else None) for k in range(4)]
EVERYBODY = Settings(quota=0.5, deadline_s=np.inf, fairness=False)
DONE = Participation(gradient_norm=2.0, loss_drop=0.5, seconds=3.0)


class Counting(Rule, frozen=True):
    """It counts how often each device answered."""

    answers: dict[str, int] = {}

    def select(self, devices: Candidates, n: int, rng: np.random.Generator) -> Any:
        return np.argsort([self.answers.get(i, 0) for i in devices.ids], kind="stable")[:n]

    def observe(self, outcomes: Mapping[str, Participation | None]) -> Self:
        return type(self)(answers=self.answers | {i: self.answers.get(i, 0) + 1 for i in outcomes})


def held(how: object, bandit: ccmab.State = ccmab.State()) -> tuple[ccmab.Selection, ccmab.State]:  # noqa: B008
    return choose(register_object(how), {0: ARMS}, {0: bandit}, EVERYBODY, seed=(1, 1), last_visit={})[0]


def test_ours_are_found_by_entry_point() -> None:
    assert set(OURS) <= find_entry_points(GROUP).keys()
    assert load_rule("ccmab") is BANDIT
    assert isinstance(load_rule("stratified"), Rule)


def test_a_rule_sees_what_is_known_of_each_device() -> None:
    seen: list[Candidates] = []

    def rule(devices: Candidates, n: int, rng: np.random.Generator) -> list[int]:
        seen.append(devices)
        return [1, 3]

    selection, bandit = held(rule)
    assert selection.ids == ("d1", "d3")
    bandit = ccmab.observe(bandit, selection, {"d1": DONE, "d3": None})
    held(rule, bandit)
    first, second = seen
    assert first.ids == ("d0", "d1", "d2", "d3")
    assert first.n_samples.tolist() == [10, 20, 30, 40]
    assert np.isnan(first.cpu_ghz).tolist() == [True, False, False, False]
    assert np.isnan(first.loss_drop).all()
    assert first.waited.tolist() == [1, 1, 1, 1]
    assert second.waited.tolist() == [2, 1, 2, 1]
    assert second.loss_drop[1] == 0.5
    assert second.gradient_norm[1] == 2.0
    assert second.seconds[1] == 3.0
    assert second.seconds[3] > first.seconds[3], "it failed"


def test_what_a_rule_learns_is_a_part_of_the_state() -> None:
    selection, bandit = held(Counting)
    assert selection.ids == ("d0", "d1")
    bandit = ccmab.observe(bandit, selection, {"d0": DONE})  # d1 declined
    assert Counting().load(bandit.learned) == Counting(answers={"d0": 1})
    assert held(Counting, bandit)[0].ids == ("d1", "d2")


def test_what_another_rule_has_learned_counts_for_nothing() -> None:
    class Other(Rule, frozen=True):
        answers: float = 0.0

    assert Other().load(Counting(answers={"a": 1}).encode_after("x", {})) == Other()
    assert Other().load(b"") == Other()


@pytest.mark.parametrize(
    "given", [[0, 0], [4], [-1], [0, 1, 2], [[0]], [0.5], ["d0"], 1, None, [True]], ids=lambda each: repr(each)
)
def test_positions_that_do_not_fit_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"selection mine chose .* at most 2 different positions, .* from 0 to 3"):
        draw_positions("mine", lambda: given, 4, 2)


def test_positions_may_be_fewer_and_of_any_kind() -> None:
    for given in ([], [3, 0], np.array([2], np.uint8), (1,)):
        assert draw_positions("mine", lambda given=given: given, 4, 2) == list(given)  # type: ignore[misc]


def test_failures_of_a_rule_are_told_with_its_line() -> None:
    def fails(*_: object) -> list[int]:
        raise KeyError("mine")

    with pytest.raises(ConfigError, match=r"failed: KeyError: 'mine' \(test_contract.py, line \d+\)"):
        held(fails)

    class Forgetful(Counting, frozen=True):
        def observe(self, outcomes: Mapping[str, Participation | None]) -> Self:
            raise ValueError("forgotten")

    selection, bandit = held(Forgetful)
    with pytest.raises(ConfigError, match="cannot observe the round: ValueError: forgotten"):
        ccmab.observe(bandit, selection, {"d0": DONE})


def test_a_rule_that_learns_begins_without_knowledge() -> None:
    class Needs(Rule, frozen=True):
        answers: int

    with pytest.raises(ConfigError, match="its fields need defaults"):
        load_rule(register_object(Needs))


def test_other_things_are_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("of_mine")
    module.number, module.kind = 1, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "of_mine", module)
    for name in ("number", "kind"):
        with pytest.raises(ConfigError, match=rf"of_mine:{name} is no selection: it must be a function"):
            load_rule(f"of_mine:{name}")
    with pytest.raises(ConfigError, match=r"there is no selection 'unifrom' \(did you mean uniform\?\)"):
        load_rule("unifrom")
