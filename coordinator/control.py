"""What a person may ask of a running coordinator: kept in its store, where the coordinator looks now and then."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from coordinator.store import Store
from fedge.config import NAME
from fedge.errors import ConfigError

KEY: Final = "wishes"


class Wishes(Struct, frozen=True, kw_only=True):
    """What is asked of the coordinator. All of it holds until something else is asked.

    paused: no further round begins. steps: rounds that may begin all the same. recluster: before which round the
    clusters are made anew; 0: the next one, whichever that is; None: they are left. retired: devices that get no more
    orders.
    """

    paused: bool = False
    steps: Annotated[int, Meta(ge=0)] = 0
    recluster: Annotated[int, Meta(ge=0)] | None = None
    retired: tuple[str, ...] = ()


ACTIONS: Final = {
    "pause": "No further round begins; the one under way ends.",
    "resume": "The rounds go on.",
    "run-now": "One round begins.",
    "recluster": "The clusters are made anew before the next round.",
    "retire": "{device} gets no more orders.",
    "readmit": "{device} gets orders again.",
}
"""By name what is said once it is asked."""


def wishes_in(store: Store) -> Wishes:
    """What is asked at present."""
    kept = store.recall(KEY)
    return Wishes() if kept is None else msgspec.json.decode(kept, type=Wishes)


def act(store: Store, name: str, device: str = "") -> str:
    """Ask something of the coordinator; what to say to who asked.

    Raises:
        ConfigError: there is no such action, or it lacks a device.
    """
    if name in {"retire", "readmit"} and not re.fullmatch(NAME, device):
        raise ConfigError(f"{device!r} is no device's name")

    def change(kept: str | None) -> str:
        before = Wishes() if kept is None else msgspec.json.decode(kept, type=Wishes)
        return msgspec.json.encode(wished(before, name, device)).decode()

    store.revise(KEY, change)
    return ACTIONS[name].format(device=device)


def wished(wishes: Wishes, name: str, device: str = "") -> Wishes:
    """The wishes after one more.

    Raises:
        ConfigError: there is no such action.
    """
    change = msgspec.structs.replace
    match name:
        case "pause" | "resume":
            return change(wishes, paused=name == "pause", steps=0)
        case "run-now":
            return change(wishes, steps=wishes.steps + 1) if wishes.paused else wishes
        case "recluster":
            return change(wishes, recluster=0)
        case "retire":
            return change(wishes, retired=tuple(sorted({*wishes.retired, device})))
        case "readmit":
            return change(wishes, retired=tuple(i for i in wishes.retired if i != device))
        case _:
            raise ConfigError(f"there is no action {name!r}; there are {', '.join(ACTIONS)}")


def at_round(store: Store, number: int) -> Wishes:
    """The wishes as round `number` begins, which uses up a step of a paused run; kept before it begins.

    `recluster` equals `number` if clusters are to be made anew for this round: a coordinator that is killed in it and
    started again finds the same.
    """

    def change(kept: str | None) -> str:
        wishes = Wishes() if kept is None else msgspec.json.decode(kept, type=Wishes)
        if wishes.recluster is not None and wishes.recluster < number:
            wishes = msgspec.structs.replace(wishes, recluster=number if wishes.recluster == 0 else None)
        if wishes.paused and wishes.steps:
            wishes = msgspec.structs.replace(wishes, steps=wishes.steps - 1)
        return msgspec.json.encode(wishes).decode()

    return msgspec.json.decode(store.revise(KEY, change), type=Wishes)
