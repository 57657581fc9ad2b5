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
from fedge.bundle.trunk import LAYERS, POOLED, make_pooling_matrix
from fedge.data.task import INPUT

SHARES: Final = "p"


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
    h = add_trunk(graph, input_shape) if f"{LAYERS[0]}.weight" in tensors else graph.op("Flatten", INPUT)
    hidden = graph.op("Gemm", h, "hidden.weight", "hidden.bias", transB=1)
    scores = graph.op("Gemm", graph.op("Relu", hidden), "out.weight", transB=1)
    graph.op("Softmax", scores, axis=1, out=SHARES)
    n_experts = len(tensors["out.weight"])
    return graph.encode(input_shape, {SHARES: (n_experts,)}, [onnx.helper.make_opsetid("", OPSET)])


def add_trunk(graph: Graph, input_shape: tuple[int, ...], prefix: str = "") -> str:
    """Add the gate's convolutions, whose weights the graph has, and return the name of their features (n, F).

    `prefix`: before the names of the weights. `fedge.bundle.trunk` computes the same in numpy.
    """
    h = INPUT
    for layer in LAYERS:
        own = f"{prefix}{layer}"
        convolved = graph.op("Conv", h, f"{own}.weight", f"{own}.bias", kernel_shape=(3, 3), pads=(1, 1, 1, 1))
        h = graph.op("MaxPool", graph.op("Relu", convolved), kernel_shape=(2, 2), strides=(2, 2))
    rows, columns = (extent // 2 // 2 for extent in input_shape[1:])
    left = graph.op("MatMul", graph.add_array(f"{prefix}rows", make_pooling_matrix(rows, POOLED)), h)
    right = graph.add_array(f"{prefix}columns", make_pooling_matrix(columns, POOLED).T)
    return graph.op("Flatten", graph.op("MatMul", left, right))
