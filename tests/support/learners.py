"""Devices of a coordinator in the process of a test: they answer at once, without torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.steps.mixture.install import Install, Installed
from fedge.steps.training.train import Train
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, Model, TensorInfo
from fedge.wire.messages import Order, iterate_blobs
from tests.support.device import RawDevice, trained
from tests.support.peer import action_of

LAYOUT = Layout(tensors=(TensorInfo(name="w", shape=(3,)),))


def first_model(_task: TaskSpec, seed: int, *_: object) -> tuple[Layout, Model]:
    """In place of `coordinator.service.checks.make_first_model`, without the seconds that its child needs for torch."""
    return LAYOUT, Model(np.full(3, seed, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))


class Learner(RawDevice):
    """Answers each order at once: its update is its own number everywhere. `held`: rounds whose orders it leaves."""

    value = 0.0
    held: frozenset[int] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.done: Counter[str] = Counter()
        self._answers: set[asyncio.Task[None]] = set()

    async def _note(self, kept: list, message: Any) -> None:
        await super()._note(kept, message)
        if isinstance(message, Order) and message.round not in self.held:
            self._answers.add(asyncio.create_task(self._answer(message)))

    async def _answer(self, order: Order) -> None:
        action = action_of(order)
        for ref in iterate_blobs(action):
            await self.fetch(ref)
        if not self.done[order.id]:
            self.done[order.id] += 1
        match action:
            case Train():
                update = codecs.encode({"w": np.full(3, self.value, np.float32)}, Codec.INT8)
                await self.report(order, trained(self.serves(update)))
            case Install():
                await self.report(order, Installed(release=1))


async def learners(stack: contextlib.AsyncExitStack, broker: LocalBroker, home: Path) -> list[Learner]:
    """Two, a and b, which are there while the stack is open."""
    found = []
    for name, value in (("a", 1.0), ("b", 3.0)):
        device = Learner(broker, name, home)
        device.value = value
        found.append(await stack.enter_async_context(device))
    return found
