"""The residual network with routed branches (docs/methods/fedcoe.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import deploy
from export import Candidate, GateWeights, Mixture, write_bundle
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.models import network as models
from fedge.models.layers.resnet_moe import Block, ResNetMoE
from fedge.tensors.layout import flatten, unflatten
from fedge.wire.messages import Role


@pytest.mark.parametrize("top", [1, 2, 3])
def test_shares_are_those_of_the_best_branches(top: int) -> None:
    torch.manual_seed(0)
    block, x = Block(8, 16, 2, experts=3, top=top), torch.randn(6, 8, 10, 10)
    r = torch.softmax(block.router(x.mean(dim=(2, 3))), dim=1)
    u = block.compute_shares(x)
    assert (u > 0).sum(dim=1).tolist() == [top] * 6
    best = r.sort(dim=1, descending=True).values[:, :top]
    expected = best if top == 1 else best / best.sum(dim=1, keepdim=True)
    torch.testing.assert_close(u.sort(dim=1, descending=True).values[:, :top], expected)
    torch.testing.assert_close(u.sum(dim=1), torch.ones(6) if top > 1 else r.max(dim=1).values)


def test_a_block_is_the_sum_of_its_branches_and_the_shortcut() -> None:
    torch.manual_seed(0)
    block, x = Block(8, 8, 1, experts=2, top=1), torch.randn(5, 8, 6, 6)
    for k in range(5):
        one = x[k : k + 1]
        r = torch.softmax(block.router(one.mean(dim=(2, 3))), dim=1)[0]
        e = int(r.argmax())
        torch.testing.assert_close(block(x)[k : k + 1], torch.relu(r[e] * block.branches[e](one) + one))


def test_the_router_learns_with_one_branch_per_sample() -> None:
    """Section 13: k = 1 gives the router a non-zero gradient."""
    torch.manual_seed(0)
    network = ResNetMoE((1, 14, 14), 10, experts=2, top=1)
    loss = torch.nn.functional.cross_entropy(network(torch.randn(8, 1, 14, 14)), torch.arange(8))
    loss.backward()
    for block in network.blocks:
        assert float(block.router.weight.grad.abs().max()) > 0


@pytest.mark.parametrize(("side", "left"), [(28, 7), (8, 2), (7, 4), (4, 2)])
def test_small_images_keep_their_size_in_the_second_block(side: int, left: int) -> None:
    network = ResNetMoE((1, side, side), 10, experts=2, top=1)
    assert network.blocks(network.stem(torch.zeros(1, 1, side, side))).shape == (1, 32, left, left)


def test_no_buffers_travel() -> None:
    layout = models.make_layout(ResNetMoE((3, 32, 32), 10, experts=2, top=1))
    assert {tensor.kind for tensor in layout.tensors} == {"param"}


@pytest.mark.parametrize(("top", "expected"), [(1, [0, 1, 0, 0]), (2, [0, 0.5, 0.5, 0]), (3, [0, 1 / 3, 1 / 3, 1 / 3])])
def test_of_equal_branches_the_first_are_chosen(top: int, expected: list[float]) -> None:
    block = Block(8, 8, 1, experts=4, top=top)
    torch.nn.init.zeros_(block.router.weight)
    block.router.bias.data = torch.tensor([0.0, 60.0, 60.0, 60.0])  # the first one's share is 0 in float32
    u = block.compute_shares(torch.randn(2, 8, 4, 4))
    torch.testing.assert_close(u / u.sum(dim=1, keepdim=True), torch.tensor([expected] * 2, dtype=torch.float32))


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("experts", "top"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_its_bundle_predicts_what_torch_predicts(tmp_path: Path, experts: int, top: int, equal: bool) -> None:
    """Also where all branches have the same share: then both take the lowest indices."""
    task = TaskSpec(
        name="t",
        classes=tuple("0123"),
        input_shape=(1, 10, 10),
        model="resnet_moe",
        model_options={"experts": experts, "top": top},
    )
    layout, model = build.make_initial_model(task, 0)
    if equal:
        tensors = unflatten(model, layout)
        routers = {name: np.zeros_like(value) for name, value in tensors.items() if ".router." in name}
        model = flatten(tensors | routers, layout)
    x = np.random.default_rng(0).normal(size=(9, 1, 10, 10)).astype(np.float32)
    mixture = Mixture(
        candidates=(Candidate(role=Role.GLOBAL, name="global", model=model, offset=np.zeros(4)),),
        beta=0.0,
        gate=GateWeights.make_untrained(task.input_shape, 1),
    )
    folder = tmp_path / "bundle"
    write_bundle(folder, task=task, layout=layout, mixture=mixture, validation=x, release=1, method="test", metrics={})
    module = build.make_network(task).eval()
    models.load_model(module, model, layout)
    with torch.inference_mode():
        expected = torch.softmax(module(torch.from_numpy(x)), dim=1).numpy()
    np.testing.assert_allclose(deploy.load(folder).predict(x).probabilities, expected, atol=1e-5)
