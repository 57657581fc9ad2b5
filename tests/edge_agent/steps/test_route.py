"""Cold start: what the shared gate says of a device's samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.server_data import Gate
from edge_agent.steps.route import CHUNK
from export.gate import gate_onnx
from fedge.step import Failed
from fedge.steps.route import Route, Routed
from tests.support.cold_device import ColdDevice


def gate_of(input_shape: tuple[int, ...] = (1,), n_experts: int = 4) -> tuple[Gate, bytes]:
    torch.manual_seed(1)
    gate = Gate(input_shape, n_experts)
    return gate, gate_onnx({name: value.detach().numpy() for name, value in gate.state_dict().items()}, input_shape)


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


@pytest.mark.parametrize("gate", [b"no graph", gate_of((3,))[1]], ids=["no graph", "other inputs"])
def test_a_gate_that_cannot_be_run_is_reported(tmp_path: Path, gate: bytes) -> None:
    device = ColdDevice(tmp_path)
    result = device.does(Route(gate=device.blobs.file(gate)))
    assert isinstance(result, Failed)
    assert "gate cannot be run" in result.reason
