"""The models that orders name: fetched from the coordinator or derived from another model, and kept for a while."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.agent.identity import Member
from edge_agent.device.device import CACHED_MODELS
from fedge.errors import ProtocolError, StoreError
from fedge.steps.contract import Action, Steps, decode_action
from fedge.system.files import BlobFolder, skip_fsync
from fedge.wire.messages import BlobRef, Order, find_shared_bases, find_way, iterate_blobs
from fedge.wire.transfer.receiver import Receiver

FETCH_PATIENCE_S: Final = 120.0
"""Time after which an order fails if its models do not arrive although the broker is connected, so that the next order
can begin. Its sender may be gone, or may never have existed. A restarted coordinator is back sooner."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models that an agent has fetched, in a folder."""

    folder: BlobFolder
    receiver: Receiver
    me: Member

    def get(self, ref: BlobRef) -> bytes:
        """Return the bytes of a model that was fetched."""
        return self.folder.get(ref.digest)

    def count_missing_bytes(self, action: Action) -> int:
        """Return the size in bytes of the models that an action names and that must still be fetched."""
        return sum(ref.size_bytes for ref in iterate_blobs(action) if ref.digest not in self.folder)

    async def fetch(self, order: Order, action: Action) -> None:
        """Fetch all models that an action names into the folder.

        Raises:
            ProtocolError: a model did not arrive completely.
            StoreError: the disk is full or broken.
            TransportError: the broker does not let us fetch.
        """
        named = list(iterate_blobs(action))
        bases = find_shared_bases(named, order.differences)
        for ref in (*bases, *named):
            if ref.digest not in self.folder and self.me.identity.trains:
                await self._derive_model(ref, order)
            if ref in bases and ref not in named:
                continue
            path = await self._fetch_blob(ref)
            with suppress(OSError):  # a file that is not ours or read-only may be deleted early, nothing worse
                os.utime(path)

    async def _derive_model(self, ref: BlobRef, order: Order) -> None:
        """Derive a model from another one here, if the order says how; if that fails, the whole model is fetched."""
        if (way := find_way(ref, order.differences, set(self.folder))) is None:
            return
        base, steps = way
        try:
            for step in steps:
                await self._fetch_blob(step)
            await asyncio.to_thread(self._store_derived, ref, base, steps)
        except ProtocolError as error:
            self.me.events.log_event(
                "not_followed", logging.WARNING, name=error.name, model=ref.digest, detail=str(error)
            )
        finally:
            for step in steps:
                self.folder.remove(step.digest)

    def _store_derived(self, ref: BlobRef, base: str, steps: Iterable[BlobRef]) -> None:
        """Store a model made of a base model plus differences."""
        from fedge.tensors.codecs import apply_differences  # needs zstandard, which an inference-only device may lack

        differences = [self.folder.get(step.digest) for step in steps]
        try:
            with self.folder.get_path(base).open("rb") as file, skip_fsync():  # it can be fetched again
                self.folder.put_as_made(ref.digest, apply_differences(file, differences))
        except OSError as error:
            raise StoreError(f"model {base} cannot be read: {error}") from error

    async def _fetch_blob(self, ref: BlobRef) -> Path:
        chunks, wants = self.me.topics.make_model_topic(ref.digest), self.me.make_topic("wants")
        return await self.receiver.fetch(
            ref, chunks=chunks, wants=wants, device_id=self.me.device_id, patience_s=FETCH_PATIENCE_S
        )

    def remove_unneeded(self, needed: set[str]) -> None:
        """Delete models other than those of these digests, except the most recently used."""
        others = sorted(set(self.folder) - needed, key=lambda digest: self.folder.get_path(digest).stat().st_mtime_ns)
        for digest in others[:-CACHED_MODELS]:
            self.folder.remove(digest)


def collect_model_digests(orders: Iterable[Order], steps: Steps) -> set[str]:
    """Return the digests of the models that orders name; an order of an unknown step names none."""
    named: set[str] = set()
    for order in orders:
        with suppress(ProtocolError):
            named |= {ref.digest for ref in iterate_blobs(decode_action(order, steps))}
    return named
