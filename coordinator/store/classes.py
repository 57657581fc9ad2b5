"""The classes that have joined a federation, and the models that grow with them."""

from __future__ import annotations

import json
from typing import Final

import msgspec

from coordinator.store.store import Store
from fedge.data.classes import AddedClasses, find_grown_task
from fedge.data.task import TaskSpec
from fedge.tensors.heads import grow_tensors
from fedge.tensors.layout import Layout, to_bytes, view_bytes
from fedge.wire.messages import BlobRef

CLASSES: Final = "classes"
"""Name of a value: the classes that have joined, as JSON."""
_TASK: Final = 2
"""Place of the first task's fingerprint in what identifies a federation."""


def read_classes(store: Store) -> AddedClasses:
    """Read the classes that have joined, and the fingerprint of the present task; empty before the beginning."""
    kept, identity = store.find_value(CLASSES), store.find_value("identity")
    if kept is not None:
        return msgspec.json.decode(kept, type=AddedClasses)
    return AddedClasses(fingerprint="" if identity is None else json.loads(identity)[_TASK])


def settle_task(store: Store, given: TaskSpec) -> TaskSpec:
    """Return the federation's present task if `given` is an earlier one; otherwise `given`."""
    return find_grown_task(given, read_classes(store)) or given


def grow_model(store: Store, ref: BlobRef, layout: Layout) -> BlobRef:
    """Store a model, or some of its layers, with as many outputs as the layout has; equal models give equal bytes.

    Raises:
        StoreError: it cannot be read or written.
    """
    data = to_bytes(grow_tensors(view_bytes(store.blobs.get(ref.digest)), layout))
    return BlobRef(digest=store.blobs.put(data), size_bytes=len(data))
