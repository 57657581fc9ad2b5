"""Networks as ONNX graphs: named weights, nothing folded, cached."""

import multiprocessing

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import export.branch as branch_module
from export.branch import export_branch
from export.graph import encode_branch
from export.parity import run_graph
from fedge.bundle.manifest import format_slot
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models.build import make_initial_model
from fedge.system.files import get_cache_folder
from fedge.system.loading import register_object
from fedge.tensors.layout import to_bytes, unflatten


def task(model, shape=(1, 8, 8)):
    return TaskSpec(name="t", classes=("a", "b", "c"), input_shape=shape, model=model)


def with_batch_norm(spec):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, spec.n_classes)
    )


def without_bias(spec):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, spec.n_classes)
    )


class _Untraceable(nn.Module):
    def forward(self, x):
        return torch.from_numpy(np.linalg.svd(x.detach().numpy().reshape(len(x), -1))[1])


def untraceable(spec):
    return _Untraceable()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    branch_module._known.clear()


def kinds(model):
    return [node.op_type for node in model.graph.node]


def weights(model):
    external = onnx.TensorProto.EXTERNAL
    return {i.name: tuple(i.dims) for i in model.graph.initializer if i.data_location == external}


def test_mlp_keeps_its_names():
    model = export_branch(task("mlp"))
    assert kinds(model) == ["Reshape", "Gemm", "Relu", "Gemm"]
    assert weights(model) == {"1.weight": (32, 64), "1.bias": (32,), "3.weight": (3, 32), "3.bias": (3,)}


def test_cnn_is_small_and_complete():
    model = export_branch(task("cnn"))
    assert kinds(model) == ["Conv", "Relu", "MaxPool"] * 2 + ["Reshape", "Gemm", "Relu", "Gemm"]
    assert len(weights(model)) == 8


def test_batch_normalisation_is_left_for_onnx_runtime_to_fold():
    model = export_branch(task(f"{__name__}:with_batch_norm"))
    assert "BatchNormalization" in kinds(model)
    assert set(weights(model)) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "4.weight", "4.bias",
    }  # fmt: skip


def test_nothing_stands_between_a_convolution_and_its_batch_normalisation():
    model = export_branch(task(f"{__name__}:without_bias"))
    assert kinds(model) == ["Conv", "BatchNormalization", "Relu", "Reshape", "Gemm"]
    assert "0.bias" not in weights(model)
    assert len(weights(model)) == 7


@pytest.mark.parametrize("network", ["mlp", "cnn", f"{__name__}:with_batch_norm", f"{__name__}:without_bias"])
def test_the_older_exporter_serves_where_the_newer_fails(monkeypatch, network):
    def broken(*_args, **_options):
        raise RuntimeError("no onnxscript here")

    expected = set(weights(export_branch(task(network))))
    monkeypatch.setattr(branch_module, "_dynamo", broken)
    branch_module._known.clear()
    (cached,) = get_cache_folder("graphs").glob("*.onnx")
    cached.unlink()
    assert set(weights(export_branch(task(network)))) == expected


def test_what_cannot_be_exported_is_named():
    with pytest.raises(ConfigError, match="network of task t cannot be exported to ONNX"):
        export_branch(task(f"{__name__}:untraceable"))


class _Svd(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x.flatten(1)[:, :9].reshape(-1, 3, 3))


class _ByValue(nn.Module):
    def forward(self, x):
        flat = x.flatten(1)
        return flat[:, :3] if flat.sum() > 0 else flat[:, 3:6]


def test_an_exporter_that_fails_says_why_in_a_line_and_prints_nothing(capfd):
    with pytest.raises(ConfigError) as refused:
        export_branch(task(register_object(net := _Svd())))
    assert "No ONNX function found for <OpOverload(op='aten._linalg_svd'" in str(refused.value)
    assert not {"\n", "\x1b"} & set(str(refused.value))
    export_branch(task(register_object(net := _ByValue())))
    assert isinstance(net, _ByValue)
    assert capfd.readouterr() == ("", "")


class _Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Parameter(torch.zeros(64, 3)))

    def forward(self, pixels):
        return pixels.flatten(1) @ getattr(self, self.name)


@pytest.mark.parametrize("name", ["gate", "probabilities", "n", "matmul", "val_0", "view", "scale"])
def test_names_that_a_graph_uses_within_do_no_harm(name):
    net = _Named(name)
    assert weights(export_branch(task(register_object(net)))) == {name: (64, 3)}


class _Shared(nn.Module):
    """A weight that two layers have, and a block that is registered twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.block = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.again = self.block
        self.last = nn.Linear(64, 3)

    def forward(self, x):
        return self.last(self.again(self.block(self.second(self.first(x.flatten(1)).relu()))))


def test_a_tensor_of_two_names_is_in_the_graph_under_the_one_that_models_have(tmp_path):
    net = _Shared()
    spec = task(register_object(net))
    model = export_branch(spec)
    block = {f"block.{name}": (64,) for name in ("0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")}
    one = {"first.weight": (64, 64), "first.bias": (64,), "second.bias": (64,), "block.0.weight": (64, 64)}
    assert weights(model) == one | block | {"last.weight": (3, 64), "last.bias": (3,)}
    layout, first = make_initial_model(spec, 0)
    part = to_bytes(unflatten(first, layout))
    (tmp_path / format_slot(0)).write_bytes(part)
    x = np.random.default_rng(0).random((5, 1, 8, 8), np.float32)
    (found,) = run_graph(encode_branch(spec, part), tmp_path, x)
    np.testing.assert_allclose(found, net.eval()(torch.from_numpy(x)).detach().numpy(), atol=1e-5)


class _Shifted(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.last = nn.Linear(64, 3)

    def forward(self, x):
        return self.last(x.flatten(1) + self.shift)


def test_other_constants_give_another_graph():
    nets = [_Shifted(torch.full((64,), number)) for number in (1.0, 2.0, 1.0)]
    here = task(f"{__name__}:with_batch_norm")
    assert len({branch_module._compute_key(here, net) for net in nets}) == 2
    assert len({branch_module._compute_key(here, _Shifted(shift)) for shift in (1.0, 2.0)}) == 2


def test_torch_is_asked_once():
    first = export_branch(task("mlp"))
    (cached,) = get_cache_folder("graphs").glob("*.onnx")
    aside = cached.rename(cached.with_suffix(".aside"))
    assert export_branch(task("mlp")) == first  # from memory
    assert not cached.exists()
    aside.rename(cached)
    branch_module._known.clear()
    before = cached.stat()
    assert export_branch(task("mlp")) == first  # from disk
    assert cached.stat() == before


def test_a_damaged_cache_file_is_replaced():
    first = export_branch(task("mlp"))
    (cached,) = get_cache_folder("graphs").glob("*.onnx")
    good = cached.read_bytes()
    cached.write_bytes(b"\xff" * 100)
    branch_module._known.clear()
    assert export_branch(task("mlp")) == first
    assert cached.read_bytes() == good


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights(export_branch(task("mlp")))


def test_equal_bytes_from_another_process():
    ours = export_branch(task("mlp")).SerializeToString(deterministic=True)
    for cached in get_cache_folder("graphs").glob("*.onnx"):
        cached.unlink()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_bytes) == ours


def _bytes():
    return export_branch(task("mlp")).SerializeToString(deterministic=True)


def test_other_options_give_another_graph():
    export_branch(task("mlp"))
    export_branch(task("mlp", shape=(1, 6, 6)))
    assert len(list(get_cache_folder("graphs").glob("*.onnx"))) == 2
