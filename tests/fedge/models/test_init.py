from collections import OrderedDict
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from fedge import models
from fedge.errors import ConfigError, ProtocolError
from fedge.task import TaskSpec
from fedge.tensors import Model, TensorInfo

TASK = TaskSpec(name="digits", classes=tuple("0123456789"), input_shape=(1, 8, 8), model="mlp")


def with_batch_norm() -> nn.Module:
    return nn.Sequential(OrderedDict(lin=nn.Linear(2, 3), norm=nn.BatchNorm1d(3)))


def test_layout_lists_parameters_then_buffers_then_nothing_else() -> None:
    module = with_batch_norm()
    module.register_buffer("scratch", torch.zeros(5), persistent=False)
    assert models.layout_of(module).tensors == (
        TensorInfo(name="lin.weight", shape=(3, 2)),
        TensorInfo(name="lin.bias", shape=(3,)),
        TensorInfo(name="norm.weight", shape=(3,)),
        TensorInfo(name="norm.bias", shape=(3,)),
        TensorInfo(name="norm.running_mean", shape=(3,), kind="buffer"),
        TensorInfo(name="norm.running_var", shape=(3,), kind="buffer"),
        TensorInfo(name="norm.num_batches_tracked", shape=(), kind="counter"),
    )


def test_a_frozen_parameter_is_a_buffer_and_a_shared_one_counts_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert [t.kind for t in models.layout_of(module).tensors] == ["param"]
    module[0].weight.requires_grad_(False)
    assert [t.kind for t in models.layout_of(module).tensors] == ["buffer"]


def test_load_after_dump_gives_an_equal_network_with_its_statistics() -> None:
    trained = with_batch_norm()
    trained(torch.randn(8, 2))
    layout = models.layout_of(trained)
    model = models.dump(trained, layout)
    assert model.counters.tolist() == [1]
    fresh = with_batch_norm()
    models.load(fresh, model, layout)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    x = torch.randn(4, 2)
    assert torch.equal(fresh.eval()(x), trained.eval()(x))


def test_dump_is_a_copy_and_load_takes_read_only_vectors() -> None:
    module = with_batch_norm()
    layout = models.layout_of(module)
    model = models.dump(module, layout)
    before = model.params.copy()
    with torch.no_grad():
        module.lin.weight += 1
    assert np.array_equal(model.params, before)
    for vector in (model.params, model.buffers, model.counters):
        vector.setflags(write=False)
    models.load(module, model, layout)
    assert np.array_equal(models.dump(module, layout).params, before)


def test_load_keeps_the_tensors_that_an_optimiser_holds() -> None:
    module = with_batch_norm()
    layout = models.layout_of(module)
    weight = module.lin.weight
    zero = Model(np.zeros(15, np.float32), np.zeros(6, np.float32), np.zeros(1, np.int64))
    models.load(module, zero, layout)
    assert module.lin.weight is weight
    assert weight.requires_grad
    assert not weight.any()


def test_a_diverged_network_is_refused() -> None:
    module = with_batch_norm()
    layout = models.layout_of(module)
    with torch.no_grad():
        module.lin.bias[0] = torch.nan
    with pytest.raises(ProtocolError) as caught:
        models.dump(module, layout)
    assert caught.value.name == "not-finite"


def test_other_types_are_the_users_error() -> None:
    with pytest.raises(ConfigError, match="float64"):
        models.layout_of(nn.Linear(2, 2).double())
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="mask"):
        models.layout_of(module)


def test_initial_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    layout, first = models.initial(TASK, seed=3)
    expected_next = torch.rand(1, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(1), expected_next)  # the global generator was left alone
    _, again = models.initial(TASK, seed=3)
    _, other = models.initial(TASK, seed=4)
    assert layout.n_params == 2410
    assert np.array_equal(first.params, again.params)
    assert not np.array_equal(first.params, other.params)


def test_the_users_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factories.py").write_text(
        "from torch import nn\n"
        "def net(task):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, task.n_classes))\n"
        "def nothing(task):\n    return None\n"
        "def mobile(task):\n"
        "    import torchvision\n    return torchvision.models.mobilenet_v3_small(num_classes=task.n_classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    layout, _ = models.initial(msgspec.structs.replace(TASK, model="my_factories:net"), seed=0)
    assert layout.n_params == 650
    with pytest.raises(ConfigError, match="NoneType"):
        models.build(msgspec.structs.replace(TASK, model="my_factories:nothing"))
    layout, _ = models.initial(msgspec.structs.replace(TASK, model="my_factories:mobile"), seed=0)
    assert layout.of_kind("counter")


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"mlp, cnn, cnn_fedavg, resnet_moe, or package\.module:factory"):
        models.build(msgspec.structs.replace(TASK, model="transformer"))
