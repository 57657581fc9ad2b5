"""A model that the server moves by what devices learned, with momentum: a global model, or the expert of a cluster.

Source: docs/methods/fedge.md, sections 4 and 5; without momentum it is FedAvg.
"""

from __future__ import annotations

import logging

import numpy as np
from msgspec import Struct

from coordinator.aggregation import Average
from coordinator.aggregation.momentum import server_step
from coordinator.fleet import Fleet
from fedge.messages import BlobRef
from fedge.tensors import Layout, Model, unflatten

log = logging.getLogger("fedge.method")


class Moving(Struct, frozen=True, kw_only=True):
    """w and v, by reference. No velocity is zero velocity."""

    model: BlobRef
    velocity: BlobRef | None = None


def moved(moving: Moving, mean: Average, layout: Layout, fleet: Fleet, *, gamma: float) -> Moving:
    """One step: v <- gamma v + mean change;  w <- w + v.  Buffers and counters are the mean's.

    Args:
        moving: w, v.
        mean: of the devices' changes.
        layout: of the model.
        fleet: where models are kept.
        gamma: momentum, in [0, 1); with 0 no velocity is kept.

    Returns:
        The model after the step; the old one, at rest, where the new one would not be finite (this is logged).
    """
    w = fleet.get(moving.model, layout)
    v = fleet.get_tensors(moving.velocity)["v"].astype(np.float32) if moving.velocity else None
    step = server_step(w.params, v, mean.params, gamma=gamma)
    if step.diverged:
        log.error("event=diverged the model would become non-finite; the old one is kept")
        return Moving(model=moving.model)
    model = Model(step.w, mean.buffers.astype(np.float32), mean.counters)
    velocity = None if step.v is None else fleet.put({"v": step.v})
    return Moving(model=fleet.put(unflatten(model, layout)), velocity=velocity)
