"""`fedge check --method`: what is wrong with a method of one's own, before anything is started."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec
import pytest

from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.method import Method
from coordinator.methods.rounds import finish_round, select_updates
from coordinator.methods.state import ModelState
from coordinator.service.checks import make_samples
from coordinator.simulation import rehearsal
from coordinator.simulation.rehearsal import rehearse
from fedge.models.build import make_initial_model
from fedge.steps.training.train import Start, Train
from fedge.tasks import load_task
from tests.examples.test_methods import FILES, own_class

TASK = load_task("digits")
LAYOUT, _ = make_initial_model(TASK, 0)


class Own(Method[ModelState]):
    """It trains everybody and moves to what the first device has learned."""

    name = "own"

    async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
        order = Train(starts=(Start(model=state.model),), sgd=self.settings.sgd, codec=self.settings.codec)
        updates = select_updates(await fleet.run("train", {device.id: order for device in fleet.get_devices()}))
        for update in list(updates.values())[:1]:
            w, change = (fleet.get(ref, state.layout) for ref in (state.model, update.update))
            state = msgspec.structs.replace(
                state, model=fleet.put_model(dataclasses.replace(w, params=w.params + change.params), state.layout)
            )
        return finish_round(state, 4, updates)


class Claims(Own):
    HEEDS = frozenset({"participation", "min_reports"})


class Breaks(Own):
    async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
        await super().round(state, fleet)
        return state


class Crashes(Own):
    async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
        raise KeyError(state.round)


class Endless(Own):
    def is_done(self, state: ModelState) -> bool:
        del state
        return False


def found(monkeypatch: pytest.MonkeyPatch, kind: type[Method[Any]]) -> list[tuple[str, str, bool]]:
    monkeypatch.setitem(globals(), "OWN", kind)
    findings = rehearse(f"{__name__}:OWN", {}, TASK, LAYOUT, make_samples(TASK))
    return [(each.what, each.do, each.stops) for each in findings]


def test_one_that_keeps_its_promises_is_told_what_it_does_not_heed(monkeypatch: pytest.MonkeyPatch) -> None:
    ((what, do, stops),) = found(monkeypatch, Own)
    assert what.endswith(":OWN does not heed --average, --min-reports, --participation")
    assert "are refused; the method names in HEEDS which it heeds" in do
    assert not stops


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Claims, "says that it heeds --min-reports, and does not: let it leave the model as it is after fewer"),
        (Claims, "says that it heeds --participation, and does not: let it train the devices of self.draw_cohort"),
        (Breaks, "would fail in a federation: own: round 1 returned the state of round 0"),
        (Crashes, r"fails in a federation of 4 devices: KeyError: 0 \(test_rehearsal\.py, line \d+\)"),
        (Endless, "own: it is not done after 10 rounds, where 2 were planned"),
    ],
)
def test_one_that_does_not_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, kind: type[Method[Any]], says: str
) -> None:
    told = [f"{what}: {do}" for what, do, stops in found(monkeypatch, kind) if stops]
    assert any(re.search(says, each) for each in told), told


def test_fedges_own_are_proven_by_their_tests() -> None:
    assert rehearse("fedge", {}, TASK, LAYOUT, make_samples(TASK)) == []


def test_a_variant_of_one_heeds_what_that_heeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, type("Variant", (FedAvg,), {"name": "variant", "__module__": __name__})) == []


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "fedbn"], ids=lambda file: file.stem)
def test_the_examples_keep_their_promises(file: Any) -> None:
    """Of fedbn the network needs layers that normalise."""
    findings = rehearse(f"methods.{file.stem}:{own_class(file.read_text())}", {}, TASK, LAYOUT, make_samples(TASK))
    assert not any(finding.stops for finding in findings), findings


def test_nothing_is_left_behind(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal.tempfile, "tempdir", str(tmp_path))
    found(monkeypatch, Own)
    assert not list(tmp_path.iterdir())
