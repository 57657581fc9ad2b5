"""8 bits on real digits: close to float32, refused where they are not, and run by a device without onnx."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from msgspec import UNSET

import deploy
from export import Candidate, GateWeights, Mixture, write_bundle
from export.cli import export
from export.int8 import Int8Limits, quantise_bundle
from fedge.bundle.graph_reader import find_largest_int8
from fedge.bundle.manifest import INT8, read_bundle
from fedge.data.task import TaskSpec
from fedge.data.validation import Validation
from fedge.errors import ConfigError, UpdateRejected
from fedge.models.build import make_initial_model
from fedge.models.training import Network
from fedge.wire.messages import Role
from tests.support.problem_bundles import KINDS, make_kind

TASK = TaskSpec(
    name="digits", classes=tuple("0123456789"), input_shape=(1, 8, 8), model="mlp", model_options={"hidden": 32}
)


ANY_SPEED = Int8Limits(latency_ratio=math.inf)


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)


@pytest.fixture(scope="module")
def home(tmp_path_factory, digits):
    """A device with a bundle of three trained models and validation samples of its own."""
    x, y = digits
    home = tmp_path_factory.mktemp("home")
    network = Network(TASK)
    models = [_trained(network, x[k:1200:3], y[k:1200:3], seed=k) for k in range(3)]
    roles = [Role.PRIVATE, Role.GLOBAL, Role.EXPERT]
    prior = np.full(10, -np.log(10))
    mixture = Mixture(
        tuple(
            Candidate(roles[k], roles[k], models[k], prior, energy_mean=5, energy_std=2, weight=1 / 3)
            for k in range(3)
        ),
        0.5, GateWeights.make_untrained(TASK.input_shape, 3),
    )  # fmt: skip
    write_bundle(
        home / "bundles" / "1", task=TASK, layout=network.layout, mixture=mixture, validation=x[1200:1400],
        release=1, method="test", metrics={"accuracy": 0.9},
    )  # fmt: skip
    Validation(x[1200:1400], y[1200:1400]).save(home)
    return home


@pytest.mark.parametrize("name", [name for name in KINDS if name != "classification"])
def test_answers_that_are_no_classes_are_refused_before_anything_is_written(tmp_path, name):
    """A comparison of classes would let any number pass."""
    kind = make_kind(name)
    bundle = read_bundle(kind.write_bundle(tmp_path / "1", release=1, steps=1))
    with pytest.raises(ConfigError, match="8 bits are checked by the classes"):
        quantise_bundle(bundle, Validation(kind.x, kind.convert()), tmp_path / "small", ANY_SPEED)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_turned_bundle_is_calibrated_and_examined_on_what_the_graph_takes(home, digits, tmp_path):
    x, y = digits
    bundle = read_bundle(home / "bundles" / "1")
    turned = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, turned=1))
    seen = np.rot90(x[1200:1400], -1, axes=(2, 3))
    report = quantise_bundle(turned, Validation(seen, y[1200:1400]), tmp_path / "int8", ANY_SPEED)
    again = quantise_bundle(bundle, Validation(x[1200:1400], y[1200:1400]), tmp_path / "plain", ANY_SPEED)
    assert (report.accuracy, report.accuracy_int8) == (again.accuracy, again.accuracy_int8)


def _trained(network, x, y, seed):
    import torch

    module = network.module
    network.load(make_initial_model(TASK, seed)[1])
    optimiser = torch.optim.Adam(module.parameters(), 0.01)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network.dump()


def test_is_close_to_float32_on_samples_it_has_not_seen(tmp_path, home, digits):
    bundle = read_bundle(home / "bundles" / "1")
    x, y = digits
    report = quantise_bundle(bundle, Validation(x[1200:1400], y[1200:1400]), tmp_path / "small", ANY_SPEED)
    fused, small = (deploy.load(tmp_path / "small", engine=engine) for engine in ("fused", "int8"))
    one, other = fused.predict_inputs(x[1400:]), small.predict_inputs(x[1400:])
    assert (one.class_index == other.class_index).mean() >= 0.98
    assert 0 < np.abs(one.probabilities - other.probabilities).max() < 0.05  # it is another graph, and near
    np.testing.assert_allclose(one.probabilities, deploy.load(bundle.folder).predict_inputs(x[1400:]).probabilities)

    assert (report.n, report.agreement >= 0.98) == (100, True)
    assert min(report.latency_ms, report.latency_int8_ms) > 0
    assert abs(report.accuracy - report.accuracy_int8) <= 0.02
    manifest = fused.manifest
    assert report.size_bytes == manifest.int8.size_bytes
    assert report.size_bytes < sum(part.size_bytes for part in set(manifest.parts))
    before = read_bundle(home / "bundles" / "1").manifest.metrics
    assert manifest.metrics == before | {
        "int8_agreement": report.agreement, "int8_validation_accuracy": report.accuracy_int8,
    }  # fmt: skip
    assert read_bundle(home / "bundles" / "1").manifest.int8 is UNSET


def test_the_layers_that_make_the_logits_stay_in_float32(tmp_path, home, digits):
    x, y = digits
    quantise_bundle(
        read_bundle(home / "bundles" / "1"), Validation(x[1200:1400], y[1200:1400]), tmp_path / "small", ANY_SPEED
    )
    graph = onnx.load(tmp_path / "small" / "int8.onnx").graph
    maker = {output: node.op_type for node in graph.node for output in node.output}
    layers = {
        c: [node for node in graph.node if node.name.startswith(f"c{c}/") and node.op_type == "Gemm"] for c in range(3)
    }
    rounded = {c: [maker.get(node.input[1]) == "DequantizeLinear" for node in nodes] for c, nodes in layers.items()}
    assert rounded == {c: [True, False] for c in range(3)}


def test_its_sums_saturate_on_no_processor(tmp_path, home, digits):
    """Without VNNI, x86-64 adds two products of 8 bits in 16 bits: 2 x 255 x 64 fits, 2 x 255 x 65 does not."""
    x, y = digits
    quantise_bundle(
        read_bundle(home / "bundles" / "1"), Validation(x[1200:1400], y[1200:1400]), tmp_path / "small", ANY_SPEED
    )
    model = onnx.load(tmp_path / "small" / INT8)
    weights = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert max(int(np.abs(w.astype(int)).max()) for w in weights) == 64
    assert find_largest_int8(memoryview(model.SerializeToString())) == 64


def test_gate_fusion_and_shift_are_as_in_float32(tmp_path, home, digits):
    """The numbers outside the networks keep their names, so that a shift can replace them."""
    x, _ = digits
    quantise_bundle(read_bundle(home / "bundles" / "1"), Validation(x[1200:1400], None), tmp_path / "small", ANY_SPEED)
    fused, small = (
        deploy.load(tmp_path / "small", engine=engine, mode="shift").predict_inputs(x[1400:1500])
        for engine in ("fused", "int8")
    )
    np.testing.assert_allclose(small.weights, fused.weights, atol=0.05)
    broken = deploy.load(tmp_path / "small", engine="int8").predict_inputs(np.full((1, 1, 8, 8), np.nan, np.float32))
    assert np.isfinite(broken.probabilities).all()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Int8Limits(agreement=1.0), "agree"),
        (Int8Limits(agreement=0.0, accuracy_drop=0.0), "accuracy"),
        (Int8Limits(agreement=0.0, accuracy_drop=1.0, latency_ratio=0.0), "ms for a sample on this machine, float32"),
    ],
)
def test_is_refused_where_it_is_worse_than_the_limits(tmp_path, home, digits, limits, message):
    """Calibrated on dark pictures, activations of real ones are cut off: 8 bits then go wrong."""
    x, y = digits
    x = x[1200:1400].copy()
    x[::2] *= 0.05  # what calibrates
    with pytest.raises(UpdateRejected, match=message):
        quantise_bundle(read_bundle(home / "bundles" / "1"), Validation(x, y[1200:1400]), tmp_path / "small", limits)
    assert list(tmp_path.iterdir()) == []


def test_needs_samples_and_a_new_folder(tmp_path, home, digits):
    bundle = read_bundle(home / "bundles" / "1")
    with pytest.raises(ConfigError, match="at least 10"):
        quantise_bundle(bundle, Validation(digits[0][:9], None), tmp_path / "small")
    with pytest.raises(ConfigError, match="exists"):
        quantise_bundle(bundle, Validation(digits[0], None), tmp_path)


def test_an_altered_graph_is_refused(tmp_path, home, digits):
    quantise_bundle(
        read_bundle(home / "bundles" / "1"), Validation(digits[0][:100], None), tmp_path / "small", ANY_SPEED
    )
    data = bytearray((tmp_path / "small" / INT8).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "small" / INT8).write_bytes(data)
    with pytest.raises(UpdateRejected, match=INT8):
        deploy.load(tmp_path / "small")


def test_the_command_exports_what_a_device_without_onnx_runs(tmp_path, home):
    int8 = ("--int8", "--int8-latency-ratio", "100")
    result = CliRunner().invoke(export, [str(home), "--out", str(tmp_path / "small"), *int8, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["int8"]["n"] == 100
    assert record["out"] == str(tmp_path / "small")
    again = [str(home), "--out", str(tmp_path / "again"), *int8]
    assert "ms for a sample on this machine, float32 " in CliRunner().invoke(export, again).stdout
    code = (
        "import sys, numpy, deploy\n"
        f"r = deploy.load({str(tmp_path / 'small')!r}, engine='int8')\n"
        "print(r.engine, len(r.predict(numpy.zeros((8, 8))).class_index), sorted({'onnx', 'torch'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "int8 1 []"
    with pytest.raises(ConfigError, match="--out"):
        CliRunner().invoke(export, [str(home), "--int8"], catch_exceptions=False)
