"""The beginning of a federation, or its continuation: the method, the model, the last committed state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.method import Method, Server
from coordinator.methods.settings import Option
from coordinator.methods.state import State, decode_state
from coordinator.service.checks import explain_no_profile, make_first_model
from coordinator.service.settings import NO_OPTIONS, CoordinatorSettings
from coordinator.store.store import Store, explain_unreadable
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import weights
from fedge.models.weights import find_device_weights
from fedge.system.hardware import Processor
from fedge.tasks import read_labelled, write_task
from fedge.tensors.codecs import encode
from fedge.tensors.layout import Codec, Layout, unflatten
from fedge.wire.messages import BlobRef

IDENTITY: Final = ("federation", "method", "task", "seed", "rounds", "options")
"""Settings that identify a federation; `rounds` is the number with which it began."""


def start(
    settings: CoordinatorSettings, task: TaskSpec, store: Store, options: Mapping[str, Option] = NO_OPTIONS
) -> tuple[Layout, BlobRef]:
    """Create layout and initial model, once per federation; HOME/task.json is for the devices.

    Raises:
        ConfigError: the folder belongs to a federation with other settings.
    """
    values = [
        settings.federation,
        settings.method,
        task.compute_fingerprint(),
        settings.seed,
        settings.rounds,
        dict(options),
    ]
    identity = json.dumps(values, sort_keys=True)
    if (kept := store.put_value_once("identity", identity)) != identity:
        before = zip(IDENTITY, json.loads(kept), json.loads(identity), strict=True)
        differences = "; ".join(f"{name} was {old}, is {new}" for name, old, new in before if old != new)
        raise ConfigError(f"{settings.home} holds another federation ({differences}): use another --home")
    if store.find_value("start") is None:
        store.put_value_once("blobs", settings.blobs or "")
    store.require_blobs(settings.blobs)
    write_task(task, settings.home / "task.json")
    if (frozen := find_device_weights(task)) is not None:
        if frozen.digest in store.blobs:
            weights.store_weights(store.blobs.get(frozen.digest))
        else:
            store.blobs.put(weights.read_weights(frozen.digest))
    known = store.find_value("start")
    if known is None:
        lacking = explain_no_profile(settings.method, options)
        layout, model = make_first_model(task, settings.seed, lacking, settings.task, settings.data)
        data = encode(unflatten(model, layout), Codec.FLOAT32)
        ref = BlobRef(digest=store.blobs.put(data), size_bytes=len(data))
        known = store.put_value_once("start", msgspec.json.encode((layout, ref)).decode())
    return msgspec.json.decode(known, type=tuple[Layout, BlobRef])


class RunLength(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a run that was continued after its end.

    total: the last value of --rounds. last: the number of the last training round, which counts earlier ends, too.
    """

    total: int
    last: int


def read_length(settings: CoordinatorSettings, store: Store) -> tuple[CoordinatorSettings, RunLength]:
    """Return the settings with the original number of rounds, and the run's present length.

    Raises:
        ConfigError: the run is longer than the settings say.
    """
    kept, identity = store.find_value("length"), store.find_value("identity")
    first = settings.rounds if identity is None else int(json.loads(identity)[IDENTITY.index("rounds")])
    length = RunLength(total=first, last=first) if kept is None else msgspec.json.decode(kept, type=RunLength)
    if settings.rounds < length.total:
        raise ConfigError(
            f"{settings.home} holds another federation (rounds was {length.total}, is {settings.rounds}): a run can get"
            " more rounds, not fewer; use another --home"
        )
    return msgspec.structs.replace(settings, rounds=first), length


def prolong(
    settings: CoordinatorSettings, length: RunLength, method: Method[Any], state: State, store: Store
) -> RunLength:
    """Return the length after --rounds was raised. Schedules that the method derived from the rounds stay.

    Raises:
        ConfigError: the method or its guarantee is fixed to the original rounds, or devices are just getting bundles.
    """
    if settings.rounds == length.total:
        return length
    if state.round >= length.last and store.get_round_devices(state.round + 1) is not None:
        raise ConfigError(f"devices are being given bundles: let that end with --rounds {length.total}, then go on")
    if settings.dp_epsilon is not None:
        raise ConfigError("--dp-epsilon is what all rounds may spend together: more of them need another --home")
    if method.is_done(state) and state.round <= length.last:
        raise ConfigError(f"{method.name} has no rounds that it could go on with: use another --home")
    return RunLength(total=settings.rounds, last=max(state.round, length.last) + settings.rounds - length.total)


def resume(
    wanted: CoordinatorSettings, task: TaskSpec, store: Store, options: Mapping[str, Option]
) -> tuple[Method[Any], Layout, BlobRef, State]:
    """Return the method, the layout of its initial model, that model, and the last committed state.

    Raises:
        ConfigError: the folder belongs to another federation, or the run cannot have more rounds.
        StoreError: the store's content cannot be read.
    """
    with explain_unreadable(store):
        settings, length = read_length(wanted, store)
    method = make_settings_method(settings, task, options, length.last)
    with explain_unreadable(store):
        layout, model = start(settings, task, store, options)
    saved = store.get_state()
    first = method.make_first_state(layout, model)
    with explain_unreadable(store):
        state = first if saved is None else decode_state(saved, type(first))
    if (longer := prolong(wanted, length, method, state, store)) != length:
        store.put_value("length", msgspec.json.encode(longer).decode())
        method = make_settings_method(settings, task, options, longer.last)
    return method, layout, model, state


def make_settings_method(
    settings: CoordinatorSettings,
    task: TaskSpec,
    options: Mapping[str, Option] = NO_OPTIONS,
    last: int | None = None,
) -> Method[Any]:
    """Make the method named in the settings, with the server data if any; `last` as in `MethodSettings`.

    Raises:
        ConfigError: there is no such method, or the method lacks something.
    """
    if settings.train_on is not Processor.CPU and not load_method_class(settings.method).needs_server_data({}):
        raise ConfigError(
            f"{settings.method} trains no network on the server: --train-on is for fedcoe, and for agents"
        )
    server_data = None if settings.server_data is None else read_labelled(task, settings.server_data)
    return make_method(settings.method, settings.make_method_settings(options, last), Server(task, server_data))


def end_after(number: int, method: Method[Any], store: Store) -> Method[Any]:
    """Make round `number` the last one of training, durably; return the method that knows it."""
    kept = store.find_value("length")
    length = (
        RunLength(total=method.settings.rounds, last=method.last)
        if kept is None
        else msgspec.json.decode(kept, type=RunLength)
    )
    shorter = msgspec.structs.replace(length, last=min(length.last, number))
    store.put_value("length", msgspec.json.encode(shorter).decode())
    return type(method)(msgspec.structs.replace(method.settings, last=shorter.last), method.server)
