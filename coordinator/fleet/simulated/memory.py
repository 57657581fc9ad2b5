"""What a simulation has of models and updates: in memory, on disk, or where they were made."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.sites import Note, SiteMean, SiteSums
from edge_agent.device.device import Unpacked, as_bytes
from edge_agent.device.room import Room
from edge_agent.device.worker import Finished
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.models import weights
from fedge.models.weights import needed_on_devices
from fedge.system.files import digest_of
from fedge.tensors import codecs, rounding
from fedge.tensors.layout import Codec, Layout, Model, Tensors, to_pieces, unflatten, views_of
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from coordinator.fleet.simulated.on_ray import Block, Shards


IN_MEMORY: Final = 2**31
"""Most bytes of what is unencoded in memory; further updates are on the disk (`edge_agent.device.room`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """An update that stays with the process that made it, in a block of `at`."""

    layout: Layout
    norms: codecs.Norms
    at: Shards
    block: Block


@dataclass(frozen=True, slots=True)
class FinishedElsewhere(Finished):
    """A result whose updates are not here. `held`: by digest."""

    held: dict[str, Held] = field(default_factory=dict)


class InMemory(Fleet):
    """The models and updates of simulated devices, by digest."""

    def __init__(self, task: TaskSpec) -> None:
        self.task = task
        self._blobs: dict[str, bytes | Unpacked | Held] = {}
        if (frozen := needed_on_devices(task)) is not None:
            self._blobs[frozen.digest] = weights.read(frozen.digest)

    @property
    def sites(self) -> InMemory:
        """Processes that keep the updates that they made, if any do."""
        return self

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep tensors in memory."""
        data = codecs.encode(tensors, codec_)
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data), codec=codec_)
        self._blobs[ref.digest] = data
        return ref

    def put_model(self, model: Model, layout: Layout) -> BlobRef:
        """Keep a model in memory, unencoded, since nobody else reads it; from now on it is read-only."""
        measured, pieces = rounding.threads().submit(codecs.norms_of, model), to_pieces(unflatten(model, layout))
        ref = BlobRef(digest=digest_of(*pieces), size_bytes=sum(map(len, pieces)))
        norms = measured.result()
        if not all(map(math.isfinite, norms)):
            raise rounding.NotFiniteError("a model holds numbers that are not finite")
        for vector in (model.params, model.buffers, model.counters):
            vector.flags.writeable = False
        self._blobs[ref.digest] = Unpacked(model, layout, norms)
        return ref

    def put_bytes(self, data: bytes) -> BlobRef:
        """Keep a file in memory."""
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data))
        self._blobs[ref.digest] = data
        return ref

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """A model or an update; its arrays may be read-only."""
        if ref.digest not in self._blobs:
            raise ProtocolError("unknown-blob", ref.digest)
        found = self._here(ref)
        if isinstance(found, Unpacked) and found.layout == layout:
            return found.model
        return codecs.decode(self.get_bytes(ref), ref.codec, layout, again=True)

    def get_bytes(self, ref: BlobRef) -> bytes:
        """A blob; what is unencoded is encoded first."""
        return as_bytes(self._here(ref), ref.codec)

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Tensors in FLOAT32, uncopied."""
        found = self._here(ref)
        return unflatten(found.model, found.layout) if isinstance(found, Unpacked) else views_of(found)

    def norms(self, ref: BlobRef, layout: Layout) -> codecs.Norms:
        """For an update, as measured on arrival."""
        found = self._blobs[ref.digest]
        if not isinstance(found, bytes) and found.layout == layout:
            return found.norms
        return codecs.check(self.get_bytes(ref), ref.codec, layout)

    def _here(self, ref: BlobRef) -> bytes | Unpacked:
        found = self._blobs[ref.digest]
        return found.at.fetch(found.block, ref.digest) if isinstance(found, Held) else found

    def keep_only(self, digests: Collection[str]) -> None:
        """Forget all other tensors."""
        self._blobs = {digest: data for digest, data in self._blobs.items() if digest in digests}

    def _room(self) -> Room:
        """The memory that earlier updates leave free."""
        kept = (own.kept for own in self._blobs.values() if isinstance(own, Unpacked))
        return Room(IN_MEMORY - sum(update.params.nbytes for update in kept if isinstance(update, Model)))

    def held(self, updates: Mapping[str, BlobRef]) -> dict[str, Held]:
        """The updates that stay with the processes that made them."""
        found = {i: self._blobs.get(ref.digest) for i, ref in updates.items()}
        return {i: each for i, each in found.items() if isinstance(each, Held)}

    async def means(self, wanted: SiteSums, note: Note) -> list[SiteMean]:
        """Their means, summed there."""
        held = self.held(wanted.updates)
        return next(iter(held.values())).at.means(wanted, {i: each.block for i, each in held.items()}, note)
