"""Models derived from earlier models, so that a device that has the base fetches only a few bytes for the next.

The derived model is the base plus a difference in int8, so that all devices train from the same bytes, however they got
them; the model's SHA-256 confirms this. The rounding error is kept, in int8 as well, and added to the next difference,
so that it is delayed rather than lost (error feedback; Karimireddy et al., "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fedge.tensors import codecs, rounding
from fedge.tensors.layout import Layout, Model, Tensors, to_bytes, unflatten
from fedge.wire.messages import BlobRef, Difference, iterate_differences

if TYPE_CHECKING:
    from coordinator.fleet.fleet import Fleet


class Descent(Difference, frozen=True, kw_only=True):
    """The difference by which a model derives from another. `carried`: the rounding error, for the successor."""

    carried: BlobRef | None = None


def put_successor(fleet: Fleet, base: BlobRef, model: Model, layout: Layout) -> BlobRef:
    """Store a model, rounded, as successor of `base`, of the same layout; return its reference.

    The model is stored unchanged if that is no larger, or if the fleet's `descents` are None.
    """
    if fleet.descents is None:
        return fleet.put_model(model, layout)
    before, known = fleet.get_tensors(base), fleet.descents.get(base.digest)
    carried = fleet.get_tensors(known.carried) if known and known.carried else {}
    derived = Model(np.empty_like(model.params), model.buffers, model.counters)
    now, after = unflatten(model, layout), unflatten(derived, layout)
    stored, left, rests = dict(now), Tensors(), list[Callable[[], Tensors]]()
    try:
        for name in (info.name for info in layout.select_kind("param")):
            steps, round_rest = codecs.derive_tensor(name, now[name], before[name], carried, after[name])
            stored |= steps
            rests.append(round_rest)
        writing = rounding.get_threads().submit(fleet.put_model, derived, layout)
        for each in rests:
            left |= each()
        data = codecs.pack_tensors(stored)
        blob, carry = fleet.put_bytes(data), fleet.put_bytes(to_bytes(left))
        ref = writing.result()
    except rounding.NotFiniteError:  # such large numbers cannot be subtracted or rounded
        return fleet.put_model(model, layout)
    if len(data) >= ref.size_bytes:
        return fleet.put_model(model, layout)
    if ref != base:
        fleet.descents[ref.digest] = Descent(base=base.digest, blob=blob, carried=carry)
    return ref


def find_descents(refs: Iterable[BlobRef], descents: Mapping[str, Descent]) -> dict[str, Descent]:
    """Find the descents that lead to models, as far back as the differences are smaller than the whole model.

    `carried` is left out, except for the models themselves.
    """
    found: dict[str, Descent] = {}
    for ref in refs:
        for digest, _ in iterate_differences(ref, descents):
            known = msgspec.structs.replace(descents[digest], carried=None)
            found.setdefault(digest, known)
        if ref.digest in descents:
            found[ref.digest] = descents[ref.digest]
    return found
