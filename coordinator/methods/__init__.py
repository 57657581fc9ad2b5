"""Methods: one paper, one file that reads like its pseudocode.

A method is an explicit state and a function from one round to the next. The state is a frozen struct of plain values,
arrays and references to stored tensors; `dump` and `load` turn it into bytes and back. All random numbers of a round
come from (seed, round), so a round that is run again after a crash writes the same orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.fleet import Answer, Fleet
from fedge.errors import ConfigError
from fedge.messages import BlobRef, Codec, Declined, Sgd, Trained
from fedge.tensors import Layout, from_bytes, to_bytes


class MethodSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every method needs to know. `participation`: share of the devices asked in a round."""

    rounds: Annotated[int, Meta(ge=0)] = 30
    participation: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_reports: Annotated[int, Meta(ge=1)] = 1
    seed: Annotated[int, Meta(ge=0)] = 0
    sgd: Sgd = Sgd()
    codec: Codec = Codec.INT8


class RoundSummary(Struct, frozen=True, kw_only=True):
    """One line of a run's history. `accuracy`: mean over the cohort, own validation samples, received model."""

    round: int
    asked: int
    answered: int
    accuracy: float | None
    loss: float | None


class State(Struct, frozen=True, kw_only=True):
    """What every method's state has: the rounds done, the layout, how often each device trained, the history."""

    round: int
    layout: Layout
    participations: dict[str, int] = {}
    history: tuple[RoundSummary, ...] = ()


S = TypeVar("S", bound=State)


class Method(Protocol[S]):
    """One way to learn. `round` is called until `done`; the last one leaves a bundle on each device."""

    name: str
    settings: MethodSettings

    def initial(self, layout: Layout, model: BlobRef) -> S:
        """The state before round 1; `model` is the common initial model."""

    async def round(self, state: S, fleet: Fleet) -> S:
        """Do round `state.round + 1`."""

    def done(self, state: S) -> bool:
        """Whether nothing is left to do."""

    def summary(self, state: S) -> dict[str, Any]:
        """What a person or a plot wants to know, as JSON values."""


def make(name: str, settings: MethodSettings) -> Method[Any]:
    """The method of that name.

    Raises:
        ConfigError: there is none; the text lists them.
    """
    from coordinator.methods.fedavg import FedAvg
    from coordinator.methods.fedge import Fedge

    methods: dict[str, Callable[[MethodSettings], Method[Any]]] = {"fedavg": FedAvg, "fedge": Fedge}
    if name not in methods:
        raise ConfigError(f"there is no method {name!r}; choose one of {', '.join(sorted(methods))}")
    return methods[name](settings)


def round_rng(settings: MethodSettings, round_number: int) -> np.random.Generator:
    """The random numbers of one round, the same whenever it is run."""
    return np.random.default_rng((settings.seed, round_number))


def accepted(answers: dict[str, Answer]) -> dict[str, Trained]:
    """The updates among the answers that may be averaged, by ascending device id."""
    return {i: a.result for i, a in answers.items() if isinstance(a.result, Trained) and a.result.n_samples > 0}


def sizes(updates: Mapping[str, Trained]) -> list[int]:
    """n_i of each update, in the order of the updates."""
    return [update.n_samples for update in updates.values()]


def declined(answer: Answer) -> bool:
    """Whether the device politely refused, which is no fault."""
    return isinstance(answer.result, Declined)


def counted(participations: dict[str, int], updates: dict[str, Trained]) -> dict[str, int]:
    """Participations with this round's updates added."""
    return participations | {i: participations.get(i, 0) + 1 for i in updates}


def summarise(round_number: int, asked: int, updates: dict[str, Trained]) -> RoundSummary:
    """The history's line of a round of training."""
    accuracies = [u.val_accuracy for u in updates.values() if u.val_accuracy is not None]
    n = sum(u.n_samples for u in updates.values())
    return RoundSummary(
        round=round_number,
        asked=asked,
        answered=len(updates),
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        loss=sum(u.n_samples / n * u.loss_before for u in updates.values()) if n else None,
    )


# ------------------------------------------------------------------------------------------------ states as bytes


def dump(state: State) -> bytes:
    """A state as bytes: equal states give equal bytes."""
    arrays: dict[str, NDArray[np.generic]] = {}

    def hold(value: object) -> object:
        if isinstance(value, np.ndarray):
            arrays[str(len(arrays))] = value
            return str(len(arrays) - 1)
        raise NotImplementedError(type(value))

    plain = msgspec.msgpack.encode(state, enc_hook=hold, order="deterministic")
    return msgspec.msgpack.encode((plain, to_bytes(arrays) if arrays else b""))


def load(data: bytes, kind: type[S]) -> S:
    """The state that `dump` wrote.

    Raises:
        msgspec.DecodeError: these bytes are no state of this kind.
    """
    plain, packed = msgspec.msgpack.decode(data, type=tuple[bytes, bytes])
    arrays = from_bytes(packed) if packed else {}

    def give_back(_: type, key: object) -> object:
        return arrays[str(key)]

    return msgspec.msgpack.decode(plain, type=kind, dec_hook=give_back)
