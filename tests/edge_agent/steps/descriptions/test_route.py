"""Cold start: what the shared gate says of a device's samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from coordinator.methods.server.learning import Gate
from edge_agent.steps.descriptions.route import CHUNK
from export.gate import encode_gate
from fedge.steps.contract import Failed
from fedge.steps.descriptions.route import Route, Routed
from tests.support.cold_device import ColdDevice


def gate_of(input_shape: tuple[int, ...] = (1,), n_experts: int = 4) -> tuple[Gate, bytes]:
    torch.manual_seed(1)
    gate = Gate(input_shape, n_experts)
    return gate, encode_gate({name: value.detach().numpy() for name, value in gate.state_dict().items()}, input_shape)


@pytest.mark.parametrize("n", [1, 6, CHUNK + 3])
def test_the_profile_is_the_mean_of_the_gate(tmp_path: Path, n: int) -> None:
    device, (gate, file) = ColdDevice(tmp_path, n), gate_of()
    result = device.does(Route(gate=device.blobs.file(file)))
    with torch.inference_mode():
        expected = torch.softmax(gate(torch.from_numpy(device.x)).double(), dim=1).mean(dim=0).numpy()
    assert isinstance(result, Routed)
    assert result.n_samples == n
    np.testing.assert_allclose(result.shares, expected, atol=1e-6)
    assert sum(result.shares) == pytest.approx(1, abs=1e-12)


def test_without_samples_the_profile_is_uniform(tmp_path: Path) -> None:
    device = ColdDevice(tmp_path, 0)
    assert device.does(Route(gate=device.blobs.file(gate_of()[1]))) == Routed(shares=(0.25,) * 4, n_samples=0)


def gate_with_a_loop() -> bytes:
    """A gate (n, 1) -> (n, 2) that adds its input to itself in a Loop; here it ends after three turns."""
    value = onnx.helper.make_tensor_value_info
    flag, number, x = onnx.TensorProto.BOOL, onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["go_on"], ["on"]), onnx.helper.make_node("Add", ["so_far", "x"], ["more"])],
        "turn",
        [value("turn", number, []), value("go_on", flag, []), value("so_far", x, ["n", 2])],
        [value("on", flag, []), value("more", x, ["n", 2])],
    )
    first = [
        onnx.helper.make_node("Concat", ["x", "x"], ["first"], axis=1),
        onnx.helper.make_node("Constant", [], ["turns"], value_int=3),
        onnx.helper.make_node("Loop", ["turns", "", "first"], ["sum"], body=body),
        onnx.helper.make_node("Softmax", ["sum"], ["p"], axis=1),
    ]
    graph = onnx.helper.make_graph(first, "gate", [value("x", x, ["n", 1])], [value("p", x, ["n", 2])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def test_a_gate_that_might_never_end_is_not_run(tmp_path: Path) -> None:
    device = ColdDevice(tmp_path)
    result = device.does(Route(gate=device.blobs.file(gate_with_a_loop())))
    assert isinstance(result, Failed)
    assert "its node Loop has a graph of its own" in result.reason


@pytest.mark.parametrize("gate", [b"no graph", gate_of((3,))[1]], ids=["no graph", "other inputs"])
def test_a_gate_that_cannot_be_run_is_reported(tmp_path: Path, gate: bytes) -> None:
    device = ColdDevice(tmp_path)
    result = device.does(Route(gate=device.blobs.file(gate)))
    assert isinstance(result, Failed)
    assert "gate cannot be run" in result.reason
