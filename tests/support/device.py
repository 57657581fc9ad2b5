"""A device for tests of the coordinator: it speaks the protocol, learns nothing, and does what the test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.steps.contract import Result, make_report
from fedge.steps.training.train import Trained
from fedge.system.files import BlobFolder, compute_digest
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, TensorInfo
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import (
    Ack,
    BlobRef,
    Capabilities,
    Context,
    Message,
    Order,
    Presence,
    Status,
    Want,
    decode_message,
    encode_message,
)
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transfer.sender import Sender
from tests.support.broker import transport

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(2,), model="mlp")
LAYOUT = Layout(tensors=(TensorInfo(name="w", shape=(2, 2)), TensorInfo(name="b", shape=(2,))))
WAIT_S = 300.0
IN_0_1 = msgspec.msgpack.encode((1, {"type": "status", "device_id": "cam1", "incarnation": "1", "presence": "online"}))
"""The status of an agent of fedge 0.1."""


def tensors(value: float) -> dict[str, np.ndarray]:
    """A model or an update of `LAYOUT`, all of whose numbers are `value`."""
    return {"w": np.full((2, 2), value, np.float32), "b": np.full(2, value, np.float32)}


class RawDevice:
    """What arrives is collected; what leaves is said by the test. `blobs`: what it serves, by digest."""

    def __init__(self, broker: LocalBroker, device_id: str, home: Path, federation: str = "f") -> None:
        self.id = device_id
        self.orders: list[Order] = []
        self.acks: list[Ack] = []
        self.blobs: dict[str, bytes] = {}
        self.topics = Topics(federation)
        self.transport = transport(broker, f"{federation}-{device_id}")
        self.models = BlobFolder(home / device_id)
        self._receiver = Receiver(self.transport, self.models)
        self._sender = Sender(self.transport, self.blobs.get)
        self._news = asyncio.Condition()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.transport.subscribe(self.topics.make_agent_topic(self.id, "orders"), self._on_order)
        await self.transport.subscribe(self.topics.make_agent_topic(self.id, "acks"), self._on_ack)
        await self.transport.subscribe(self.topics.make_wants_topic(self.id), self._on_want)
        await self._stack.enter_async_context(self.transport)
        await self._stack.enter_async_context(self._sender)
        await self.appear()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def appear(
        self,
        incarnation: str = "1",
        *,
        task: TaskSpec = TASK,
        capabilities: Capabilities | None = None,
        presence: Presence = Presence.ONLINE,
        **more: Any,
    ) -> None:
        """Say that it is there, and how it is."""
        fingerprint = task.compute_fingerprint()
        status = Status(
            device_id=self.id,
            incarnation=incarnation,
            presence=presence,
            task_fingerprint=fingerprint,
            n_samples=5,
            capabilities=capabilities,
            **more,
        )
        await self.say("status", status, retain=True)
        await self.say("context", Context(device_id=self.id, n_samples=5))

    async def say(self, leaf: str, what: Message | bytes, *, as_id: str | None = None, retain: bool = False) -> None:
        """Publish a message, or any bytes, on one of its topics or on another device's."""
        payload = what if isinstance(what, bytes) else encode_message(what)
        await self.transport.publish(self.topics.make_agent_topic(as_id or self.id, leaf), payload, retain=retain)

    async def order(self, label: str, count: int = 1) -> Order:
        """Wait for an order of this label, or for its n-th copy."""
        await self._until(lambda: sum(o.label == label for o in self.orders) >= count)
        return [o for o in self.orders if o.label == label][count - 1]

    async def report(self, order: Order, result: Result, *, seconds: float = 0.5) -> None:
        """Say what came of an order."""
        await self.say("reports", make_report(order, result, seconds))

    async def ack(self, order_id: str, count: int = 1) -> Ack:
        """Wait for the verdict on a report, or for its n-th copy."""
        await self._until(lambda: sum(a.order_id == order_id for a in self.acks) >= count)
        return [a for a in self.acks if a.order_id == order_id][count - 1]

    def serves(self, data: bytes, codec_: Codec = Codec.INT8) -> BlobRef:
        """Have some bytes ready for the coordinator."""
        digest = compute_digest(data)
        self.blobs[digest] = data
        return BlobRef(digest=digest, size_bytes=len(data), codec=codec_)

    def trained(self, value: float, codec_: Codec = Codec.INT8, **changes: object) -> Trained:
        """A result whose update is `value` everywhere."""
        return trained(self.serves(codecs.encode(tensors(value), codec_), codec_), **changes)

    async def fetch(self, ref: BlobRef) -> bytes:
        """Pull a model."""
        chunks, wants = self.topics.make_model_topic(ref.digest), self.topics.make_agent_topic(self.id, "wants")
        async with asyncio.timeout(WAIT_S):
            return (await self._receiver.fetch(ref, chunks=chunks, wants=wants, device_id=self.id)).read_bytes()

    async def _on_order(self, inbound: Inbound) -> None:
        await self._note(self.orders, decode_message(inbound.payload, Order))

    async def _on_ack(self, inbound: Inbound) -> None:
        await self._note(self.acks, decode_message(inbound.payload, Ack))

    async def _on_want(self, inbound: Inbound) -> None:
        want = decode_message(inbound.payload, Want)
        if want.digest in self.blobs:
            self._sender.add_want(want.digest, want.ranges, chunks=self.topics.make_update_topic(self.id, want.digest))

    async def _note(self, kept: list, message: Message) -> None:
        async with self._news:
            kept.append(message)
            self._news.notify_all()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(holds)


def trained(update: BlobRef, **changes: object) -> Trained:
    """A result with that update."""
    values: dict[str, object] = {
        "update": update, "n_samples": 5, "loss_before": 2.0, "loss_after": 1.0, "gradient_norm": 0.5,
    }  # fmt: skip
    return Trained(**(values | changes))  # type: ignore[arg-type]
