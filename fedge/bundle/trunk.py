"""The convolutions of FedCoE's gate in numpy (fedcoe.md section 4). `export.gate` builds the same as an ONNX graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedge.data.problems.maths import Floats

LAYERS: Final = ("conv1", "conv2")
"""Names of the gate's convolutions, in order."""
POOLED: Final = 4
"""Rows and columns to which images are pooled before the first linear layer (section 4)."""

Convolution = tuple[Floats, Floats]
"""Weight (out, in, 3, 3) and bias (out,)."""


def compute_trunk(x: Floats, convolutions: Sequence[Convolution]) -> Floats:
    """Return the features (n, 16 * channels) of images (n, channels, height, width), in the precision of the weights.

    Each convolution is 3 x 3 with padding, then ReLU and the largest of 2 x 2. Their last output is averaged to 4 x 4.
    """
    for weight, bias in convolutions:
        windows = sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3))
        z = np.maximum(np.tensordot(windows, weight, axes=((1, 4, 5), (1, 2, 3))) + bias, 0)
        n, rows, columns = len(z), z.shape[1] // 2, z.shape[2] // 2
        x = z[:, : 2 * rows, : 2 * columns].reshape(n, rows, 2, columns, 2, -1).max(axis=(2, 4)).transpose(0, 3, 1, 2)
    rows, columns = x.shape[2:]
    pooled: Floats = make_pooling_matrix(rows, POOLED) @ x @ make_pooling_matrix(columns, POOLED).T
    return pooled.reshape(len(pooled), -1)


def make_pooling_matrix(n_in: int, n_out: int) -> NDArray[np.float32]:
    """Return the matrix (m, n) of adaptive average pooling: row o averages [floor(o n / m), ceil((o+1) n / m)).

    Example:
        >>> make_pooling_matrix(3, 2).tolist()
        [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    matrix = np.zeros((n_out, n_in), np.float32)
    for o in range(n_out):
        start, stop = o * n_in // n_out, -(-(o + 1) * n_in // n_out)
        matrix[o, start:stop] = 1 / (stop - start)
    return matrix
