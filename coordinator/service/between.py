"""Between two rounds: permission to begin, requests of people, and the commit of what a round has brought."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.methods.method import Method
from coordinator.methods.state import State, encode_state
from coordinator.service.proof import PROVEN, reload
from coordinator.store.records import Event
from coordinator.store.requests import (
    StandingRequests,
    read_requests,
    take_requests,
)
from coordinator.store.store import Store
from fedge.wire.messages import iterate_blobs

Observer = Callable[[str, dict[str, Any]], None]


SPARE_S: Final = 60.0
"""Age below which tensors are not deleted while streamed orders are open, since an intake may hold an update of these
orders that the store does not know yet."""


LOOK_S: Final = 0.5
"""Pause between two looks for requests, while a run is paused and after its last round."""


NOT_ANEW: Final = "the method has no clusters that it could remake now"


def make_event(event: str, fields: Mapping[str, Any], number: int) -> Event:
    """Make an event as stored. `number`: the round's number, if the event does not give it."""
    if event == "round_done":
        last = fields["history"][-1] if fields["history"] else {"accuracy": None}
        counts = {n: fields[n] for n in ("bytes_up", "bytes_down", "wall_s", "score_name") if n in fields}
        fields = {"accuracy": last["accuracy"], **counts}
    rest = {name: value for name, value in fields.items() if name not in {"round", "device"}}
    return Event(
        at=time.time(), round=fields.get("round", number), name=event, device=fields.get("device", ""), fields=rest
    )


async def wait_for_permission(number: int, store: Store, fleet: MqttFleet, observe: Observer) -> StandingRequests:
    """Wait until round `number` may begin (`coordinator.store.requests`); a round begun before a restart always may."""
    if store.get_round_devices(number) is not None:
        wishes = read_requests(store)
    else:
        waits = False
        while (wishes := read_requests(store)).paused and not wishes.steps:
            if not waits:
                observe("paused", {"round": number})
            waits = True
            await fleet.sleep(LOOK_S)
        if waits:
            observe("resumed", {"round": number})
        wishes = take_requests(store, number)
    fleet.retire(wishes.retired)
    return wishes


def restart_clustering(method: Method[Any], state: State, observe: Observer) -> State:
    """Return the state with clustering restarted, if the method can do that now."""
    found = method.recluster(state)
    observe("recluster" if found else "recluster_refused", {"reason": "" if found else NOT_ANEW})
    return found or state


async def commit(store: Store, fleet: MqttFleet, number: int, state: State, seconds: float, keep: int) -> None:
    """End the round: commit state, traffic and time in one transaction, then delete what is no longer needed.

    Raises:
        ConfigError: the state cannot be stored or, in the first rounds, not be read again.
    """
    if number <= PROVEN:
        reload(state)
    counted = {**fleet.take_counts(), "milliseconds": round(1000 * seconds)}
    await asyncio.to_thread(store.commit_round, number, encode_state(state), time.time(), counted, keep=keep)
    await fleet.collect_closed()
    spare_s = SPARE_S if fleet.get_busy_devices() else 0.0
    needed = {ref.digest for ref in iterate_blobs(state)} | fleet.find_needed_blobs()
    await asyncio.to_thread(store.remove_others, needed, spare_s=spare_s)
