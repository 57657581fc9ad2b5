"""The models and updates of a simulation: in memory, on disk, or in the processes that made them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.sites import Note, SiteMean, SiteSums
from edge_agent.device.device import UnpackedModel, encode_blob
from edge_agent.device.room import UpdateStore
from edge_agent.device.worker import FinishedOrder
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.models import weights
from fedge.models.weights import find_device_weights
from fedge.system.files import compute_digest
from fedge.tensors import codecs, rounding
from fedge.tensors.layout import Codec, Layout, Model, Tensors, to_pieces, unflatten, view_bytes
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from coordinator.fleet.simulated.on_ray import Block, Shards


IN_MEMORY: Final = 2**31
"""Most bytes of unencoded updates in memory; further updates are on the disk (`edge_agent.device.room`)."""


@dataclass(frozen=True, slots=True)
class RemoteUpdate:
    """An update that stays with the process that made it, in `block`."""

    layout: Layout
    norms: codecs.Norms
    at: Shards
    block: Block


@dataclass(frozen=True, slots=True)
class RemoteFinished(FinishedOrder):
    """A result whose updates are not in this process. `held`: the updates by digest."""

    held: dict[str, RemoteUpdate] = field(default_factory=dict)


class InMemory(Fleet):
    """The models and updates of simulated devices, by digest."""

    def __init__(self, task: TaskSpec) -> None:
        self.task = task
        self._blobs: dict[str, bytes | UnpackedModel | RemoteUpdate] = {}
        if (frozen := find_device_weights(task)) is not None:
            self._blobs[frozen.digest] = weights.read_weights(frozen.digest)

    @property
    def sites(self) -> InMemory:
        """The processes that keep the updates that they made; None if none does."""
        return self

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep tensors in memory."""
        data = codecs.encode(tensors, codec_)
        ref = BlobRef(digest=compute_digest(data), size_bytes=len(data), codec=codec_)
        self._blobs[ref.digest] = data
        return ref

    def put_model(self, model: Model, layout: Layout) -> BlobRef:
        """Keep a model in memory, unencoded, since nobody else reads it; from now on it is read-only."""
        measured, pieces = (
            rounding.get_threads().submit(codecs.compute_norms, model),
            to_pieces(unflatten(model, layout)),
        )
        ref = BlobRef(digest=compute_digest(*pieces), size_bytes=sum(map(len, pieces)))
        norms = measured.result()
        if not all(map(math.isfinite, norms)):
            raise rounding.NotFiniteError("a model holds numbers that are not finite")
        for vector in (model.params, model.buffers, model.counters):
            vector.flags.writeable = False
        self._blobs[ref.digest] = UnpackedModel(model, layout, norms)
        return ref

    def put_bytes(self, data: bytes) -> BlobRef:
        """Keep a file in memory."""
        ref = BlobRef(digest=compute_digest(data), size_bytes=len(data))
        self._blobs[ref.digest] = data
        return ref

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """Return a model or an update; its arrays may be read-only."""
        if ref.digest not in self._blobs:
            raise ProtocolError("unknown-blob", ref.digest)
        found = self._load_blob(ref)
        if isinstance(found, UnpackedModel) and found.layout == layout:
            return found.model
        return codecs.decode(self.get_bytes(ref), ref.codec, layout, again=True)

    def get_bytes(self, ref: BlobRef) -> bytes:
        """Return the bytes of a blob, which is encoded now if necessary."""
        return encode_blob(self._load_blob(ref), ref.codec)

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Return tensors in FLOAT32, uncopied."""
        found = self._load_blob(ref)
        return unflatten(found.model, found.layout) if isinstance(found, UnpackedModel) else view_bytes(found)

    def get_norms(self, ref: BlobRef, layout: Layout) -> codecs.Norms:
        """Return the norms; for an update, those measured on arrival."""
        found = self._blobs[ref.digest]
        if not isinstance(found, bytes) and found.layout == layout:
            return found.norms
        return codecs.check_blob(self.get_bytes(ref), ref.codec, layout)

    def _load_blob(self, ref: BlobRef) -> bytes | UnpackedModel:
        found = self._blobs[ref.digest]
        return found.at.fetch(found.block, ref.digest) if isinstance(found, RemoteUpdate) else found

    def remove_others(self, digests: Collection[str]) -> None:
        """Remove all other tensors."""
        self._blobs = {digest: data for digest, data in self._blobs.items() if digest in digests}

    def _compute_room(self) -> UpdateStore:
        """Return the memory that earlier updates leave free."""
        kept = (own.kept for own in self._blobs.values() if isinstance(own, UnpackedModel))
        return UpdateStore(IN_MEMORY - sum(update.params.nbytes for update in kept if isinstance(update, Model)))

    def find_remote(self, updates: Mapping[str, BlobRef]) -> dict[str, RemoteUpdate]:
        """Return the updates that stay with the processes that made them."""
        found = {i: self._blobs.get(ref.digest) for i, ref in updates.items()}
        return {i: each for i, each in found.items() if isinstance(each, RemoteUpdate)}

    async def compute_means(self, wanted: SiteSums, note: Note) -> list[SiteMean]:
        """Have the processes that keep updates average them, and return the means."""
        held = self.find_remote(wanted.updates)
        return next(iter(held.values())).at.compute_means(wanted, {i: each.block for i, each in held.items()}, note)
