"""Requests to a running coordinator, kept in its store, which the coordinator checks from time to time."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from coordinator.store.store import Store
from fedge.errors import ConfigError
from fedge.settings import NAME

KEY: Final = "wishes"


class Wishes(Struct, frozen=True, kw_only=True):
    """The standing requests to the coordinator. Each holds until it is changed.

    paused: no further round begins. steps: rounds that may begin all the same. recluster: round before which clusters
    are made anew; 0: the next one; None: not at all. retired: devices that get no more orders.
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
    """The present requests."""
    kept = store.recall(KEY)
    return Wishes() if kept is None else msgspec.json.decode(kept, type=Wishes)


def act(store: Store, name: str, device: str = "") -> str:
    """Request something of the coordinator; returns the reply for the user.

    Raises:
        ConfigError: no such action, or it lacks a device.
    """
    if name in {"retire", "readmit"} and not re.fullmatch(NAME, device):
        raise ConfigError(f"{device!r} is no device's name")

    def change(kept: str | None) -> str:
        before = Wishes() if kept is None else msgspec.json.decode(kept, type=Wishes)
        return msgspec.json.encode(wished(before, name, device)).decode()

    store.revise(KEY, change)
    return ACTIONS[name].format(device=device)


def wished(wishes: Wishes, name: str, device: str = "") -> Wishes:
    """The requests after one more.

    Raises:
        ConfigError: no such action.
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
    """The requests at the start of round `number`, which uses up a step of a paused run; stored before it begins.

    `recluster` equals `number` if clusters are to be made anew for this round; a coordinator killed during the round
    finds the same after a restart.
    """

    def change(kept: str | None) -> str:
        wishes = Wishes() if kept is None else msgspec.json.decode(kept, type=Wishes)
        if wishes.recluster is not None and wishes.recluster < number:
            wishes = msgspec.structs.replace(wishes, recluster=number if wishes.recluster == 0 else None)
        if wishes.paused and wishes.steps:
            wishes = msgspec.structs.replace(wishes, steps=wishes.steps - 1)
        return msgspec.json.encode(wishes).decode()

    return msgspec.json.decode(store.revise(KEY, change), type=Wishes)
