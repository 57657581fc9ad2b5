"""MB/s of a model between agent and coordinator, against paho's own publish -> subscribe ceiling.

Processes on one machine, Mosquitto between them, a new model for each repetition as in a federation. Each repetition
runs all cases one after the other, in an order drawn anew, so that a busy machine hits them alike:

    ceiling   paho with its own thread publishes chunks from memory (QoS 1, same chunk size, window 8, tuned malloc); a
              paho subscriber counts the bytes and throws them away
    kept      the same, but the subscriber does what anybody must who keeps a model: write it to a new file, SHA-256,
              rename. What `down` could reach at best
    durable   the same with fsync of file and folder. What `up` could reach at best
    down      coordinator -> agent: fedge.wire.transfer from file to file, with Want, SHA-256 and rename
    up        agent -> coordinator: the same the other way, and durable, because an Ack follows

The columns: MB/s (median and range), median of the ratios within a repetition, and the CPU time (ms/MB) of broker,
sender and receiver. Where all cores are busy - three processes on two cores - rate is one over the CPU time of all
three, so that of the ceiling divided by that of a case is the share that the case can reach; it holds on a machine that
others use as well, where MB/s says little.

Floor of the method: one run takes 2 ms (1.6 MB) to 50 ms (45 MB), so single values scatter; read the medians. The
ceiling's clock runs from the first publish to the last byte, ours from `fetch` to the verified file: for a small model
the way of the Want counts as well. Pages that a virtual machine has not touched lately cost ten times those that it has
just used (the host takes free pages back): so each measured run follows two of the same case and size that do not
count, and every receiver deletes its last file just before the clock starts.

Run: python benchmarks/transfer.py [--repeat 15] [--json FILE]
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from script import cpu_s, finish, parser_of, show

from fedge.commands.broker import LocalBroker
from fedge.system.files import BlobFolder, sync
from fedge.system.malloc import tune_malloc
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.packet_limits import LARGE_CHUNK
from fedge.wire.connection.window import OUT_WINDOW
from fedge.wire.messages import BlobRef, Want, decode_message
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import Transport

SIZES = {"1.6 MB": 1_607_104, "45 MB": 45_000_000}
CASES = ("ceiling", "kept", "durable", "down", "up")
REFERENCES = {"kept": ("ceiling",), "durable": ("ceiling",), "down": ("ceiling", "kept"), "up": ("ceiling", "durable")}
ROLES = ("broker", "sender", "receiver")
TOPICS = Topics("benchmark")
WARM_UPS = 2


# ------------------------------------------------------------------------------------------------ the ceiling


def paho_client(port: int, name: str) -> paho.Client:
    client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=MQTTProtocolVersion.MQTTv5)
    client.max_inflight_messages = OUT_WINDOW
    client.connect("127.0.0.1", port)
    return client


class Kept:
    """A new file that is hashed as it grows."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.file = path.with_suffix(".part").open("wb", buffering=0)
        self.hasher = hashlib.sha256()

    def add(self, data: bytes | bytearray) -> None:
        self.file.write(data)
        self.hasher.update(data)

    def end(self) -> None:
        self.hasher.hexdigest()
        if self.durable:
            os.fsync(self.file.fileno())
        self.file.close()
        self.path.with_suffix(".part").replace(self.path)
        if self.durable:
            sync(self.path.parent)


def ceiling_subscriber(port: int, home: str, pipe: Connection) -> None:
    """Told (size, case), answers ready; sends the time when that many bytes have come, and are kept."""
    tune_malloc()
    left = 0
    kept: Kept | None = None

    def on_message(_client: object, _user: object, message: paho.MQTTMessage) -> None:
        nonlocal left
        if kept is not None:
            kept.add(message.payload)
        left -= len(message.payload)
        if left == 0:
            if kept is not None:
                kept.end()
            pipe.send(time.monotonic())

    client = paho_client(port, "ceiling-subscriber")
    client.on_message = on_message
    granted = threading.Event()
    client.on_subscribe = lambda *_: granted.set()
    client.loop_start()
    client.subscribe("ceiling/+", qos=1)
    granted.wait()
    path = Path(home) / "kept"
    while (order := pipe.recv()) is not None:
        path.unlink(missing_ok=True)
        left, kept = order[0], None if order[1] == "ceiling" else Kept(path, durable=order[1] == "durable")
        pipe.send("ready")
    client.loop_stop()


def ceiling_publisher(port: int, pipe: Connection) -> None:
    """Told a size, answers ready; told to go, publishes that much and sends the time when it began."""
    tune_malloc()
    client = paho_client(port, "ceiling-publisher")
    client.loop_start()
    while (size := pipe.recv()) is not None:
        data = os.urandom(size)
        pipe.send("ready")
        pipe.recv()
        began = time.monotonic()
        infos = [
            client.publish(f"ceiling/{start}", data[start : start + LARGE_CHUNK], qos=1)
            for start in range(0, size, LARGE_CHUNK)
        ]
        for info in infos:
            info.wait_for_publish()
        pipe.send(began)
    client.loop_stop()


# ------------------------------------------------------------------------------------------------------- ours


def peer(*arguments: object) -> None:
    """A coordinator or an agent: ("make", size) -> ref; ("fetch", ref) -> seconds."""
    asyncio.run(run_peer(*arguments))


async def run_peer(port: int, home: str, name: str, other: str, durable: bool, pipe: Connection) -> None:
    folder = BlobFolder(Path(home) / name)
    transport = Transport(BrokerSettings("127.0.0.1", port), name)
    receiver = Receiver(transport, folder, durable=durable)
    async with transport, Sender(transport, folder.get_path) as sender:

        async def on_want(message: object) -> None:
            want = decode_message(message.payload, Want)  # type: ignore[attr-defined]
            sender.add_want(want.digest, want.ranges, chunks=TOPICS.make_update_topic(name, want.digest))

        await transport.subscribe(TOPICS.make_agent_topic(name, "wants"), on_want)
        pipe.send("ready")
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            verb, argument = order
            if verb == "make":
                data = os.urandom(argument)
                pipe.send(BlobRef(digest=folder.put(data), size_bytes=argument))
                del data
            elif verb == "fetch":
                began = time.monotonic()
                await receiver.fetch(
                    argument,
                    chunks=TOPICS.make_update_topic(other, argument.digest),
                    wants=TOPICS.make_agent_topic(other, "wants"),
                    device_id=name,
                )
                pipe.send(time.monotonic() - began)
            else:
                for digest in tuple(folder):
                    folder.remove(digest)
                pipe.send(None)


# ---------------------------------------------------------------------------------------------------- measure


class Child:
    """A process and the pipe to it."""

    def __init__(self, target: object, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)  # type: ignore[arg-type]
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def ask(self, request: object) -> object:
        self.pipe.send(request)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(10)


class Bench:
    """Broker, a pair of processes for the ceiling, and a pair of peers."""

    def __init__(self, broker: LocalBroker, home: str) -> None:
        assert broker.pid is not None
        self.broker_pid = broker.pid
        self.subscriber = Child(ceiling_subscriber, broker.port, home)
        self.publisher = Child(ceiling_publisher, broker.port)
        self.coordinator = Child(peer, broker.port, home, "coordinator", "agent", True)
        self.agent = Child(peer, broker.port, home, "agent", "coordinator", False)
        assert self.coordinator.pipe.recv() == self.agent.pipe.recv() == "ready"

    def seconds(self, case: str, size: int) -> tuple[float, list[float]]:
        """Wall time of one transfer, and CPU time of broker, sender and receiver."""
        if case == "down":
            return self._fetch(self.coordinator, self.agent, size)
        if case == "up":
            return self._fetch(self.agent, self.coordinator, size)
        self.subscriber.ask((size, case))
        self.publisher.ask(size)
        pids = (self.broker_pid, self.publisher.pid, self.subscriber.pid)
        before = [cpu_s(pid) for pid in pids]
        began = float(self.publisher.ask("go"))  # type: ignore[arg-type]
        wall = float(self.subscriber.pipe.recv()) - began
        return wall, [cpu_s(pid) - used for pid, used in zip(pids, before, strict=True)]

    def _fetch(self, source: Child, target: Child, size: int) -> tuple[float, list[float]]:
        ref = source.ask(("make", size))
        target.ask(("clear", None))  # just now, as the subscriber of the floors does
        pids = (self.broker_pid, source.pid, target.pid)
        before = [cpu_s(pid) for pid in pids]
        wall = float(target.ask(("fetch", ref)))  # type: ignore[arg-type]
        cpu = [cpu_s(pid) - used for pid, used in zip(pids, before, strict=True)]
        source.ask(("clear", None))
        return wall, cpu

    def end(self) -> None:
        for child in (self.subscriber, self.publisher, self.coordinator, self.agent):
            child.end()


Figures = dict[str, dict[str, list[float]]]
"""case -> "mb_per_s", and CPU time in ms/MB of each of `ROLES`; one value for each repetition."""


def measure(bench: Bench, repeat: int) -> dict[str, Figures]:
    figures: dict[str, Figures] = {
        name: {case: {column: [] for column in ("mb_per_s", *ROLES)} for case in CASES} for name in SIZES
    }
    shuffle = random.Random(0)
    for repetition in range(repeat + 1):
        for name, size in SIZES.items():
            for case in shuffle.sample(CASES, len(CASES)):
                for _ in range(WARM_UPS):  # the pages of its own processes and files
                    bench.seconds(case, size)
                wall, cpu = bench.seconds(case, size)
                if repetition > 0:  # the first warms up
                    figures[name][case]["mb_per_s"].append(size / wall / 1e6)
                    for role, used in zip(ROLES, cpu, strict=True):
                        figures[name][case][role].append(used * 1e9 / size)
    bench.end()
    return figures


async def run(repeat: int) -> dict[str, Figures]:
    with tempfile.TemporaryDirectory() as home:
        async with LocalBroker("mosquitto") as broker:
            return await asyncio.to_thread(lambda: measure(Bench(broker, home), repeat))


def summary(figures: Figures) -> dict[str, dict[str, Any]]:
    """Medians and ratios of each case."""
    cpu_ms = {case: {role: statistics.median(values[role]) for role in ROLES} for case, values in figures.items()}
    result: dict[str, dict[str, Any]] = {}
    for case, values in figures.items():
        result[case] = {
            "median_mb_per_s": statistics.median(values["mb_per_s"]),
            "median_cpu_ms_per_mb": cpu_ms[case],
            "share_by_cpu": sum(cpu_ms["ceiling"].values()) / sum(cpu_ms[case].values()),
        }
        for other in REFERENCES.get(case, ()):
            pairs = zip(values["mb_per_s"], figures[other]["mb_per_s"], strict=True)
            result[case][f"of_{other}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="repetitions that count (default 15)")
    options = parser.parse_args()
    measured = asyncio.run(run(options.repeat))
    result = {name: summary(figures) for name, figures in measured.items()}
    for name, cases in result.items():
        show(({"": case} | row for case, row in cases.items()), f"\n{name}")
    finish(options, {name: {"values": measured[name], "summary": result[name]} for name in measured})


if __name__ == "__main__":
    main()
