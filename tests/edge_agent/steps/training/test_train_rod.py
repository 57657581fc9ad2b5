from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from edge_agent.device.device import FailedError
from edge_agent.steps.training import train_rod
from fedge.models import build
from fedge.models import network as models
from fedge.models.training import Network, Trainer, draw_batches
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.steps.training.train_rod import TrainRod
from fedge.tasks import DeviceData
from fedge.tensors.layers import make_layers
from fedge.tensors.layout import BASE, HEAD, Model, Tensors, unflatten
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, mixed_data, part_of, samples

SGD = Sgd(steps=6, batch_size=8, weight_decay=0.05)
TORCH = {"lr": SGD.learning_rate, "momentum": SGD.momentum, "weight_decay": SGD.weight_decay}
DATA = mixed_data(samples(20, 1), samples(12, 2))
WEIGHT, BIAS = (info.name for info in LAYOUT.select(HEAD).tensors)


def learn(mine: Tensors | None = None, data: DeviceData = DATA, sgd: Sgd = SGD) -> tuple[Model, Tensors]:
    action = TrainRod(starts=(Start(model=Blobs().model(0)),), sgd=sgd)
    here = device(Path("unused"), action, data=data, seed=3)
    learned = train_rod.train_models(here, action, INITIAL, None if mine is None else make_layers(mine, LAYOUT))
    assert learned.kept is not None
    return learned.model, unflatten(learned.kept, LAYOUT.select(HEAD))


def test_the_worked_balanced_softmax() -> None:
    """Logits (1, 2, 3), y = 0, counts (30, 10, 0): 0.645056 (pm_moe.md section 12)."""
    loss = train_rod.make_balanced_softmax(torch.tensor([30, 10, 0]).log())
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    found = loss(nn.Identity(), logits, torch.tensor([0]))
    assert found.item() == pytest.approx(0.645056, abs=1e-6)
    assert found.item() == pytest.approx(np.log(1 + np.exp(2 + np.log(10) - 1 - np.log(30))), abs=1e-6)
    found.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0  # a class without samples gets no mass


def test_with_equal_counts_it_is_cross_entropy() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 1, 0])
    found = train_rod.make_balanced_softmax(torch.full((3,), 7.0).log())(nn.Identity(), logits, y)
    assert found.item() == pytest.approx(functional.cross_entropy(logits, y).item(), abs=1e-6)


def test_the_shared_model_learns_the_balanced_loss_and_ignores_the_second_head() -> None:
    network = Network(TASK)
    network.load(INITIAL)
    counts = torch.bincount(torch.from_numpy(DATA.shared[1]), minlength=3)
    trainer = Trainer(
        network, *DATA.shared, SGD, np.random.default_rng(3), loss=train_rod.make_balanced_softmax(counts.log())
    )
    trainer.run(SGD.steps)
    expected = network.dump().params
    for mine in (None, part_of(build.make_initial_model(TASK, 5)[1], HEAD)):
        shared, _ = learn(mine)
        np.testing.assert_array_equal(shared.params, expected)
    shared, _ = learn(None, mixed_data(DATA.shared, samples(30, 9)))
    np.testing.assert_array_equal(shared.params, expected)


def test_smoothing_is_spread_over_the_classes_that_the_device_has() -> None:
    logits, y = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 1])
    loss = train_rod.make_balanced_softmax(torch.tensor([7, 7, 0]).log(), 0.1)
    expected = functional.cross_entropy(logits[:, :2], y, label_smoothing=0.1)
    assert loss(nn.Identity(), logits, y).item() == pytest.approx(expected.item(), abs=1e-6)


def test_class_weights_are_refused() -> None:
    with pytest.raises(FailedError, match="weighs the classes already"):
        learn(sgd=msgspec.structs.replace(SGD, class_weights="balanced"))


@pytest.mark.parametrize(
    ("sgd", "torchs"),
    [
        (SGD, lambda parts: torch.optim.SGD(parts, **TORCH)),
        (
            Sgd(steps=6, batch_size=8, learning_rate=0.01, optimizer="adam", label_smoothing=0.1),
            lambda parts: torch.optim.Adam(parts, lr=0.01),
        ),
    ],
    ids=["sgd", "adam"],
)
def test_the_second_head_learns_what_is_left_by_steps_of_torch(sgd: Sgd, torchs: Any) -> None:
    smoothing = sgd.label_smoothing or 0.0
    mine = part_of(build.make_initial_model(TASK, 5)[1], HEAD)
    network = Network(TASK)
    network.load(INITIAL)
    counts = torch.bincount(torch.from_numpy(DATA.shared[1]), minlength=3)
    balanced = train_rod.make_balanced_softmax(counts.log(), smoothing)
    trainer = Trainer(network, *DATA.shared, sgd, np.random.default_rng(3), loss=balanced)
    w, b = (torch.tensor(mine[name]).requires_grad_() for name in (WEIGHT, BIAS))
    optimiser = torchs([w, b])
    x, y = map(torch.from_numpy, DATA.training)
    for batch in itertools.islice(draw_batches(32, 8, np.random.default_rng([3, 1])), SGD.steps):
        trainer.run(1)
        f, logits = (t.detach() for t in models.compute_features_and_logits(network.module, x[batch], LAYOUT))
        optimiser.zero_grad()
        functional.cross_entropy(logits + f @ w.T + b, y[batch], label_smoothing=smoothing).backward()
        optimiser.step()
    _, kept = learn(mine, sgd=sgd)
    np.testing.assert_allclose(kept[WEIGHT], w.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(kept[BIAS], b.detach().numpy(), atol=1e-6)


def test_the_second_head_begins_at_zero() -> None:
    zero = {name: np.zeros_like(tensor) for name, tensor in part_of(INITIAL, HEAD).items()}
    _, first = learn(None)
    _, told = learn(zero)
    for name in (WEIGHT, BIAS):
        np.testing.assert_array_equal(first[name], told[name])
    np.testing.assert_array_equal(train_rod.overlay(INITIAL, make_layers(zero, LAYOUT), LAYOUT).params, INITIAL.params)


def test_a_class_that_the_device_lacks_does_no_harm() -> None:
    x, y = DATA.shared
    shared, kept = learn(None, mixed_data((x[y < 2], y[y < 2]), samples(12, 2)))
    assert np.isfinite(shared.params).all()
    assert all(np.isfinite(tensor).all() for tensor in kept.values())


@given(st.integers(0, 2**16))
def test_the_folded_head_predicts_the_sum_of_both(seed: int) -> None:
    mine = part_of(build.make_initial_model(TASK, seed)[1], HEAD)
    network, x = Network(TASK), samples(9, seed)[0]
    ours = network.compute_logits(INITIAL, x)
    own = network.compute_features(INITIAL, x) @ mine[WEIGHT].T + mine[BIAS]
    np.testing.assert_allclose(
        network.compute_logits(train_rod.overlay(INITIAL, make_layers(mine, LAYOUT), LAYOUT), x), ours + own, atol=1e-5
    )


def test_folding_changes_the_head_alone_and_its_inputs_not_at_all() -> None:
    mine = part_of(build.make_initial_model(TASK, 5)[1], HEAD)
    before = Blobs().put(unflatten(INITIAL, LAYOUT) | {}), {name: t.copy() for name, t in mine.items()}
    folded = train_rod.overlay(INITIAL, make_layers(mine, LAYOUT), LAYOUT)
    base, same = part_of(folded, BASE), part_of(INITIAL, BASE)
    assert all((base[name] == same[name]).all() for name in same)
    assert Blobs().put(unflatten(INITIAL, LAYOUT)) == before[0]
    assert all((mine[name] == before[1][name]).all() for name in mine)
