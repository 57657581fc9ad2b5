"""The shared gate (docs/methods/fedcoe.md) as an ONNX file: it says what torch says, for any image size."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from coordinator.methods.server.learning import Gate
from export.gate import encode_gate
from fedge.bundle.runtime import onnxruntime


def made(input_shape: tuple[int, ...], n_experts: int = 5, trunk: str = "auto") -> tuple[Gate, bytes]:
    torch.manual_seed(0)
    gate = Gate(input_shape, n_experts, trunk)
    tensors = {name: value.detach().numpy() for name, value in gate.state_dict().items()}
    return gate, encode_gate(tensors, input_shape)


def run(file: bytes, x: NDArray[np.float32]) -> NDArray[np.float32]:
    (p,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return p


@pytest.mark.parametrize(
    ("input_shape", "trunk"),
    [
        ((1, 8, 8), "auto"),  # 2 x 2 before the pooling to 4 x 4
        ((1, 14, 14), "auto"),  # 3 x 3
        ((3, 32, 27), "auto"),
        ((1, 4, 5), "auto"),
        ((2, 3, 3), "auto"),  # too small for two poolings: a vector
        ((1, 14, 14), "vector"),
        ((561,), "auto"),
        ((6, 20), "auto"),
    ],
)
def test_onnx_runtime_says_what_torch_says(input_shape: tuple[int, ...], trunk: str) -> None:
    gate, file = made(input_shape, trunk=trunk)
    x = np.random.default_rng(0).normal(size=(7, *input_shape)).astype(np.float32)
    with torch.inference_mode():
        expected = torch.softmax(gate(torch.from_numpy(x)), dim=1).numpy()
    np.testing.assert_allclose(run(file, x), expected, atol=1e-6)
    np.testing.assert_allclose(expected.sum(axis=1), 1, atol=1e-6)


def test_a_gate_is_small() -> None:
    """Section 4: with one input channel and K = 5 it has 18,016 parameters."""
    gate, file = made((1, 28, 28))
    assert sum(parameter.numel() for parameter in gate.parameters()) == 18_016
    assert len(file) < 4 * 18_016 + 5_000


def test_equal_weights_give_equal_bytes_without_traces_of_this_machine() -> None:
    assert made((1, 14, 14))[1] == made((1, 14, 14))[1]
    model = onnx.load_from_string(made((1, 14, 14))[1])
    onnx.checker.check_model(model)
    assert not model.metadata_props
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
