"""Requests to a running coordinator, kept in its store, where the coordinator looks from time to time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from coordinator.store.store import Store
from fedge.data.classes import add_classes
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.settings import NAME
from fedge.system.text import suggest_nearest

KEY: Final = "wishes"


class StandingRequests(Struct, frozen=True, kw_only=True):
    """The standing requests to the coordinator. Each holds until it is changed.

    paused: whether no further round begins. steps: rounds that may begin all the same. recluster: the round before
    which clusters are made anew, 0 for the next round; None if they are not. retired: devices that get no more orders.
    finish: whether training ends with the present round. campaign: number of the campaign that was asked for last, 0
    for the next one; None before the first such request. classes: those that are to join with that campaign.
    """

    paused: bool = False
    steps: Annotated[int, Meta(ge=0)] = 0
    recluster: Annotated[int, Meta(ge=0)] | None = None
    retired: tuple[str, ...] = ()
    finish: bool = False
    campaign: Annotated[int, Meta(ge=0)] | None = None
    classes: tuple[str, ...] = ()


ACTIONS: Final = {
    "pause": "No further round begins; the one under way ends.",
    "resume": "The rounds go on.",
    "run-now": "One round begins.",
    "recluster": "The clusters are made anew before the next round.",
    "campaign-run": "A campaign begins as soon as none is running.",
    "finish": "Training ends with the round under way, and devices get bundles of what was learned.",
    "retire": "{device} gets no more orders.",
    "readmit": "{device} gets orders again.",
}
"""The requests by name, each with the answer to whoever makes it."""


def read_requests(store: Store) -> StandingRequests:
    """Read the present requests."""
    kept = store.find_value(KEY)
    return StandingRequests() if kept is None else msgspec.json.decode(kept, type=StandingRequests)


def request_action(store: Store, name: str, device: str = "") -> str:
    """Store a request to the coordinator; return the reply for the user.

    Raises:
        ConfigError: there is no such action, or the action lacks a device, or the device is unknown.
    """
    if name in {"retire", "readmit"}:
        require_device(store, name, device)

    _change_requests(store, lambda wishes: add_request(wishes, name, device))
    return ACTIONS[name].format(device=device)


def request_campaign(store: Store, task: TaskSpec | None, classes: Sequence[str]) -> str:
    """Store a request for a campaign with which classes join; return the reply for the user.

    `task`: the federation's present one, if it is known.

    Raises:
        ConfigError: a name is none, or a class already.
    """
    if task is not None:
        add_classes(task, classes)
    known = set(() if task is None else task.classes)

    def add(wishes: StandingRequests) -> StandingRequests:
        both = dict.fromkeys((*(name for name in wishes.classes if name not in known), *classes))
        return msgspec.structs.replace(wishes, campaign=0, classes=tuple(both))

    _change_requests(store, add)
    return f"{ACTIONS['campaign-run']} With it {', '.join(classes)} join{'s' * (len(classes) == 1)} the classes."


def require_device(store: Store, name: str, device: str) -> None:
    """Check that a request to retire or readmit a device names one for which it changes something.

    Raises:
        ConfigError: it does not.
    """
    if not re.fullmatch(NAME, device):
        raise ConfigError(f"{device!r} is no device's name")
    retired = read_requests(store).retired
    known = {*retired} if name == "readmit" else store.list_devices()
    if device in known or (name == "retire" and store.get_events(device=device, last=1)):
        return
    what = "is not retired" if name == "readmit" else "is no device of this federation: nobody has heard of it"
    raise ConfigError(f"{device} {what}{suggest_nearest(device, sorted(known))}")


def add_request(wishes: StandingRequests, name: str, device: str = "") -> StandingRequests:
    """Return the requests with another one added.

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
        case "finish" | "campaign-run":
            return change(wishes, finish=True) if name == "finish" else change(wishes, campaign=0)
        case _:
            raise ConfigError(f"there is no action {name!r}; there are {', '.join(ACTIONS)}")


def take_requests(store: Store, number: int) -> StandingRequests:
    """Take the requests at the start of round `number`, and store that it uses up a step of a paused run.

    `recluster` equals `number` if clusters are to be made anew for this round. A coordinator killed during the round
    finds the same requests after a restart.
    """

    def use_step(wishes: StandingRequests) -> StandingRequests:
        if wishes.recluster is not None and wishes.recluster < number:
            wishes = msgspec.structs.replace(wishes, recluster=number if wishes.recluster == 0 else None)
        if wishes.paused and wishes.steps:
            wishes = msgspec.structs.replace(wishes, steps=wishes.steps - 1)
        return wishes

    return _change_requests(store, use_step)


def clear_finish(store: Store) -> None:
    """Drop the request to end training early: it was carried out, or there is nothing to end."""
    _change_requests(store, lambda wishes: msgspec.structs.replace(wishes, finish=False))


def clear_campaign(store: Store) -> None:
    """Drop the request for a campaign, which there cannot be."""
    _change_requests(store, lambda wishes: msgspec.structs.replace(wishes, campaign=None, classes=()))


def take_campaign(store: Store, number: int) -> bool:
    """Return whether campaign `number` was asked for, and note that the request is for this one.

    A coordinator that is killed before the campaign is recorded finds the same request; later it is of the past.
    """

    def take(wishes: StandingRequests) -> StandingRequests:
        return msgspec.structs.replace(wishes, campaign=number) if wishes.campaign == 0 else wishes

    return read_requests(store).campaign in {0, number} and _change_requests(store, take).campaign == number


def _change_requests(store: Store, change: Callable[[StandingRequests], StandingRequests]) -> StandingRequests:
    """Change the requests in one transaction; return the new ones."""

    def change_kept(kept: str | None) -> str:
        wishes = StandingRequests() if kept is None else msgspec.json.decode(kept, type=StandingRequests)
        return msgspec.json.encode(change(wishes)).decode()

    return msgspec.json.decode(store.change_value(KEY, change_kept), type=StandingRequests)
