"""`fedge serve` as a process on a free port, and requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from .served import body, golden

X = golden()["x"]
PATIENCE = 300
"""Seconds for a step of the process: emulated processors are slow. Elsewhere pytest's own limit comes first."""


@asynccontextmanager
async def process(
    *arguments: object, **environment: str
) -> AsyncIterator[tuple[Process, dict[str, Any], aiohttp.ClientSession]]:
    """The process, what it says when it serves, and a client session to its URL; killed on the way out.

    Its log is printed at the end: pytest shows it where a test fails.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fedge", "serve", "--json", "--port", "0", *map(str, arguments),
        stdout=PIPE, stderr=PIPE, env=os.environ | environment,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        line = await asyncio.wait_for(child.stdout.readline(), PATIENCE)
        assert line, (await child.stderr.read()).decode()
        said = json.loads(line)
        assert said["event"] == "serving"
        async with aiohttp.ClientSession(said["url"], timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
            yield child, said, session
    finally:
        if child.returncode is None:
            child.kill()
        _, log = await child.communicate()
        sys.stderr.write(f"{log.decode()}ended with {child.returncode}\n")


async def ask(session: aiohttp.ClientSession, model: str, **fields: object) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer to the golden samples."""
    async with session.post(f"/v2/models/{model}/infer", data=body(X, **fields)) as response:
        return response.status, await response.json()
