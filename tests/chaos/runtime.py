"""A device that answers while everything else fails, and is given one release after the other."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

import aiohttp

from deploy.commands.install import install_bundle
from deploy.updates.slots import lock_slots
from fedge.bundle.manifest import read_bundle
from fedge.commands.broker import find_free_port
from tests.chaos.programs import Program
from tests.deploy.bundles import variant
from tests.deploy.served import body, golden

EXPECTED: Final = {0, 2, 4, 5, -signal.SIGKILL}
"""Exit codes of `fedge install`: done, HOME in use, the disk was full, refused after too many kills, killed."""
PATIENCE_S: Final = 60.0
PAUSE_S: Final = 2.0
"""Between two releases: to examine one takes a processor for about as long."""
X: Final = golden()["x"]
CLASSES: Final = golden()["probabilities"].argmax(1).tolist()


class Runtime:
    """`fedge serve` with a home of its own, or an agent's; a bundle lies there from the beginning.

    `name`: of the program; `wrong`: what it should not do.
    """

    def __init__(
        self, name: str, home: Path, release: int, programs: MutableMapping[str, Program], n: Counter[str]
    ) -> None:
        self.wrong: list[str] = []
        self._name = name
        self._folder = home.parent
        self._home = home
        self._programs = programs
        self._n = n
        self._port = find_free_port("127.0.0.1")
        self._known: set[str] = set()
        with lock_slots(self._home) as slots:
            install_bundle(self._home, slots, read_bundle(self._bundle(release)))

    @property
    def words(self) -> list[object]:
        """Of its command line."""
        return ["serve", "--home", self._home, "--port", self._port]

    def _bundle(self, release: int) -> Path:
        folder = variant(self._folder / f"{self._home.name}-release-{release}", release=release)
        self._known.add(read_bundle(folder).digest)
        return folder

    async def install(self) -> None:
        """Hand over releases, each until it answers or is refused, until cancelled."""
        for release in itertools.count(2):
            bundle, code = self._bundle(release), None
            while code not in {0, 5}:
                await asyncio.sleep(PAUSE_S)
                words = ["install", "--home", self._home, bundle]
                program = self._programs["install"] = Program(words, self._folder / "install.log")
                while (code := program.ended) is None:  # noqa: ASYNC110 - programs tell nobody
                    await asyncio.sleep(0.05)
                if code not in EXPECTED:
                    self.wrong.append(f"install ended with {code}: {program.log.read_text()[-2000:]}")
            self._n["installed" if code == 0 else "refused"] += 1

    async def ask(self) -> None:
        """Ask all the time, until cancelled: whoever has answered once does so until it ends."""
        url, timeout = f"http://127.0.0.1:{self._port}/v2/models/digits/infer", aiohttp.ClientTimeout(PATIENCE_S)
        ready: Program | None = None
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                await asyncio.sleep(0.05)
                program = self._programs.get(self._name)
                try:
                    async with session.post(url, data=body(X)) as response:
                        answer = await response.json()
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if program is ready is not None and program.running:
                        self.wrong.append(f"no answer: {error!r}")
                    continue
                ready = program
                self._n["answers"] += 1
                if trouble := self._trouble(response.status, answer):
                    self.wrong.append(trouble)

    def _trouble(self, status: int, answer: dict[str, Any]) -> str:
        if status != 200:
            return f"answer {status}: {answer}"
        told = {output["name"]: output["data"] for output in answer["outputs"]}
        if answer["parameters"]["bundle"] not in self._known or told["class"] != CLASSES:
            return f"an answer of no bundle of ours: {answer}"
        return ""
