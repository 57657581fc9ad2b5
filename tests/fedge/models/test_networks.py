import sys

import msgspec
import pytest
import torch

from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.problems.segmentation import Segmentation
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.models import network as models
from fedge.models.networks import NETWORKS

TASK = TaskSpec(name="t", classes=tuple("0123456789"), input_shape=(1, 28, 28), model="mlp")


def task(model: str, shape: tuple[int, ...] = (1, 28, 28), **options: int | float | str | bool) -> TaskSpec:
    return msgspec.structs.replace(TASK, model=model, input_shape=shape, model_options=options)


@pytest.mark.parametrize(
    ("spec", "n_params"),
    [
        (task("mlp", (1, 8, 8)), 64 * 32 + 32 + 32 * 10 + 10),
        (task("mlp", (9, 128), hidden=5), 1152 * 5 + 5 + 5 * 10 + 10),
        (task("cnn"), (9 * 16 + 16) + (9 * 16 * 32 + 32) + (32 * 7 * 7 * 64 + 64) + 650),
        (task("cnn", (3, 32, 32), channels=4, hidden=8), (27 * 4 + 4) + (9 * 4 * 8 + 8) + (8 * 64 * 8 + 8) + 90),
        (task("cnn_fedavg"), 1_663_370),  # the number in the paper
        (task("resnet_moe"), 38_536),  # fedcoe.md section 8
        (task("resnet_moe", experts=1), 19_845),
    ],
)
def test_number_of_parameters_by_hand(spec: TaskSpec, n_params: int) -> None:
    assert models.make_layout(build.make_network(spec)).n_params == n_params


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"bag", "unet"}))
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 9, 13)])
def test_one_row_of_logits_per_sample(name: str, shape: tuple[int, ...]) -> None:
    logits = build.make_network(task(name, shape))(torch.zeros(5, *shape))
    assert logits.shape == (5, 10)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 9, 13)])
def test_outputs_are_as_the_problem_says(shape: tuple[int, ...]) -> None:
    labels, numbers = MultiLabel(labels=("a", "b")), Regression(targets=("t",), mean=(0.0,), std=(1.0,), variance=True)
    pixels = Segmentation(classes=("none", "a", "b"))
    for name, asked, wanted in (
        ("cnn", labels, (2,)),
        ("resnet_moe", numbers, (2,)),
        ("unet", pixels, (3, *shape[1:])),
        ("unet", Reconstruction(), shape),
        ("autoencoder", Reconstruction(), shape),
        ("mlp", pixels, (3, *shape[1:])),
    ):
        spec = msgspec.structs.replace(task(name, shape), classes=(), asked=asked)
        assert build.make_network(spec)(torch.zeros(5, *shape)).shape == (5, *wanted)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (task("unet", (1, 8, 8)), r"unet gives an output for each pixel, but .* asks for \(10,\): take another"),
        (
            msgspec.structs.replace(task("resnet_moe", (1, 8, 8)), classes=(), asked=Reconstruction()),
            r"resnet_moe gives a vector, but reconstruction asks for \(1, 8, 8\): take another network",
        ),
        (msgspec.structs.replace(task("unet", (9, 128)), classes=(), asked=Reconstruction()), "needs images"),
        (task("bag", (3, 32, 32)), r"bag takes texts, or tokens \(length,\), not \(3, 32, 32\)"),
    ],
)
def test_a_network_whose_outputs_are_not_the_problems_is_refused(spec: TaskSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build.make_initial_model(spec, 0)


@pytest.mark.parametrize("model", ["mobilenet-v3-small", "resnet-18"])
def test_without_torchvision_only_its_networks_are_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"^{model} is a network of torchvision: pip install 'fedge\[vision\]'$"):
        build.make_network(task(model, (3, 32, 32)))
    assert build.make_network(task("cnn"))(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_logits_of_a_sample_do_not_depend_on_its_batch() -> None:
    x = torch.randn(4, 1, 28, 28)
    network = build.make_network(task("cnn"))
    torch.testing.assert_close(network(x)[2:3], network(x[2:3]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (task("mlp", hiden=3), "hiden"),
        (task("mlp", hidden=0), "hidden"),
        (task("mlp", hidden=2.5), "hidden"),
        (task("mlp", hidden=True), "hidden"),
        (task("cnn_fedavg", hidden=3), "hidden"),
        (task("cnn", (9, 128)), "needs images"),
        (task("cnn", (1, 3, 8)), "needs images"),
        (task("resnet_moe", (8,)), "needs images"),
        (task("resnet_moe", top=3), "top"),
    ],
)
def test_wrong_options_and_shapes_are_named(spec: TaskSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build.make_network(spec)
