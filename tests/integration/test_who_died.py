"""Broker, coordinator, agent and `fedge serve` are killed in turn, at rest and in a round, and five places say so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from click.testing import CliRunner

from coordinator.page.cli import devices
from coordinator.service.cli import status
from fedge.commands.broker import LocalBroker, find_free_port, find_mosquitto, make_mosquitto_config
from fedge.tasks import write_task
from fedge.wire.connection.broker import Inbound
from fedge.wire.transport import Transport
from tests.homes.make import TASK
from tests.support.broker import local_broker, transport
from tests.support.page import put_together
from tests.support.programs import Programs

WITHIN_S = 15.0
"""By then everything says it."""
PATIENCE_S = 240.0

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")


class Fleet(Programs):
    """Two devices, of which cam1 serves, their coordinator and their broker; a page, and a broker of Home Assistant."""

    def __init__(self, folder: Path, home_assistant: LocalBroker) -> None:
        super().__init__(folder)
        self.shop, self._port = folder / "shop", find_free_port("127.0.0.1")
        self._home_assistant = f"mqtt://{home_assistant.host}:{home_assistant.port}"
        self.url = ""
        self.told: dict[str, bytes] = {}  # to Home Assistant
        self.at = ("--broker", f"127.0.0.1:{self._port}", "--federation", "shop")
        write_task(TASK, folder / "task.json")
        rng = np.random.default_rng(0)
        y = np.arange(60) % 3
        x = (rng.normal(size=(60, 6)) + 3 * np.eye(6)[y]).astype(np.float32)
        for device in ("cam1", "cam2"):
            np.savez(folder / f"{device}.npz", x=x, y=y)
        config = f"listener {self._port} 127.0.0.1\nallow_anonymous true"
        (folder / "mosquitto.conf").write_text(make_mosquitto_config(config))

    async def start(self, name: str, rounds: int = 1) -> None:
        """Start a program of this name (again)."""
        task = ("--task", self.folder / "task.json")
        match name:
            case "broker":
                words = (find_mosquitto() or "", "-c", str(self.folder / "mosquitto.conf"))
                self.running[name] = await asyncio.create_subprocess_exec(*words)
                await asyncio.sleep(0.5)
            case "coordinator":
                own = (
                    "--method",
                    "fedavg",
                    "--rounds",
                    rounds,
                    "--devices",
                    2,
                    "--local-steps",
                    1,
                    "--deadline-s",
                    600,
                )
                await self.begin(name, "coordinator", *self.at, *task, "--home", self.shop, *own)
            case "serve":
                own = ("--id", "cam1", "--home", self.folder / "cam1", "--port", 0)
                await self.begin(name, "serve", *self.at, *own)
            case device:
                own = ("--id", device, "--home", self.folder / device, "--data", self.folder / f"{device}.npz")
                await self.begin(name, "agent", *self.at, *task, *own, "--keepalive-s", 600)

    async def watch(self) -> None:
        """Start the page, which also tells Home Assistant."""
        self.url = await self.page("--home", self.shop, "--home-assistant", self._home_assistant)

    async def read(self) -> dict[str, Any]:
        """What the five places say."""
        async with aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(30)) as http:
            tables = (await (await http.get("api/state")).json())["tables"]
            metrics = await (await http.get("metrics")).text()
        commands = {
            name: await asyncio.to_thread(
                CliRunner().invoke, command, ["--home", str(self.shop)], standalone_mode=False
            )
            for name, command in (("status", status), ("devices", devices))
        }
        home = {name: json.loads(self.told[f"fedge-home/shop/{name}"] or b"{}") for name in ("server", "devices/cam1")}
        (state,), cam1 = put_together(tables["fleet"]).values(), put_together(tables["devices"])["cam1"]
        return {
            "state": state,
            "cam1": cam1,
            "kinds": {item["kind"] for item in state["attention"]},
            "metrics": {found[1] for found in re.finditer(r"^(fedge_\S+ [01])\.0$", metrics, re.MULTILINE)},
            "status": (commands["status"].return_value, commands["status"].output),
            "devices": commands["devices"].output,
            "server": home["server"],
            "home": home["devices/cam1"],
        }

    async def until(self, says: Callable[[Mapping[str, Any]], bool], what: str, within_s: float) -> float:
        """Read until all places say it; the seconds that this took."""
        began, said = time.monotonic(), {}
        while time.monotonic() - began < within_s:
            with contextlib.suppress(KeyError):  # Home Assistant was told nothing yet
                said = await self.read()
                if says(said):
                    return time.monotonic() - began
            await asyncio.sleep(0.5)
        raise AssertionError(f"{what}, {within_s} s later: {said}")


def all_is_well(said: Mapping[str, Any]) -> bool:
    return (
        not said["kinds"]
        and said["state"]["coordinator"]["state"] == "running"
        and (said["cam1"]["presence"], said["cam1"]["serving"]) == ("online", "serving")
        and {'fedge_coordinator_up{federation="shop"} 1', 'fedge_broker_up{federation="shop"} 1'} <= said["metrics"]
        and said["status"][0] == 0
        and (said["server"]["coordinator"], said["server"]["broker"]) == ("ON", "ON")
        and (said["home"]["online"], said["home"]["serving"]) == ("ON", "ON")
    )


def serve_is_dead(said: Mapping[str, Any]) -> bool:
    return (
        said["cam1"]["serving"] == "down"
        and said["kinds"] == {"serve-down"}
        and any('kind="serve-down"' in line for line in said["metrics"])
        and said["status"][0] == 1
        and "cam1: its fedge serve is down" in said["status"][1]
        and "its fedge serve is down" in said["devices"]
        and said["home"]["serving"] == "OFF"
    )


def agent_is_dead(said: Mapping[str, Any]) -> bool:
    return (
        said["cam1"]["presence"] == "offline"
        and any('state="offline"} 1' in line for line in said["metrics"])
        and "cam1: offline" in said["status"][1]
        and re.search(r"^cam1 +offline", said["devices"], re.MULTILINE) is not None
        and said["home"]["online"] == "OFF"
    )


def broker_is_dead(said: Mapping[str, Any]) -> bool:
    return (
        said["kinds"] == {"broker-unreachable"}
        and said["cam1"]["presence"] == said["cam1"]["serving"] == "unknown"
        and 'fedge_broker_up{federation="shop"} 0' in said["metrics"]
        and said["status"][0] == 1
        and "does not reach the broker" in said["status"][1]
        and "does not reach the broker" in said["devices"]
        and (said["server"]["broker"], said["home"]["online"]) == ("OFF", None)
    )


def coordinator_is_dead(said: Mapping[str, Any]) -> bool:
    return (
        said["kinds"] == {"coordinator-silent"}
        and said["cam1"]["presence"] == said["cam1"]["serving"] == "unknown"
        and 'fedge_coordinator_up{federation="shop"} 0' in said["metrics"]
        and said["status"][0] == 1
        and "gives no sign of life" in said["status"][1]
        and "gives no sign of life" in said["devices"]
        and (said["server"]["coordinator"], said["home"]["online"]) == ("OFF", None)
    )


DEATHS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "serve": serve_is_dead,
    "cam1": agent_is_dead,
    "broker": broker_is_dead,
    "coordinator": coordinator_is_dead,
}


@contextlib.asynccontextmanager
async def listening(home_assistant: LocalBroker, told: dict[str, bytes]) -> AsyncIterator[None]:
    """Home Assistant, as far as it matters: a client that listens to its broker."""

    async def note(inbound: Inbound) -> None:
        told[inbound.topic] = inbound.payload

    listener: Transport = transport(home_assistant, "home-assistant")
    await listener.subscribe("fedge-home/#", note)
    async with listener:
        yield


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """At rest, after one round."""
    async with local_broker("mosquitto", tmp_path / "ha") as home_assistant:
        found = Fleet(tmp_path, home_assistant)
        async with listening(home_assistant, found.told):
            try:
                for name in ("broker", "cam1", "cam2", "coordinator"):
                    await found.start(name)
                async with asyncio.timeout(PATIENCE_S):
                    while not any((tmp_path / "cam1").glob("bundles/*/manifest.json")):  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                await found.start("serve")
                await found.watch()
                yield found
            finally:
                with contextlib.suppress(KeyError):
                    found.running["cam2"].send_signal(signal.SIGCONT)
                await found.kill_all()


async def kill_each(fleet: Fleet, rounds: int, when: str) -> None:
    """Kill each program, see that this is said, and start it again."""
    await fleet.until(all_is_well, f"{when}, all is well", PATIENCE_S)
    for name, is_dead in DEATHS.items():
        await fleet.end(name, signal.SIGKILL)
        took_s = await fleet.until(is_dead, f"{when}, {name} was killed", WITHIN_S)
        print(f"{when}, {name}: told everywhere after {took_s:.1f} s")  # noqa: T201 - for whoever measures
        await fleet.start(name, rounds)
        await fleet.until(all_is_well, f"{when}, {name} was started again", PATIENCE_S)


async def test_who_died_is_said_in_five_places_at_rest_and_in_a_round(fleet: Fleet) -> None:
    await kill_each(fleet, 1, "at rest")
    await fleet.end("coordinator")
    fleet.running["cam2"].send_signal(signal.SIGSTOP)  # so that the round does not end
    await fleet.start("coordinator", rounds=2)
    await fleet.until(lambda said: "is under way" in said["status"][1], "a round has begun", PATIENCE_S)
    await kill_each(fleet, 2, "in a round")
