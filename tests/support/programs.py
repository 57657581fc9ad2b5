"""The programs of a federation, as a user starts them."""

from __future__ import annotations

import asyncio
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tests.support import warm

WAIT_S = 300.0


class Programs:
    """Programs that run, and their logs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, Process] = {}

    async def fedge(self, *words: object, codes: Collection[int] = (0,)) -> str:
        """What a command says that ends with one of these exit codes.

        Raises:
            RuntimeError: it failed.
        """
        process = await self._start(*words)
        said, _ = await process.communicate()
        if process.returncode not in codes:
            raise RuntimeError(f"fedge {words[0]} ended with {process.returncode}: {said.decode()}")
        return said.decode()

    async def sees(self, text: str, *words: object) -> str:
        """Ask until a command says this; the line with it.

        Raises:
            TimeoutError: it never does.
        """
        end = time.monotonic() + WAIT_S
        while text not in (said := await self.fedge(*words, codes=(0, 1))):  # 1: something needs attention
            if time.monotonic() > end:
                raise TimeoutError(f"fedge {words[0]} does not say {text!r}: {said}")
            await asyncio.sleep(0.2)
        return next(line.strip() for line in said.splitlines() if text in line)

    async def begin(self, name: str, *words: object) -> None:
        """Start a program that stays; its words go into a log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = await self._start(*words, stdout=log.fileno())

    async def end(self, name: str, by: signal.Signals = signal.SIGTERM) -> None:
        process = self.running.pop(name)
        with suppress(ProcessLookupError):
            process.send_signal(by)
        await process.wait()

    async def kill_all(self) -> None:
        for name in list(self.running):
            await self.end(name, signal.SIGKILL)

    async def page(self, *words: object) -> str:
        """Start `fedge ui`; its URL."""
        await self.begin("ui", "ui", "--port", 0, *words)
        log = self.folder / "ui.log"
        async with asyncio.timeout(WAIT_S):
            while "http" not in log.read_text():  # noqa: ASYNC110 - files of another process tell nobody
                await asyncio.sleep(0.05)
        return next(word for word in log.read_text().split() if word.startswith("http"))

    async def _start(
        self, *words: object, stdout: object = PIPE, stderr: object = asyncio.subprocess.STDOUT
    ) -> Process:
        command = warm.command("--log-level", "warning", *map(str, words), forked=True)
        return await asyncio.create_subprocess_exec(
            *command,
            stdout=stdout,  # type: ignore[arg-type]
            stderr=stderr,  # type: ignore[arg-type]
            cwd=warm.ROOT,
            env=warm.environment(),
        )
