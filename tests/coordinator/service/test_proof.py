"""A round that is done twice shows what a coordinator that is killed and started again would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.fleet.fleet import Fleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Method
from coordinator.methods.rounds import finish_round, make_round_rng, select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import ModelState
from coordinator.service.proof import prove_round
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Codec
from tests.support.simulation import digits


class OwnState(ModelState, frozen=True, kw_only=True):
    """What some of these methods add."""

    drawn: tuple[int, ...] = ()
    seen: dict[str, int] = {}
    array: NDArray[np.float32] = np.zeros(1, np.float32)
    anything: Any = None
    untyped: object = np.zeros(1)


class Own(Method[OwnState]):
    """One device trains in a round; `draws` says which, and `adds` what the state gets."""

    name = "own"
    State = OwnState
    draws: ClassVar[Callable[[Any, OwnState], int]] = staticmethod(lambda method, state: 0)
    adds: ClassVar[Callable[[Any, OwnState, int], dict[str, Any]]] = staticmethod(lambda method, state, k: {})

    async def round(self, state: OwnState, fleet: Fleet) -> OwnState:
        k = type(self).draws(self, state)
        order = Train(
            starts=(Start(model=state.model),), sgd=Sgd(steps=1), codec=Codec.FLOAT32, measure=self.settings.seed > 0
        )
        answers = await fleet.run("train", {fleet.get_devices()[k].id: order})
        return finish_round(state, 1, select_updates(answers), **type(self).adds(self, state, k))


def remembering(method: Any, state: OwnState) -> int:
    """What happened is kept on the object: the next round is another one after a restart."""
    del state
    method.calls = getattr(method, "calls", -1) + 1
    return int(method.calls)


def changing(_: Any, state: OwnState, k: int) -> dict[str, Any]:
    state.seen["d00"] = k
    return {}


@pytest.mark.parametrize(
    ("draws", "adds", "says"),
    [
        (lambda *_: int(np.random.default_rng().integers(2**40)) % 3, None, "it asks d0"),
        (remembering, None, "it asks d00 for something else"),
        (None, lambda *_: {"drawn": (int(np.random.default_rng().integers(2**40)),)}, "it ends in another drawn"),
        (None, lambda *_: {"array": np.random.default_rng().normal(size=2)}, "it ends in another array"),
        (None, changing, "a round changed the state that it was given"),
        (None, lambda *_: {"anything": object()}, "cannot be stored: field anything"),
        (None, lambda *_: {"anything": np.float64(1)}, r"cannot be stored: field anything \(.*numpy\.float64"),
        (
            None,
            lambda *_: {"untyped": None},
            "cannot read the state of the method: None is no array; let the fields of OwnState have",
        ),
        (None, lambda *_: {"drawn": 3}, "cannot read the state of the method: Expected `array`, got `int`"),
    ],
)
async def test_a_method_that_is_not_the_same_again_is_refused_in_the_first_rounds(
    tmp_path: Path, draws: Any, adds: Any, says: str
) -> None:
    fields = {"draws": draws, "adds": adds}
    kind = type("Bad", (Own,), {name: staticmethod(f) for name, f in fields.items() if f is not None})
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=90)
    method = kind(MethodSettings(rounds=4))

    async def several() -> None:  # two draws of one in three are equal in 1 of 9 runs, in all of them in 1 of 59049
        for _ in range(5):
            await run_rounds(method, method.init(layout, first), fleet, rounds=4)

    with pytest.raises(ConfigError, match=says):
        await several()


async def test_one_that_looks_who_is_busy_only_when_it_runs_again_is_refused(tmp_path: Path) -> None:
    calls: list[int] = []

    class Looking(Own):
        async def round(self, state: OwnState, fleet: Fleet) -> OwnState:
            calls.append(state.round)
            if len(calls) == 2:
                fleet.get_busy_devices()
            return await super().round(state, fleet)

    fleet, layout, first, _ = digits(tmp_path, n=3, limit=90)
    method = Looking(MethodSettings(rounds=2))
    with pytest.raises(ConfigError, match=r"own: .*it asks which devices are busy, which it did not before: take"):
        await run_rounds(method, method.init(layout, first), fleet, rounds=2)


async def test_two_streams_under_one_label_are_refused(tmp_path: Path) -> None:
    class Twice(Own):
        async def round(self, state: OwnState, fleet: Fleet) -> OwnState:
            order = Train(starts=(Start(model=state.model),), sgd=Sgd(steps=1), codec=Codec.FLOAT32)
            found = {}
            for device in fleet.get_devices()[:2]:
                found |= {a.device_id: a async for a in fleet.stream("train", {device.id: order})}
            return finish_round(state, 2, select_updates(found))

    fleet, layout, first, _ = digits(tmp_path, n=3, limit=90)
    method = Twice(MethodSettings(rounds=2))
    with pytest.raises(ConfigError, match=r"own: two streams of a round have the label 'train'.*: number the labels"):
        await run_rounds(method, method.init(layout, first), fleet, rounds=2)


async def test_one_that_draws_from_the_round_is_not_and_its_devices_work_once(tmp_path: Path) -> None:
    def draws(method: Any, state: OwnState) -> int:
        return int(make_round_rng(method.settings, state.round + 1).integers(3))

    kind = type("Good", (Own,), {"draws": staticmethod(draws), "adds": staticmethod(lambda m, s, k: {"drawn": (k,)})})
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=90)
    method = kind(MethodSettings(rounds=3, fine_tune=False))
    state = await run_rounds(method, method.init(layout, first), fleet, rounds=3)
    assert [number for number, label, _ in fleet.asked if label == "train"] == [1, 2, 3]
    assert sum(state.participations.values()) == 3


async def test_in_its_first_rounds_a_simulation_goes_on_with_the_state_that_was_stored(tmp_path: Path) -> None:
    """A list where the field says tuple becomes one, as after a restart of a coordinator."""
    kind = type("Lists", (Own,), {"adds": staticmethod(lambda m, s, k: {"drawn": [*s.drawn, k]})})
    seen: list[type] = []

    class Looking(kind):  # type: ignore[valid-type, misc]
        async def round(self, state: OwnState, fleet: Fleet) -> OwnState:
            seen.append(type(state.drawn))
            found: OwnState = await super().round(state, fleet)
            return found

    fleet, layout, first, _ = digits(tmp_path, n=3, limit=90)
    method = Looking(MethodSettings(rounds=2))
    await run_rounds(method, method.init(layout, first), fleet, rounds=2)
    assert seen == [tuple] * 4


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavg+ft", "fedge", "cfic", "fedbuff", "fedepc", "scmoe-pfl", "pm-moe", "dbe"]
)
async def test_fedges_own_methods_are_the_same_again(tmp_path: Path, name: str) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=6, limit=240)
    method = make_method(name, MethodSettings(rounds=3, participation=0.5, sgd=Sgd(steps=2)))
    state = method.make_first_state(layout, first)
    while not method.is_done(state):
        fleet.round = state.round + 1
        state = await prove_round(method, state, fleet)
    assert set(state.installed) == {device.id for device in fleet.get_devices()}
    assert msgspec.structs.asdict(state)["round"] >= 3
