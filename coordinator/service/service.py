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
from coordinator.service.beginning import end_after, resume
from coordinator.service.proof import PROVEN, reload
from coordinator.service.settings import NO_OPTIONS, CoordinatorSettings
from coordinator.service.summary import (
    find_finished,
    log_missing_bundles,
    require_bundles,
    require_fruitful,
    warn_daily,
    write_summary,
)
from coordinator.store.records import Event
from coordinator.store.requests import StandingRequests, clear_finish, read_requests, take_requests
from coordinator.store.store import ISSUE, Store
from coordinator.watch import runs
from fedge.data.task import TaskSpec
from fedge.system.logs import bind
from fedge.system.malloc import tune_malloc
from fedge.system.systemd import notify_ready
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef, iterate_blobs

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
"""Pause between two looks for requests, while a run is paused and after its last round."""
REFRESH_S: Final = 5.0
"""Longest time between two summaries, since what devices say of themselves is no event."""
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
    """Run a federation from its present state on, and watch it after its last round, until we are stopped.

    With `settings.once` return after the last round the summary, which is also in HOME/summary.json.

    Raises:
        ConfigError: the folder belongs to another federation.
        StoreError: durable state cannot be written; nothing accepted is lost.
        TransportError: the broker refused us for good.
        FruitlessError: training came to its end and nothing was learned, or with `once` no device has a bundle.
    """
    tune_malloc(large=True)
    raise_open_files()
    if store.find_value("start") is None:
        observe("beginning", {})
    began = time.monotonic()
    method, layout, first, state = resume(settings, task, store, options)
    if (ended := find_finished(settings, method, state)) is not None:
        observe("finished", {"rounds": ended["rounds"], "bundles": len(ended["installed"])})
        require_bundles(ended)
        return ended
    service = Service(settings, task, store, observe, method, layout, first, state, began)
    runs.record_run(settings.home, "coordinator", settings, options)
    return await service.run()


class Service:
    """A federation that is served: its method, the state after its last round, its devices.

    Args:
        settings: the coordinator's settings.
        task: what is learned.
        store: the durable state.
        observe: called with events for people.
        method: the method, which knows the last round.
        layout: the layout of its initial model.
        first: that model.
        state: the last committed state.
        began: when the work on the next round began, by the monotonic clock.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        task: TaskSpec,
        store: Store,
        observe: Observer,
        method: Method[Any],
        layout: Layout,
        first: BlobRef,
        state: State,
        began: float,
    ) -> None:
        self._settings, self._store, self._observe = settings, store, observe
        self._method, self._first, self._state = method, first, state
        self._began = began
        self._slowly = Throttle(self._write_summary, TELL_S)
        self._noting = Throttle(self._record_news, NOTE_S)
        self._news: list[Event] = []
        about = Assignment(
            federation=settings.federation,
            task=task,
            layout=layout,
            steps=(*method.steps, *STEPS),
            run=store.put_value_once("run", uuid.uuid4().hex[:12]),
            issue=store.find_value(ISSUE) or "",
            seed=settings.seed,
            deadline_s=settings.deadline_s,
            no_relays=method.explain_no_relays(),
        )
        self._fleet = MqttFleet(settings.make_broker_settings(settings.broker), store, about, self._record_event)
        under_way = set() if method.is_done(state) else self._fleet.find_accepted_blobs(state.round + 1)
        store.require_tensors({ref.digest for ref in iterate_blobs(state)} | under_way)

    async def run(self) -> dict[str, Any]:
        """Serve the federation, as `serve` says."""
        self._write_summary()
        self._fleet.readmit([i.strip() for i in self._settings.readmit.split(",") if i.strip()])
        async with (
            contextlib.aclosing(self._slowly),
            contextlib.aclosing(self._noting),
            self._fleet,
            warn_daily(self._settings),
            repeat(self._slowly.trigger, REFRESH_S),
        ):
            notify_ready()
            await self._train()
            if not self._settings.once:
                await self._rest()
        self._record_news()
        self._store.add_counts(self._fleet.take_counts())
        summary = self._write_summary(ended=True)
        require_bundles(summary)
        return summary

    # ------------------------------------------------------------------------------------------------------ training

    async def _train(self) -> None:
        """Do the rounds that are left, and the last one, in which devices get bundles."""
        while not self._method.is_done(self._state):
            bind(round=(number := self._state.round + 1))
            require_fruitful(self._settings, self._method, self._state, self._first, self._store, self._fleet)
            wishes = await wait_for_permission(number, self._store, self._fleet, self._record_event)
            if wishes.finish and self._end_early():
                continue
            if wishes.recluster == number:
                self._state = restart_clustering(self._method, self._state, self._record_event)
            await self._fleet.start_round(number, self._settings.devices if number == 1 else 1)
            await self._commit(await self._method.advance(self._state, self._wrap_relays()))
        self._fleet.expire_streams()
        clear_finish(self._store)

    def _end_early(self) -> bool:
        """Make the last round that was done the last one of training; False if it is, or if nothing was learned yet."""
        number = self._state.round
        if not number or number >= self._method.last or self._store.get_round_devices(number + 1) is not None:
            return False
        self._method = end_after(number, self._method, self._store)
        clear_finish(self._store)
        self._record_event("finish_asked", {"round": number})
        return True

    async def _commit(self, state: State) -> None:
        """Commit the state after a round, and begin to measure the next one."""
        seconds = time.monotonic() - self._began
        await commit(self._store, self._fleet, state.round, state, seconds, self._settings.keep_rounds)
        self._state, self._began = state, time.monotonic()
        self._record_event("round_done", self._write_summary())

    # ------------------------------------------------------------------------------------------------- after training

    async def _rest(self) -> None:
        """Watch the devices after the last round; give late joiners a bundle if the method can. Never returns."""
        log_missing_bundles(self._write_summary())
        self._record_event("resting", {"round": self._state.round})
        tried: dict[str, str] = {}
        while True:
            async with self._watch_for_late_joiner(tried) as has_come:
                while (await self._apply_requests()).paused or not has_come():
                    await self._fleet.sleep(LOOK_S)
            await self._serve_late_joiners(tried)

    async def _apply_requests(self) -> StandingRequests:
        """Do at rest what people ask for between rounds."""
        wishes = await asyncio.to_thread(read_requests, self._store)
        self._fleet.retire(wishes.retired)
        if wishes.finish:
            clear_finish(self._store)
        return wishes

    @contextlib.asynccontextmanager
    async def _watch_for_late_joiner(self, tried: Mapping[str, str]) -> AsyncIterator[Callable[[], bool]]:
        """Tell whether a device has come that needs a bundle, or was being served before a restart."""
        if type(self._method).serve_late_joiners is Method.serve_late_joiners:
            yield lambda: False
        elif self._store.get_round_devices(self._state.round + 1) is not None:
            yield lambda: True
        else:
            waiting = asyncio.create_task(self._fleet.registry.wait_for_late_joiner(tried, self._state.installed))
            try:
                yield waiting.done
            finally:
                waiting.cancel()

    async def _serve_late_joiners(self, tried: dict[str, str]) -> None:
        """Do one more round, for the devices without a bundle.

        A device that declined or failed is asked again after a restart of its agent or of this coordinator.
        """
        self._began = time.monotonic()
        number = self._state.round + 1
        fleet = self._fleet
        await fleet.start_late_round(number, tried, self._state.installed)
        devices = (*fleet.get_devices(), *fleet.get_inference_devices())
        self._record_event("round_begun", {"round": number, "devices": len(devices)})
        state = await self._method.serve_late_joiners(self._state, self._wrap_relays())
        await self._commit(msgspec.structs.replace(state, round=number))
        tried |= {device.id: device.incarnation for device in devices}

    # -------------------------------------------------------------------------------------------------- what is seen

    def _wrap_relays(self) -> RelayFleet:
        """Return the fleet as a method sees it in the next round."""
        state = self._state
        return RelayFleet(self._fleet, layout=state.layout, seed=self._settings.seed, named=iterate_blobs(state))

    def _write_summary(self, *, ended: bool = False) -> dict[str, Any]:
        return write_summary(self._settings, self._method, self._state, self._store, self._fleet, ended=ended)

    def _record_event(self, event: str, fields: dict[str, Any]) -> None:
        """Pass an event to the caller and the store, and soon update HOME/summary.json."""
        self._observe(event, fields)
        number = self._state.round if event == "round_done" else self._state.round + 1
        self._news.append(make_event(event, fields, number))
        self._noting.trigger()
        self._slowly.trigger()

    def _record_news(self) -> None:
        if self._news:
            self._store.record_events(*self._news)
            self._news.clear()


@contextlib.asynccontextmanager
async def repeat(act: Callable[[], object], every_s: float) -> AsyncIterator[None]:
    """Run a task again and again while the context is open."""

    async def repeat_endlessly() -> None:
        while True:
            await asyncio.sleep(every_s)
            act()

    running = asyncio.create_task(repeat_endlessly())
    try:
        yield
    finally:
        running.cancel()


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
    fleet.retire(wishes.retired)
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
