"""Tells a command and a webhook once of each new item that needs attention.

What was told is kept in the coordinator's home, so a restart repeats nothing. An item that has been gone for a while is
new when it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from coordinator.watch.state import read_summary
from fedge.errors import ConfigError, StoreError
from fedge.system.files import read_kept, write_atomically
from fedge.system.logs import Lines

log = logging.getLogger("fedge.attention")

LOOK_S: Final = 2.0
"""Pause between two looks at what needs attention."""
GONE_S: Final = 300.0
"""Time for which an item must be gone to be new when it comes back, so that one that flickers is told once."""
ANSWER_S: Final = 30.0
"""Time limit for the command and for the webhook's answer."""
AGAIN_S: Final = 60.0
"""Pause before an item whose command or webhook failed is told again."""
Item = Mapping[str, Any]


def make_key(item: Item) -> str:
    """Make the name by which an item counts as the same."""
    return f"{item['kind']} {item['device']}"


def update_told(told: Mapping[str, float], items: Sequence[Item], now: float) -> dict[str, float]:
    """Return when each told item was last there; those that have been gone for `GONE_S` are forgotten."""
    here = {make_key(item) for item in items}
    return {key: now if key in here else at for key, at in told.items() if key in here or now - at < GONE_S}


class Notifier:
    """A notifier, which looks at a coordinator's home.

    Args:
        home: the coordinator's home.
        name: of the process, which keeps what it has told in HOME/attention-NAME.json.
        command: gets an item as JSON on its standard input, and its fields in its environment; None for no command.
        webhook: the URL that gets an item as JSON by POST; None for none.

    Raises:
        ConfigError: the webhook is no URL of http or https, or the command cannot be split into words.
    """

    def __init__(self, home: Path, name: str, command: str | None, webhook: str | None) -> None:
        if webhook is not None and (
            urlsplit(webhook).scheme not in {"http", "https"} or not urlsplit(webhook).hostname
        ):
            raise ConfigError("attention_webhook: give http://HOST/PATH or https://HOST/PATH")
        try:
            self._command = shlex.split(command) if command else []
        except ValueError as error:
            raise ConfigError(f"on_attention: {error}") from error
        self._home, self._webhook = home, webhook
        self._file = home / f"attention-{name}.json"
        self._told: dict[str, float] | None = None
        self._again_at: dict[str, float] = {}
        self._lines = Lines()

    async def notify_endlessly(self) -> None:
        """Tell each new item, until cancelled."""
        while True:
            try:
                await self.notify_once(time.time())
            except (ConfigError, StoreError) as error:
                self._lines.warning(log, "event=cannot_notify reason=%r", str(error))
            await asyncio.sleep(LOOK_S)

    async def notify_once(self, now: float) -> None:
        """Tell what is new.

        Raises:
            ConfigError: there is no summary yet.
            StoreError: the summary cannot be read, or what was told cannot be kept.
        """
        summary = await asyncio.to_thread(read_summary, self._home)
        told = self._read_told()
        later = update_told(told, summary["attention"], now)
        for item in summary["attention"]:
            key = make_key(item)
            if key in later or now < self._again_at.get(key, 0.0):
                continue
            if await self._send_item({"federation": summary["federation"], **item}):
                later[key] = now
                self._save(later)
            else:
                self._again_at[key] = now + AGAIN_S
        if later.keys() != told.keys():
            self._save(later)
        self._told = later

    def _read_told(self) -> dict[str, float]:
        if self._told is None:
            self._told = read_kept(self._file, msgspec.json.Decoder(dict[str, float]).decode) or {}
        return self._told

    def _save(self, told: Mapping[str, float]) -> None:
        write_atomically(self._file, msgspec.json.encode(told))

    async def _send_item(self, item: Item) -> bool:
        """Tell an item; return whether command and webhook took it."""
        body = msgspec.json.encode(item)
        try:
            if self._command:
                await self._run_command(body, item)
            if self._webhook is not None:
                await asyncio.to_thread(self._send_body, self._webhook, body)
        except (OSError, ValueError) as error:  # urllib's errors are OSErrors
            self._lines.warning(log, "event=cannot_notify reason=%r", str(error) or type(error).__name__)
            return False
        return True

    async def _run_command(self, body: bytes, item: Item) -> None:
        """Run the command.

        Raises:
            OSError: it cannot be started, fails, or takes too long.
        """
        given = {f"FEDGE_ATTENTION_{name.upper()}": str(value).replace("\0", "") for name, value in item.items()}
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, env=os.environ | given
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                await process.communicate(body)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            raise OSError(f"{self._command[0]} ended with {process.returncode}")

    @staticmethod
    def _send_body(url: str, body: bytes) -> None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - checked above
        with urllib.request.urlopen(request, timeout=ANSWER_S):  # noqa: S310
            pass


@contextlib.asynccontextmanager
async def notify(home: Path, name: str, command: str | None, webhook: str | None) -> AsyncIterator[None]:
    """Have a notifier work while the context is open, if there is somebody to tell. Raise as `Notifier` does."""
    if command is None and webhook is None:
        yield
        return
    running = asyncio.create_task(Notifier(home, name, command, webhook).notify_endlessly())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
