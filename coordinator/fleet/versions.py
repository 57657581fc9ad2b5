"""Models that follow others: a device that has the one needs a few bytes to have the other.

A model that follows is the old one plus a difference in int8, so that all devices train from the same bytes, whichever
way they came by them, and its SHA-256 says whether they did. What rounding has left out is kept, in int8 as well, and
added to the next difference: so it is lost for a round and not for good (error feedback; Karimireddy et al., "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fedge import codec
from fedge.messages import BlobRef, Codec, Difference, back_from
from fedge.tensors import Layout, Model, unflatten

if TYPE_CHECKING:
    from coordinator.fleet import Fleet


class Descent(Difference, frozen=True, kw_only=True):
    """Of a model that follows another one. `carried`: what it lacks, for the next that follows it."""

    carried: BlobRef | None = None


def put_after(fleet: Fleet, base: BlobRef, model: Model, layout: Layout) -> BlobRef:
    """Keep a model that follows `base`, of the same layout: the model that this names is it, but for rounding.

    It is kept as it is where that is no larger, or where the fleet's `descents` are None.
    """
    tensors = unflatten(model, layout)
    if fleet.descents is None:
        return fleet.put(tensors)
    w, params = fleet.get(base, layout).params, Layout(tensors=layout.of_kind("param"))
    before = fleet.descents.get(base.digest)
    carried = before.carried if before else None
    try:
        with np.errstate(over="ignore"):
            wanted = model.params + fleet.get(carried, params).params if carried else model.params
            change = Model(wanted - w, model.buffers, model.counters)
            exact = {info.name for info in layout.of_kind("buffer")}
            data = codec.encode(unflatten(change, layout), Codec.INT8, exact)
            new = Model(w + codec.decode(data, Codec.INT8, layout, again=True).params, model.buffers, model.counters)
        ref = fleet.put(unflatten(new, layout))
        left = fleet.put(unflatten(Model(wanted - new.params, *_NOTHING), params), Codec.INT8)
    except codec.NotFiniteError:  # such large numbers have no difference, or none that can be rounded
        return fleet.put(tensors)
    if len(data) >= ref.size_bytes:
        return fleet.put(tensors)
    if ref != base:
        fleet.descents[ref.digest] = Descent(base=base.digest, blob=fleet.put_bytes(data), carried=left)
    return ref


_NOTHING = (np.empty(0, np.float32), np.empty(0, np.int64))


def leading_to(refs: Iterable[BlobRef], descents: Mapping[str, Descent]) -> dict[str, Descent]:
    """The descents that lead to models, from as far away as that is less than the whole model.

    What is carried is left out, but for the models themselves.
    """
    found: dict[str, Descent] = {}
    for ref in refs:
        for digest, _ in back_from(ref, descents):
            known = msgspec.structs.replace(descents[digest], carried=None)
            found.setdefault(digest, known)
        if ref.digest in descents:
            found[ref.digest] = descents[ref.digest]
    return found
