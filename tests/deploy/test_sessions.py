"""Which execution providers are tried, and that the CPU stands in for one that fails."""

import logging
from pathlib import Path

import numpy as np
import pytest

import deploy
from deploy.sessions import CPU, PREFERENCE, Session, chains
from fedge.bundle import INPUT, OUTPUTS, read
from fedge.errors import ConfigError
from fedge.ort import onnxruntime

pytestmark = pytest.mark.torch_free

GOLDEN = Path(__file__).parent / "golden" / "bundle"


@pytest.fixture
def jetson(monkeypatch):
    """A build that has CUDA and TensorRT, on a machine where neither starts."""
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", CPU]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)


def test_here_the_cpu_answers():
    runtime = deploy.load(GOLDEN)
    assert runtime.providers == (CPU,)
    assert deploy.load(GOLDEN, providers=[CPU]).providers == (CPU,)


def test_what_is_there_is_tried_in_a_fixed_order(jetson):
    assert chains(None) == [("CUDAExecutionProvider", CPU), ("TensorrtExecutionProvider", CPU), (CPU,)]
    assert PREFERENCE[0] == "CUDAExecutionProvider"
    assert chains(["TensorrtExecutionProvider"]) == [("TensorrtExecutionProvider", CPU), (CPU,)]
    assert chains([CPU]) == [(CPU,)]


def test_a_provider_that_this_build_lacks_is_named():
    with pytest.raises(ConfigError, match="CUDAExecutionProvider: this ONNX Runtime has"):
        deploy.load(GOLDEN, providers=["CUDAExecutionProvider"])


def test_the_cpu_stands_in_for_what_does_not_start(jetson, caplog):
    """Warnings are errors here, so ONNX Runtime refuses the providers that this machine has not."""
    with caplog.at_level(logging.WARNING, logger="fedge.deploy"):
        runtime = deploy.load(GOLDEN)
    assert runtime.providers == (CPU,)
    assert [record.getMessage().split(" reason")[0] for record in caplog.records] == [
        "event=provider_failed provider=CUDAExecutionProvider",
        "event=provider_failed provider=TensorrtExecutionProvider",
    ]
    assert runtime.predict(np.zeros((8, 8))).probabilities.shape == (1, 10)


def test_numbers_of_the_graph_can_be_replaced():
    bundle = read(GOLDEN)
    sure = {"gate.out.bias": np.array([50, 0, 0, 0, 0], np.float32)}
    session = Session(bundle.graph, bundle.folder, 1, [CPU], sure)
    weights = session.run(OUTPUTS, {INPUT: np.zeros((1, 1, 8, 8), np.float32)})[1]
    np.testing.assert_allclose(weights, [[1, 0, 0, 0, 0]], atol=1e-6)
