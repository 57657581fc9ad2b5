"""Which execution providers are tried, and that the CPU stands in for one that fails."""

import logging
from pathlib import Path

import numpy as np
import pytest

import deploy
from deploy.inference.sessions import CPU, PREFERENCE, Session, list_provider_chains
from fedge.bundle.manifest import read_bundle
from fedge.bundle.runtime import find_wheels, onnxruntime
from fedge.data.task import INPUT
from fedge.errors import ConfigError

pytestmark = pytest.mark.torch_free

GOLDEN = Path(__file__).parents[1] / "golden" / "bundle"


@pytest.fixture
def jetson(monkeypatch):
    """A build that has CUDA and TensorRT, on a machine where neither starts."""
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", CPU]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)


def test_here_the_cpu_answers():
    assert deploy.load(GOLDEN).providers == (CPU,)
    assert deploy.load(GOLDEN, provider="cpu").providers == (CPU,)


def test_what_is_there_is_tried_in_a_fixed_order(jetson):
    assert list_provider_chains() == [("CUDAExecutionProvider", CPU), ("TensorrtExecutionProvider", CPU), (CPU,)]
    assert PREFERENCE[0] == "CUDAExecutionProvider"
    assert list_provider_chains("cpu") == [(CPU,)]
    assert list_provider_chains("cuda", {"device_id": "1"}) == [(("CUDAExecutionProvider", {"device_id": "1"}), CPU)]


@pytest.mark.parametrize("name", ["tensorrt", "TensorrtExecutionProvider"])
def test_tensorrt_keeps_its_engines_and_has_cuda_beside_it(jetson, monkeypatch, tmp_path, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "made"))
    folder = tmp_path / "not" / "made" / "fedge" / "tensorrt"
    kept = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(folder)}
    half = {"trt_fp16_enable": "1", "trt_engine_cache_path": str(tmp_path / "x")}
    for options, given in (({}, kept), (half, kept | half)):
        assert list_provider_chains(name, options) == [
            (("TensorrtExecutionProvider", given), "CUDAExecutionProvider", CPU)
        ]
    assert folder.is_dir()
    assert (tmp_path / "x").is_dir()


def test_a_cache_that_cannot_be_made_is_done_without(jetson, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ((_, given), *_) = list_provider_chains("tensorrt")[0]
    assert given["trt_engine_cache_enable"] == "0"
    assert "event=no_engine_cache" in caplog.text


def test_a_provider_that_this_build_lacks_is_named_with_what_is_installed():
    with pytest.raises(ConfigError, match=r"provider cuda here: onnxruntime\S* [0-9.]+ has .*CPUExecutionProvider"):
        deploy.load(GOLDEN, provider="cuda")
    with pytest.raises(ConfigError, match="give --provider, too"):
        deploy.load(GOLDEN, provider_options={"device_id": "1"})


def test_a_provider_that_runs_no_node_is_not_claimed():
    """The wheels have one for a cloud, which takes no node of ours; `get_providers` names it all the same."""
    azure = "AzureExecutionProvider"
    if azure not in onnxruntime.get_available_providers():
        pytest.skip("another build of ONNX Runtime")
    bundle = read_bundle(GOLDEN)
    assert Session(bundle.graph, bundle.folder, 1, [azure, CPU]).providers == (CPU,)
    with pytest.raises(ConfigError, match=f"{azure} does not run .* computes on {CPU} instead"):
        deploy.load(GOLDEN, provider=azure)


def test_one_that_is_named_and_does_not_start_is_an_error(jetson):
    with pytest.raises(ConfigError, match="cuda does not run"):
        deploy.load(GOLDEN, provider="cuda")


def test_two_wheels_of_which_one_wins_are_named(tmp_path, monkeypatch, caplog):
    for name in ("onnxruntime-1.31.1", "onnxruntime_gpu-1.23.0", "onnxruntime_extensions-0.14.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert len(find_wheels()) == 1
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "onnxruntime" / "__init__.py"))
    assert find_wheels() == ("onnxruntime 1.31.1", "onnxruntime-gpu 1.23.0")
    with (
        caplog.at_level(logging.WARNING, logger="fedge.deploy"),
        pytest.raises(ConfigError, match=r"1\.23\.0 has "),
    ):
        deploy.load(GOLDEN, provider="cuda")
    assert "event=two_wheels" in caplog.text


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
    bundle = read_bundle(GOLDEN)
    sure = {"gate.out.bias": np.array([50, 0, 0, 0, 0], np.float32)}
    session = Session(bundle.graph, bundle.folder, 1, [CPU], sure)
    weights = session.run(("probabilities", "weights"), {INPUT: np.zeros((1, 1, 8, 8), np.float32)})[1]
    np.testing.assert_allclose(weights, [[1, 0, 0, 0, 0]], atol=1e-6)
