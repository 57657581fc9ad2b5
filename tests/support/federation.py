"""A federation of real processes: `fedge coordinator` and `fedge agent` around a broker that the test may kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sqlite3
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from coordinator.aggregation.protection import Protection
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import State, decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from coordinator.store.database import make_connector
from coordinator.store.store import Store
from edge_agent.device.worker import Worker
from edge_agent.learning.batched import execute_singly, use_one_thread
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.models.build import make_initial_model
from fedge.steps.sgd import Sgd
from fedge.tasks import Partitioning, load_pool, load_task, partition_pool, read_device_data, write_share, write_task
from fedge.tensors.layout import Codec, unflatten
from tests.support import warm
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
NAME = "f"
SEED = 3
WAIT_S = 300.0
POLL_S = 0.005


def words(flags: Mapping[str, object]) -> list[object]:
    """Settings as words of a command line; True: a flag without a value, False: none."""
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items() if value is not False]
    return [word for name, value in pairs for word in ((name,) if value is True else (name, value))]


class Running:
    """A `fedge` command. `events`: what it has said with --json; its log lines are in the file `log`."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, log: Path, *arguments: object, forked: bool = True) -> Self:
        """Run `fedge ARGUMENTS --json`. `forked`: its children need not import anything (`tests.support.warm`)."""
        command = warm.command(*map(str, arguments), "--json", forked=forked)
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, limit=2**24, stdout=PIPE, stderr=stderr, cwd=ROOT, env=warm.environment()
            )
        return cls(process, log)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        async with self._news:
            self.events.append({"event": "ended"})
            self._news.notify_all()

    async def said(self, event: str, **fields: object) -> None:
        """Wait until it has said this, or fail if it ends without."""
        wanted = {"event": event, **fields}.items()

        def heard() -> bool:
            return any(wanted <= said.items() for said in self.events if said["event"] in {event, "ended"}) or (
                self.events[-1:] == [{"event": "ended"}]
            )

        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(heard)
        assert self.events[-1:] != [{"event": "ended"}] or event == "ended", self.log.read_text()[-3000:]

    async def logged(self, text: str) -> None:
        """Wait for a text in the log."""
        await until(lambda: text in self.log.read_text())

    async def logged_again(self, text: str, *, times: int) -> None:
        """Wait until a text is in the log so often."""
        await until(lambda: self.log.read_text().count(text) >= times)

    def refused(self) -> dict[str, int]:
        """How often the log has which refusal."""
        names = re.findall(r"event=refused .*?name=(\S+)", self.log.read_text())
        return {name: names.count(name) for name in names}

    def send(self, number: signal.Signals) -> None:
        """Send a signal; to stop and continue it, or to end it cleanly."""
        self.process.send_signal(number)

    async def kill(self) -> None:
        """kill -9."""
        if self.process.returncode is None:
            self.process.kill()
        await self.ended()

    async def ended(self) -> int:
        """Wait for its end; its exit code."""
        async with asyncio.timeout(WAIT_S):
            await self._reading
            return await self.process.wait()


class Federation:
    """Coordinator, agents and their folders. Async context manager: whatever was started is killed at the end."""

    def __init__(
        self,
        broker: LocalBroker,
        folder: Path,
        *,
        devices: Iterable[str],
        task: TaskSpec | None = None,
        store_url: str | None = None,
        forked: bool = True,
    ) -> None:
        self.broker = broker
        self.forked = forked
        self.store_url = store_url
        self.folder = folder
        self.devices = tuple(devices)
        self.task = task or load_task("digits")
        self.home = folder / "coordinator"
        self._stack = contextlib.AsyncExitStack()
        write_task(self.task, folder / "task.json")
        samples = load_pool("digits", seed=SEED, limit=100 * len(self.devices))
        shares = partition_pool(samples, len(self.devices), Partitioning(alpha=10.0, sensitive=0.3), seed=SEED)
        for device, share in zip(self.devices, shares, strict=True):
            write_share(share, self.data(device))

    def data(self, device: str) -> Path:
        """The samples of a device."""
        return self.folder / f"{device}.npz"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def coordinator(self, *, log: str = "coordinator", **flags: object) -> Running:
        """Start the coordinator, or a process beside it, or start it again: the folder is always the same."""
        given = {"seed": SEED, "devices": len(self.devices), "deadline_s": 120, "keep_rounds": 1000, "home": self.home}
        given |= {"once": True}
        if self.store_url is not None:
            given["store"] = self.store_url
        given |= flags
        return await self._start("coordinator", given, log=log)

    async def agent(self, device: str, **flags: object) -> Running:
        """Start an agent, or start it again."""
        given = {"id": device, "home": self.folder / device, "data": self.data(device), **flags}
        return await self._start("agent", given, log=device)

    async def agents(self) -> dict[str, Running]:
        """Start all agents."""
        return {device: await self.agent(device) for device in self.devices}

    async def _start(self, role: str, flags: Mapping[str, object], *, log: str = "coordinator") -> Running:
        broker = f"{self.broker.host}:{self.broker.port}"
        given = {"broker": broker, "federation": NAME, "task": self.folder / "task.json", **flags}
        running = await Running.start(self.folder / f"{log}.log", role, *words(given), forked=self.forked)
        self._stack.push_async_callback(running.kill)
        return running

    async def stands_still(self, device: str, agent: Running) -> int:
        """Stop a device in a round that waits for it alone; the round."""
        reports = self.folder / device / "outbox" / "reports"
        while True:
            agent.send(signal.SIGSTOP)
            await until(lambda: [order.endswith(f".{device}") for _, order in self.open_orders(device)] == [True])
            ((number, order),) = self.open_orders(device)
            if not (reports / order).exists():
                return number
            agent.send(signal.SIGCONT)  # its report is under way
            await until(lambda order=order: order not in {i for _, i in self.open_orders(device)})  # type: ignore[misc]

    # ----------------------------------------------------------------------------------------------- what is true

    def open_orders(self, device: str) -> list[tuple[int, str]]:
        """Round and id of the orders that are open where this device gets its own from."""
        del device
        return self.rows("SELECT round, id FROM orders WHERE status = 'open'")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Look into the store, whether the coordinator runs or not."""
        if self.store_url is not None:
            with contextlib.closing(make_connector(self.home, self.store_url, NAME)()) as tables:
                return list(tables.execute(query))
        with contextlib.closing(sqlite3.connect(f"file:{self.home / 'store.db'}?mode=ro", uri=True)) as db:
            return db.execute(query).fetchall()

    def accepted(self) -> dict[str, bytes]:
        """All accepted reports, by order id."""
        return dict(self.rows("SELECT id, report FROM orders WHERE status = 'accepted'"))

    def state(self, kind: type[State]) -> State:
        """The method's last state; the coordinator must have ended."""
        with contextlib.closing(Store(self.home, self.store_url, federation=NAME)) as store:
            saved = store.get_state()
        assert saved is not None
        return decode_state(saved, kind)

    async def undisturbed(
        self,
        name: str,
        settings: MethodSettings,
        kind: Callable[..., SimulatedFleet] = SimulatedFleet,
        *,
        last: int | None = None,
        campaigns: int = 1,
    ) -> State:
        """The last state of the same federation in one process and without a network.

        `last`: after its end it goes on until so many rounds are done, and ends again. `campaigns`: so many, all of
        equal length, and no samples come between them.
        """
        layout, model = make_initial_model(self.task, SEED)
        with use_one_thread():
            workers = {
                device: Worker(
                    device,
                    self.task,
                    read_device_data(self.task, self.data(device), seed=0),
                    self.folder / "sim" / device,
                )
                for device in self.devices
            }
            fleet = kind(self.task, layout, workers, seed=SEED, execute=execute_singly)
            method = make_method(name, settings)
            state = await run_rounds(method, method.init(layout, fleet.put(unflatten(model, layout))), fleet)
            for _ in range(campaigns - 1):
                method = make_method(name, msgspec.structs.replace(settings, first=state.round))
                state = await run_rounds(method, method.begin_campaign(state, ()), fleet)
            return (
                await run_rounds(make_method(name, msgspec.structs.replace(settings, last=last)), state, fleet)
                if last
                else state
            )


def settings(
    rounds: int, *, steps: int = 10, codec: Codec = Codec.INT8, protection: Protection | None = None
) -> MethodSettings:
    """What the simulated fleet needs to do what the coordinator does with --rounds, --local-steps and --codec."""
    given = protection or Protection()
    return MethodSettings(rounds=rounds, seed=SEED, sgd=Sgd(steps=steps), codec=codec, protection=given)


def same(one: State, other: State) -> bool:
    """Equal in every bit, but for how long devices took: where everybody takes part nothing follows from that."""
    return encode_state(without_times(one)) == encode_state(without_times(other))


def without_times(state: State) -> State:
    """The bandits of fedge remember how long devices took, and so does FedAvg."""
    times: dict[str, object] = {"bandits": (), "seconds": {}}
    known = {field.name for field in msgspec.structs.fields(state)}
    return msgspec.structs.replace(state, **{name: none for name, none in times.items() if name in known})
