"""The state of every method, which one round hands to the next, and its bytes."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from coordinator.fleet.versions import Descent
from fedge.errors import ConfigError
from fedge.privacy.masked_sums import Sums
from fedge.steps.mixture.install import Installed
from fedge.tensors.layout import Layout, from_bytes, to_bytes
from fedge.wire.messages import BlobRef


class RoundSummary(Struct, frozen=True, kw_only=True):
    """One round in a run's history. `accuracy`: of the received model on own validation samples, mean over the cohort.

    `loss`: on the training samples; None if the method does not ask for losses.
    """

    round: int
    asked: int
    answered: int
    accuracy: float | None
    loss: float | None


class Best(Struct, frozen=True, kw_only=True):
    """The best state so far (`coordinator.methods.rounds.stop_early`).

    `score`: of the models after round `round`. `since`: rounds since then without a better score. `state`: encoded;
    empty once it is in use. `held`: its tensors. `stopped`: the round after which training ended, None while it goes
    on.
    """

    score: float
    round: int
    since: int = 0
    state: bytes = b""
    held: tuple[BlobRef, ...] = ()
    stopped: int | None = None


class State(Struct, frozen=True, kw_only=True):
    """The state of every method: the rounds done, the layout, how often each device trained, the history.

    `campaign`: the number of the present campaign, from 1; rounds go on over campaigns, but `participations`, `history`
    and `installed` are of this campaign alone. `sums`: the masked sums so far. `descents`: how devices derive the
    models (`put_successor`). `best_state`: the best state, if training may stop early; otherwise omitted.
    """

    round: int
    layout: Layout
    campaign: int = 1
    participations: dict[str, int] = {}
    history: tuple[RoundSummary, ...] = ()
    installed: dict[str, Installed] = {}
    sums: Sums = Sums()
    descents: dict[str, Descent] = {}
    best_state: Best | UnsetType = UNSET


class ModelState(State, frozen=True, kw_only=True):
    """The state of a method with one model, `model`."""

    model: BlobRef


class GlobalModel(Struct, frozen=True, kw_only=True):
    """What a method has for anybody: one model, or several and a `gate`, by which the `top` best of a sample answer.

    `gate`: tensors as of `coordinator.methods.server.learning`.
    """

    models: tuple[BlobRef, ...]
    gate: BlobRef | None = None
    top: int = 1


S = TypeVar("S", bound=State)


def encode_state(state: State) -> bytes:
    """Encode a state; equal states give equal bytes.

    Raises:
        ConfigError: the state holds what cannot be stored; the text names the field.
    """
    try:
        return _encode(state)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ConfigError(
            f"the state of the method cannot be stored: {_find_culprit(state)} ({error}); numbers, texts, tuples, "
            "dictionaries, numpy arrays, references and frozen structs of these can"
        ) from error


def _encode(value: object) -> bytes:
    arrays: dict[str, NDArray[np.generic]] = {}

    def replace_array(value: object) -> object:
        if isinstance(value, np.ndarray):
            arrays[str(len(arrays))] = value
            return str(len(arrays) - 1)
        raise NotImplementedError(f"{type(value).__module__}.{type(value).__qualname__}")

    plain = msgspec.msgpack.encode(value, enc_hook=replace_array, order="deterministic")
    return msgspec.msgpack.encode((plain, to_bytes(arrays) if arrays else b""))


def _find_culprit(state: State) -> str:
    """Find the field of a state that cannot be stored."""
    for field in state.__struct_fields__:
        try:
            _encode({field: value} if (value := getattr(state, field)) is not UNSET else {})
        except (TypeError, ValueError, OverflowError, NotImplementedError):
            return f"field {field}"
    return "a field"


def decode_state(data: bytes, kind: type[S]) -> S:
    """Decode the state that `encode_state` wrote.

    Raises:
        msgspec.DecodeError: the bytes are no state of this kind.
    """
    plain, packed = msgspec.msgpack.decode(data, type=tuple[bytes, bytes])
    arrays = from_bytes(packed) if packed else {}

    def restore_array(_: type, key: object) -> object:
        if str(key) not in arrays:
            raise msgspec.DecodeError(f"{key!r} is no array")
        return arrays[str(key)]

    return msgspec.msgpack.decode(plain, type=kind, dec_hook=restore_array)
