"""Checks of what a method and its steps promise, alike for real and simulated devices, as early as possible.

A class is checked when it is named (`require_method`), its requests when they are made and the answers when they come
(`CheckedFleet`), and a round when it ends (`require_next`). `coordinator.service.proof` checks the rest by doing a
round twice.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet
from fedge.errors import ConfigError
from fedge.privacy.egress import PRESETS
from fedge.settings import NAME
from fedge.steps.contract import Action, Refusal, Result, Steps, fields_of, load_installed_steps, require_step
from fedge.tensors.layout import Layout
from fedge.wire.messages import iterate_blobs

Shared = Literal["participation", "min_reports", "average"]
"""Settings of all methods that take effect only in a method that heeds them."""
SHARED: Final[frozenset[Shared]] = frozenset(get_args(Shared))
HOW: Final[Mapping[Shared, str]] = {
    "participation": "train the devices of self.draw_cohort(state, fleet)",
    "min_reports": "leave the model as it is after fewer than self.settings.min_reports updates",
    "average": "average with coordinator.methods.parts.averaging",
}
"""What a method must do to heed each of these settings."""


def require_method(path: str, kind: type[Any], state: type[Struct]) -> None:
    """Refuse a class of a method that no fleet could run. `path`: what the user wrote. `state`: base of all states.

    Raises:
        ConfigError: the text says what to write.
    """
    if not isinstance(getattr(kind, "name", None), str):
        raise ConfigError(f'{path} has no name: write name = "..." into the class')
    for own, base in (("State", state), ("Options", Struct)):
        found = getattr(kind, own)
        if not (isinstance(found, type) and issubclass(found, base) and found.__struct_config__.frozen):
            raise ConfigError(
                f"{path}.{own} must be a frozen subclass of {base.__module__}.{base.__name__}: write frozen=True after "
                "the class that it is made from"
            )
    if odd := sorted(set(kind.HEEDS) - SHARED):
        raise ConfigError(f"{path}.HEEDS names {odd[0]!r}; it may name {', '.join(sorted(SHARED))}")
    for step in kind.steps:
        if not (isinstance(step, type) and issubclass(step, Action)):
            raise ConfigError(f"{path}.steps holds {step!r}, which is no subclass of fedge.steps.contract.Action")
        require_step(step)
        kept = {
            field.name: step.RESULT.get_revealed()[field.name] for field in fields_of(step.RESULT) if field.required
        }
        for field, reveals in kept.items():
            if reveals not in PRESETS["default"] | kind.REVEALS:
                raise ConfigError(
                    f"{path} asks for {field} of step {step.STEP}, which lets out {reveals.words}; owners withhold "
                    f"that unless they are told: write REVEALS = frozenset({{Reveals.{reveals.name}}}) into the method"
                )


def require_heeded(name: str, heeds: frozenset[Shared], given: Mapping[Shared, tuple[object, object]]) -> None:
    """Refuse settings that a method does not heed. `given`: the value of each, and its default.

    Raises:
        ConfigError: such a setting differs from its default.
    """
    for setting, (value, default) in given.items():
        if value != default and setting not in heeds:
            flag = f"--{setting.replace('_', '-')}"
            raise ConfigError(
                f"{name} does not heed {flag}: leave it out, or let the method {HOW[setting]}, and name {setting!r} in "
                "its HEEDS"
            )


class CheckedFleet(Fleet):
    """The fleet in one round of a method, which refuses what devices could not do or coordinators not repeat.

    Args:
        fleet: the devices.
        method: the method's name, for error texts.
        steps: the method's own steps.
        layout: the layout of the method's model.
    """

    def __init__(self, fleet: Fleet, method: str, steps: Sequence[type[Action]], layout: Layout) -> None:
        super().__init__(fleet)
        self._method, self._layout = method, layout
        self._steps: Steps = {**load_installed_steps(), **{kind.STEP: kind for kind in steps}}
        self._asked: dict[tuple[str, str], Action] = {}

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Run the actions on the fleet, if real devices could do them.

        Raises:
            ConfigError: a request cannot be made, or a result refers to undeclared tensors.
        """
        self._require(label, actions)
        answers = await self._fleet.run(label, actions)
        for i, answer in answers.items():
            if answer.result is not None and not isinstance(answer.result, Refusal):
                self._require_declared(actions[i], answer.result)
        return answers

    def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Stream the fleet's answers; raise as `run` does for requests."""
        self._require(label, actions)
        return self._fleet.stream(label, actions, seen)

    def _require(self, label: str, actions: Mapping[str, Action]) -> None:
        if not re.fullmatch(NAME, label):
            raise ConfigError(
                f"{self._method}: {label!r} cannot be the label of an order: take letters, digits, dots and dashes"
            )
        if not actions:
            return
        there = {device.id for device in (*self._fleet.get_devices(), *self._fleet.get_inference_devices())}
        for action in {id(action): action for action in actions.values()}.values():  # usually one shared by all
            if not isinstance(action, Action):
                raise ConfigError(
                    f"{self._method}: {label} asks devices for a {type(action).__name__}, which is no step: "
                    "give them a subclass of fedge.steps.contract.Action"
                )
            require_step(type(action))
            if self._steps.get(action.STEP) is not type(action):
                kind = type(action).__name__
                raise ConfigError(
                    f"{self._method}: the coordinator could not read reports of {kind}: write steps = ({kind},) into "
                    "the method"
                )
        for i, action in actions.items():
            if i not in there:
                raise ConfigError(f"{self._method}: {i} is not there in this round: ask those of fleet.get_devices()")
            before = self._asked.setdefault((label, i), action)
            if before is not action and before != action:
                raise ConfigError(
                    f"{self._method}: {i} was asked for something else in this round under the label {label!r}: give "
                    "each call of fleet.run or fleet.stream its own"
                )

    def _require_declared(self, action: Action, result: Result) -> None:
        fields = {f: [*iterate_blobs(getattr(result, f))] for f in result.__struct_fields__}
        if not any(fields.values()):
            return
        declared = action.uploads(result, self._layout)
        for field, refs in fields.items():
            if any(ref not in declared for ref in refs):
                raise ConfigError(
                    f"{self._method}: {field} of {type(result).__name__} refers to tensors that "
                    f"{type(action).__name__}.uploads does not declare, and the coordinator fetches no others: "
                    "let it return this reference, too, with the layout of its tensors"
                )


def require_next(method: str, before: Any, after: Any) -> None:
    """Refuse a value that is not the state after the next round.

    Raises:
        ConfigError: the text says what to return.
    """
    if type(after) is not type(before):
        raise ConfigError(
            f"{method}: a round returned {type(after).__name__}, and not a {type(before).__name__}: let it return "
            "finish_round(state, ...)"
        )
    if after.round != before.round + 1:
        raise ConfigError(
            f"{method}: round {before.round + 1} returned the state of round {after.round}: let it return "
            "finish_round(state, ...), which counts it"
        )
