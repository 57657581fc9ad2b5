"""How many connected devices one coordinator carries: thousands of them on one machine, each with a socket of its own.

The devices are light, and their protocol is real: fedge's transport (MQTT 5), session, transfer and encoding, in a few
processes without torch. They learn nothing: an update is noise of the model's size. Mosquitto is on loopback, and the
coordinator is `fedge coordinator` as a process, with fedavg.

    all up s         from the first connection until the coordinator has begun round 1 with all devices
    round s          median of the rounds in which nobody was disturbed: all are asked, fetch a model, send an update
    reports/s        devices / round s
    coordinator MB   largest resident memory of its process
    ms/device        processor time for each device of a round: coordinator, intakes and blob servers (helpers), broker,
                     and the devices themselves (herds)
    accepted, expired, lost    orders of all rounds; lost: a device was told "accepted", and the store does not know it

--storm kills Mosquitto in round 2 and starts it again: coordinator and devices come back at once. `back s`: until all
are. --vanish kills that share of the devices with -9 in round 2, when a tenth of the round has answered; the round ends
at the deadline, the next ones go on with the rest.

Each device is a socket here and one in Mosquitto: `ulimit -n` must be above their number in both (this script raises
its own as far as it may). Mosquitto needs `max_queued_messages 0`, as `fedge broker` writes it: with its default of
1,000 a coordinator that starts after the devices never hears of the others. Its `max_connections` is unlimited as it
comes.

Examples:
    python benchmarks/load.py --devices 100 1000 5000 --deadline-s 900 --plot growth.png
    python benchmarks/load.py --devices 1000 --intakes 2 --blob-servers 1
    python benchmarks/load.py --devices 1000 --storm
    python benchmarks/load.py --devices 1000 --vanish 0.5 --deadline-s 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from script import cpu_s, finish, machine, parser_of, peak_mb, plot, show

from coordinator.service.checks import make_first_model
from coordinator.store.records import OrderStatus
from coordinator.store.store import Store
from edge_agent.agent import session
from edge_agent.agent.identity import make_capabilities
from edge_agent.agent.models import FETCH_PATIENCE_S
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.steps.contract import decode_action, load_installed_steps, make_report
from fedge.steps.mixture.install import Installed
from fedge.steps.training.train import Train, Trained
from fedge.system.background import Background
from fedge.system.files import BlobFolder
from fedge.tasks import load_task
from fedge.tensors.codecs import encode as encode_tensors
from fedge.tensors.layout import Layout, Model, unflatten
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.messages import (
    Ack,
    BlobRef,
    Context,
    Order,
    Presence,
    Report,
    Status,
    Want,
    decode_message,
    encode_message,
    iterate_blobs,
)
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transport import Transport

TOPICS = Topics("load")
PARTS = ("coordinator", "helpers", "broker", "herds")
AT_ONCE = 100
"""Connections that one process opens at a time."""
STEPS = load_installed_steps()
SAMPLES = 100


# ------------------------------------------------------------------------------------------------------ the devices


class Device:
    """What an agent says and hears, without a disk and without training."""

    def __init__(self, name: str, broker: BrokerSettings, task: str, layout: Layout, folder: Path) -> None:
        self.accepted: list[str] = []
        """Orders whose reports were."""
        self.connections = 0
        self._name, self._task, self._layout = name, task, layout
        self._session = session.Session(name)
        self._uploads: dict[str, dict[str, bytes]] = {}  # order -> digest -> bytes
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        will = Will(TOPICS.make_agent_topic(name, "status"), encode_message(self._status(Presence.OFFLINE)))
        self.transport = Transport(broker, TOPICS.make_client_id("agent", name), will=will)
        self._models = BlobFolder(folder / name)
        self._receiver = Receiver(self.transport, self._models, durable=False)
        self._background = Background(_failed)

    async def start(self) -> None:
        for topic, handle in {
            TOPICS.make_agent_topic(self._name, "orders"): self._on_order,
            TOPICS.make_agent_topic(self._name, "acks"): self._on_ack,
            TOPICS.make_wants_topic(self._name): self._on_want,
        }.items():
            await self.transport.subscribe(topic, handle)
        self.transport.on_connect(self._on_connect)
        await self.transport.__aenter__()

    def _status(self, presence: Presence) -> Status:
        return Status(
            device_id=self._name, incarnation="one", presence=presence, task_fingerprint=self._task, n_samples=SAMPLES,
            capabilities=make_capabilities(trains=True, steps=STEPS),
        )  # fmt: skip

    async def _on_connect(self) -> None:
        self.connections += 1
        await self.transport.publish(
            TOPICS.make_agent_topic(self._name, "status"), encode_message(self._status(Presence.ONLINE)), retain=True
        )
        context = Context(device_id=self._name, at=time.time(), cpu_ghz=1.5, load=0.1, free_ram_gb=1.0)
        await self.transport.publish(TOPICS.make_agent_topic(self._name, "context"), encode_message(context))
        self._feed(session.LocalEvent.CONNECTED)

    async def _on_order(self, inbound: Inbound) -> None:
        self._feed(decode_message(inbound.payload, Order))

    async def _on_ack(self, inbound: Inbound) -> None:
        self._feed(decode_message(inbound.payload, Ack))

    async def _on_want(self, inbound: Inbound) -> None:
        want = decode_message(inbound.payload, Want)
        for found in self._uploads.values():
            if (data := found.get(want.digest)) is not None:
                for first, last in want.ranges:
                    for start in range(first, last, self.transport.chunk_bytes):
                        chunk = data[start : min(last, start + self.transport.chunk_bytes)]
                        topic = TOPICS.make_update_topic(self._name, want.digest, start)
                        self._background.spawn(self.transport.publish(topic, chunk))

    def _feed(self, event: session.Event) -> None:
        with contextlib.suppress(ProtocolError):  # such as an acknowledgement that comes once more
            for action in self._session.handle(event, time.monotonic()):
                self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
        if (at := self._session.find_next_wakeup()) is not None:
            delay = max(at - time.monotonic(), 0.01)
            self._timer = asyncio.get_running_loop().call_later(delay, self._feed, session.LocalEvent.TICK)

    def _perform(self, action: session.Action) -> None:
        match action:
            case session.Run(order):
                self._work = self._background.spawn(self._carry_out(order))
            case session.Publish(report):
                topic = TOPICS.make_agent_topic(self._name, "reports")
                self._background.spawn(self.transport.publish(topic, encode_message(report)))
            case session.Acknowledge(ack):
                self._uploads.pop(ack.order_id, None)
                if ack.accepted:
                    self.accepted.append(ack.order_id)
            case session.Stop() if self._work is not None:
                self._work.cancel()

    async def _carry_out(self, order: Order) -> None:
        try:
            report = await self._report(order)
        except asyncio.CancelledError:
            self._feed(session.LocalEvent.STOPPED)
        else:
            self._feed(report)

    async def _report(self, order: Order) -> Report:
        action = decode_action(order, STEPS)
        for ref in iterate_blobs(action):
            await self._receiver.fetch(
                ref, chunks=TOPICS.make_model_topic(ref.digest), wants=TOPICS.make_agent_topic(self._name, "wants"),
                device_id=self._name, patience_s=FETCH_PATIENCE_S,
            )  # fmt: skip
        for digest in set(self._models) - {ref.digest for ref in iterate_blobs(action)}:
            self._models.remove(digest)
        if not isinstance(action, Train):
            return make_report(order, Installed(release=1), 0.0)
        noise = np.random.default_rng(order.seed).normal(0, 0.01, self._layout.n_params).astype(np.float32)
        empty = np.zeros(0)
        model = Model(params=noise, buffers=empty.astype(np.float32), counters=empty.astype(np.int64))
        data = encode_tensors(unflatten(model, self._layout), action.codec)
        ref = BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), codec=action.codec)
        self._uploads[order.id] = {ref.digest: data}
        result = Trained(
            update=ref, n_samples=SAMPLES, loss_before=1.0, loss_after=0.5, gradient_norm=1.0, val_score=0.5
        )
        return make_report(order, result, 0.1)


def _failed(error: BaseException) -> None:
    raise error


def devices(*arguments: object) -> None:
    """A process of devices. Says when all are connected; answers "back", "accepted", and ends at "end"."""
    asyncio.run(_devices(*arguments))


async def _devices(
    names: list[str], broker: BrokerSettings, task: str, layout: Layout, folder: Path, pipe: Connection
) -> None:
    fleet = [Device(name, broker, task, layout, folder) for name in names]
    room = asyncio.Semaphore(AT_ONCE)

    async def begin(device: Device) -> None:
        async with room:
            await device.start()

    await asyncio.gather(*map(begin, fleet))
    pipe.send("up")
    while (request := await asyncio.to_thread(pipe.recv)) != "end":
        if request == "back":
            while not all(device.connections >= 2 for device in fleet):  # noqa: ASYNC110 - thousands
                await asyncio.sleep(0.1)
            pipe.send("back")
        else:
            pipe.send([order for device in fleet for order in device.accepted])
    os._exit(0)  # without thousands of good-byes


class Herd:
    """Devices in a process of their own, and the pipe to it."""

    def __init__(self, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=devices, args=(*arguments, theirs), daemon=True)
        self.process.start()
        self.alive = True

    async def ask(self, request: str) -> Any:
        self.pipe.send(request)
        return await asyncio.to_thread(self.pipe.recv)


# ------------------------------------------------------------------------------------------------------ the run


class Run:
    """One size: broker, coordinator and devices from their start to the audit of the store."""

    def __init__(self, n: int, args: argparse.Namespace, home: Path, task: TaskSpec, layout: Layout) -> None:
        self.n, self.args, self.home, self.task, self.layout = n, args, home, task, layout
        self.events: dict[int, dict[str, float]] = {}  # round -> when it was begun and done, and processor time then
        self.answers = 0  # of this round
        self.back_s: float | None = None
        self._disturbed = asyncio.Event()

    async def measure(self) -> dict[str, Any]:
        async with LocalBroker("mosquitto") as self.broker:
            address = BrokerSettings(self.broker.host, self.broker.port)
            command = (
                sys.executable, "-m", "fedge", "coordinator", "--broker", f"{address.host}:{address.port}",
                "--federation", TOPICS.federation, "--home", str(self.home / "coordinator"), "--task", "digits",
                "--method", "fedavg", "--rounds", str(self.args.rounds), "--devices", str(self.n),
                "--deadline-s", str(self.args.deadline_s), "--once", "--json",
            )  # fmt: skip
            self.coordinator = await asyncio.create_subprocess_exec(*command, stdout=PIPE, limit=2**26)
            self.herds, self.helpers = [], []
            try:
                if roles := ["intake"] * self.args.intakes + ["blobs"] * self.args.blob_servers:
                    while not (self.home / "coordinator" / "summary.json").exists():  # noqa: ASYNC110 - it has begun
                        await asyncio.sleep(0.1)
                for role in roles:
                    self.helpers.append(await asyncio.create_subprocess_exec(*command, "--role", role))
                return await self._measure(address)
            finally:
                for herd in self.herds:
                    herd.process.kill()
                for process in (self.coordinator, *self.helpers):
                    if process.returncode is None:
                        process.kill()
                    await process.wait()

    async def _measure(self, address: BrokerSettings) -> dict[str, Any]:
        names = [f"d{i:05}" for i in range(self.n)]
        gone = round(self.n * self.args.vanish)
        parts = [names[:gone]] if gone else []
        rest = names[gone:]
        parts += [rest[k :: self.args.processes] for k in range(self.args.processes)]
        began = time.monotonic()
        folder = self.home / "devices"
        common = (address, self.task.compute_fingerprint(), self.layout, folder)
        self.herds = [Herd(part, *common) for part in parts]
        for herd in self.herds:
            await asyncio.to_thread(herd.pipe.recv)
        disturbing = asyncio.create_task(self._disturb())
        async for event in self._events():
            self._note(event)
        if not self._disturbed.is_set():
            disturbing.cancel()
        await asyncio.wait([disturbing])  # the last device may come back when the work is done
        if code := await self.coordinator.wait():
            raise SystemExit(f"the coordinator ended with exit code {code}")
        told = [order for herd in self.herds if herd.alive for order in await herd.ask("accepted")]
        return self._figures(began, told)

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        assert self.coordinator.stdout is not None
        async for line in self.coordinator.stdout:
            yield json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "answer":
            self.answers += 1
        if event["event"] == "answer" and len(self.events) == 2 and self.answers > self.n // 10:
            self._disturbed.set()
        elif event["event"] == "round_begun":
            self.answers = 0
            self.events[event["round"]] = {"devices": event["devices"], "begun": time.monotonic(), **self._used()}
        elif event["event"] == "round_done":
            number = event["round"] + (event["done"] is True)  # the last one installs
            used = {name: now - self.events[number][name] for name, now in self._used().items()}
            self.events[number] |= {"seconds": time.monotonic() - self.events[number]["begun"], **used}
            self.peak_mb = peak_mb(self.coordinator.pid)
            if self.args.verbose:
                print(f"round {number}: {self.events[number]}", file=sys.stderr, flush=True)

    def _used(self) -> dict[str, float]:
        assert self.broker.pid is not None
        herds = sum(cpu_s(herd.process.pid) for herd in self.herds if herd.alive)
        helpers = sum(cpu_s(process.pid) for process in self.helpers)
        used = cpu_s(self.coordinator.pid), helpers, cpu_s(self.broker.pid), herds
        return dict(zip(PARTS, used, strict=True))

    async def _disturb(self) -> None:
        if not (self.args.storm or self.args.vanish):
            return
        await self._disturbed.wait()
        if self.args.vanish:
            self.herds[0].process.kill()
            self.herds[0].alive = False
        if self.args.storm:
            await self.broker.kill()
            await self.broker.start()
            began = time.monotonic()
            await asyncio.gather(*(herd.ask("back") for herd in self.herds if herd.alive))
            self.back_s = time.monotonic() - began

    def _figures(self, began: float, told: list[str]) -> dict[str, Any]:
        with contextlib.closing(Store(self.home / "coordinator")) as store:
            entries = [entry for number in self.events for entry in store.get_entries(number)]
        accepted = {entry.order.id for entry in entries if entry.status is OrderStatus.ACCEPTED}
        kept = {entry.order.id for entry in entries}
        disturbed = {2} if self.args.storm or self.args.vanish else set()
        calm = [e for number, e in self.events.items() if number not in disturbed | {self.args.rounds + 1}]
        seconds = statistics.median(e["seconds"] for e in calm)
        each = {name: statistics.median(1000 * e[name] / e["devices"] for e in calm) for name in PARTS}
        return {
            "devices": self.n,
            "intakes": self.args.intakes,
            "all up s": round(self.events[1]["begun"] - began, 1),
            "round s": round(seconds, 2),
            "round 2 s": round(self.events[2]["seconds"], 2),
            "reports/s": round(calm[0]["devices"] / seconds),
            "coordinator MB": round(self.peak_mb),
            **{f"{name} ms/device": round(value, 2) for name, value in each.items()},
            **({"back s": round(self.back_s, 1)} if self.back_s is not None else {}),
            "accepted": len(accepted),
            "expired": sum(entry.status is OrderStatus.EXPIRED for entry in entries),
            "open": sum(entry.status is OrderStatus.OPEN for entry in entries),
            "lost": len((set(told) & kept) - accepted),
        }


def growth(rows: list[dict[str, Any]], axes: Any) -> None:
    """Time of a round, and the coordinator's processor time in it, against devices; dashed: in proportion to them."""
    sizes = [row["devices"] for row in rows]
    curves = {
        "a round": [row["round s"] for row in rows],
        "processor of the coordinator": [row["coordinator ms/device"] * row["devices"] / 1000 for row in rows],
    }
    for name, seconds in curves.items():
        (line,) = axes.loglog(sizes, seconds, "o-", label=name)
        axes.loglog(sizes, [seconds[-1] * n / sizes[-1] for n in sizes], "--", color=line.get_color(), linewidth=1)
    axes.set(xlabel="connected devices", ylabel="seconds", xticks=sizes, xticklabels=sizes)
    axes.minorticks_off()
    axes.legend()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of training (default 3)")
    parser.add_argument("--processes", type=int, default=2, help="processes that the devices live in (default 2)")
    parser.add_argument("--intakes", type=int, default=0, help="processes beside the coordinator that take in reports")
    parser.add_argument("--blob-servers", type=int, default=0, help="processes beside it that serve models")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="of a step (default 120)")
    parser.add_argument("--storm", action="store_true", help="kill Mosquitto in round 2, and start it again")
    parser.add_argument("--vanish", type=float, default=0.0, metavar="SHARE", help="of the devices, killed in round 2")
    parser.add_argument("--verbose", action="store_true", help="tell of each round")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the growth, with straight lines beside it (.png)"
    )
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    task = load_task("digits")
    layout, _ = make_first_model(task, 0)
    rows = []
    for n in sorted(args.devices):
        with tempfile.TemporaryDirectory() as home:
            rows.append(asyncio.run(Run(n, args, Path(home), task, layout).measure()))
        show(rows[-1:])
    show(rows)
    if args.plot:
        plot(args.plot, partial(growth, rows), figsize=(6, 4))
    finish(args, {"benchmark": "load", **machine(), "weights": layout.n_params, "sizes": rows})


if __name__ == "__main__":
    main()
