"""Parts that papers exchange are exchanged by options: each combination that is offered runs, and uses the part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.clustering import find
from coordinator.methods.catalogue import get_installed_methods, load_method_class, make_method
from coordinator.methods.method import Server
from coordinator.methods.option_values import list_words
from coordinator.methods.papers import cfic, fedepc, fedge, scmoe_pfl
from coordinator.methods.parts import cohort, grouping
from coordinator.methods.settings import MethodSettings
from coordinator.selection import ccmab, select
from fedge.errors import ConfigError
from fedge.steps.contract import Action
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.steps.descriptions.profile import Profile
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train
from fedge.tensors.layout import Codec
from tests.support.simulation import digits

pytestmark = pytest.mark.unit
ROUNDS = 2
LONGER = {"fedge selection": 8}
"""Groups, within which fedge selects, are made after six rounds with everybody."""
OPTIONS = {
    "fedge clustering": {"split": "always"},
    "fedepc selection": {"warm_up": 0},
    "fedepc clustering": {"warm_up": 1},
}
PARTS = {"clustering": find.OURS, "selection": select.OURS}
ALL = [
    (method, part, value) for method in get_installed_methods() for part, values in PARTS.items() for value in values
]


def offered(method: str, part: str) -> list[str]:
    if part == "selection":
        return list(load_method_class(method).SELECTIONS)
    fields = msgspec.structs.fields(load_method_class(method).Options)
    return next((list_words(field.type) for field in fields if field.name == part), [])


OFFERED = [case for case in ALL if case[2] in offered(*case[:2])]
REFUSED = [case for case in ALL if case not in OFFERED]


def made(tmp_path, method: str, rounds: int, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The method, its first state, and a fleet of six devices in three groups of turned cameras."""
    fleet, layout, first, _ = digits(tmp_path, limit=300, method=method)
    settings = MethodSettings(
        rounds=rounds, participation=0.5, sgd=Sgd(steps=3), codec=Codec.FLOAT32, options=options, seed=1
    )
    x, y = (np.concatenate(parts) for parts in zip(*(w.data.shared for w in fleet.workers.values()), strict=True))
    found = make_method(method, settings, Server(fleet.task, (x, y) if method == "fedcoe" else None))
    return found, found.init(layout, first), fleet


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is really called, as (part, value): every clustering and every rule of selection still does its work."""
    used: list[tuple[str, str]] = []

    def watch(module: Any, name: str, part: str, value: Callable[..., str]) -> None:
        real = getattr(module, name)

        def recording(*args: Any, **kwargs: Any) -> Any:
            used.append((part, value(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, recording)

    for module in (grouping, fedge, scmoe_pfl):
        watch(module, "find_clusters", "clustering", lambda how, *_: how)
    for module in (find, grouping, scmoe_pfl):
        watch(module, "by_label", "clustering", lambda *_: "labels")
    watch(find.aidc, "aidc", "clustering", lambda *_: "aidc")  # fedge's groups call it themselves
    for module in (select, cohort, cfic, fedepc, fedge):
        for name in {"draw_uniform", "select_fastest", "draw_stratified"} & vars(module).keys():
            watch(module, name, "selection", lambda *_, name=name: name.split("_")[1])
    watch(ccmab, "_choose", "selection", lambda *_: "ccmab")
    return used


def heard(fleet: Any) -> set[tuple[str, type[Action]]]:
    """The steps that the fleet was asked for, with the kinds of their actions."""
    return {(step, type(action)) for _, step, _, action in fleet.orders}


@pytest.mark.parametrize(("method", "part", "value"), OFFERED, ids=lambda word: word)
async def test_each_combination_runs_and_uses_what_was_chosen(method, part, value, tmp_path, monkeypatch) -> None:
    used = watched(monkeypatch)
    case = f"{method} {part}"
    rounds = LONGER.get(case, ROUNDS)
    chosen, state, fleet = made(tmp_path, method, rounds, OPTIONS.get(case, {}) | {part: value})
    for r in range(1, rounds + 1):
        fleet.round = r
        state = await chosen.round(state, fleet)
    if (method, value) == ("cfic", "labels"):  # it draws from what devices told, nothing is computed
        assert ("describe", DescribeLabels) in heard(fleet)
        assert state.described
    else:
        assert (part, value) in used
    if part == "selection":
        others = {"ccmab", "fastest", "stratified"} - {value}
        assert not others & {name for of, name in used if of == part}
    assert [line.answered for line in state.history] == [line.asked for line in state.history]
    assert state.history[-1].answered > 0


@pytest.mark.parametrize("method", ["fedepc", "cfic"])
@pytest.mark.parametrize(
    ("how", "asked"),
    [("labels", DescribeLabels), ("mctc", Train), ("aidc", Profile), ("k-means", Profile), ("agglomerative", Profile)],
)
async def test_devices_are_asked_for_what_the_clustering_clusters(method, how, asked, tmp_path) -> None:
    """And each is in exactly one cluster."""
    chosen, state, fleet = made(tmp_path, method, ROUNDS, {"clustering": how})
    fleet.round = 1
    state = await chosen.round(state, fleet)
    assert {kind for step, kind in heard(fleet) if step == "describe"} == {asked}
    members = [i for cluster in chosen.summarise(state)["clusters"].values() for i in cluster]
    assert sorted(members) == [device.id for device in fleet.get_devices()]


@pytest.mark.parametrize(("method", "part", "value"), REFUSED, ids=lambda word: word)
def test_what_is_not_offered_is_refused_by_name_with_the_reason(method, part, value, tmp_path) -> None:
    whole = not offered(method, part)
    reason = load_method_class(method).REFUSED[part if whole else f"{part}={value}"]
    with pytest.raises(ConfigError) as refused:
        made(tmp_path, method, ROUNDS, {part: value})
    text = str(refused.value)
    assert reason in text
    assert part in text
    assert all(word in text for word in offered(method, part)), "what is possible is named"
    assert whole or repr(value) in text


def test_nothing_is_said_to_be_refused_that_is_offered() -> None:
    for method in get_installed_methods():
        for name in load_method_class(method).REFUSED:
            part, _, value = name.partition("=")
            assert value not in offered(method, part) if value else not offered(method, part)
