"""kill -9 of an agent, at every stage of an order and at random: nothing is lost, nothing is done or counted twice.

Real broker, real agent processes. The other side of the wire keeps a strict book: the first report of an order counts,
and every later one must be equal to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fedge.commands.broker import LocalBroker
from fedge.steps.contract import decode_result
from fedge.steps.training.train import Trained
from fedge.system.background import STOP_S
from fedge.wire.messages import BlobRef, Order, Presence, Report
from tests.support.broker import local_broker
from tests.support.peer import WAIT_S, Peer, action_of, order_of, train
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
POLL_S = 0.02
RESEND_S = 0.3


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


async def start(broker: LocalBroker, home: Path) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.agent_process", broker.host, str(broker.port), str(home)), cwd=ROOT
    )


async def kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def alike(reports: Iterable[Report]) -> set[Report]:
    """What they say, whenever it was said."""
    return {replace(report, again=0) for report in reports}


@asynccontextmanager
async def started(broker: LocalBroker, home: Path) -> AsyncIterator[Process]:
    process = await start(broker, home)
    try:
        yield process
    finally:
        await kill(process)


def executions(home: Path) -> list[str]:
    path = home / "executions"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("signals", [1, 2])
async def test_sigterm_ends_an_agent_in_time_though_its_work_does_not_look(
    broker: LocalBroker, home: Path, tmp_path: Path, signals: int
) -> None:
    for name in ("hold", "deaf"):
        (home / name).touch()
    async with Peer(broker, tmp_path) as peer, started(broker, home) as process:
        await peer.presence(Presence.ONLINE)
        order = order_of(train(peer.model()))
        await peer.send(order)
        await until(lambda: executions(home) == [order.id])
        for _ in range(signals):
            process.terminate()
            await asyncio.sleep(0.5)  # two at once count as one
        async with asyncio.timeout(STOP_S + 1 if signals == 1 else STOP_S - 1.5):
            assert await process.wait() == 130
        for name in ("hold", "deaf"):
            (home / name).unlink()
        async with started(broker, home):
            await settle(peer, order)
        assert executions(home) == [order.id] * 2


@pytest.mark.parametrize("role", ["agent", "coordinator"])
@pytest.mark.parametrize("signals", [1, 2])
async def test_sigterm_ends_who_waits_for_a_broker_that_says_nothing(tmp_path: Path, role: str, signals: int) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 8, 8), np.float32), y=np.arange(20) % 10)
    own = ("--id", "cam0", "--data", tmp_path / "d.npz") if role == "agent" else ("--method", "fedavg")
    where = ("--broker", f"127.0.0.1:{server.getsockname()[1]}", "--federation", "f", "--task", "digits")
    command = (sys.executable, "-m", "fedge", role, *where, "--home", tmp_path / role, *own)
    process = await asyncio.create_subprocess_exec(*map(str, command), cwd=ROOT)
    try:
        async with asyncio.timeout(WAIT_S):
            silent, _ = await asyncio.get_running_loop().sock_accept(server)
        with silent:
            for _ in range(signals):
                with contextlib.suppress(ProcessLookupError):  # one was enough
                    os.kill(process.pid, signal.SIGTERM)  # `process.terminate` could take its exit code away
                await asyncio.sleep(0.1)
            async with asyncio.timeout(STOP_S + 1):
                assert await process.wait() == 130
    finally:
        await kill(process)
        server.close()


async def settle(peer: Peer, order: Order) -> Trained:
    """Bring one order to its end as a coordinator would; returns what counts."""
    report = await peer.report_of(order)
    result = decode_result(report, action_of(order))
    assert isinstance(result, Trained)
    await peer.fetch_update("pi", result.update)
    await peer.ack(order)
    return result


@pytest.mark.smoke
async def test_in_the_middle_of_training(broker: LocalBroker, tmp_path: Path, home: Path) -> None:
    (home / "hold").touch()
    async with Peer(broker, tmp_path) as peer:
        async with started(broker, home):
            await peer.presence(Presence.ONLINE)
            order = order_of(train(peer.model()))
            await peer.send(order)
            await until(lambda: executions(home) == [order.id])
        (home / "hold").unlink()
        async with started(broker, home):  # nobody sends the order again: it was durable
            await settle(peer, order)
            assert executions(home) == [order.id] * 2
            await until(lambda: not list((home / "outbox" / "orders").iterdir()))
        assert len(alike(peer.reports)) == 1


async def test_in_the_middle_of_fetching(tmp_path: Path, home: Path) -> None:
    async with local_broker("auto", tmp_path) as broker, Peer(broker, tmp_path) as peer:
        model = peer.model(3_000_000)
        hidden = tmp_path / "hidden"
        peer.sent.get_path(model.digest).rename(hidden)
        async with started(broker, home):
            await peer.presence(Presence.ONLINE)
            order = order_of(train(model))
            await peer.send(order)
            await peer.until(lambda: peer.wants[model.digest] >= 1)
        hidden.rename(peer.sent.get_path(model.digest))
        async with started(broker, home):
            result = await settle(peer, order)
            assert result.update.size_bytes == 3_000_000
        assert executions(home) == [order.id]


async def test_between_report_and_acknowledgement(broker: LocalBroker, tmp_path: Path, home: Path) -> None:
    async with Peer(broker, tmp_path) as peer:
        async with started(broker, home):
            await peer.presence(Presence.ONLINE)
            order = order_of(train(peer.model()))
            await peer.send(order)
            first = await peer.report_of(order)
        peer.reports.clear()
        async with started(broker, home):
            await settle(peer, order)
        assert alike(peer.reports) == {replace(first, again=0)}
        assert executions(home) == [order.id]


async def test_after_the_acknowledgement_a_late_copy_of_the_order_is_ignored(tmp_path: Path, home: Path) -> None:
    async with local_broker("auto", tmp_path) as broker, Peer(broker, tmp_path) as peer:
        async with started(broker, home):
            await peer.presence(Presence.ONLINE)
            order, other = (order_of(train(peer.model()), f"r.{n}.s.pi") for n in (1, 2))
            await peer.send(order)
            await settle(peer, order)
            await until(lambda: (home / "outbox" / "acked").exists())
        peer.statuses.clear()
        async with started(broker, home):
            await peer.presence(Presence.ONLINE)
            await peer.send(order)
            await peer.send(other)
            await settle(peer, other)
        assert executions(home) == [order.id, other.id]


async def test_the_last_will_tells_of_the_death(tmp_path: Path, home: Path) -> None:
    async with local_broker("amqtt", tmp_path) as broker, Peer(broker, tmp_path) as peer:  # 3.1.1: without delay
        async with started(broker, home):
            await peer.presence(Presence.ONLINE)
        await peer.presence(Presence.OFFLINE)
        assert {status.device_id for status in peer.statuses} == {"pi"}


async def test_killed_again_and_again_every_order_counts_once(tmp_path: Path, home: Path) -> None:
    """Ten orders, repeated until each has its report, while the agent is killed at random moments."""
    rng = random.Random(7)
    async with local_broker("auto", tmp_path) as broker, Peer(broker, tmp_path) as peer:
        orders = [order_of(train(peer.model(100_000)), f"r.{n}.train.pi", in_s=120.0) for n in range(10)]
        counted: dict[str, BlobRef] = {}

        async def coordinate() -> None:
            for order in orders:
                sending = asyncio.create_task(repeat(peer, order))
                counted[order.id] = (await settle(peer, order)).update
                sending.cancel()

        coordinating = asyncio.create_task(coordinate())
        for _ in range(5):
            async with started(broker, home):
                await asyncio.wait([coordinating], timeout=rng.uniform(0.4, 1.2))
        async with started(broker, home):
            await coordinating
            async with asyncio.timeout(WAIT_S):
                while list((home / "outbox" / "orders").iterdir()):
                    for order in orders:  # an acknowledgement that a killed agent missed is said again
                        await peer.ack(order)
                    await asyncio.sleep(POLL_S)
        for order in orders:
            reports = [report for report in peer.reports if report.order_id == order.id]
            assert len(alike(reports)) == 1, "two reports of one order"
            model = peer.sent.get(action_of(order).starts[0].model.digest)  # type: ignore[attr-defined]
            assert peer.received.get(counted[order.id].digest) == model[::-1]
        assert len(counted) == len(orders)


async def repeat(peer: Peer, order: Order) -> None:
    while True:
        await peer.send(order)
        await asyncio.sleep(RESEND_S)
