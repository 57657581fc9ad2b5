"""The running coordinator: the durable loop around a method.

Each round is run and its state committed; then tensors that no state needs are deleted. After a crash, the last
committed state is loaded and the interrupted round is run again; the fleet returns the answers already accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import msgspec

from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment, Intake
from coordinator.fleet.mqtt.roles import BlobServer, load_layout, lock_own_folder
from coordinator.fleet.relayed import STEPS, RelayFleet
from coordinator.methods.catalogue import load_method_class
from coordinator.methods.method import Method
from coordinator.methods.settings import Option
from coordinator.methods.state import State, encode_state
from coordinator.service.beginning import resume
from coordinator.service.proof import PROVEN, reload
from coordinator.service.settings import NO_OPTIONS, CoordinatorSettings
from coordinator.service.summary import find_finished, log_missing_bundles, require_fruitful, warn_daily, write_summary
from coordinator.store.records import Event
from coordinator.store.requests import StandingRequests, read_requests, take_requests
from coordinator.store.store import ISSUE, Store
from coordinator.watch import runs
from fedge.data.task import TaskSpec
from fedge.system.logs import bind
from fedge.system.malloc import tune_malloc
from fedge.system.systemd import notify_ready
from fedge.wire.messages import iterate_blobs

log = logging.getLogger("fedge.coordinator")

Observer = Callable[[str, dict[str, Any]], None]

TELL_S: Final = 1.0
"""Shortest time between two summaries."""
NOTE_S: Final = 0.2
"""Shortest time between two writes of events to the store."""
SPARE_S: Final = 60.0
"""Age below which tensors are not deleted while streamed orders are open, since an intake may hold an update of these
orders that the store does not know yet."""
RARELY: Final = 50
"""Shortest time between two writes, in multiples of the time that one write takes."""
LOOK_S: Final = 0.5
"""Pause between two checks whether a paused run may continue."""
NOT_ANEW: Final = "the method has no clusters that it could remake now"


class Throttle:
    """A throttle, which runs a task immediately on request, then at most once per interval."""

    def __init__(self, act: Callable[[], object], every_s: float) -> None:
        self._act = act
        self._every_s = every_s
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def trigger(self) -> None:
        """Run the task now, or as soon as permitted."""
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next:
            self._run()
        else:
            self._timer = loop.call_at(self._next, self._run)

    def _run(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._act()
        self._next = loop.time() + max(self._every_s, RARELY * (loop.time() - began))

    async def aclose(self) -> None:
        """Stop the throttle."""
        if self._timer is not None:
            self._timer.cancel()


async def serve(
    settings: CoordinatorSettings,
    task: TaskSpec,
    store: Store,
    observe: Observer,
    options: Mapping[str, Option] = NO_OPTIONS,
) -> dict[str, Any]:
    """Run a federation from its present state to its end; return its summary, which is also in HOME/summary.json.

    Raises:
        ConfigError: the folder belongs to another federation.
        StoreError: durable state cannot be written; nothing accepted is lost.
        TransportError: the broker refused us for good.
        FruitlessError: the run came to its end, and nothing was learned or no device has a bundle.
    """
    tune_malloc(large=True)
    raise_open_files()
    began = time.monotonic()
    if store.find_value("start") is None:
        observe("beginning", {})
    method, layout, first, state = resume(settings, task, store, options)
    if (ended := find_finished(settings, method, state)) is not None:
        observe("finished", {"rounds": ended["rounds"], "bundles": len(ended["installed"])})
        log_missing_bundles(ended)
        return ended
    slowly = Throttle(lambda: write_summary(settings, method, state, store, fleet), TELL_S)
    news: list[Event] = []

    def record_news() -> None:
        if news:
            store.record_events(*news)
            news.clear()

    noting = Throttle(record_news, NOTE_S)

    def record_event(event: str, fields: dict[str, Any]) -> None:
        """Pass an event to the caller and the store, and soon update HOME/summary.json."""
        observe(event, fields)
        number = state.round if event == "round_done" else state.round + 1
        news.append(make_event(event, fields, number))
        noting.trigger()
        slowly.trigger()

    fleet = MqttFleet(
        settings.make_broker_settings(settings.broker),
        store,
        Assignment(
            federation=settings.federation,
            task=task,
            layout=layout,
            steps=(*method.steps, *STEPS),
            run=store.put_value_once("run", uuid.uuid4().hex[:12]),
            issue=store.find_value(ISSUE) or "",
            seed=settings.seed,
            deadline_s=settings.deadline_s,
            no_relays=method.explain_no_relays(),
        ),
        record_event,
    )
    under_way = set() if method.is_done(state) else fleet.find_accepted_blobs(state.round + 1)
    store.require_tensors({ref.digest for ref in iterate_blobs(state)} | under_way)
    runs.record_run(settings.home, "coordinator", settings, options)
    write_summary(settings, method, state, store, fleet)
    fleet.readmit([i.strip() for i in settings.readmit.split(",") if i.strip()])
    async with contextlib.aclosing(slowly), contextlib.aclosing(noting), fleet, warn_daily(settings):
        notify_ready()
        while not method.is_done(state):
            bind(round=(number := state.round + 1))
            require_fruitful(settings, method, state, first, store, fleet)
            wishes = await wait_for_permission(number, store, fleet, record_event)
            if wishes.recluster == number:
                state = restart_clustering(method, state, record_event)
            await fleet.start_round(number, settings.devices if number == 1 else 1)
            state = await method.advance(state, wrap_relays(settings, state, fleet))
            await commit(store, fleet, number, state, time.monotonic() - began, settings.keep_rounds)
            began = time.monotonic()
            record_event("round_done", write_summary(settings, method, state, store, fleet))
        fleet.expire_streams()
        if settings.late_joiners:
            async for state in serve_late_joiners(settings, method, state, store, fleet, record_event):  # noqa: B020 - it is the next one
                record_event("round_done", write_summary(settings, method, state, store, fleet))
    record_news()
    store.add_counts(fleet.take_counts())
    summary = write_summary(settings, method, state, store, fleet, ended=True)
    log_missing_bundles(summary)
    return summary


def make_event(event: str, fields: Mapping[str, Any], number: int) -> Event:
    """Make an event as stored. `number`: the round's number, if the event does not give it."""
    if event == "round_done":
        last = fields["history"][-1] if fields["history"] else {"accuracy": None}
        fields = {"accuracy": last["accuracy"], **{n: fields[n] for n in ("bytes_up", "bytes_down", "wall_s")}}
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
    fleet.retired = frozenset(wishes.retired)
    return wishes


def restart_clustering(method: Method[Any], state: State, observe: Observer) -> State:
    """Return the state with clustering restarted, if the method can do that now."""
    found = method.recluster(state)
    observe("recluster" if found else "recluster_refused", {"reason": "" if found else NOT_ANEW})
    return found or state


async def serve_role(settings: CoordinatorSettings, task: TaskSpec, store: Store) -> None:
    """Serve as an intake or a model server until stopped.

    Raises:
        ConfigError: there is no such federation yet.
        StoreError: the store cannot be read or written.
        TransportError: the broker refused us for good.
    """
    tune_malloc(large=True)
    raise_open_files()
    broker, federation = settings.make_broker_settings(settings.broker), settings.federation
    layout = load_layout(store, settings.home, task, settings.blobs)
    with lock_own_folder(settings.home) as folder:
        helper: Intake | BlobServer
        if settings.role == "blobs":
            helper = BlobServer(broker, store, folder, federation=federation)
        else:
            steps = load_method_class(settings.method).steps
            about = Assignment(federation=federation, task=task, layout=layout, steps=steps)
            helper = Intake(broker, store, folder, about)
        await helper.serve()


def raise_open_files() -> None:
    """Raise the limit of open files as far as permitted, since each update being fetched takes two."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve_late_joiners(
    settings: CoordinatorSettings, method: Method[Any], state: Any, store: Store, fleet: MqttFleet, observe: Observer
) -> AsyncIterator[Any]:
    """Run one more round whenever devices without a bundle appear after the last round; yield the states, endlessly.

    A device that declined or failed is asked again after a restart of its agent or of this coordinator.
    """
    tried: dict[str, str] = {}
    while True:
        began = time.monotonic()
        number = state.round + 1
        await fleet.start_late_round(number, tried, state.installed)
        observe(
            "round_begun", {"round": number, "devices": len(fleet.get_devices()) + len(fleet.get_inference_devices())}
        )
        state = await method.serve_late_joiners(state, wrap_relays(settings, state, fleet))
        state = msgspec.structs.replace(state, round=number)
        await commit(store, fleet, number, state, time.monotonic() - began, settings.keep_rounds)
        yield state
        tried |= {device.id: device.incarnation for device in (*fleet.get_devices(), *fleet.get_inference_devices())}


def wrap_relays(settings: CoordinatorSettings, state: State, fleet: MqttFleet) -> RelayFleet:
    """Return the fleet as a method sees it in the next round."""
    return RelayFleet(fleet, layout=state.layout, seed=settings.seed, named=iterate_blobs(state))


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
