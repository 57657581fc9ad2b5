"""What devices report begins campaigns, with programs as processes and a real broker: answers that turn out wrong, rows
appended to a file, and inputs that drift; and people read why.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from coordinator.page.campaign_cli import campaign
from coordinator.service.between import LOOK_S
from fedge.commands.broker import LocalBroker
from fedge.tasks import load_pool
from tests.deploy.serve_process import process
from tests.support.federation import NAME, Federation
from tests.support.waiting import until

DEVICES = ("cam0", "cam1", "cam2")
DRIFTING = 0.5
"""Two of three devices."""
NEW_SAMPLES = 60
"""More than all labels of the feedback."""
FALL = 0.05
RIGHT, WRONG = 22, 10
"""Labels: those of fewer than 20 answers of a device tell no accuracy."""
CONFIG = f"""
[coordinator]
when = ["new-samples={NEW_SAMPLES}", "drift={DRIFTING}", "score-at-work=-{FALL}"]

[introduction]
stages = "1"
soak_s = 0.0
"""


class Fleet:
    """Coordinator, agents and runtimes, and samples that no device has."""

    def __init__(self, federation: Federation, sessions: dict[str, aiohttp.ClientSession]) -> None:
        self.federation = federation
        self.sessions = sessions
        pool = load_pool("digits", seed=1)
        self.x, self.y = pool.x[-400:], pool.y[-400:]
        self._given = 0

    def draw(self, n: int) -> NDArray[Any]:
        """Samples that nobody has seen."""
        self._given += n
        return self.x[self._given - n : self._given]

    async def post(self, device: str, what: str, x: NDArray[Any], **fields: object) -> dict[str, Any]:
        tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.astype(float).ravel().tolist()}
        async with self.sessions[device].post(f"/v2/models/digits/{what}", json={"inputs": [tensor], **fields}) as said:
            content: dict[str, Any] = await said.json()
            assert said.status == 200, content
            return content

    async def answer(self, device: str, x: NDArray[Any]) -> list[int]:
        content = await self.post(device, "infer", x, outputs=[{"name": "class"}])
        return [int(k) for k in content["outputs"][0]["data"]]

    async def tell(self, device: str, n: int, *, off_by: int) -> None:
        """Tell a device the classes of its next answers: those that it named, or others."""
        x = self.draw(n)
        for one, named in zip(x, await self.answer(device, x), strict=True):
            await self.post(device, "feedback", one[np.newaxis], label=str((named + off_by) % 10))

    def append_rows(self, device: str, n: int) -> None:
        """Append samples for training to a device's file, as a program of its owner does."""
        file = self.federation.data(device)
        with np.load(file) as arrays:
            rows = dict(arrays)
        x = self.draw(n).reshape(n, *rows["x"].shape[1:]).astype(rows["x"].dtype)
        added = {"x": x, "y": self.y[self._given - n : self._given], "split": np.zeros(n), "sensitive": np.zeros(n)}
        new = file.with_suffix(".new.npz")
        np.savez(new, **{k: np.concatenate([rows[k], added[k].astype(rows[k].dtype)]) for k in rows})
        new.replace(file)

    def read(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.federation.home / "summary.json").read_bytes())
        return summary

    def rests_after(self, number: int) -> bool:
        found = self.read()["campaign"]
        return (found["number"], found["state"]) == (number, "resting")

    def has_begun(self, number: int) -> bool:
        return bool(self.read()["campaign"]["number"] == number)

    def status(self) -> str:
        """What `fedge campaign status` says."""
        said = CliRunner().invoke(campaign, ["status", "--home", str(self.federation.home)], catch_exceptions=False)
        assert said.exit_code == 0
        return " ".join(said.output.split())


async def serve(stack: AsyncExitStack, federation: Federation, devices: Sequence[str]) -> dict[str, Any]:
    """A session with each device's runtime."""
    at = ("--broker", f"{federation.broker.host}:{federation.broker.port}", "--federation", NAME)
    sessions = {}
    for device in devices:
        running = process("--home", federation.folder / device, "--id", device, *at)
        _, _, sessions[device] = await stack.enter_async_context(running)
    return sessions


@pytest.fixture
async def fleet(mosquitto: LocalBroker, tmp_path: Path) -> AsyncIterator[Fleet]:
    """At rest after its first campaign, served, and ready for others."""
    config = tmp_path / "server.toml"
    config.write_text(CONFIG)
    async with AsyncExitStack() as stack:
        federation = await stack.enter_async_context(Federation(mosquitto, tmp_path, devices=DEVICES))
        for device in DEVICES:
            (tmp_path / device).mkdir()
            (tmp_path / device / "egress.toml").write_text('[egress]\nallow = "personal"\n')
        await federation.agents()
        coordinator = await federation.coordinator(method="fedavg", rounds=3, once=False, config=config)
        await coordinator.said("resting")
        yield Fleet(federation, await serve(stack, federation, DEVICES))


async def test_wrong_answers_new_rows_and_drift_each_begin_a_campaign_that_says_why(fleet: Fleet) -> None:
    await fleet.tell("cam0", RIGHT, off_by=0)
    await until(lambda: (fleet.read()["fleet"]["cam0"]["at_work"] or {}).get("recent") == 1.0, every_s=0.1)
    await asyncio.sleep(4 * LOOK_S)  # the coordinator has looked at it
    await fleet.tell("cam0", WRONG, off_by=1)
    await until(lambda: fleet.has_begun(2), every_s=0.1)
    assert "score at work fell from 1.000 to 0." in fleet.status()
    await until(lambda: fleet.rests_after(2), every_s=0.1)

    fleet.append_rows("cam1", NEW_SAMPLES + 5)
    await until(lambda: fleet.has_begun(3), every_s=0.1)
    assert re.search(r"campaign 3, .*: \d+ new samples on [12] devices?", fleet.status())
    await until(lambda: fleet.rests_after(3), every_s=0.1)

    inverted = fleet.x.max() - fleet.x[:100]
    while not fleet.has_begun(4):
        for device in ("cam1", "cam2"):
            await fleet.answer(device, inverted)
    assert "2 of 3 devices with drift: cam1, cam2" in fleet.status()
    await until(lambda: fleet.rests_after(4), every_s=0.1)
    history = fleet.read()["campaign"]["history"]
    assert [each["number"] for each in history] == [1, 2, 3, 4]
