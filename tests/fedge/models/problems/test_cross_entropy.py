"""The losses of a recipe against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedge.models.problems.cross_entropy import (
    CrossEntropy,
    compute_class_weights,
    cross_entropy,
    make_loss,
    make_loss_of,
)
from fedge.steps.sgd import Sgd

MODULE = nn.Linear(4, 3)
X = torch.from_numpy(np.random.default_rng(0).standard_normal((12, 4), np.float32))
Y = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2])


def test_a_plain_recipe_has_plain_cross_entropy() -> None:
    assert make_loss(Sgd()) is cross_entropy
    assert make_loss_of(Sgd(optimizer="adam"), Y.numpy(), 3, torch.device("cpu")) is cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_loss_is_that_of_torch(smoothing: float, balanced: bool) -> None:
    given = {"label_smoothing": smoothing} | ({"class_weights": "balanced"} if balanced else {})
    weights = torch.tensor([12 / 3 / 6, 12 / 3 / 4, 12 / 3 / 2]) if balanced else None
    expected = nn.CrossEntropyLoss(weight=weights, label_smoothing=smoothing)(MODULE(X), Y)
    found = make_loss_of(Sgd(**given), Y.numpy(), 3, torch.device("cpu"))(MODULE, X, Y)
    torch.testing.assert_close(found, expected)


def test_all_classes_of_a_device_count_the_same_and_others_not_at_all() -> None:
    y = np.array([0, 0, 0, 3])
    weights = compute_class_weights(y, 5)
    assert weights.tolist() == pytest.approx([4 / 2 / 3, 0, 0, 4 / 2 / 1, 0])
    assert weights[y].mean() == pytest.approx(1)
    assert compute_class_weights(np.zeros(0, np.int64), 2).tolist() == [0, 0]


def test_samples_that_fill_up_a_batch_count_nowhere() -> None:
    logits, weights = MODULE(X), torch.tensor([1.0, 2.0, 3.0])
    padded = torch.cat([Y[:5], torch.full((7,), -100)])
    loss = CrossEntropy(0.1)
    torch.testing.assert_close(loss(logits, padded, weights), loss(logits[:5], Y[:5], weights))
