"""Optimisers against torch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedge.models.optimizer import Adam, ClippedMomentum, Momentum, Shifted, make_optimizer
from fedge.steps.sgd import Sgd

GRADIENTS = torch.from_numpy(np.random.default_rng(0).standard_normal((50, 5), np.float32))
START = torch.linspace(-1, 1, 5)
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "nesterov": {"nesterov": True},
    "clipped": {"clip_norm": 1.5},
    "nesterov, clipped": {"nesterov": True, "clip_norm": 1.5},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "adam, clipped": {"optimizer": "adam", "clip_norm": 1.5},
    "adamw, clipped": {"optimizer": "adamw", "clip_norm": 1.5},
}


def make_torchs(weights: torch.Tensor, sgd: Sgd) -> torch.optim.Optimizer:
    given = {"lr": sgd.learning_rate, "weight_decay": sgd.weight_decay}
    if sgd.optimizer:
        kind = torch.optim.AdamW if sgd.optimizer == "adamw" else torch.optim.Adam
        return kind([weights], betas=(sgd.momentum, 0.999), **given)
    return torch.optim.SGD([weights], momentum=sgd.momentum, nesterov=bool(sgd.nesterov), **given)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("name", RECIPES)
def test_fifty_steps_are_those_of_torch(name: str, mu: float, decay: float) -> None:
    sgd = Sgd(learning_rate=0.1, momentum=0.9, proximal_mu=mu, weight_decay=decay, **RECIPES[name])
    anchor = torch.ones(5)
    expected = START.clone().requires_grad_()
    torchs = make_torchs(expected, sgd)
    weights, gradient, ours = START.clone(), torch.zeros(5), make_optimizer(sgd, anchor)
    for own in GRADIENTS:
        expected.grad = own + mu * (expected.detach() - anchor)
        if sgd.clip_norm:
            torch.nn.utils.clip_grad_norm_([expected], sgd.clip_norm)
        torchs.step()
        ours.begin(gradient)
        gradient += own
        ours.step(weights, gradient)
    torch.testing.assert_close(weights, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_models_side_by_side_move_as_each_alone(name: str) -> None:
    sgd = Sgd(learning_rate=0.1, weight_decay=0.1, **RECIPES[name])
    rows = torch.stack([GRADIENTS, 3 * GRADIENTS, -GRADIENTS.flip(0)], dim=1)
    together = torch.stack([START, 2 * START, START])
    alone, gradient, ours = together.clone(), torch.zeros(3, 5), make_optimizer(sgd)
    for own in rows:
        ours.begin(gradient)
        gradient += own
        ours.step(together, gradient)
    for k in range(3):
        single, each = torch.zeros(5), make_optimizer(sgd)
        for own in rows[:, k]:
            each.begin(single)
            single += own
            each.step(alone[k], single)
    torch.testing.assert_close(together, alone)


def test_each_recipe_has_its_optimiser() -> None:
    kinds = {name: type(make_optimizer(Sgd(**given))) for name, given in RECIPES.items()}
    assert kinds["sgd"] is Momentum
    assert {kinds["nesterov"], kinds["clipped"]} == {ClippedMomentum}
    assert {kinds["adam"], kinds["adamw"]} == {Adam}
    assert type(make_optimizer(Sgd(optimizer="sgd", nesterov=False))) is Momentum


def test_a_short_gradient_is_not_clipped() -> None:
    weights, gradient = torch.zeros(2), torch.tensor([0.3, 0.4])
    make_optimizer(Sgd(learning_rate=1.0, momentum=0.0, clip_norm=0.6)).step(weights, gradient)
    assert weights.tolist() == pytest.approx([-0.3, -0.4])


def test_the_first_step_of_adam_is_the_learning_rate_in_each_direction() -> None:
    weights, gradient = torch.zeros(3), torch.tensor([5.0, -0.01, 0.0])
    make_optimizer(Sgd(learning_rate=0.1, optimizer="adam")).step(weights, gradient)
    assert weights.tolist() == pytest.approx([-0.1, 0.1, 0.0], abs=1e-5)


def test_the_worked_proximal_step() -> None:
    weights, gradient = torch.tensor([1.0, 2, -1]), torch.tensor([0.5, -0.5, 0])
    sgd = Sgd(learning_rate=0.1, momentum=0.0, proximal_mu=0.5)
    Momentum(sgd, anchor=torch.tensor([0.0, 2, 1])).step(weights, gradient)
    assert weights.tolist() == pytest.approx([0.9, 2.05, -0.9])


@pytest.mark.parametrize("name", RECIPES)
def test_without_a_proximal_term_there_is_no_pull(name: str) -> None:
    weights, gradient = START.clone(), torch.zeros(5)
    make_optimizer(Sgd(learning_rate=1.0, **RECIPES[name]), anchor=torch.ones(5)).step(weights, gradient)
    assert torch.equal(weights, START)


@pytest.mark.parametrize("name", RECIPES)
def test_shifted_gradients_are_those_of_a_loss_with_a_linear_term(name: str) -> None:
    """Momentum, too, is of the sum."""
    sgd, shift = Sgd(learning_rate=0.1, momentum=0.9, **RECIPES[name]), torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    moved = []
    for optimizer, more in ((Shifted(make_optimizer(sgd), shift), 0), (make_optimizer(sgd), shift)):
        weights, gradient = START.clone(), torch.zeros(5)
        for own in GRADIENTS[:10]:
            optimizer.begin(gradient)
            gradient += own + more
            optimizer.step(weights, gradient)
        moved.append(weights)
    torch.testing.assert_close(*moved)
