"""Two bridged brokers: devices on either side take part in the same run; coordinator and intake are on one of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from benchmarks.load import TOPICS, Device
from coordinator.service.checks import make_first_model
from fedge.commands.broker import LocalBroker
from fedge.tasks import load_task
from tests.support.broker import settings
from tests.support.federation import Running, words
from tests.support.waiting import until

N, ROUNDS = 6, 3


class Edge(LocalBroker):
    """A broker on a site, bridged to the one in the middle as docs/scale.md says."""

    def __init__(self, centre: LocalBroker, home: Path) -> None:
        super().__init__("mosquitto", home=home)
        documented = (Path(__file__).parents[2] / "docs/scale.md").read_text()
        bridge = documented.partition("```conf\n")[2].partition("```")[0]
        self._bridge = bridge.replace("edge_server:1883", f"{centre.host}:{centre.port}").replace("FED", "load")

    def _make_command(self, home: Path) -> list[str]:
        command = super()._make_command(home)
        with (home / "mosquitto.conf").open("a") as config:
            config.write(self._bridge)
        return command


async def test_devices_on_either_side_of_a_bridge_take_part(mosquitto_program: str, tmp_path: Path) -> None:
    task = load_task("digits")
    layout, _ = make_first_model(task, 0)
    async with contextlib.AsyncExitStack() as stack:
        centre = await stack.enter_async_context(LocalBroker("mosquitto", home=tmp_path / "centre"))
        edge = await stack.enter_async_context(Edge(centre, tmp_path / "edge"))
        flags = {
            "broker": f"{centre.host}:{centre.port}", "federation": TOPICS.federation, "home": tmp_path / "home",
            "task": "digits", "method": "fedavg", "rounds": ROUNDS, "devices": N, "deadline_s": 60, "once": True,
        }  # fmt: skip
        coordinator = await Running.start(tmp_path / "coordinator.log", "coordinator", *words(flags))
        stack.push_async_callback(coordinator.kill)
        await until((tmp_path / "home" / "summary.json").exists)
        intake = await Running.start(tmp_path / "intake.log", "coordinator", *words({**flags, "role": "intake"}))
        stack.push_async_callback(intake.kill)
        await intake.logged("event=connected")
        devices = []
        for i in range(N):
            broker = settings(edge if i % 2 else centre)
            devices.append(Device(f"d{i}", broker, task.compute_fingerprint(), layout, tmp_path / "devices"))
            await devices[-1].start()
            stack.push_async_exit(devices[-1].transport)
        assert await coordinator.ended() == 0
        assert [len(device.accepted) for device in devices] == [ROUNDS + 1] * N
