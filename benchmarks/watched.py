"""Whether open pages slow a round: a coordinator that nobody watches, and that several pages watch, in turn.

Mosquitto, `fedge coordinator --ui` with fedavg, `fedge ui` and the light devices of load.py are processes on loopback.
The devices answer at once, so a round is as short, and as sensitive, as it can be. An open page does what page.js does:
it follows the stream of events, and whenever there is news it reads, once in 0.4 s, the whole state and the next of the
other views: rollouts, a device, a round, the events.

    nobody         no page is open
    coordinator    pages of `fedge coordinator --ui`, which answers them in the coordinator's own process
    fedge ui       pages of `fedge ui`, which is a process of its own

These three take turns, --turns times; rounds in the first --settle-s of a turn do not count. Printed are medians of the
turns' medians, their range in brackets, the ratio to nobody's of the same turn, and processor time of the coordinator.

Run: python benchmarks/watched.py [--devices 50] [--pages 5] [--turns 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
from load import TOPICS, Herd
from script import cpu_s, finish, machine, parser_of, show

from coordinator.service.checks import make_first_model
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker, find_free_port
from fedge.tasks import load_task
from fedge.wire.connection.broker import BrokerSettings

DUE_S = 0.4
"""page.js reads so long after news."""
NOBODY = "nobody"


class Pages:
    """Open pages of one server. Async context manager: they are open inside."""

    def __init__(self, url: str, n: int, device: str) -> None:
        self.reads = self.bytes = 0
        self._url, self._n, self._device = url.rstrip("/"), n, device
        self._round = 1
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pages:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._tasks = [asyncio.create_task(self._open(k)) for k in range(self._n)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise SystemExit(f"a page ended: {error!r}")

    async def _open(self, k: int) -> None:
        await self._get("")
        await self._get("api/session")
        await self._get("api/events?last=200")
        news = asyncio.Event()
        news.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(news))
            group.create_task(self._refresh(news, k))

    async def _follow(self, news: asyncio.Event) -> None:
        async with self._session.get(f"{self._url}/api/stream") as stream:
            async for line in stream.content:
                if line.startswith(b"data:"):
                    news.set()

    async def _refresh(self, news: asyncio.Event, k: int) -> None:
        views = ("", "api/rollouts", f"api/devices/{self._device}", "api/rounds/", "api/events?last=300")
        version = ""
        for view in cycle(views[k % len(views) :] + views[: k % len(views)]):
            await news.wait()
            await asyncio.sleep(DUE_S)
            news.clear()
            state = json.loads(await self._get(f"api/state?since={version}"))
            version = state["version"]
            if begun := state["tables"]["rounds"].get("round"):
                self._round = begun["is"][-1]
            if view:
                await self._get(f"{view}{self._round}" if view == "api/rounds/" else view)

    async def _get(self, path: str) -> bytes:
        async with self._session.get(f"{self._url}/{path}") as answer:
            body = await answer.read()
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status}: {body[:200]!r}")
        self.reads += 1
        self.bytes += len(body)
        return body


@contextlib.asynccontextmanager
async def program(*words: object, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "fedge", "--log-level", "warning", *map(str, words))
    process = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until_begun(home: Path) -> None:
    """Wait for the first round."""
    while True:
        await asyncio.sleep(0.1)
        if (home / "summary.json").exists():
            with contextlib.closing(Store(home, intake=True)) as store:
                if store.get_round_seconds():
                    return


class Run:
    """A federation, and the turns in which it is watched or not."""

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        self.args, self.home = args, home
        self.turns: list[dict[str, Any]] = []

    async def measure(self) -> dict[str, dict[str, Any]]:
        task = load_task("digits")
        layout, _ = make_first_model(task, 0)
        server = self.home / "server"
        async with contextlib.AsyncExitStack() as stack:
            broker = await stack.enter_async_context(LocalBroker("mosquitto"))
            own = f"127.0.0.1:{find_free_port('127.0.0.1')}"
            coordinator = await stack.enter_async_context(
                program(
                    "coordinator", "--broker", f"{broker.host}:{broker.port}", "--federation", TOPICS.federation,
                    "--home", server, "--task", "digits", "--method", "fedavg", "--rounds", 1_000_000,
                    "--devices", self.args.devices, "--ui", own, stdout=DEVNULL, stderr=DEVNULL,
                )
            )  # fmt: skip
            names = [f"d{i:05}" for i in range(self.args.devices)]
            address = BrokerSettings(broker.host, broker.port)
            herd = Herd(names, address, task.compute_fingerprint(), layout, self.home / "devices")
            stack.callback(herd.process.kill)
            await until_begun(server)
            ui = await stack.enter_async_context(program("ui", "--home", server, "--port", 0, "--json", stdout=PIPE))
            assert ui.stdout is not None
            url = json.loads(await ui.stdout.readline())["url"]
            urls = {NOBODY: None, "coordinator": f"http://{own}", "fedge ui": url}
            for _ in range(self.args.turns):
                for way, watched in urls.items():
                    await self._turn(way, watched, coordinator.pid, names[0])
        return self._figures(server)

    async def _turn(self, way: str, url: str | None, pid: int, device: str) -> None:
        n = 0 if url is None else self.args.pages
        async with Pages(url or "", n, device) as pages:
            await asyncio.sleep(self.args.settle_s)
            before, reads, received, cpu = time.time(), pages.reads, pages.bytes, cpu_s(pid)
            await asyncio.sleep(self.args.turn_s)
            after = time.time()
            turn = {"way": way, "from": before, "to": after, "cpu_s": cpu_s(pid) - cpu}
            told = {
                "reads/s": (pages.reads - reads) / (after - before),
                "MB/s": (pages.bytes - received) / (after - before) / 1e6,
            }
            self.turns.append(turn | told)

    def _figures(self, server: Path) -> dict[str, dict[str, Any]]:
        begun: dict[int, float] = {}
        done: dict[int, float] = {}
        with contextlib.closing(Store(server)) as store:
            after = 0
            while events := store.get_events(after=after, limit=5000):
                for event in events:
                    if event.name == "round_begun":
                        begun[event.round] = event.at
                    elif event.name == "round_done":
                        done[event.round] = event.at
                after = events[-1].number
        for turn in self.turns:
            inside = [done[r] - begun[r] for r in done if turn["from"] <= begun[r] and done[r] <= turn["to"]]
            if not inside:
                raise SystemExit("no round fits into a turn: give --turn-s more")
            turn["ms"], turn["rounds"] = 1000 * statistics.median(inside), len(inside)
            turn["cpu ms"] = 1000 * turn["cpu_s"] / len(inside)
        found: dict[str, dict[str, Any]] = {}
        alone = [turn for turn in self.turns if turn["way"] == NOBODY]
        for way in dict.fromkeys(turn["way"] for turn in self.turns):
            own = [turn for turn in self.turns if turn["way"] == way]
            ratios = [turn["ms"] / nobody["ms"] for turn, nobody in zip(own, alone, strict=True)]
            found[way] = {
                "round ms": statistics.median(turn["ms"] for turn in own),
                "range": [min(turn["ms"] for turn in own), max(turn["ms"] for turn in own)],
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "cpu ms": statistics.median(turn["cpu ms"] for turn in own),
                "reads/s": statistics.median(turn["reads/s"] for turn in own),
                "MB/s": statistics.median(turn["MB/s"] for turn in own),
                "rounds": sum(turn["rounds"] for turn in own),
            }
        return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, default=50, help="(default 50)")
    parser.add_argument("--pages", type=int, default=5, help="that are open at a time (default 5)")
    parser.add_argument("--turns", type=int, default=5, help="of each of the three (default 5)")
    parser.add_argument("--turn-s", type=float, default=10.0, help="(default 10)")
    parser.add_argument("--settle-s", type=float, default=3.0, help="(default 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        found = asyncio.run(Run(args, Path(home)).measure())
    show({"watched": way} | row for way, row in found.items())
    told = {"benchmark": "watched", **machine(), "devices": args.devices, "pages": args.pages, "ways": found}
    finish(args, told)


if __name__ == "__main__":
    main()
