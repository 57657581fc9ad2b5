"""Helpers of a coordinator: the server of models, and what each process needs to begin.

`fedge coordinator` can do everything alone. Each helper joins a shared subscription: the broker hands every report, or
every Want, to one of its members. The dispatcher (`coordinator.fleet.mqtt`) is an intake, too. All of them share the
store and the blob folder, and may be killed at any time: a device repeats its report until it is acknowledged, and an
order is closed only once.
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
from coordinator.store.store import OFFERED, Store
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError
from fedge.system.files import InUseError, locked
from fedge.tensors.layout import Layout
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Want, decode
from fedge.wire.topics import MODELS
from fedge.wire.transfer.sender import Sender

log = logging.getLogger("fedge.coordinator")

LOOK_AGAIN_S: Final = 0.02
"""Shortest pause between two reads of which models are offered."""


class BlobServer(Process):
    """Serves the models named in open orders to devices."""

    def __init__(self, broker: BrokerSettings, store: Store, home: Path, *, federation: str) -> None:
        super().__init__(broker, store, federation, home)
        self._offered: frozenset[str] = frozenset()
        self._looked_at = 0.0
        self._sender = Sender(self._transport, self._source)

    async def serve(self) -> None:
        """Work until cancelled; raises as `Intake.serve`."""
        wants = self._topics.shared(MODELS, self._secret, self._topics.agent("+", "wants"))
        await self._transport.subscribe(wants, self._guard(self._on_want))
        async with self._sender:
            await self._until_failure()

    def _on_want(self, device: str, inbound: Inbound) -> None:
        self._background.spawn(self._answer(device, inbound))

    async def _answer(self, device: str, inbound: Inbound) -> None:
        try:
            await asyncio.to_thread(self._bring, decode(inbound.payload, Want).digest)
            self._sender.want_of(device, inbound.payload, self._topics)
        except ProtocolError as error:
            self._refuse(error, device, inbound.topic)

    def _bring(self, digest: str) -> None:
        """Fetch a model if it is offered."""
        if digest not in self._offered and time.monotonic() - self._looked_at > LOOK_AGAIN_S:
            self._looked_at = time.monotonic()
            self._offered = frozenset(json.loads(self._store.recall(OFFERED) or "[]"))
            self._store.blobs.let_go(self._offered)
        if digest in self._offered:
            self._store.blobs.bring(digest)

    def _source(self, digest: str) -> Path | None:
        """Devices get only what orders name, since the updates of others are in the same folder."""
        return self._store.blobs.path(digest) if digest in self._offered and digest in self._store.blobs else None


@contextlib.contextmanager
def own_folder(home: Path) -> Iterator[Path]:
    """An exclusive folder below HOME for this process, including leftovers of its last owner."""
    for number in range(1, 1000):
        folder = home / "roles" / str(number)
        try:
            with locked(folder, f"{folder} is taken"):
                yield folder
                return
        except InUseError:
            continue
    raise ConfigError(f"{home / 'roles'} has no room for one more process")


def begun(store: Store, home: Path, task: TaskSpec, blobs: str | None) -> Layout:
    """The model layout of a federation that its dispatcher has begun.

    Raises:
        ConfigError: it has not begun, learns another task, or keeps its tensors elsewhere than `blobs`.
    """
    known, identity = store.recall("start"), store.recall("identity")
    if known is None or identity is None:
        raise ConfigError(f"{home} holds no federation yet: start `fedge coordinator` without --role first")
    if json.loads(identity)[2] != task.fingerprint():
        raise ConfigError(f"{home} holds a federation with another task: give --task as its coordinator was given")
    store.require_blobs(blobs)
    layout, _ = msgspec.json.decode(known, type=tuple[Layout, msgspec.Raw])
    return layout
