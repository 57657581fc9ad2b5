"""A vector that a device keeps over rounds, and takes back if its last report did not count.

A step that has one asks `Device.was_counted` in every order.
"""

from __future__ import annotations

import numpy as np

from fedge.tensors.layers import BEFORE, NOW, Layers, make_reversible_layout
from fedge.tensors.layout import Floats, Layout, Model, flatten


def read_vector(mine: Layers | None, *, counted: bool | None, n_params: int) -> Floats:
    """Return the vector (n_params,): zeros if nothing is kept; the one before the last if that did not count.

    `counted`: what `Device.was_counted` says.
    """
    if mine is None:
        return np.zeros(n_params, np.float32)
    return mine[BEFORE if counted is False else NOW].astype(np.float32)


def pack_vector(now: Floats, before: Floats, layout: Layout) -> Model:
    """Return what `Learned.kept` takes: the new vector and the one before, both (d,); `layout`: the network's."""
    return flatten({NOW: now, BEFORE: before}, make_reversible_layout(layout))
