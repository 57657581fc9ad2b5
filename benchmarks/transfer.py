"""MB/s of a model between agent and coordinator, against paho's own publish -> subscribe ceiling.

Three processes on one machine, Mosquitto between them. Each repetition runs all cases one after the other, so that a
busy machine hits them alike:

    ceiling   paho with its own thread publishes chunks from memory (QoS 1, same chunk size, window 8, tuned malloc); a
              paho subscriber counts the bytes and throws them away
    kept      the same, but the subscriber does what anybody must who keeps bytes: write them to a new file, SHA-256,
              fsync, rename. The step from `ceiling` to `kept` is the machine's, not the protocol's
    down      coordinator -> agent: fedge.transfer from file to file, with Want, SHA-256, fsync and rename
    up        agent -> coordinator: the same the other way

Floor of the method: one run takes 1 ms (1.6 MB) to 40 ms (45 MB), so single values scatter; read the medians. The
ceiling's clock runs from the first publish to the last byte, ours from `fetch` to the verified file.

Run: python benchmarks/transfer.py [--repeat 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from fedge.broker import LocalBroker
from fedge.files import BlobFolder, sync_folder
from fedge.messages import BlobRef, Want, decode
from fedge.topics import Topics
from fedge.transfer import Receiver, Sender
from fedge.transport import LARGE_CHUNK, OUT_WINDOW, BrokerSettings, Transport, tune_malloc

SIZES = {"1.6 MB": 1_607_104, "45 MB": 45_000_000}
CASES = ("ceiling", "kept", "down", "up")
TOPICS = Topics("benchmark")


# ------------------------------------------------------------------------------------------------ the ceiling


def paho_client(port: int, name: str) -> paho.Client:
    client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=MQTTProtocolVersion.MQTTv5)
    client.max_inflight_messages = OUT_WINDOW
    client.connect("127.0.0.1", port)
    return client


class Kept:
    """A new file that is hashed as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.with_suffix(".part").open("wb", buffering=0)
        self.hasher = hashlib.sha256()

    def add(self, data: bytes) -> None:
        self.file.write(data)
        self.hasher.update(data)

    def end(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()
        self.path.with_suffix(".part").replace(self.path)
        sync_folder(self.path.parent)


def ceiling_subscriber(port: int, home: str, pipe: Connection) -> None:
    """Told (size, whether to keep), answers ready; sends the time when that many bytes have come."""
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
        left, kept = order[0], Kept(path) if order[1] else None
        pipe.send("ready")
    client.loop_stop()


def ceiling_publisher(port: int, pipe: Connection) -> None:
    """Told a size, publishes that much and sends the time when it began."""
    tune_malloc()
    client = paho_client(port, "ceiling-publisher")
    client.loop_start()
    while (size := pipe.recv()) is not None:
        data = os.urandom(size)
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


def peer(port: int, home: str, name: str, other: str, pipe: Connection) -> None:
    """A coordinator or an agent: ("make", size) -> ref; ("fetch", ref) -> seconds."""
    asyncio.run(run_peer(port, Path(home), name, other, pipe))


async def run_peer(port: int, home: Path, name: str, other: str, pipe: Connection) -> None:
    folder = BlobFolder(home / name)
    transport = Transport(BrokerSettings("127.0.0.1", port), name)
    receiver = Receiver(transport, folder)
    async with transport, Sender(transport, folder.path) as sender:

        async def on_want(message: object) -> None:
            want = decode(message.payload, Want)  # type: ignore[attr-defined]
            sender.want(want.digest, want.ranges, chunks=TOPICS.update_chunk(name, want.digest))

        await transport.subscribe(TOPICS.agent(name, "wants"), on_want)
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
                    chunks=TOPICS.update_chunk(other, argument.digest),
                    wants=TOPICS.agent(other, "wants"),
                    device_id=name,
                )
                pipe.send(time.monotonic() - began)
            else:
                folder.remove(argument.digest)
                pipe.send(None)


# ---------------------------------------------------------------------------------------------------- measure


class Child:
    """A process and the pipe to it."""

    def __init__(self, target: object, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)  # type: ignore[arg-type]
        self.process.start()

    def ask(self, request: object) -> object:
        self.pipe.send(request)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(10)


def measure(port: int, home: str, repeat: int) -> dict[str, dict[str, list[float]]]:
    subscriber, publisher = Child(ceiling_subscriber, port, home), Child(ceiling_publisher, port)
    coordinator = Child(peer, port, home, "coordinator", "agent")
    agent = Child(peer, port, home, "agent", "coordinator")
    assert coordinator.pipe.recv() == agent.pipe.recv() == "ready"
    rates: dict[str, dict[str, list[float]]] = {name: {case: [] for case in CASES} for name in SIZES}
    for repetition in range(repeat + 1):
        for name, size in SIZES.items():
            seconds = {}
            for case, keep in (("ceiling", False), ("kept", True)):
                subscriber.ask((size, keep))
                began = publisher.ask(size)
                seconds[case] = float(subscriber.pipe.recv()) - float(began)  # type: ignore[arg-type]
            for case, source, target in (("down", coordinator, agent), ("up", agent, coordinator)):
                ref = source.ask(("make", size))
                seconds[case] = float(target.ask(("fetch", ref)))  # type: ignore[arg-type]
                source.ask(("remove", ref))
                target.ask(("remove", ref))
            if repetition > 0:  # the first warms up
                for case, value in seconds.items():
                    rates[name][case].append(size / value / 1e6)
    for child in (subscriber, publisher, coordinator, agent):
        child.end()
    return rates


async def run(repeat: int) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as home:
        async with LocalBroker("mosquitto") as broker:
            return await asyncio.to_thread(measure, broker.port, home, repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="repetitions that count (default 15)")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    options = parser.parse_args()
    rates = asyncio.run(run(options.repeat))
    result = {}
    for size, cases in rates.items():
        medians = {case: statistics.median(values) for case, values in cases.items()}
        ratios = {case: {of: medians[case] / medians[of] for of in ("ceiling", "kept")} for case in ("down", "up")}
        result[size] = {"mb_per_s": cases, "median_mb_per_s": medians, "ratio": ratios}
        print(f"{size}: median MB/s (range)")
        for case in CASES:
            line = f"  {case:8} {medians[case]:6.0f} ({min(cases[case]):.0f}-{max(cases[case]):.0f})"
            for of, ratio in ratios.get(case, {}).items():
                line += f"   {ratio:.2f} of {of}"
            print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
