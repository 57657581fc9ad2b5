"""Gradients of single samples against Opacus', clipping, noise and batches against what they should be."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedge.data.task import TaskSpec
from fedge.models.dp_sgd import (
    Clipping,
    PrivateNetwork,
    compute_clipped_sum,
    draw_normal,
    draw_poisson_batches,
    draw_uniform,
)
from fedge.models.problems.cross_entropy import cross_entropy
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(1, 8, 8), model="cnn", model_options={"channels": 4})
NO_NOISE = Clipping(clip_norm=1.0, noise_multiplier=0.0)


def source(seed: int = 0):
    return np.random.default_rng(seed).bytes


def samples(n: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.random((n, *TASK.input_shape), np.float32), rng.integers(0, 3, n)


def noisy(network: Network, x: np.ndarray, y: np.ndarray, clipping: Clipping, expected: float = 1.0) -> np.ndarray:
    network.gradient.zero_()
    private = PrivateNetwork(network, clipping, expected, source())
    private.backward(cross_entropy, torch.from_numpy(x), torch.from_numpy(y))
    return network.gradient.numpy().copy()


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet_moe"])
def test_the_gradients_of_samples_are_those_of_opacus(model: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import GradSampleModule
    network = Network(TaskSpec(name="toy", classes=TASK.classes, input_shape=TASK.input_shape, model=model))
    x, y = samples()
    network.module.train()
    private = PrivateNetwork(network, NO_NOISE, 1.0, source())
    found = private._compute_gradients(cross_entropy, torch.from_numpy(x), torch.from_numpy(y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooked = GradSampleModule(network.module, loss_reduction="sum")
        functional.cross_entropy(hooked(torch.from_numpy(x)), torch.from_numpy(y), reduction="sum").backward()
    rows = {name: p.grad_sample.flatten(1) for name, p in network.module.named_parameters()}
    wanted = torch.cat([rows[info.name] for info in network.layout.select_kind("param")], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_without_noise_and_within_the_clip_norm_it_is_the_sum_of_the_gradients() -> None:
    network, (x, y) = Network(TASK), samples()
    found = noisy(network, x, y, Clipping(1e6, 0.0), expected=len(y))
    network.gradient.zero_()
    network.backward(cross_entropy, torch.from_numpy(x), torch.from_numpy(y))
    np.testing.assert_allclose(found, network.gradient.numpy(), rtol=1e-4, atol=1e-6)


def test_no_sample_counts_more_than_the_clip_norm() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [float("nan"), 4.0], [float("inf"), 1.0], [1e30, 1e30]])
    alone = [compute_clipped_sum(row[None], 1.0) for row in rows]
    torch.testing.assert_close(alone[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(alone[1], torch.tensor([0.3, 0.4]))
    assert all(float(one.norm()) <= 1 + 1e-6 for one in alone)
    torch.testing.assert_close(compute_clipped_sum(rows, 1.0), torch.stack(alone).sum(0))


def test_a_batch_in_parts_is_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, y) = Network(TASK), samples()
    whole = noisy(network, x, y, Clipping(0.5, 1.0))
    monkeypatch.setattr("fedge.models.dp_sgd.MOST_NUMBERS", 5 * network.layout.n_params)
    np.testing.assert_allclose(noisy(network, x, y, Clipping(0.5, 1.0)), whole, atol=1e-5)


def test_an_empty_batch_is_noise_alone() -> None:
    network, (x, y) = Network(TASK), samples()
    found = noisy(network, x[:0], y[:0], Clipping(2.0, 3.0), expected=4.0)
    np.testing.assert_allclose(found, 2 * 3 / 4 * draw_normal(len(found), source()), rtol=1e-5)


def test_what_does_not_move_gets_no_noise_and_counts_for_no_norm() -> None:
    network, (x, y) = Network(TASK), samples()
    before = network.weights.clone()
    private = PrivateNetwork(network, Clipping(1.0, 1.0), 4.0, source(), "head")
    Trainer(private, x, y, Sgd(steps=3), draw_poisson_batches(len(y), 0.5, source(1)), moves="head").run(3)
    head = network.get_slice("head")
    assert torch.equal(before[: head.start], network.weights[: head.start])
    assert not torch.equal(before[head], network.weights[head])


def test_the_noise_is_normal() -> None:
    z = draw_normal(200_000, source())
    assert abs(z.mean()) < 5 / np.sqrt(len(z))
    assert abs(z.var() - 1) < 5 * np.sqrt(2 / len(z))
    assert abs((z**4).mean() - 3) < 5 * np.sqrt(96 / len(z))
    assert abs(np.mean(np.abs(z) > 3) - 0.0027) < 0.0006
    u = draw_uniform(100_000, source())
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005  # noqa: PT018


def test_every_sample_is_in_a_batch_with_the_same_probability_whoever_else_is() -> None:
    batches = draw_poisson_batches(5, 0.3, source())
    drawn = np.zeros((20_000, 5))
    for row in drawn:
        row[next(batches)] = 1
    np.testing.assert_allclose(drawn.mean(axis=0), 0.3, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(5), atol=0.04)
    assert {0, 1, 2, 3} <= set(drawn.sum(axis=1).astype(int)), "of all sizes, also none"
    assert len(next(draw_poisson_batches(5, 1.0, source()))) == 5
