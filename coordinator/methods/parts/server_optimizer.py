"""The server's optimizer: a global model or an expert moves by the devices' mean change, with momentum.

Source: docs/methods/fedge.md, sections 4 and 5; without momentum it is FedAvg.
"""

from __future__ import annotations

import logging

import numpy as np
from msgspec import Struct

from coordinator.aggregation import Average
from coordinator.aggregation.momentum import apply_momentum
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.versions import put_successor
from fedge.steps.training.train import Trained
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.method")


class ServerModel(Struct, frozen=True, kw_only=True):
    """The model w and the velocity v, by reference; v is None if zero."""

    model: BlobRef
    velocity: BlobRef | None = None


def apply(model: BlobRef, change: Trained | Average | Model | None, layout: Layout, fleet: Fleet) -> BlobRef:
    """Move a model by one update or by a mean of updates, and store it: w <- w + change.

    Only an update's parameters are a difference; its running statistics and counters are those after training, and
    become the new model's. The new model is stored as successor of the old model, so that devices fetch the difference.

    Args:
        model: w, such as `state.model`.
        change: an accepted answer; the mean that `average` returns; or a `Model` made by the method, whose `params` are
            differences. If None, the model stays.
        layout: the layout of the model, such as `state.layout`.
        fleet: where models are kept.

    Returns:
        The new model; the old model if the new one would not be finite (this is logged).
    """
    if isinstance(change, Trained):
        change = fleet.get(change.update, layout)
    return step_server(ServerModel(model=model), change, layout, fleet, gamma=0.0).model


def step_server(
    server: ServerModel, mean: Average | Model | None, layout: Layout, fleet: Fleet, *, gamma: float
) -> ServerModel:
    """Do one step: v <- gamma v + mean change;  w <- w + v.  Buffers and counters are the mean's.

    Args:
        server: w, v.
        mean: mean of the devices' changes; if None, the model stays.
        layout: the layout of the model.
        fleet: where models are kept.
        gamma: momentum, in [0, 1); with 0 no velocity is kept.

    Returns:
        The model after the step; the old model, with v = 0, if the new one would not be finite (this is logged).
    """
    if mean is None:
        return server
    w = fleet.get(server.model, layout)
    v = fleet.get_tensors(server.velocity)["v"].astype(np.float32) if server.velocity else None
    step = apply_momentum(w.params, v, mean.params, gamma=gamma)
    if step.diverged:
        log.error("event=diverged the model would become non-finite; the old one is kept")
        return ServerModel(model=server.model)
    model = Model(step.w, mean.buffers.astype(np.float32), mean.counters)
    velocity = None if step.v is None else fleet.put({"v": step.v})
    return ServerModel(model=put_successor(fleet, server.model, model, layout), velocity=velocity)
