"""A vector that a device keeps over rounds, and takes back if its last report did not count.

An order of a step that has one says in which round the device's last report counted, which only the server knows: a
relay accepts reports that may come too late above, and an accepted update may be left out as too long.
"""

from __future__ import annotations

import numpy as np

from fedge.tensors.layers import BEFORE, NOW, ROUND, Layers, make_reversible_layout
from fedge.tensors.layout import Floats, Layout, Model, Tensors, flatten


def read_vector(mine: Layers | None, *, counted: int, n_params: int) -> Floats:
    """Return the vector (n_params,) as of the last report that counted: zeros if none did, or nothing is kept.

    `counted`: the round of that report; 0 if none did. A later vector is of a report that did not count.
    """
    if mine is None or counted == 0:
        return np.zeros(n_params, np.float32)
    return mine[NOW if int(mine[ROUND]) <= counted else BEFORE].astype(np.float32)


def pack_vector(now: Floats, before: Floats, round_number: int, layout: Layout) -> Model:
    """Return what `Learned.kept` takes: the vector of this round and the one before, both (d,).

    `layout`: the network's.
    """
    tensors: Tensors = {NOW: now, BEFORE: before, ROUND: np.array(round_number, np.int64)}
    return flatten(tensors, make_reversible_layout(layout))
