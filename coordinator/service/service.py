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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from coordinator.fleet.mqtt.fleet import SETTLE_S, MqttFleet
from coordinator.fleet.mqtt.intake import Assignment, Intake
from coordinator.fleet.mqtt.roles import BlobServer, load_layout, lock_own_folder
from coordinator.fleet.relayed import STEPS, RelayFleet
from coordinator.methods.catalogue import load_method_class
from coordinator.methods.method import Method
from coordinator.methods.settings import Option
from coordinator.methods.state import State
from coordinator.rollout.introduction import Introducer
from coordinator.rollout.settings import IntroductionSettings
from coordinator.service.beginning import (
    Growth,
    begin_campaign,
    end_after,
    plan_growth,
    read_campaigns,
    read_first_rounds,
    resume,
    write_campaigns,
)
from coordinator.service.between import LOOK_S, Observer, commit, make_event, restart_clustering, wait_for_permission
from coordinator.service.campaigns import (
    Campaigns,
    Conditions,
    begin_next,
    decide,
    describe_campaigns,
    end_campaign,
    parse_conditions,
    record_best,
    record_participants,
    record_rest,
    require_counted,
)
from coordinator.service.running import Throttle, repeat, run_beside
from coordinator.service.settings import NO_OPTIONS, CoordinatorSettings
from coordinator.service.summary import (
    describe_score,
    find_finished,
    log_missing_bundles,
    require_bundles,
    require_fruitful,
    warn_daily,
    write_summary,
)
from coordinator.store.classes import read_classes, settle_task
from coordinator.store.records import Event
from coordinator.store.requests import (
    StandingRequests,
    clear_campaign,
    clear_finish,
    read_requests,
    take_campaign,
)
from coordinator.store.store import ISSUE, Store
from coordinator.watch import runs
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.system.logs import bind
from fedge.system.malloc import tune_malloc
from fedge.system.systemd import notify_ready
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef, iterate_blobs

log = logging.getLogger("fedge.coordinator")


TELL_S: Final = 1.0
"""Shortest time between two summaries."""
NOTE_S: Final = 0.2
"""Shortest time between two writes of events to the store."""
REFRESH_S: Final = 5.0
"""Longest time between two summaries, since what devices say of themselves is no event."""
ASKED: Final = "somebody asked for it"
EQUALLY_LONG: Final = "with --dp-epsilon each campaign is as long as the first: leave out --campaign-rounds"


async def serve(
    settings: CoordinatorSettings,
    task: TaskSpec,
    store: Store,
    observe: Observer,
    options: Mapping[str, Option] = NO_OPTIONS,
    introduction: IntroductionSettings | None = None,
) -> dict[str, Any]:
    """Run a federation from its present state on, and its further campaigns, until we are stopped.

    With `settings.once` return after the last round the summary, which is also in HOME/summary.json. Otherwise bundles
    enter service in stages, as `introduction` says; at once if None.

    Raises:
        ConfigError: the folder belongs to another federation, or the conditions of campaigns make no sense.
        StoreError: durable state cannot be written; nothing accepted is lost.
        TransportError: the broker refused us for good.
        FruitlessError: training came to its end and nothing was learned, or with `once` no device has a bundle.
    """
    tune_malloc(large=True)
    raise_open_files()
    conditions = parse_conditions(settings.every, settings.when)
    require_counted(conditions, task.problem)
    if settings.dp_epsilon is not None and settings.campaign_rounds is not None:
        raise ConfigError(EQUALLY_LONG)
    if store.find_value("start") is None:
        observe("beginning", {})
    recorded = False
    while True:
        began, own = time.monotonic(), settle_task(store, task)
        method, layout, first, state = resume(settings, own, store, options)
        if (ended := find_finished(settings, method, state)) is not None:
            observe("finished", {"rounds": ended["rounds"], "bundles": len(ended["installed"])})
            require_bundles(ended)
            return ended
        service = Service(settings, own, store, observe, method, layout, first, state, conditions, introduction, began)
        if not recorded:
            runs.record_run(settings.home, "coordinator", settings, options)
            recorded = True
        summary = await service.run()
        if not service.has_grown:
            return summary


class Service:
    """A federation that is served: its method, the state after its last round, its devices.

    `has_grown`: whether classes have joined, so that another `Service` must go on.

    Args:
        settings: the coordinator's settings.
        task: what is learned.
        store: the durable state.
        observe: called with events for people.
        method: the method, which knows the last round.
        layout: the layout of its initial model.
        first: that model.
        state: the last committed state, or that before the first round of a campaign.
        conditions: what begins a campaign.
        introduction: how bundles enter service; at once if None.
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
        conditions: Conditions,
        introduction: IntroductionSettings | None,
        began: float,
    ) -> None:
        self._settings, self._store, self._observe = settings, store, observe
        self._method, self._first, self._state = method, first, state
        self._conditions, self._campaigns = conditions, read_campaigns(store)
        self._began = began
        self._task = task
        self._growth: Growth | None = None
        self.has_grown = False
        self._settled_at = time.monotonic() + SETTLE_S  # until then devices may only be on their way
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
            classes=read_classes(store),
        )
        broker = settings.make_broker_settings(settings.broker)
        self._fleet = MqttFleet(broker, store, about, self._record_event)
        self._introducer = (
            None
            if introduction is None or settings.once
            else Introducer(settings.home, broker, settings.federation, introduction, self._record_event)
        )
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
            warn_daily(self._settings, self._fleet),
            repeat(self._slowly.trigger, REFRESH_S),
        ):
            notify_ready()
            if self._introducer is None:
                await self._run_campaigns()
            else:
                await run_beside(self._run_campaigns(), self._introducer.run())
        self._record_news()
        self._store.add_counts(self._fleet.take_counts())
        summary = self._write_summary(ended=not self.has_grown)
        if not self.has_grown:
            require_bundles(summary)
        return summary

    # ------------------------------------------------------------------------------------------------------ training

    async def _run_campaigns(self) -> None:
        """Do the rounds that are left; unless we are to end then, rest and do one campaign after the other.

        Return when classes have joined, too.
        """
        self._introduce()
        await self._train()
        while not self._settings.once:
            await self._rest()
            if self.has_grown:
                return
            await self._train()

    async def _train(self) -> None:
        """Do the rounds that are left, and the last one, in which devices get bundles."""
        while not self._method.is_done(self._state):
            bind(round=(number := self._state.round + 1))
            if self._campaigns.now.number == 1:  # later ones at least leave what is known already
                require_fruitful(self._settings, self._method, self._state, self._first, self._store, self._fleet)
            wishes = await wait_for_permission(number, self._store, self._fleet, self._record_event)
            if wishes.finish and self._end_early():
                continue
            if wishes.recluster == number:
                self._state = restart_clustering(self._method, self._state, self._record_event)
            await self._fleet.start_round(number, self._settings.devices if number == 1 else 1)
            await self._record_participants()
            await self._commit(await self._method.advance(self._state, self._wrap_relays()))
        self._fleet.expire_streams()
        clear_finish(self._store)
        if self._campaigns.now.ended_at is None:
            await self._write_campaigns(end_campaign(self._campaigns, self._method.summarise(self._state), time.time()))
            now = self._campaigns.now
            told = {"number": now.number, "rounds": now.rounds, "accuracy": now.accuracy}
            self._record_event("campaign_ended", told | describe_score(self._method.problem.figure))

    async def _record_participants(self) -> None:
        """Record what the devices of the round said of their samples, if it is their first in this campaign."""
        fleet = self._fleet
        ids = {device.id for device in (*fleet.get_devices(), *fleet.get_inference_devices())}
        facts = (device for device in fleet.registry.list_facts() if device.id in ids)
        await self._write_campaigns(record_participants(self._campaigns, facts))

    async def _write_campaigns(self, campaigns: Campaigns) -> None:
        """Write the record of the campaigns, unless it is the present one."""
        if campaigns is not self._campaigns:
            await asyncio.to_thread(write_campaigns, self._store, campaigns)
            self._campaigns = campaigns

    def _end_early(self) -> bool:
        """Make the last round that was done the last one of training; False if it is, or if nothing was learned yet."""
        number = self._state.round
        known = number <= self._campaigns.now.first or number >= self._method.last
        if known or self._store.get_round_devices(number + 1) is not None:
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
        self._introduce()
        self._record_event("round_done", self._write_summary())

    def _introduce(self) -> None:
        """Let the bundles that the devices have enter service in stages."""
        if self._introducer is not None and self._method.is_done(self._state):
            self._introducer.introduce(self._state.campaign, self._state.installed)

    # ------------------------------------------------------------------------------------------------- after training

    async def _rest(self) -> None:
        """Watch the devices until a campaign begins; give late joiners a bundle if the method can."""
        log_missing_bundles(self._write_summary())
        self._record_event("resting", {"round": self._state.round})
        if self._conditions != Conditions() and (why := explain_spent(self._settings, self._campaigns.now.number)):
            self._record_event("campaign_refused", {"reason": why})
        tried: dict[str, str] = {}
        while True:
            async with self._watch_for_late_joiner(tried) as has_come:
                while (wishes := await self._apply_requests()).paused or not has_come():
                    if not wishes.paused and (why := await self._find_reason(wishes)):
                        return self._begin_campaign(why)
                    await self._fleet.sleep(LOOK_S)
            await self._serve_late_joiners(tried)

    async def _find_reason(self, wishes: StandingRequests) -> str:
        """Return why a campaign begins now; empty if none does."""
        number = self._campaigns.now.number + 1
        if wishes.campaign in {0, number} and take_campaign(self._store, number):
            try:
                return await self._grant_campaign(read_requests(self._store).classes)
            except ConfigError as error:
                clear_campaign(self._store)
                self._record_event("campaign_refused", {"reason": str(error)})
        if self._conditions == Conditions():
            return ""
        if time.monotonic() < self._settled_at:
            await self._write_campaigns(record_best(self._campaigns, self._fleet.registry.list_facts()))
            return ""
        if explain_spent(self._settings, self._campaigns.now.number):
            return ""
        facts = self._fleet.registry.list_facts()
        await self._write_campaigns(record_rest(self._campaigns, facts))
        found = decide(self._conditions, self._campaigns, facts, time.time())
        if found is not None and not found.begins:
            await self._write_campaigns(msgspec.structs.replace(self._campaigns, skipped_at=time.time()))
            self._record_event("campaign_skipped", {"reason": found.why})
        return found.why if found is not None and found.begins else ""

    async def _grant_campaign(self, classes: Sequence[str]) -> str:
        """Plan the campaign that somebody asked for, with these classes; return why it begins.

        Raises:
            ConfigError: there is none; the text says why.
        """
        if why := explain_spent(self._settings, self._campaigns.now.number):
            raise ConfigError(why)
        names = [name for name in classes if name not in self._task.classes]
        if not names:
            return ASKED
        plan = partial(plan_growth, self._settings, self._method, self._task, names, self._store)
        self._growth = await asyncio.to_thread(plan)
        return f"{ASKED}, and {' and '.join(names)} join{'s' * (len(names) == 1)} the classes"

    def _begin_campaign(self, why: str) -> None:
        """Begin the next campaign: record it, and go on from what the last one has learned."""
        growth = self._growth
        n_before = len(read_classes(self._store).names)
        self._campaigns = begin_next(
            self._campaigns,
            why,
            self._fleet.registry.list_facts(),
            first=self._state.round,
            planned=self._settings.campaign_rounds or read_first_rounds(self._settings, self._store),
            now=time.time(),
            added=() if growth is None else growth.classes.names[n_before:],
        )
        before = self._method, self._state, self._store
        self._method, self._state = begin_campaign(*before, self._campaigns, growth)
        self.has_grown = growth is not None
        self._began = time.monotonic()
        self._record_event("campaign_begun", {"number": self._campaigns.now.number, "reason": why})

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
        self._fleet.campaign = 0 if self._introducer is None else state.campaign
        return RelayFleet(self._fleet, layout=state.layout, seed=self._settings.seed, named=iterate_blobs(state))

    def _write_summary(self, *, ended: bool = False) -> dict[str, Any]:
        paused = read_requests(self._store).paused
        more = {
            "campaign": describe_campaigns(self._campaigns, self._conditions, paused=paused),
            "introduction": None if self._introducer is None else self._introducer.describe(),
        }
        what = self._settings, self._method, self._state, self._store, self._fleet
        introduced = {} if self._introducer is None else self._introducer.list_accuracies()
        return write_summary(*what, more=more, introduced=introduced, ended=ended)

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


def explain_spent(settings: CoordinatorSettings, n_campaigns: int) -> str:
    """Explain why differential privacy allows no campaign after this many; empty if it does."""
    if settings.dp_epsilon is None or n_campaigns < settings.dp_campaigns:
        return ""
    done = "one campaign, which is" if settings.dp_campaigns == 1 else f"{settings.dp_campaigns} campaigns, which are"
    return (
        f"--dp-epsilon {settings.dp_epsilon:g} is for {done} done, so each sample has spent it: start the coordinator "
        f"with --dp-campaigns {n_campaigns + 1} and a larger --dp-epsilon, such as "
        f"{settings.dp_epsilon * (n_campaigns + 1) / n_campaigns:g}, if the devices' owners agree"
    )


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
    task = settle_task(store, task)
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
