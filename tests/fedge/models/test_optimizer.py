"""SGD with momentum against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedge.models.optimizer import Momentum
from fedge.steps.sgd import Sgd

GRADIENTS = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 5), np.float32))
START = torch.linspace(-1, 1, 5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_steps_are_those_of_torch(mu: float, decay: float) -> None:
    sgd = Sgd(learning_rate=0.1, momentum=0.9, proximal_mu=mu, weight_decay=decay)
    anchor = torch.ones(5)
    expected = START.clone().requires_grad_()
    torchs = torch.optim.SGD([expected], lr=0.1, momentum=0.9, weight_decay=decay)
    weights, gradient, ours = START.clone(), torch.zeros(5), Momentum(sgd, anchor)
    for own in GRADIENTS:
        expected.grad = own + mu * (expected.detach() - anchor)
        torchs.step()
        ours.begin(gradient)
        gradient += own
        ours.step(weights, gradient)
    torch.testing.assert_close(weights, expected.detach())


def test_the_worked_proximal_step() -> None:
    weights, gradient = torch.tensor([1.0, 2, -1]), torch.tensor([0.5, -0.5, 0])
    sgd = Sgd(learning_rate=0.1, momentum=0.0, proximal_mu=0.5)
    Momentum(sgd, anchor=torch.tensor([0.0, 2, 1])).step(weights, gradient)
    assert weights.tolist() == pytest.approx([0.9, 2.05, -0.9])


def test_without_a_proximal_term_there_is_no_pull() -> None:
    weights, gradient = START.clone(), torch.zeros(5)
    Momentum(Sgd(learning_rate=1.0), anchor=torch.ones(5)).step(weights, gradient)
    assert torch.equal(weights, START)
