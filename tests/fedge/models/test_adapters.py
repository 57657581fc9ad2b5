"""Networks that begin with given weights and of which a part is trained."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from export import Candidate, GateWeights, Mixture, write_bundle
from fedge.bundle.manifest import SKELETON
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.models.adapters import LARGE, Adapter, StillNorm
from fedge.models.choice import with_network
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Model, Tensors, to_bytes, unflatten
from fedge.wire.messages import Role

TASK = TaskSpec(name="toy", classes=tuple("abc"), input_shape=(3, 8, 8), model=f"{__name__}:small")
NORMS = {"1", "4"}


def small(task: TaskSpec) -> nn.Module:
    """Three convolutions, one of them of single channels, two norms, a head."""
    return nn.Sequential(
        nn.Conv2d(task.input_shape[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 24, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, task.n_classes),
    )


def tensors_of(task: TaskSpec, seed: int = 0) -> Tensors:
    """Weights, with statistics that are not those of a new network."""
    layout, model = build.make_initial_model(task, seed)
    buffers = np.random.default_rng(seed).random(model.buffers.size, np.float32) + np.float32(0.5)
    return unflatten(Model(model.params, buffers, model.counters), layout)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "w.safetensors").write_bytes(to_bytes(tensors_of(TASK)))
    return tmp_path / "w.safetensors"


def outputs(task: TaskSpec, model: Model, x: np.ndarray) -> np.ndarray:
    return Network(task).compute_logits(model, x)


def inputs(n: int = 20, task: TaskSpec = TASK) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((n, *task.input_shape), np.float32)


def trained(task: TaskSpec, steps: int = 5) -> tuple[Network, Model, Model]:
    """A network of the task, its first weights, and those after some steps."""
    network, (_, first) = Network(task), build.make_initial_model(task, 0)
    network.load(first)
    y = np.arange(20) % task.n_classes
    Trainer(network, inputs(task=task), y, Sgd(learning_rate=0.1), np.random.default_rng(0)).run(steps)
    return network, first, network.dump()


# ------------------------------------------------------------------------------------------------------- weights


def test_the_network_begins_with_the_weights(file: Path) -> None:
    layout, model = build.make_initial_model(with_network(TASK, None, file), 7)
    for name, tensor in unflatten(model, layout).items():
        np.testing.assert_array_equal(tensor, tensors_of(TASK)[name])


def test_a_head_of_other_classes_is_fresh(file: Path) -> None:
    task = msgspec.structs.replace(with_network(TASK, None, file), classes=tuple("abcde"))
    layout, model = build.make_initial_model(task, 7)
    found, other = unflatten(model, layout), unflatten(build.make_initial_model(task, 8)[1], layout)
    np.testing.assert_array_equal(found["0.weight"], tensors_of(TASK)["0.weight"])
    assert found["8.weight"].shape == (5, 24)
    assert not np.array_equal(found["8.weight"], other["8.weight"]), "it comes from the seed"


def test_colours_become_grey(file: Path) -> None:
    grey = msgspec.structs.replace(TASK, input_shape=(1, 8, 8))
    x = inputs(task=grey)
    seen = outputs(grey, build.make_initial_model(with_network(grey, None, file), 0)[1], x)
    wanted = outputs(TASK, build.make_initial_model(with_network(TASK, None, file), 0)[1], np.repeat(x, 3, axis=1))
    np.testing.assert_allclose(seen, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"0.weight": None}, r"lacks 0\.weight"),
        ({"9.weight": np.zeros(3, np.float32)}, r"has 9\.weight, which the network has not"),
        (
            {"5.weight": np.zeros((24, 8, 1, 1), np.float32)},
            r"5\.weight is float32\(24, 8, 1, 1\), in .*\(24, 16, 1, 1\)",
        ),
        ({"5.bias": np.full(24, np.nan, np.float32)}, r"5\.bias holds NaN"),
        ({"5.bias": np.zeros(24, np.float16)}, r"5\.bias is float16\(24,\), in the network float32"),
    ],
)
def test_what_does_not_fit_is_named(change: Tensors, text: str, tmp_path: Path) -> None:
    data = to_bytes({name: array for name, array in (tensors_of(TASK) | change).items() if array is not None})
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=text):
        build.make_initial_model(with_network(TASK, None, tmp_path / "w.safetensors"), 0)


def twice(task: TaskSpec) -> nn.Module:
    """One block under two names."""
    block = nn.Linear(192, 192)
    return nn.Sequential(nn.Flatten(), block, nn.ReLU(), block, nn.Linear(192, task.n_classes))


@pytest.mark.parametrize("name", ["1", "3"])
def test_a_tensor_of_two_names_is_found_by_either(name: str, tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, model=f"{__name__}:twice")
    tensors = tensors_of(task, seed=3)
    renamed = {known.replace("1.", f"{name}."): array for known, array in tensors.items()}
    (tmp_path / "w.safetensors").write_bytes(to_bytes(renamed))
    layout, first = build.make_initial_model(with_network(task, weights=tmp_path / "w.safetensors"), 0)
    assert {known: array.tolist() for known, array in unflatten(first, layout).items()} == {
        known: array.tolist() for known, array in tensors.items()
    }


def test_a_pickled_file_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(pickle.dumps({"0.weight": 1}))
    with pytest.raises(ConfigError, match="not a safetensors"):
        build.make_initial_model(with_network(TASK, None, tmp_path / "w.pt"), 0)


# ------------------------------------------------------------------------------------------------------ adapting


@pytest.mark.parametrize(
    ("adapt", "trained_names", "buffers"),
    [
        ("head", {"8.weight", "8.bias"}, 0),
        ("lora:2", {"0.b", "3.b", "5.b", "8.weight", "8.bias"}, 0),
        ("lora, norm", {"0.b", "3.b", "5.b", "1.weight", "1.bias", "4.weight", "4.bias", "8.weight", "8.bias"}, 64),
        ("5.*", {"5.weight", "5.bias", "8.weight", "8.bias"}, 0),
        ("4.running_mean", {"4.weight", "4.bias", "8.weight", "8.bias"}, 32),
        ("!norm", {"0.weight", "3.weight", "3.bias", "5.weight", "5.bias", "8.weight", "8.bias"}, 0),
    ],
)
def test_what_travels_is_what_is_trained(adapt: str, trained_names: set[str], buffers: int, file: Path) -> None:
    layout, model = build.make_initial_model(with_network(TASK, None, file, adapt), 0)
    assert {info.name for info in layout.select_kind("param")} == trained_names
    assert model.buffers.size == buffers
    assert [info.layer for info in layout.select_kind("param")][-2:] == ["head", "head"]


@pytest.mark.parametrize("adapt", ["head", "lora:2", "lora,norm", "!norm"])
def test_at_first_the_network_is_that_of_the_weights(adapt: str, file: Path) -> None:
    plain, adapted = with_network(TASK, None, file), with_network(TASK, None, file, adapt)
    wanted = outputs(plain, build.make_initial_model(plain, 0)[1], inputs())
    np.testing.assert_allclose(outputs(adapted, build.make_initial_model(adapted, 0)[1], inputs()), wanted, atol=1e-5)


def test_what_is_frozen_stands_still_in_training(file: Path) -> None:
    network, first, after = trained(with_network(TASK, None, file, "lora:2"))
    assert not np.array_equal(first.params, after.params)
    assert all(np.abs(t).max() > 0 for name, t in unflatten(after, network.layout).items() if name.endswith(".b"))
    module = network.module
    conv = module.get_submodule("0.layer")
    np.testing.assert_array_equal(conv.weight.numpy(), tensors_of(TASK)["0.weight"])
    assert {name for name, layer in module.named_modules() if isinstance(layer, StillNorm)} == NORMS


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(64, 128, 3, stride=2, padding=1, padding_mode="reflect"), (64, 6, 6)),
        (nn.Conv2d(300, 240, 1, bias=False), (300, 2, 2)),
        (nn.Conv2d(512, 512, 3, groups=4), (512, 4, 4)),
        (nn.Linear(300, 300), (300,)),
    ],
)
def test_a_large_adapter_trains_what_it_evaluates(layer: nn.Conv2d | nn.Linear, shape: tuple[int, ...]) -> None:
    """Outputs and gradients of B A x beside W x are those of B A + W."""
    adapter, x, found = Adapter(layer, rank=2, seed=0), torch.randn(5, *shape), []
    assert adapter.layer.weight.numel() >= LARGE
    nn.init.normal_(adapter.b, std=0.1)
    for training in (False, True):
        own = x.clone().requires_grad_()
        adapter.train(training).zero_grad()
        out = adapter(own)
        (out**2).sum().backward()
        assert own.grad is not None
        assert adapter.b.grad is not None
        found.append((out.detach(), own.grad, adapter.b.grad.clone()))
    for trained, evaluated in zip(*found, strict=True):
        torch.testing.assert_close(trained, evaluated, rtol=1e-3, atol=1e-3)


def test_a_norm_that_stands_still_is_batch_norm_in_evaluation() -> None:
    norm = nn.BatchNorm2d(4).train()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
        norm(torch.randn(8, 4, 3, 3) * 3 + 1)
        x = torch.randn(5, 4, 2, 2)
        torch.testing.assert_close(StillNorm(norm).train()(x), norm.eval()(x))


def test_the_mean_of_adapters_is_the_adapter_of_the_mean(file: Path) -> None:
    task = with_network(TASK, None, file, "lora:2")
    network, first, _ = trained(task)
    rng = np.random.default_rng(0)
    several = [
        Model(first.params + rng.standard_normal(first.params.size, np.float32), *first_rest(first)) for _ in "ab"
    ]

    def weight(model: Model) -> torch.Tensor:
        network.load(model)
        adapter = network.module.get_submodule("5")
        return (adapter.b @ adapter.a).detach()

    mean = Model((several[0].params + several[1].params) / 2, *first_rest(first))
    torch.testing.assert_close(weight(mean), (weight(several[0]) + weight(several[1])) / 2)


def first_rest(model: Model) -> tuple[np.ndarray, np.ndarray]:
    return model.buffers, model.counters


@pytest.mark.parametrize(
    ("adapt", "text"),
    [("lora:0", "whole number"), ("lora:x", "whole number"), ("layer9.*", "no layer"), (" , ", "names nothing")],
)
def test_what_makes_no_sense_is_said(adapt: str, text: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        build.make_network(with_network(TASK, None, file, adapt))


@pytest.mark.parametrize("adapt", ["lora:2", "lora,norm"])
def test_candidates_of_a_bundle_share_what_is_frozen(adapt: str, file: Path, tmp_path: Path) -> None:
    task = with_network(TASK, None, file, adapt)
    network, first, after = trained(task)
    mixture = Mixture(
        tuple(
            Candidate(Role.EXPERT, name, model, np.zeros(3), weight=0.5) for name, model in (("a", first), ("b", after))
        ),
        0.0,
        GateWeights.make_untrained(task.input_shape, 2),
    )
    manifest = write_bundle(
        tmp_path / "bundle",
        task=task,
        layout=network.layout,
        mixture=mixture,
        validation=inputs(),
        release=1,
        method="m",
        metrics={},
    )
    assert manifest.max_abs_diff < 1e-4, "torch and ONNX Runtime agree"
    skeleton = (tmp_path / "bundle" / SKELETON).read_bytes()
    assert skeleton.count(tensors_of(TASK)["5.weight"].tobytes()) == 1, "the frozen weights, once"
    sizes = [path.stat().st_size for path in (tmp_path / "bundle").glob("*.safetensors")]
    assert sorted(sizes)[-2] < 4 * network.layout.n_params + 4000
