"""The coordinator's side of the wire for tests of the agent: it speaks the protocol and decides nothing by itself."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import msgspec

from edge_agent.device.worker import FinishedOrder
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Failed, Result, decode_action, decode_result, encode_body, load_installed_steps
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.system.files import BlobFolder, compute_digest
from fedge.tensors.layout import Codec
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import (
    Ack,
    BlobRef,
    Context,
    Order,
    Presence,
    Report,
    Status,
    Want,
    Why,
    decode_message,
    encode_message,
)
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transfer.sender import Sender
from tests.support.broker import transport

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(2,), model="mlp")
WAIT_S = 300.0


class Peer:
    """Publishes orders, serves models, collects what the agents say, fetches updates; acknowledges when told to."""

    def __init__(self, broker: LocalBroker, folder: Path, federation: str = "test") -> None:
        self.topics = Topics(federation)
        self.transport = transport(broker, f"{federation}-peer")
        self.sent = BlobFolder(folder / "sent")
        self.received = BlobFolder(folder / "received")
        self.statuses: list[Status] = []
        self.contexts: list[Context] = []
        self.reports: list[Report] = []
        self.wants: Counter[str] = Counter()
        self._receiver = Receiver(self.transport, self.received)
        self._sender = Sender(
            self.transport, lambda digest: self.sent.get_path(digest) if digest in self.sent else None
        )
        self._news = asyncio.Condition()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for leaf, kind, kept in (
            ("status", Status, self.statuses),
            ("context", Context, self.contexts),
            ("reports", Report, self.reports),
        ):
            await self.transport.subscribe(self.topics.make_agent_topic("+", leaf), self._collector(kind, kept))
        await self.transport.subscribe(self.topics.make_agent_topic("+", "wants"), self._on_want)
        await self._stack.enter_async_context(self.transport)
        await self._stack.enter_async_context(self._sender)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _collector(self, kind: type, kept: list) -> Callable:
        async def collect(inbound: Inbound) -> None:
            async with self._news:
                kept.append(decode_message(inbound.payload, kind))
                self._news.notify_all()

        return collect

    async def _on_want(self, inbound: Inbound) -> None:
        want = decode_message(inbound.payload, Want)
        async with self._news:
            self.wants[want.digest] += 1
            self._news.notify_all()
        self._sender.add_want(want.digest, want.ranges, chunks=self.topics.make_model_topic(want.digest))

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until something that the agents said makes it true."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(predicate)

    async def report_of(self, order: Order) -> Report:
        """Wait for a report."""
        await self.until(lambda: any(r.order_id == order.id for r in self.reports))
        return next(r for r in self.reports if r.order_id == order.id)

    async def presence(self, presence: Presence) -> None:
        """Wait until the last status is this."""
        await self.until(lambda: bool(self.statuses) and self.statuses[-1].presence is presence)

    async def result_of(self, action: Action, order: Order) -> Result:
        """Wait for a report, and read it."""
        return decode_result(await self.report_of(order), action)

    async def send(self, order: Order) -> None:
        """Publish an order to its device."""
        await self.transport.publish(self.topics.make_agent_topic(order.device_id, "orders"), encode_message(order))

    async def ack(self, order: Order, *, accepted: bool = True) -> None:
        """Acknowledge a report."""
        ack = Ack(order_id=order.id, device_id=order.device_id, accepted=accepted)
        await self.transport.publish(self.topics.make_agent_topic(order.device_id, "acks"), encode_message(ack))

    async def fetch_update(self, device_id: str, ref: BlobRef) -> bytes:
        """Pull an update from its device."""
        chunks = self.topics.make_update_topic(device_id, ref.digest)
        wants = self.topics.make_wants_topic(device_id)
        async with asyncio.timeout(WAIT_S):
            path = await self._receiver.fetch(ref, chunks=chunks, wants=wants, device_id=device_id)
        return path.read_bytes()

    def model(self, size_bytes: int = 1000) -> BlobRef:
        """A model to be sent."""
        return BlobRef(digest=self.sent.put(os.urandom(size_bytes)), size_bytes=size_bytes)


def order_of(action: Action, order_id: str = "r.1.s.pi", *, device: str = "pi", in_s: float = 60.0) -> Order:
    """An order with so many seconds left."""
    return Order(
        id=order_id,
        device_id=device,
        run="r",
        round=1,
        label="s",
        seed=0,
        task_fingerprint=TASK.compute_fingerprint(),
        left_s=in_s,
        step=action.STEP,
        version=action.VERSION,
        body=encode_body(action),
    )


def action_of(order: Order) -> Action:
    """What an order asks for, which must be an installed step."""
    action = decode_action(order, load_installed_steps())
    assert isinstance(action, Action)
    return action


def train(model: BlobRef) -> Train:
    """An order to train from one model."""
    return Train(starts=(Start(model=model),), sgd=Sgd(steps=1))


class EchoWorker:
    """Does the wire's part of the work without learning: an update is the start model's bytes, reversed."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def execute(
        self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Callable[[], bool], action: Action
    ) -> FinishedOrder:
        result: Result
        blobs: dict[str, bytes] = {}
        match action:
            case Train(starts=(start, *_)):
                data = fetch(start.model)[::-1]
                update = BlobRef(digest=compute_digest(data), size_bytes=len(data), codec=Codec.INT8)
                result = Trained(update=update, n_samples=3, loss_before=2.0, loss_after=1.0, gradient_norm=0.5)
                blobs = {update.digest: data}
            case Profile(extractor=extractor):
                shares = (len(fetch(extractor)) % 2 / 2,)
                result = Profiled(extractor=extractor.digest, profile=shares, n_samples=3)
            case _:
                result = Failed(why=Why.UNFIT)
        self.done.append(order.id)
        return FinishedOrder(result, blobs)


def later(order: Order, in_s: float) -> Order:
    """The same order with another time left."""
    return msgspec.structs.replace(order, left_s=in_s)
