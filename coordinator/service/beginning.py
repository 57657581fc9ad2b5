"""The beginning of a federation, or its continuation: the method, the model, the last committed state."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.method import Method, Server
from coordinator.methods.settings import Option
from coordinator.methods.state import S, State, decode_state
from coordinator.service.campaigns import Campaign, Campaigns
from coordinator.service.checks import explain_no_profile, make_first_model
from coordinator.service.settings import NO_OPTIONS, CoordinatorSettings
from coordinator.store.classes import CLASSES, grow_model, read_classes, settle_task
from coordinator.store.store import Store, explain_unreadable
from fedge.data.classes import MAX_ADDED, AddedClasses, add_classes
from fedge.data.problems.names import HOW_TO_ADD
from fedge.data.task import TaskSpec, list_differences
from fedge.errors import MALFORMED, ConfigError
from fedge.models import weights
from fedge.models.weights import find_device_weights
from fedge.system.hardware import Processor
from fedge.tasks import read_labelled, write_task
from fedge.tensors.codecs import encode
from fedge.tensors.heads import grow_layout
from fedge.tensors.layout import Codec, Layout, unflatten
from fedge.wire.messages import BlobRef

IDENTITY: Final = ("federation", "method", "task", "seed", "rounds", "options")
"""Settings that identify a federation; `rounds` is the number with which it began."""
TASK: Final = IDENTITY.index("task")
START: Final = "start"
"""Name of a value (`Store.find_value`): the layout and the common first model, as JSON."""
LENGTH: Final = "length"
"""Name of a value (`Store.find_value`): the `RunLength`, as JSON."""
CAMPAIGNS: Final = "campaigns"
"""Name of a value: the record of the campaigns, as JSON."""
USE_ANOTHER: Final = f"use another --home; {HOW_TO_ADD}"


def start(
    settings: CoordinatorSettings, task: TaskSpec, store: Store, options: Mapping[str, Option] = NO_OPTIONS
) -> tuple[Layout, BlobRef]:
    """Create layout and initial model, once per federation; HOME/task.json is for the devices.

    `task`: the present one, or an earlier one, without classes that have joined since.

    Raises:
        ConfigError: the folder belongs to a federation with other settings.
    """
    task, classes = settle_task(store, task), read_classes(store)
    kept_identity = store.find_value("identity")
    fingerprint = task.compute_fingerprint()
    if kept_identity is not None and fingerprint == classes.fingerprint:
        fingerprint = json.loads(kept_identity)[TASK]  # the first task, which has grown
    values = [
        settings.federation,
        settings.method,
        fingerprint,
        settings.seed,
        settings.rounds,
        dict(options),
    ]
    identity = json.dumps(values, sort_keys=True)
    if (kept := store.put_value_once("identity", identity)) != identity:
        before = zip(IDENTITY, json.loads(kept), json.loads(identity), strict=True)
        differences = [
            *(f"{name} was {old}, is {new}" for name, old, new in before if old != new and name != "task"),
            *(_list_task_differences(settings.home, task) if json.loads(kept)[TASK] != values[TASK] else ()),
        ]
        raise ConfigError(f"{settings.home} holds another federation ({'; '.join(differences)}): {USE_ANOTHER}")
    if store.find_value(START) is None:
        store.put_value_once("blobs", settings.blobs or "")
    store.require_blobs(settings.blobs)
    write_task(task, settings.home / "task.json")
    if (frozen := find_device_weights(task)) is not None:
        if frozen.digest in store.blobs:
            weights.store_weights(store.blobs.get(frozen.digest))
        else:
            store.blobs.put(weights.read_weights(frozen.digest))
    known = store.find_value(START)
    if known is None:
        lacking = explain_no_profile(settings.method, options)
        own = task.with_head_class(load_method_class(settings.method).HEAD_CLASS)
        layout, model = make_first_model(own, settings.seed, lacking, settings.task, settings.data)
        data = encode(unflatten(model, layout), Codec.FLOAT32)
        ref = BlobRef(digest=store.blobs.put(data), size_bytes=len(data))
        known = store.put_value_once(START, msgspec.json.encode((layout, ref)).decode())
    return msgspec.json.decode(known, type=tuple[Layout, BlobRef])


def _list_task_differences(home: Path, task: TaskSpec) -> list[str]:
    """List in words how a task differs from the federation's own, which HOME/task.json describes."""
    with contextlib.suppress(OSError, *MALFORMED):
        kept = msgspec.json.decode((home / "task.json").read_bytes(), type=TaskSpec)
        return [f"the task is one {text}" for text in list_differences(kept, task)]
    return ["the task is another one"]


class RunLength(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a run that was continued after its end.

    total: the last value of --rounds. last: the number of the last training round, which counts earlier ends, too.
    """

    total: int
    last: int


def read_first_rounds(settings: CoordinatorSettings, store: Store) -> int:
    """Read the number of rounds with which the federation began; that of the settings if it has not begun."""
    identity = store.find_value("identity")
    return settings.rounds if identity is None else int(json.loads(identity)[IDENTITY.index("rounds")])


def read_length(settings: CoordinatorSettings, store: Store) -> tuple[CoordinatorSettings, RunLength]:
    """Return the settings with the original number of rounds, and the run's present length.

    Raises:
        ConfigError: the run is longer than the settings say.
    """
    kept, first = store.find_value(LENGTH), read_first_rounds(settings, store)
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
        campaigns = read_campaigns(store)
    with explain_unreadable(store):
        task = settle_task(store, task)
    method = make_settings_method(settings, task, options, length.last)
    with explain_unreadable(store):
        layout, model = start(settings, task, store, options)
    saved = store.get_state()
    first = method.make_first_state(layout, model)
    with explain_unreadable(store):
        state = first if saved is None else decode_state(saved, type(first))
    method = enter_campaign(method, campaigns.now, length.last)
    if state.campaign < campaigns.now.number:  # we were killed before its first round was done
        state = enter_state(method, state, layout, store, campaigns.now)
    if (longer := prolong(wanted, length, method, state, store)) != length:
        store.put_value(LENGTH, msgspec.json.encode(longer).decode())
        method = enter_campaign(method, campaigns.now, longer.last)
    return method, layout, model, state


def read_campaigns(store: Store) -> Campaigns:
    """Read the record of the campaigns; before its first round a federation is in its first."""
    kept = store.find_value(CAMPAIGNS)
    if kept is None:
        return Campaigns(now=Campaign(began_at=store.get_round_beginning(1) or time.time()))
    return msgspec.json.decode(kept, type=Campaigns)


def write_campaigns(store: Store, campaigns: Campaigns) -> None:
    """Write the record of the campaigns."""
    store.put_value(CAMPAIGNS, msgspec.json.encode(campaigns).decode())


def enter_campaign(method: Method[Any], campaign: Campaign, last: int) -> Method[Any]:
    """Return the method with the settings of a campaign, whose last round of training is `last`."""
    settings = msgspec.structs.replace(method.settings, first=campaign.first, last=last)
    if campaign.number > 1:
        settings = msgspec.structs.replace(settings, rounds=campaign.planned)
    return type(method)(settings, method.server)


def enter_state(method: Method[S], state: S, layout: Layout, store: Store, campaign: Campaign) -> S:
    """Return the state before the first round of a campaign; its models grow if classes join. `layout`: then theirs."""
    state = method.begin_campaign(state, campaign.changed)
    return method.add_classes(state, layout, lambda ref: grow_model(store, ref, layout)) if campaign.added else state


def begin_campaign(
    method: Method[Any], state: State, store: Store, campaigns: Campaigns, growth: Growth | None = None
) -> tuple[Method[Any], State]:
    """Begin the campaign that the record names as the present one, durably.

    `growth`: what changes if classes join.

    Returns: the method of this campaign, and the state before its first round.
    """
    now = campaigns.now
    length = RunLength(total=read_stored_length(method, store).total, last=now.first + now.planned)
    values: dict[str, Any] = {CAMPAIGNS: campaigns, LENGTH: length}
    if growth is not None:
        values |= {CLASSES: growth.classes, START: (growth.layout, growth.first)}
    store.put_values({name: msgspec.json.encode(each).decode() for name, each in values.items()})
    method = enter_campaign(method, now, length.last)
    return method, enter_state(method, state, state.layout if growth is None else growth.layout, store, now)


class Growth(NamedTuple):
    """What changes when classes join: their names so far, the layout, and the common first model."""

    classes: AddedClasses
    layout: Layout
    first: BlobRef


def plan_growth(
    settings: CoordinatorSettings, method: Method[Any], task: TaskSpec, names: Sequence[str], store: Store
) -> Growth:
    """Plan that classes join, and try the network with them, in a child process. `task`: the present one.

    Raises:
        ConfigError: a name is none or a class already, or the method or the network cannot take further classes.
    """
    classes = read_classes(store)
    if len(classes.names) + len(names) > MAX_ADDED:
        raise ConfigError(f"at most {MAX_ADDED} classes can join a federation: begin another one, with --home")
    if type(method).add_classes is Method.add_classes:
        raise ConfigError(
            f"{method.name} cannot take further classes, since more than the network's outputs depends on them: fedge "
            "and the methods of one model can; or begin another federation, with --home"
        )
    grown = add_classes(task, names)
    layout, first = msgspec.json.decode(store.find_value(START) or "", type=tuple[Layout, BlobRef])
    wanted = grow_layout(layout, grown.n_classes)
    own = grown.with_head_class(method.HEAD_CLASS)
    found, _ = make_first_model(own, settings.seed, explain_no_profile(settings.method, method.settings.options))
    if found != wanted:
        raise ConfigError(
            f"the network with {grown.n_classes} classes is not the present one with further outputs: let it make its "
            "last layer from task.n_classes, or begin another federation, with --home"
        )
    if first.digest in store.blobs:  # later campaigns need it no more
        first = grow_model(store, first, wanted)
    fingerprint = grown.compute_fingerprint()
    return Growth(AddedClasses(names=(*classes.names, *names), fingerprint=fingerprint), wanted, first)


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


def read_stored_length(method: Method[Any], store: Store) -> RunLength:
    """Read the present length of the run that this method does."""
    kept = store.find_value(LENGTH)
    if kept is None:
        return RunLength(total=method.settings.rounds, last=method.last)
    return msgspec.json.decode(kept, type=RunLength)


def end_after(number: int, method: Method[Any], store: Store) -> Method[Any]:
    """Make round `number` the last one of training, durably; return the method that knows it."""
    length = read_stored_length(method, store)
    shorter = msgspec.structs.replace(length, last=min(length.last, number))
    store.put_value(LENGTH, msgspec.json.encode(shorter).decode())
    return type(method)(msgspec.structs.replace(method.settings, last=shorter.last), method.server)
