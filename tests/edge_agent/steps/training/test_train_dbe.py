from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from edge_agent.steps.training import train_dbe
from fedge.errors import ProtocolError
from fedge.models import build
from fedge.models import network as models
from fedge.models.training import Network, Trainer, draw_batches
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.steps.training.train_dbe import OFFSET, TrainDbe
from fedge.tensors.layers import make_layers
from fedge.tensors.layout import BASE, HEAD, Model, Tensors, to_bytes, unflatten
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, D, device, mixed_data, part_of, samples, worker

SGD = Sgd(steps=6, batch_size=8, weight_decay=0.05)
TORCH = {"lr": SGD.learning_rate, "momentum": SGD.momentum, "weight_decay": SGD.weight_decay}
DATA = mixed_data(samples(20, 1), samples(12, 2))
SHARED = DATA.shared
GOAL = np.linspace(0, 2, D, dtype=np.float32)
P = np.linspace(-1, 1, D, dtype=np.float32)
WEIGHT, BIAS = (info.name for info in LAYOUT.select(HEAD).tensors)


def learn(mine: Tensors | None = None, *, kappa: float = 1.0, sgd: Sgd = SGD) -> tuple[Model, Tensors]:
    goal = Blobs().put({"mean": GOAL})
    action = TrainDbe(starts=(Start(model=Blobs().model(0)),), sgd=sgd, global_mean=goal, kappa=kappa)
    kept = None if mine is None else make_layers(mine, LAYOUT)
    learned = train_dbe.train_models(device(Path("unused"), action, data=DATA, seed=3), action, INITIAL, kept, GOAL)
    assert learned.kept is not None
    return learned.model, unflatten(learned.kept, TrainDbe.select_kept((), LAYOUT))


def test_the_loss_as_the_paper_writes_it() -> None:
    """Two batches by hand."""
    network = Network(TASK)
    network.load(INITIAL)
    offset, goal = torch.tensor(P), torch.tensor(GOAL)
    loss = train_dbe.make_regularised_loss(models.get_head(network.module, network.layout), offset, goal, kappa=2.5)
    tensors = part_of(INITIAL, HEAD)
    for batch in (slice(0, 8), slice(8, 16)):
        x, y = SHARED[0][batch], SHARED[1][batch]
        f = network.compute_features(INITIAL, x)
        logits = (f + P) @ tensors[WEIGHT].T.astype(float) + tensors[BIAS]
        cross_entropy = -(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(8), y].mean()
        expected = cross_entropy + 2.5 * (0.5 * (f.mean(axis=0) - GOAL) ** 2).mean()
        found = loss(network.module, torch.from_numpy(x), torch.from_numpy(y))
        assert found.item() == pytest.approx(expected, abs=1e-5)


def test_the_gradient_flows_through_the_batchs_mean() -> None:
    """With kappa very large: d/df of kappa mean_d (r - g)^2 / 2 is kappa (r - g) / (D n), for every sample."""
    f = torch.randn(4, D, generator=torch.Generator().manual_seed(0), requires_grad=True)

    class Features(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(D, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    module, y = Features(), torch.tensor([0, 1, 2, 0])
    loss = train_dbe.make_regularised_loss(module.head, torch.zeros(D), torch.tensor(GOAL), kappa=8e3)
    loss(module, f, y).backward()
    expected = 8e3 * (f.detach().mean(dim=0) - torch.tensor(GOAL)) / (D * 4)
    assert f.grad is not None
    torch.testing.assert_close(f.grad, expected.expand(4, D), atol=0.5, rtol=1e-2)


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
def test_offset_and_model_learn_by_steps_of_torch(sgd: Sgd, torchs: Any) -> None:
    smoothing = sgd.label_smoothing or 0.0
    module = build.make_network(TASK)
    models.load_model(module, INITIAL, LAYOUT)
    offset = torch.tensor(P).requires_grad_()
    optimiser = torchs([*module.parameters(), offset])
    head = models.get_head(module, LAYOUT)
    x, y = map(torch.from_numpy, SHARED)
    for batch in itertools.islice(draw_batches(20, 8, np.random.default_rng(3)), SGD.steps):
        f, _ = models.compute_features_and_logits(module, x[batch], LAYOUT)
        regulariser = (0.5 * (f.mean(dim=0) - torch.tensor(GOAL)) ** 2).mean()
        optimiser.zero_grad()
        entropy = functional.cross_entropy(head(f + offset), y[batch], label_smoothing=smoothing)
        (entropy + 1.5 * regulariser).backward()
        optimiser.step()
    shared, kept = learn({OFFSET: P}, kappa=1.5, sgd=sgd)
    np.testing.assert_allclose(shared.params, models.dump_model(module, LAYOUT).params, atol=1e-5)
    np.testing.assert_allclose(kept[OFFSET], offset.detach().numpy(), atol=1e-5)


def test_the_network_is_left_without_the_offset() -> None:
    x, _ = DATA.shared
    network = worker(Path("unused")).network  # the one that the step has
    before = network.compute_logits(INITIAL, x)
    learn({OFFSET: P})
    np.testing.assert_array_equal(network.compute_logits(INITIAL, x), before)


def test_the_offset_begins_at_zero_and_what_is_kept_is_not_changed() -> None:
    first, told = learn(None), learn({OFFSET: np.zeros(D, np.float32)})
    np.testing.assert_array_equal(first[1][OFFSET], told[1][OFFSET])
    before = P.copy()
    learn({OFFSET: P})
    np.testing.assert_array_equal(P, before)


def test_the_first_step_of_the_model_without_regulariser_is_fedavgs() -> None:
    """P = 0 and kappa = 0."""
    one = Sgd(steps=1, batch_size=8)
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *SHARED, one, np.random.default_rng(3)).run(1)
    shared, kept = learn(None, kappa=0.0, sgd=one)
    np.testing.assert_allclose(shared.params, network.dump().params, atol=1e-7)
    assert np.any(kept[OFFSET])


def test_the_regulariser_draws_the_features_mean_to_the_global_one() -> None:
    network, distances = Network(TASK), []
    for kappa in (0.0, 5.0, 50.0):
        shared, _ = learn(None, kappa=kappa, sgd=Sgd(steps=60, batch_size=20, momentum=0.0))
        distances.append(float(np.linalg.norm(network.compute_features(shared, SHARED[0]).mean(axis=0) - GOAL)))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]


@given(st.integers(0, 2**16))
def test_the_folded_bias_predicts_with_the_offset(seed: int) -> None:
    p = np.random.default_rng(seed).normal(size=D).astype(np.float32)
    network, x, tensors = Network(TASK), samples(9, seed)[0], part_of(INITIAL, HEAD)
    expected = (network.compute_features(INITIAL, x) + p) @ tensors[WEIGHT].T + tensors[BIAS]
    folded = train_dbe.overlay(INITIAL, make_layers({OFFSET: p}, LAYOUT), LAYOUT)
    np.testing.assert_allclose(network.compute_logits(folded, x), expected, atol=1e-5)
    base = part_of(folded, BASE) | {WEIGHT: part_of(folded, HEAD)[WEIGHT]}
    assert all((base[name] == t).all() for name, t in (part_of(INITIAL, BASE) | {WEIGHT: tensors[WEIGHT]}).items())


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"mean": np.zeros(D + 1, np.float32)}, "layout"),
        ({"other": np.zeros(D, np.float32)}, "layout"),
        ({"mean": np.full(D, np.nan, np.float32)}, "not-finite"),
    ],
)
def test_a_global_mean_that_does_not_fit_is_refused(tensors: Tensors, name: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        train_dbe.decode_mean(to_bytes(tensors), LAYOUT)
    assert caught.value.name == name
    np.testing.assert_array_equal(train_dbe.decode_mean(to_bytes({"mean": GOAL}), LAYOUT), GOAL)
