"""One federation in bad weather: programs are killed and stopped, the network and the disks fail, clocks jump.

In one of three all messages are signed, over TLS. Beside each, `fedge serve` answers on a device of its own, and
another one on the home of an agent, as its device in the federation.

The end is equal, in every bit, to that of the same federation in one process without a network, in which the same
devices are there in each round and the same ones decline: a device that is away when a round begins is not asked, and
one that has run out of memory or disk may say so instead of working.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import random
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from coordinator.fleet.fleet import Answer
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.baselines.dbe import DbeState
from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.baselines.personal_layers import PersonalState
from coordinator.methods.papers.fedge_state import FedgeState
from coordinator.methods.state import State
from edge_agent.device.worker import Worker
from fedge.commands.broker import LocalBroker
from fedge.identity.names import Role
from fedge.steps.contract import Action
from fedge.wire.connection.broker import BrokerSettings
from tests.chaos import audit, disk
from tests.chaos.echo import Echo
from tests.chaos.network import Network
from tests.chaos.programs import Program
from tests.chaos.runtime import Runtime
from tests.support.federation import NAME, SEED, Federation, same, settings, words
from tests.support.identities import Authority, OpenBroker

DEVICES: Final = ("cam0", "cam1", "cam2")
BESIDE: Final = "serve beside cam0"
"""`fedge serve` on the home of that agent."""
PROGRAMS: Final = ("coordinator", *DEVICES, "serve", BESIDE)
METHODS: Final[Mapping[str, type[State]]] = {
    "fedavg": FedAvgState, "fedrep": PersonalState, "dbe": DbeState, "fedge": FedgeState
}  # fmt: skip
STEPS: Final = 3
KIND: Final = {
    "kill": 14, "stop": 2, "broker": 2, "cut": 1, "slow": 1, "silent": 0.5, "clock": 1, "coordinator's disk": 0.5,
    "coordinator's disk read-only": 0.5, "serve's disk": 0.5, "serve's disk read-only": 0.5,
}  # fmt: skip
"""How often which fault comes, relative to each other."""
ROUGH: Final = {**KIND, "memory": 2, "device's disk": 1, "device's disk read-only": 1}
FORWARD_S: Final = 365 * 86400.0
LIFE: Final = dt.timedelta(days=3 * 365)
"""Of certificates, before and after now: clocks are a year off."""
END_S: Final = 1800.0
LONGEST_PAUSE_S: Final = 15.0
"""Faults come less often as long as nothing is done between them: a slow machine would never get on."""
EXPECTED: Final = {None, 0, 130, -signal.SIGKILL, 4}
"""Exit codes: stopped, killed, or the disk was full."""

IN_USE: Final = "stop `fedge serve` or `fedge install` there first"
"""`fedge install` was at work when `fedge serve` was to start again."""


class Weather:
    """A federation whose programs are started again whenever they end. `n`: how often what was done to it."""

    def __init__(
        self, folder: Path, rng: random.Random, *, rounds: int, rough: bool, signed: bool, every_s: float
    ) -> None:
        self.n: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._folder = folder
        self._rng = rng
        self._rounds = rounds
        self._rough = rough
        self._authority = Authority(folder / "authority", ago=LIFE, days=2 * LIFE.days) if signed else None
        self._every_s = every_s
        self._method = rng.choice(list(METHODS))
        self._programs: dict[str, Program] = {}
        self._disks: set[str] = set()
        self._full: Counter[str] = Counter()
        self._poor: set[str] = set()  # those with little memory, which may end in any way
        self._kept: audit.Rows = {}
        self._certificates: dict[str, dict[str, str]] = {}

    def __str__(self) -> str:
        signed = ", signed" if self._authority else ""
        return f"{self._method}, {self._rounds} rounds, {'rough' if self._rough else 'kind'} weather{signed}"

    async def run(self) -> None:
        """From the first start to the audit; `wrong` is what it found."""
        async with self._around():
            beside = [
                asyncio.create_task(work)
                for work in (self._rage(), self._runtime.ask(), self._beside.ask(), self._runtime.install())
            ]
            try:
                async with asyncio.timeout(END_S):
                    while await self._watch():  # noqa: ASYNC110 - programs tell nobody
                        await asyncio.sleep(0.02)
            except TimeoutError:
                self.wrong.append(f"no end within {END_S:.0f} s")
            finally:
                for task in beside:
                    task.cancel()
                for end in await asyncio.gather(*beside, return_exceptions=True):
                    if isinstance(end, Exception):
                        raise end
                for program in self._programs.values():
                    program.send(signal.SIGCONT)
                    program.kill()
            self.wrong += self._runtime.wrong + self._beside.wrong
            if not self.wrong:
                await self._audit()

    @asynccontextmanager
    async def _around(self) -> AsyncIterator[None]:
        """Broker, network and disks."""
        for name in (*DEVICES, "coordinator", "serve"):
            if disk.mount(self._folder / name):
                self._disks.add(name)
        try:
            self._runtime = await self._installed("serve", "serve", 1)
            self._beside = await self._installed(BESIDE, DEVICES[0], 0)
            home = self._folder / "broker"
            async with OpenBroker(self._authority, home) if self._authority else LocalBroker(home=home) as self._broker:
                ca_file = str(self._authority.file) if self._authority else None
                direct = BrokerSettings(self._broker.host, self._broker.port, ca_file=ca_file)
                async with (
                    Network(self._broker.host, self._broker.port) as self._network,
                    Echo(direct, NAME, self._rng) as self._echo,
                ):
                    self._federation = Federation(self._network, self._folder, devices=DEVICES)  # type: ignore[arg-type]
                    yield
        finally:
            for name in self._disks:
                if self.wrong:
                    shutil.copytree(self._folder / name, self._folder / f"{name}.kept", dirs_exist_ok=True)
                disk.unmount(self._folder / name)

    async def _installed(self, name: str, home: str, release: int) -> Runtime:
        return await asyncio.to_thread(Runtime, name, self._folder / home, release, self._programs, self.n)

    # ------------------------------------------------------------------------------------------------- programs

    async def _watch(self) -> bool:
        """Start what has ended; False once the coordinator is done."""
        for name in PROGRAMS:
            program = self._programs.get(name)
            if program is None or program.ended is not None:
                code = None if program is None else program.ended
                if name == "coordinator" and code == 0:
                    return False
                busy = name in {"serve", BESIDE} and code == 2 and IN_USE in _end_of(program)
                poor = name in self._poor  # with little memory SQLite says that the disk is bad
                if not (code in EXPECTED or busy or poor) or (code == 4 and not self._full[name] and not poor):
                    self.wrong.append(f"{name} ended with {code}: {_end_of(program)}")
                    return False
                self._full[name] = int(self._full[name] > 0)
                if name == "coordinator":
                    self._look()
                self._start(name)
        return True

    def _start(self, name: str, memory: int | None = None) -> None:
        log = self._folder / f"{name}.log"
        ahead_s = self._rng.choice((0.0, 0.0, FORWARD_S, -FORWARD_S))
        command = self._words(name)
        self._programs[name] = Program(command, log, ahead_s=ahead_s, memory=memory)
        self._poor = self._poor - {name} | ({name} if memory else set())
        self.n["starts"] += 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"broker": f"{self._network.host}:{self._network.port}", "federation": NAME}

    def _identity(self, name: str) -> dict[str, str]:
        """The files of a certificate, if there are any here."""
        if self._authority is None:
            return {}
        if name not in self._certificates:
            role = Role.COORDINATOR if name == "coordinator" else Role.DEVICE
            self._certificates[name] = self._authority.issue(name, role)
        return self._certificates[name]

    def _words(self, name: str) -> list[object]:
        if name == "serve":
            return self._runtime.words
        if name == BESIDE:
            return [*self._beside.words, *words({**self._place, "id": DEVICES[0], **self._identity(DEVICES[0])})]
        federation = self._federation
        given = {**self._place, "task": self._folder / "task.json", "home": self._folder / name}
        if name == "coordinator":
            given |= {
                "seed": SEED,
                "devices": len(DEVICES),
                "deadline_s": 3600,
                "keep_rounds": 1000,
                "method": self._method,
            }
            given |= {"rounds": self._rounds, "local_steps": STEPS, "once": True}
        else:
            given |= {"id": name, "data": federation.data(name), "context_interval_s": 1}
        return ["coordinator" if name == "coordinator" else "agent", *words(given | self._identity(name))]

    def _look(self) -> None:
        """What was accepted stays accepted."""
        now = audit.rows(self._federation)
        self.wrong += audit.lost(self._kept, now)
        self._kept = now

    # --------------------------------------------------------------------------------------------------- faults

    async def _rage(self) -> None:
        faults: Mapping[str, float] = ROUGH if self._rough else KIND
        pause_s, done = self._every_s, 0
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            before, done = done, audit.n_closed(self._federation)
            pause_s = max(self._every_s, pause_s / 2) if done > before else min(1.2 * pause_s, LONGEST_PAUSE_S)
            (fault,) = self._rng.choices(list(faults), weights=list(faults.values()))
            await self._strike(fault)

    async def _strike(self, fault: str) -> None:
        victim = self._rng.choice([name for name in (*PROGRAMS, "install") if name in self._programs])
        device = self._rng.choice(DEVICES)
        match fault:
            case "kill":
                self._kill(victim)
            case "stop":
                self._programs[victim].send(signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(0.1, 2.0))
                self._programs[victim].send(signal.SIGCONT)
            case "broker":
                await self._broker.kill()
                await asyncio.sleep(self._rng.choice((0.0, 0.5)))
                await self._broker.start()
                self.n["kills"] += 1
            case "cut":
                self._network.refusing = True
                self._network.cut()
                await asyncio.sleep(self._rng.uniform(0.0, 1.0))
                self._network.refusing = False
            case "slow":
                self._network.delay_s, self._network.bytes_per_s = 0.2, 50_000.0
                await asyncio.sleep(self._rng.uniform(0.5, 2.0))
                self._network.delay_s = self._network.bytes_per_s = 0.0
            case "silent":
                self._network.silent = True
                await asyncio.sleep(self._rng.uniform(0.2, 1.0))
                self._network.cut()
                self._network.silent = False
            case "clock":
                self._programs[victim].jump(self._rng.choice((0.0, FORWARD_S, -FORWARD_S, 3600.0)))
            case "memory":
                self._kill(device)
                self._start(device, memory=self._rng.randint(1, 60) << 20)
            case _:
                await self._fill(device if fault.startswith("device") else fault.partition("'")[0], fault)
        self.n[fault] += 1

    def _kill(self, name: str) -> None:
        if self._programs[name].running:
            self._programs[name].kill()
            self.n["kills"] += 1

    async def _fill(self, name: str, fault: str) -> None:
        if name not in self._disks:
            return
        for each in (name, BESIDE) if name == DEVICES[0] else (name,):
            self._full[each] = 2  # its next two ends may be for this reason
        folder = self._folder / name
        if fault.endswith("read-only"):
            self._kill(name)
            if name == DEVICES[0]:
                self._kill(BESIDE)
            with disk.read_only(folder) as done:
                await asyncio.sleep(0.3 if done else 0.0)
        else:
            with disk.full(folder):
                await asyncio.sleep(self._rng.uniform(0.2, 1.0))

    # ---------------------------------------------------------------------------------------------------- audit

    async def _audit(self) -> None:
        self._look()
        self.wrong += audit.books(self._federation, self._echo.said)
        self.n["orders"] += len(self._kept)
        self.n["repeated messages"] += self._echo.n_repeated
        replay = functools.partial(Replay, **audit.history(self._federation))
        expected = await self._federation.undisturbed(self._method, settings(self._rounds, steps=STEPS), replay)
        if not same(self._federation.state(METHODS[self._method]), expected):
            self.wrong.append("the end is not that of the undisturbed run")


class Replay(SimulatedFleet):
    """The same devices are there in each round, and the same orders have no result."""

    def __init__(self, *given: Any, there: Mapping[int, frozenset[str]], refused: audit.Refused, **named: Any) -> None:
        super().__init__(*given, **named)
        self._there_at, self._refused = there, refused

    def _find_present(self) -> dict[str, Worker]:
        return {i: worker for i, worker in self.workers.items() if i in self._there_at.get(self.round, self.workers)}

    def _make_orders(self, label: str, actions: Mapping[str, Action], deadline_s: float | None = None) -> Any:
        without = {i: (self.round, label, i) for i in actions if (self.round, label, i) in self._refused}
        others = {i: action for i, action in actions.items() if i not in without}
        orders, answers, asked = super()._make_orders(label, others, deadline_s)
        answers |= {i: Answer(i, self._refused[key], 0.0, self.round) for i, key in without.items()}
        return orders, answers, {**actions, **asked}


def _end_of(program: Program | None) -> str:
    return "" if program is None else program.log.read_text(errors="replace")[-2000:]
