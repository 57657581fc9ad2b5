"""The attacks of `benchmarks/leaks.py` succeed where they must, so that what they do not find means something."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.leaks import (
    alignment,
    inputs_by_matching,
    inputs_of_linear,
    loss_drop,
    nearest,
    on_simplex,
    psnr,
    sample_gradients,
    separation,
    shares_by_imitation,
    shares_in_head,
    shares_in_mixture,
    shares_of,
)
from fedge.steps.sgd import Sgd

N_CLASSES = 4


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def mlp():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, N_CLASSES))


def samples(rng, n):
    return rng.random((n, 1, 3, 4), np.float32), rng.integers(0, N_CLASSES, n)


def change_of(module, x, y, sgd):
    """What plain SGD on all samples at once changes, by name; the module is left with its weights."""
    start = {name: own.detach().clone() for name, own in module.named_parameters()}
    optimiser = torch.optim.SGD(module.parameters(), lr=sgd.learning_rate, momentum=sgd.momentum)
    for _ in range(sgd.steps):
        optimiser.zero_grad()
        cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimiser.step()
    change = {name: own.detach() - start[name] for name, own in module.named_parameters()}
    module.load_state_dict(start)
    return change


def flat(change):
    return torch.cat([own.reshape(-1) for own in change.values()]).numpy()


def outputs_of(module, x):
    with torch.no_grad():
        return torch.softmax(module(torch.from_numpy(x)), dim=1).numpy()


def test_values_become_shares():
    found = on_simplex(np.array([[3.0, 1.0, -2.0], [0.0, -1.0, 0.0]]))
    np.testing.assert_allclose(found, [[0.75, 0.25, 0], [1 / 3] * 3])


def test_a_mean_over_samples_gives_the_shares_of_its_classes(rng):
    of_classes = rng.random((N_CLASSES, 9))
    shares = np.array([0.5, 0.2, 0.0, 0.3])
    np.testing.assert_allclose(shares_in_mixture(shares @ of_classes, of_classes), shares, atol=1e-12)


def test_one_step_of_the_heads_bias_gives_the_label_shares(rng, mlp):
    """The known samples are the device's own here, so P is exact."""
    x, y = samples(rng, 40)
    sgd = Sgd(steps=1, learning_rate=0.1)
    outputs = np.stack([outputs_of(mlp, x[y == c]).mean(axis=0) for c in range(N_CLASSES)])
    found = shares_in_head(change_of(mlp, x, y, sgd)["3.bias"].numpy(), outputs, sgd)
    np.testing.assert_allclose(found, shares_of(y, N_CLASSES), atol=1e-5)


def test_several_small_steps_with_momentum_give_them_nearly(rng, mlp):
    x, y = samples(rng, 40)
    sgd = Sgd(steps=10, learning_rate=1e-4, momentum=0.9)
    outputs = np.stack([outputs_of(mlp, x[y == c]).mean(axis=0) for c in range(N_CLASSES)])
    found = shares_in_head(change_of(mlp, x, y, sgd)["3.bias"].numpy(), outputs, sgd)
    np.testing.assert_allclose(found, shares_of(y, N_CLASSES), atol=0.01)


def test_devices_made_up_teach_to_read_updates_that_depend_on_the_shares_linearly(rng):
    taught, asked = rng.dirichlet(np.ones(N_CLASSES), 200), rng.dirichlet(np.ones(N_CLASSES), 5)
    mixing = rng.normal(size=(N_CLASSES, 30))
    found = shares_by_imitation(taught @ mixing, taught, asked @ mixing)
    np.testing.assert_allclose(found, asked, atol=0.01)


def test_the_first_layers_gradient_of_one_sample_is_the_sample(rng, mlp):
    x, y = samples(rng, 1)
    change = change_of(mlp, x, y, Sgd(steps=1))
    found = inputs_of_linear(change["1.weight"].numpy(), change["1.bias"].numpy())
    assert len(found) > 5
    np.testing.assert_allclose(found, np.repeat(x.reshape(1, -1), len(found), axis=0), atol=1e-4)


def test_of_two_samples_units_that_see_one_alone_give_it(rng, mlp):
    x, y = samples(rng, 2)
    with torch.no_grad():
        mlp[1].weight[:2] = 0
        for unit in (0, 1):  # fires for one of the two
            other = x[1 - unit].reshape(-1)
            mlp[1].weight[unit] = torch.from_numpy(x[unit].reshape(-1) - other)
            between = (x[unit] + x[1 - unit]).reshape(-1) / 2
            mlp[1].bias[unit] = -float(mlp[1].weight[unit] @ torch.from_numpy(between))
    change = change_of(mlp, x, y, Sgd(steps=1))
    found = inputs_of_linear(change["1.weight"].numpy(), change["1.bias"].numpy())
    assert nearest(found, x).max() < 1e-8


def test_matching_finds_a_single_sample_up_to_noise(rng, mlp):
    x, y = samples(rng, 1)
    change = change_of(mlp, x, y, Sgd(steps=1))
    found = inputs_by_matching(mlp, change, y, x.shape[1:], between=(0.0, 1.0), steps=400, seed=1)
    assert psnr(nearest(found, x), (0.0, 1.0)) > 25
    assert psnr(nearest(rng.random((1, 1, 3, 4)), x), (0.0, 1.0)) < 15


def test_nearest_is_the_smallest_squared_error_of_each_sample():
    found, real = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 0.9], [0.0, 0.0]])
    np.testing.assert_allclose(nearest(found, real), [0.5, 0.005, 0])


def test_psnr_is_a_mean_in_decibels_of_the_range():
    assert psnr(np.array([0.01, 0.0001]), (0.0, 1.0)) == pytest.approx(30)
    assert psnr(np.array([0.04]), (-1.0, 1.0)) == pytest.approx(20)


def test_members_of_an_overfitted_model_are_told_apart(rng, mlp):
    """Labels are drawn at random: what is learned of one sample says little of another."""
    x, y = samples(rng, 60)
    learned, others = (x[:20], y[:20]), (x[20:], y[20:])
    before = [mlp(torch.from_numpy(own[0])).detach().numpy() for own in (learned, others)]
    change = change_of(mlp, *learned, Sgd(steps=1000, learning_rate=0.1))
    with torch.no_grad():
        for name, own in mlp.named_parameters():
            own += change[name]
    after = [mlp(torch.from_numpy(own[0])).detach().numpy() for own in (learned, others)]
    drops = [
        loss_drop(*logits, own[1])
        for logits, own in zip(zip(before, after, strict=True), (learned, others), strict=True)
    ]
    assert separation(*drops)["auc"] > 0.9  # a quarter of the others have a label that was learned by chance


def test_a_single_samples_update_points_against_its_own_gradient_alone(rng, mlp):
    x, y = samples(rng, 10)
    change = flat(change_of(mlp, x[:1], y[:1], Sgd(steps=1)))
    aligned = alignment(sample_gradients(mlp, (x, y)), change)
    assert aligned[0] == pytest.approx(1)
    assert aligned[1:].max() < 0.999


def test_scores_of_one_kind_are_not_told_apart(rng):
    scores = rng.normal(size=2000)
    found = separation(scores[:1000], scores[1000:])
    assert found["auc"] == pytest.approx(0.5, abs=0.03)
    assert found["true_positives"] == pytest.approx(0.05, abs=0.02)
    assert separation(np.ones(3), np.zeros(3)) == {"auc": 1.0, "true_positives": 1.0}
