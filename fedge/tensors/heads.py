"""Further outputs of a network's head, for classes that join: the head's tensors grow, all others stay.

The new outputs come last, so the earlier ones keep their numbers. A new row of the weight is the mean of the rows that
were there, and its bias the smallest one. So the new output is never the largest before training, and the network
answers as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.tensors.layout import HEAD, Layout, Tensors


def grow_layout(layout: Layout, n_classes: int) -> Layout:
    """Return the layout of the network with this many outputs.

    Raises:
        ConfigError: the network has no head.
    """
    head = tuple(info for info in layout.tensors if info.layer == HEAD[0])
    if not head:
        raise ConfigError(
            "the network has no head to which an output could be added: its last layer must be linear, with weight and "
            "bias of its own, and its output the logits; another network is another federation"
        )
    return replace(
        layout,
        tensors=tuple(
            replace(info, shape=(n_classes, *info.shape[1:])) if info in head else info for info in layout.tensors
        ),
    )


def grow_tensors(tensors: Mapping[str, NDArray[np.generic]], layout: Layout) -> Tensors:
    """Return tensors of a network, or of some of its layers, with as many outputs as the layout has.

    Tensors that lack no outputs are returned as they are; so are those that the layout does not have.
    """
    shapes = {info.name: info.shape for info in layout.tensors}
    return {name: _grow_tensor(array, shapes.get(name, array.shape)) for name, array in tensors.items()}


def _grow_tensor(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the tensor with further rows; as it is if only its rows do not say that it lacks some."""
    n_new = shape[0] - array.shape[0] if array.ndim and len(shape) == array.ndim else 0
    if n_new <= 0 or array.shape[1:] != shape[1:]:
        return array
    row = array.mean(axis=0, dtype=np.float64).astype(array.dtype) if array.ndim > 1 else array.min()
    return np.concatenate([array, np.broadcast_to(row, (n_new, *array.shape[1:]))])
