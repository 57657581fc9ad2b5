"""Helpers of a coordinator: the server of models, and what each process needs to begin.

`fedge coordinator` can do everything alone. Each helper joins a shared subscription, in which the broker hands every
report, or every Want, to one member. The dispatcher (`coordinator.fleet.mqtt`) is an intake, too. All processes share
the store and the blob folder. They may be killed at any time, because a device repeats its report until it is
acknowledged, and an order is closed only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from coordinator.fleet.mqtt.process import Process
from coordinator.store.classes import read_classes
from coordinator.store.store import OFFERED, Store
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError
from fedge.system.files import InUseError, lock_folder
from fedge.tensors.layout import Layout
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Want, decode_message
from fedge.wire.topics import MODELS
from fedge.wire.transfer.sender import Sender

log = logging.getLogger("fedge.coordinator")

LOOK_AGAIN_S: Final = 0.02
"""Shortest pause between two reads of which models are offered."""


class BlobServer(Process):
    """The process that serves the models named in open orders to devices."""

    def __init__(self, broker: BrokerSettings, store: Store, home: Path, *, federation: str) -> None:
        super().__init__(broker, store, federation, home)
        self._offered: frozenset[str] = frozenset()
        self._looked_at = 0.0
        self._sender = Sender(self._transport, self._find_model)

    async def serve(self) -> None:
        """Serve until cancelled; raise as `Intake.serve` does."""
        wants = self._topics.make_shared_filter(MODELS, self._secret, self._topics.make_agent_topic("+", "wants"))
        await self._transport.subscribe(wants, self._make_handler(self._on_want))
        async with self._sender:
            await self._run_until_failure()

    def _on_want(self, device: str, inbound: Inbound) -> None:
        self._background.spawn(self._answer(device, inbound))

    async def _answer(self, device: str, inbound: Inbound) -> None:
        try:
            await asyncio.to_thread(self._fetch_model, decode_message(inbound.payload, Want).digest)
            self._sender.handle_want(device, inbound.payload, self._topics)
        except ProtocolError as error:
            self._refuse(error, device, inbound.topic)

    def _fetch_model(self, digest: str) -> None:
        """Fetch a model if it is offered."""
        if digest not in self._offered and time.monotonic() - self._looked_at > LOOK_AGAIN_S:
            self._looked_at = time.monotonic()
            self._offered = frozenset(json.loads(self._store.find_value(OFFERED) or "[]"))
            self._store.blobs.drop_copies(self._offered)
        if digest in self._offered:
            self._store.blobs.fetch(digest)

    def _find_model(self, digest: str) -> Path | None:
        """Find a model that orders name. Nothing else is found, since devices' updates are in the same folder."""
        return self._store.blobs.get_path(digest) if digest in self._offered and digest in self._store.blobs else None


@contextlib.contextmanager
def lock_own_folder(home: Path) -> Iterator[Path]:
    """Lock a folder below HOME for this process alone, including leftovers of its last owner."""
    for number in range(1, 1000):
        folder = home / "roles" / str(number)
        try:
            with lock_folder(folder, f"{folder} is taken"):
                yield folder
                return
        except InUseError:
            continue
    raise ConfigError(f"{home / 'roles'} has no room for one more process")


def load_layout(store: Store, home: Path, task: TaskSpec, blobs: str | None) -> Layout:
    """Load the model layout of a federation that its dispatcher has begun.

    Raises:
        ConfigError: the federation has not begun, learns another task, or keeps its tensors elsewhere than `blobs`.
    """
    known = store.find_value("start")
    if known is None or store.find_value("identity") is None:
        raise ConfigError(f"{home} holds no federation yet: start `fedge coordinator` without --role first")
    if read_classes(store).fingerprint != task.compute_fingerprint():
        raise ConfigError(f"{home} holds a federation with another task: give --task as its coordinator was given")
    store.require_blobs(blobs)
    layout, _ = msgspec.json.decode(known, type=tuple[Layout, msgspec.Raw])
    return layout
