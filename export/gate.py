"""FedCoE's shared gate as an ONNX file, which a new device downloads to profile its data (fedcoe.md sections 4, 7).

The graph is written node by node, and equal weights give equal bytes. Adaptive pooling of images is a product with two
fixed matrices, so any image size works. Weights are stored in the file, since a gate is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from export.branch import OPSET
from export.graph_nodes import Graph
from fedge.data.task import INPUT

SHARES: Final = "p"
POOLED: Final = 4
"""Rows and columns to which images are pooled before the first linear layer (section 4)."""


def encode_gate(tensors: Mapping[str, NDArray[np.generic]], input_shape: tuple[int, ...]) -> bytes:
    """Serialise the gate as a file: x (n, *input_shape) float32 -> p (n, K), rows on the simplex.

    Args:
        tensors: conv1.weight (8, channels, 3, 3), conv1.bias, conv2.weight (16, 8, 3, 3), conv2.bias for images (a gate
            without them takes flat inputs), hidden.weight (64, F), hidden.bias (64,), out.weight (K, 64).
        input_shape: shape of a sample.
    """
    import onnx

    graph = Graph()
    for name, tensor in sorted(tensors.items()):
        graph.add_array(name, np.asarray(tensor, np.float32))
    h = INPUT
    if "conv1.weight" in tensors:
        for layer in ("conv1", "conv2"):
            convolved = graph.op("Conv", h, f"{layer}.weight", f"{layer}.bias", kernel_shape=(3, 3), pads=(1, 1, 1, 1))
            h = graph.op("MaxPool", graph.op("Relu", convolved), kernel_shape=(2, 2), strides=(2, 2))
        rows, columns = (extent // 2 // 2 for extent in input_shape[1:])
        left = graph.op("MatMul", graph.add_array("rows", make_pooling_matrix(rows, POOLED)), h)
        h = graph.op("MatMul", left, graph.add_array("columns", make_pooling_matrix(columns, POOLED).T))
    hidden = graph.op("Gemm", graph.op("Flatten", h), "hidden.weight", "hidden.bias", transB=1)
    scores = graph.op("Gemm", graph.op("Relu", hidden), "out.weight", transB=1)
    graph.op("Softmax", scores, axis=1, out=SHARES)
    n_experts = len(tensors["out.weight"])
    return graph.encode(input_shape, {SHARES: (n_experts,)}, [onnx.helper.make_opsetid("", OPSET)])


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
