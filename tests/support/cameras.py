"""Cameras of a fleet as real programs: an agent and a runtime each, and samples that come to them one by one."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from edge_agent.samples import SampleStore
from fedge.commands.broker import LocalBroker
from fedge.tasks import load_pool
from tests.support.programs import WAIT_S, Programs
from tests.support.waiting import until

TESTED: Final = 400
"""Digits on which cameras are tested, and which none of them gets."""
AT_ONCE: Final = 20
"""Samples in one request."""
PATIENCE_S: Final = 900.0
"""Longest wait for what takes half a minute on a quiet machine."""


async def seen(condition: Callable[[], object]) -> None:
    """Wait for what programs write into files."""
    await until(condition, within_s=PATIENCE_S, every_s=0.1)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)  # noqa: T201


def say_logs(folder: Path) -> None:
    """Say how each program's log ends."""
    for log in sorted(folder.glob("*.log")):
        say(f"--- the end of {log.name}\n{log.read_text()[-1500:]}")


def turn(x: NDArray[Any]) -> NDArray[Any]:
    return np.rot90(x, axes=(-2, -1)).copy()


def tensor(x: NDArray[Any]) -> dict[str, Any]:
    return {"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}


def identify(x: NDArray[Any], label: int) -> bytes:
    """What tells a sample with its label from all others."""
    return x.astype(np.float32).tobytes() + bytes([label])


@dataclass
class Camera:
    """A camera: its samples in the order in which they come, how many have come, and what it was told."""

    x: NDArray[Any]
    y: NDArray[np.int64]
    come: int
    turned: bool = False
    url: str = ""
    told: Counter[bytes] = field(default_factory=Counter)

    def see(self, x: NDArray[Any]) -> NDArray[Any]:
        """Samples as this camera sees them."""
        return turn(x) if self.turned else x

    def take(self) -> tuple[NDArray[Any], int]:
        """The next sample and its class."""
        self.come += 1
        return self.see(self.x[self.come - 1 : self.come]), int(self.y[self.come - 1])


class Cameras(Programs):
    """The programs of a fleet in a folder. `awake`: the cameras that run."""

    def __init__(self, folder: Path, broker: LocalBroker, names: Collection[str], at_home: int) -> None:
        super().__init__(folder)
        self.broker = broker
        self.shop = folder / "shop"
        digits = load_pool("digits", seed=1)
        order = np.random.default_rng(0).permutation(len(digits.y))
        x, y = digits.x[order], digits.y[order]
        self.x_test, self.y_test, self.task = x[:TESTED], y[:TESTED], digits.spec
        parts = np.array_split(np.arange(TESTED, len(y)), len(names))
        self.cameras = {name: Camera(x[part], y[part], at_home) for name, part in zip(names, parts, strict=True)}
        self.awake = set(names)
        self.at = ("--broker", f"{broker.host}:{broker.port}", "--federation", "shop")
        for name, camera in self.cameras.items():
            np.savez(folder / f"{name}.npz", x=camera.x[:at_home], y=camera.y[:at_home])
        (folder / "shop.toml").write_text('[introduction]\nstages = "0.5,1"\nsoak_s = 1.0\n')

    # ------------------------------------------------------------------------------------------------- programs

    async def start_coordinator(self, *more: object) -> None:
        settings = ("--task", "digits", "--home", self.shop, "--config", self.folder / "shop.toml", "--deadline-s", 600)
        await self.begin("coordinator", "coordinator", *self.at, *settings, "--devices", len(self.cameras), *more)

    async def start_agent(self, camera: str, *more: object) -> None:
        own = ("--id", camera, "--home", self.folder / camera, "--data", self.folder / f"{camera}.npz")
        await self.begin(camera, "agent", *self.at, "--task", "digits", *own, "--context-interval-s", 1, *more)

    async def start_runtime(self, camera: str, *more: object) -> None:
        """Start `fedge serve` on a camera that has a bundle, and note its address."""
        name, home, log = f"{camera}-serve", self.folder / camera, self.folder / f"{camera}-serve.log"
        before = log.stat().st_size if log.exists() else 0
        await seen(lambda: any((home / "bundles").glob("*/manifest.json")))
        await self.begin(name, "serve", *self.at, "--home", home, "--id", camera, "--port", 0, *more)
        await seen(lambda: "serving" in log.read_text()[before:])
        address = next(word for word in log.read_text()[before:].split() if word.startswith("http"))
        self.cameras[camera].url = f"{address.rstrip('/')}/digits"

    # ------------------------------------------------------------------------------------------------- the outside

    def summary(self) -> dict[str, Any]:
        file = self.shop / "summary.json"
        return dict(json.loads(file.read_bytes())) if file.exists() else {}

    def campaign(self) -> dict[str, Any]:
        return dict(self.summary().get("campaign") or {"number": 0, "state": ""})

    def introduction(self) -> dict[str, Any]:
        return dict(self.summary().get("introduction") or {"campaign": 0, "state": ""})

    def known(self, camera: str) -> dict[str, Any]:
        """What the coordinator knows of a camera."""
        return dict(self.summary()["fleet"][camera])

    async def campaign_ends(self, number: int, settled: int = 0) -> None:
        """Wait until a campaign has ended, and so many cameras have taken their bundle or kept their own."""

        def all_settled() -> bool:
            now = self.introduction()
            ended = now["campaign"] == number and now["state"] == "done"
            return ended and now["running"] + now["kept"] >= settled

        await seen(lambda: self.campaign()["number"] == number and self.campaign()["state"] == "resting")
        seeing = asyncio.create_task(self.keep_seeing())
        try:
            await seen(all_settled)
        finally:
            seeing.cancel()
            await asyncio.gather(seeing, return_exceptions=True)

    async def keep_seeing(self) -> None:
        """Ask all cameras about samples, again and again: a new bundle must answer some to prove itself."""
        for begin in itertools.cycle(range(0, TESTED, AT_ONCE)):
            for camera in sorted(self.awake):
                await self.ask(camera, self.x_test[begin : begin + AT_ONCE])
            await asyncio.sleep(0.5)

    async def post(self, camera: str, what: str, body: dict[str, Any]) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            asyncio.timeout(WAIT_S),
            session.post(f"{self.cameras[camera].url}/{what}", json=body) as response,
        ):
            content: dict[str, Any] = await response.json()
            assert response.status == 200, content
            return content

    async def ask(self, camera: str, x: NDArray[Any]) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """What a camera answers when this is before it, and the parameters of its last answer."""
        found: list[int] = []
        parameters: dict[str, Any] = {}
        x = self.cameras[camera].see(x)
        for i in range(0, len(x), AT_ONCE):
            body = {"inputs": [tensor(x[i : i + AT_ONCE])], "outputs": [{"name": "class"}]}
            content = await self.post(camera, "infer", body)
            (output,) = content["outputs"]
            found += output["data"]
            parameters = content["parameters"]
        return np.array(found), parameters

    async def measure_accuracy(self, camera: str) -> float:
        """A camera's accuracy on test samples as it sees them."""
        found, _ = await self.ask(camera, self.x_test)
        return float((found == self.y_test).mean())

    async def tell(self, camera: str, n: int) -> None:
        """Tell a camera's runtime the true labels of its next n samples."""
        for _ in range(n):
            await self.tell_one(camera, *self.cameras[camera].take())

    async def tell_one(self, camera: str, x: NDArray[Any], label: int) -> None:
        await self.post(camera, "feedback", {"inputs": [tensor(x)], "label": self.task.classes[label]})
        self.cameras[camera].told[identify(x, label)] = 1

    async def are_known(self) -> None:
        """Wait until the coordinator knows of all samples that the cameras were told."""

        def know_all() -> bool:
            return all(self.known(name)["n_arrived"] == self.cameras[name].come for name in self.awake)

        await seen(know_all)

    # ------------------------------------------------------------------------------------------------- what is left

    def read_samples(self, camera: str) -> Counter[bytes]:
        """The samples of a camera's store, with their labels."""
        with SampleStore(self.folder / camera, self.task) as store:
            kept = store.read_labelled()
        return Counter(identify(x, int(label)) for x, label in zip(kept.x, kept.y, strict=True))
