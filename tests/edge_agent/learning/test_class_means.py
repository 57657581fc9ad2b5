"""Own class means: the worked example of fedge.md section 16, and what they are made of."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from edge_agent.learning.class_means import MOST_SAMPLES, compute_class_means, draw_samples, make_means_loss
from fedge.models.training import PADDING, draw_batches

FEATURES = torch.tensor([[1.0, 0.0], [3.0, 2.0], [0.0, 4.0]])
LABELS = torch.tensor([0, 0, 1])
MEANS = torch.tensor([[2.0, 1.0], [0.0, 4.0], [math.nan, math.nan]])


def test_worked_means() -> None:
    torch.testing.assert_close(compute_class_means(FEATURES, LABELS, 3), MEANS, equal_nan=True)
    padded = torch.cat([FEATURES, torch.full((1, 2), 9.0)]), torch.tensor([*LABELS, PADDING])
    torch.testing.assert_close(compute_class_means(*padded, 3), MEANS, equal_nan=True)
    both = compute_class_means(torch.stack([FEATURES, FEATURES.flip(0)]), torch.stack([LABELS, LABELS.flip(0)]), 3)
    torch.testing.assert_close(both, torch.stack([MEANS, MEANS]), equal_nan=True)


def test_worked_loss() -> None:
    """A head of zeros: its cross-entropy is ln 3 and says nothing to the features, so what is left is the pull."""
    head = nn.Linear(2, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    moved = torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 2.0]], requires_grad=True)
    with make_means_loss(head, 0.1) as loss:
        found = loss(nn.Sequential(nn.Identity(), head), moved, LABELS, MEANS)
    assert math.isclose(found.item(), math.log(3) + 0.1, abs_tol=1e-6)
    found.backward()
    torch.testing.assert_close(moved.grad, torch.tensor([[0.0, -1.0], [1.0, 0.0], [0.0, -2.0]]) * 0.1 / 3)
    assert not head._forward_pre_hooks


def test_a_class_without_a_mean_pulls_nothing_and_padding_counts_not() -> None:
    head = nn.Linear(2, 3)
    more = torch.tensor([[2.0, 0.0], [5.0, 5.0], [7.0, 7.0]], requires_grad=True)
    entropy = nn.functional.cross_entropy(head(more[:2]), torch.tensor([0, 2]))
    with make_means_loss(head, 1.0) as loss:
        found = loss(nn.Sequential(nn.Identity(), head), more, torch.tensor([0, 2, PADDING]), MEANS)
    assert math.isclose(found.item(), entropy.item() + 1 / 4, rel_tol=1e-5)  # of n = 2 samples with D = 2 features
    found.backward()
    assert more.grad is not None
    assert bool(more.grad.isfinite().all())
    assert not more.grad[2].any()


def test_means_are_of_the_samples_that_training_sees_first() -> None:
    n = 3 * MOST_SAMPLES
    x = np.arange(n, dtype=np.float32)[:, None]
    found, labels = draw_samples(x, np.arange(n), np.random.default_rng(7))
    drawn = next(draw_batches(n, MOST_SAMPLES, np.random.default_rng(7)))
    np.testing.assert_array_equal(found[:, 0], drawn)
    np.testing.assert_array_equal(labels, drawn)
