"""Whoever writes a method or a step learns at once, and before real devices do, what no fleet can carry out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec import Struct

from coordinator.aggregation.protection import Protection
from coordinator.fleet.fleet import Fleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Method
from coordinator.methods.rounds import finish_round
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import ModelState
from fedge.errors import ConfigError
from fedge.steps.contract import Action, Result, Reveals
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Codec
from fedge.wire.messages import BlobRef
from tests.support.simulation import digits

HERE = __name__


class Seen(Result, frozen=True, kw_only=True):
    """One number."""

    REVEALS: ClassVar = {"n": Reveals.COUNT}
    n: int


class Look(Action, frozen=True, kw_only=True):
    """Its device half is `run` below."""

    STEP: ClassVar = "look"
    RESULT: ClassVar = Seen
    DEVICE: ClassVar = __name__


def run(device: Any, action: Look) -> Seen:
    return Seen(n=device.data.n_shared)


class LookAt(Look, frozen=True, kw_only=True):
    """With something large in the order itself."""

    STEP: ClassVar = "look_at"
    data: bytes


class Plain(Method[ModelState]):
    """A method that keeps all promises."""

    name = "plain"
    steps = (Look, LookAt)

    async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
        await fleet.run("look", {device.id: Look() for device in fleet.get_devices()})
        return finish_round(state, 0, {})


# ------------------------------------------------------------------------------------------------ as it is named


class Nameless(Method[ModelState]):
    round = Plain.round


class Mutable(ModelState, frozen=False, kw_only=True):
    """Somebody wrote frozen=False to be able to change it."""


class Keeps(Plain):
    State = Mutable


class Loose(Struct):
    """Options that are not frozen."""

    k: int = 1


class Optional(Plain):
    Options = Loose


class Typo(Plain):
    HEEDS = frozenset({"particpation"})  # type: ignore[arg-type]


class Unnamed(Look, frozen=True, kw_only=True):
    """It inherits the name of another step."""


class Told(Seen, frozen=True, kw_only=True):
    loss: float = 0.0


class Telling(Look, frozen=True, kw_only=True):
    STEP: ClassVar = "telling"
    RESULT: ClassVar = Told


class Secret(Seen, frozen=True, kw_only=True):
    REVEALS: ClassVar = {"n": Reveals.PRIVATE}


class Private(Look, frozen=True, kw_only=True):
    STEP: ClassVar = "private"
    RESULT: ClassVar = Secret


class Sent(Seen, frozen=True, kw_only=True):
    REVEALS: ClassVar = {**Seen.REVEALS, "file": Reveals.UPDATE}
    file: BlobRef


class Sending(Look, frozen=True, kw_only=True):
    STEP: ClassVar = "sending"
    RESULT: ClassVar = Sent


class Elsewhere(Look, frozen=True, kw_only=True):
    STEP: ClassVar = "elsewhere"
    DEVICE: ClassVar = ""


class HalfLess(Look, frozen=True, kw_only=True):
    STEP: ClassVar = "halfless"
    DEVICE: ClassVar = "tests.support.waiting"


class Changing(Look, frozen=False, kw_only=True):
    STEP: ClassVar = "changing"


def of(step: type[Action]) -> type[Plain]:
    """A method with this step."""
    return type("Own", (Plain,), {"steps": (step,)})


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Nameless, r"has no name: write name = \"...\" into the class"),
        (Keeps, r"State must be a frozen subclass of coordinator\.methods\.state\.State"),
        (Optional, r"Options must be a frozen subclass of msgspec\.Struct"),
        (Typo, "HEEDS names 'particpation'; it may name average, min_reports, participation"),
        (of(Unnamed), "Unnamed needs a name of its own on the wire: .* or devices carry out 'look' instead"),
        (of(Telling), r"Told\.REVEALS does not say what loss of step telling lets out of a device"),
        (of(Private), r"asks for n of step private, .* REVEALS = frozenset\(\{Reveals\.PRIVATE\}\) into the method"),
        (of(Sending), r"file of Sent refers to tensors .* let Sending\.uploads return each reference"),
        (of(Elsewhere), r"step elsewhere has no device half: edge_agent\.steps\.elsewhere needs a function run"),
        (of(HalfLess), r"step halfless has no device half: tests\.support\.waiting needs a function run"),
        (of(Changing), "Changing of step changing can be changed: write frozen=True"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_class_that_no_fleet_could_run_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, kind: type[Plain], says: str
) -> None:
    monkeypatch.setitem(globals(), "OWN", kind)
    import tests.support.waiting  # noqa: F401 - a module that is loaded, and has no device half

    with pytest.raises(ConfigError, match=says):
        make_method(f"{HERE}:OWN", MethodSettings())


def test_one_that_any_fleet_can_run_is_not(tmp_path: Path) -> None:
    assert make_method(f"{HERE}:Plain", MethodSettings()).name == "plain"


# -------------------------------------------------------------------------------------------- settings without effect


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (MethodSettings(participation=0.25), "--participation"),
        (MethodSettings(min_reports=2), "--min-reports"),
        (MethodSettings(protection=Protection(average="median")), "--average"),
    ],
)
def test_a_setting_that_a_method_does_not_heed_is_refused_before_it_runs(settings: MethodSettings, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"plain does not heed {flag}: leave it out, or let the method "):
        make_method(f"{HERE}:Plain", settings)
    assert make_method("fedavg", settings).settings == settings


def test_masked_updates_have_one_average_which_is_no_setting_to_heed() -> None:
    class Summing(Plain):
        SUMS = "samples"

    settings = MethodSettings(protection=Protection(average="mean", masking=True))
    assert Summing(settings).settings == settings
    with pytest.raises(ConfigError, match="does not heed --average"):
        Summing(MethodSettings(protection=Protection(average="mean")))


async def test_a_cohort_is_drawn_by_lot_from_the_devices_that_are_there(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=6, limit=120)

    class Drawing(Plain):
        HEEDS = frozenset({"participation"})

    drawn = []
    for seed in range(20):
        method = Drawing(MethodSettings(participation=0.5, seed=seed))
        state = method.init(layout, first)
        drawn.append(tuple(method.draw_cohort(state, fleet)))
        assert method.draw_cohort(state, fleet) == list(drawn[-1]) == sorted(drawn[-1])
    assert {len(ids) for ids in drawn} == {3}
    assert {i for ids in drawn for i in ids} == {device.id for device in fleet.get_devices()}
    assert len(set(drawn)) > 5


# -------------------------------------------------------------------------------------------------- requests, answers

Ask = Callable[[Fleet, BlobRef], Any]


class OwnTrain(Train, frozen=True, kw_only=True):
    STEP: ClassVar = "own_train"
    DEVICE: ClassVar = "edge_agent.steps.training.train"


class More(Trained, frozen=True, kw_only=True):
    REVEALS: ClassVar = {**Trained.REVEALS, "control": Reveals.UPDATE}
    control: BlobRef


class TrainMore(Train, frozen=True, kw_only=True):
    """`Train.uploads`, which it inherits, declares the update alone."""

    STEP: ClassVar = "train_more"
    RESULT: ClassVar = More
    DEVICE: ClassVar = "tests.coordinator.more"


def train(model: BlobRef, kind: type[Train] = Train, steps: int = 1) -> Train:
    return kind(starts=(Start(model=model),), sgd=Sgd(steps=steps), codec=Codec.FLOAT32, measure=False)


async def twice(fleet: Fleet, model: BlobRef) -> None:
    await fleet.run("train", {"d00": train(model)})
    await fleet.run("train", {"d00": train(model), "d01": train(model)})  # the same again: answered already
    await fleet.run("train", {"d00": train(model, steps=2)})


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (twice, "d00 was asked for something else in this round under the label 'train'"),
        (lambda f, m: f.run("my train", {"d00": train(m)}), "'my train' cannot be the label of an order"),
        (lambda f, m: f.run("train", {"cam9": train(m)}), "cam9 is not there in this round"),
        (lambda f, m: f.run("train", {"d00": {"model": m}}), "train asks devices for a dict, which is no step"),
        (lambda f, m: f.run("train", {"d00": train(m, OwnTrain)}), r"OwnTrain: write steps = \(OwnTrain,\) into"),
        (
            lambda f, _: f.run("look", {"d00": LookAt(data=bytes(60_000))}),
            r"LookAt of \d+ bytes fits into no order, which holds 53248",
        ),
    ],
)
async def test_a_request_that_real_devices_could_not_do_is_refused(tmp_path: Path, ask: Ask, says: str) -> None:
    class Asking(Plain):
        async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
            await ask(fleet, state.model)
            return finish_round(state, 0, {})

    fleet, layout, first, _ = digits(tmp_path, n=2, limit=60)
    method = Asking(MethodSettings())
    with pytest.raises(ConfigError, match=says):
        await method.advance(method.init(layout, first), fleet)


async def test_tensors_that_the_coordinator_would_not_fetch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from types import ModuleType

    half = ModuleType("tests.coordinator.more")

    def run(device: Any, action: TrainMore) -> More:
        from edge_agent.learning.frame import Learned, train_alone

        return train_alone(device, action, lambda w, _: Learned(w, report={"control": device.send(b"control")}))

    half.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.coordinator.more", half)

    class Both(Plain):
        steps = (TrainMore,)  # type: ignore[assignment]

        async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
            await fleet.run("train", {"d00": train(state.model, TrainMore)})
            return finish_round(state, 0, {})

    fleet, layout, first, _ = digits(tmp_path, n=2, limit=60)
    method = Both(MethodSettings())
    with pytest.raises(
        ConfigError, match=r"control of More refers to tensors that TrainMore\.uploads does not declare"
    ):
        await method.advance(method.init(layout, first), fleet)


# ------------------------------------------------------------------------------------------------------- a round's end


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda state: state, "round 1 returned the state of round 0"),
        (lambda state: msgspec.structs.replace(state, round=2), "round 1 returned the state of round 2"),
        (lambda _: None, "a round returned NoneType, and not a ModelState"),
    ],
)
async def test_a_round_that_does_not_end_in_the_next_state_is_refused(
    tmp_path: Path, returned: Callable[[ModelState], ModelState], says: str
) -> None:
    class Returning(Plain):
        async def round(self, state: ModelState, fleet: Fleet) -> ModelState:
            return returned(state)

    fleet, layout, first, _ = digits(tmp_path, n=1, limit=60)
    method = Returning(MethodSettings())
    with pytest.raises(ConfigError, match=says):
        await method.advance(method.init(layout, first), fleet)
