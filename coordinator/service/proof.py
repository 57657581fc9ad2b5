"""Checks that a round gives equal orders and an equal state when it runs again, as a method promises.

A coordinator that was killed loads the last state and runs the round again, with a new object of the method and the
answers that it has. A simulation does so in its first rounds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet
from coordinator.methods.method import Method
from coordinator.methods.state import S, decode_state, encode_state
from fedge.errors import ConfigError, ProtocolError
from fedge.steps.contract import Action

PROVEN: Final = 2
"""Rounds that a simulation does twice. What a method remembers outside its state shows in the second of them."""
OURS: Final = "coordinator."
"""Prefix of the modules of methods that are proven by their tests instead."""


class RecordingFleet(Fleet):
    """A fleet whose requests (`asked`) and `answers` are recorded, by label and device, in order.

    Raises:
        ConfigError: a label has two streams.
    """

    def __init__(self, fleet: Fleet, method: str) -> None:
        super().__init__(fleet)
        self._method = method
        self.asked: dict[tuple[str, str], Action] = {}
        self.answers: dict[str, dict[str, Answer]] = {}
        self.streamed: dict[str, list[Answer]] = {}
        self.were_busy: list[frozenset[str]] = []

    def _record(self, label: str, actions: Mapping[str, Action]) -> None:
        self.asked |= {(label, i): action for i, action in actions.items()}

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Run the actions on the fleet, and record the answers."""
        self._record(label, actions)
        answers = await self._fleet.run(label, actions)
        self.answers.setdefault(label, {}).update(answers)
        return answers

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Stream the fleet's answers, and record them."""
        if label in self.streamed:
            text = "two streams of a round have the label {!r}, so that their orders and answers cannot be told apart"
            raise ConfigError(f"{self._method}: {text.format(label)}: number the labels")
        self._record(label, actions)
        answers = self.streamed[label] = []
        async for answer in self._fleet.stream(label, actions, seen):
            answers.append(answer)
            yield answer

    def get_busy_devices(self) -> frozenset[str]:
        """Return the fleet's busy devices, and record them."""
        self.were_busy.append(self._fleet.get_busy_devices())
        return self.were_busy[-1]


class ReplayFleet(RecordingFleet):
    """The fleet of a round that runs again. It repeats the recorded answers, and no device works.

    Raises:
        ConfigError: the method asks for something else.
    """

    def __init__(self, first: RecordingFleet, method: str) -> None:
        super().__init__(first, method)
        self._first = first

    def _record(self, label: str, actions: Mapping[str, Action]) -> None:
        super()._record(label, actions)
        for i, action in actions.items():
            if self._first.asked.get((label, i)) != action:
                raise make_difference_error(self._method, f"it asks {i} for something else under the label {label!r}")

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Return the answers of the first time."""
        self._record(label, actions)
        return {i: answer for i, answer in self._first.answers.get(label, {}).items() if i in actions}

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Stream the answers of the first time, in that order."""
        del seen
        self._record(label, actions)
        for answer in self._first.streamed.get(label, []):
            yield answer

    def get_busy_devices(self) -> frozenset[str]:
        """Return the busy devices of the first time."""
        if not self._first.were_busy:
            raise make_difference_error(self._method, "it asks which devices are busy, which it did not before")
        number = len(self.were_busy)
        self.were_busy.append(self._first.were_busy[min(number, len(self._first.were_busy) - 1)])
        return self.were_busy[-1]

    def accuse(self, device_id: str, error: ProtocolError) -> None:
        """Do nothing: nobody is accused twice."""

    def record_event(self, event: str, fields: Mapping[str, object]) -> None:
        """Do nothing: no event is recorded twice."""


def make_difference_error(method: str, what: str) -> ConfigError:
    """Make the error about a round that is not the same when it runs again."""
    return ConfigError(
        f"{method}: if a round runs again from the same state, as after a crash, {what}: take random numbers from "
        "make_round_rng(self.settings, r) alone, no time, and keep in the state what a later round needs, not on self"
    )


async def prove_round(method: Method[S], state: S, fleet: Fleet) -> S:
    """Do the next round, and do it again from the stored state, by another object of the method.

    Raises:
        ConfigError: the state cannot be stored, or was changed in place, or the repeated round differs.
    """
    stored = encode_state(state)
    first = RecordingFleet(fleet, method.name)
    new = await method.advance(state, first)
    if encode_state(state) != stored:
        raise ConfigError(
            f"{method.name}: a round changed the state that it was given: leave that as it is, and make the new one "
            "with finish_round(state, ..., name=value)"
        )
    again = ReplayFleet(first, method.name)
    other = await type(method)(method.settings, method.server).advance(reload(state), again)
    if left := first.asked.keys() - again.asked.keys():
        label, device = min(left)
        raise make_difference_error(method.name, f"it does not ask {device} under the label {label!r} any more")
    if encode_state(other) != encode_state(new):
        own = (f for f in new.__struct_fields__ if _encode(getattr(new, f)) != _encode(getattr(other, f)))
        raise make_difference_error(method.name, f"it ends in another {next(own, 'state')}")
    return new


def reload(state: S) -> S:
    """Return the state as a coordinator that is started again would load it.

    Raises:
        ConfigError: the state cannot be stored, or is not equal after reading.
    """
    data = encode_state(state)
    try:
        found = decode_state(data, type(state))
    except (msgspec.DecodeError, TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"a coordinator that is started again cannot read the state of the method: {error}; let the fields of "
            f"{type(state).__name__} have the types that they are given"
        ) from error
    if encode_state(found) != data:
        raise ConfigError("the state of the method differs after it was stored and read again")
    return found


def _encode(value: Any) -> bytes:
    if value is msgspec.UNSET:
        return b""
    return msgspec.msgpack.encode(value, enc_hook=lambda array: array.tobytes(), order="deterministic")


def is_ours(kind: type[Method[Any]]) -> bool:
    """Return whether a method is one of fedge's, whose promises its tests have proven."""
    return kind.__module__.startswith(OURS)
