"""SIGTERM to a coordinator whose processes check updates: all end in time, and nothing counts twice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import msgspec
import psutil

from coordinator.fleet.mqtt.checking import SMALL
from coordinator.methods.baselines.fedavg import FedAvgState
from fedge.commands.broker import LocalBroker
from fedge.models.build import make_initial_model
from fedge.system.background import STOP_S
from fedge.tasks import load_task
from tests.support.federation import Federation, Running, same, settings
from tests.support.waiting import until

DEVICES = ("cam0", "cam1", "cam2")
ROUNDS = 4
TASK = msgspec.structs.replace(load_task("digits"), model_options={"hidden": 1000})


def checkers(coordinator: Running) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(coordinator.process.pid).children():
        with contextlib.suppress(psutil.Error):  # a process for something else, which has just ended
            if "coordinator.fleet.mqtt.checking:check_update" in child.cmdline():
                found.append(child)
    return found


def stop_the_checks(coordinator: Running) -> bool:
    """Make the processes that check stand still: they start when an update has come, and so have one to check."""
    found = checkers(coordinator)
    for child in found:
        child.send_signal(signal.SIGSTOP)
    return bool(found)


async def test_it_ends_in_time_and_the_next_one_counts_each_update_once(mosquitto: LocalBroker, tmp_path: Path) -> None:
    assert make_initial_model(TASK, 0)[0].n_params > SMALL
    async with Federation(mosquitto, tmp_path, devices=DEVICES, task=TASK) as federation:
        await federation.agents()
        federation.forked = False  # the processes that check are known by their command lines
        coordinator = await federation.coordinator(method="fedavg", rounds=ROUNDS)
        await until(lambda: stop_the_checks(coordinator))
        stopped = checkers(coordinator)
        before = federation.accepted()
        coordinator.send(signal.SIGTERM)
        async with asyncio.timeout(2 * STOP_S):  # twice, for a machine with other work
            assert await coordinator.ended() == 130
        await until(lambda: not any(child.is_running() for child in stopped))
        assert before.items() <= federation.accepted().items()

        coordinator = await federation.coordinator(method="fedavg", rounds=ROUNDS)
        assert await coordinator.ended() == 0
        assert before.items() <= federation.accepted().items()
        counts = federation.rows("SELECT count(*), min(status) FROM orders GROUP BY round, label, device_id")
        assert set(counts) == {(1, "accepted")}
        assert same(federation.state(FedAvgState), await federation.undisturbed("fedavg", settings(ROUNDS)))
